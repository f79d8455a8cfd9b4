//! Transfers between guest memory and files, without a buffer in between.
//!
//! Guest memory is named by its address in system calls only; no reference to it exists. The
//! kernel copies between it and the page cache, so no page of the guest stays pinned. With O_DIRECT
//! it would: there, data passes through a buffer of the monitor's.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd as _;

use ebb_guest_ram::{GuestMemory, WriteLogSlice};
use vm_memory::bitmap::Bitmap as _;
use vm_memory::{Bytes as _, GuestAddress, GuestMemoryBackend as _, VolatileSlice};

/// Most pieces in one call; Linux allows 1024 (`UIO_MAXIOV`).
const PIECES_A_CALL: usize = 256;

/// A part of guest memory that a request names. It may lie outside of guest memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Piece {
    /// Guest-physical address.
    pub address: GuestAddress,
    /// Its size.
    pub bytes: u32,
}

/// Sum of the pieces' sizes.
pub(super) fn total_bytes(pieces: &[Piece]) -> u64 {
    pieces.iter().map(|piece| u64::from(piece.bytes)).sum()
}

/// Splits off the first `bytes` bytes: the pieces that hold them, and the rest. `None` if there are
/// fewer.
pub(super) fn split(pieces: &[Piece], bytes: u64) -> Option<(Vec<Piece>, Vec<Piece>)> {
    let (mut head, mut rest) = (Vec::new(), Vec::new());
    let mut missing = bytes;
    for &Piece { address, bytes } in pieces {
        let taken = missing.min(u64::from(bytes));
        missing -= taken;
        if taken > 0 {
            head.push(Piece { address, bytes: taken as u32 });
        }
        if taken < u64::from(bytes) {
            let address = GuestAddress(address.0.checked_add(taken)?);
            rest.push(Piece { address, bytes: bytes - taken as u32 });
        }
    }
    (missing == 0).then_some((head, rest))
}

/// Whether all pieces are guest memory.
pub(super) fn is_inside(memory: &GuestMemory, pieces: &[Piece]) -> bool {
    pieces.iter().all(|piece| memory.check_range(piece.address, piece.bytes as usize))
}

/// Fills `buffer` from the pieces, which have its size.
pub(super) fn gather(
    memory: &GuestMemory,
    pieces: &[Piece],
    mut buffer: &mut [u8],
) -> io::Result<()> {
    for piece in pieces {
        let (part, rest) = buffer.split_at_mut(buffer.len().min(piece.bytes as usize));
        memory.read_slice(part, piece.address).map_err(io::Error::other)?;
        buffer = rest;
    }
    Ok(())
}

/// Writes `buffer` to the pieces, which have its size.
pub(super) fn scatter(memory: &GuestMemory, pieces: &[Piece], mut buffer: &[u8]) -> io::Result<()> {
    for piece in pieces {
        let (part, rest) = buffer.split_at(buffer.len().min(piece.bytes as usize));
        memory.write_slice(part, piece.address).map_err(io::Error::other)?;
        buffer = rest;
    }
    Ok(())
}

/// Whether a transfer may wait for the disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Waiting {
    Allowed,
    /// Only the page cache is used: otherwise the transfer fails with EAGAIN, or with EOPNOTSUPP
    /// if the file system has no such transfers (`RWF_NOWAIT` of preadv2(2)).
    Refused,
}

impl Waiting {
    fn flags(self) -> libc::c_int {
        match self {
            Self::Allowed => 0,
            Self::Refused => libc::RWF_NOWAIT,
        }
    }
}

/// The place in a file that a transfer is from or to.
#[derive(Clone, Copy)]
pub(super) struct Place<'a> {
    pub file: &'a File,
    pub offset: u64,
    pub waiting: Waiting,
}

/// Fills the pieces with the file's content.
///
/// # Errors
/// Those of preadv2(2), [`io::ErrorKind::UnexpectedEof`] at the file's end, and pieces outside of
/// guest memory.
pub(super) fn read(memory: &GuestMemory, pieces: &[Piece], place: Place<'_>) -> io::Result<()> {
    let (file, flags) = (place.file.as_raw_fd(), place.waiting.flags());
    transfer(memory, pieces, place.offset, |parts, count, offset| {
        // SAFETY: `parts` holds `count` entries, each a part of mapped guest memory: `memory` is
        // borrowed meanwhile, and no reference to its content exists in this process.
        let bytes = unsafe { libc::preadv2(file, parts, count, offset, flags) };
        (bytes, Log::Written)
    })
}

/// Writes the pieces to the file.
///
/// # Errors
/// Those of pwritev2(2), and pieces outside of guest memory.
pub(super) fn write(memory: &GuestMemory, pieces: &[Piece], place: Place<'_>) -> io::Result<()> {
    let (file, flags) = (place.file.as_raw_fd(), place.waiting.flags());
    transfer(memory, pieces, place.offset, |parts, count, offset| {
        // SAFETY: as in `read`; the kernel only reads this memory.
        let bytes = unsafe { libc::pwritev2(file, parts, count, offset, flags) };
        (bytes, Log::Unchanged)
    })
}

/// Whether guest memory was written.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Log {
    Written,
    Unchanged,
}

fn transfer(
    memory: &GuestMemory,
    pieces: &[Piece],
    offset: u64,
    mut call: impl FnMut(*const libc::iovec, libc::c_int, libc::off64_t) -> (isize, Log),
) -> io::Result<()> {
    let mut slices: Vec<VolatileSlice<'_, WriteLogSlice<'_>>> = Vec::with_capacity(pieces.len());
    for piece in pieces {
        for slice in memory.get_slices(piece.address, piece.bytes as usize) {
            slices.push(slice.map_err(io::Error::other)?);
        }
    }
    let mut offset = libc::off64_t::try_from(offset).map_err(io::Error::other)?;
    let mut left = &mut slices[..];
    loop {
        while left.first().is_some_and(VolatileSlice::is_empty) {
            left = &mut left[1..];
        }
        if left.is_empty() {
            return Ok(());
        }
        let guards: Vec<_> =
            left.iter().take(PIECES_A_CALL).map(VolatileSlice::ptr_guard_mut).collect();
        let parts: Vec<libc::iovec> = guards
            .iter()
            .map(|guard| libc::iovec { iov_base: guard.as_ptr().cast(), iov_len: guard.len() })
            .collect();
        let (bytes, log) = call(parts.as_ptr(), parts.len() as libc::c_int, offset);
        drop(guards);
        let mut bytes = match usize::try_from(bytes) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(bytes) => bytes,
            Err(_) => match io::Error::last_os_error() {
                error if error.kind() == io::ErrorKind::Interrupted => continue,
                error => return Err(error),
            },
        };
        offset += bytes as libc::off64_t;
        for slice in &mut *left {
            let done = bytes.min(slice.len());
            if done == 0 {
                break;
            }
            if log == Log::Written {
                slice.bitmap().mark_dirty(0, done);
            }
            *slice = slice.offset(done).map_err(io::Error::other)?;
            bytes -= done;
        }
    }
}
