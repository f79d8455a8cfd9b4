//! Arithmetic on lists of guest page ranges.

use ebb_abi::{HUGE_PAGE_SIZE_PAGES, Pfn};

use crate::GuestRange;

/// Sorts ranges by address and merges those that adjoin or overlap; empty ones are removed. Linear
/// for sorted input.
pub fn coalesce(ranges: &mut Vec<GuestRange>) {
    ranges.retain(|range| !range.is_empty());
    if !ranges.is_sorted() {
        ranges.sort_unstable();
    }
    ranges.dedup_by(|next, merged| {
        let touches = next.start <= merged.end();
        if touches {
            merged.pages = merged.end().max(next.end()).0 - merged.start.0;
        }
        touches
    });
}

/// Splits ranges so that all whole 2 MiB blocks come first and the remaining fragments follow, each
/// part in the order of the input. The union stays the same.
///
/// Large before small: a whole huge page is discarded at once and cheaply, part of one splits it
/// first.
#[must_use]
pub fn huge_blocks_first(ranges: &[GuestRange]) -> Vec<GuestRange> {
    let mut blocks = Vec::with_capacity(ranges.len() * 2);
    let mut fragments = Vec::new();
    for range in ranges.iter().filter(|range| !range.is_empty()) {
        let whole = range.whole_huge_blocks();
        if whole.is_empty() {
            fragments.push(*range);
            continue;
        }
        let head = whole.start.0 - range.start.0;
        let tail = range.end().0 - whole.end().0;
        debug_assert!(head < HUGE_PAGE_SIZE_PAGES && tail < HUGE_PAGE_SIZE_PAGES);
        blocks.push(whole);
        fragments.extend((head > 0).then(|| GuestRange::new(range.start, head)));
        fragments.extend((tail > 0).then(|| GuestRange::new(whole.end(), tail)));
    }
    blocks.append(&mut fragments);
    blocks
}

/// The parts of `range` that lie in none of `others`, which must be in ascending order.
pub(crate) fn gaps(range: GuestRange, others: &[GuestRange]) -> impl Iterator<Item = GuestRange> {
    let behind = GuestRange::new(range.end(), 0);
    let mut start = range.start.0;
    others.iter().copied().chain([behind]).filter_map(move |other| {
        let gap = GuestRange::new(Pfn(start), other.start.0.saturating_sub(start));
        start = start.max(other.end().0);
        (!gap.is_empty()).then_some(gap)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    fn ranges() -> impl Strategy<Value = Vec<GuestRange>> {
        let range = (0..4000_u64, 0..1500_u64)
            .prop_map(|(start, pages)| GuestRange::new(Pfn(start), pages));
        prop::collection::vec(range, 0..12)
    }

    #[test]
    fn gaps_are_the_remaining_parts() {
        let range = |start, pages| GuestRange::new(Pfn(start), pages);
        let gaps = |others: &[GuestRange]| gaps(range(10, 20), others).collect::<Vec<_>>();
        assert_eq!(gaps(&[]), [range(10, 20)]);
        assert_eq!(
            gaps(&[range(10, 5), range(15, 2), range(20, 1), range(29, 1)]),
            [range(17, 3), range(21, 8)]
        );
        assert_eq!(gaps(&[range(10, 20)]), []);
    }

    fn pages(ranges: &[GuestRange]) -> BTreeSet<u64> {
        ranges.iter().flat_map(|range| range.start.0..range.end().0).collect()
    }

    proptest! {
        #[test]
        fn coalescing_keeps_the_pages_and_leaves_gaps_between_ranges(mut list in ranges()) {
            let before = pages(&list);
            coalesce(&mut list);
            prop_assert_eq!(pages(&list), before);
            prop_assert!(list.iter().all(|range| !range.is_empty()));
            prop_assert!(list.windows(2).all(|pair| pair[0].end() < pair[1].start));
        }

        #[test]
        fn splitting_keeps_the_pages_and_puts_blocks_first(mut list in ranges()) {
            coalesce(&mut list);
            let split = huge_blocks_first(&list);
            prop_assert_eq!(pages(&split), pages(&list));
            let total: u64 = split.iter().map(|range| range.pages).sum();
            prop_assert_eq!(total, pages(&list).len() as u64);
            let whole = |range: &GuestRange| range.whole_huge_blocks() == *range;
            prop_assert!(split.is_sorted_by_key(|range| !whole(range)));
            prop_assert!(
                split.iter().all(|range| whole(range) || range.whole_huge_blocks().is_empty())
            );
        }
    }
}
