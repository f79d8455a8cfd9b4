//! Images of root file systems for guests: copies, and disks with an image that is used once.

use std::fs::File;
use std::io::{self, Read as _, Seek as _, SeekFrom, Write as _};
use std::path::{Path, PathBuf};

use tempfile::NamedTempFile;

use crate::LabError;
use crate::error::Missing;
use crate::harness::monitor::{Setup, WorkDisks};

/// Blocks of an image that are copied, or left out if they are zero.
const BLOCK_BYTES: usize = 64 << 10;
/// Where copies are made: on a disk, since a file system in memory has no direct access, and would
/// take memory of the host whose memory is measured.
const COPIES: &str = "/var/tmp";

/// Copies an image or a disk, with holes for what is zero.
pub fn copy(source: &Path, mut target: &File) -> io::Result<()> {
    let mut source = File::open(source)?;
    let mut block = vec![0; BLOCK_BYTES];
    loop {
        let read = source.read(&mut block)?;
        if read == 0 {
            let size = target.stream_position()?;
            return target.set_len(size);
        }
        if block[..read].iter().any(|byte| *byte != 0) {
            target.write_all(&block[..read])?;
        } else {
            target.seek(SeekFrom::Current(read as i64))?;
        }
    }
}

/// What the guest of a series uses as its disk.
#[derive(Debug, Clone, Copy)]
pub enum WorkDisk<'a> {
    /// A copy of this image.
    CopyOf(&'a Path),
    /// This disk.
    Fresh(&'a Path),
}

/// A disk, and the file if it was made for it.
#[derive(Debug)]
pub enum OwnDisk {
    /// A file, which is removed when dropped.
    File(NamedTempFile),
    /// A disk of the virtual host, whose content is given up with the host.
    Device(PathBuf),
}

impl WorkDisk<'_> {
    /// The disk for a guest.
    ///
    /// # Errors
    /// [`LabError::SystemFile`].
    pub fn prepare(self) -> Result<OwnDisk, LabError> {
        match self {
            Self::Fresh(path) => Ok(OwnDisk::Device(path.to_owned())),
            Self::CopyOf(image) => {
                let file = NamedTempFile::new_in(COPIES).map_err(LabError::of_file(COPIES))?;
                copy(image, file.as_file()).map_err(LabError::of_file(image))?;
                Ok(OwnDisk::File(file))
            }
        }
    }
}

impl OwnDisk {
    /// Its path.
    pub fn path(&self) -> &Path {
        match self {
            Self::File(file) => file.path(),
            Self::Device(path) => path,
        }
    }
}

/// Gives each series that needs one its disk.
#[derive(Debug)]
pub struct WorkDiskSource<'a> {
    disks: &'a WorkDisks,
    used: usize,
}

impl<'a> WorkDiskSource<'a> {
    /// Disks none of which is in use.
    pub fn new(disks: &'a WorkDisks) -> Self {
        Self { disks, used: 0 }
    }

    /// The disk of the next series, if its guest needs one and there is one.
    pub fn of_next(&mut self, setup: &Setup) -> Option<WorkDisk<'a>> {
        if !setup.system.has_work_root() {
            return None;
        }
        self.used += 1;
        match self.disks {
            WorkDisks::None => None,
            WorkDisks::Copies(image) => Some(WorkDisk::CopyOf(image)),
            WorkDisks::Fresh(all) => all.get(self.used - 1).map(|path| WorkDisk::Fresh(path)),
        }
    }
}

/// The disk that a series was given.
///
/// # Errors
/// [`LabError::Missing`].
pub fn required(disk: Option<WorkDisk<'_>>) -> Result<WorkDisk<'_>, LabError> {
    Ok(disk.ok_or(Missing::Work)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::harness::monitor::System;
    use std::os::unix::fs::MetadataExt as _;

    #[test]
    fn copies_are_equal_and_sparse() {
        let mut bytes = vec![0; 5 * BLOCK_BYTES + 100];
        bytes[2 * BLOCK_BYTES + 7] = 1;
        let (mut source, target) = (NamedTempFile::new().unwrap(), tempfile::tempfile());
        source.write_all(&bytes).unwrap();
        let target = target.unwrap();
        copy(source.path(), &target).unwrap();
        assert!(target.metadata().unwrap().blocks() * 512 < 3 * BLOCK_BYTES as u64);
        let mut copied = Vec::new();
        (&target).rewind().unwrap();
        (&target).read_to_end(&mut copied).unwrap();
        assert!(copied == bytes);
    }

    #[test]
    fn each_series_with_a_debian_guest_has_its_own_disk() {
        let disks = WorkDisks::Fresh(vec!["/dev/vdb".into(), "/dev/vdc".into()]);
        let mut source = WorkDiskSource::new(&disks);
        let debian = Setup { system: System::DebianWithAgent, ..Setup::EBB };
        let mut path = |setup| {
            let disk = source.of_next(setup)?.prepare().unwrap();
            Some(disk.path().to_owned())
        };
        assert_eq!(path(&debian), Some("/dev/vdb".into()));
        assert_eq!(path(&Setup::EBB), None);
        assert_eq!(path(&debian), Some("/dev/vdc".into()));
        assert_eq!(path(&debian), None);
        assert!(required(None).is_err());
    }
}
