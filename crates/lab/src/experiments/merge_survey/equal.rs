//! Equal pages of several memories, and the runs that they form.

use std::collections::{BTreeMap, HashMap, HashSet};

use ebb_page_merge::PageHash;

/// Pages of a memory by their place in it.
pub(super) type Memory = BTreeMap<u64, PageHash>;

/// Classes of the lengths of runs: the last one is of 512 pages and more.
pub(super) const LENGTHS: usize = 10;

/// Pages of a block that can be a huge page.
const BLOCK_PAGES: u64 = 512;

/// Equal pages with which the length of a run is tried at each of its beginnings.
const MOST_PARTNERS: usize = 32;

/// Numbers of pages of all memories.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Equals {
    /// Number of memories.
    pub(super) guests: usize,
    /// Pages with content at the host.
    pub(super) present: u64,
    /// Those that are zeros.
    pub(super) zeros: u64,
    /// Others that are equal to at least one page.
    pub(super) equal: u64,
    /// Those beyond the first of each content.
    pub(super) surplus: u64,
    /// Those beyond the first of each content in each memory.
    pub(super) surplus_alone: u64,
    /// Equal pages that another memory has at the same place.
    pub(super) same_place: u64,
    /// Equal pages in blocks of which at least half are equal pages or zeros.
    pub(super) dense: u64,
    /// Runs of equal pages and the pages in them, by the binary logarithm of the length.
    pub(super) runs: [(u64, u64); LENGTHS],
}

/// The places of each content: memory and page.
type Places = HashMap<PageHash, Vec<(usize, u64)>>;

impl Equals {
    /// Compares the pages of these memories.
    pub(super) fn of(memories: &[Memory]) -> Self {
        let mut places = Places::new();
        let mut found = Self { guests: memories.len(), ..Self::default() };
        for (number, memory) in memories.iter().enumerate() {
            found.present += memory.len() as u64;
            let mut contents = HashSet::new();
            for (place, hash) in memory {
                if *hash == PageHash::ZEROS {
                    found.zeros += 1;
                } else {
                    found.surplus_alone += u64::from(!contents.insert(*hash));
                    places.entry(*hash).or_default().push((number, *place));
                }
            }
        }
        for same in places.values().filter(|same| same.len() > 1) {
            found.equal += same.len() as u64;
            found.surplus += same.len() as u64 - 1;
            let mut at = HashMap::new();
            for (_, place) in same {
                *at.entry(*place).or_insert(0) += 1;
            }
            found.same_place += at.values().filter(|memories| **memories > 1).sum::<u64>();
        }
        for (number, memory) in memories.iter().enumerate() {
            found.dense += dense(memory, &places);
            found.find_runs(memories, number, &places);
        }
        found
    }

    /// Cuts the equal pages of a memory into runs: each begins where the one before ends, and is as
    /// long as with the best of the first page's partners.
    fn find_runs(&mut self, memories: &[Memory], number: usize, places: &Places) {
        let memory = &memories[number];
        let mut next = 0;
        while let Some((&first, hash)) = memory.range(next..).next() {
            next = first + 1;
            let Some(partners) = places.get(hash).filter(|same| same.len() > 1) else { continue };
            let others = partners.iter().filter(|partner| **partner != (number, first));
            let length = others
                .take(MOST_PARTNERS)
                .map(|(other, place)| common(memory, first, &memories[*other], *place))
                .max()
                .unwrap_or(1);
            let class = (length.ilog2() as usize).min(LENGTHS - 1);
            self.runs[class].0 += 1;
            self.runs[class].1 += length;
            next = first + length;
        }
    }
}

/// Number of neighbours from these pages on that are equal, other than zeros.
fn common(one: &Memory, first: u64, other: &Memory, place: u64) -> u64 {
    let same = |distance: &u64| {
        let hash = one.get(&(first + distance));
        hash.is_some_and(|hash| *hash != PageHash::ZEROS) && hash == other.get(&(place + distance))
    };
    // The distance at which no page is left is the end of a memory.
    (0..=one.len() as u64).take_while(same).count() as u64
}

/// Equal pages in blocks with many of them.
fn dense(memory: &Memory, places: &Places) -> u64 {
    let is_equal = |hash: &PageHash| places.get(hash).is_some_and(|same| same.len() > 1);
    let mut blocks: HashMap<u64, (u64, u64)> = HashMap::new();
    for (place, hash) in memory {
        let (equal, zeros) = blocks.entry(place / BLOCK_PAGES).or_default();
        *equal += u64::from(is_equal(hash));
        *zeros += u64::from(*hash == PageHash::ZEROS);
    }
    let dense = blocks.values().filter(|(equal, zeros)| (equal + zeros) * 2 >= BLOCK_PAGES);
    dense.map(|(equal, _)| equal).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A memory of pages with these contents from a place on.
    fn memory(parts: &[(u64, &[u64])]) -> Memory {
        let part = |(first, ids): &(u64, &[u64])| {
            let pages = (*first..).zip(ids.iter().map(|id| PageHash::new(*id)));
            pages.collect::<Vec<_>>()
        };
        parts.iter().flat_map(part).collect()
    }

    #[test]
    fn equal_pages_are_counted_within_and_among_memories() {
        let one = memory(&[(0, &[1, 2, 3, 0]), (10, &[4, 4])]);
        let other = memory(&[(0, &[9, 2, 3]), (20, &[5, 0])]);
        let found = Equals::of(&[one, other]);
        assert_eq!((found.guests, found.present, found.zeros), (2, 11, 2));
        assert_eq!((found.equal, found.surplus, found.surplus_alone), (6, 3, 1));
        assert_eq!(found.same_place, 4);
        // 2 and 3 in both; the two pages with content 4 are single: a neighbour is the other one.
        assert_eq!(found.runs[..2], [(2, 2), (2, 4)]);
        assert_eq!(found.dense, 0);
    }

    #[test]
    fn runs_end_at_gaps_and_follow_the_best_partner() {
        let ids: Vec<u64> = (100..200).collect();
        let one = memory(&[(0, &ids[..60]), (70, &ids[60..])]);
        // Of the first page there is a copy that leads nowhere.
        let other = memory(&[(0, &[100, 7]), (500, &ids)]);
        let found = Equals::of(&[one, other]);
        assert_eq!(found.equal, 201);
        // 60 and 40 in the first memory; 1, and 60 and 40 in the second.
        assert_eq!((found.runs[0], found.runs[5]), ((1, 1), (4, 200)));
        assert_eq!(found.runs.iter().map(|(_, pages)| pages).sum::<u64>(), found.equal);
    }

    #[test]
    fn pages_of_one_content_are_a_run_with_their_neighbours() {
        let found = Equals::of(&[memory(&[(0, &[7; 100])])]);
        assert_eq!((found.equal, found.surplus), (100, 99));
        // With the neighbour as partner, all but the last one are a run.
        assert_eq!((found.runs[6], found.runs[0]), ((1, 99), (1, 1)));
    }

    #[test]
    fn a_block_is_dense_if_half_of_it_is_equal_or_zeros() {
        let ids: Vec<u64> = (0..200).map(|id| 1000 + id).collect();
        let zeros = vec![0; 56];
        let one = memory(&[(0, &ids), (200, &zeros), (512, &[5000, 5001])]);
        let found = Equals::of(&[one.clone(), one]);
        assert_eq!((found.equal, found.dense), (404, 400));
    }
}
