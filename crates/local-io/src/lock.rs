//! A lock on a name in a directory that only those who may write to the directory can hold.
//!
//! flock(2) on the directory itself would do, but takes read permission only: on `/run` or `/tmp`
//! any user of the host could hold it for ever.

use std::ffi::OsString;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, Mode, OFlags};
use rustix::io::Errno;

/// Longest wait for another process that takes the same name. It needs the lock for some system
/// calls.
pub(crate) const LIMIT: Duration = Duration::from_secs(5);
/// Between two attempts.
const PAUSE: Duration = Duration::from_millis(2);

/// The lock. Dropping it removes its file and releases it, in this order.
#[derive(Debug)]
pub(crate) struct NameLock {
    path: PathBuf,
    _file: OwnedFd,
}

impl NameLock {
    /// The file of the lock on `name`: `.NAME.lock` beside it.
    pub(crate) fn path(name: &Path) -> PathBuf {
        let mut file_name = OsString::from(".");
        file_name.push(name.file_name().unwrap_or_default());
        file_name.push(".lock");
        name.with_file_name(file_name)
    }

    /// Locks `name`, at most after `limit`.
    ///
    /// # Errors
    /// [`Errno::WOULDBLOCK`] if another process holds the lock for as long, else the reason for
    /// which the file cannot be created.
    pub(crate) fn take(name: &Path, limit: Duration) -> Result<Self, Errno> {
        let path = Self::path(name);
        let deadline = Instant::now() + limit;
        loop {
            match Self::open(&path).and_then(|file| Self::lock(file, &path)) {
                Err(Errno::WOULDBLOCK) if Instant::now() < deadline => std::thread::sleep(PAUSE),
                Ok(file) => return Ok(Self { path, _file: file }),
                Err(errno) => return Err(errno),
            }
        }
    }

    fn open(path: &Path) -> Result<OwnedFd, Errno> {
        // NONBLOCK: a FIFO of this name must not block the open.
        let flags =
            OFlags::RDWR | OFlags::CREATE | OFlags::CLOEXEC | OFlags::NOFOLLOW | OFlags::NONBLOCK;
        rustix::fs::open(path, flags, Mode::RUSR | Mode::WUSR)
    }

    /// Locks the opened file if it still has the name: the holder before may have removed it since
    /// it was opened, and a file without the name protects nothing.
    fn lock(file: OwnedFd, path: &Path) -> Result<OwnedFd, Errno> {
        match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
            // A file system without locks, where two processes that start at once are not told
            // apart.
            Ok(()) | Err(Errno::NOLCK | Errno::OPNOTSUPP) => {}
            Err(errno) => return Err(errno),
        }
        let (locked, named) = (rustix::fs::fstat(&file)?, rustix::fs::lstat(path));
        match named {
            Ok(named) if (named.st_dev, named.st_ino) == (locked.st_dev, locked.st_ino) => Ok(file),
            Ok(_) | Err(Errno::NOENT) => Err(Errno::WOULDBLOCK),
            Err(errno) => Err(errno),
        }
    }
}

impl Drop for NameLock {
    fn drop(&mut self) {
        // While it is held: any process that has opened this file finds out that it lost its name.
        if let Err(errno) = rustix::fs::unlink(&self.path) {
            tracing::warn!("cannot remove the lock file {:?}: {errno}", self.path);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_at_a_time_and_nothing_is_left() {
        let directory = tempfile::tempdir().unwrap();
        let name = directory.path().join("a.sock");
        let holders = std::sync::atomic::AtomicU32::new(0);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..20 {
                        let lock = NameLock::take(&name, LIMIT).unwrap();
                        assert_eq!(holders.fetch_add(1, std::sync::atomic::Ordering::SeqCst), 0);
                        holders.fetch_sub(1, std::sync::atomic::Ordering::SeqCst);
                        drop(lock);
                    }
                });
            }
        });
        assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 0);
    }

    #[test]
    fn a_lock_that_is_held_is_waited_for_with_a_limit() {
        let directory = tempfile::tempdir().unwrap();
        let name = directory.path().join("a.sock");
        let held = NameLock::take(&name, LIMIT).unwrap();
        let late = NameLock::take(&name, Duration::from_millis(20));
        assert_eq!(late.unwrap_err(), Errno::WOULDBLOCK);
        drop(held);
        drop(NameLock::take(&name, LIMIT).unwrap());
    }

    #[test]
    fn a_lock_file_that_was_removed_after_it_was_opened_locks_nothing() {
        let directory = tempfile::tempdir().unwrap();
        let name = directory.path().join("a.sock");
        let path = NameLock::path(&name);
        let late = NameLock::open(&path).unwrap();
        drop(NameLock::take(&name, LIMIT).unwrap());
        assert_eq!(NameLock::lock(late, &path).unwrap_err(), Errno::WOULDBLOCK);
        let late = NameLock::open(&path).unwrap();
        drop(NameLock::take(&name, LIMIT).unwrap());
        let _held = NameLock::take(&name, LIMIT).unwrap();
        assert_eq!(NameLock::lock(late, &path).unwrap_err(), Errno::WOULDBLOCK);
    }

    #[test]
    fn a_file_of_a_killed_process_is_no_obstacle() {
        let directory = tempfile::tempdir().unwrap();
        let name = directory.path().join("a.sock");
        std::fs::write(NameLock::path(&name), "").unwrap();
        drop(NameLock::take(&name, LIMIT).unwrap());
        assert!(!NameLock::path(&name).exists());
    }
}
