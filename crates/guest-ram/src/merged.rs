//! Guest memory some of whose pages are merged: for each a stable page is mapped that others have
//! too.
//!
//! A stable page belongs to a memory file that is mapped privately in place of the guest's page, so
//! that the host kernel makes a copy when the guest writes to it. `MADV_DONTNEED` there would bring
//! back the stable page's content, which is neither zero nor what the guest had there, even after
//! the guest has written to it. So what is discarded is replaced by anonymous memory, as in
//! [`restored`](crate::restored) memory, and from then on is like all other memory, apart from one
//! thing: nobody is told of writes to it before the thread that merges has registered it again.
//! [`MergedRuns`] knows all this.
//!
//! While pages are being merged they are in a place of their own, away from the guest. To discard
//! them then would do nothing, and afterwards they would come back; to look for them would find
//! nothing. So there is a lock: the merging thread holds it while it has pages away, whoever
//! discards holds it meanwhile, and whoever asks what is there does. Nobody who holds it may wait
//! for somebody who touches guest memory, who in turn may wait for the merging thread. Its place is
//! behind the inhibitors of discards and before the runs of restored memory.

use std::fs::File;
use std::io::{self, Read, Seek};
use std::ptr;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};

use ebb_abi::{HUGE_PAGE_SIZE_BYTES, HUGE_PAGE_SIZE_PAGES, PAGE_SIZE_BYTES, Pfn};
use vm_memory::GuestAddress;

use crate::discard::{DiscardOutcome, Piece};
use crate::mapping::Mapping;
use crate::region::{Region, RegionSpec};
use crate::templates::{Templates, max_mappings};
use crate::{Backing, GuestRam, GuestRange, RamError, StableSlot};
pub(crate) use runs::{MergedRuns, Verdict};

mod kernel;
mod runs;
pub mod testing;

pub use kernel::KernelMerging;
pub use runs::Returns;

/// Borders of mappings that all memories of this process have because of merging.
static BORDERS: LazyLock<Arc<AtomicU64>> = LazyLock::new(Arc::default);

/// What is special about memory whose pages may be merged.
#[derive(Debug)]
pub(crate) struct Merged {
    runs: Mutex<MergedRuns>,
    templates: Templates,
    /// Where copies are made: as large as a huge page.
    scratch: Mapping,
    regions: Vec<Region>,
    /// Kept open: a monitor may have no access to /proc later on.
    maps: Option<Mutex<File>>,
}

impl GuestRam {
    /// Prepares for pages to be merged; from now on discards exclude merges. Does nothing the
    /// second time.
    ///
    /// # Errors
    /// As for [`GuestRam::new`].
    pub(crate) fn note_merges(&self) -> Result<&Merged, RamError> {
        if let Some(merged) = self.merged.get() {
            return Ok(merged);
        }
        let merged = Merged::new(self)?;
        // Somebody else may have been quicker.
        Ok(self.merged.get_or_init(|| merged))
    }

    /// Bytes of guest memory for which a stable page is mapped, as far as writes to them have been
    /// noticed.
    pub fn merged_bytes(&self) -> u64 {
        self.lock_merged().map_or(0, |runs| runs.merged_pages() * PAGE_SIZE_BYTES)
    }

    /// Number of mappings that guest memory takes because pages are merged, at most.
    pub fn merged_mappings(&self) -> u64 {
        self.lock_merged().map_or(0, |runs| runs.own_mappings())
    }

    /// What became of merged pages that were written to.
    pub fn returns(&self) -> Returns {
        self.lock_merged().map_or_else(Returns::default, |runs| runs.returns())
    }

    /// Keeps pages from being merged and discarded while the result lives; `None` if pages of this
    /// memory are never merged.
    pub(crate) fn lock_merged(&self) -> Option<MutexGuard<'_, MergedRuns>> {
        self.merged.get().map(Merged::lock)
    }

    /// The parts of a range that are mapped from files, whichever: that of which the memory was
    /// restored, or those of stable pages. Without private copies they hold nothing of this
    /// memory's own.
    pub(crate) fn file_mapped(&self, range: GuestRange) -> Vec<GuestRange> {
        let mut parts: Vec<GuestRange> = self
            .lock_merged()
            .map_or(Vec::new(), |runs| runs.stable_mapped(range).map(|(part, _)| part).collect());
        if let Some(restored) = &self.restored {
            parts.append(&mut restored.file_backed(range));
            parts.sort_unstable();
        }
        parts
    }
}

impl Merged {
    fn new(ram: &GuestRam) -> Result<Self, RamError> {
        let spec = |region: &Region| RegionSpec {
            start: region.start,
            size_bytes: region.size_bytes,
            host_node: region.host_node,
        };
        let specs: Vec<RegionSpec> = ram.regions().iter().map(spec).collect();
        if ram.backing() != Backing::Anonymous {
            return Err(RamError::NotMergeable { backing: ram.backing() });
        }
        let maps = File::open("/proc/self/maps")
            .inspect_err(|error| tracing::debug!("/proc/self/maps cannot be read: {error}"));
        let scratch = RegionSpec {
            start: GuestAddress(0),
            size_bytes: HUGE_PAGE_SIZE_BYTES,
            host_node: None,
        };
        let mut runs = MergedRuns::new(ram.page_ranges(), max_mappings(), Arc::clone(&BORDERS));
        if let Some(restored) = &ram.restored {
            runs.set_other_mappings(restored.mappings());
        }
        Ok(Self {
            runs: Mutex::new(runs),
            templates: Templates::new(&specs, ram.huge_pages())?,
            scratch: Mapping::new(&scratch, Backing::Anonymous, ram.huge_pages())?,
            regions: ram.regions().to_vec(),
            maps: maps.ok().map(Mutex::new),
        })
    }

    /// What is known; while the result lives, nothing is discarded, and nobody else merges.
    pub(crate) fn lock(&self) -> MutexGuard<'_, MergedRuns> {
        self.runs.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes `pieces` read as zeros as far as they must not be discarded by ordinary means, by
    /// replacing them. What is left for an ordinary discard stays in `pieces`. Merged pages for
    /// which no mappings are left stay as they are and are counted as deferred.
    ///
    /// # Safety
    /// Each piece must lie within the region that it names, and nobody may rely on its content.
    pub(crate) unsafe fn replace(
        &self,
        runs: &mut MergedRuns,
        pieces: &mut Vec<Piece<'_>>,
    ) -> Result<DiscardOutcome, RamError> {
        let mut outcome = DiscardOutcome::default();
        if runs.is_all_ordinary() {
            return Ok(outcome);
        }
        let mut ordinary = Vec::with_capacity(pieces.len());
        for piece in pieces.drain(..) {
            match runs.judge(piece.range) {
                Verdict::Ordinary => {
                    runs.note_emptied(piece.range);
                    ordinary.push(piece);
                }
                Verdict::Replace => {
                    outcome.ranges += 1;
                    let done = |part: GuestRange| {
                        runs.note_discarded(part);
                        outcome.bytes += part.size_bytes();
                        outcome.syscalls += 1;
                    };
                    // SAFETY: the caller vouches for the piece.
                    match unsafe { self.templates.put_over(&piece, done) } {
                        // Others have used up the mappings. The kernel says so before it changes
                        // anything.
                        Err(RamError::Discard { source, .. })
                            if is_out_of_memory(&source)
                                && piece.range.pages < HUGE_PAGE_SIZE_PAGES =>
                        {
                            outcome.ranges -= 1;
                            outcome.deferred_bytes += keep(runs, &piece, &mut ordinary);
                        }
                        result => result?,
                    }
                }
                Verdict::Keep => outcome.deferred_bytes += keep(runs, &piece, &mut ordinary),
            }
        }
        *pieces = ordinary;
        Ok(outcome)
    }

    /// Replaces `piece`, of no more pages than a huge page, by anonymous memory that `fill` writes
    /// to before. The shares of its pages are given up.
    ///
    /// # Errors
    /// What `fill` answers, or the kernel; nothing has been replaced then.
    ///
    /// # Safety
    /// The piece must lie within the region that it names, and what `fill` writes must be its
    /// content, until this returns.
    pub(crate) unsafe fn replace_by_copy(
        &self,
        runs: &mut MergedRuns,
        piece: &Piece<'_>,
        fill: impl FnOnce(*mut u8) -> io::Result<()>,
        released: &mut Vec<StableSlot>,
    ) -> io::Result<()> {
        // SAFETY: the caller vouches for the piece and its content.
        unsafe { self.put_copy(piece, fill) }?;
        runs.note_moved_here(piece.range, released);
        Ok(())
    }

    /// Replaces `piece`, of no more pages than a huge page, by anonymous memory with the same
    /// content, nobody knowing.
    ///
    /// # Errors
    /// The kernel's; nothing has been replaced then.
    ///
    /// # Safety
    /// The piece must lie within the region that it names, its content must not change until this
    /// returns, and what a device has pinned of it must not be written to any more.
    pub(crate) unsafe fn bring_back(
        &self,
        runs: &mut MergedRuns,
        piece: &Piece<'_>,
    ) -> io::Result<()> {
        let fill = |copy: *mut u8| {
            // SAFETY: both are memory of as many bytes, read and written through pointers only; the
            // scratch area is no guest memory.
            unsafe {
                ptr::copy_nonoverlapping(
                    piece.address as *const u8,
                    copy,
                    piece.range.size_bytes() as usize,
                );
            };
            Ok(())
        };
        // SAFETY: the copy is the piece's content, as the caller vouches.
        unsafe { self.put_copy(piece, fill) }?;
        runs.note_brought_back(piece.range);
        Ok(())
    }

    /// Empty memory like that of `piece`'s region, of as many pages, which nobody else knows: its
    /// address. It is there until the next call of this or of what makes copies.
    ///
    /// # Errors
    /// The kernel's.
    pub(crate) fn scratch_for(&self, piece: &Piece<'_>) -> io::Result<usize> {
        let template = &self.templates.mappings()[piece.region];
        // SAFETY: the scratch area is this value's own, and nobody needs what is there.
        unsafe { template.copy_over(self.scratch.address(), piece.range.size_bytes() as usize) }?;
        Ok(self.scratch.address())
    }

    /// Puts the pages of the scratch area in the place of `piece`, all of whose pages are there, as
    /// one mapping.
    ///
    /// # Errors
    /// The kernel's; nothing has been replaced then.
    ///
    /// # Safety
    /// The piece must lie within guest memory and have no pages any more: they are in the memory
    /// that [`scratch_for`](Self::scratch_for) made for it.
    pub(crate) unsafe fn put_scratch(
        &self,
        runs: &mut MergedRuns,
        piece: &Piece<'_>,
    ) -> io::Result<()> {
        // SAFETY: what is replaced has no content, and what replaces it is what the guest's pages
        // are, as the caller vouches.
        unsafe { self.scratch.copy_over(piece.address, piece.range.size_bytes() as usize) }?;
        runs.note_joined(piece.range);
        Ok(())
    }

    /// Puts anonymous memory that `fill` has written to in the place of `piece`.
    ///
    /// # Errors
    /// What `fill` answers, or the kernel; nothing has been replaced then.
    ///
    /// # Safety
    /// As for [`replace_by_copy`](Self::replace_by_copy).
    unsafe fn put_copy(
        &self,
        piece: &Piece<'_>,
        fill: impl FnOnce(*mut u8) -> io::Result<()>,
    ) -> io::Result<()> {
        fill(self.scratch_for(piece)? as *mut u8)?;
        // SAFETY: what is replaced has the same content as what replaces it, as the caller vouches.
        unsafe { self.scratch.copy_over(piece.address, piece.range.size_bytes() as usize) }
    }

    /// Counts the mappings of guest memory. System calls: `lseek`, `read`.
    ///
    /// # Errors
    /// If /proc/self/maps cannot be read; the count stays what it was.
    pub(crate) fn recount(&self, runs: &mut MergedRuns) -> io::Result<()> {
        let Some(maps) = &self.maps else { return Err(io::ErrorKind::Unsupported.into()) };
        let mut text = String::new();
        let mut file = maps.lock().unwrap_or_else(PoisonError::into_inner);
        file.rewind()?;
        file.read_to_string(&mut text)?;
        let starts =
            text.lines().filter_map(|line| u64::from_str_radix(line.split_once('-')?.0, 16).ok());
        let pages = starts.filter_map(|address| {
            let region = self.regions.iter().find(|region| {
                (region.host_address..region.host_address + region.size_bytes).contains(&address)
            })?;
            Some(Pfn(region.pages().start.0 + (address - region.host_address) / PAGE_SIZE_BYTES))
        });
        runs.set_borders(pages);
        Ok(())
    }
}

/// Leaves what a stable file is mapped for in a piece, and returns its size in bytes; what is left
/// goes to `ordinary`.
fn keep<'a>(runs: &MergedRuns, piece: &Piece<'a>, ordinary: &mut Vec<Piece<'a>>) -> u64 {
    let mut kept_bytes = 0;
    let mut rest = piece.range;
    for (part, _) in runs.stable_mapped(piece.range) {
        let before = GuestRange::new(rest.start, part.start.0 - rest.start.0);
        ordinary.extend(piece.part(before));
        kept_bytes += part.size_bytes();
        rest = GuestRange::new(part.end(), rest.end().0 - part.end().0);
    }
    ordinary.extend(piece.part(rest));
    kept_bytes
}

fn is_out_of_memory(error: &io::Error) -> bool {
    error.raw_os_error() == Some(libc::ENOMEM)
}

#[cfg(test)]
mod tests;
