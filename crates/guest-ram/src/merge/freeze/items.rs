//! Pages that are replaced together, and the parts that are processed at once.

use std::ops::Range;

use ebb_abi::Pfn;

use crate::{GuestRange, StableSlot};

/// Mappings made at a time: a thread that waits for a page waits for all of them.
const EXTENTS_AT_ONCE: usize = 64;

/// Replacement of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MergeTarget {
    /// None: the page reads as zeros.
    Zero,
    /// The stable page in this slot.
    Slot(StableSlot),
}

/// Outcome of replacing a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MergeOutcome {
    /// The target is in its place. The page's memory is freed.
    Done,
    /// The contents differ: the page is unchanged.
    Different,
    /// The page is pinned, or the kernel refuses to move it for now: the page is unchanged.
    Busy,
    /// Its run is too short for the available mappings: the page is unchanged.
    NoMappings,
    /// The page does not exist any more, or cannot be replaced.
    Gone,
}

/// Processing stage of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    /// In its place, to be moved away.
    Candidate,
    /// Away, to be compared.
    Away,
    /// Away, and equal to its target.
    Same,
    /// In its place, or replaced: finished.
    Ended(MergeOutcome),
    /// Away, to be moved back with this outcome.
    Back(MergeOutcome),
}

/// A page to be replaced.
#[derive(Clone, Copy, Debug)]
pub(super) struct Item {
    pub(super) page: Pfn,
    pub(super) target: MergeTarget,
    pub(super) stage: Stage,
}

/// From the first of some pages to the last one.
pub(super) fn span(pages: &[(Pfn, MergeTarget)]) -> Option<GuestRange> {
    let numbers = || pages.iter().map(|(page, _)| page.0);
    let (first, last) = (numbers().min()?, numbers().max()?);
    Some(GuestRange::new(Pfn(first), last - first + 1))
}

/// Number of pages of a block that may be replaced at once. Neighbours stay together unless there
/// are too many.
pub(super) fn few_extents(pages: &[(Pfn, MergeTarget)]) -> usize {
    let mut extents = 0;
    for (index, pair) in pages.windows(2).enumerate() {
        let [(left, left_target), (right, right_target)] = pair else { continue };
        let neighbours = left.0 + 1 == right.0;
        extents += usize::from(!neighbours || !are_followed(*left_target, *right_target));
        if extents >= EXTENTS_AT_ONCE && !neighbours || extents >= 2 * EXTENTS_AT_ONCE {
            return index + 1;
        }
    }
    pages.len()
}

/// The pages of an extent and their first slot; `None` if they are replaced by nothing.
pub(super) fn place(extent: &[Item]) -> Option<(GuestRange, StableSlot)> {
    let first = extent.first()?;
    match first.target {
        MergeTarget::Zero => None,
        MergeTarget::Slot(slot) => Some((GuestRange::new(first.page, extent.len() as u64), slot)),
    }
}

/// Neighbouring pages in a stage that go to neighbouring slots.
pub(super) fn extents(items: &[Item], stage: Stage) -> Vec<Range<usize>> {
    ranges(items, |item| item.stage == stage, |left, right| are_followed(left.target, right.target))
}

/// Whether the targets of two neighbours are mapped at once.
pub(super) fn are_followed(left: MergeTarget, right: MergeTarget) -> bool {
    match (left, right) {
        (MergeTarget::Zero, MergeTarget::Zero) => true,
        (MergeTarget::Slot(left), MergeTarget::Slot(right)) => left.is_followed_by(right),
        _ => false,
    }
}

/// Neighbouring pages for which `is_in` holds, split where `joins` does not hold.
pub(super) fn ranges(
    items: &[Item],
    is_in: impl Fn(&Item) -> bool,
    joins: impl Fn(&Item, &Item) -> bool,
) -> Vec<Range<usize>> {
    let mut ranges: Vec<Range<usize>> = Vec::new();
    for (index, item) in items.iter().enumerate() {
        if !is_in(item) {
            continue;
        }
        match ranges.last_mut() {
            Some(last)
                if last.end == index
                    && items[index - 1].page.0 + 1 == item.page.0
                    && joins(&items[index - 1], item) =>
            {
                last.end += 1;
            }
            _ => ranges.push(index..index + 1),
        }
    }
    ranges
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Pages, each with the slot of its number plus `away`.
    fn pages(
        numbers: impl IntoIterator<Item = u64>,
        away: impl Fn(u64) -> u32,
    ) -> Vec<(Pfn, MergeTarget)> {
        let target = |number| {
            MergeTarget::Slot(StableSlot { segment: 0, index: number as u32 + away(number) })
        };
        numbers.into_iter().map(|number| (Pfn(number), target(number))).collect()
    }

    #[test]
    fn many_mappings_are_made_in_parts_and_one_is_not_split() {
        let one = pages(0..512, |_| 7);
        assert_eq!(few_extents(&one), 512);
        let zeros: Vec<_> = (0..512).map(|number| (Pfn(number), MergeTarget::Zero)).collect();
        assert_eq!(few_extents(&zeros), 512);
        let single = pages((0..512).step_by(2), |_| 7);
        assert_eq!(few_extents(&single), EXTENTS_AT_ONCE);
        assert_eq!(few_extents(&single[..EXTENTS_AT_ONCE]), EXTENTS_AT_ONCE);
    }

    #[test]
    fn neighbours_are_split_only_if_there_are_too_many() {
        // Each with a slot that does not follow its neighbour's, in groups of five.
        let groups = pages((0..512).filter(|page| page % 6 != 0), |page| page as u32);
        let first = few_extents(&groups);
        assert_eq!(first, EXTENTS_AT_ONCE.next_multiple_of(5));
        assert_eq!(few_extents(&pages(0..512, |page| page as u32)), 2 * EXTENTS_AT_ONCE);
    }
}
