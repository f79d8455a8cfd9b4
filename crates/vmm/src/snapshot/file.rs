//! The snapshot file: header, position of the parts, and how a monitor writes them into a file that
//! a client has opened ([`client`](super::client)).

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use ebb_guest_ram::RamImage;
use rustix::fs::{FileType, OFlags};
use rustix::io::Errno;
use twox_hash::XxHash3_64;

use super::working_set::ReadAhead;
use super::{MachineState, SnapshotError};

/// Format version of the file. Incremented when an older monitor would misread the file. Since 2,
/// devices are at other addresses.
pub const FORMAT_VERSION: u32 = 2;
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

pub(crate) const MAGIC: &[u8; 8] = b"EBB-VM\r\n";
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
    /// What is read ahead of the guest.
    pub(crate) read_ahead: Option<ReadAhead>,
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
        Ok(Self { path: path.to_owned(), file, header, state, ram, read_ahead: None })
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
pub(super) fn open_to_read(path: &Path) -> io::Result<File> {
    OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(path)
}

pub(super) fn read_some(file: &File, buffer: &mut [u8]) -> io::Result<usize> {
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

/// Refuses a file of a client that no snapshot can be written to.
///
/// # Errors
/// [`SnapshotError::Target`].
pub fn check_target(path: &Path, file: &File) -> Result<(), SnapshotError> {
    let wrong = |problem: &str| SnapshotError::Target {
        path: path.to_owned(),
        problem: problem.to_owned(),
    };
    let unreadable = |errno: Errno| wrong(&format!("cannot be examined: {errno}"));
    let stat = rustix::fs::fstat(file).map_err(unreadable)?;
    match FileType::from_raw_mode(stat.st_mode) {
        FileType::RegularFile => {}
        FileType::Directory => return Err(wrong("is a directory")),
        FileType::Fifo => return Err(wrong("is a FIFO")),
        FileType::Socket => return Err(wrong("is a socket")),
        _ => return Err(wrong("is not a regular file")),
    }
    let flags = rustix::fs::fcntl_getfl(file).map_err(unreadable)?;
    if !matches!(flags & OFlags::RWMODE, OFlags::WRONLY | OFlags::RDWR)
        || flags.contains(OFlags::PATH)
    {
        return Err(wrong("is not open for writing"));
    }
    if flags.intersects(OFlags::APPEND | OFlags::DIRECT) {
        return Err(wrong("is open with O_APPEND or O_DIRECT"));
    }
    if stat.st_size != 0 {
        return Err(wrong(&format!("is not empty: it has {} bytes", stat.st_size)));
    }
    Ok(())
}

/// Writes state and header after the RAM, which is at [`RAM_OFFSET_BYTES`] already.
///
/// # Errors
/// Those of pwrite(2).
pub fn write_rest(file: &File, state: &MachineState, ram_bytes: u64) -> io::Result<()> {
    let text = serde_json::to_vec(state)?;
    let header = Header {
        ram_bytes,
        state_offset: RAM_OFFSET_BYTES + ram_bytes,
        state_bytes: text.len() as u64,
        state_checksum: XxHash3_64::oneshot(&text),
    };
    file.write_all_at(&text, header.state_offset)?;
    file.write_all_at(&header.to_bytes(), 0)
}

/// Sizes of a snapshot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sizes {
    /// Size of the file, holes included.
    pub file_bytes: u64,
    /// Size on disk in bytes.
    pub stored_bytes: u64,
}

impl Sizes {
    /// Those of `file`.
    ///
    /// # Errors
    /// Those of fstat(2).
    pub fn of(file: &File) -> io::Result<Self> {
        let stat = rustix::fs::fstat(file)?;
        let bytes = |number: i64| u64::try_from(number).unwrap_or(0);
        Ok(Self { file_bytes: bytes(stat.st_size), stored_bytes: bytes(stat.st_blocks) * 512 })
    }
}
