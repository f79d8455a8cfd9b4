//! The snapshot file: header, position of the parts, and atomic creation.

use std::fs::{File, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use ebb_guest_ram::RamImage;
use twox_hash::XxHash3_64;

use super::{MachineState, SnapshotError};

/// Format version of the file. Incremented when an older monitor would misread the file.
pub const FORMAT_VERSION: u32 = 1;
/// Offset of the RAM: a multiple of the huge page size, so that file systems with huge pages can
/// map them.
pub const RAM_OFFSET_BYTES: u64 = 2 << 20;
/// Largest state in bytes. Real states have at most a few MiB, for hundreds of vCPUs and badly
/// fragmented memory.
const MAX_STATE_BYTES: u64 = 256 << 20;

/// Largest size of the file of a machine with `ram_bytes` of RAM.
pub(crate) fn most_bytes(ram_bytes: u64) -> u64 {
    RAM_OFFSET_BYTES + ram_bytes + MAX_STATE_BYTES
}

const MAGIC: &[u8; 8] = b"EBB-VM\r\n";
const HEADER_BYTES: usize = 64;

/// The first bytes of the file, all numbers little-endian: magic (8 bytes), version (u32), zero
/// (u32), offset and size of RAM, offset and size of the state, checksum of the state, checksum of
/// the header up to here (u64 each).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Header {
    /// Size of the RAM part in bytes, holes included.
    pub ram_bytes: u64,
    /// Offset of the state in bytes.
    pub state_offset: u64,
    /// Size of the state in bytes.
    pub state_bytes: u64,
    /// XXH3 of the state.
    pub state_checksum: u64,
}

impl Header {
    fn to_bytes(self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        bytes[..8].copy_from_slice(MAGIC);
        bytes[8..12].copy_from_slice(&FORMAT_VERSION.to_le_bytes());
        let numbers = [
            RAM_OFFSET_BYTES,
            self.ram_bytes,
            self.state_offset,
            self.state_bytes,
            self.state_checksum,
        ];
        for (place, number) in bytes[16..56].chunks_exact_mut(8).zip(numbers) {
            place.copy_from_slice(&number.to_le_bytes());
        }
        let checksum = XxHash3_64::oneshot(&bytes[..56]);
        bytes[56..].copy_from_slice(&checksum.to_le_bytes());
        bytes
    }

    /// Parses a header from the beginning of a file of `file_bytes`.
    ///
    /// # Errors
    /// [`SnapshotError`] for another file type, another version, damage, or a truncated file.
    pub fn parse(path: &Path, head: &[u8], file_bytes: u64) -> Result<Self, SnapshotError> {
        let path = || path.to_owned();
        let damaged =
            |problem: &str| SnapshotError::Damaged { path: path(), problem: problem.to_owned() };
        if head.get(..8) != Some(MAGIC) {
            return Err(SnapshotError::NotASnapshot { path: path() });
        }
        let number = |start: usize| {
            let bytes = head.get(start..start + 8).and_then(|bytes| bytes.try_into().ok());
            bytes.map(u64::from_le_bytes).ok_or_else(|| SnapshotError::Truncated {
                path: path(),
                expected: HEADER_BYTES as u64,
                found: file_bytes,
            })
        };
        // Before everything else: in another version the rest may have another meaning.
        let found = number(8)? as u32;
        if found != FORMAT_VERSION {
            return Err(SnapshotError::Version { path: path(), found });
        }
        let checksum = number(56)?;
        if checksum != XxHash3_64::oneshot(&head[..56]) {
            return Err(damaged("the checksum of its header is wrong"));
        }
        let ram_offset = number(16)?;
        let header = Self {
            ram_bytes: number(24)?,
            state_offset: number(32)?,
            state_bytes: number(40)?,
            state_checksum: number(48)?,
        };
        if ram_offset != RAM_OFFSET_BYTES
            || header.state_bytes > MAX_STATE_BYTES
            || header.ram_bytes.checked_add(ram_offset) != Some(header.state_offset)
        {
            return Err(damaged("its parts overlap"));
        }
        match header.file_bytes() {
            None => Err(damaged("its parts overlap")),
            Some(expected) if expected > file_bytes => {
                Err(SnapshotError::Truncated { path: path(), expected, found: file_bytes })
            }
            Some(_) => Ok(header),
        }
    }

    fn file_bytes(&self) -> Option<u64> {
        self.state_offset.checked_add(self.state_bytes)
    }
}

/// An opened snapshot whose header and state are valid.
#[derive(Debug)]
pub struct SnapshotFile {
    /// The file's name.
    pub path: PathBuf,
    /// The file.
    pub file: File,
    /// Its header.
    pub header: Header,
    /// Everything but the content of the RAM.
    pub state: MachineState,
    /// Location of the RAM's content.
    pub ram: RamImage,
}

impl SnapshotFile {
    /// Opens and checks a snapshot. RAM is not read.
    ///
    /// # Errors
    /// [`SnapshotError`] if the file is not a snapshot, or not complete.
    pub fn open(path: &Path) -> Result<Self, SnapshotError> {
        let read = |source| SnapshotError::Read { path: path.to_owned(), source };
        let damaged = |problem: String| SnapshotError::Damaged { path: path.to_owned(), problem };
        let file = open_to_read(path).map_err(read)?;
        let metadata = file.metadata().map_err(read)?;
        if !metadata.is_file() {
            return Err(SnapshotError::NotASnapshot { path: path.to_owned() });
        }
        let mut head = [0; HEADER_BYTES];
        let length = read_some(&file, &mut head).map_err(read)?;
        let header = Header::parse(path, &head[..length], metadata.len())?;
        let mut text = vec![0; header.state_bytes as usize];
        file.read_exact_at(&mut text, header.state_offset).map_err(read)?;
        if XxHash3_64::oneshot(&text) != header.state_checksum {
            return Err(damaged("the checksum of its state is wrong".to_owned()));
        }
        let mut state: MachineState = serde_json::from_slice(&text)
            .map_err(|error| damaged(format!("its state is invalid: {error}")))?;
        state.validate(header.ram_bytes).map_err(damaged)?;
        let ram = state.take_ram(header.ram_bytes).map_err(damaged)?;
        Ok(Self { path: path.to_owned(), file, header, state, ram })
    }

    /// Refuses a file that another user than this process's and root could change while a machine
    /// runs from it.
    ///
    /// # Errors
    /// [`SnapshotError::Foreign`].
    pub fn check_ownership(&self) -> Result<(), SnapshotError> {
        use std::os::unix::fs::MetadataExt;
        let metadata = self.file.metadata();
        let metadata =
            metadata.map_err(|source| SnapshotError::Read { path: self.path.clone(), source })?;
        let foreign = |problem| Err(SnapshotError::Foreign { path: self.path.clone(), problem });
        let (owner, ours) = (metadata.uid(), rustix::process::geteuid().as_raw());
        if owner != 0 && owner != ours {
            return foreign(format!("belongs to user {owner}"));
        }
        if metadata.mode() & 0o022 != 0 {
            return foreign("may be written by other users".to_owned());
        }
        Ok(())
    }

    /// Reads all of RAM and verifies its checksums; `progress` receives the number of bytes done.
    ///
    /// # Errors
    /// [`SnapshotError`] at the first difference.
    pub fn verify_ram(&self, progress: &mut dyn FnMut(u64)) -> Result<(), SnapshotError> {
        Ok(self.ram.verify(&self.file, RAM_OFFSET_BYTES, progress)?)
    }
}

/// Opens a path of any file type: a pipe without a writer does not block.
fn open_to_read(path: &Path) -> io::Result<File> {
    OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(path)
}

fn read_some(file: &File, buffer: &mut [u8]) -> io::Result<usize> {
    let mut length = 0;
    while length < buffer.len() {
        match file.read_at(&mut buffer[length..], length as u64) {
            Ok(0) => break,
            Ok(read) => length += read,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(length)
}

/// A snapshot that is being written under a temporary name. Dropped before it is finished, it is
/// removed.
#[derive(Debug)]
pub struct NewSnapshot {
    path: PathBuf,
    temporary: PathBuf,
    file: File,
    finished: bool,
}

/// Sizes of a finished snapshot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Written {
    /// Size of the file, holes included.
    pub file_bytes: u64,
    /// Size on disk in bytes.
    pub stored_bytes: u64,
}

impl NewSnapshot {
    /// Creates the file next to `path`. In the end it replaces a snapshot of that name, but no
    /// other file.
    ///
    /// # Errors
    /// [`SnapshotError`] if the file cannot be created.
    pub fn create(path: &Path) -> Result<Self, SnapshotError> {
        let wrong = || SnapshotError::Path { path: path.to_owned() };
        let (Some(directory), Some(name)) = (path.parent(), path.file_name()) else {
            return Err(wrong());
        };
        if !path.is_absolute() {
            return Err(wrong());
        }
        let create = |source| SnapshotError::Create { path: path.to_owned(), source };
        match open_to_read(path) {
            Ok(file) => {
                let mut magic = [0; MAGIC.len()];
                let is_file = file.metadata().is_ok_and(|metadata| metadata.is_file());
                if !is_file
                    || read_some(&file, &mut magic).ok() != Some(MAGIC.len())
                    || magic != *MAGIC
                {
                    return Err(SnapshotError::Exists { path: path.to_owned() });
                }
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(create(error)),
        }
        let mut temporary = std::ffi::OsString::from(".");
        temporary.push(name);
        // Random and not a process id: processes of two containers may have the same id.
        let mut chance = [0; 8];
        let read = rustix::rand::getrandom(&mut chance, rustix::rand::GetRandomFlags::empty());
        read.map_err(|error| create(error.into()))?;
        temporary.push(format!(".{:016x}.partial", u64::from_ne_bytes(chance)));
        let temporary = directory.join(temporary);
        // Guest memory is confidential.
        let file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&temporary);
        let file = file.map_err(create)?;
        Ok(Self { path: path.to_owned(), temporary, file, finished: false })
    }

    /// The file, for the RAM from [`RAM_OFFSET_BYTES`] on.
    pub fn file(&self) -> &File {
        &self.file
    }

    /// Writes state and header, syncs the file, and gives it its name.
    ///
    /// # Errors
    /// [`SnapshotError::Write`]; the file is removed then.
    pub fn finish(
        mut self,
        state: &MachineState,
        ram_bytes: u64,
    ) -> Result<Written, SnapshotError> {
        let written = self.write_rest(state, ram_bytes);
        let written =
            written.map_err(|source| SnapshotError::Write { path: self.path.clone(), source })?;
        self.finished = true;
        Ok(written)
    }

    fn write_rest(&mut self, state: &MachineState, ram_bytes: u64) -> io::Result<Written> {
        use std::os::unix::fs::MetadataExt;
        let text = serde_json::to_vec(state)?;
        let header = Header {
            ram_bytes,
            state_offset: RAM_OFFSET_BYTES + ram_bytes,
            state_bytes: text.len() as u64,
            state_checksum: XxHash3_64::oneshot(&text),
        };
        self.file.write_all_at(&text, header.state_offset)?;
        self.file.write_all_at(&header.to_bytes(), 0)?;
        self.file.flush()?;
        self.file.sync_all()?;
        let metadata = self.file.metadata()?;
        std::fs::rename(&self.temporary, &self.path)?;
        if let Some(directory) = self.path.parent() {
            // The file has its name. A file system that cannot sync a directory has made it as
            // durable as it can.
            let _ = File::open(directory).and_then(|directory| directory.sync_all());
        }
        Ok(Written { file_bytes: metadata.len(), stored_bytes: metadata.blocks() * 512 })
    }
}

impl Drop for NewSnapshot {
    fn drop(&mut self) {
        if !self.finished
            && let Err(error) = std::fs::remove_file(&self.temporary)
        {
            tracing::warn!(
                "cannot remove the unfinished snapshot {}: {error}",
                self.temporary.display()
            );
        }
    }
}
