//! Content of memory: which pages are equal, and where they are.

use crate::report::statistics::Random;

/// Pages of a run of duplicates.
pub(super) const RUN_PAGES: usize = 64;
/// Number of pages with the same content, for contents that occur more than once.
pub(super) const COPIES: usize = 4;
/// Length of runs of modified pages of a clone.
const DIVERGED_RUN_PAGES: usize = 8;
/// Number of pages of a clone per modified page.
const DIVERGED_ONE_IN: usize = 10;
/// Words of a page.
const PAGE_WORDS: usize = PAGE_BYTES / size_of::<u64>();
/// Size of a page.
pub(super) const PAGE_BYTES: usize = 4096;

/// Pattern of equal pages in a memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Shape {
    /// No two pages are equal: scanning is in vain.
    Unique,
    /// Half of the pages, single ones anywhere, have a content that occurs four times.
    Scattered,
    /// The same, but in runs of 64 pages.
    Runs,
    /// Four memories of the same origin, of which a tenth was modified, in runs of eight pages.
    Clones,
}

impl Shape {
    /// All of them, in the order of tables.
    pub(super) const ALL: [Self; 4] = [Self::Unique, Self::Scattered, Self::Runs, Self::Clones];

    /// Its name in metrics.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Unique => "unique",
            Self::Scattered => "scattered",
            Self::Runs => "runs",
            Self::Clones => "clones",
        }
    }

    /// Its title.
    pub(super) fn title(self) -> &'static str {
        match self {
            Self::Unique => "unique pages",
            Self::Scattered => "scattered duplicates",
            Self::Runs => "duplicates in runs of 64",
            Self::Clones => "four clones",
        }
    }
}

/// Number of a content: pages with the same number are equal.
pub(super) type ContentId = u64;

/// The contents of one or more memories.
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
            Shape::Scattered => vec![duplicates(pages, 1, &mut random)],
            Shape::Runs => vec![duplicates(pages, RUN_PAGES, &mut random)],
            Shape::Clones => clones(pages / COPIES, &mut random),
        };
        // Another seed gives other contents, so that nothing from an earlier memory is reused.
        let memories = memories
            .into_iter()
            .map(|ids: Vec<u64>| ids.into_iter().map(|id| id ^ (seed << 40)).collect());
        Self { memories: memories.collect() }
    }

    /// First page of a memory, if all are contiguous.
    pub(super) fn first_page(&self, memory: usize) -> usize {
        self.memories.iter().take(memory).map(Vec::len).sum()
    }

    /// The contents of up to `most` neighbouring pages of a memory at a time, with the first page.
    pub(super) fn chunks(&self, most: usize) -> impl Iterator<Item = (usize, &[ContentId])> {
        self.memories.iter().enumerate().flat_map(move |(memory, ids)| {
            let first = self.first_page(memory);
            ids.chunks(most).enumerate().map(move |(chunk, ids)| (first + chunk * most, ids))
        })
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

    /// The pages that have an equal one, by memory and place.
    pub(super) fn alike(&self) -> Vec<(usize, usize)> {
        let mut all: Vec<(ContentId, usize, usize)> = Vec::new();
        for (memory, ids) in self.memories.iter().enumerate() {
            all.extend(ids.iter().enumerate().map(|(page, id)| (*id, memory, page)));
        }
        all.sort_unstable();
        let mut alike: Vec<(usize, usize)> = all
            .chunk_by(|one, other| one.0 == other.0)
            .filter(|same| same.len() > 1)
            .flatten()
            .map(|(_, memory, page)| (*memory, *page))
            .collect();
        alike.sort_unstable();
        alike
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

/// [`COPIES`] memories that are equal except for the modified pages.
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
    (0..COPIES).map(|_| clone()).collect()
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
        // Three quarters, less about a tenth.
        let clones = contents(Shape::Clones).surplus();
        assert!((PAGES as u64 * 60 / 100..PAGES as u64 * 74 / 100).contains(&clones), "{clones}");
    }

    #[test]
    fn duplicates_are_in_runs_in_the_shape_of_runs() {
        let neighbours = |shape| {
            let contents = contents(shape);
            let ids = &contents.memories[0];
            contents
                .alike()
                .iter()
                .filter(|(_, page)| ids.get(page + 1) == Some(&(ids[*page] + 1)))
                .count()
        };
        let alike = contents(Shape::Runs).alike().len();
        assert_eq!(alike, PAGES / 2);
        assert!(neighbours(Shape::Runs) >= alike * (RUN_PAGES - 1) / RUN_PAGES);
        assert!(neighbours(Shape::Scattered) < alike / 20);
    }

    #[test]
    fn equal_pages_are_those_that_occur_more_than_once() {
        let contents = Contents { memories: vec![vec![1, 2, 3], vec![2, 4, 2]] };
        assert_eq!(contents.alike(), [(0, 1), (1, 0), (1, 2)]);
        assert_eq!((contents.surplus(), contents.pages()), (2, 6));
    }

    #[test]
    fn clones_are_equal_in_the_same_places() {
        let contents = contents(Shape::Clones);
        assert_eq!(contents.memories.len(), COPIES);
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
