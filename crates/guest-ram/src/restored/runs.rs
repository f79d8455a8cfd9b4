//! Which pages of restored memory are still the file's, and how many mappings that takes.
//!
//! A process has a limited number of mappings (`vm.max_map_count`), and a page that becomes
//! anonymous in the middle of a mapping of the file makes three out of one. A guest that gives away
//! every other page must not exhaust them: mappings for anything else would fail. So there is a
//! bound, and a page that would exceed it stays where it is.
//!
//! The count is an upper bound of the real one. With `n` runs of file pages there are at most
//! `2n + 1` mappings a region, if neighbouring anonymous ones are one; the kernel merges a new
//! anonymous mapping, which has no page yet, with its neighbour to the left or to the right for
//! sure, and with both only if these had the same origin (Linux mm/vma.c, `is_mergeable_anon_vma`).
//! Where both are there, a border is counted for good.

use std::collections::BTreeMap;

use ebb_abi::{HUGE_PAGE_SIZE_PAGES, Pfn};

use crate::GuestRange;

/// What may be done with a range of pages that is to be discarded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// None of it is the file's.
    Anonymous,
    /// All of it may be replaced by anonymous memory.
    Replace,
    /// All of it is the file's and must stay: no mappings are left.
    Keep,
}

/// Runs of pages that are the file's.
#[derive(Debug)]
pub(crate) struct FileRuns {
    /// First page of a run, and the page behind its last one. Runs do not overlap and do not cross
    /// regions.
    runs: BTreeMap<u64, u64>,
    pages: u64,
    /// Borders between anonymous mappings that may not have been merged.
    borders: u64,
    /// Mappings that guest memory takes for other reasons.
    other_mappings: u64,
    /// Bound of mappings.
    max_mappings: u64,
    regions: Vec<GuestRange>,
}

impl FileRuns {
    /// `runs` must not overlap and not cross `regions`; they may adjoin only at a border of
    /// regions.
    pub(crate) fn new(runs: &[GuestRange], regions: Vec<GuestRange>, max_mappings: u64) -> Self {
        let pages = runs.iter().map(|run| run.pages).sum();
        let runs = runs.iter().map(|run| (run.start.0, run.end().0)).collect();
        Self { runs, pages, borders: 0, other_mappings: 0, max_mappings, regions }
    }

    /// Tells how many mappings guest memory takes for other reasons.
    pub(crate) fn set_other_mappings(&mut self, mappings: u64) {
        self.other_mappings = mappings;
    }

    /// Another bound, for tests.
    #[cfg(test)]
    pub(crate) fn set_max_mappings(&mut self, max_mappings: u64) {
        self.max_mappings = max_mappings;
    }

    /// Number of pages that are the file's.
    pub(crate) fn pages(&self) -> u64 {
        self.pages
    }

    /// Number of mappings that guest memory takes at most, apart from those for other reasons.
    pub(crate) fn mappings(&self) -> u64 {
        2 * self.runs.len() as u64 + self.borders + self.regions.len() as u64
    }

    /// The parts of `range` that are the file's.
    pub(crate) fn intersection(&self, range: GuestRange) -> impl Iterator<Item = GuestRange> {
        let before = self.runs.range(..range.start.0).next_back();
        let from = self.runs.range(range.start.0..range.end().0.max(range.start.0));
        before
            .into_iter()
            .chain(from)
            .map(move |(&start, &end)| GuestRange::new(Pfn(start), end - start).intersection(range))
            .filter(|part| !part.is_empty())
    }

    /// What may be done with `range`, which lies within a region.
    pub(crate) fn judge(&self, range: GuestRange) -> Verdict {
        if self.intersection(range).next().is_none() {
            return Verdict::Anonymous;
        }
        let inside_a_run = self
            .runs
            .range(..range.start.0)
            .next_back()
            .is_some_and(|(start, end)| *start < range.start.0 && range.end().0 < *end);
        if !inside_a_run {
            // No run more than before, so no mapping more than were counted for them.
            return Verdict::Replace;
        }
        // Half of the mappings are for whole huge pages, so that single pages do not keep large
        // amounts from going back.
        let limit = if range.pages >= HUGE_PAGE_SIZE_PAGES {
            self.max_mappings
        } else {
            self.max_mappings / 2
        };
        if self.mappings() + self.other_mappings + 2 <= limit {
            Verdict::Replace
        } else {
            Verdict::Keep
        }
    }

    /// Notes that `range`, which lies within a region, is anonymous now.
    pub(crate) fn remove(&mut self, range: GuestRange) {
        let parts: Vec<GuestRange> = self.intersection(range).collect();
        if parts.is_empty() {
            return;
        }
        for part in parts {
            self.pages -= part.pages;
            let Some((&start, &end)) = self.runs.range(..=part.start.0).next_back() else {
                continue;
            };
            self.runs.remove(&start);
            if start < part.start.0 {
                self.runs.insert(start, part.start.0);
            }
            if part.end().0 < end {
                self.runs.insert(part.end().0, end);
            }
        }
        if self.is_anonymous_inside(range.start.0.wrapping_sub(1), range)
            && self.is_anonymous_inside(range.end().0, range)
        {
            self.borders += 1;
        }
    }

    /// Whether `page` is in the region of `neighbour`, and anonymous.
    fn is_anonymous_inside(&self, page: u64, neighbour: GuestRange) -> bool {
        self.regions
            .iter()
            .any(|region| region.contains(Pfn(page)) && region.contains(neighbour.start))
            && self.intersection(GuestRange::new(Pfn(page), 1)).next().is_none()
    }
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
    fn single_pages_leave_half_of_the_mappings_to_huge_ones() {
        let all = range(0, 1 << 20);
        let mut runs = FileRuns::new(&[all], vec![all], 100);
        let mut replaced = 0;
        for page in (1..2000).step_by(2) {
            if runs.judge(range(page, 1)) == Verdict::Replace {
                runs.remove(range(page, 1));
                replaced += 1;
            }
        }
        assert_eq!((replaced, runs.mappings()), (23, 49));
        assert_eq!(runs.judge(range(1, 1)), Verdict::Anonymous);
        // Next to what is anonymous, or all of a run: no mapping more.
        assert_eq!(runs.judge(range(2, 1)), Verdict::Replace);
        assert_eq!(runs.judge(range(45, 2)), Verdict::Replace);
        assert_eq!(runs.judge(range(47, 1)), Verdict::Keep);
        let mut huge = 0;
        for block in (10..1000).step_by(2) {
            let block = range(block * 512, 512);
            if runs.judge(block) == Verdict::Replace {
                runs.remove(block);
                huge += 1;
            }
        }
        assert_eq!((huge, runs.mappings()), (25, 99));
        assert_eq!(runs.judge(all), Verdict::Replace);
        runs.remove(all);
        assert_eq!((runs.pages(), runs.judge(all)), (0, Verdict::Anonymous));
    }

    #[test]
    fn mappings_that_others_take_count() {
        let all = range(0, 1000);
        let mut runs = FileRuns::new(&[all], vec![all], 100);
        assert_eq!(runs.judge(range(10, 1)), Verdict::Replace);
        runs.set_other_mappings(46);
        assert_eq!((runs.mappings(), runs.judge(range(10, 1))), (3, Verdict::Keep));
        assert_eq!(runs.judge(all), Verdict::Replace);
    }

    #[test]
    fn regions_that_adjoin_stay_apart() {
        let regions = [range(0, 100), range(100, 100)];
        let mut runs = FileRuns::new(&regions, regions.to_vec(), 1000);
        runs.remove(range(0, 100));
        assert_eq!(runs.judge(range(100, 50)), Verdict::Replace);
        runs.remove(range(100, 100));
        assert_eq!((runs.pages(), runs.borders), (0, 0));
    }

    proptest! {
        /// The model: a set of pages, and mappings counted with the kernel's least generous
        /// merging.
        #[test]
        fn runs_are_the_pages_left_and_mappings_stay_within_their_bound(
            initial in prop::collection::vec((1..40_u64, 1..40_u64), 1..10),
            steps in prop::collection::vec((0..400_u64, 1..60_u64), 0..60),
            max_mappings in 20..60_u64,
        ) {
            let region = range(0, 500);
            let mut end = 0;
            let mut start_runs = Vec::new();
            for (gap, pages) in initial {
                let run = range(end + gap, pages);
                end = run.end().0;
                start_runs.push(run.intersection(region));
            }
            start_runs.retain(|run| !run.is_empty());
            let mut runs = FileRuns::new(&start_runs, vec![region], max_mappings);
            let mut model: BTreeSet<u64> = start_runs.iter().flat_map(|run| run.start.0..run.end().0).collect();
            // First page of each mapping but the first.
            let mut borders: BTreeSet<u64> = (1..500).filter(|page| model.contains(page) != model.contains(&(page - 1))).collect();
            let bound = max_mappings.max(runs.mappings());
            for (start, pages) in steps {
                let asked = range(start, pages);
                let of_file: Vec<u64> = (start..asked.end().0).filter(|page| model.contains(page)).collect();
                match runs.judge(asked) {
                    Verdict::Anonymous => prop_assert_eq!(of_file.len(), 0),
                    Verdict::Keep => prop_assert_eq!(of_file.len() as u64, pages),
                    Verdict::Replace => {
                        prop_assert!(!of_file.is_empty());
                        runs.remove(asked);
                        model.retain(|page| !asked.contains(Pfn(*page)));
                        borders.retain(|border| *border <= start || *border > asked.end().0);
                        borders.extend([start, asked.end().0].into_iter().filter(|border| (1..500).contains(border)));
                        // Merged to the left, or else to the right.
                        if start > 0 && !model.contains(&(start - 1)) {
                            borders.remove(&start);
                        } else if !model.contains(&asked.end().0) {
                            borders.remove(&asked.end().0);
                        }
                    }
                }
                let left: BTreeSet<u64> = runs.intersection(region).flat_map(|run| run.start.0..run.end().0).collect();
                prop_assert_eq!(&left, &model);
                prop_assert_eq!(runs.pages(), model.len() as u64);
                prop_assert!(model.is_empty() || (borders.len() as u64) < runs.mappings());
                prop_assert!(runs.mappings() <= bound);
            }
        }
    }
}
