//! Which pages of guest memory are merged, and how many mappings that takes.
//!
//! Three things are known of a page: whether a stable file is *mapped* in its place (then nothing
//! may be discarded there with `MADV_DONTNEED`, which would show the file), whether it still holds
//! a *share* of its stable page (it gives it up when somebody finds that it was written to), and
//! whether it lies in memory that a discard has put there and that is not *tracked* for writes yet.
//!
//! A process has a limited number of mappings (`vm.max_map_count`). Here their borders are counted:
//! a page number is in `borders` if a mapping may begin there. The kernel joins two neighbours for
//! sure only if one of them has no private page yet (Linux mm/vma.c, `is_mergeable_anon_vma`), as a
//! mapping that was made just now; a border that may have gone by other ways is kept, so the count
//! is an upper bound of the real one, and [`MergedRuns::set_borders`] takes the real ones when the
//! bound is reached. The bound is the process's: memories of several machines in one process share
//! it.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use ebb_abi::{HUGE_PAGE_SIZE_PAGES, Pfn};

use crate::{GuestRange, PageSet, StableSlot};

/// Length in pages from which on a run of merged pages may use up all mappings that are for
/// merging. Each mapping costs the kernel some 200 bytes and makes all changes of mappings slower.
pub(crate) const MIN_RUN_PAGES: u64 = 8;

/// What may be done with a range of pages that is to be discarded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// It is ordinary memory.
    Ordinary,
    /// It must be replaced by fresh anonymous memory as a whole, or, if it is all ordinary, it does
    /// good.
    Replace,
    /// No mappings are left: what a stable file is mapped for must stay, the rest is ordinary
    /// memory.
    Keep,
}

/// Neighbouring pages that neighbouring slots are mapped for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Run {
    /// Page behind the last one.
    end: u64,
    /// Slot of the first page.
    first: StableSlot,
}

/// Neighbouring slots.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Slots {
    first: StableSlot,
    pages: u32,
}

/// What became of merged pages that were written to; the numbers only grow.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Returns {
    /// Pages that were brought back to ordinary memory.
    pub brought_back_pages: u64,
    /// Of these, pages that were merged again.
    pub remerged_pages: u64,
    /// Mappings that were saved by putting neighbouring ones together, at most.
    pub joined_mappings: u64,
}

/// Runs of pages for which stable pages are mapped.
#[derive(Debug)]
pub(crate) struct MergedRuns {
    regions: Vec<GuestRange>,
    /// By first page. Runs do not overlap and do not cross regions.
    runs: BTreeMap<u64, Run>,
    /// Pages that hold a share of the slot that is mapped for them.
    shares: PageSet,
    share_pages: u64,
    /// Where mappings may begin, apart from the regions' first pages.
    borders: BTreeSet<u64>,
    /// Borders that may have gone since they were counted.
    doubtful_borders: u64,
    /// Pages in memory that a discard has put there and that nobody tracks yet.
    untracked: PageSet,
    /// Pages that were moved to where they are, so that the kernel joins their mapping with no
    /// neighbour.
    moved: PageSet,
    /// Pages that were merged, were written to, and have been brought back to ordinary memory, and
    /// are still there.
    brought_back: PageSet,
    returns: Returns,
    /// Slots whose shares were given up by discards.
    released: Vec<Slots>,
    /// Mappings that guest memory takes for other reasons.
    other_mappings: u64,
    /// Borders of all memories of the process, and how many of them are this one's.
    of_process: Arc<AtomicU64>,
    told: u64,
    /// Bound of mappings.
    max_mappings: u64,
}

impl MergedRuns {
    /// Nothing is merged yet. `regions` must be in ascending order and must not overlap.
    /// `of_process` is shared by all memories that share the bound.
    pub(crate) fn new(
        regions: Vec<GuestRange>,
        max_mappings: u64,
        of_process: Arc<AtomicU64>,
    ) -> Self {
        Self {
            runs: BTreeMap::new(),
            shares: PageSet::new(&regions),
            share_pages: 0,
            borders: BTreeSet::new(),
            doubtful_borders: 0,
            untracked: PageSet::new(&regions),
            moved: PageSet::new(&regions),
            brought_back: PageSet::new(&regions),
            returns: Returns::default(),
            released: Vec::new(),
            other_mappings: regions.len() as u64,
            of_process,
            told: 0,
            max_mappings,
            regions,
        }
    }

    /// Another bound, of its own, for tests.
    #[cfg(test)]
    pub(crate) fn set_max_mappings(&mut self, max_mappings: u64) {
        self.of_process.fetch_sub(self.told, Ordering::Relaxed);
        self.of_process = Arc::default();
        self.told = 0;
        self.max_mappings = max_mappings;
        self.tell();
    }

    /// Tells how many mappings guest memory would take without merging.
    pub(crate) fn set_other_mappings(&mut self, mappings: u64) {
        self.other_mappings = mappings;
    }

    /// Number of mappings that guest memory takes at most.
    pub(crate) fn mappings(&self) -> u64 {
        self.other_mappings + self.borders.len() as u64
    }

    /// Number of mappings that all memories take that share the bound.
    fn mappings_of_all(&self) -> u64 {
        // Relaxed: only numbers are compared. What others are about to take is not in it, which the
        // other half of the process's mappings makes up for.
        self.mappings() + self.of_process.load(Ordering::Relaxed).saturating_sub(self.told)
    }

    /// Tells the others how many borders there are here.
    fn tell(&mut self) {
        let borders = self.borders.len() as u64;
        self.of_process.fetch_add(borders.wrapping_sub(self.told), Ordering::Relaxed);
        self.told = borders;
    }

    /// Number of mappings that guest memory takes because of merging.
    pub(crate) fn own_mappings(&self) -> u64 {
        self.borders.len() as u64
    }

    /// Number of pages that hold a share of a stable page, as far as is known.
    pub(crate) fn merged_pages(&self) -> u64 {
        self.share_pages
    }

    /// The slot that a page holds a share of. It may have been written to since, without anybody
    /// having noticed.
    pub(crate) fn share_of(&self, page: Pfn) -> Option<StableSlot> {
        if !self.shares.contains(page) {
            return None;
        }
        let (start, run) = self.run_at(page.0)?;
        Some(run.first.offset((page.0 - start) as u32))
    }

    /// The parts of `range` that hold shares, in ascending order, each with the slot of its first
    /// page.
    pub(crate) fn shares(
        &self,
        range: GuestRange,
    ) -> impl Iterator<Item = (GuestRange, StableSlot)> + use<'_> {
        self.stable_mapped(range).flat_map(|(part, first)| {
            let shares = self.shares.ranges_in(part);
            shares.map(move |share| (share, first.offset((share.start.0 - part.start.0) as u32)))
        })
    }

    /// Whether a stable file is mapped in the page's place, whether or not the page holds a share.
    pub(crate) fn is_stable_mapped(&self, page: Pfn) -> bool {
        self.run_at(page.0).is_some()
    }

    /// The parts of `range` that a stable file is mapped for, in ascending order, each with the
    /// slot of its first page.
    pub(crate) fn stable_mapped(
        &self,
        range: GuestRange,
    ) -> impl Iterator<Item = (GuestRange, StableSlot)> + use<'_> {
        let before = self.runs.range(..range.start.0).next_back();
        let from = self.runs.range(range.start.0..range.end().0.max(range.start.0));
        before.into_iter().chain(from).filter_map(move |(&start, run)| {
            let part = GuestRange::new(Pfn(start), run.end - start).intersection(range);
            (!part.is_empty()).then(|| (part, run.first.offset((part.start.0 - start) as u32)))
        })
    }

    /// Whether so many runs, however short, may be mapped anywhere without asking
    /// [`may_map`](Self::may_map) for each.
    pub(crate) fn may_map_all(&self, runs: usize) -> bool {
        let for_short_runs = (self.max_mappings - self.max_mappings / 4) / 2;
        self.mappings_of_all() + 2 * runs as u64 <= for_short_runs
    }

    /// Whether the stable pages from `first` on may be mapped over `range`, which lies within a
    /// region, in one go.
    pub(crate) fn may_map(&self, range: GuestRange, first: StableSlot) -> bool {
        let joins = self.left_neighbour(range, first).is_some();
        let added = self.added_borders(range) - i64::from(joins);
        if added <= 0 {
            return true;
        }
        // A quarter of all mappings is for discards, and half of the rest for runs that free
        // something worth a mapping.
        let for_merging = self.max_mappings - self.max_mappings / 4;
        let limit =
            if range.pages >= MIN_RUN_PAGES || joins { for_merging } else { for_merging / 2 };
        self.mappings_of_all() + added as u64 <= limit
    }

    /// Whether `range`, which lies within a region, may be brought back to ordinary memory. Merging
    /// something new comes first: it is known to free a page.
    pub(crate) fn may_bring_back(&self, range: GuestRange) -> bool {
        let added = self.added_borders(range);
        let for_merging = self.max_mappings - self.max_mappings / 4;
        added <= 0 || self.mappings_of_all() + added as u64 <= for_merging / 4
    }

    /// What became of merged pages that were written to.
    pub(crate) fn returns(&self) -> Returns {
        self.returns
    }

    /// Notes that stable pages from `first` on were mapped over `range`, which lies within a
    /// region, as one mapping, and that its pages hold shares of them. Shares that they held before
    /// are released.
    pub(crate) fn note_merged(&mut self, range: GuestRange, first: StableSlot) {
        if range.is_empty() {
            return;
        }
        if self.stable_mapped(range).next().is_some() {
            self.release(range);
            self.cut_out(range);
        }
        self.cover(range);
        self.untracked.remove(range);
        self.moved.remove(range);
        self.returns.remerged_pages += self.brought_back.count_in(range);
        self.brought_back.remove(range);
        self.shares.insert(range);
        self.share_pages += range.pages;
        let mut run = Run { end: range.end().0, first };
        let mut start = range.start.0;
        let left = self.left_neighbour(range, first);
        let right = self.right_neighbour(range, first);
        if let Some((left_start, left)) = left {
            start = left_start;
            run.first = left.first;
            self.borders.remove(&range.start.0);
        }
        if let Some(right) = right {
            self.runs.remove(&range.end().0);
            run.end = right.end;
            // With both neighbours only if they are from the same origin.
            if left.is_none() {
                self.borders.remove(&range.end().0);
            } else {
                self.doubtful_borders += 1;
            }
        }
        self.runs.insert(start, run);
        self.tell();
    }

    /// Notes that a page was found to have been written to: it has a page of its own now. Returns
    /// the slot whose share it has given up, once. The stable file stays mapped behind it.
    pub(crate) fn note_broken(&mut self, page: Pfn) -> Option<StableSlot> {
        let slot = self.share_of(page)?;
        self.shares.remove(GuestRange::new(page, 1));
        self.share_pages -= 1;
        Some(slot)
    }

    /// Notes that all pages of `range` that held shares were given pages of their own where they
    /// are, in front of the stable file.
    pub(crate) fn note_unmerged(&mut self, range: GuestRange, released: &mut Vec<StableSlot>) {
        let earlier = std::mem::take(&mut self.released);
        self.release(range);
        expand(&std::mem::replace(&mut self.released, earlier), released);
    }

    /// Notes that `range`, which lies within a region, was replaced by one mapping of anonymous
    /// memory with the same content, which came from elsewhere and is not tracked yet.
    pub(crate) fn note_moved_here(&mut self, range: GuestRange, released: &mut Vec<StableSlot>) {
        if range.is_empty() {
            return;
        }
        self.note_unmerged(range, released);
        self.cut_out(range);
        self.cover(range);
        self.doubtful_borders += 2;
        self.untracked.insert(range);
        self.moved.insert(range);
        self.tell();
    }

    /// Notes that `range`, which lies within a region, was replaced by one mapping of anonymous
    /// memory with the same content: what was merged there once is ordinary memory again. Shares
    /// that it held are released.
    pub(crate) fn note_brought_back(&mut self, range: GuestRange) {
        self.release(range);
        let stable: Vec<GuestRange> = self.stable_mapped(range).map(|(part, _)| part).collect();
        for part in stable {
            self.returns.brought_back_pages += part.pages;
            self.brought_back.insert(part);
        }
        self.note_moved_here(range, &mut Vec::new());
    }

    /// The mappings, as far as they are known, that lie within `range`, which is part of a region.
    /// A mapping may be told as several.
    pub(crate) fn mappings_in(&self, range: GuestRange) -> Vec<GuestRange> {
        let is_edge = |page: &u64| self.borders.contains(page) || !self.is_inside_a_region(*page);
        let inside = self.borders_inside(range);
        let edges = [range.start.0].into_iter().chain(inside).chain([range.end().0]);
        let edges: Vec<u64> = edges.filter(is_edge).collect();
        edges.windows(2).map(|edges| GuestRange::new(Pfn(edges[0]), edges[1] - edges[0])).collect()
    }

    /// Notes that `range`, which lies within a region and has no stable pages mapped, was replaced
    /// by one mapping with the same pages.
    pub(crate) fn note_joined(&mut self, range: GuestRange) {
        let before = self.borders.len();
        self.note_moved_here(range, &mut Vec::new());
        self.returns.joined_mappings += before.saturating_sub(self.borders.len()) as u64;
    }

    /// Notes that `range` is discarded by ordinary means.
    pub(crate) fn note_emptied(&mut self, range: GuestRange) {
        self.brought_back.remove(range);
    }

    /// Notes that a discard has replaced `range`, which lies within a region, by one mapping of
    /// fresh anonymous memory.
    pub(crate) fn note_discarded(&mut self, range: GuestRange) {
        if range.is_empty() {
            return;
        }
        self.release(range);
        self.cut_out(range);
        self.cover(range);
        self.doubtful_borders += 2;
        self.moved.remove(range);
        self.brought_back.remove(range);
        // The new mapping has no page yet, so it has been joined with a neighbour like it, but not
        // for sure with both.
        if self.is_untracked_neighbour(range.start.0.wrapping_sub(1), range) {
            self.borders.remove(&range.start.0);
        } else if self.is_untracked_neighbour(range.end().0, range) {
            self.borders.remove(&range.end().0);
        }
        self.untracked.insert(range);
        self.tell();
    }

    /// Runs of untracked pages that `range` touches; they may reach beyond it.
    pub(crate) fn untracked(&self, range: GuestRange) -> Vec<GuestRange> {
        let mut found: Vec<GuestRange> = Vec::new();
        for part in self.untracked.ranges_in(range) {
            let region = self.regions.iter().find(|region| region.contains(part.start));
            let region = region.copied().unwrap_or(part);
            let mut start = part.start.0;
            while start > region.start.0 && self.untracked.contains(Pfn(start - 1)) {
                start -= 1;
            }
            let rest = GuestRange::new(Pfn(start), region.end().0 - start);
            found.extend(self.untracked.next_range(rest));
        }
        found
    }

    /// Notes that `range` is tracked now.
    pub(crate) fn note_tracked(&mut self, range: GuestRange) {
        // Where only a part of an untracked mapping is tracked now, it was cut.
        for edge in [range.start.0, range.end().0] {
            let cut =
                edge > 0 && [edge - 1, edge].iter().all(|page| self.untracked.contains(Pfn(*page)));
            if cut && self.is_inside_a_region(edge) {
                self.borders.insert(edge);
            }
        }
        self.untracked.remove(range);
        self.tell();
    }

    /// Appends the slots whose shares discards gave up, once for each share.
    pub(crate) fn take_released(&mut self, released: &mut Vec<StableSlot>) {
        expand(&std::mem::take(&mut self.released), released);
    }

    /// What may be done with `range`, which lies within a region and is to be discarded.
    pub(crate) fn judge(&self, range: GuestRange) -> Verdict {
        let added = self.added_borders(range);
        if self.stable_mapped(range).next().is_none() {
            // Large ranges are put together again, so that mappings do not remain after what they
            // were for.
            let heals = range.pages >= HUGE_PAGE_SIZE_PAGES && added < 0;
            return if heals { Verdict::Replace } else { Verdict::Ordinary };
        }
        // The last eighth is for whole huge pages, so that single pages do not keep large amounts
        // from going back.
        let limit = if range.pages >= HUGE_PAGE_SIZE_PAGES {
            self.max_mappings
        } else {
            self.max_mappings - self.max_mappings / 8
        };
        let fits = added <= 0 || self.mappings_of_all() + added as u64 <= limit;
        if fits { Verdict::Replace } else { Verdict::Keep }
    }

    /// Whether so many borders may have gone that it is worth to count them.
    pub(crate) fn is_recount_due(&self) -> bool {
        self.doubtful_borders > 0 && self.doubtful_borders >= self.max_mappings / 32
    }

    /// Replaces the borders by the real ones: first pages of mappings. Those of regions are left
    /// out.
    pub(crate) fn set_borders(&mut self, borders: impl IntoIterator<Item = Pfn>) {
        let inside = |page: &u64| self.is_inside_a_region(*page);
        self.borders = borders.into_iter().map(|page| page.0).filter(inside).collect();
        self.doubtful_borders = 0;
        self.tell();
    }

    /// Whether discards need not care.
    pub(crate) fn is_all_ordinary(&self) -> bool {
        self.runs.is_empty() && self.borders.is_empty()
    }

    /// The run that a page lies in, with its first page.
    fn run_at(&self, page: u64) -> Option<(u64, Run)> {
        let (&start, &run) = self.runs.range(..=page).next_back()?;
        (page < run.end).then_some((start, run))
    }

    /// The run that `range`, mapped from `first` on, continues.
    fn left_neighbour(&self, range: GuestRange, first: StableSlot) -> Option<(u64, Run)> {
        let page = range.start.0.checked_sub(1)?;
        let (start, run) = self.run_at(page)?;
        let follows = is_followed_by(run.first.offset((page - start) as u32), first);
        (follows && self.is_inside_a_region(range.start.0)).then_some((start, run))
    }

    /// The run that continues `range`, mapped from `first` on, if it begins behind it.
    fn right_neighbour(&self, range: GuestRange, first: StableSlot) -> Option<Run> {
        let run = *self.runs.get(&range.end().0)?;
        let follows = is_followed_by(first.offset((range.pages - 1) as u32), run.first);
        (follows && self.is_inside_a_region(range.end().0)).then_some(run)
    }

    /// Puts all shares of `range` on the list of released ones.
    fn release(&mut self, range: GuestRange) {
        let shares: Vec<_> = self.shares(range).collect();
        for (share, first) in shares {
            self.shares.remove(share);
            self.share_pages -= share.pages;
            self.released.push(Slots { first, pages: share.pages as u32 });
        }
    }

    /// Takes `range` out of the runs.
    fn cut_out(&mut self, range: GuestRange) {
        let parts: Vec<GuestRange> = self.stable_mapped(range).map(|(part, _)| part).collect();
        for part in parts {
            let Some((start, run)) = self.run_at(part.start.0) else { continue };
            self.runs.remove(&start);
            if start < part.start.0 {
                self.runs.insert(start, Run { end: part.start.0, first: run.first });
            }
            if part.end().0 < run.end {
                let first = run.first.offset((part.end().0 - start) as u32);
                self.runs.insert(part.end().0, Run { end: run.end, first });
            }
        }
    }

    /// Notes the borders of a mapping that was made over `range`.
    fn cover(&mut self, range: GuestRange) {
        if range.pages > 1 {
            let inside: Vec<u64> = self.borders_inside(range).collect();
            for border in inside {
                self.borders.remove(&border);
            }
        }
        for edge in [range.start.0, range.end().0] {
            if self.is_inside_a_region(edge) {
                self.borders.insert(edge);
            }
        }
    }

    /// How many borders more there are at most after `range` was replaced by one mapping.
    fn added_borders(&self, range: GuestRange) -> i64 {
        let edges = [range.start.0, range.end().0];
        let new = edges
            .iter()
            .filter(|edge| self.is_inside_a_region(**edge) && !self.borders.contains(edge));
        new.count() as i64 - self.borders_inside(range).count() as i64
    }

    /// Borders behind the first page of `range`.
    fn borders_inside(&self, range: GuestRange) -> impl Iterator<Item = u64> + use<'_> {
        let first = range.start.0.saturating_add(1);
        self.borders.range(first..range.end().0.max(first)).copied()
    }

    /// Whether `page` is in a region, and not its first page.
    fn is_inside_a_region(&self, page: u64) -> bool {
        self.regions.iter().any(|region| region.start.0 < page && page < region.end().0)
    }

    /// Whether `page` is untracked, was not moved to where it is, and is in the region of
    /// `neighbour`.
    fn is_untracked_neighbour(&self, page: u64, neighbour: GuestRange) -> bool {
        self.untracked.contains(Pfn(page))
            && !self.moved.contains(Pfn(page))
            && self
                .regions
                .iter()
                .any(|region| region.contains(Pfn(page)) && region.contains(neighbour.start))
    }
}

impl Drop for MergedRuns {
    fn drop(&mut self) {
        self.of_process.fetch_sub(self.told, Ordering::Relaxed);
    }
}

/// Whether `next` is the slot behind `slot`, so that both can be mapped in one go.
fn is_followed_by(slot: StableSlot, next: StableSlot) -> bool {
    slot.segment == next.segment && slot.index.checked_add(1) == Some(next.index)
}

/// Appends each slot of `runs`.
fn expand(runs: &[Slots], slots: &mut Vec<StableSlot>) {
    for run in runs {
        slots.extend((0..run.pages).map(|page| run.first.offset(page)));
    }
}

#[cfg(test)]
mod tests;
