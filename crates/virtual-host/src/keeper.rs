//! The thread that owns the QEMU process.
//!
//! The kernel kills QEMU when the thread that started it ends (`PR_SET_PDEATHSIG`). A dedicated
//! thread therefore lives as long as the host, independent of the caller's. It also enforces the
//! host's time limit.

use std::ffi::OsString;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::process::{Child, ExitStatus};
use std::sync::mpsc::{self, Sender};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal, kill_process_group, pidfd_open};

use crate::console::Tail;
use crate::error::HostError;
use crate::qemu::{self, Files};

/// Reason of QEMU's end.
#[derive(Debug, Clone, Copy)]
pub enum End {
    /// It exited by itself.
    Exited(ExitStatus),
    /// Killed because the host reached its time limit.
    TimeLimit,
    /// Killed because the host was dropped.
    Killed,
}

/// Handle of the thread; dropping it kills QEMU and waits for its end.
#[derive(Debug)]
pub struct Keeper {
    process_id: u32,
    end: Arc<(Mutex<Option<End>>, Condvar)>,
    stop: Option<OwnedFd>,
    thread: Option<JoinHandle<()>>,
}

impl Keeper {
    /// Starts QEMU in a separate thread.
    pub fn start(
        program: PathBuf,
        arguments: Vec<OsString>,
        files: Files,
        tail: Tail,
        time_limit: Duration,
    ) -> Result<Self, HostError> {
        let deadline = Instant::now() + time_limit;
        let (stop_inside, stop) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)
            .map_err(|errno| HostError::io("cannot make a pipe")(errno.into()))?;
        let end = Arc::new((Mutex::new(None), Condvar::new()));
        let shared = Arc::clone(&end);
        let (sender, receiver) = mpsc::channel();
        let thread = thread::Builder::new()
            .name("qemu".to_owned())
            .spawn(move || {
                let Some((child, pidfd)) = start_child(&program, &arguments, files, &tail, &sender)
                else {
                    return;
                };
                let how = keep(child, &pidfd, &stop_inside, deadline);
                *shared.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(how);
                shared.1.notify_all();
            })
            .map_err(HostError::io("cannot start a thread"))?;
        let process_id = receiver
            .recv()
            .map_err(|_| HostError::Protocol("the thread that starts QEMU ended".to_owned()))??;
        Ok(Self { process_id, end, stop: Some(stop), thread: Some(thread) })
    }

    /// QEMU's process id.
    pub fn process_id(&self) -> u32 {
        self.process_id
    }

    /// Waits for QEMU's end.
    pub fn wait(&self, limit: Duration) -> Option<End> {
        let guard = self.end.0.lock().unwrap_or_else(PoisonError::into_inner);
        let (guard, _) = self
            .end
            .1
            .wait_timeout_while(guard, limit, |end| end.is_none())
            .unwrap_or_else(PoisonError::into_inner);
        *guard
    }
}

impl Drop for Keeper {
    fn drop(&mut self) {
        self.stop = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn start_child(
    program: &std::path::Path,
    arguments: &[OsString],
    files: Files,
    tail: &Tail,
    sender: &Sender<Result<u32, HostError>>,
) -> Option<(Child, OwnedFd)> {
    let spawned = qemu::spawn(program, arguments, &files);
    // QEMU has its own copies; these would keep the channel open after its end.
    drop(files);
    let result = spawned.and_then(|mut child| match watch(&mut child, tail) {
        Ok(pidfd) => Ok((child, pidfd)),
        Err(error) => {
            let _ = child.kill();
            let _ = child.wait();
            Err(HostError::io("cannot watch QEMU")(error))
        }
    });
    match result {
        Ok((child, pidfd)) => {
            let _ = sender.send(Ok(child.id()));
            Some((child, pidfd))
        }
        Err(error) => {
            let _ = sender.send(Err(error));
            None
        }
    }
}

fn watch(child: &mut Child, tail: &Tail) -> io::Result<OwnedFd> {
    if let Some(messages) = child.stderr.take() {
        tail.collect(messages)?;
    }
    Ok(pidfd_open(Pid::from_child(child), PidfdFlags::empty())?)
}

/// Waits until QEMU ends, the host is dropped or the deadline passes.
fn keep(mut child: Child, pidfd: &OwnedFd, stop: &OwnedFd, deadline: Instant) -> End {
    let how = loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let mut events = [
            PollFd::new(pidfd, PollFlags::IN),
            PollFd::from_borrowed_fd(stop.as_fd(), PollFlags::IN),
        ];
        let timeout =
            Timespec { tv_sec: left.as_secs() as i64, tv_nsec: i64::from(left.subsec_nanos()) };
        match poll(&mut events, Some(&timeout)) {
            Err(rustix::io::Errno::INTR) => {}
            Ok(0) => break End::TimeLimit,
            Ok(_) if !events[0].revents().is_empty() => break End::Exited(ExitStatus::default()),
            // The other end of the pipe was closed: the host was dropped.
            Ok(_) | Err(_) => break End::Killed,
        }
    };
    if !matches!(how, End::Exited(_)) {
        let _ = kill_process_group(Pid::from_child(&child), Signal::KILL);
    }
    match (child.wait(), how) {
        (Ok(status), End::Exited(_)) => End::Exited(status),
        (_, how) => how,
    }
}
