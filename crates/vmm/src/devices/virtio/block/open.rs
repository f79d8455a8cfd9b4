//! Opening and locking images.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::fs::{FileType, FlockOperation, Stat};
use thiserror::Error;

use super::SECTOR_BYTES;
use super::image::Image;
use super::qcow2::{Base, Qcow2};
use super::raw::Raw;
use crate::config::{DiskConfig, DiskFormat, Switch};
use crate::file::{Access, open_image};

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
    /// It is not an image of its format, or one that cannot be used.
    #[error("cannot use the qcow2 image {}: {source}", path.display())]
    Format {
        /// The image.
        path: PathBuf,
        /// The reason.
        source: io::Error,
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

/// A disk's image, and what else its device has of it.
pub(super) struct Opened {
    pub image: Image,
    /// See [`Block`](super::Block).
    pub writeback: Option<File>,
    /// Size of the disk.
    pub bytes: u64,
}

/// The open files of a disk. Locks belong to them, so that they can be passed to another process.
#[derive(Debug)]
pub struct DiskFiles {
    /// The image that the guest's writes go to.
    pub(crate) top: File,
    /// The same, opened once more; see [`Block`](super::Block). None for a read-only disk.
    pub(crate) writeback: Option<File>,
    /// The image that it is an overlay of.
    pub(crate) base: Option<File>,
}

impl DiskFiles {
    /// Opens the files of a disk with the rights of this process, and locks them or not yet. An
    /// overlay that does not exist is created.
    ///
    /// # Errors
    /// [`DiskError`]
    pub fn open(config: &DiskConfig, when: DiskLock) -> Result<Self, DiskError> {
        let path = config.top();
        let open = |source| DiskError::Open { path: path.to_owned(), source };
        let base = config.overlay.as_ref().map(|_| open_base(config, when)).transpose()?;
        let access = if config.readonly.is_on() { Access::Read } else { Access::ReadWrite };
        let top = match (open_image(path, access), &base) {
            (Err(error), Some(base))
                if error.kind() == io::ErrorKind::NotFound && when == DiskLock::Now =>
            {
                let base = base_image(base.try_clone().map_err(open)?, config)?;
                create_overlay(path, &config.path, &base).map_err(open)?
            }
            (result, _) => result.map_err(open)?,
        };
        if when == DiskLock::Now {
            lock(&top, path, config.readonly)?;
        }
        let again = format!("/proc/self/fd/{}", top.as_raw_fd());
        let writeback = if config.readonly.is_on() {
            None
        } else {
            Some(open_image(again.as_ref(), Access::Read).map_err(open)?)
        };
        Ok(Self { top, writeback, base })
    }
}

impl Opened {
    /// The image in these files of a disk, which are locked or not yet.
    pub fn new(config: &DiskConfig, files: DiskFiles, when: DiskLock) -> Result<Self, DiskError> {
        let path = config.top();
        let DiskFiles { top, writeback, base } = files;
        let base = base.map(|file| base_image(file, config)).transpose()?;
        let image = if base.is_some() || config.format == DiskFormat::Qcow2 {
            let format = |source| DiskError::Format { path: path.to_owned(), source };
            let qcow2 = Qcow2::new(top, base, config.readonly.is_on()).map_err(format)?;
            if when == DiskLock::Now {
                qcow2.load().map_err(format)?;
            }
            Image::Qcow2(qcow2)
        } else {
            let mut raw = Raw::new(top);
            if config.direct.is_on() {
                let not_direct = |source| DiskError::NotDirect { path: path.to_owned(), source };
                raw.use_direct().map_err(not_direct)?;
            }
            Image::Raw(raw)
        };
        Self::of(image, writeback, path)
    }

    /// Takes the files of an image for a machine that runs, and locks it. Its format is that of the
    /// image whose place it takes; it is no overlay.
    pub fn replacing(
        file: File,
        writeback: Option<File>,
        path: &Path,
        format: DiskFormat,
        readonly: Switch,
    ) -> Result<Self, DiskError> {
        lock(&file, path, readonly)?;
        let image = match format {
            DiskFormat::Raw => Image::Raw(Raw::of_open(file)),
            DiskFormat::Qcow2 => {
                let qcow2 = Qcow2::new(file, None, readonly.is_on());
                let loaded = qcow2.and_then(|qcow2| qcow2.load().map(|()| qcow2));
                let failed = |source| DiskError::Format { path: path.to_owned(), source };
                Image::Qcow2(loaded.map_err(failed)?)
            }
        };
        Self::of(image, writeback, path)
    }

    fn of(image: Image, writeback: Option<File>, path: &Path) -> Result<Self, DiskError> {
        let open = |source| DiskError::Open { path: path.to_owned(), source };
        let bytes = image.size_bytes().map_err(open)?;
        let block_bytes = image.block_bytes();
        if !bytes.is_multiple_of(u64::from(block_bytes)) {
            return Err(DiskError::OddSize { path: path.to_owned(), bytes, block_bytes });
        }
        Ok(Self { image, writeback, bytes })
    }
}

/// Opens the image that an overlay is on top of. Others may read it meanwhile.
fn open_base(config: &DiskConfig, when: DiskLock) -> Result<File, DiskError> {
    let path = &config.path;
    let open = |source| DiskError::Open { path: path.clone(), source };
    let file = open_image(path, Access::Read).map_err(open)?;
    if when == DiskLock::Now {
        lock(&file, path, Switch::On)?;
    }
    Ok(file)
}

/// The image in the file that an overlay is on top of.
fn base_image(file: File, config: &DiskConfig) -> Result<Base, DiskError> {
    let path = &config.path;
    let file = Arc::new(file);
    let base = match config.format {
        DiskFormat::Raw => Base::Raw(file),
        DiskFormat::Qcow2 => Base::Qcow2(file),
    };
    let bytes =
        base.size_bytes().map_err(|source| DiskError::Format { path: path.clone(), source })?;
    if !bytes.is_multiple_of(SECTOR_BYTES) {
        let block_bytes = SECTOR_BYTES as u32;
        return Err(DiskError::OddSize { path: path.clone(), bytes, block_bytes });
    }
    Ok(base)
}

/// Makes a new overlay. An incomplete one is removed.
fn create_overlay(path: &Path, base_path: &Path, base: &Base) -> io::Result<File> {
    let base_path = std::path::absolute(base_path)?;
    let file = File::options().read(true).write(true).create_new(true).open(path)?;
    let created = file
        .try_clone()
        .and_then(|file| Qcow2::create(file, base.size_bytes()?, Some((&base_path, base))));
    created.inspect_err(|_| drop(std::fs::remove_file(path))).map(|()| file)
}

/// Why a disk cannot have another size.
#[derive(Debug, Error)]
pub enum ResizeError {
    /// The guest may have data in what would be lost.
    #[error("the image has {bytes} bytes, less than the {known_bytes} that the guest knows")]
    Shrinks {
        /// The new size.
        bytes: u64,
        /// The size that the guest knows.
        known_bytes: u64,
    },
    /// The size is not a whole number of blocks.
    #[error("{bytes} bytes are not a multiple of {block_bytes}")]
    OddSize {
        /// The new size.
        bytes: u64,
        /// The size of a block.
        block_bytes: u32,
    },
    /// The monitor has limited the sizes of its files.
    #[error("{bytes} bytes are more than the {most_bytes} that the monitor has provided for")]
    TooLarge {
        /// The new size.
        bytes: u64,
        /// The largest one.
        most_bytes: u64,
    },
    /// A raw image was given a size.
    #[error("a raw disk has the size of its image")]
    SizeOfRaw,
    /// A qcow2 image was given none.
    #[error("the size of a qcow2 image is part of it, and is changed by the monitor")]
    NoSize,
    /// The image's size cannot be read or changed.
    #[error("the size of its image: {0}")]
    Image(io::Error),
}

/// Why a disk cannot have another image.
#[derive(Debug, Error)]
pub enum ReplaceError {
    /// The disk is an overlay, or bypasses the page cache.
    #[error("the image of a disk with {option} cannot be replaced")]
    Option {
        /// The option.
        option: &'static str,
    },
    /// Not as many files as the disk needs, or of another kind.
    #[error("{0}")]
    Files(&'static str),
    /// The image cannot be used.
    #[error(transparent)]
    Disk(#[from] DiskError),
    /// The monitor has limited the sizes of its files.
    #[error(transparent)]
    Size(ResizeError),
    /// The tables of the old image cannot be written.
    #[error("the tables of the old image cannot be written: {0}")]
    Tables(io::Error),
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
