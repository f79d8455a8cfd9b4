//! Number of VMAs of guest memory, and its limit.
//!
//! A process has a limited number of VMAs (`vm.max_map_count`). A page that is discarded or merged
//! in the middle of a VMA splits it into three, so a guest that returns every other page could use
//! them up, and mappings for anything else would fail. Guest memory therefore takes at most half of
//! them. This is one budget for the process: the memories of several machines in one process share
//! it.
//!
//! The places where a VMA may begin are counted. The kernel certainly joins two neighbours only if
//! one of them has no private page yet (Linux mm/vma.c, `is_mergeable_anon_vma`), like a mapping
//! that was just made. A start that may have disappeared otherwise is kept, so the count is an
//! upper bound of the actual one.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock};

use ebb_abi::Pfn;

use crate::GuestRange;

/// Linux's default of `vm.max_map_count`.
const DEFAULT_MAX_MAP_COUNT: u64 = 65530;

/// Number of VMA starts of all memories of this process.
static STARTS_OF_PROCESS: LazyLock<Arc<AtomicU64>> = LazyLock::new(Arc::default);

/// Maximum number of VMAs of guest memory: half of the process's.
pub(crate) fn max_vmas() -> u64 {
    let text = std::fs::read_to_string("/proc/sys/vm/max_map_count").unwrap_or_default();
    text.trim().parse().unwrap_or(DEFAULT_MAX_MAP_COUNT) / 2
}

/// The VMA starts of a memory, and the bound of their number.
#[derive(Debug)]
pub(crate) struct VmaBudget {
    regions: Vec<GuestRange>,
    /// First pages of VMAs, apart from the regions' first pages.
    starts: BTreeSet<u64>,
    /// Starts that may have disappeared since they were counted.
    #[cfg(feature = "merge")]
    doubtful: u64,
    max_vmas: u64,
    /// Starts of all memories that share the bound, and the number of this memory's among them.
    of_process: Arc<AtomicU64>,
    reported: u64,
}

impl VmaBudget {
    /// Begins with one VMA per region, within the budget of the process. `regions` must be in
    /// ascending order and must not overlap.
    pub(super) fn new(regions: Vec<GuestRange>) -> Self {
        Self::with_bound(regions, max_vmas(), Arc::clone(&STARTS_OF_PROCESS))
    }

    /// As [`new`](Self::new), with a bound against which `of_process` is counted.
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

    /// Maximum number of VMAs that this memory takes.
    pub(crate) fn count(&self) -> u64 {
        (self.regions.len() + self.starts.len()) as u64
    }

    /// Whether `added` more VMAs are within `sixteenths` of the bound. Fewer VMAs always are.
    pub(super) fn fits(&self, added: i64, sixteenths: u64) -> bool {
        // Relaxed: only numbers are compared. VMAs that other threads are about to add are not
        // included; the other half of the process's VMAs compensates for that.
        let others = self.of_process.load(Ordering::Relaxed).saturating_sub(self.reported);
        added <= 0 || self.count() + others + added as u64 <= self.max_vmas * sixteenths / 16
    }

    /// Maximum number of additional starts after `range`, which lies within a region, is replaced
    /// by one mapping.
    pub(super) fn added_by(&self, range: GuestRange) -> i64 {
        let edges = [range.start.0, range.end().0];
        let new = edges
            .iter()
            .filter(|edge| self.is_inside_a_region(**edge) && !self.starts.contains(edge));
        new.count() as i64 - self.starts_inside(range).count() as i64
    }

    /// Records that one mapping was made over `range`, which lies within a region.
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

    /// Records that a VMA begins at `page`, unless a region does or it is outside of all regions.
    pub(super) fn cut_at(&mut self, page: u64) {
        if self.is_inside_a_region(page) {
            self.starts.insert(page);
        }
    }

    /// Records that the VMAs on either side of a page's start are one.
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

    /// Whether VMAs begin only at regions.
    pub(super) fn is_empty(&self) -> bool {
        self.starts.is_empty()
    }

    /// Starts behind the first page of `range`.
    pub(super) fn starts_inside(&self, range: GuestRange) -> impl Iterator<Item = u64> + use<'_> {
        let first = range.start.0.saturating_add(1);
        self.starts.range(first..range.end().0.max(first)).copied()
    }
}

#[cfg(feature = "merge")]
impl VmaBudget {
    /// Maximum number of VMAs of this memory beyond one per region.
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

    /// The known VMAs within `range`, which is part of a region. One of the kernel's may be several
    /// here.
    pub(crate) fn within(&self, range: GuestRange) -> Vec<GuestRange> {
        let is_edge = |page: &u64| self.starts.contains(page) || !self.is_inside_a_region(*page);
        let inside = self.starts_inside(range);
        let edges = [range.start.0].into_iter().chain(inside).chain([range.end().0]);
        let edges: Vec<u64> = edges.filter(is_edge).collect();
        edges.windows(2).map(|edges| GuestRange::new(Pfn(edges[0]), edges[1] - edges[0])).collect()
    }

    /// The parts of `range`, which is part of a region, that lie in different VMAs.
    pub(crate) fn parts(&self, range: GuestRange) -> Vec<GuestRange> {
        let edges = [range.start.0].into_iter().chain(self.starts_inside(range));
        let edges: Vec<u64> = edges.chain([range.end().0]).collect();
        edges.windows(2).map(|edges| GuestRange::new(Pfn(edges[0]), edges[1] - edges[0])).collect()
    }

    /// Records that this many starts may have disappeared.
    pub(super) fn doubt(&mut self, starts: u64) {
        self.doubtful += starts;
    }

    /// Whether enough starts may have disappeared to read the actual ones.
    pub(crate) fn is_recount_due(&self) -> bool {
        self.doubtful > 0 && self.doubtful >= self.max_vmas / 32
    }

    /// Replaces the starts by the actual ones. Those of regions are ignored.
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
