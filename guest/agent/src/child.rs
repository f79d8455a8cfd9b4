//! Work in a separate process, so that all its memory is freed at the end.

use std::fs::File;
use std::io::{self, Read, Write};
use std::marker::PhantomData;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::panic::{AssertUnwindSafe, catch_unwind};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::pipe::{PipeFlags, pipe_with};
use rustix::process::{Pid, Signal, WaitOptions, getpid, getppid, kill_process, waitpid};
use serde::Serialize;
use serde::de::DeserializeOwned;

/// Maximum length of a result in bytes.
const RESULT_LIMIT_BYTES: u64 = 1 << 20;

/// A process that computes a result. It is killed when this process ends or this value is dropped.
#[derive(Debug)]
pub struct Child<T> {
    /// `None` after the process was reaped.
    pid: Option<Pid>,
    result: File,
    of: PhantomData<T>,
}

impl<T: Serialize + DeserializeOwned> Child<T> {
    /// Runs `work` in a child process. The calling process must have a single thread.
    pub fn start(work: impl FnOnce() -> Result<T, String>) -> io::Result<Self> {
        let (result, sender) = pipe_with(PipeFlags::CLOEXEC)?;
        let parent = getpid();
        // SAFETY: the process has a single thread (required above), so that no other thread holds a
        // lock in the child.
        match unsafe { libc::fork() } {
            -1 => Err(io::Error::last_os_error()),
            0 => {
                drop(result);
                run(parent, sender, work)
            }
            pid => {
                Ok(Self { pid: Pid::from_raw(pid), result: File::from(result), of: PhantomData })
            }
        }
    }

    /// Descriptor that becomes readable when the child is about to end.
    pub fn descriptor(&self) -> BorrowedFd<'_> {
        self.result.as_fd()
    }

    /// Whether the child has sent a result or ended without one.
    pub fn has_ended(&self) -> bool {
        let mut events = [PollFd::new(&self.result, PollFlags::IN)];
        poll(&mut events, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).is_ok_and(|ready| ready > 0)
    }

    /// Kills the process, which must still be waited for.
    pub fn kill(&self) {
        if let Some(pid) = self.pid {
            let _ = kill_process(pid, Signal::KILL);
        }
    }

    /// Waits for the child's end and returns its result or the reason of its failure.
    pub fn finish(mut self) -> Result<T, String> {
        let mut text = Vec::new();
        let read = (&self.result).take(RESULT_LIMIT_BYTES).read_to_end(&mut text);
        match self.pid.take().map(wait) {
            Some(Ok(Some((_, status)))) => match status.terminating_signal() {
                Some(signal) => Err(format!("its process was killed by signal {signal}")),
                None => match read.map(|_| serde_json::from_slice::<Result<T, String>>(&text)) {
                    Ok(Ok(result)) => result,
                    _ => Err("its process ended without a result".to_owned()),
                },
            },
            _ => Err("its process cannot be waited for".to_owned()),
        }
    }
}

impl<T> Drop for Child<T> {
    fn drop(&mut self) {
        if let Some(pid) = self.pid.take() {
            let _ = kill_process(pid, Signal::KILL);
            let _ = wait(pid);
        }
    }
}

fn wait(pid: Pid) -> rustix::io::Result<Option<(Pid, rustix::process::WaitStatus)>> {
    loop {
        match waitpid(Some(pid), WaitOptions::empty()) {
            Err(rustix::io::Errno::INTR) => {}
            other => return other,
        }
    }
}

/// Does the work and ends the process, without running any code of the parent.
fn run<T: Serialize>(parent: Pid, sender: OwnedFd, work: impl FnOnce() -> Result<T, String>) -> ! {
    // A workload must not outlive its parent if that is an ordinary process.
    let _ = rustix::process::set_parent_process_death_signal(Some(Signal::KILL));
    // The parent may have ended before the line above took effect.
    if getppid() != Some(parent) {
        end(1);
    }
    // The OOM killer should select the workload; it cannot kill process 1.
    let _ = std::fs::write("/proc/self/oom_score_adj", "1000");
    let result =
        catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|_| Err("it has panicked".to_owned()));
    let sent = serde_json::to_vec(&result).map(|text| File::from(sender).write_all(&text));
    end(i32::from(!matches!(sent, Ok(Ok(())))))
}

fn end(code: i32) -> ! {
    // SAFETY: ends the process at once, without the parent's exit handlers and buffers.
    unsafe { libc::_exit(code) }
}
