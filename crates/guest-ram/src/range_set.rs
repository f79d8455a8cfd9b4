//! A set of pages as ranges.

use std::collections::BTreeMap;

use ebb_abi::{PageRange, Pfn};

/// A set of pages, stored as disjoint ranges with gaps between them: its size depends on its
/// content, unlike that of a [`PageBitmap`](crate::PageBitmap).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RangeSet {
    /// End by start.
    ranges: BTreeMap<u64, u64>,
    pages: u64,
}

impl RangeSet {
    /// Adds pages; returns the range of the set that contains them now.
    pub fn insert(&mut self, range: PageRange) -> PageRange {
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

    /// Removes pages.
    pub fn remove(&mut self, range: PageRange) {
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
    pub fn pages(&self) -> u64 {
        self.pages
    }

    /// Number of ranges.
    pub fn range_count(&self) -> usize {
        self.ranges.len()
    }

    /// The ranges in ascending order.
    pub fn iter(&self) -> impl Iterator<Item = PageRange> {
        self.ranges.iter().map(|(start, end)| PageRange::new(Pfn(*start), end - start))
    }

    /// Empties the set; returns its ranges in ascending order.
    pub fn take_all(&mut self) -> Vec<PageRange> {
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

    fn listed(set: &RangeSet) -> BTreeSet<u64> {
        set.iter().flat_map(|range| range.start.0..range.end().0).collect()
    }

    proptest! {
        /// The model is the plain set of page numbers.
        #[test]
        fn a_range_set_is_a_set_of_pages(
            steps in prop::collection::vec((any::<bool>(), 0..200_u64, 0..60_u64), 0..60),
        ) {
            let mut set = RangeSet::default();
            let mut model = BTreeSet::new();
            for (insert, start, pages) in steps {
                let range = PageRange::new(Pfn(start), pages);
                if insert {
                    let merged = set.insert(range);
                    model.extend(start..start + pages);
                    prop_assert_eq!(merged.intersection(range), range);
                    let added = merged.start.0..merged.end().0;
                    prop_assert!(added.into_iter().all(|page| model.contains(&page)));
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
            prop_assert_eq!(set, RangeSet::default());
        }
    }

    fn runs_in(model: &BTreeSet<u64>) -> usize {
        model.iter().filter(|page| !model.contains(&(**page + 1))).count()
    }
}
