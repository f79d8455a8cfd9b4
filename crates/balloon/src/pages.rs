//! Sets of guest pages: turning page frame numbers into few, large ranges.

use std::collections::BTreeMap;

use ebb_abi::{PageRange, Pfn};

/// Turns page frame numbers into sorted, disjoint ranges; reuses its buffer.
#[derive(Debug, Default)]
pub(crate) struct RunBuilder {
    runs: Vec<PageRange>,
    numbers: u64,
}

impl RunBuilder {
    pub(crate) fn clear(&mut self) {
        self.runs.clear();
        self.numbers = 0;
    }

    /// Adds a frame. Neighbours in either direction extend the current run, so that the common
    /// orders cost nothing more.
    pub(crate) fn push(&mut self, pfn: Pfn) {
        self.numbers += 1;
        if let Some(run) = self.runs.last_mut() {
            if run.end() == pfn {
                run.pages += 1;
                return;
            }
            if pfn.0 + 1 == run.start.0 {
                *run = PageRange::new(pfn, run.pages + 1);
                return;
            }
        }
        self.runs.push(PageRange::new(pfn, 1));
    }

    /// The frames as sorted, disjoint ranges with gaps between them, and how many numbers were
    /// doubles.
    pub(crate) fn finish(&mut self) -> (&[PageRange], u64) {
        ebb_guest_ram::coalesce(&mut self.runs);
        let pages: u64 = self.runs.iter().map(|run| run.pages).sum();
        (&self.runs, self.numbers - pages)
    }
}

/// A set of pages, kept as disjoint ranges with gaps between them.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct PageSet {
    /// End by start.
    ranges: BTreeMap<u64, u64>,
    pages: u64,
}

impl PageSet {
    /// Adds pages; returns the range of the set that they are now part of.
    pub(crate) fn insert(&mut self, range: PageRange) -> PageRange {
        if range.is_empty() {
            return range;
        }
        let (mut start, mut end) = (range.start.0, range.end().0);
        if let Some((&before, &before_end)) = self.ranges.range(..start).next_back()
            && before_end >= start
        {
            self.take(before, before_end);
            (start, end) = (before, end.max(before_end));
        }
        while let Some((&next, &next_end)) = self.ranges.range(start..=end).next() {
            self.take(next, next_end);
            end = end.max(next_end);
        }
        self.put(start, end);
        PageRange::new(Pfn(start), end - start)
    }

    /// Takes pages out, whether they are in the set or not.
    pub(crate) fn remove(&mut self, range: PageRange) {
        if range.is_empty() {
            return;
        }
        let (start, end) = (range.start.0, range.end().0);
        while let Some((&last, &last_end)) = self.ranges.range(..end).next_back()
            && last_end > start
        {
            self.take(last, last_end);
            if last_end > end {
                self.put(end, last_end);
            }
            if last < start {
                self.put(last, start);
            }
        }
    }

    fn take(&mut self, start: u64, end: u64) {
        self.ranges.remove(&start);
        self.pages -= end - start;
    }

    fn put(&mut self, start: u64, end: u64) {
        self.ranges.insert(start, end);
        self.pages += end - start;
    }

    /// Number of pages.
    pub(crate) fn pages(&self) -> u64 {
        self.pages
    }

    /// Number of ranges.
    pub(crate) fn range_count(&self) -> usize {
        self.ranges.len()
    }

    /// The ranges in ascending order.
    pub(crate) fn iter(&self) -> impl Iterator<Item = PageRange> {
        self.ranges.iter().map(|(start, end)| PageRange::new(Pfn(*start), end - start))
    }

    /// Empties the set; returns its ranges in ascending order.
    pub(crate) fn take_all(&mut self) -> Vec<PageRange> {
        let ranges = self.iter().collect();
        *self = Self::default();
        ranges
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    fn listed(set: &PageSet) -> BTreeSet<u64> {
        set.iter().flat_map(|range| range.start.0..range.end().0).collect()
    }

    #[test]
    fn runs_grow_in_both_directions() {
        let mut builder = RunBuilder::default();
        for number in [5, 6, 7, 4, 3, 100, 99, 6] {
            builder.push(Pfn(number));
        }
        let expected = [PageRange::new(Pfn(3), 5), PageRange::new(Pfn(99), 2)];
        assert_eq!(builder.finish(), (&expected[..], 1));
    }

    proptest! {
        #[test]
        fn runs_hold_exactly_the_numbers_pushed(numbers in prop::collection::vec(0..300_u32, 0..300)) {
            let mut builder = RunBuilder::default();
            builder.push(Pfn(7));
            builder.clear();
            for number in &numbers {
                builder.push(Pfn::from(*number));
            }
            let distinct: BTreeSet<u64> = numbers.iter().map(|number| u64::from(*number)).collect();
            let (runs, doubles) = builder.finish();
            let pages: BTreeSet<u64> = runs.iter().flat_map(|run| run.start.0..run.end().0).collect();
            prop_assert!(runs.windows(2).all(|pair| pair[0].end() < pair[1].start));
            prop_assert_eq!(doubles as usize, numbers.len() - distinct.len());
            prop_assert_eq!(pages, distinct);
        }

        /// The model is the plain set of page numbers.
        #[test]
        fn a_page_set_is_a_set_of_pages(
            steps in prop::collection::vec((any::<bool>(), 0..200_u64, 0..60_u64), 0..60),
        ) {
            let mut set = PageSet::default();
            let mut model = BTreeSet::new();
            for (insert, start, pages) in steps {
                let range = PageRange::new(Pfn(start), pages);
                if insert {
                    let merged = set.insert(range);
                    model.extend(start..start + pages);
                    prop_assert_eq!(merged.intersection(range), range);
                    prop_assert!((merged.start.0..merged.end().0).all(|page| model.contains(&page)));
                } else {
                    set.remove(range);
                    model.retain(|page| !range.contains(Pfn(*page)));
                }
                prop_assert_eq!(&listed(&set), &model);
                prop_assert_eq!(set.pages() as usize, model.len());
                let ranges: Vec<_> = set.iter().collect();
                prop_assert!(ranges.windows(2).all(|pair| pair[0].end() < pair[1].start));
            }
            prop_assert_eq!(set.range_count(), runs_in(&model));
            prop_assert_eq!(set.take_all().len(), runs_in(&model));
            prop_assert_eq!(set, PageSet::default());
        }
    }

    fn runs_in(model: &BTreeSet<u64>) -> usize {
        model.iter().filter(|page| !model.contains(&(**page + 1))).count()
    }
}
