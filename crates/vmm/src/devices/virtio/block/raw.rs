//! A raw image: a file or a block device whose content is the disk's.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::FileExt as _;
use std::sync::atomic::{AtomicBool, Ordering};

use ebb_guest_ram::GuestMemory;
use rustix::fs::{FallocateFlags, OFlags};
use rustix::io::Errno;

use super::guest_io::{self, Piece, Place, Waiting};
use super::open::is_block_device;
use super::{SECTOR_BYTES, guest_io::split};

/// Most bytes that pass through a buffer at a time.
const BUFFER_BYTES: u64 = 1 << 20;
/// Zeros written at a time, where the file system cannot do it by itself.
const ZEROS_BYTES: u64 = 64 << 10;
/// Largest block of a device, in bytes, that direct transfers are tried with.
const LARGEST_BLOCK_BYTES: u32 = 4096;
/// Alignment of buffers for direct transfers.
const BUFFER_ALIGNMENT: usize = 4096;
/// `BLKDISCARD` (Linux include/uapi/linux/fs.h): `_IO(0x12, 119)`.
pub(crate) const BLKDISCARD: u64 = 0x1277;

/// A raw image.
#[derive(Debug)]
pub(super) struct Raw {
    file: File,
    target: Target,
    /// With direct transfers, the size of a block, to which offsets and sizes must be aligned.
    direct_block_bytes: Option<u32>,
    /// The file system does not punch holes.
    no_holes: AtomicBool,
    /// It has no command for ranges of zeros.
    no_zeros: AtomicBool,
    /// Never waits for a disk: the file is in memory.
    in_memory: bool,
    /// Reads cannot refuse to wait.
    reads_wait: AtomicBool,
    /// Writes cannot refuse to wait.
    writes_wait: AtomicBool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Target {
    File,
    Device,
}

impl Raw {
    /// An image behind the page cache.
    pub fn new(file: File) -> Self {
        let in_memory =
            rustix::fs::fstatfs(&file).is_ok_and(|system| system.f_type == libc::TMPFS_MAGIC);
        Self { in_memory, ..Self::of_open(file) }
    }

    /// As [`new`](Self::new), without a look at its file system, which takes a system call that the
    /// API's thread does not have.
    pub fn of_open(file: File) -> Self {
        let target = if is_block_device(&file) { Target::Device } else { Target::File };
        Self {
            file,
            target,
            direct_block_bytes: None,
            no_holes: AtomicBool::new(false),
            no_zeros: AtomicBool::new(false),
            in_memory: false,
            reads_wait: AtomicBool::new(false),
            writes_wait: AtomicBool::new(false),
        }
    }

    /// Bypasses the page cache from now on.
    ///
    /// # Errors
    /// Those of fcntl(2) and of a first read: the file system may not support it.
    pub fn use_direct(&mut self) -> io::Result<()> {
        let flags = rustix::fs::fcntl_getfl(&self.file)?;
        rustix::fs::fcntl_setfl(&self.file, flags | OFlags::DIRECT)?;
        // statx(2) reports the alignment only since Linux 6.1, and not for all file systems.
        let mut block_bytes = SECTOR_BYTES as u32;
        loop {
            match aligned(block_bytes as usize, |buffer| self.file.read_at(buffer, 0)) {
                Ok(_) => break,
                Err(error) if block_bytes >= LARGEST_BLOCK_BYTES => return Err(error),
                Err(error) if error.kind() == io::ErrorKind::InvalidInput => block_bytes *= 2,
                Err(error) => return Err(error),
            }
        }
        self.direct_block_bytes = Some(block_bytes);
        Ok(())
    }

    /// The file.
    pub fn file(&self) -> &File {
        &self.file
    }

    /// Size of a block: what requests of the guest must be multiples of.
    pub fn block_bytes(&self) -> u32 {
        self.direct_block_bytes.unwrap_or(SECTOR_BYTES as u32)
    }

    /// Whether the page cache is bypassed.
    pub fn is_direct(&self) -> bool {
        self.direct_block_bytes.is_some()
    }

    /// The current size in bytes. Seeking to the end also works for block devices, whose metadata
    /// report size 0.
    pub fn size_bytes(&self) -> io::Result<u64> {
        Ok(rustix::fs::seek(&self.file, rustix::fs::SeekFrom::End(0))?)
    }

    fn place(&self, offset: u64, waiting: Waiting) -> Place<'_> {
        Place { file: &self.file, offset, waiting }
    }

    pub fn read(&self, memory: &GuestMemory, pieces: &[Piece], offset: u64) -> io::Result<()> {
        if self.direct_block_bytes.is_none() {
            return guest_io::read(memory, pieces, self.place(offset, Waiting::Allowed));
        }
        self.check_alignment(pieces, offset)?;
        buffered(pieces, |pieces, done, buffer| {
            self.file.read_exact_at(buffer, offset + done)?;
            guest_io::scatter(memory, pieces, buffer)
        })
    }

    /// Like [`read`](Self::read) for what the page cache holds; `None` if it must wait for the
    /// disk.
    pub fn read_at_once(
        &self,
        memory: &GuestMemory,
        pieces: &[Piece],
        offset: u64,
    ) -> Option<io::Result<()>> {
        self.at_once(&self.reads_wait, |waiting| {
            guest_io::read(memory, pieces, self.place(offset, waiting))
        })
    }

    /// Like [`write`](Self::write) if the page cache has room; `None` if it must wait for the disk,
    /// where a part may be written.
    pub fn write_at_once(
        &self,
        memory: &GuestMemory,
        pieces: &[Piece],
        offset: u64,
    ) -> Option<io::Result<()>> {
        self.at_once(&self.writes_wait, |waiting| {
            guest_io::write(memory, pieces, self.place(offset, waiting))
        })
    }

    fn at_once(
        &self,
        always_waits: &AtomicBool,
        transfer: impl FnOnce(Waiting) -> io::Result<()>,
    ) -> Option<io::Result<()>> {
        if self.is_direct() || always_waits.load(Ordering::Relaxed) {
            return None;
        }
        if self.in_memory {
            return Some(transfer(Waiting::Allowed));
        }
        match transfer(Waiting::Refused) {
            Err(error) if error.raw_os_error() == Some(libc::EAGAIN) => None,
            Err(error) if is_unsupported(&error) => {
                always_waits.store(true, Ordering::Relaxed);
                None
            }
            result => Some(result),
        }
    }

    pub fn write(&self, memory: &GuestMemory, pieces: &[Piece], offset: u64) -> io::Result<()> {
        if self.direct_block_bytes.is_none() {
            return guest_io::write(memory, pieces, self.place(offset, Waiting::Allowed));
        }
        self.check_alignment(pieces, offset)?;
        buffered(pieces, |pieces, done, buffer| {
            guest_io::gather(memory, pieces, buffer)?;
            self.file.write_all_at(buffer, offset + done)
        })
    }

    pub fn flush(&self) -> io::Result<()> {
        self.file.sync_data()
    }

    /// Gives the range back to the host, if that is possible; otherwise it keeps its content
    /// (section 5.2.6.2).
    pub fn discard(&self, offset: u64, bytes: u64) -> io::Result<()> {
        if self.no_holes.load(Ordering::Relaxed) || bytes == 0 {
            return Ok(());
        }
        let result = match self.target {
            Target::File => self.punch(offset, bytes),
            Target::Device => self.discard_on_device(offset, bytes),
        };
        match result {
            Err(error) if is_unsupported(&error) => {
                self.no_holes.store(true, Ordering::Relaxed);
                Ok(())
            }
            result => result,
        }
    }

    /// Makes the range zero, and gives it back to the host if `unmap`.
    pub fn zero(&self, offset: u64, bytes: u64, unmap: Unmap) -> io::Result<()> {
        if bytes == 0 {
            return Ok(());
        }
        if unmap == Unmap::Yes && !self.no_holes.load(Ordering::Relaxed) {
            match self.punch(offset, bytes) {
                Err(error) if is_unsupported(&error) && self.target == Target::File => {
                    self.no_holes.store(true, Ordering::Relaxed);
                }
                // A device that cannot do it may still discard.
                Err(error) if is_unsupported(&error) => {}
                result => return result,
            }
        }
        if !self.no_zeros.load(Ordering::Relaxed) {
            let flags = FallocateFlags::ZERO_RANGE | FallocateFlags::KEEP_SIZE;
            match rustix::fs::fallocate(&self.file, flags, offset, bytes) {
                Err(error) if is_unsupported(&error.into()) => {
                    self.no_zeros.store(true, Ordering::Relaxed);
                }
                result => return Ok(result?),
            }
        }
        let mut done = 0;
        while done < bytes {
            let piece = (bytes - done).min(ZEROS_BYTES);
            aligned(piece as usize, |zeros| self.file.write_all_at(zeros, offset + done))?;
            done += piece;
        }
        Ok(())
    }

    /// Block devices make the range zero as well, without writing zeros.
    fn punch(&self, offset: u64, bytes: u64) -> io::Result<()> {
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        Ok(rustix::fs::fallocate(&self.file, flags, offset, bytes)?)
    }

    fn discard_on_device(&self, offset: u64, bytes: u64) -> io::Result<()> {
        // Whole blocks of any device.
        let block = u64::from(LARGEST_BLOCK_BYTES);
        let begin = offset.next_multiple_of(block);
        let end = (offset + bytes) / block * block;
        if begin >= end {
            return Ok(());
        }
        let range = [begin, end - begin];
        // SAFETY: the request reads two numbers of 64 bits from `range`.
        match unsafe { libc::ioctl(self.file.as_raw_fd(), BLKDISCARD, &raw const range) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }

    fn check_alignment(&self, pieces: &[Piece], offset: u64) -> io::Result<()> {
        let block = u64::from(self.block_bytes());
        let bytes = guest_io::total_bytes(pieces);
        if offset.is_multiple_of(block) && bytes.is_multiple_of(block) {
            return Ok(());
        }
        Err(io::ErrorKind::InvalidInput.into())
    }
}

/// Whether zeroed blocks may be given back to the host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Unmap {
    Yes,
    No,
}

fn is_unsupported(error: &io::Error) -> bool {
    [Errno::OPNOTSUPP, Errno::NOSYS, Errno::NOTTY]
        .iter()
        .any(|errno| error.raw_os_error() == Some(errno.raw_os_error()))
}

/// Moves the pieces through a buffer: `step` gets the pieces of a part, the number of bytes done
/// before it, and the buffer for it.
pub(super) fn buffered(
    pieces: &[Piece],
    mut step: impl FnMut(&[Piece], u64, &mut [u8]) -> io::Result<()>,
) -> io::Result<()> {
    let total = guest_io::total_bytes(pieces);
    aligned(total.min(BUFFER_BYTES) as usize, |buffer| {
        let mut rest = pieces.to_vec();
        let mut done = 0;
        while done < total {
            let bytes = (total - done).min(BUFFER_BYTES);
            let (part, others) = split(&rest, bytes).ok_or(io::ErrorKind::InvalidInput)?;
            step(&part, done, &mut buffer[..bytes as usize])?;
            rest = others;
            done += bytes;
        }
        Ok(())
    })
}

/// Calls `step` with an aligned buffer of zeros.
fn aligned<T>(bytes: usize, step: impl FnOnce(&mut [u8]) -> io::Result<T>) -> io::Result<T> {
    let mut memory = vec![0; bytes + BUFFER_ALIGNMENT];
    let start = memory.as_ptr().align_offset(BUFFER_ALIGNMENT);
    match memory.get_mut(start..start.saturating_add(bytes)) {
        Some(buffer) => step(buffer),
        None => Err(io::ErrorKind::InvalidInput.into()),
    }
}
