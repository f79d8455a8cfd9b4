//! Freezes pages, compares them, and replaces equal ones.
//!
//! A page is frozen by moving it away (`UFFDIO_MOVE`) to a staging area. The kernel refuses that
//! for pages that are pinned, that is, to which a device may write directly. A thread that accesses
//! the page meanwhile blocks, since its place is registered for missing pages during that time; the
//! fault need not be handled, since all blocked threads are woken at the end.
//!
//! A block is processed under the lock of the overlay, so that no page that is moved away is
//! discarded or overlooked. The processing ends in one way only: each page that was moved away is
//! either moved back or replaced, its place is no longer watched for missing pages, and blocked
//! threads are woken. If that is impossible, the process ends: a guest with a lost page must not
//! continue.

mod items;

use std::ops::Range;
use std::sync::Arc;

use ebb_abi::{PAGE_SIZE_BYTES, Pfn};
use rustix::io::Errno;
use rustix::mm::{Advice, madvise};

use super::StableSlot;
use super::merging::Merging;
use super::scan::Question;
use super::session::{MergeError, MergeSession, kernel};
use super::stable::Segment;
use crate::GuestRange;
use crate::overlay::FileExtents;
use crate::uffd::{Watch, must_succeed};
use items::{Item, Stage, extents, few_extents, place, ranges, span};

pub use items::{MergeOutcome, MergeTarget};

const PAGE: usize = PAGE_SIZE_BYTES as usize;

/// Maximum number of repetitions of a move, at the kernel's request, without progress: the page is
/// briefly locked elsewhere.
const MOVE_ATTEMPTS: u32 = 8;

/// Comparison target of pages of zeros.
static ZEROS: [u8; PAGE] = [0; PAGE];

/// Location of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    Away,
    Back,
}

impl MergeSession {
    /// Replaces pages, in ascending order: each is frozen, compared with its target, and replaced
    /// if it is equal. `outcomes` gets an entry for each.
    ///
    /// # Errors
    /// [`MergeError`]: the entries of `outcomes` are valid then, and all pages after them are
    /// unchanged.
    pub fn replace(
        &mut self,
        pages: &[(Pfn, MergeTarget)],
        outcomes: &mut Vec<MergeOutcome>,
    ) -> Result<(), MergeError> {
        let region = |page: Pfn| self.ram.piece(GuestRange::new(page, 1)).map(|piece| piece.region);
        let regions: Vec<_> = pages.iter().map(|(page, _)| region(*page)).collect();
        let mut first = 0;
        while first < pages.len() {
            let block = pages[first].0.huge_block();
            let same = |&index: &usize| {
                pages[index].0.huge_block() == block && regions[index] == regions[first]
            };
            let end = first + (first..pages.len()).take_while(same).count();
            let end = first + few_extents(&pages[first..end]);
            match regions[first] {
                Some(_) => self.replace_in_block(&pages[first..end], outcomes)?,
                None => outcomes.extend((first..end).map(|_| MergeOutcome::Gone)),
            }
            first = end;
        }
        Ok(())
    }

    /// Replaces pages within one huge page's place and one region.
    fn replace_in_block(
        &mut self,
        pages: &[(Pfn, MergeTarget)],
        outcomes: &mut Vec<MergeOutcome>,
    ) -> Result<(), MergeError> {
        let ram = Arc::clone(&self.ram);
        let (Some(merging), Some(overlay)) = (ram.merging(), ram.overlay.get()) else {
            outcomes.extend(pages.iter().map(|_| MergeOutcome::Gone));
            return Ok(());
        };
        self.clear_staging()?;
        let mut overlaid = overlay.lock();
        let mut items = candidates(&overlaid, pages);
        let mappings =
            if overlaid.may_map_all(items.len()) { Mappings::Plenty } else { Mappings::Scarce };
        if mappings == Mappings::Scarce {
            self.plan_mappings(&mut overlaid, &mut items);
        }
        self.staged = span(pages);
        let mut batch = Batch { session: self, merging, items, mappings, frozen: Vec::new() };
        batch.freeze();
        batch.compare();
        batch.map(&mut overlaid);
        batch.give_back();
        batch.thaw();
        let items = batch.items;
        drop(overlaid);
        outcomes.extend(items.iter().map(|item| match item.stage {
            Stage::Ended(outcome) | Stage::Back(outcome) => outcome,
            Stage::Candidate | Stage::Away | Stage::Same => MergeOutcome::Busy,
        }));
        self.clear_staging()
    }

    /// Frees the memory of replaced pages. Nothing may be moved to the staging area before.
    fn clear_staging(&mut self) -> Result<(), MergeError> {
        let Some(range) = self.staged else { return Ok(()) };
        let address = self.merging().staging_address(range.start);
        let size_bytes = range.size_bytes() as usize;
        // SAFETY: the range is within the staging area. Pages that the guest still needs were moved
        // back.
        let result = unsafe { madvise(address as *mut _, size_bytes, Advice::LinuxDontNeed) };
        result.map_err(|error| kernel("give replaced pages back", range, error.into()))?;
        self.staged = None;
        Ok(())
    }

    /// Ends candidates for which there would be no mappings, before they are processed.
    fn plan_mappings(&self, overlaid: &mut FileExtents, items: &mut [Item]) {
        for extent in extents(items, Stage::Candidate) {
            if !self.may_map(overlaid, &items[extent.clone()]) {
                for item in &mut items[extent] {
                    item.stage = Stage::Ended(MergeOutcome::NoMappings);
                }
            }
        }
    }

    /// Whether an extent may be mapped.
    fn may_map(&self, overlaid: &mut FileExtents, extent: &[Item]) -> bool {
        let Some((range, slot)) = place(extent) else { return true };
        let may = |overlaid: &FileExtents| overlaid.may_map(range, slot);
        self.merging().may(self.ram.regions(), overlaid, may)
    }
}

/// Makes candidates of the `pages` that can be replaced at all: those mapped from a file cannot.
fn candidates(overlaid: &FileExtents, pages: &[(Pfn, MergeTarget)]) -> Vec<Item> {
    let Some(span) = span(pages) else { return Vec::new() };
    // Both are ascending: parts before a page can be skipped.
    let mut mapped = overlaid.mapped(span).map(|(part, _)| part).peekable();
    let mut before = None;
    let item = |&(page, target): &(Pfn, MergeTarget)| {
        let ascending = before < Some(page);
        before = before.max(Some(page));
        while mapped.next_if(|part| part.end() <= page).is_some() {}
        let gone = !ascending || mapped.peek().is_some_and(|part| part.contains(page));
        let stage = if gone { Stage::Ended(MergeOutcome::Gone) } else { Stage::Candidate };
        Item { page, target, stage }
    };
    pages.iter().map(item).collect()
}

/// Number of available mappings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mappings {
    /// Enough for all pages of a batch.
    Plenty,
    /// Each run must be checked.
    Scarce,
}

/// A block, or a part of it, during processing.
struct Batch<'a> {
    session: &'a mut MergeSession,
    merging: &'a Merging,
    items: Vec<Item>,
    mappings: Mappings,
    /// Runs of items whose places are watched for missing pages.
    frozen: Vec<Range<usize>>,
}

impl Batch<'_> {
    /// Moves the candidates away.
    fn freeze(&mut self) {
        for run in ranges(&self.items, |item| item.stage == Stage::Candidate, |_, _| true) {
            let (address, size_bytes) = self.place_of(&run);
            // SAFETY: `thaw` wakes blocked threads, and nothing in between returns early.
            let watched =
                unsafe { self.merging.uffd.watch(address, size_bytes, Watch::WritesAndMissing) };
            match watched {
                Ok(()) => {
                    self.frozen.push(run.clone());
                    self.move_away(run);
                }
                Err(error) => {
                    // Freezing needs a temporary mapping.
                    let outcome = if error.raw_os_error() == Some(libc::ENOMEM) {
                        MergeOutcome::NoMappings
                    } else {
                        tracing::debug!(
                            "pages at {:?} cannot be frozen: {error}",
                            self.items[run.start].page
                        );
                        MergeOutcome::Gone
                    };
                    self.set(run, Stage::Ended(outcome));
                }
            }
        }
    }

    /// Moves a run away, except for pages that cannot be moved.
    fn move_away(&mut self, run: Range<usize>) {
        let mut next = run.start;
        let mut attempts = 0;
        let mut step = run.len();
        while next < run.end {
            let (from, size_bytes) = self.place_of(&(next..run.end.min(next + step)));
            let to = self.merging.staging_address(self.items[next].page);
            // SAFETY: both are anonymous memory of this crate's mappings, to which no Rust
            // reference exists: candidates are not mapped from files. Their place is watched for
            // missing pages.
            let moved = unsafe { self.merging.uffd.move_pages(from, to, size_bytes) };
            let pages = moved.bytes / PAGE;
            self.set(next..next + pages, Stage::Away);
            next += pages;
            attempts = if pages > 0 { 0 } else { attempts + 1 };
            // If some were moved, the next call returns the reason for the end.
            let Some(error) = moved.stopped.filter(|_| pages == 0) else { continue };
            if error == Errno::INVAL && size_bytes > PAGE {
                step = shorter(size_bytes);
                continue;
            }
            if error == Errno::AGAIN && attempts < MOVE_ATTEMPTS {
                std::thread::yield_now();
                continue;
            }
            // Linux 6.18 counts too few when it has repeated a part internally, and reports
            // existing pages where it has just moved pages to. So the actual location of the pages
            // counts, and not the reported number.
            let uncounted = self.leading_pages(next..run.end, Place::Away);
            if uncounted > 0 {
                self.set(next..next + uncounted, Stage::Away);
                next += uncounted;
                attempts = 0;
                continue;
            }
            let outcome = match error {
                Errno::BUSY | Errno::AGAIN | Errno::NOMEM => MergeOutcome::Busy,
                Errno::NOENT => MergeOutcome::Gone,
                error => {
                    tracing::debug!("{:?} cannot be moved: {error}", self.items[next].page);
                    MergeOutcome::Gone
                }
            };
            // All pages of a huge page are pinned together; trying each would split it.
            let whole = self.is_huge(from, size_bytes);
            let end = if whole { run.end } else { next + 1 };
            self.set(next..end, Stage::Ended(outcome));
            next = end;
            attempts = 0;
        }
    }

    /// Whether a huge page, and nothing else, is at this address.
    fn is_huge(&mut self, address: usize, size_bytes: usize) -> bool {
        size_bytes == ebb_abi::HUGE_PAGE_SIZE_BYTES as usize
            && self
                .session
                .scan
                .ask(address, size_bytes, Question::Any)
                .is_ok_and(|runs| runs.iter().any(super::scan::PageRun::is_huge))
    }

    /// Number of pages of a run, from its first one on, at `place`.
    fn leading_pages(&mut self, run: Range<usize>, place: Place) -> usize {
        let address = self.merging.staging_address(self.items[run.start].page);
        let mut away = vec![false; run.len()];
        let scan = &mut self.session.scan;
        must_succeed("the location of guest pages cannot be determined", || {
            away.fill(false);
            for found in scan.ask(address, run.len() * PAGE, Question::Any)? {
                let first = (found.address() - address) / PAGE;
                away[first..first + found.size_bytes() / PAGE].fill(true);
            }
            Ok(())
        });
        away.iter().take_while(|away| **away == (place == Place::Away)).count()
    }

    /// Compares the pages that were moved away with their targets.
    fn compare(&mut self) {
        let mut segment: Option<(u32, Option<Arc<Segment>>)> = None;
        for item in &mut self.items {
            if item.stage != Stage::Away {
                continue;
            }
            let staged = self.merging.staging_address(item.page);
            let target = match item.target {
                MergeTarget::Zero => Some(ZEROS.as_ptr() as usize),
                MergeTarget::Slot(slot) => {
                    if segment.as_ref().is_none_or(|(number, _)| *number != slot.segment) {
                        segment = Some((slot.segment, self.merging.segments.get(slot.segment)));
                    }
                    let segment = segment.as_ref().and_then(|(_, segment)| segment.as_ref());
                    segment.and_then(|segment| segment.address(slot.index, 1))
                }
            };
            item.stage = match target {
                None => Stage::Back(MergeOutcome::Gone),
                Some(target) => {
                    // SAFETY: one page of the staging area, which was moved there; the other one is
                    // a page of zeros, or an allocated slot of a segment that is mapped as long as
                    // `segment` holds it. memcmp reads both through pointers.
                    let order =
                        unsafe { libc::memcmp(staged as *const _, target as *const _, PAGE) };
                    if order == 0 { Stage::Same } else { Stage::Back(MergeOutcome::Different) }
                }
            };
        }
    }

    /// Maps stable pages in place of equal ones.
    fn map(&mut self, overlaid: &mut FileExtents) {
        for extent in extents(&self.items, Stage::Same) {
            let Some((range, slot)) = place(&self.items[extent.clone()]) else {
                // Nothing is mapped: missing pages read as zeros once they are no longer watched.
                self.set(extent, Stage::Ended(MergeOutcome::Done));
                continue;
            };
            let may = self.mappings == Mappings::Plenty
                || self.session.may_map(overlaid, &self.items[extent.clone()]);
            let stage = if may {
                self.map_extent(overlaid, range, slot)
            } else {
                Stage::Back(MergeOutcome::NoMappings)
            };
            self.set(extent, stage);
        }
    }

    fn map_extent(&self, overlaid: &mut FileExtents, range: GuestRange, slot: StableSlot) -> Stage {
        let ram = &self.session.ram;
        let (Some(piece), Some(segment)) =
            (ram.piece(range), self.merging.segments.get(slot.segment))
        else {
            return Stage::Back(MergeOutcome::Gone);
        };
        let node = ram.regions()[piece.region].host_node;
        // SAFETY: the range is guest memory whose pages are all moved away, and equal to the pages
        // mapped there.
        match unsafe { segment.map_over(slot.index, range.pages as u32, piece.address, node) } {
            Ok(()) => {
                overlaid.note_merged(range, slot);
                Stage::Ended(MergeOutcome::Done)
            }
            Err(error) => {
                tracing::debug!("stable pages cannot be mapped over {range}: {error}");
                Stage::Back(MergeOutcome::NoMappings)
            }
        }
    }

    /// Moves the other pages back.
    fn give_back(&mut self) {
        let is_back =
            |item: &Item| matches!(item.stage, Stage::Back(_) | Stage::Away | Stage::Same);
        for run in ranges(&self.items, is_back, |_, _| true) {
            let mut next = run.start;
            let mut attempts = 0;
            let mut step = run.len();
            while next < run.end {
                let (to, size_bytes) = self.place_of(&(next..run.end.min(next + step)));
                let from = self.merging.staging_address(self.items[next].page);
                // SAFETY: as when moving away. The pages' place is watched, so no page can have
                // been put there.
                let moved = unsafe { self.merging.uffd.move_pages(from, to, size_bytes) };
                next += moved.bytes / PAGE;
                let Some(error) = moved.stopped.filter(|_| moved.bytes == 0) else {
                    attempts = 0;
                    continue;
                };
                attempts += 1;
                // As when moving away.
                let back = match error {
                    Errno::EXIST => self.leading_pages(next..run.end, Place::Back),
                    _ => 0,
                };
                next += back;
                if back > 0 {
                    attempts = 0;
                } else if error == Errno::INVAL && size_bytes > PAGE {
                    step = shorter(size_bytes);
                } else if attempts > MOVE_ATTEMPTS {
                    self.copy_back(next, error);
                    next += 1;
                    attempts = 0;
                } else {
                    std::thread::yield_now();
                }
            }
        }
    }

    /// Copies a page back that cannot be moved.
    fn copy_back(&self, index: usize, why: Errno) {
        let (to, _) = self.place_of(&(index..index + 1));
        let from = self.merging.staging_address(self.items[index].page);
        must_succeed(
            "a guest page that was moved away for comparison cannot be moved back",
            || {
                // SAFETY: the page was moved to the staging area and is still there; its place is
                // watched guest memory.
                unsafe { self.merging.uffd.copy_page(from, to, PAGE) }
            },
        );
        tracing::debug!(
            "{:?} was copied back, since it cannot be moved: {why}",
            self.items[index].page
        );
    }

    /// Watches the places of frozen runs only for writes again, unless they were replaced by
    /// mappings, and wakes blocked threads.
    fn thaw(&mut self) {
        let frozen = std::mem::take(&mut self.frozen);
        for run in &frozen {
            let is_mapped = |item: &Item| {
                item.stage == Stage::Ended(MergeOutcome::Done) && item.target != MergeTarget::Zero
            };
            for part in ranges(&self.items[run.clone()], |item| !is_mapped(item), |_, _| true) {
                self.thaw_part(run.start + part.start..run.start + part.end);
            }
        }
        if let (Some(first), Some(last)) = (frozen.first(), frozen.last()) {
            let (address, _) = self.place_of(first);
            let (end, size_bytes) = self.place_of(last);
            must_succeed("threads that wait for a guest page cannot be woken", || {
                self.merging.uffd.wake(address, end + size_bytes - address)
            });
        }
    }

    fn thaw_part(&mut self, part: Range<usize>) {
        let (address, size_bytes) = self.place_of(&part);
        must_succeed("the place of moved pages cannot be released", || {
            self.merging.uffd.forget(address, size_bytes)
        });
        let range = GuestRange::new(self.items[part.start].page, part.len() as u64);
        if !self.session.watch_range(range) {
            self.session.unwatched.push(range);
        }
    }

    /// Host address and size in bytes of neighbouring items.
    fn place_of(&self, run: &Range<usize>) -> (usize, usize) {
        let range = GuestRange::new(self.items[run.start].page, run.len() as u64);
        // Items are pages of guest memory: this was checked when the batch was made.
        (self.session.ram.host_address(range).unwrap_or(0), run.len() * PAGE)
    }

    fn set(&mut self, items: Range<usize>, stage: Stage) {
        for item in &mut self.items[items] {
            item.stage = stage;
        }
    }
}

/// Number of bytes to move at a time after this many were refused: a move must be within one
/// mapping on either side, and a run may lie in several that the kernel did not join.
fn shorter(size_bytes: usize) -> usize {
    size_bytes / PAGE / 2
}
