//! A merging thread's access to pages: their states, and their content.

use std::io;
use std::ptr;
use std::sync::Arc;

use ebb_abi::{HUGE_PAGE_SIZE_PAGES, PAGE_SIZE_BYTES, Pfn};

use super::merging::{Ancestry, Merging};
use super::scan::{PageRun, PageScan, Question};
#[cfg(feature = "testing")]
use super::schedule::Protection;
use super::schedule::{Copies, Sampler};
use super::{MergeUnavailable, StableSlot};
use crate::overlay::Source;
use crate::{GuestRam, GuestRange};

const PAGE: usize = PAGE_SIZE_BYTES as usize;

/// Bytes of the next page that are prefetched during the processing of one.
const PREFETCH_BYTES: usize = PAGE;

/// State of a page found by a scan, without reading it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PageLook {
    /// No content: the host holds no page for it (it reads as zeros).
    Absent,
    /// The page may have been written to since its last scan. It is tracked from now on: content
    /// read after this scan is valid until a later scan reports `Written` again.
    Written,
    /// Not written to since its last scan.
    Clean,
    /// A stable page is mapped in its place, and it has not been written to since.
    Merged,
    /// A stable page was mapped in its place, but it has been written to since: it has a private
    /// page again, and has released its share of the stable page. Reported once; later scans report
    /// `Copied` for a while, or `Written` or `Clean`.
    Broken(StableSlot),
    /// Part of a huge page. Writes to it are not tracked: a huge page that is write-protected is
    /// split by the next write (Linux mm/memory.c, `wp_huge_pmd`).
    Huge,
    /// It was reported as `Broken` before and has a private copy in front of the stable page, which
    /// is reanonymized after a while. It cannot be merged until then.
    Copied,
    /// It cannot be merged: swapped out, mapped from a file, or excluded otherwise.
    Excluded,
}

/// Reason why memory could not be scanned or replaced.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MergeError {
    /// The pages are not in one region of guest memory.
    #[error("{range} is not within one region of guest memory")]
    OutsideRam {
        /// The requested range.
        range: GuestRange,
    },

    /// The kernel refused.
    #[error("cannot {action} at {range}: {source}")]
    Kernel {
        /// The failed action.
        action: &'static str,
        /// The pages.
        range: GuestRange,
        /// The system error.
        source: io::Error,
    },
}

/// The right to merge the pages of a memory, held by one thread at a time.
#[derive(Debug)]
pub struct MergeSession {
    pub(super) ram: Arc<GuestRam>,
    pub(super) scan: PageScan,
    pub(super) copies: Copies,
    #[cfg(feature = "testing")]
    pub(super) protection: Protection,
    pub(super) sampler: Sampler,
    /// Parts that could not be watched again, to be retried later.
    pub(super) unwatched: Vec<GuestRange>,
    /// Pages whose places in the staging area may not be empty.
    pub(super) staged: Option<GuestRange>,
}

impl MergeSession {
    /// Acquires the right to merge the pages of `ram`.
    ///
    /// # Errors
    /// [`MergeUnavailable::NotEnabled`], [`MergeUnavailable::InUse`], or the errors of
    /// [`GuestRam::enable_merging`].
    pub fn new(ram: Arc<GuestRam>) -> Result<Self, MergeUnavailable> {
        let scan = ram.page_scan(HUGE_PAGE_SIZE_PAGES as usize)?;
        let merging = ram.merging().ok_or(MergeUnavailable::NotEnabled)?;
        if !merging.take() {
            return Err(MergeUnavailable::InUse);
        }
        let seed = std::hash::BuildHasher::hash_one(&std::hash::RandomState::new(), 0_u8);
        Ok(Self {
            ram,
            scan,
            copies: Copies::default(),
            #[cfg(feature = "testing")]
            protection: Protection::Yes,
            sampler: Sampler::new(seed),
            unwatched: Vec::new(),
            staged: None,
        })
    }

    /// The memory.
    pub fn ram(&self) -> &GuestRam {
        &self.ram
    }

    /// The first page of `range` that a [`look`](Self::look) may find to be anything else than
    /// absent; `None` if there is none. It costs much less than to look at memory that the host
    /// does not have.
    ///
    /// # Errors
    /// [`MergeError::Kernel`]
    pub fn first_with_content(&mut self, range: GuestRange) -> Result<Option<Pfn>, MergeError> {
        for part in self.ram.clip(range) {
            let Some(address) = self.ram.host_address(part) else { continue };
            let overlaid = self.ram.lock_overlay();
            let divided = overlaid.and_then(|overlaid| overlaid.first_divided(part));
            // Of what is behind that nothing is asked: a memory in many pieces would be passed over
            // again for each of them.
            let end = divided.unwrap_or(part.end());
            let part = GuestRange::new(part.start, end.0 - part.start.0);
            let found = self.scan.ask(address, part.size_bytes() as usize, Question::First);
            let found = found.map_err(|source| kernel("query which pages exist", part, source))?;
            let page =
                |run: &PageRun| Pfn(part.start.0 + ((run.address() - address) / PAGE) as u64);
            if let Some(first) = found.first().map(page).or(divided) {
                return Ok(Some(first));
            }
        }
        Ok(None)
    }

    /// Scans a block of at most 512 pages within one region, and fills `looks` with one entry for
    /// each page.
    ///
    /// # Errors
    /// [`MergeError`]
    pub fn look(&mut self, block: GuestRange, looks: &mut Vec<PageLook>) -> Result<(), MergeError> {
        looks.clear();
        let address = self.address(block)?;
        looks.resize(block.pages as usize, PageLook::Absent);
        let shared = match (&self.ram.pagemap, self.merging().ancestry) {
            (Some(pagemap), Ancestry::Forked) => pagemap
                .read(address, block.pages as usize)
                .map_err(|source| kernel("query the states of pages", block, source))?,
            _ => return self.look_at_all(block, address, looks),
        };
        // A block of which all pages are shared is not even protected.
        if shared.iter().all(|state| state.is_shared_with_others()) {
            looks.fill(PageLook::Excluded);
            return Ok(());
        }
        self.look_at_all(block, address, looks)?;
        for (look, state) in looks.iter_mut().zip(shared) {
            if state.is_shared_with_others() {
                *look = PageLook::Excluded;
            }
        }
        Ok(())
    }

    /// Scans the pages of a block, also those that other processes share.
    fn look_at_all(
        &mut self,
        block: GuestRange,
        address: usize,
        looks: &mut [PageLook],
    ) -> Result<(), MergeError> {
        self.coalesce_vmas(block);
        self.watch_again(block);
        let mut seen = vec![false; looks.len()];
        for run in self.ask(block, Question::Small)? {
            let first = (run.0 - address) / PAGE;
            let look = if run.2 { PageLook::Written } else { PageLook::Clean };
            looks[first..first + run.1 / PAGE].fill(look);
            seen[first..first + run.1 / PAGE].fill(true);
        }
        for (part, source) in self.ram.file_mapped(block) {
            if source != Source::Snapshot {
                continue;
            }
            let first = (part.start.0 - block.start.0) as usize;
            looks[first..first + part.pages as usize].fill(PageLook::Excluded);
            seen[first..first + part.pages as usize].fill(true);
        }
        if seen.iter().all(|seen| *seen) {
            self.tend_copies(block, looks);
            return Ok(());
        }
        self.look_at_others(block, address, &seen, looks)
    }

    /// Scans the pages of a block that are not small pages of ordinary memory.
    fn look_at_others(
        &mut self,
        block: GuestRange,
        address: usize,
        seen: &[bool],
        looks: &mut [PageLook],
    ) -> Result<(), MergeError> {
        let found = self.scan.ask(address, block.size_bytes() as usize, Question::Any);
        let found =
            found.map_err(|source| kernel("query the states of pages", block, source))?.to_vec();
        // A part of one cannot be merged.
        let is_whole = is_huge_block(block);
        let mut copied = vec![false; looks.len()];
        for run in found {
            let first = (run.address() - address) / PAGE;
            let pages = first..first + run.size_bytes() / PAGE;
            let look = if run.is_zero() {
                PageLook::Absent
            } else if run.is_huge() && !run.is_swapped() && is_whole {
                PageLook::Huge
            } else {
                PageLook::Excluded
            };
            if !run.is_file() && !run.is_zero() {
                copied[pages.clone()].fill(true);
            }
            for page in pages {
                if !seen[page] {
                    looks[page] = look;
                }
            }
        }
        self.look_at_merged(block, &copied, looks);
        self.tend_copies(block, looks);
        Ok(())
    }

    /// Corrects the states of pages for which a stable file is mapped. `copied` are pages of the
    /// block that have a private copy.
    fn look_at_merged(&mut self, block: GuestRange, copied: &[bool], looks: &mut [PageLook]) {
        let Some(mut overlaid) = self.ram.lock_overlay() else { return };
        let place = |page: Pfn| (page.0 - block.start.0) as usize;
        for (part, _) in overlaid.stable_mapped(block) {
            for page in place(part.start)..place(part.end()) {
                looks[page] = if copied[page] { PageLook::Copied } else { PageLook::Excluded };
            }
        }
        let mut broken = Vec::new();
        for (part, _) in overlaid.shares(block) {
            for page in part.start.0..part.end().0 {
                if copied[place(Pfn(page))] {
                    broken.push(Pfn(page));
                } else {
                    looks[place(Pfn(page))] = PageLook::Merged;
                }
            }
        }
        for page in broken {
            looks[place(page)] =
                overlaid.note_broken(page).map_or(PageLook::Copied, PageLook::Broken);
        }
    }

    /// Watches memory that has replaced other memory.
    fn watch_again(&mut self, block: GuestRange) {
        let mut unwatched = std::mem::take(&mut self.unwatched);
        unwatched.retain(|range| !self.watch_range(*range));
        self.unwatched.append(&mut unwatched);
        let Some(mut overlaid) = self.ram.lock_overlay() else { return };
        for range in overlaid.untracked(block) {
            if self.watch_range(range) {
                overlaid.note_tracked(range);
            }
        }
    }

    /// Watches ordinary memory for writes.
    pub(super) fn watch_range(&self, range: GuestRange) -> bool {
        let Some(address) = self.ram.host_address(range) else { return true };
        let result = self.merging().watch_writes_again(address, range.size_bytes() as usize);
        if let Err(error) = &result {
            tracing::debug!("{range} is not watched for writes: {error}");
        }
        result.is_ok()
    }

    /// Copies each of `pages` and calls `read` with the copy; `None` if it is not guest memory. An
    /// absent page is read as zeros, and gets an entry in the page tables.
    pub fn read_each(&self, pages: &[Pfn], mut read: impl FnMut(Option<&[u8; PAGE]>)) {
        let address = |page: &Pfn| self.ram.host_address(GuestRange::new(*page, 1));
        let mut copy = Aligned([0; PAGE]);
        let mut next = pages.first().and_then(address);
        for index in 0..pages.len() {
            let this = next;
            next = pages.get(index + 1).and_then(address);
            let Some(this) = this else {
                read(None);
                continue;
            };
            // SAFETY: the page is guest memory, which is mapped as long as `self.ram` lives. The
            // guest may write to it concurrently, so it is copied before it is used; the two do not
            // overlap.
            unsafe { ptr::copy_nonoverlapping(this as *const u8, copy.0.as_mut_ptr(), PAGE) };
            // During the processing of this one.
            if let Some(next) = next {
                prefetch(next);
            }
            read(Some(&copy.0));
        }
    }

    /// Unmerges every merged page of `range`, and appends the slots that lost a share, once for
    /// each page. A thread that writes to such a page meanwhile blocks.
    ///
    /// # Errors
    /// [`MergeError::Kernel`] if the host has no memory for them. Earlier pages have been unmerged
    /// then.
    pub fn unmerge(
        &mut self,
        range: GuestRange,
        released: &mut Vec<StableSlot>,
    ) -> Result<(), MergeError> {
        let Some(overlay) = self.ram.overlay.get() else { return Ok(()) };
        for start in (range.start.0..range.end().0).step_by(HUGE_PAGE_SIZE_PAGES as usize) {
            let block = GuestRange::new(Pfn(start), HUGE_PAGE_SIZE_PAGES).intersection(range);
            self.unmerge_block(&mut overlay.lock(), block, released)?;
        }
        Ok(())
    }

    /// Releases the shares of memory that is about to be unmapped: appends the slots that the pages
    /// of `range` share.
    pub fn abandon(&mut self, range: GuestRange, released: &mut Vec<StableSlot>) {
        if let Some(mut overlaid) = self.ram.lock_overlay() {
            overlaid.note_unmerged(range, released);
        }
    }

    /// Appends the slots whose shares discards have released, once for each page.
    pub fn take_released(&mut self, released: &mut Vec<StableSlot>) {
        if let Some(mut overlaid) = self.ram.lock_overlay() {
            overlaid.take_released(released);
        }
    }

    /// The resources for merging: a session exists only with them.
    pub(super) fn merging(&self) -> &Merging {
        match self.ram.merging() {
            Some(merging) => merging,
            None => unreachable!("a session is created from it, and it is never removed"),
        }
    }

    /// Queries runs of pages of a block: address, size in bytes, whether they were written to.
    fn ask(
        &mut self,
        block: GuestRange,
        question: Question,
    ) -> Result<Vec<(usize, usize, bool)>, MergeError> {
        let address = self.address(block)?;
        let found = self.scan.ask(address, block.size_bytes() as usize, question);
        let found =
            found.map_err(|source| kernel("query which pages were written to", block, source))?;
        Ok(found.iter().map(|run| (run.address(), run.size_bytes(), run.is_written())).collect())
    }

    /// Host address of a block, which must be in one region.
    pub(super) fn address(&self, block: GuestRange) -> Result<usize, MergeError> {
        let inside =
            self.ram.clip(block).next() == Some(block) && block.pages <= HUGE_PAGE_SIZE_PAGES;
        self.ram
            .host_address(block)
            .filter(|_| inside)
            .ok_or(MergeError::OutsideRam { range: block })
    }
}

impl Drop for MergeSession {
    fn drop(&mut self) {
        if let Some(merging) = self.ram.merging() {
            merging.give_back();
        }
    }
}

/// Prefetches the beginning of a page into the cache: the processor by itself prefetches only
/// within a page that it is already reading.
fn prefetch(address: usize) {
    use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
    for offset in (0..PREFETCH_BYTES).step_by(64) {
        // SAFETY: a hint, which does nothing where nothing is mapped.
        unsafe { _mm_prefetch::<_MM_HINT_T0>((address + offset) as *const i8) };
    }
}

/// Buffer for a page, with the alignment that vector instructions prefer.
#[repr(align(64))]
struct Aligned([u8; PAGE]);

/// Whether one huge page can have this block.
pub(super) fn is_huge_block(block: GuestRange) -> bool {
    block.pages == HUGE_PAGE_SIZE_PAGES && block == block.whole_huge_blocks()
}

/// An error with the failed action.
pub(super) fn kernel(action: &'static str, range: GuestRange, source: io::Error) -> MergeError {
    MergeError::Kernel { action, range, source }
}
