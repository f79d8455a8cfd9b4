//! Discards pages, by backing.
//!
//! - Anonymous private memory: `madvise(MADV_DONTNEED)`, for several ranges `process_madvise` where
//!   the kernel allows it. The pages belong to the mapping alone.
//! - Shared memfd: `fallocate(FALLOC_FL_PUNCH_HOLE)`. `MADV_DONTNEED` on a shared file mapping only
//!   unmaps: it returns 0 and the file keeps its pages.
//! - Private mapping of a file (restored and merged memory): replacement by anonymous memory, see
//!   [`overlay`](crate::overlay). `MADV_DONTNEED` would restore the file's content.
//! - Hugetlb memfd: `fallocate(FALLOC_FL_PUNCH_HOLE)`, whole huge pages only. The file system
//!   zeroes parts of a huge page instead of freeing them.
//!
//! After each, the range reads as zeros: punching a hole into a file also unmaps it from every
//! mapping of the file (mm/shmem.c, `shmem_fallocate`; fs/hugetlbfs/inode.c,
//! `hugetlbfs_punch_hole`).

use std::fs::File;
use std::io;
use std::ops::AddAssign;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::ptr;

use ebb_abi::PAGE_SIZE_BYTES;
use rustix::fs::{FallocateFlags, fallocate};
use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};
use rustix::process::{PidfdFlags, getpid, pidfd_open};

use crate::{GuestRange, RamError};

/// Maximum number of ranges per `process_madvise` (`UIO_MAXIOV`).
const MAX_VECTORS: usize = 1024;

/// Result of a discard.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DiscardOutcome {
    /// Bytes discarded.
    pub bytes: u64,
    /// Contiguous ranges discarded.
    pub ranges: u64,
    /// Number of system calls.
    pub syscalls: u64,
    /// Bytes kept because discards are inhibited.
    pub inhibited_bytes: u64,
    /// Bytes kept because the rest of their huge page is in use, or, in restored and in merged
    /// memory, because the file's mapping around them cannot be split any more. They read as
    /// before.
    pub deferred_bytes: u64,
}

impl DiscardOutcome {
    /// Whether no page was kept: all pages of the call read as zeros.
    pub const fn is_complete(&self) -> bool {
        self.inhibited_bytes == 0 && self.deferred_bytes == 0
    }
}

impl AddAssign for DiscardOutcome {
    fn add_assign(&mut self, other: Self) {
        self.bytes += other.bytes;
        self.ranges += other.ranges;
        self.syscalls += other.syscalls;
        self.inhibited_bytes += other.inhibited_bytes;
        self.deferred_bytes += other.deferred_bytes;
    }
}

/// How several ranges of anonymous memory are discarded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DiscardMethod {
    /// `process_madvise(MADV_DONTNEED)` on the process itself, up to 1024 ranges per call (Linux
    /// 6.13 and later).
    Vectored,
    /// One `madvise(MADV_DONTNEED)` per range.
    Single,
    /// One `fallocate(FALLOC_FL_PUNCH_HOLE)` per range; memory backed by files.
    PunchHole,
}

/// Part of a range that lies within one region.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Piece<'a> {
    /// Index of the region.
    pub(crate) region: usize,
    /// Guest pages.
    pub(crate) range: GuestRange,
    /// Host address of the first page.
    pub(crate) address: usize,
    /// File and offset in bytes, unless the memory is anonymous.
    pub(crate) file: Option<(&'a File, u64)>,
}

impl Piece<'_> {
    /// The part of this piece within `range`; `None` if it is empty.
    pub(crate) fn part(&self, range: GuestRange) -> Option<Self> {
        let range = self.range.intersection(range);
        let offset_bytes = range.start.address() - self.range.start.address();
        (!range.is_empty()).then(|| Self {
            region: self.region,
            range,
            address: self.address + offset_bytes as usize,
            file: self.file.map(|(file, offset)| (file, offset + offset_bytes)),
        })
    }
}

/// Stands for the calling thread instead of a pidfd (Linux 6.14, include/uapi/linux/pidfd.h).
const PIDFD_SELF_THREAD: RawFd = -10000;

/// How the process names itself to `process_madvise`.
#[derive(Debug)]
enum OwnProcess {
    /// The process that makes the call, which is right after a fork, too.
    Caller,
    /// On a kernel that cannot be told so. In a forked process this means the other one, whose
    /// memory the kernel does not discard (mm/madvise.c, `process_madvise_remote_valid`).
    Pidfd(OwnedFd),
}

impl OwnProcess {
    fn number(&self) -> RawFd {
        match self {
            Self::Caller => PIDFD_SELF_THREAD,
            Self::Pidfd(pidfd) => pidfd.as_raw_fd(),
        }
    }
}

/// Discards pieces of guest memory that have been checked.
#[derive(Debug)]
pub(crate) struct Discarder {
    /// The process itself, if `process_madvise` can discard its memory.
    own_process: Option<OwnProcess>,
}

impl Discarder {
    /// Determines the kernel's capabilities.
    pub(crate) fn probe() -> Self {
        let own_process = probe_vectored().inspect_err(|error| {
            tracing::debug!(
                "process_madvise cannot discard own memory here ({error}); using madvise"
            );
        });
        Self { own_process: own_process.ok() }
    }

    /// A discarder that makes a call for each range, for comparison.
    pub(crate) fn single() -> Self {
        Self { own_process: None }
    }

    /// Whether several anonymous ranges are discarded with one call.
    pub(crate) fn is_vectored(&self) -> bool {
        self.own_process.is_some()
    }

    /// Returns the pieces' memory to the host.
    ///
    /// # Safety
    /// Each piece's address must be that of a live mapping of guest memory that covers the piece
    /// and to which no Rust reference exists.
    pub(crate) unsafe fn discard(&self, pieces: &[Piece<'_>]) -> Result<DiscardOutcome, RamError> {
        let mut outcome = DiscardOutcome::default();
        let mut rest = pieces;
        // Until it fails: then it would for each of the others, too.
        let mut own_process = self.own_process.as_ref();
        while let Some((first, others)) = rest.split_first() {
            let anonymous =
                rest.iter().take(MAX_VECTORS).take_while(|piece| piece.file.is_none()).count();
            let done = match (own_process, first.file) {
                (Some(process), None) if anonymous > 1 => {
                    // SAFETY: the caller guarantees the validity of the pieces, which are all
                    // anonymous.
                    let done = unsafe { discard_vectored(process, &rest[..anonymous]) };
                    own_process = own_process.filter(|_| done > 0);
                    done
                }
                _ => 0,
            };
            if done > 0 {
                outcome.bytes +=
                    rest[..done].iter().map(|piece| piece.range.size_bytes()).sum::<u64>();
                outcome.ranges += done as u64;
                rest = &rest[done..];
            } else {
                // SAFETY: the caller guarantees the validity of the piece.
                unsafe { discard_one(first) }?;
                rest = others;
                outcome.bytes += first.range.size_bytes();
                outcome.ranges += 1;
            }
            outcome.syscalls += 1;
        }
        Ok(outcome)
    }
}

/// Discards pieces with one call; returns how many were discarded entirely. The caller continues
/// with the next one alone, so that an error is reported with its range.
///
/// # Safety
/// As for [`Discarder::discard`], and the pieces must be anonymous memory.
unsafe fn discard_vectored(process: &OwnProcess, pieces: &[Piece<'_>]) -> usize {
    let vectors: Vec<libc::iovec> = pieces
        .iter()
        .map(|piece| libc::iovec {
            iov_base: piece.address as *mut _,
            iov_len: piece.range.size_bytes() as usize,
        })
        .collect();
    // SAFETY: the caller guarantees that the addresses are guest memory without Rust references,
    // whose content may vanish. `vectors` is an array of `vectors.len()` iovecs that lives until
    // the call returns.
    let discarded_bytes = unsafe { process_madvise(process, &vectors) }.unwrap_or(0);
    let mut left_bytes = discarded_bytes;
    pieces
        .iter()
        .take_while(|piece| {
            let fits = piece.range.size_bytes() <= left_bytes;
            left_bytes = left_bytes.saturating_sub(piece.range.size_bytes());
            fits
        })
        .count()
}

/// Discards one piece.
///
/// # Safety
/// As for [`Discarder::discard`].
unsafe fn discard_one(piece: &Piece<'_>) -> Result<(), RamError> {
    let size_bytes = piece.range.size_bytes();
    loop {
        let (call, result) = if let Some((file, offset)) = piece.file {
            let mode = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            ("fallocate(FALLOC_FL_PUNCH_HOLE)", fallocate(file, mode, offset, size_bytes))
        } else {
            // SAFETY: the caller guarantees that this is guest memory without Rust references,
            // whose content may vanish; later reads see zeros.
            let result = unsafe {
                madvise(piece.address as *mut _, size_bytes as usize, Advice::LinuxDontNeed)
            };
            ("madvise(MADV_DONTNEED)", result)
        };
        match result {
            Ok(()) => return Ok(()),
            Err(Errno::INTR) => {}
            Err(error) => {
                return Err(RamError::Discard { range: piece.range, call, source: error.into() });
            }
        }
    }
}

/// `process_madvise(MADV_DONTNEED)`; returns the number of bytes discarded.
///
/// # Safety
/// If `process` is this process, nothing may rely on the content of the memory that `vectors`
/// describes.
unsafe fn process_madvise(process: &OwnProcess, vectors: &[libc::iovec]) -> io::Result<u64> {
    // SAFETY: the caller guarantees the validity of the memory that the vectors describe; the
    // pointer and the count describe the slice, which outlives the call.
    let result = unsafe {
        libc::syscall(
            libc::SYS_process_madvise,
            process.number(),
            vectors.as_ptr(),
            vectors.len(),
            libc::MADV_DONTNEED,
            0,
        )
    };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result as u64) }
}

/// Tries `process_madvise` on a page mapped for this purpose. Linux before 6.13 refuses advice that
/// destroys content, even for the process itself.
fn probe_vectored() -> io::Result<OwnProcess> {
    let size_bytes = PAGE_SIZE_BYTES as usize;
    // SAFETY: without MAP_FIXED the kernel chooses a free place, so no existing mapping is touched.
    let page = unsafe {
        mmap_anonymous(
            ptr::null_mut(),
            size_bytes,
            ProtFlags::READ | ProtFlags::WRITE,
            MapFlags::PRIVATE,
        )
    }?;
    let vector = libc::iovec { iov_base: page, iov_len: size_bytes };
    let accepted = |process: OwnProcess| {
        // SAFETY: the page was mapped above for this purpose and is used by nothing else.
        match unsafe { process_madvise(&process, &[vector]) }? {
            PAGE_SIZE_BYTES => Ok(process),
            _ => Err(io::ErrorKind::Unsupported.into()),
        }
    };
    let process = accepted(OwnProcess::Caller)
        .or_else(|_| accepted(OwnProcess::Pidfd(pidfd_open(getpid(), PidfdFlags::empty())?)));
    // SAFETY: the page was mapped above and is no longer used.
    unsafe { munmap(page, size_bytes) }?;
    process
}

#[cfg(test)]
mod tests {
    use ebb_abi::Pfn;
    use vm_memory::{Bytes, GuestAddress};

    use super::*;
    use crate::{Backing, GuestRam, HugePages, Populate, RegionSpec};

    #[test]
    fn a_descriptor_of_no_process_makes_single_calls() {
        let spec = RegionSpec {
            start: GuestAddress(0),
            size_bytes: 16 * PAGE_SIZE_BYTES,
            host_node: None,
        };
        let ram =
            GuestRam::new(&[spec], Backing::Anonymous, HugePages::Off, Populate::Lazy).unwrap();
        let page = |page| GuestRange::new(Pfn(page), 1);
        let pieces: Vec<_> = [2, 5, 9].into_iter().filter_map(|it| ram.piece(page(it))).collect();
        for piece in &pieces {
            ram.memory().write_obj(7_u8, GuestAddress(piece.range.start.address())).unwrap();
        }
        // In a forked process, all but the necessary descriptors are closed, and the number may be
        // that of another file.
        let file = tempfile::tempfile().unwrap();
        let discarder = Discarder { own_process: Some(OwnProcess::Pidfd(file.into())) };
        // SAFETY: the pieces are those of `ram`, to which there is no reference.
        let outcome = unsafe { discarder.discard(&pieces) }.unwrap();
        assert_eq!((outcome.ranges, outcome.syscalls), (3, 3));
        for piece in &pieces {
            let address = GuestAddress(piece.range.start.address());
            assert_eq!(ram.memory().read_obj::<u8>(address).unwrap(), 0);
        }
    }
}
