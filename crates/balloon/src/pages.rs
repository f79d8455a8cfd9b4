//! Conversion of page frame numbers into few, large ranges.

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

    /// Returns the frames as sorted, disjoint ranges with gaps between them, and the number of
    /// duplicates.
    pub(crate) fn finish(&mut self) -> (&[PageRange], u64) {
        ebb_guest_ram::coalesce(&mut self.runs);
        let pages: u64 = self.runs.iter().map(|run| run.pages).sum();
        (&self.runs, self.numbers - pages)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

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
        fn runs_contain_exactly_the_numbers_pushed(
            numbers in prop::collection::vec(0..300_u32, 0..300),
        ) {
            let mut builder = RunBuilder::default();
            builder.push(Pfn(7));
            builder.clear();
            for number in &numbers {
                builder.push(Pfn::from(*number));
            }
            let distinct: BTreeSet<u64> = numbers.iter().map(|number| u64::from(*number)).collect();
            let (runs, duplicates) = builder.finish();
            let pages: BTreeSet<u64> =
                runs.iter().flat_map(|run| run.start.0..run.end().0).collect();
            prop_assert!(runs.windows(2).all(|pair| pair[0].end() < pair[1].start));
            prop_assert_eq!(duplicates as usize, numbers.len() - distinct.len());
            prop_assert_eq!(pages, distinct);
        }
    }
}
