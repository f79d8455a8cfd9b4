//! Processes that go on in the program of the one that has forked them.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd, OwnedFd, RawFd};

/// Which process it is after a fork.
pub(crate) enum Side {
    Old { new: libc::pid_t },
    New,
}

/// fork(2), with what the C library does for its allocator.
///
/// # Safety
/// The new process takes no lock that another thread may hold now.
pub(crate) unsafe fn fork() -> io::Result<Side> {
    // SAFETY: as the caller vouches for; all else that the new process uses is this thread's.
    match unsafe { libc::fork() } {
        0 => Ok(Side::New),
        -1 => Err(io::Error::last_os_error()),
        new => Ok(Side::Old { new }),
    }
}

/// Closes all descriptors from 3 on but these.
pub(crate) fn close_others(keep: &[RawFd]) {
    let mut keep: Vec<u32> = keep.iter().filter_map(|&fd| u32::try_from(fd).ok()).collect();
    keep.sort_unstable();
    keep.dedup();
    let mut first = 3;
    for next in keep.into_iter().chain([u32::MAX]) {
        if next > first {
            // SAFETY: closes descriptors whose owners are never used in this process.
            unsafe { libc::syscall(libc::SYS_close_range, first, next - 1, 0) };
        }
        first = first.max(next.saturating_add(1));
    }
}

/// Standard input, output and error become `null`; with `error`, the last one becomes that.
pub(crate) fn redirect(null: &File, error: Option<&OwnedFd>) -> io::Result<()> {
    put_in_place(null.as_fd(), libc::STDIN_FILENO)?;
    put_in_place(null.as_fd(), libc::STDOUT_FILENO)?;
    put_in_place(error.map_or(null.as_fd(), |error| error.as_fd()), libc::STDERR_FILENO)
}

/// Makes the descriptor `number` refer to `file`.
pub(crate) fn put_in_place(file: BorrowedFd<'_>, number: RawFd) -> io::Result<()> {
    // SAFETY: the number is that of a standard stream, or of a descriptor that goes on to belong to
    // its owner, which expects that it refers to another file from now on.
    match unsafe { libc::dup3(file.as_raw_fd(), number, libc::O_CLOEXEC) } {
        -1 => Err(io::Error::last_os_error()),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;

    use super::*;

    #[test]
    fn only_these_descriptors_stay_open() {
        let (keep, close): (Vec<_>, Vec<_>) = (0..9)
            .map(|_| tempfile::tempfile().unwrap())
            .partition(|file| file.as_raw_fd().rem_euclid(2) == 0);
        let keep: Vec<_> = keep.iter().map(AsRawFd::as_raw_fd).collect();
        let is_open = |fd: RawFd| {
            // SAFETY: asks for the flags of a number, which need not be a descriptor.
            unsafe { libc::fcntl(fd, libc::F_GETFD) != -1 }
        };
        // SAFETY: the new process makes system calls only, and ends.
        let child = unsafe { libc::fork() };
        if child == 0 {
            close_others(&keep);
            let kept = keep.iter().all(|&fd| is_open(fd));
            let closed = close.iter().all(|file| !is_open(file.as_raw_fd()));
            // SAFETY: ends the process without running any more of its code.
            unsafe { libc::_exit(i32::from(!(kept && closed && is_open(2)))) };
        }
        let mut status = 1;
        // SAFETY: waits for the child, and `status` is valid for the result.
        let waited = unsafe { libc::waitpid(child, &raw mut status, 0) };
        assert_eq!((waited, status), (child, 0));
    }
}
