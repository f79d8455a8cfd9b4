//! Content of memory: which pages are equal, and where they are.

use std::collections::HashMap;

use ebb_guest_ram::HugePages;
use serde::{Deserialize, Serialize};

use crate::report::statistics::Random;

/// Pages of a run of duplicates.
pub(super) const RUN_PAGES: usize = 64;
/// Number of pages with the same content, for contents that occur more than once.
pub(super) const COPIES: usize = 4;
/// Number of clones, each of them a process's.
pub(super) const CLONES: usize = 2;
/// Length of runs of modified pages of a clone.
const DIVERGED_RUN_PAGES: usize = 8;
/// Number of pages of a clone per modified page.
const DIVERGED_ONE_IN: usize = 10;
/// Words of a page.
const PAGE_WORDS: usize = PAGE_BYTES / size_of::<u64>();
/// Size of a page.
pub(super) const PAGE_BYTES: usize = 4096;

/// Pattern of equal pages in memory, which is in huge pages unless said otherwise.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(super) enum Shape {
    /// No two pages are equal: scanning is in vain.
    Unique,
    /// Half of the pages, single ones anywhere, have a content that occurs four times.
    Scattered,
    /// The same, in memory without huge pages.
    ScatteredSmall,
    /// As the first, but in runs of 64 pages.
    Runs,
    /// The memories of two processes of the same origin, of which a tenth was modified, in runs of
    /// eight pages.
    Clones,
}

impl Shape {
    /// All of them, in the order of tables.
    pub(super) const ALL: [Self; 5] =
        [Self::Unique, Self::Scattered, Self::ScatteredSmall, Self::Runs, Self::Clones];

    /// Its name in metrics.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Unique => "unique",
            Self::Scattered => "scattered",
            Self::ScatteredSmall => "small",
            Self::Runs => "runs",
            Self::Clones => "clones",
        }
    }

    /// Its title.
    pub(super) fn title(self) -> &'static str {
        match self {
            Self::Unique => "unique pages",
            Self::Scattered => "scattered duplicates",
            Self::ScatteredSmall => "scattered duplicates, no huge pages",
            Self::Runs => "duplicates in runs of 64",
            Self::Clones => "two clones",
        }
    }

    /// Whether it is in huge pages.
    pub(super) fn huge_pages(self) -> HugePages {
        if self == Self::ScatteredSmall { HugePages::Off } else { HugePages::On }
    }

    /// Number of processes whose memory it is.
    pub(super) fn processes(self) -> usize {
        if self == Self::Clones { CLONES } else { 1 }
    }
}

/// Number of a content: pages with the same number are equal.
pub(super) type ContentId = u64;

/// The contents of the memories of one or more processes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Contents {
    /// The pages of each memory.
    pub(super) memories: Vec<Vec<ContentId>>,
}

impl Contents {
    /// Contents of a shape with about this number of pages, from a seed.
    pub(super) fn new(shape: Shape, pages: usize, seed: u64) -> Self {
        let mut random = Random(seed);
        let memories = match shape {
            Shape::Unique => vec![(0..pages as u64).collect()],
            Shape::Scattered | Shape::ScatteredSmall => vec![duplicates(pages, 1, &mut random)],
            Shape::Runs => vec![duplicates(pages, RUN_PAGES, &mut random)],
            Shape::Clones => clones(pages / CLONES, &mut random),
        };
        // Another seed gives other contents, so that nothing from an earlier memory is reused.
        let memories = memories
            .into_iter()
            .map(|ids: Vec<u64>| ids.into_iter().map(|id| id ^ (seed << 40)).collect());
        Self { memories: memories.collect() }
    }

    /// Number of pages.
    pub(super) fn pages(&self) -> u64 {
        self.memories.iter().map(Vec::len).sum::<usize>() as u64
    }

    /// Number of pages that merging can free.
    pub(super) fn surplus(&self) -> u64 {
        let mut all: Vec<ContentId> = self.memories.iter().flatten().copied().collect();
        all.sort_unstable();
        all.dedup();
        self.pages() - all.len() as u64
    }

    /// Whether each page of a memory has an equal one anywhere.
    pub(super) fn have_equals(&self, memory: usize) -> Vec<bool> {
        let mut counts: HashMap<ContentId, usize> = HashMap::new();
        for id in self.memories.iter().flatten() {
            *counts.entry(*id).or_default() += 1;
        }
        self.memories[memory].iter().map(|id| counts[id] > 1).collect()
    }

    /// Number of pages that have an equal one.
    pub(super) fn alike(&self) -> u64 {
        let of = |memory| self.have_equals(memory).into_iter().filter(|has| *has).count() as u64;
        (0..self.memories.len()).map(of).sum()
    }
}

/// Half of the runs have contents that occur [`COPIES`] times, the others do not; in random order.
fn duplicates(pages: usize, run_pages: usize, random: &mut Random) -> Vec<ContentId> {
    let runs = pages / run_pages;
    let originals = runs / 2 / COPIES;
    let of_run = |run: usize| {
        let original = if run < originals * COPIES { run % originals } else { run };
        (original * run_pages) as ContentId
    };
    let mut order: Vec<ContentId> = (0..runs).map(of_run).collect();
    shuffle(random, &mut order);
    order.into_iter().flat_map(|first| first..first + run_pages as ContentId).collect()
}

/// [`CLONES`] memories that are equal except for the modified pages.
fn clones(pages: usize, random: &mut Random) -> Vec<Vec<ContentId>> {
    let mut next = pages as ContentId;
    let mut clone = || {
        let mut ids: Vec<ContentId> = (0..pages as ContentId).collect();
        for run in ids.chunks_mut(DIVERGED_RUN_PAGES) {
            if random.below(DIVERGED_ONE_IN) == 0 {
                for id in run {
                    *id = next;
                    next += 1;
                }
            }
        }
        ids
    };
    (0..CLONES).map(|_| clone()).collect()
}

/// The content with this number: two contents differ in nearly all words.
pub(super) fn page(id: ContentId) -> [u8; PAGE_BYTES] {
    let mut random = Random(id.wrapping_mul(0x9fb2_1c65_1e98_df25));
    let mut bytes = [0; PAGE_BYTES];
    for word in bytes.as_chunks_mut::<{ PAGE_BYTES / PAGE_WORDS }>().0 {
        *word = random.draw().to_ne_bytes();
    }
    bytes
}

/// All orders are equally likely (R. A. Fisher and F. Yates).
fn shuffle<T>(random: &mut Random, values: &mut [T]) {
    for last in (1..values.len()).rev() {
        values.swap(last, random.below(last + 1));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    const PAGES: usize = 8192;

    fn contents(shape: Shape) -> Contents {
        Contents::new(shape, PAGES, 3)
    }

    #[test]
    fn each_shape_has_its_size_and_its_surplus() {
        for shape in Shape::ALL {
            assert_eq!(contents(shape).pages(), PAGES as u64, "{shape:?}");
        }
        assert_eq!(contents(Shape::Unique).surplus(), 0);
        // Half of the pages, of which one in four stays.
        let half_but_one_in_four = (PAGES / 2 * (COPIES - 1) / COPIES) as u64;
        assert_eq!(contents(Shape::Scattered).surplus(), half_but_one_in_four);
        assert_eq!(contents(Shape::Runs).surplus(), half_but_one_in_four);
        // Half, less about a fifth of it.
        let clones = contents(Shape::Clones).surplus();
        assert!((PAGES as u64 * 35 / 100..PAGES as u64 * 47 / 100).contains(&clones), "{clones}");
    }

    #[test]
    fn duplicates_are_in_runs_in_the_shape_of_runs() {
        let neighbours = |shape| {
            let contents = contents(shape);
            let ids = &contents.memories[0];
            let follows = |page: usize| ids.get(page + 1) == Some(&(ids[page] + 1));
            let equal = contents.have_equals(0);
            (0..PAGES).filter(|page| equal[*page] && follows(*page)).count()
        };
        let alike = contents(Shape::Runs).alike() as usize;
        assert_eq!(alike, PAGES / 2);
        assert!(neighbours(Shape::Runs) >= alike * (RUN_PAGES - 1) / RUN_PAGES);
        assert!(neighbours(Shape::Scattered) < alike / 20);
    }

    #[test]
    fn equal_pages_are_those_that_occur_more_than_once() {
        let contents = Contents { memories: vec![vec![1, 2, 3], vec![2, 4, 2]] };
        assert_eq!(contents.have_equals(0), [false, true, false]);
        assert_eq!(contents.have_equals(1), [true, false, true]);
        assert_eq!(contents.alike(), 3);
        assert_eq!((contents.surplus(), contents.pages()), (2, 6));
    }

    #[test]
    fn clones_are_equal_in_the_same_places() {
        let contents = contents(Shape::Clones);
        assert_eq!(contents.memories.len(), Shape::Clones.processes());
        let (first, second) = (&contents.memories[0], &contents.memories[1]);
        let same = first.iter().zip(second).filter(|(one, other)| one == other).count();
        assert!(
            (first.len() * 70 / 100..first.len() * 92 / 100).contains(&same),
            "{same} of {}",
            first.len()
        );
    }

    #[test]
    fn contents_differ_by_number_and_by_seed() {
        let pages: BTreeSet<[u8; PAGE_BYTES]> = (0..100).map(page).collect();
        assert_eq!(pages.len(), 100);
        assert_eq!(page(7), page(7));
        let ids = |seed| Contents::new(Shape::Scattered, PAGES, seed).memories.concat();
        let first: BTreeSet<u64> = ids(1).into_iter().collect();
        assert!(ids(2).iter().all(|id| !first.contains(id)));
    }
}
