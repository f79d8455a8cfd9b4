//! Memory of which pages the guest has given away, for backings that can only discard whole huge
//! pages.
//!
//! A hugetlb page goes back to the host only as a whole. Pages that a balloon takes one by one are
//! remembered here until their huge page is complete; a page that goes back to the guest is
//! forgotten.

use std::collections::BTreeMap;

use ebb_abi::{HUGE_PAGE_SIZE_PAGES, Pfn};

use crate::GuestRange;

/// One bit for each page of a 2 MiB block.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Block([u64; (HUGE_PAGE_SIZE_PAGES / 64) as usize]);

impl Block {
    fn set(&mut self, first: u64, pages: u64) {
        self.for_each_word(first, pages, |word, mask| *word |= mask);
    }

    fn clear(&mut self, first: u64, pages: u64) {
        self.for_each_word(first, pages, |word, mask| *word &= !mask);
    }

    fn for_each_word(&mut self, first: u64, pages: u64, mut change: impl FnMut(&mut u64, u64)) {
        let mut next = first;
        let end = (first + pages).min(HUGE_PAGE_SIZE_PAGES);
        while next < end {
            let bit = next % 64;
            let count = (64 - bit).min(end - next);
            let mask = (u64::MAX >> (64 - count)) << bit;
            change(&mut self.0[(next / 64) as usize], mask);
            next += count;
        }
    }

    fn union(&self, other: &Self) -> Self {
        Self(std::array::from_fn(|word| self.0[word] | other.0[word]))
    }

    fn count(&self) -> u64 {
        self.0.iter().map(|word| u64::from(word.count_ones())).sum()
    }

    fn is_full(&self) -> bool {
        self.0.iter().all(|word| *word == u64::MAX)
    }

    fn is_empty(&self) -> bool {
        self.0.iter().all(|word| *word == 0)
    }
}

/// Whether the guest keeps its hands off discarded pages after the call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Tenure {
    /// The pages may be in use again as soon as the call returns.
    Momentary,
    /// The pages stay out of use until they are reclaimed.
    Held,
}

/// What may be discarded now.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Plan {
    /// Whole huge pages, coalesced.
    pub(crate) whole: Vec<GuestRange>,
    /// Pages asked for whose huge page is not complete.
    pub(crate) deferred_pages: u64,
}

/// The held pages by 2 MiB block; blocks without a held page are absent. Complete blocks stay until
/// reclaimed, so that a page that is reclaimed and given away again completes its block again.
#[derive(Debug, Default)]
pub(crate) struct HeldPages {
    blocks: BTreeMap<u64, Block>,
}

impl HeldPages {
    /// Finds the huge pages that `ranges`, together with what is held, completes.
    pub(crate) fn plan(&mut self, ranges: &[GuestRange], tenure: Tenure) -> Plan {
        let mut asked: BTreeMap<u64, Block> = BTreeMap::new();
        let mut plan = Plan::default();
        for range in ranges {
            for (block, first, pages) in parts(*range) {
                asked.entry(block).or_default().set(first, pages);
            }
        }
        for (number, block) in &asked {
            let held = self.blocks.get(number).copied().unwrap_or_default();
            let known = held.union(block);
            if tenure == Tenure::Held {
                self.blocks.insert(*number, known);
            }
            if known.is_full() {
                plan.whole.push(GuestRange::new(
                    Pfn(number * HUGE_PAGE_SIZE_PAGES),
                    HUGE_PAGE_SIZE_PAGES,
                ));
            } else {
                plan.deferred_pages += block.count();
            }
        }
        crate::coalesce(&mut plan.whole);
        plan
    }

    /// Forgets pages: they are in use again.
    pub(crate) fn reclaim(&mut self, range: GuestRange) {
        let Some(last) = range.pages.checked_sub(1) else { return };
        let (first_block, last_block) =
            (range.start.huge_block(), Pfn(range.start.0.saturating_add(last)).huge_block());
        let mut emptied = Vec::new();
        for (number, block) in self.blocks.range_mut(first_block..=last_block) {
            let base = number * HUGE_PAGE_SIZE_PAGES;
            let part = range.intersection(GuestRange::new(Pfn(base), HUGE_PAGE_SIZE_PAGES));
            block.clear(part.start.0 - base, part.pages);
            if block.is_empty() {
                emptied.push(*number);
            }
        }
        for number in emptied {
            self.blocks.remove(&number);
        }
    }
}

/// Splits a range at block borders: (block, first page in it, pages).
fn parts(range: GuestRange) -> impl Iterator<Item = (u64, u64, u64)> {
    let mut next = range.start.0;
    let end = range.end().0;
    std::iter::from_fn(move || {
        (next < end).then(|| {
            let first = next % HUGE_PAGE_SIZE_PAGES;
            let pages = (HUGE_PAGE_SIZE_PAGES - first).min(end - next);
            let part = (next / HUGE_PAGE_SIZE_PAGES, first, pages);
            next += pages;
            part
        })
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

    #[test]
    fn a_block_is_complete_when_its_last_page_comes() {
        let mut held = HeldPages::default();
        let plan = held.plan(&[range(512, 511)], Tenure::Held);
        assert_eq!(plan, Plan { whole: vec![], deferred_pages: 511 });
        let plan = held.plan(&[range(1023, 2)], Tenure::Held);
        assert_eq!(plan, Plan { whole: vec![range(512, 512)], deferred_pages: 1 });
    }

    #[test]
    fn momentary_pages_count_only_during_the_call() {
        let mut held = HeldPages::default();
        assert_eq!(held.plan(&[range(0, 256)], Tenure::Momentary).deferred_pages, 256);
        assert_eq!(held.plan(&[range(256, 256)], Tenure::Held).whole, []);
        let both = held.plan(&[range(0, 256)], Tenure::Momentary);
        assert_eq!(both, Plan { whole: vec![range(0, 512)], deferred_pages: 0 });
        assert_eq!(held.plan(&[range(0, 255)], Tenure::Momentary).whole, []);
    }

    #[test]
    fn a_reclaimed_page_must_come_back_before_its_block_goes() {
        let mut held = HeldPages::default();
        assert_eq!(held.plan(&[range(0, 1024)], Tenure::Held).whole, [range(0, 1024)]);
        held.reclaim(range(7, 1));
        assert_eq!(held.plan(&[range(8, 1)], Tenure::Held).whole, []);
        assert_eq!(held.plan(&[range(7, 1)], Tenure::Held).whole, [range(0, 512)]);
        held.reclaim(range(0, u64::MAX));
        assert!(held.blocks.is_empty());
    }

    proptest! {
        /// The model is the plain set of held pages.
        #[test]
        fn whole_blocks_consist_of_asked_and_held_pages(
            steps in prop::collection::vec((0..3_u8, 0..1600_u64, 0..1100_u64), 1..20),
        ) {
            let mut held = HeldPages::default();
            let mut model: BTreeSet<u64> = BTreeSet::new();
            for (action, start, pages) in steps {
                let asked: BTreeSet<u64> = (start..start + pages).collect();
                if action == 2 {
                    held.reclaim(range(start, pages));
                    model.retain(|page| !asked.contains(page));
                    continue;
                }
                let tenure = if action == 0 { Tenure::Held } else { Tenure::Momentary };
                let known: BTreeSet<u64> = model.union(&asked).copied().collect();
                let complete: BTreeSet<u64> = asked
                    .iter()
                    .map(|page| page / 512)
                    .filter(|block| (block * 512..block * 512 + 512).all(|page| known.contains(&page)))
                    .collect();
                let plan = held.plan(&[range(start, pages)], tenure);
                let whole: BTreeSet<u64> =
                    plan.whole.iter().flat_map(|range| range.start.0..range.end().0).map(|page| page / 512).collect();
                let deferred = asked.iter().filter(|page| !complete.contains(&(**page / 512))).count() as u64;
                prop_assert_eq!(whole, complete);
                prop_assert_eq!(plan.deferred_pages, deferred);
                if tenure == Tenure::Held {
                    model = known;
                }
            }
        }
    }
}
