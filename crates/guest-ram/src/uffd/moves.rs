//! userfaultfd as merging uses it: tracking of writes, and moving pages away from the guest.
//!
//! Guest memory is registered for write protection that the kernel resolves by itself
//! (`UFFD_FEATURE_WP_ASYNC`): a write marks the page as written, without a fault to handle. Only
//! while pages are moved away for a comparison their place is also registered for missing pages: an
//! access to it blocks until it is woken.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;

use rustix::io::Errno;

use super::{UffdUnavailable, Userfaultfd, ioctl, open};

// include/uapi/linux/userfaultfd.h
const FEATURE_WP_SHMEM: u64 = 1 << 12;
const FEATURE_WP_UNPOPULATED: u64 = 1 << 13;
const FEATURE_WP_ASYNC: u64 = 1 << 15;
const FEATURE_MOVE: u64 = 1 << 16;
const NEEDED_FEATURES: u64 = FEATURE_WP_UNPOPULATED | FEATURE_WP_ASYNC | FEATURE_MOVE;
const DONT_WAKE: u64 = 1 << 0;
const ALLOW_HOLES: u64 = 1 << 1;
const UFFDIO_COPY: libc::Ioctl = 0xc028_aa03;
const UFFDIO_MOVE: libc::Ioctl = 0xc028_aa05;

/// `struct uffdio_copy`
#[repr(C)]
struct CopyPages {
    dst: u64,
    src: u64,
    len: u64,
    mode: u64,
    copied: i64,
}

/// `struct uffdio_move`: the destination comes first, too.
type MovePages = CopyPages;

const _: () = assert!(size_of::<CopyPages>() == 40);

/// Result of a move.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Moved {
    /// Bytes that were moved.
    pub(crate) bytes: usize,
    /// Reason for its end.
    pub(crate) stopped: Option<Errno>,
}

impl Userfaultfd {
    /// Opens one that also catches the kernel's own accesses, and checks the features it can.
    /// `device` is /dev/userfaultfd, if the caller has it open.
    pub(crate) fn open(device: Option<&File>) -> Result<Self, UffdUnavailable> {
        let missing = |feature, since| Err(UffdUnavailable::OldKernel { feature, since });
        // The first call queries the features; a second one on the same descriptor is refused.
        let offered = match Self::handshake(&open(device)?, 0) {
            Ok(offered) => offered,
            Err(source) => {
                let action = "query the features of userfaultfd";
                return Err(UffdUnavailable::Refused { action, source });
            }
        };
        if offered & (FEATURE_WP_ASYNC | FEATURE_WP_UNPOPULATED)
            != FEATURE_WP_ASYNC | FEATURE_WP_UNPOPULATED
        {
            return missing(
                "asynchronous write protection by userfaultfd (UFFD_FEATURE_WP_ASYNC)",
                "6.8",
            );
        }
        if offered & FEATURE_MOVE == 0 {
            return missing("way to move pages (UFFDIO_MOVE)", "6.8");
        }
        Self::open_with(device, NEEDED_FEATURES, "switch on the features of userfaultfd")
    }

    /// Opens one for which writers block: with write protection that the kernel does not resolve,
    /// also for memory files.
    pub(crate) fn open_waiting(device: Option<&File>) -> Result<Self, UffdUnavailable> {
        Self::open_with(device, FEATURE_WP_SHMEM, "switch on write protection of memory files")
    }

    /// Moves pages: afterwards they are at `to`, which must be watched and have no pages, and
    /// missing at `from`. Pages that are pinned are refused with EBUSY. Wakes no thread.
    ///
    /// # Safety
    /// Both must be mappings of anonymous memory to which no Rust reference exists, and the caller
    /// must ensure that an access to the pages at `from` blocks until they are back.
    pub(crate) unsafe fn move_pages(&self, from: usize, to: usize, size_bytes: usize) -> Moved {
        // SAFETY: guaranteed by the caller, as for this function.
        unsafe { self.move_with(DONT_WAKE, from, to, size_bytes) }
    }

    /// As [`move_pages`](Self::move_pages), but absent pages are skipped.
    ///
    /// # Safety
    /// As for [`move_pages`](Self::move_pages).
    pub(crate) unsafe fn move_what_is_there(
        &self,
        from: usize,
        to: usize,
        size_bytes: usize,
    ) -> Moved {
        // SAFETY: guaranteed by the caller, as for this function.
        unsafe { self.move_with(DONT_WAKE | ALLOW_HOLES, from, to, size_bytes) }
    }

    /// # Safety
    /// As for [`move_pages`](Self::move_pages).
    unsafe fn move_with(&self, mode: u64, from: usize, to: usize, size_bytes: usize) -> Moved {
        let mut pages =
            MovePages { dst: to as u64, src: from as u64, len: size_bytes as u64, mode, copied: 0 };
        // SAFETY: UFFDIO_MOVE reads and writes one `struct uffdio_move`. The caller guarantees the
        // validity of the memory.
        let result = unsafe { ioctl(self.descriptor.as_raw_fd(), UFFDIO_MOVE, &raw mut pages) };
        let stopped =
            result.err().map(|error| Errno::from_io_error(&error).unwrap_or(Errno::INVAL));
        Moved { bytes: usize::try_from(pages.copied).unwrap_or(0), stopped }
    }

    /// Copies one page to an absent one.
    ///
    /// # Safety
    /// `to` must be a watched page of guest memory, and `from` readable.
    pub(crate) unsafe fn copy_page(
        &self,
        from: usize,
        to: usize,
        size_bytes: usize,
    ) -> io::Result<()> {
        let mut pages = CopyPages {
            dst: to as u64,
            src: from as u64,
            len: size_bytes as u64,
            mode: DONT_WAKE,
            copied: 0,
        };
        // SAFETY: UFFDIO_COPY reads and writes one `struct uffdio_copy`, and fills only absent
        // pages.
        unsafe { ioctl(self.descriptor.as_raw_fd(), UFFDIO_COPY, &raw mut pages) }
    }
}
