//! What is known of merged pages.
//!
//! Besides whether a stable page is mapped in a page's place there are three things: whether the
//! page still holds a *share* of its stable page (it gives it up once it is found to have been
//! written to), whether it lies in memory that is not *tracked* for writes, because a discard has
//! put it there, and whether it was *moved* to where it is.

use crate::merge::StableSlot;
use crate::{GuestRange, PageBitmap};

/// Neighbouring slots.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct SlotRun {
    pub(super) first: StableSlot,
    pub(super) pages: u32,
}

/// What became of merged pages that were written to; the numbers only grow.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BrokenCowStats {
    /// Pages that were brought back to ordinary memory.
    pub brought_back_pages: u64,
    /// Of these, pages that were merged again.
    pub remerged_pages: u64,
    /// Mappings that were saved by putting neighbouring ones together, at most.
    pub joined_mappings: u64,
}

/// The pages of a memory that are or were merged.
#[derive(Debug)]
pub(super) struct MergedPages {
    /// Pages that hold a share of the slot that is mapped for them.
    pub(super) shares: PageBitmap,
    pub(super) share_pages: u64,
    /// Pages of anonymous memory that is not tracked for writes.
    pub(super) untracked: PageBitmap,
    /// Pages that were moved to where they are, so that the kernel joins their mapping with no
    /// neighbour.
    pub(super) moved: PageBitmap,
    /// Pages that were merged, were written to, and have been brought back to ordinary memory, and
    /// are still there.
    pub(super) reanonymized: PageBitmap,
    pub(super) returns: BrokenCowStats,
    /// Slots whose shares were given up by discards.
    pub(super) released: Vec<SlotRun>,
}

impl MergedPages {
    /// Nothing is merged or tracked yet.
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
