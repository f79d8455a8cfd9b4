//! Changes of a memory's extents by merges, by writes to merged pages and by discards.

use ebb_abi::{PAGE_SIZE_BYTES, Pfn};

use super::extents::{FileExtent, FileExtents, Source};
use super::merged_pages::{BrokenCowStats, SlotRun};
use crate::GuestRange;
use crate::merge::StableSlot;

/// Length in pages from which a run of merged pages may use up all VMAs for merging. Each VMA costs
/// the kernel some 200 bytes and makes all changes of mappings slower.
const MIN_RUN_PAGES: u64 = 8;

/// Shares of the VMA budget, in sixteenths: a quarter is for discards, and half of the rest for
/// runs that save enough memory to justify a VMA. Merging new pages takes precedence over
/// reanonymizing, because it certainly frees a page.
const FOR_RUNS: u64 = 12;
const FOR_SHORT_RUNS: u64 = 6;
const FOR_REANONYMIZED: u64 = 3;

/// How many bytes of single pages a process can merge that may have `max_map_count` VMAs
/// (`vm.max_map_count`): each page takes two.
pub const fn single_pages_bytes(max_map_count: u64) -> u64 {
    max_map_count / 2 * FOR_SHORT_RUNS / 16 / 2 * PAGE_SIZE_BYTES
}

impl FileExtents {
    /// Number of pages that hold a share of a stable page, as far as known.
    pub(crate) fn merged_pages(&self) -> u64 {
        self.merged.share_pages
    }

    /// The slot of which a page holds a share. The page may have been written to since, unnoticed.
    pub(crate) fn share_of(&self, page: Pfn) -> Option<StableSlot> {
        self.shares(GuestRange::new(page, 1)).next().map(|(_, slot)| slot)
    }

    /// The parts of `range` that hold shares, in ascending order, each with the slot of its first
    /// page.
    pub(crate) fn shares(
        &self,
        range: GuestRange,
    ) -> impl Iterator<Item = (GuestRange, StableSlot)> + use<'_> {
        self.stable_mapped(range).flat_map(|(part, first)| {
            let shares = self.merged.shares.ranges_in(part);
            shares.map(move |share| (share, first.offset((share.start.0 - part.start.0) as u32)))
        })
    }

    /// Whether a stable file is mapped in the page's place, whether or not the page holds a share.
    pub(crate) fn is_stable_mapped(&self, page: Pfn) -> bool {
        self.stable_mapped(GuestRange::new(page, 1)).next().is_some()
    }

    /// The parts of `range` for which a stable file is mapped, in ascending order, each with the
    /// slot of its first page.
    pub(crate) fn stable_mapped(
        &self,
        range: GuestRange,
    ) -> impl Iterator<Item = (GuestRange, StableSlot)> + use<'_> {
        self.mapped(range).filter_map(|(part, source)| match source {
            Source::Stable(first) => Some((part, first)),
            Source::Snapshot => None,
        })
    }

    /// The first page of `range`, which is part of a region, for which a stable file is mapped, or
    /// where a VMA starts that may be coalesced with others.
    pub(crate) fn first_divided(&self, range: GuestRange) -> Option<Pfn> {
        if self.is_stable_mapped(range.start) {
            return Some(range.start);
        }
        self.vmas.starts_inside(range).next().map(Pfn)
    }

    /// Whether this many runs of any length may be mapped anywhere without calling
    /// [`may_map`](Self::may_map) for each.
    pub(crate) fn may_map_all(&self, runs: usize) -> bool {
        self.vmas.fits(2 * runs as i64, FOR_SHORT_RUNS)
    }

    /// Whether the stable pages from `first` on may be mapped over `range`, which lies within a
    /// region, at once.
    pub(crate) fn may_map(&self, range: GuestRange, first: StableSlot) -> bool {
        let joins = self.left_neighbour(range, first).is_some();
        let added = self.vmas.added_by(range) - i64::from(joins);
        let is_long = range.pages >= MIN_RUN_PAGES || joins;
        self.vmas.fits(added, if is_long { FOR_RUNS } else { FOR_SHORT_RUNS })
    }

    /// Whether `range`, which lies within a region, may be reanonymized.
    pub(crate) fn may_reanonymize(&self, range: GuestRange) -> bool {
        self.vmas.fits(self.vmas.added_by(range), FOR_REANONYMIZED)
    }

    /// Statistics of merged pages that were written to.
    pub(crate) fn returns(&self) -> BrokenCowStats {
        self.merged.returns
    }

    /// Records that stable pages from `first` on were mapped over `range`, which lies within a
    /// region, as one mapping, and that its pages hold shares of them. Their former shares are
    /// released.
    pub(crate) fn note_merged(&mut self, range: GuestRange, first: StableSlot) {
        if range.is_empty() {
            return;
        }
        self.release(range);
        self.cut_out(range);
        self.vmas.cover(range);
        let merged = &mut self.merged;
        merged.untracked.remove(range);
        merged.moved.remove(range);
        merged.returns.remerged_pages += merged.reanonymized.count_in(range);
        merged.reanonymized.remove(range);
        merged.shares.insert(range);
        merged.share_pages += range.pages;
        let mut start = range.start.0;
        let mut extent = FileExtent { end: range.end().0, source: Source::Stable(first) };
        let left = self.left_neighbour(range, first);
        let right = self.right_neighbour(range, first);
        if let Some((left_start, left)) = left {
            (start, extent.source) = (left_start, left.source);
            self.vmas.join_at(range.start.0);
        }
        if let Some(right) = right {
            self.extents.remove(&range.end().0);
            extent.end = right.end;
            // With both neighbours only if they have the same origin.
            if left.is_none() {
                self.vmas.join_at(range.end().0);
            } else {
                self.vmas.doubt(1);
            }
        }
        self.extents.insert(start, extent);
        self.vmas.report();
    }

    /// Records that a page was found to have been written to: it has a private copy now. Returns
    /// the slot whose share it has released, once. The stable file stays mapped behind it.
    pub(crate) fn note_broken(&mut self, page: Pfn) -> Option<StableSlot> {
        let slot = self.share_of(page)?;
        self.merged.shares.remove(GuestRange::new(page, 1));
        self.merged.share_pages -= 1;
        Some(slot)
    }

    /// Records that all pages of `range` that held shares were given private pages in place, in
    /// front of the stable file.
    pub(crate) fn note_unmerged(&mut self, range: GuestRange, released: &mut Vec<StableSlot>) {
        let earlier = std::mem::take(&mut self.merged.released);
        self.release(range);
        self.take_released(released);
        self.merged.released = earlier;
    }

    /// Records that `range`, which lies within a region, was replaced by one mapping of anonymous
    /// memory with the same content, which came from elsewhere and is not tracked yet.
    pub(crate) fn note_moved_here(&mut self, range: GuestRange, released: &mut Vec<StableSlot>) {
        if range.is_empty() {
            return;
        }
        self.note_unmerged(range, released);
        self.cut_out(range);
        self.vmas.cover(range);
        self.vmas.doubt(2);
        self.merged.untracked.insert(range);
        self.merged.moved.insert(range);
        self.vmas.report();
    }

    /// Records that `range`, which lies within a region, was replaced by one mapping of anonymous
    /// memory with the same content: formerly merged pages are ordinary memory again. Their shares
    /// are released.
    pub(crate) fn note_reanonymized(&mut self, range: GuestRange) {
        self.release(range);
        let stable: Vec<GuestRange> = self.stable_mapped(range).map(|(part, _)| part).collect();
        for part in stable {
            self.merged.returns.brought_back_pages += part.pages;
            self.merged.reanonymized.insert(part);
        }
        self.note_moved_here(range, &mut Vec::new());
    }

    /// Records that `range`, which lies within a region and is not mapped from a file, was replaced
    /// by one mapping with the same pages.
    pub(crate) fn note_coalesced(&mut self, range: GuestRange) {
        let before = self.vmas.own();
        self.note_moved_here(range, &mut Vec::new());
        self.merged.returns.joined_mappings += before.saturating_sub(self.vmas.own());
    }

    /// Records that `range` is discarded by ordinary means.
    pub(super) fn note_emptied(&mut self, range: GuestRange) {
        self.merged.reanonymized.remove(range);
    }

    /// Records that `range` is about to become fresh anonymous memory, with regard to merging.
    pub(super) fn forget_merged(&mut self, range: GuestRange) {
        self.release(range);
        self.vmas.doubt(2);
        self.merged.moved.remove(range);
        self.merged.reanonymized.remove(range);
        self.merged.untracked.insert(range);
    }

    /// Whether a page lies in a mapping like that of fresh anonymous memory.
    pub(super) fn is_like_fresh(&self, page: u64) -> bool {
        self.merged.untracked.contains(Pfn(page)) && !self.merged.moved.contains(Pfn(page))
    }

    /// Runs of untracked pages that overlap `range`; they may extend beyond it.
    pub(crate) fn untracked(&self, range: GuestRange) -> Vec<GuestRange> {
        let mut found: Vec<GuestRange> = Vec::new();
        for part in self.merged.untracked.ranges_in(range) {
            let region = self.vmas.region_of(part.start).unwrap_or(part);
            let mut start = part.start.0;
            while start > region.start.0 && self.merged.untracked.contains(Pfn(start - 1)) {
                start -= 1;
            }
            let rest = GuestRange::new(Pfn(start), region.end().0 - start);
            found.extend(self.merged.untracked.next_range(rest));
        }
        found
    }

    /// Records that `range` is tracked now.
    pub(crate) fn note_tracked(&mut self, range: GuestRange) {
        // Where only a part of an untracked mapping is tracked now, the mapping was split.
        for edge in [range.start.0, range.end().0] {
            let is_untracked = |page: &u64| self.merged.untracked.contains(Pfn(*page));
            if edge > 0 && [edge - 1, edge].iter().all(is_untracked) {
                self.vmas.cut_at(edge);
            }
        }
        self.merged.untracked.remove(range);
        self.vmas.report();
    }

    /// Appends the slots whose shares discards released, once for each share.
    pub(crate) fn take_released(&mut self, released: &mut Vec<StableSlot>) {
        for run in std::mem::take(&mut self.merged.released) {
            released.extend((0..run.pages).map(|page| run.first.offset(page)));
        }
    }

    /// The extent that `range`, mapped from `first` on, continues.
    fn left_neighbour(&self, range: GuestRange, first: StableSlot) -> Option<(u64, FileExtent)> {
        let (start, extent) = self.extent_at(range.start.0.checked_sub(1)?)?;
        let follows = extent.source.offset(range.start.0 - start) == Source::Stable(first);
        (follows && self.vmas.is_inside_a_region(range.start.0)).then_some((start, extent))
    }

    /// The extent that continues `range`, mapped from `first` on, if it begins behind it.
    fn right_neighbour(&self, range: GuestRange, first: StableSlot) -> Option<FileExtent> {
        let extent = *self.extents.get(&range.end().0)?;
        let follows = extent.source == Source::Stable(first).offset(range.pages);
        (follows && self.vmas.is_inside_a_region(range.end().0)).then_some(extent)
    }

    /// Adds all shares of `range` to the released ones.
    fn release(&mut self, range: GuestRange) {
        let shares: Vec<_> = self.shares(range).collect();
        for (share, first) in shares {
            self.merged.shares.remove(share);
            self.merged.share_pages -= share.pages;
            self.merged.released.push(SlotRun { first, pages: share.pages as u32 });
        }
    }
}
