//! Anonymous memory that is really written: the workloads' raw material.

use std::ffi::c_void;
use std::io;
use std::ptr::NonNull;

use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};

/// Page size of x86-64 in bytes.
pub const PAGE_BYTES: usize = 4096;
/// Step in which numactl's memhog fills memory.
pub const MEMHOG_STEP_BYTES: usize = 10 << 20;
/// Spreads the word's index over all bits, so that pages differ from one another (2^64 divided by the golden ratio).
const SPREAD: u64 = 0x9e37_79b9_7f4a_7c15;

/// One private anonymous mapping; given back when dropped.
#[derive(Debug)]
pub struct Mapping {
    start: NonNull<u64>,
    len_bytes: usize,
}

impl Mapping {
    /// Maps `bytes`, rounded up to whole pages; nothing is touched yet.
    pub fn new(bytes: u64) -> io::Result<Self> {
        let invalid = || io::Error::new(io::ErrorKind::InvalidInput, format!("cannot map {bytes} bytes"));
        let len_bytes = usize::try_from(bytes)
            .ok()
            .and_then(|len| len.checked_next_multiple_of(PAGE_BYTES))
            .ok_or_else(invalid)?;
        if len_bytes == 0 {
            return Err(invalid());
        }
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: the kernel chooses an unused place, so that no memory in use is replaced.
        let start = unsafe { mmap_anonymous(std::ptr::null_mut(), len_bytes, protection, flags) }?;
        let start = NonNull::new(start.cast()).ok_or_else(invalid)?;
        Ok(Self { start, len_bytes })
    }

    /// Length in bytes, whole pages.
    pub fn len_bytes(&self) -> usize {
        self.len_bytes
    }

    /// Fills everything with `byte`, in steps of `step_bytes`; `after` is called after each step with the bytes
    /// written so far and says whether to go on. Returns the bytes written.
    pub fn fill(&mut self, byte: u8, step_bytes: usize, mut after: impl FnMut(usize) -> bool) -> usize {
        let mut done = 0;
        while done < self.len_bytes {
            let step = step_bytes.max(1).min(self.len_bytes - done);
            // SAFETY: `done` is less than the length of the mapping, so the result is inside it.
            let target = unsafe { self.start.cast::<u8>().add(done) };
            // SAFETY: `step` bytes from `target` are inside the mapping, which this value owns alone.
            unsafe { target.write_bytes(byte, step) };
            done += step;
            if !after(done) {
                break;
            }
        }
        done
    }

    /// Fills everything with the pattern of `seed`.
    pub fn fill_pattern(&mut self, seed: u64) {
        for (index, word) in self.words_mut().iter_mut().enumerate() {
            *word = pattern_word(seed, index);
        }
    }

    /// Number of pages that do not hold the pattern of `seed`.
    pub fn wrong_pages(&self, seed: u64) -> usize {
        let words_a_page = PAGE_BYTES / size_of::<u64>();
        let page_is_wrong = |page: usize, words: &[u64]| {
            let first = page * words_a_page;
            words.iter().enumerate().any(|(index, word)| *word != pattern_word(seed, first + index))
        };
        self.words()
            .chunks(words_a_page)
            .enumerate()
            .filter(|(page, words)| page_is_wrong(*page, words))
            .count()
    }

    /// All words.
    pub fn words(&self) -> &[u64] {
        // SAFETY: the mapping is readable, page-aligned, and of this length until `self` is dropped; every bit pattern
        // is a u64.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len_bytes / size_of::<u64>()) }
    }

    /// All words, to be written.
    pub fn words_mut(&mut self) -> &mut [u64] {
        // SAFETY: as in `words`, and `&mut self` makes it the only reference.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len_bytes / size_of::<u64>()) }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the mapping is this value's own and no reference into it outlives it.
        let _ = unsafe { munmap(self.start.as_ptr().cast::<c_void>(), self.len_bytes) };
    }
}

fn pattern_word(seed: u64, index: usize) -> u64 {
    seed ^ (index as u64 + 1).wrapping_mul(SPREAD)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn lengths_are_whole_pages() {
        assert_eq!(Mapping::new(1).unwrap().len_bytes(), PAGE_BYTES);
        assert_eq!(Mapping::new(3 << 20).unwrap().len_bytes(), 3 << 20);
        assert!(Mapping::new(0).is_err());
        assert!(Mapping::new(u64::MAX).is_err());
        assert!(Mapping::new(1 << 60).is_err());
    }

    #[test]
    fn every_byte_is_written_step_by_step() {
        let mut mapping = Mapping::new(1 << 20).unwrap();
        let mut steps = Vec::new();
        let written = mapping.fill(0xff, 300_000, |done| {
            steps.push(done);
            true
        });
        assert_eq!((written, steps), (1 << 20, vec![300_000, 600_000, 900_000, 1 << 20]));
        assert!(mapping.words().iter().all(|word| *word == u64::MAX));
    }

    #[test]
    fn filling_stops_when_told() {
        let mut mapping = Mapping::new(1 << 20).unwrap();
        assert_eq!(mapping.fill(1, PAGE_BYTES, |done| done < 3 * PAGE_BYTES), 3 * PAGE_BYTES);
        assert_eq!(mapping.words()[3 * PAGE_BYTES / 8], 0);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(32))]
        #[test]
        fn damage_is_found_where_it_is(
            seed: u64,
            pages in 1_usize..40,
            places in proptest::collection::vec(any::<prop::sample::Index>(), 0..10),
        ) {
            let mut mapping = Mapping::new((pages * PAGE_BYTES) as u64).unwrap();
            mapping.fill_pattern(seed);
            prop_assert_eq!(mapping.wrong_pages(seed), 0);
            prop_assert_eq!(mapping.wrong_pages(!seed), pages);
            let mut damaged = std::collections::BTreeSet::new();
            let mut words = std::collections::BTreeSet::new();
            for place in places {
                let word = place.index(mapping.words().len());
                if words.insert(word) {
                    mapping.words_mut()[word] ^= 1 << (word % 64);
                    damaged.insert(word * 8 / PAGE_BYTES);
                }
            }
            prop_assert_eq!(mapping.wrong_pages(seed), damaged.len());
        }
    }
}
