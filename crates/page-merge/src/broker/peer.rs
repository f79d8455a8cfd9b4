//! The process at the other end of a connection.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::process::{Pid, PidfdFlags, pidfd_open};

/// A connected process. Its mappings last until its end, whatever happens to the connection.
#[derive(Debug)]
pub(super) struct Peer {
    pub(super) pid: i32,
    pub(super) user: u32,
    process: OwnedFd,
}

impl Peer {
    /// The process that connected `socket`. Fails if it has ended, or lives in a pid namespace that
    /// is not visible here.
    ///
    /// If it ends and another process gets its number before this call, the other's life counts
    /// instead: shares are then kept for too long, but never freed too early.
    pub(super) fn of(socket: impl AsFd) -> io::Result<Self> {
        let credentials = rustix::net::sockopt::socket_peercred(socket)?;
        Self::new(credentials.pid, credentials.uid.as_raw())
    }

    /// The process that has sent a message over this one's connection, which was passed to it. As
    /// to ends and numbers of processes, it is as for [`of`](Self::of).
    pub(super) fn sender(&self, pid: Option<Pid>) -> io::Result<Self> {
        let unknown = || io::Error::new(io::ErrorKind::NotFound, "its process is not visible");
        Self::new(pid.ok_or_else(unknown)?, self.user)
    }

    fn new(pid: Pid, user: u32) -> io::Result<Self> {
        let process = pidfd_open(pid, PidfdFlags::empty())?;
        Ok(Self { pid: pid.as_raw_nonzero().get(), user, process })
    }
}

impl AsFd for Peer {
    /// Readable when the process has ended. Its memory is gone then: a process frees it before it
    /// can be waited for (Linux kernel/exit.c, do_exit).
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.process.as_fd()
    }
}
