//! The model of a machine's memory.

use std::ops::Range;
use std::sync::{Arc, LazyLock, OnceLock};

use serde::{Deserialize, Serialize};
use twox_hash::XxHash3_64;

use crate::operations::{MOST_WRITES, PAGE};

/// Bytes that are written. 0 as mark stands for zeros.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Span {
    pub way: crate::operations::Way,
    pub bytes: Range<u64>,
    pub mark: u32,
}

impl Span {
    /// All bytes that are written.
    pub fn content(&self) -> Vec<u8> {
        let words = self.bytes.start / 8..self.bytes.end.div_ceil(8);
        let content: Vec<u8> =
            words.clone().flat_map(|word| word_of(self.mark, word).to_ne_bytes()).collect();
        let from = (self.bytes.start - words.start * 8) as usize;
        content[from..from + (self.bytes.end - self.bytes.start) as usize].to_vec()
    }
}

/// The value of a word of memory.
pub fn word_of(mark: u32, word: u64) -> u64 {
    if mark == 0 { 0 } else { u64::from(mark) << 32 | word }
}

/// The first mark of an operation; `None` is what the first machine begins with.
pub fn first_mark(operation: Option<usize>) -> u32 {
    operation.map_or(1, |index| (index as u32 + 1) * MOST_WRITES)
}

/// Where a word comes from.
pub fn describe(value: u64) -> String {
    let (mark, word) = ((value >> 32) as u32, value & u64::from(u32::MAX));
    match mark / MOST_WRITES {
        _ if value == 0 => "zeros".to_owned(),
        0 => format!("{value:#x}, of page {} as it began", word * 8 / PAGE),
        operation => {
            format!("{value:#x}, of page {} by operation {}", word * 8 / PAGE, operation - 1)
        }
    }
}

/// Which content differs.
#[derive(Debug)]
pub struct Difference {
    pub page: u64,
    /// Index in the page.
    pub word: usize,
    pub expected: u64,
    pub found: u64,
}

#[derive(Clone)]
struct Page {
    bytes: [u8; PAGE as usize],
    hash: OnceLock<u64>,
}

static ZEROS: LazyLock<Arc<Page>> =
    LazyLock::new(|| Arc::new(Page { bytes: [0; PAGE as usize], hash: OnceLock::new() }));

/// All pages of a machine. A clone is a machine's memory at one moment.
#[derive(Clone)]
pub struct Memory(Vec<Arc<Page>>);

impl Memory {
    pub fn new(size_pages: u64) -> Self {
        Self(vec![Arc::clone(&ZEROS); size_pages as usize])
    }

    pub fn write(&mut self, span: &Span) {
        let content = span.content();
        let mut at = span.bytes.start;
        while at < span.bytes.end {
            let end = span.bytes.end.min((at / PAGE + 1) * PAGE);
            let page = Arc::make_mut(&mut self.0[(at / PAGE) as usize]);
            page.hash = OnceLock::new();
            let part = &content[(at - span.bytes.start) as usize..][..(end - at) as usize];
            page.bytes[(at % PAGE) as usize..][..part.len()].copy_from_slice(part);
            at = end;
        }
    }

    pub fn discard(&mut self, pages: Range<u64>) {
        self.0[pages.start as usize..pages.end as usize].fill(Arc::clone(&ZEROS));
    }

    pub fn size_pages(&self) -> u64 {
        self.0.len() as u64
    }

    /// The first page with another hash.
    pub fn differs_from(&self, hashes: &[u64]) -> Option<u64> {
        assert_eq!(hashes.len(), self.0.len());
        let differs = |(page, hash): (&Arc<Page>, &u64)| {
            *page.hash.get_or_init(|| hash_of(&page.bytes)) != *hash
        };
        self.0.iter().zip(hashes).position(differs).map(|page| page as u64)
    }

    /// The first word of a page with another content.
    pub fn compare(&self, page: u64, found: &[u8]) -> Option<Difference> {
        let word = |bytes: &[u8]| bytes.try_into().map_or(0, u64::from_ne_bytes);
        let expected = self.0[page as usize].bytes.chunks_exact(8).map(word);
        let mut words = expected.zip(found.chunks_exact(8).map(word)).enumerate();
        words
            .find(|(_, (expected, found))| expected != found)
            .map(|(word, (expected, found))| Difference { page, word, expected, found })
    }
}

pub fn hash_of(page: &[u8]) -> u64 {
    XxHash3_64::oneshot(page)
}
