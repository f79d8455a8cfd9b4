//! A lock on a name in a directory, for users with write permission on the directory.
//!
//! flock(2) on the directory would not do, because it needs only read permission: on `/run` or
//! `/tmp` any user of the host could hold it for ever.

use std::ffi::OsString;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, Mode, OFlags};
use rustix::io::Errno;

/// Maximum wait for another process that takes the same name, which holds the lock for a few system
/// calls.
pub(crate) const LIMIT: Duration = Duration::from_secs(5);
/// Pause between two attempts.
const PAUSE: Duration = Duration::from_millis(2);

/// The lock. Dropping it removes its file and then releases it.
#[derive(Debug)]
pub(crate) struct NameLock {
    path: PathBuf,
    _file: OwnedFd,
}

impl NameLock {
    /// The lock file of `name`: `.NAME.lock` in the same directory.
    pub(crate) fn path(name: &Path) -> PathBuf {
        let mut file_name = OsString::from(".");
        file_name.push(name.file_name().unwrap_or_default());
        file_name.push(".lock");
        name.with_file_name(file_name)
    }

    /// Locks `name`, waiting up to `limit`.
    ///
    /// # Errors
    /// [`Errno::WOULDBLOCK`] if another process holds the lock until then; otherwise the error of
    /// creating the file.
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

    /// Locks the opened file and checks that it still has its name: the previous holder may have
    /// removed it after it was opened, and an unnamed file protects nothing.
    fn lock(file: OwnedFd, path: &Path) -> Result<OwnedFd, Errno> {
        match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
            // The file system has no locks: processes that start at the same time are not
            // serialized.
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
        // While the lock is held, so that a process that has opened this file sees it unnamed.
        if let Err(errno) = rustix::fs::unlink(&self.path) {
            tracing::warn!("cannot remove the lock file {:?}: {errno}", self.path);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_holder_at_a_time_and_no_file_is_left() {
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
    fn the_wait_for_a_held_lock_is_limited() {
        let directory = tempfile::tempdir().unwrap();
        let name = directory.path().join("a.sock");
        let held = NameLock::take(&name, LIMIT).unwrap();
        let late = NameLock::take(&name, Duration::from_millis(20));
        assert_eq!(late.unwrap_err(), Errno::WOULDBLOCK);
        drop(held);
        drop(NameLock::take(&name, LIMIT).unwrap());
    }

    #[test]
    fn a_lock_file_removed_after_opening_is_not_a_lock() {
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
    fn the_lock_file_of_a_killed_process_can_be_locked() {
        let directory = tempfile::tempdir().unwrap();
        let name = directory.path().join("a.sock");
        std::fs::write(NameLock::path(&name), "").unwrap();
        drop(NameLock::take(&name, LIMIT).unwrap());
        assert!(!NameLock::path(&name).exists());
    }
}
