//! Reads of memory, one page after another in random order, timed: what a page's distance from its
//! reader costs.
//!
//! The benchmark of the patch "ksm: allow trees per NUMA node" (2013) allocates pages with the same
//! content in all guests and times the access to them. Here the pages are those held with a
//! pattern. Where in a page a read takes place depends on what was read before, so that no read
//! begins before the one before it has ended.

use std::hint::black_box;
use std::time::Instant;

use serde::{Deserialize, Serialize};

use crate::memory::{Mapping, PAGE_WORDS};
use crate::random::Random;

/// Most passes in one command.
pub const PASSES_LIMIT: u32 = 10_000;

/// What was measured.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ReadReport {
    /// Pages that were read in each pass.
    pub pages: u64,
    /// Time of a read in ns, the mean of each pass.
    pub ns_per_read: Vec<f64>,
}

/// Reads a word of each page in random order, over and over.
///
/// # Errors
/// Says what cannot be meant: no memory, no passes, too many of them.
pub fn run(mappings: &[&Mapping], passes: u32, seed: u64) -> Result<ReadReport, String> {
    if passes == 0 || passes > PASSES_LIMIT {
        return Err(format!("{passes} passes were asked for; 1 to {PASSES_LIMIT} are possible"));
    }
    let pages =
        mappings.iter().flat_map(|mapping| (0..mapping.pages()).map(move |page| (*mapping, page)));
    let mut pages: Vec<(&Mapping, usize)> = pages.collect();
    if pages.is_empty() {
        return Err("no memory is held".to_owned());
    }
    let mut random = Random::new(seed);
    // The first pass only brings in what the others shall find: translations, and pages that are
    // not mapped yet.
    let mut word = pass(&pages, 0);
    let mut ns_per_read = Vec::new();
    for _ in 0..passes {
        shuffle(&mut pages, &mut random);
        let begin = Instant::now();
        word = pass(&pages, word);
        ns_per_read.push(begin.elapsed().as_nanos() as f64 / pages.len() as f64);
    }
    black_box(word);
    Ok(ReadReport { pages: pages.len() as u64, ns_per_read })
}

/// Reads one word of each page; what the last one led to.
fn pass(pages: &[(&Mapping, usize)], first: usize) -> usize {
    pages.iter().fold(first, |word, (mapping, page)| {
        (mapping.page(*page)[word] as usize).wrapping_add(word) % PAGE_WORDS
    })
}

/// Any order is as likely as any other (R. A. Fisher and F. Yates).
fn shuffle<T>(values: &mut [T], random: &mut Random) {
    for last in (1..values.len()).rev() {
        values.swap(last, random.below(last + 1));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::PAGE_BYTES;

    #[test]
    fn all_pages_of_all_mappings_are_read_in_each_pass() {
        let mut mappings = [3, 5].map(|pages| Mapping::new((pages * PAGE_BYTES) as u64).unwrap());
        for mapping in &mut mappings {
            mapping.fill_pattern(4);
        }
        let report = run(&mappings.each_ref(), 7, 1).unwrap();
        assert_eq!((report.pages, report.ns_per_read.len()), (8, 7));
        assert!(report.ns_per_read.iter().all(|ns| *ns > 0.0), "{report:?}");
    }

    #[test]
    fn what_cannot_be_meant_is_refused() {
        let mapping = Mapping::new(1).unwrap();
        assert!(run(&[], 1, 1).unwrap_err().contains("no memory"));
        assert!(run(&[&mapping], 0, 1).unwrap_err().contains("0 passes"));
        assert!(run(&[&mapping], PASSES_LIMIT + 1, 1).is_err());
    }

    #[test]
    fn a_shuffle_loses_and_doubles_nothing_and_depends_on_the_seed() {
        let shuffled = |seed| {
            let mut values: Vec<u32> = (0..100).collect();
            shuffle(&mut values, &mut Random::new(seed));
            values
        };
        let first = shuffled(1);
        assert_ne!(first, shuffled(2));
        assert_ne!(first, (0..100).collect::<Vec<u32>>());
        let mut sorted = first;
        sorted.sort_unstable();
        assert_eq!(sorted, (0..100).collect::<Vec<u32>>());
    }
}
