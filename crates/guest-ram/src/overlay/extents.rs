//! Extents of guest memory that are mapped from a file.
//!
//! `MADV_DONTNEED` must not be used where a file is mapped: the file's content would become
//! visible. [`FileExtents::judge`] decides how a range may be discarded, also with regard to the
//! VMAs that this takes ([`VmaBudget`]).

use std::collections::BTreeMap;

use ebb_abi::{HUGE_PAGE_SIZE_PAGES, Pfn};

use super::vma_budget::VmaBudget;
use crate::GuestRange;

#[cfg(feature = "merge")]
use super::merged_pages::MergedPages;
#[cfg(feature = "merge")]
use crate::merge::StableSlot;

/// Share of the VMA budget, in sixteenths, that discards may use up. The rest is for whole huge
/// pages, so that single pages do not prevent large discards.
pub(super) const FOR_DISCARDS: u64 = 14;

/// Share of the VMA budget, in sixteenths, that discards of a huge page or more may use up.
pub(super) const FOR_HUGE_DISCARDS: u64 = 16;

/// File mapped in place of guest pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Source {
    /// The file that the memory was restored from, at the pages' RAM offsets.
    Snapshot,
    /// Stable pages, the first of them in this slot.
    #[cfg(feature = "merge")]
    Stable(StableSlot),
}

impl Source {
    /// The source `pages` pages further on.
    #[cfg_attr(not(feature = "merge"), expect(unused_variables))]
    pub(super) fn offset(self, pages: u64) -> Self {
        match self {
            Self::Snapshot => Self::Snapshot,
            #[cfg(feature = "merge")]
            Self::Stable(first) => Self::Stable(first.offset(pages as u32)),
        }
    }
}

/// How a range of pages may be discarded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// As ordinary memory.
    Ordinary,
    /// By replacing it with fresh anonymous memory as a whole; this is necessary, or reduces the
    /// number of VMAs.
    Replace,
    /// The VMA budget is exhausted: pages mapped from a file must stay, the rest is ordinary
    /// memory.
    Keep,
}

/// Neighbouring pages that are mapped from neighbouring offsets of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct FileExtent {
    /// Page behind the last one.
    pub(super) end: u64,
    /// Source of the first page.
    pub(super) source: Source,
}

/// The pages of a memory that are mapped from files.
#[derive(Debug)]
pub(crate) struct FileExtents {
    /// By first page. They do not overlap or cross regions.
    pub(super) extents: BTreeMap<u64, FileExtent>,
    snapshot_pages: u64,
    /// Starts of VMAs, and the budget of further ones.
    pub(crate) vmas: VmaBudget,
    #[cfg(feature = "merge")]
    pub(super) merged: MergedPages,
}

impl FileExtents {
    /// `snapshot` are the pages mapped from the file that the memory was restored from; they must
    /// not overlap or cross regions.
    pub(super) fn new(snapshot: &[GuestRange], vmas: VmaBudget) -> Self {
        let mut extents = Self {
            extents: BTreeMap::new(),
            snapshot_pages: 0,
            #[cfg(feature = "merge")]
            merged: MergedPages::new(snapshot, vmas.regions()),
            vmas,
        };
        for range in snapshot {
            let extent = FileExtent { end: range.end().0, source: Source::Snapshot };
            extents.extents.insert(range.start.0, extent);
            extents.snapshot_pages += range.pages;
            extents.vmas.cover(*range);
        }
        extents.vmas.report();
        extents
    }

    /// Number of pages that are mapped from the file that the memory was restored from.
    pub(crate) fn snapshot_pages(&self) -> u64 {
        self.snapshot_pages
    }

    /// The parts of `range` that are mapped from files, in ascending order, each with the source of
    /// its first page.
    pub(crate) fn mapped(
        &self,
        range: GuestRange,
    ) -> impl Iterator<Item = (GuestRange, Source)> + use<'_> {
        let before = self.extents.range(..range.start.0).next_back();
        let from = self.extents.range(range.start.0..range.end().0.max(range.start.0));
        before.into_iter().chain(from).filter_map(move |(&start, extent)| {
            let part = GuestRange::new(Pfn(start), extent.end - start).intersection(range);
            (!part.is_empty()).then(|| (part, extent.source.offset(part.start.0 - start)))
        })
    }

    /// The extent of a page, with its first page.
    pub(super) fn extent_at(&self, page: u64) -> Option<(u64, FileExtent)> {
        let (&start, &extent) = self.extents.range(..=page).next_back()?;
        (page < extent.end).then_some((start, extent))
    }

    /// Whether no page needs special treatment by discards.
    pub(super) fn is_all_ordinary(&self) -> bool {
        self.extents.is_empty() && self.vmas.is_empty()
    }

    /// Decides how to discard `range`, which lies within a region.
    pub(super) fn judge(&self, range: GuestRange) -> Verdict {
        let added = self.vmas.added_by(range);
        let is_huge = range.pages >= HUGE_PAGE_SIZE_PAGES;
        if self.mapped(range).next().is_none() {
            // Large ranges are coalesced again, so that unnecessary VMAs do not remain.
            return if is_huge && added < 0 { Verdict::Replace } else { Verdict::Ordinary };
        }
        let added = added - i64::from(self.joined_edge(range).is_some());
        let share = if is_huge { FOR_HUGE_DISCARDS } else { FOR_DISCARDS };
        if self.vmas.fits(added, share) { Verdict::Replace } else { Verdict::Keep }
    }

    /// Records that a discard has replaced `range`, which lies within a region, by one mapping of
    /// fresh anonymous memory.
    pub(super) fn note_discarded(&mut self, range: GuestRange) {
        if range.is_empty() {
            return;
        }
        let joined = self.joined_edge(range);
        #[cfg(feature = "merge")]
        self.forget_merged(range);
        self.cut_out(range);
        self.vmas.cover(range);
        if let Some(edge) = joined {
            self.vmas.join_at(edge);
        }
        self.vmas.report();
    }

    /// Removes `range` from the extents.
    pub(super) fn cut_out(&mut self, range: GuestRange) {
        let parts: Vec<GuestRange> = self.mapped(range).map(|(part, _)| part).collect();
        for part in parts {
            let Some((start, extent)) = self.extent_at(part.start.0) else { continue };
            if extent.source == Source::Snapshot {
                self.snapshot_pages -= part.pages;
            }
            self.extents.remove(&start);
            if start < part.start.0 {
                self.extents.insert(start, FileExtent { end: part.start.0, ..extent });
            }
            if part.end().0 < extent.end {
                let source = extent.source.offset(part.end().0 - start);
                self.extents.insert(part.end().0, FileExtent { end: extent.end, source });
            }
        }
    }

    /// The edge of `range` at which the kernel joins a mapping of fresh anonymous memory with its
    /// neighbour. It has no page yet, so it is joined with a similar neighbour, but not certainly
    /// with both.
    fn joined_edge(&self, range: GuestRange) -> Option<u64> {
        let is_joined = |page| self.vmas.is_same_region(page, range) && self.is_like_fresh(page);
        if is_joined(range.start.0.wrapping_sub(1)) {
            Some(range.start.0)
        } else {
            is_joined(range.end().0).then_some(range.end().0)
        }
    }

    /// Whether a page lies in a mapping like that of fresh anonymous memory.
    #[cfg(not(feature = "merge"))]
    fn is_like_fresh(&self, page: u64) -> bool {
        self.extent_at(page).is_none()
    }
}

#[cfg(test)]
mod tests;
