//! Processes that go on in the program of the one that has forked them.

use std::convert::Infallible;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd, OwnedFd, RawFd};
use std::thread;

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

/// fork(2) by a new thread, which takes the locks of the new process with `hold` first and goes on
/// there with `go_on`. Returns the new process to the old one.
///
/// So the new process has no thread-local values of the calling thread. Those can be secrets: the
/// standard library derives the seeds of all hash tables of a thread from one number that is drawn
/// at random at the first of them.
///
/// # Safety
/// The new process takes no lock that another thread may hold after `hold`.
pub(crate) unsafe fn fork_in_new_thread<H>(
    hold: impl FnOnce() -> H + Send,
    go_on: impl FnOnce(H) -> Infallible + Send,
) -> io::Result<libc::pid_t> {
    let work = || {
        let held = hold();
        // SAFETY: as the caller vouches for.
        match unsafe { fork() }? {
            Side::New => match go_on(held) {},
            Side::Old { new } => Ok(new),
        }
    };
    thread::scope(|scope| {
        let thread = thread::Builder::new().spawn_scoped(scope, work)?;
        thread.join().unwrap_or_else(|_panicked| Err(io::Error::other("the thread has panicked")))
    })
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
    use std::hash::{BuildHasher as _, RandomState};
    use std::io::{Read as _, Write as _};
    use std::os::fd::AsRawFd;

    use super::*;

    #[test]
    fn hash_tables_of_relatives_have_other_seeds() {
        let seed = || RandomState::new().hash_one(0);
        // This thread has drawn its number.
        let mut seen = std::collections::BTreeSet::from([seed(), seed()]);
        for _ in 0..4 {
            let (mut reader, mut writer) = io::pipe().unwrap();
            let go_on = |()| {
                let is_sent = writer.write_all(&seed().to_ne_bytes());
                // SAFETY: ends the process without running any more of its code.
                unsafe { libc::_exit(i32::from(is_sent.is_err())) }
            };
            // SAFETY: the new process takes no locks but the allocator's, of which the C library
            // takes care.
            unsafe { fork_in_new_thread(|| (), go_on) }.unwrap();
            let mut bytes = [0; 8];
            reader.read_exact(&mut bytes).unwrap();
            assert!(seen.insert(u64::from_ne_bytes(bytes)), "{seen:?}");
        }
    }

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
