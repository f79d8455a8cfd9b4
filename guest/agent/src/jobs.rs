//! Commands that run in a process of their own, so that its memory is really freed at the end.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Instant;

use rustix::process::{Pid, Signal, WaitOptions, kill_process, waitpid};
use serde_json::Value;

/// Longest result of a job in bytes.
const RESULT_LIMIT_BYTES: u64 = 1 << 20;

/// A command that runs.
pub struct Job {
    /// Number of the command.
    pub id: u64,
    pid: Pid,
    result: OwnedFd,
    started: Instant,
}

/// How a job ended.
pub struct JobEnd {
    /// Time from its start to the end of its process, in ms.
    pub elapsed_ms: u64,
    /// Its result, or why it failed.
    pub result: Result<Value, String>,
}

impl Job {
    /// Runs `work` in a child process.
    pub fn start(id: u64, work: impl FnOnce() -> Result<Value, String>) -> io::Result<Self> {
        let (result, sender) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)?;
        let started = Instant::now();
        let parent = rustix::process::getpid();
        // SAFETY: the agent has a single thread, so that the child finds no lock held by another.
        match unsafe { libc::fork() } {
            -1 => Err(io::Error::last_os_error()),
            0 => {
                drop(result);
                run_child(parent, sender, work)
            }
            pid => {
                let pid = Pid::from_raw(pid).ok_or(io::ErrorKind::InvalidData)?;
                Ok(Self { id, pid, result, started })
            }
        }
    }

    /// Readable when the job is about to end.
    pub fn descriptor(&self) -> BorrowedFd<'_> {
        self.result.as_fd()
    }

    /// Kills the job's process.
    pub fn kill(&self) {
        let _ = kill_process(self.pid, Signal::KILL);
    }

    /// Waits for the job's end.
    pub fn finish(self) -> JobEnd {
        let mut text = Vec::new();
        let read = File::from(self.result).take(RESULT_LIMIT_BYTES).read_to_end(&mut text);
        let status = loop {
            match waitpid(Some(self.pid), WaitOptions::empty()) {
                Err(rustix::io::Errno::INTR) => {}
                other => break other,
            }
        };
        let elapsed_ms = self.started.elapsed().as_millis() as u64;
        let result = match status {
            Ok(Some((_, status))) => match status.terminating_signal() {
                Some(signal) => Err(format!("its process was ended by signal {signal}")),
                None => match read.map(|_| serde_json::from_slice::<Result<Value, String>>(&text)) {
                    Ok(Ok(result)) => result,
                    _ => Err("its process ended without a result".to_owned()),
                },
            },
            _ => Err("its process cannot be waited for".to_owned()),
        };
        JobEnd { elapsed_ms, result }
    }
}

/// Does the work and ends the process, without running anything that belongs to the parent.
fn run_child(parent: Pid, sender: OwnedFd, work: impl FnOnce() -> Result<Value, String>) -> ! {
    // A workload shall not outlive the agent where that is an ordinary process.
    let _ = rustix::process::set_parent_process_death_signal(Some(Signal::KILL));
    // The agent may have ended before the line above took effect.
    if rustix::process::getppid() != Some(parent) {
        end_child(1);
    }
    // The out-of-memory killer shall take the workload; process 1 cannot be taken.
    let _ = std::fs::write("/proc/self/oom_score_adj", "1000");
    let result = work();
    let sent = serde_json::to_vec(&result).map(|text| File::from(sender).write_all(&text));
    end_child(i32::from(!matches!(sent, Ok(Ok(())))))
}

fn end_child(code: i32) -> ! {
    // SAFETY: ends the process at once; the parent's exit handlers and buffers stay untouched.
    unsafe { libc::_exit(code) }
}
