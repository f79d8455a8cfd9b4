//! Opening and locking images.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::fs::{FileType, FlockOperation, Stat};
use thiserror::Error;

use crate::config::Switch;

/// Time for which a block device that another process has locked is tried again: udev locks each
/// one for a moment while it reads its tables (systemd's "Locking Block Device Access").
const LOCK_PATIENCE: Duration = Duration::from_secs(2);
/// Time between two attempts.
const LOCK_RETRY: Duration = Duration::from_millis(20);

/// Why a disk cannot be used.
#[derive(Debug, Error)]
pub enum DiskError {
    /// It cannot be opened.
    #[error(
        "cannot open the disk {}: {source}; check the path and its permissions, \
         or add readonly=on",
        path.display()
    )]
    Open {
        /// The image.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// Another process has the disk locked.
    #[error(
        "the disk {} is in use by another process; stop that process, \
         or use readonly=on in both",
        path.display()
    )]
    InUse {
        /// The image.
        path: PathBuf,
    },
    /// The size is not a whole number of blocks.
    #[error(
        "the disk {} has {bytes} bytes, which is not a multiple of {block_bytes}; \
         use `truncate` to enlarge it",
        path.display()
    )]
    OddSize {
        /// The image.
        path: PathBuf,
        /// Its size in bytes.
        bytes: u64,
        /// The size of a block in bytes.
        block_bytes: u32,
    },
    /// Its file system cannot bypass the page cache.
    #[error(
        "the disk {} cannot be read without the page cache: {source}; leave out direct=on",
        path.display()
    )]
    NotDirect {
        /// The image.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
}

/// When a disk is locked against other processes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DiskLock {
    /// When it is opened.
    Now,
    /// When the machine [acquires it](crate::devices::virtio::VirtioDevice::acquire_exclusive):
    /// until then it belongs to the monitor that sends the machine.
    Later,
}

/// Time of the last write to an image that is a regular file, in nanoseconds since 1970. Block
/// devices have none.
pub fn modified_unix_ns(stat: &Stat) -> Option<u64> {
    if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
        return None;
    }
    let seconds = u64::try_from(stat.st_mtime).ok()?;
    seconds.checked_mul(1_000_000_000)?.checked_add(stat.st_mtime_nsec)
}

/// Locks an image, so that no two machines write to it, and none writes while another reads.
pub(super) fn lock(file: &File, path: &Path, readonly: Switch) -> Result<(), DiskError> {
    let operation = match readonly {
        Switch::On => FlockOperation::NonBlockingLockShared,
        Switch::Off => FlockOperation::NonBlockingLockExclusive,
    };
    let patience = if is_block_device(file) { LOCK_PATIENCE } else { Duration::ZERO };
    match patiently(patience, || rustix::fs::flock(file, operation)) {
        Ok(()) => Ok(()),
        Err(rustix::io::Errno::WOULDBLOCK) => Err(DiskError::InUse { path: path.to_owned() }),
        Err(error) => Err(DiskError::Open { path: path.to_owned(), source: error.into() }),
    }
}

/// Whether an open file is a block device.
pub(super) fn is_block_device(file: &File) -> bool {
    rustix::fs::fstat(file)
        .is_ok_and(|stat| FileType::from_raw_mode(stat.st_mode) == FileType::BlockDevice)
}

/// Calls `attempt` until another process does not hold the lock, for `patience` at most.
fn patiently(
    patience: Duration,
    mut attempt: impl FnMut() -> rustix::io::Result<()>,
) -> rustix::io::Result<()> {
    let begin = Instant::now();
    loop {
        match attempt() {
            Err(rustix::io::Errno::WOULDBLOCK) if begin.elapsed() < patience => {
                std::thread::park_timeout(LOCK_RETRY);
            }
            result => return result,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// udev holds a block device's lock for a moment.
    #[test]
    fn a_lock_that_is_held_for_a_moment_is_tried_again() {
        use rustix::io::Errno;
        let attempts = |patience, results: &[rustix::io::Result<()>]| {
            let mut made = 0;
            let result = patiently(patience, || {
                made += 1;
                results.get(made - 1).copied().unwrap_or(Err(Errno::WOULDBLOCK))
            });
            (result, made)
        };
        let held = Err(Errno::WOULDBLOCK);
        let hour = Duration::from_secs(3600);
        assert_eq!(attempts(hour, &[held, held, Ok(())]), (Ok(()), 3));
        assert_eq!(attempts(hour, &[held, Err(Errno::IO)]), (Err(Errno::IO), 2));
        assert_eq!(attempts(Duration::ZERO, &[held, Ok(())]), (held, 1));
        let (result, made) = attempts(3 * LOCK_RETRY, &[]);
        assert!(result == held && (1..=4).contains(&made), "{made}");
    }
}
