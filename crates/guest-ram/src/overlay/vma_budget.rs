//! How many VMAs guest memory takes, and how many it may take.
//!
//! A process has a limited number of VMAs (`vm.max_map_count`). A page that is discarded or merged
//! in the middle of a VMA makes three out of one, so a guest that gives away every other page could
//! use them up, and mappings for anything else would fail. Guest memory therefore takes at most
//! half of them. This is one budget for the process: the memories of several machines in one
//! process share it.
//!
//! What is counted are the places where a VMA may begin. The kernel joins two neighbours for sure
//! only if one of them has no private page yet (Linux mm/vma.c, `is_mergeable_anon_vma`), as a
//! mapping that was made just now. A start that may have gone otherwise is kept, so the count is an
//! upper bound of the real one.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock};

use ebb_abi::Pfn;

use crate::GuestRange;

/// Linux's default of `vm.max_map_count`.
const DEFAULT_MAX_MAP_COUNT: u64 = 65530;

/// Starts of VMAs that all memories of this process have.
static STARTS_OF_PROCESS: LazyLock<Arc<AtomicU64>> = LazyLock::new(Arc::default);

/// VMAs that guest memory may take: half of what the process may have.
pub(crate) fn max_vmas() -> u64 {
    let text = std::fs::read_to_string("/proc/sys/vm/max_map_count").unwrap_or_default();
    text.trim().parse().unwrap_or(DEFAULT_MAX_MAP_COUNT) / 2
}

/// Where the VMAs of a memory begin, and the bound of their number.
#[derive(Debug)]
pub(crate) struct VmaBudget {
    regions: Vec<GuestRange>,
    /// First pages of VMAs, apart from the regions' first pages.
    starts: BTreeSet<u64>,
    /// Starts that may have gone since they were counted.
    #[cfg(feature = "merge")]
    doubtful: u64,
    max_vmas: u64,
    /// Starts of all memories that share the bound, and how many of them are this memory's.
    of_process: Arc<AtomicU64>,
    reported: u64,
}

impl VmaBudget {
    /// One VMA a region, within the budget of the process. `regions` must be in ascending order and
    /// must not overlap.
    pub(super) fn new(regions: Vec<GuestRange>) -> Self {
        Self::with_bound(regions, max_vmas(), Arc::clone(&STARTS_OF_PROCESS))
    }

    /// As [`new`](Self::new), with a bound that `of_process` is counted against.
    pub(super) fn with_bound(
        regions: Vec<GuestRange>,
        max_vmas: u64,
        of_process: Arc<AtomicU64>,
    ) -> Self {
        Self {
            regions,
            starts: BTreeSet::new(),
            #[cfg(feature = "merge")]
            doubtful: 0,
            max_vmas,
            of_process,
            reported: 0,
        }
    }

    /// Sets a bound that no other memory shares.
    #[cfg(test)]
    pub(crate) fn set_own_bound(&mut self, max_vmas: u64) {
        self.of_process.fetch_sub(self.reported, Ordering::Relaxed);
        self.of_process = Arc::default();
        self.reported = 0;
        self.max_vmas = max_vmas;
        self.report();
    }

    /// Number of VMAs that this memory takes at most.
    pub(crate) fn count(&self) -> u64 {
        (self.regions.len() + self.starts.len()) as u64
    }

    /// Whether `added` more VMAs are within `sixteenths` of the bound. Fewer always are.
    pub(super) fn fits(&self, added: i64, sixteenths: u64) -> bool {
        // Relaxed: only numbers are compared. What others are about to take is not in it, which the
        // other half of the process's VMAs makes up for.
        let others = self.of_process.load(Ordering::Relaxed).saturating_sub(self.reported);
        added <= 0 || self.count() + others + added as u64 <= self.max_vmas * sixteenths / 16
    }

    /// How many more starts there are at most after `range`, which lies within a region, was
    /// replaced by one mapping.
    pub(super) fn added_by(&self, range: GuestRange) -> i64 {
        let edges = [range.start.0, range.end().0];
        let new = edges
            .iter()
            .filter(|edge| self.is_inside_a_region(**edge) && !self.starts.contains(edge));
        new.count() as i64 - self.starts_inside(range).count() as i64
    }

    /// Notes that one mapping was made over `range`, which lies within a region.
    pub(super) fn cover(&mut self, range: GuestRange) {
        if range.pages > 1 {
            let inside: Vec<u64> = self.starts_inside(range).collect();
            for start in inside {
                self.starts.remove(&start);
            }
        }
        self.cut_at(range.start.0);
        self.cut_at(range.end().0);
    }

    /// Notes that a VMA begins at `page`, unless a region does or it is outside of all regions.
    pub(super) fn cut_at(&mut self, page: u64) {
        if self.is_inside_a_region(page) {
            self.starts.insert(page);
        }
    }

    /// Notes that the VMAs on either side of a page's start are one.
    pub(super) fn join_at(&mut self, page: u64) {
        self.starts.remove(&page);
    }

    /// Updates the number of starts of the process.
    pub(super) fn report(&mut self) {
        let starts = self.starts.len() as u64;
        self.of_process.fetch_add(starts.wrapping_sub(self.reported), Ordering::Relaxed);
        self.reported = starts;
    }

    /// Whether a page and a range are in the same region.
    pub(super) fn is_same_region(&self, page: u64, range: GuestRange) -> bool {
        self.regions.iter().any(|region| region.contains(Pfn(page)) && region.contains(range.start))
    }

    /// Whether `page` is in a region, and not its first page.
    pub(super) fn is_inside_a_region(&self, page: u64) -> bool {
        self.regions.iter().any(|region| region.start.0 < page && page < region.end().0)
    }

    /// Whether no VMA begins anywhere but at a region.
    pub(super) fn is_empty(&self) -> bool {
        self.starts.is_empty()
    }

    /// Starts behind the first page of `range`.
    fn starts_inside(&self, range: GuestRange) -> impl Iterator<Item = u64> + use<'_> {
        let first = range.start.0.saturating_add(1);
        self.starts.range(first..range.end().0.max(first)).copied()
    }
}

#[cfg(feature = "merge")]
impl VmaBudget {
    /// Number of VMAs that this memory takes beyond one a region, at most.
    pub(crate) fn own(&self) -> u64 {
        self.starts.len() as u64
    }

    /// The memory's regions.
    pub(super) fn regions(&self) -> &[GuestRange] {
        &self.regions
    }

    /// The region of a page.
    pub(super) fn region_of(&self, page: Pfn) -> Option<GuestRange> {
        self.regions.iter().copied().find(|region| region.contains(page))
    }

    /// The VMAs, as far as they are known, that lie within `range`, which is part of a region. One
    /// of the kernel's may be several here.
    pub(crate) fn within(&self, range: GuestRange) -> Vec<GuestRange> {
        let is_edge = |page: &u64| self.starts.contains(page) || !self.is_inside_a_region(*page);
        let inside = self.starts_inside(range);
        let edges = [range.start.0].into_iter().chain(inside).chain([range.end().0]);
        let edges: Vec<u64> = edges.filter(is_edge).collect();
        edges.windows(2).map(|edges| GuestRange::new(Pfn(edges[0]), edges[1] - edges[0])).collect()
    }

    /// Notes that so many starts may have gone.
    pub(super) fn doubt(&mut self, starts: u64) {
        self.doubtful += starts;
    }

    /// Whether so many starts may have gone that it is worth reading the real ones.
    pub(crate) fn is_recount_due(&self) -> bool {
        self.doubtful > 0 && self.doubtful >= self.max_vmas / 32
    }

    /// Replaces the starts by the real ones. Those of regions are left out.
    pub(crate) fn set_starts(&mut self, starts: impl IntoIterator<Item = Pfn>) {
        let inside = |page: &u64| self.is_inside_a_region(*page);
        self.starts = starts.into_iter().map(|page| page.0).filter(inside).collect();
        self.doubtful = 0;
        self.report();
    }
}

impl Drop for VmaBudget {
    fn drop(&mut self) {
        self.of_process.fetch_sub(self.reported, Ordering::Relaxed);
    }
}
