//! Guest memory parts of which are mapped from files: from the file that it was restored from, or
//! from shared stable pages ([`Source`]).
//!
//! Both are mapped privately, so that the host kernel makes a copy when the guest writes to a page.
//! `MADV_DONTNEED` there would restore the file's content, which is neither zero nor the guest's
//! content, even after the guest has written to it. So discarded pages are replaced by [fresh
//! anonymous memory](fresh_anon), and are ordinary memory from then on. [`FileExtents`] records
//! which pages are still mapped from a file.
//!
//! # The lock
//! While pages are being merged they are moved away from the guest. A discard would have no effect
//! then, and afterwards they would be moved back; a search for them would find nothing. So the
//! extents are behind a lock: the merging thread holds it while it has moved pages away, a discard
//! holds it until all its pages are discarded, and so does a search for populated pages. A thread
//! that holds it must not wait for one that accesses guest memory, which may in turn wait for the
//! merging thread. In the lock order it comes after the inhibitors of discards.

use std::fs::File;
use std::io;
use std::sync::{Mutex, MutexGuard, PoisonError};

use ebb_abi::HUGE_PAGE_SIZE_PAGES;
use rustix::fs::{Stat, fstat};

use crate::discard::{DiscardOutcome, Piece};
use crate::mapping::Mapping;
use crate::ranges::gaps;
use crate::region::{HugePages, RegionSpec};
use crate::{GuestRange, ImageError, RamError};
use extents::Verdict;
use fresh_anon::FreshAnon;
use vma_budget::VmaBudget;

mod extents;
pub(crate) mod fresh_anon;
#[cfg(feature = "merge")]
mod merged_pages;
#[cfg(feature = "merge")]
mod stable;
mod vma_budget;

pub(crate) use extents::{FileExtents, Source};
#[cfg(feature = "merge")]
pub use merged_pages::BrokenCowStats;
#[cfg(feature = "merge")]
pub use stable::single_pages_bytes;
pub(crate) use vma_budget::max_vmas;

/// The file that memory was restored from. A page's offset in it is its RAM offset.
#[derive(Debug)]
pub(crate) struct SnapshotFile {
    pub(crate) file: File,
    /// Offset of the memory in the file, in bytes.
    pub(crate) offset_bytes: u64,
}

/// State of memory that is partly mapped from files.
#[derive(Debug)]
pub(crate) struct Overlay {
    snapshot: Option<SnapshotFile>,
    extents: Mutex<FileExtents>,
    fresh: FreshAnon,
}

impl Overlay {
    /// `restored` is the file that the memory was restored from, with the ranges of pages that are
    /// mapped from it. They must not overlap or cross regions.
    ///
    /// # Errors
    /// As for [`GuestRam::new`](crate::GuestRam::new).
    pub(crate) fn new(
        regions: &[RegionSpec],
        huge_pages: HugePages,
        restored: Option<(SnapshotFile, &[GuestRange])>,
    ) -> Result<Self, RamError> {
        let (snapshot, ranges) = match restored {
            Some((snapshot, ranges)) => (Some(snapshot), ranges),
            None => (None, &[][..]),
        };
        let pages: Vec<GuestRange> = regions.iter().map(RegionSpec::pages).collect();
        let extents = FileExtents::new(ranges, VmaBudget::new(pages));
        let fresh = FreshAnon::new(regions, huge_pages)?;
        Ok(Self { snapshot, extents: Mutex::new(extents), fresh })
    }

    /// Locks the extents; while the result lives, nothing is discarded or merged.
    pub(crate) fn lock(&self) -> MutexGuard<'_, FileExtents> {
        self.extents.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The file that the memory was restored from.
    pub(crate) fn snapshot(&self) -> Option<&SnapshotFile> {
        self.snapshot.as_ref()
    }

    /// The memory that replaces discarded pages; it must get the same advice as guest memory, since
    /// the kernel would not join it with its neighbours otherwise.
    pub(crate) fn templates(&self) -> &[Mapping] {
        self.fresh.templates()
    }

    /// Makes `pieces` read as zeros as far as they are mapped from files, by replacing them. The
    /// rest stays in `pieces` for an ordinary discard. Pages mapped from files for which the VMA
    /// budget does not suffice stay unchanged and are counted as deferred.
    ///
    /// # Safety
    /// Each piece must lie within the region that it names, and nothing may rely on its content.
    pub(crate) unsafe fn replace(
        &self,
        extents: &mut FileExtents,
        pieces: &mut Vec<Piece<'_>>,
    ) -> Result<DiscardOutcome, RamError> {
        let mut outcome = DiscardOutcome::default();
        if extents.is_all_ordinary() {
            return Ok(outcome);
        }
        let mut ordinary = Vec::with_capacity(pieces.len());
        for piece in pieces.drain(..) {
            match extents.judge(piece.range) {
                Verdict::Ordinary => {
                    #[cfg(feature = "merge")]
                    extents.note_emptied(piece.range);
                    ordinary.push(piece);
                }
                Verdict::Replace => {
                    outcome.ranges += 1;
                    let done = |part: GuestRange| {
                        extents.note_discarded(part);
                        outcome.bytes += part.size_bytes();
                        outcome.syscalls += 1;
                    };
                    // SAFETY: the caller guarantees the validity of the piece.
                    match unsafe { self.fresh.put_over(&piece, done) } {
                        // The rest of the process has used up the VMAs. The kernel reports that
                        // before it changes anything. Memory without a file needs no VMA of its
                        // own.
                        Err(RamError::Discard { source, .. })
                            if is_out_of_memory(&source)
                                && extents.mapped(piece.range).next().is_none() =>
                        {
                            outcome.ranges -= 1;
                            #[cfg(feature = "merge")]
                            extents.note_emptied(piece.range);
                            ordinary.push(piece);
                        }
                        Err(RamError::Discard { source, .. })
                            if is_out_of_memory(&source)
                                && piece.range.pages < HUGE_PAGE_SIZE_PAGES =>
                        {
                            outcome.ranges -= 1;
                            outcome.deferred_bytes += keep(extents, &piece, &mut ordinary);
                        }
                        result => result?,
                    }
                }
                Verdict::Keep => outcome.deferred_bytes += keep(extents, &piece, &mut ordinary),
            }
        }
        *pieces = ordinary;
        Ok(outcome)
    }
}

impl SnapshotFile {
    /// File and offset of the byte at a RAM offset.
    pub(crate) fn at(&self, ram_offset_bytes: u64) -> (&File, u64) {
        (&self.file, self.offset_bytes + ram_offset_bytes)
    }

    /// Checks that `target` is another file.
    ///
    /// # Errors
    /// [`RamError::SaveOntoSource`]; [`RamError::ReadImage`] if this file cannot be examined.
    pub(crate) fn check_is_not(&self, target: &Stat) -> Result<(), RamError> {
        let own = self.stat()?;
        if (own.st_dev, own.st_ino) == (target.st_dev, target.st_ino) {
            return Err(RamError::SaveOntoSource);
        }
        Ok(())
    }

    /// Checks that the file is still long enough for the whole memory. Missing parts would look
    /// like holes.
    ///
    /// # Errors
    /// [`ImageError::FileTooShort`]; [`RamError::ReadImage`] if this file cannot be examined.
    pub(crate) fn check_length(&self, ram_bytes: u64) -> Result<(), RamError> {
        let (file_bytes, needed_bytes) = (self.stat()?.st_size as u64, self.at(ram_bytes).1);
        if file_bytes < needed_bytes {
            return Err(ImageError::FileTooShort { file_bytes, needed_bytes }.into());
        }
        Ok(())
    }

    fn stat(&self) -> Result<Stat, RamError> {
        fstat(&self.file).map_err(|error| RamError::ReadImage {
            offset_bytes: self.offset_bytes,
            source: error.into(),
        })
    }
}

/// Keeps the parts of a piece that are mapped from a file, and returns their size in bytes; the
/// rest is added to `ordinary`.
fn keep<'a>(extents: &FileExtents, piece: &Piece<'a>, ordinary: &mut Vec<Piece<'a>>) -> u64 {
    let kept: Vec<GuestRange> = extents.mapped(piece.range).map(|(part, _)| part).collect();
    ordinary.extend(gaps(piece.range, &kept).filter_map(|part| piece.part(part)));
    kept.iter().map(|part| part.size_bytes()).sum()
}

fn is_out_of_memory(error: &io::Error) -> bool {
    error.raw_os_error() == Some(libc::ENOMEM)
}

#[cfg(test)]
mod tests;
