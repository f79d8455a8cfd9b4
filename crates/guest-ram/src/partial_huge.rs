//! Pages in the balloon whose huge page is partly in use, for backings that can only discard whole
//! huge pages.
//!
//! A hugetlb page can be discarded only as a whole. Pages that are inflated one by one are recorded
//! here until their huge page is complete; a page that is deflated is dropped.

use ebb_abi::{HUGE_PAGE_SIZE_PAGES, Pfn};

use crate::{GuestRange, PageBitmap};

/// How long discarded pages stay out of use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Tenure {
    /// They may be in use again as soon as the call returns.
    Momentary,
    /// They are in the balloon: out of use until they are reclaimed.
    Ballooned,
}

/// Pages that may be discarded now.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Plan {
    /// Whole huge pages, coalesced.
    pub(crate) whole: Vec<GuestRange>,
    /// Requested pages whose huge page is not complete.
    pub(crate) deferred_pages: u64,
}

/// The pages in the balloon. Complete huge pages stay until reclaimed, so that a page that is
/// reclaimed and inflated again completes its huge page again.
#[derive(Debug)]
pub(crate) struct PartialHugePages(PageBitmap);

impl PartialHugePages {
    /// An empty set of pages of these regions, which must consist of whole huge pages.
    pub(crate) fn new(regions: &[GuestRange]) -> Self {
        Self(PageBitmap::new(regions))
    }

    /// Finds the huge pages that `ranges`, together with the pages in the balloon, complete.
    pub(crate) fn plan(&mut self, ranges: &[GuestRange], tenure: Tenure) -> Plan {
        let mut asked = ranges.to_vec();
        crate::coalesce(&mut asked);
        let parts: Vec<GuestRange> = asked.iter().copied().flat_map(parts).collect();
        let mut plan = Plan::default();
        for parts in parts.chunk_by(|one, other| one.start.huge_block() == other.start.huge_block())
        {
            let number = parts[0].start.huge_block();
            let block = GuestRange::new(Pfn(number * HUGE_PAGE_SIZE_PAGES), HUGE_PAGE_SIZE_PAGES);
            let asked_pages: u64 = parts.iter().map(|part| part.pages).sum();
            let known_pages: u64 = parts.iter().map(|part| self.0.count_in(*part)).sum();
            if self.0.count_in(block) + asked_pages - known_pages == HUGE_PAGE_SIZE_PAGES {
                plan.whole.push(block);
            } else {
                plan.deferred_pages += asked_pages;
            }
        }
        if tenure == Tenure::Ballooned {
            for range in asked {
                self.0.insert(range);
            }
        }
        crate::coalesce(&mut plan.whole);
        plan
    }

    /// Drops pages that are in use again.
    pub(crate) fn reclaim(&mut self, range: GuestRange) {
        self.0.remove(range);
    }
}

/// Splits a range at the boundaries of huge pages.
fn parts(range: GuestRange) -> impl Iterator<Item = GuestRange> {
    let mut rest = range;
    std::iter::from_fn(move || {
        let end = (rest.start.0 + 1).next_multiple_of(HUGE_PAGE_SIZE_PAGES).min(rest.end().0);
        let part = GuestRange::new(rest.start, end - rest.start.0);
        rest = GuestRange::new(Pfn(end), rest.end().0 - end);
        (!part.is_empty()).then_some(part)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    fn range(start: u64, pages: u64) -> GuestRange {
        GuestRange::new(Pfn(start), pages)
    }

    fn none() -> PartialHugePages {
        PartialHugePages::new(&[range(0, 4096)])
    }

    #[test]
    fn a_block_is_complete_with_its_last_page() {
        let mut ballooned = none();
        let plan = ballooned.plan(&[range(512, 511)], Tenure::Ballooned);
        assert_eq!(plan, Plan { whole: vec![], deferred_pages: 511 });
        let plan = ballooned.plan(&[range(1023, 2)], Tenure::Ballooned);
        assert_eq!(plan, Plan { whole: vec![range(512, 512)], deferred_pages: 1 });
    }

    #[test]
    fn momentary_pages_count_only_during_the_call() {
        let mut ballooned = none();
        assert_eq!(ballooned.plan(&[range(0, 256)], Tenure::Momentary).deferred_pages, 256);
        assert_eq!(ballooned.plan(&[range(256, 256)], Tenure::Ballooned).whole, []);
        let both = ballooned.plan(&[range(0, 256)], Tenure::Momentary);
        assert_eq!(both, Plan { whole: vec![range(0, 512)], deferred_pages: 0 });
        assert_eq!(ballooned.plan(&[range(0, 255)], Tenure::Momentary).whole, []);
    }

    #[test]
    fn a_reclaimed_page_must_be_inflated_again_before_its_block_is_discarded() {
        let mut ballooned = none();
        assert_eq!(ballooned.plan(&[range(0, 1024)], Tenure::Ballooned).whole, [range(0, 1024)]);
        ballooned.reclaim(range(7, 1));
        assert_eq!(ballooned.plan(&[range(8, 1)], Tenure::Ballooned).whole, []);
        assert_eq!(ballooned.plan(&[range(7, 1)], Tenure::Ballooned).whole, [range(0, 512)]);
        ballooned.reclaim(range(0, u64::MAX));
        assert!(ballooned.0.is_empty());
    }

    proptest! {
        /// The model is the plain set of ballooned pages.
        #[test]
        fn whole_blocks_consist_of_requested_and_ballooned_pages(
            steps in prop::collection::vec((0..3_u8, 0..1600_u64, 0..1100_u64), 1..20),
        ) {
            let mut ballooned = none();
            let mut model: BTreeSet<u64> = BTreeSet::new();
            for (action, start, pages) in steps {
                let asked: BTreeSet<u64> = (start..start + pages).collect();
                if action == 2 {
                    ballooned.reclaim(range(start, pages));
                    model.retain(|page| !asked.contains(page));
                    continue;
                }
                let tenure = if action == 0 { Tenure::Ballooned } else { Tenure::Momentary };
                let known: BTreeSet<u64> = model.union(&asked).copied().collect();
                let complete: BTreeSet<u64> = asked
                    .iter()
                    .map(|page| page / 512)
                    .filter(|block| {
                        (block * 512..block * 512 + 512).all(|page| known.contains(&page))
                    })
                    .collect();
                let plan = ballooned.plan(&[range(start, pages)], tenure);
                let whole: BTreeSet<u64> = plan
                    .whole
                    .iter()
                    .flat_map(|range| range.start.0..range.end().0)
                    .map(|page| page / 512)
                    .collect();
                let deferred = asked
                    .iter()
                    .filter(|page| !complete.contains(&(**page / 512)))
                    .count() as u64;
                prop_assert_eq!(whole, complete);
                prop_assert_eq!(plan.deferred_pages, deferred);
                if tenure == Tenure::Ballooned {
                    model = known;
                }
            }
        }
    }
}
