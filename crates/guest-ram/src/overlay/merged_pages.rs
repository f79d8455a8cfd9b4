//! State of merged pages.
//!
//! There are three properties in addition to the mapping of a stable page: whether the page still
//! holds a *share* of its stable page (released once the page is found to have been written to),
//! whether it lies in memory that is not *tracked* for writes, because a discard has put it there,
//! and whether it was *moved* to its place.

use crate::merge::StableSlot;
use crate::{GuestRange, PageBitmap};

/// Neighbouring slots.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct SlotRun {
    pub(super) first: StableSlot,
    pub(super) pages: u32,
}

/// Statistics of merged pages that were written to; the numbers only grow.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BrokenCowStats {
    /// Pages that were reanonymized.
    pub brought_back_pages: u64,
    /// Of these, pages that were merged again.
    pub remerged_pages: u64,
    /// Maximum number of mappings that were saved by coalescing neighbouring ones.
    pub joined_mappings: u64,
}

/// Pages of a memory that are or were merged.
#[derive(Debug)]
pub(super) struct MergedPages {
    /// Pages that hold a share of the slot mapped for them.
    pub(super) shares: PageBitmap,
    pub(super) share_pages: u64,
    /// Pages of anonymous memory that is not tracked for writes.
    pub(super) untracked: PageBitmap,
    /// Pages that were moved to their place, so that the kernel joins their mapping with no
    /// neighbour.
    pub(super) moved: PageBitmap,
    /// Pages that were merged, written to and reanonymized, and are still present.
    pub(super) reanonymized: PageBitmap,
    pub(super) returns: BrokenCowStats,
    /// Slots whose shares were released by discards.
    pub(super) released: Vec<SlotRun>,
}

impl MergedPages {
    /// Initially, no page is merged or tracked.
    pub(super) fn new(snapshot: &[GuestRange], regions: &[GuestRange]) -> Self {
        let mut untracked = PageBitmap::full(regions);
        for range in snapshot {
            untracked.remove(*range);
        }
        Self {
            shares: PageBitmap::new(regions),
            share_pages: 0,
            untracked,
            moved: PageBitmap::new(regions),
            reanonymized: PageBitmap::new(regions),
            returns: BrokenCowStats::default(),
            released: Vec::new(),
        }
    }
}
