//! The process at the other end of a connection.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::process::{PidfdFlags, pidfd_open};

/// Who has connected. What it has mapped is mapped until its end, whatever becomes of the
/// connection.
#[derive(Debug)]
pub(super) struct Peer {
    pub(super) pid: i32,
    pub(super) user: u32,
    process: OwnedFd,
}

impl Peer {
    /// The process that connected `socket`. It fails if that has ended, or lives in a pid namespace
    /// that is not visible here.
    ///
    /// Should it end, and another process get its number, before this is called, then the other's
    /// life counts instead: shares are kept for too long then, and never given up too early.
    pub(super) fn of(socket: impl AsFd) -> io::Result<Self> {
        let credentials = rustix::net::sockopt::socket_peercred(socket)?;
        let process = pidfd_open(credentials.pid, PidfdFlags::empty())?;
        Ok(Self {
            pid: credentials.pid.as_raw_nonzero().get(),
            user: credentials.uid.as_raw(),
            process,
        })
    }
}

impl AsFd for Peer {
    /// Readable when the process has ended. Its memory is gone then: a process gives it up before
    /// it can be waited for (Linux kernel/exit.c, do_exit).
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.process.as_fd()
    }
}
