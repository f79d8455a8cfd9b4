//! Measures reads of memory, page by page in random order: the cost of a page's distance from its
//! reader.
//!
//! The benchmark of the patch "ksm: allow trees per NUMA node" (2013) allocates pages with the same
//! content in all guests and measures the access to them. Here these are the pages held with a
//! pattern. The offset of a read within its page depends on the previous read's value, so that
//! reads do not overlap.

use std::hint::black_box;
use std::time::Instant;

use serde::{Deserialize, Serialize};

use crate::memory::{Mapping, PAGE_WORDS};
use crate::random::Random;

/// Maximum number of passes in one command.
pub const PASSES_LIMIT: u32 = 10_000;

/// Result of a measurement.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ReadReport {
    /// Number of pages read in each pass.
    pub pages: u64,
    /// Mean time of a read in each pass, in ns.
    pub ns_per_read: Vec<f64>,
}

/// Reads a word of each page in random order, in `passes` passes.
///
/// # Errors
/// No memory, no passes, or too many of them.
pub fn run(mappings: &[&Mapping], passes: u32, seed: u64) -> Result<ReadReport, String> {
    if passes == 0 || passes > PASSES_LIMIT {
        return Err(format!("{passes} passes requested; 1 to {PASSES_LIMIT} are possible"));
    }
    let pages =
        mappings.iter().flat_map(|mapping| (0..mapping.pages()).map(move |page| (*mapping, page)));
    let mut pages: Vec<(&Mapping, usize)> = pages.collect();
    if pages.is_empty() {
        return Err("no memory is held".to_owned());
    }
    let mut random = Random::new(seed);
    // The first pass warms up: it fills in translations and maps pages.
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

/// Reads one word of each page; returns the index that the last one determines.
fn pass(pages: &[(&Mapping, usize)], first: usize) -> usize {
    pages.iter().fold(first, |word, (mapping, page)| {
        (mapping.page(*page)[word] as usize).wrapping_add(word) % PAGE_WORDS
    })
}

/// Shuffles with uniform probability (R. A. Fisher and F. Yates).
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
    fn invalid_parameters_are_refused() {
        let mapping = Mapping::new(1).unwrap();
        assert!(run(&[], 1, 1).unwrap_err().contains("no memory"));
        assert!(run(&[&mapping], 0, 1).unwrap_err().contains("0 passes"));
        assert!(run(&[&mapping], PASSES_LIMIT + 1, 1).is_err());
    }

    #[test]
    fn a_shuffle_is_a_permutation_that_depends_on_the_seed() {
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
