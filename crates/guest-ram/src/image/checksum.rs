//! Checksums over saved memory, and the search for zeros.
//!
//! XXH3 with 64 bits: it finds damage by disks and transports, not forgery, and runs at the speed
//! of memory. The crate `twox-hash` is written in Rust, maintained and widely used, and chooses
//! vector instructions at run time.
//!
//! A chunk's checksum covers its pages that are not all zero, each preceded by its RAM offset. So
//! it depends on the memory's content alone: whether zeros are a hole, were written, or lie in an
//! extent makes no difference.

use std::hash::Hasher;
use std::ops::Range;

use ebb_abi::PAGE_SIZE_BYTES;
use twox_hash::XxHash3_64;

use super::CHUNK_BYTES;

const PAGE: usize = PAGE_SIZE_BYTES as usize;

/// Computes the checksum of one chunk, whose pages must come in ascending order.
pub(crate) struct ChunkHasher {
    hasher: XxHash3_64,
    data_bytes: u64,
}

impl ChunkHasher {
    pub(crate) fn new() -> Self {
        Self { hasher: XxHash3_64::with_seed(0), data_bytes: 0 }
    }

    /// Adds whole pages, none of them all zero, that begin at a RAM offset.
    pub(crate) fn add(&mut self, offset_bytes: u64, pages: &[u8]) {
        for (index, page) in pages.chunks_exact(PAGE).enumerate() {
            let page_offset_bytes = offset_bytes + (index * PAGE) as u64;
            self.hasher.write(&page_offset_bytes.to_le_bytes());
            self.hasher.write(page);
        }
        self.data_bytes += pages.len() as u64;
    }

    /// Bytes added so far.
    pub(crate) fn data_bytes(&self) -> u64 {
        self.data_bytes
    }

    /// The checksum.
    pub(crate) fn finish(&self) -> u64 {
        self.hasher.finish()
    }
}

/// The checksums of all chunks of a memory, whose pages come in ascending order.
pub(crate) struct ChunkSums {
    /// Those of complete chunks.
    complete: Vec<u64>,
    hasher: ChunkHasher,
}

impl ChunkSums {
    pub(crate) fn new() -> Self {
        Self { complete: Vec::new(), hasher: ChunkHasher::new() }
    }

    /// Adds whole pages, none of them all zero, that begin at a RAM offset and may belong to
    /// several chunks.
    pub(crate) fn add(&mut self, mut offset_bytes: u64, mut pages: &[u8]) {
        while !pages.is_empty() {
            self.complete_up_to(offset_bytes);
            let left_bytes = CHUNK_BYTES - offset_bytes % CHUNK_BYTES;
            let length = usize::try_from(left_bytes).map_or(pages.len(), |it| it.min(pages.len()));
            let (of_chunk, rest) = pages.split_at(length);
            self.hasher.add(offset_bytes, of_chunk);
            offset_bytes += length as u64;
            pages = rest;
        }
    }

    /// The checksums of a memory of `size_bytes`.
    pub(crate) fn finish(mut self, size_bytes: u64) -> Vec<u64> {
        self.complete_up_to(size_bytes.next_multiple_of(CHUNK_BYTES));
        self.complete
    }

    /// Completes the chunks that end at or before a RAM offset.
    fn complete_up_to(&mut self, offset_bytes: u64) {
        while ((self.complete.len() + 1) as u64) * CHUNK_BYTES <= offset_bytes {
            let hasher = std::mem::replace(&mut self.hasher, ChunkHasher::new());
            self.complete.push(hasher.finish());
        }
    }
}

/// The longest parts of `content`, whole pages, in which no page is all zero, as byte ranges.
pub(crate) fn nonzero_runs(content: &[u8]) -> impl Iterator<Item = Range<usize>> {
    let is_data =
        move |start: usize| start < content.len() && !is_zero(&content[start..start + PAGE]);
    let mut next = 0;
    std::iter::from_fn(move || {
        while next < content.len() && !is_data(next) {
            next += PAGE;
        }
        let start = next;
        // The page that ended the search, if any, contains data.
        while next < content.len() && (next == start || is_data(next)) {
            next += PAGE;
        }
        (start < next).then_some(start..next)
    })
}

/// Whether all bytes are zero. Blocks without an inner branch become vector instructions; most
/// pages in use end the search in the first one.
fn is_zero(page: &[u8]) -> bool {
    page.chunks(256).all(|block| block.iter().fold(0, |seen, byte| seen | byte) == 0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn pages(bytes: &[u8]) -> Vec<u8> {
        bytes.iter().flat_map(|&byte| [vec![0; PAGE - 1], vec![byte]].concat()).collect()
    }

    #[test]
    fn checksums_depend_on_content_and_place_but_not_on_pieces() {
        let of = |parts: &[(u64, &[u8])]| {
            let mut hasher = ChunkHasher::new();
            for (offset, content) in parts {
                hasher.add(*offset, content);
            }
            hasher.finish()
        };
        let two = pages(&[1, 2]);
        assert_eq!(of(&[(4096, &two)]), of(&[(4096, &two[..PAGE]), (8192, &two[PAGE..])]));
        assert_ne!(of(&[(4096, &two)]), of(&[(8192, &two)]));
        assert_ne!(of(&[(4096, &two)]), of(&[(4096, &pages(&[1, 3]))]));
        assert_ne!(of(&[(4096, &two)]), of(&[(4096, &two[..PAGE]), (12288, &two[PAGE..])]));
    }

    #[test]
    fn the_checksum_is_the_one_of_version_1() {
        // Known answer: existing images must stay readable.
        let mut hasher = ChunkHasher::new();
        hasher.add(4096, &pages(&[1, 2]));
        let bytes =
            [&4096_u64.to_le_bytes()[..], &pages(&[1]), &8192_u64.to_le_bytes(), &pages(&[2])]
                .concat();
        assert_eq!(hasher.finish(), XxHash3_64::oneshot(&bytes));
        assert_eq!(ChunkHasher::new().finish(), 0x2d06_8005_38d3_94c2);
    }

    #[test]
    fn pages_are_added_to_the_chunks_they_lie_in() {
        let of = |parts: &[(u64, &[u8])]| {
            let mut hasher = ChunkHasher::new();
            for (offset, content) in parts {
                hasher.add(*offset, content);
            }
            hasher.finish()
        };
        let content = pages(&[1, 2, 3, 4]);
        let before = 2 * CHUNK_BYTES - 2 * PAGE_SIZE_BYTES;
        let mut sums = ChunkSums::new();
        sums.add(before, &content[..PAGE]);
        sums.add(before + PAGE_SIZE_BYTES, &content[PAGE..]);
        assert_eq!(
            sums.finish(3 * CHUNK_BYTES + 1),
            [
                of(&[]),
                of(&[(before, &content[..2 * PAGE])]),
                of(&[(2 * CHUNK_BYTES, &content[2 * PAGE..])]),
                of(&[]),
            ]
        );
        assert_eq!(ChunkSums::new().finish(CHUNK_BYTES), [of(&[])]);
    }

    proptest! {
        #[test]
        fn runs_are_the_pages_that_are_not_zero(
            bytes in prop::collection::vec(prop::bool::ANY, 0..20),
            position in 0..PAGE,
        ) {
            let mut content = vec![0; bytes.len() * PAGE];
            for (index, _) in bytes.iter().enumerate().filter(|(_, set)| **set) {
                content[index * PAGE + position] = 1;
            }
            let runs: Vec<_> = nonzero_runs(&content).collect();
            let mut found = vec![false; bytes.len()];
            for run in &runs {
                prop_assert!(run.start < run.end && run.start % PAGE == 0 && run.end % PAGE == 0);
                found[run.start / PAGE..run.end / PAGE].fill(true);
            }
            prop_assert_eq!(found, bytes);
            prop_assert!(runs.windows(2).all(|pair| pair[0].end < pair[1].start));
        }
    }
}
