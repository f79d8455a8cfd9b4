//! The records of all pages of a memory, in blocks of at most 512 pages.

use ebb_abi::{PageRange, Pfn};

use crate::{
    memory::BLOCK_PAGES,
    record::{Record, State},
};

/// Number of a page in its memory: number of its block times 512, plus its index in the block. 32
/// bits suffice for 16 TiB.
pub(crate) type PageNumber = u32;

/// Maximum number of blocks of a memory.
const MOST_BLOCKS: usize = 1 << (32 - BLOCK_PAGES.trailing_zeros());

/// Part of the memory, within one naturally aligned block of 512 pages.
#[derive(Debug)]
pub(crate) struct Block {
    /// The block's pages.
    pub(crate) range: PageRange,
    /// One record per page; `None` while nothing is known about any of them.
    records: Option<Box<[Record]>>,
    /// Number of merged pages.
    merged: u16,
    /// Number of pages with content of their own: neither unknown nor merged nor zeroed.
    others: u16,
    /// The last scan found one huge page.
    pub(crate) huge: bool,
    /// State of this huge page.
    pub(crate) reading: Reading,
    /// Number of passes in which all of its pages were small, present and not merged.
    pub(crate) whole_passes: u8,
}

/// When a huge page is read, and what was decided.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Reading {
    /// Passes until it is read (again).
    pub(crate) due_in: u8,
    /// Passes between the last two times; 0 if it has not been read.
    pub(crate) interval: u8,
    /// Number of its pages that were duplicates when it was read, or were found to be since.
    pub(crate) wanted: u16,
    /// It is to be split.
    pub(crate) split: bool,
    /// Enough of its pages had partners, when it was judged, that need not be split from a huge
    /// page, or in huge pages of which enough pages are duplicates, too.
    pub(crate) willing: bool,
    /// Number of times that it was judged since it was read, because enough of its pages were found
    /// to be duplicates.
    pub(crate) tries: u8,
}

/// Whether a block's pages can be merged, the least likely first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Readiness {
    /// A huge page with few duplicates.
    Whole,
    /// A huge page of which enough pages are duplicates, perhaps of others that are not ready.
    Wanted,
    /// A huge page that is split if another one is that shares content with it.
    Willing,
    /// Not a huge page, or one that is being split.
    Small,
}

impl Block {
    /// Whether it is a huge page that is not to be split.
    pub(crate) fn is_huge_page(&self) -> bool {
        self.huge && !self.reading.split
    }

    /// Whether its pages can be merged, if a huge page is split for `least` duplicates.
    pub(crate) fn readiness(&self, least: u16) -> Readiness {
        if !self.is_huge_page() {
            Readiness::Small
        } else if self.reading.willing {
            Readiness::Willing
        } else if self.reading.wanted >= least {
            Readiness::Wanted
        } else {
            Readiness::Whole
        }
    }

    /// Number of merged pages.
    pub(crate) fn merged_pages(&self) -> u16 {
        self.merged
    }

    /// Whether nothing is known about its pages.
    fn is_unknown(&self) -> bool {
        self.records.is_none() && !self.huge
    }

    /// Records of the pages, if any is known.
    pub(crate) fn records(&self) -> Option<&[Record]> {
        self.records.as_deref()
    }
}

/// All blocks of a memory.
#[derive(Debug, Default)]
pub(crate) struct Blocks {
    all: Vec<Block>,
    pages: u64,
    states: [u64; State::COUNT],
    remote: u64,
    records: u64,
}

impl Blocks {
    /// Number of blocks.
    pub(crate) fn len(&self) -> u32 {
        self.all.len() as u32
    }

    /// Number of pages.
    pub(crate) fn pages(&self) -> u64 {
        self.pages
    }

    /// Adds the blocks of `range`; `false` if there are too many.
    pub(crate) fn add(&mut self, range: PageRange) -> bool {
        for range in cut(range) {
            if self.all.len() >= MOST_BLOCKS {
                return false;
            }
            self.pages += range.pages;
            self.all.push(Block {
                range,
                records: None,
                merged: 0,
                others: 0,
                huge: false,
                reading: Reading::default(),
                whole_passes: 0,
            });
        }
        true
    }

    /// Resets the records of a block to unknown.
    pub(crate) fn forget(&mut self, number: u32) {
        let Some(pages) = self.block(number).map(|block| block.range.pages) else { return };
        for offset in 0..pages as u32 {
            self.set(number * BLOCK_PAGES as u32 + offset, Record::UNKNOWN);
        }
        if let Some(block) = self.block_mut(number) {
            (block.huge, block.reading, block.whole_passes) = (false, Reading::default(), 0);
        }
        self.shrink(number);
    }

    /// Frees the records of a block about which nothing is known.
    pub(crate) fn shrink(&mut self, number: u32) {
        if let Some(block) = self.all.get_mut(number as usize)
            && block.merged == 0
            && block.others == 0
            && block.records.as_ref().is_some_and(|records| {
                records.iter().all(|record| record.state() == State::Unknown)
            })
        {
            self.records -= block.range.pages;
            self.states[State::Unknown as usize] -= block.range.pages;
            block.records = None;
        }
    }

    pub(crate) fn block(&self, number: u32) -> Option<&Block> {
        self.all.get(number as usize)
    }

    pub(crate) fn block_mut(&mut self, number: u32) -> Option<&mut Block> {
        self.all.get_mut(number as usize)
    }

    /// The range of the blocks from `number` on about which nothing is known, and that are
    /// neighbours, up to `most_pages`.
    pub(crate) fn unknown_range(&self, number: u32, most_pages: u64) -> PageRange {
        let blocks = self.all.get(number as usize..).unwrap_or_default();
        let mut range = PageRange::default();
        for block in blocks.iter().take_while(|block| block.is_unknown()) {
            if range.is_empty() {
                range.start = block.range.start;
            }
            if block.range.start != range.end() || range.pages >= most_pages {
                break;
            }
            range.pages += block.range.pages;
        }
        range
    }

    /// Guest frame number of a page.
    pub(crate) fn pfn(&self, page: PageNumber) -> Option<Pfn> {
        let block = self.block(block_of(page))?;
        Some(Pfn(block.range.start.0 + u64::from(page) % BLOCK_PAGES))
    }

    /// Record of a page.
    pub(crate) fn record(&self, page: PageNumber) -> Record {
        self.block(block_of(page))
            .and_then(|block| block.records.as_ref()?.get(page as usize % BLOCK_PAGES as usize))
            .copied()
            .unwrap_or(Record::UNKNOWN)
    }

    /// Sets the record of a page.
    pub(crate) fn set(&mut self, page: PageNumber, record: Record) {
        let Some(block) = self.all.get_mut(block_of(page) as usize) else {
            return;
        };
        if block.records.is_none() {
            if record.state() == State::Unknown {
                return;
            }
            let pages = block.range.pages;
            block.records = Some(vec![Record::UNKNOWN; pages as usize].into_boxed_slice());
            self.records += pages;
            self.states[State::Unknown as usize] += pages;
        }
        let Some(place) = block
            .records
            .as_mut()
            .and_then(|records| records.get_mut(page as usize % BLOCK_PAGES as usize))
        else {
            return;
        };
        let old = std::mem::replace(place, record);
        for (state, sign) in [(old, -1_i16), (record, 1)] {
            match state.state() {
                State::Merged => block.merged = block.merged.saturating_add_signed(sign),
                State::Watched | State::Unshared | State::Refused | State::Seen => {
                    block.others = block.others.saturating_add_signed(sign);
                }
                State::Unknown | State::Zeroed => {}
            }
            let count = &mut self.states[state.state() as usize];
            *count = count.saturating_add_signed(sign.into());
            if state.state() == State::Merged && state.value() & 1 == 1 {
                self.remote = self.remote.saturating_add_signed(sign.into());
            }
        }
    }

    /// Number of pages in `state` (of unknown ones, only those in blocks with records).
    pub(crate) fn count(&self, state: State) -> u64 {
        self.states[state as usize]
    }

    /// Number of merged pages whose stable page is on another node.
    pub(crate) fn remote(&self) -> u64 {
        self.remote
    }

    /// Memory used by blocks and records, in bytes.
    pub(crate) fn memory_bytes(&self) -> u64 {
        self.records * size_of::<Record>() as u64
            + (self.all.capacity() * size_of::<Block>()) as u64
    }
}

/// Splits a range at naturally aligned blocks.
fn cut(range: PageRange) -> impl Iterator<Item = PageRange> {
    let (first, end) = (range.start.0 / BLOCK_PAGES, range.end().0.div_ceil(BLOCK_PAGES));
    (first..end)
        .map(move |block| range.intersection(PageRange::new(Pfn(block * BLOCK_PAGES), BLOCK_PAGES)))
}

/// Number of a page's block.
pub(crate) fn block_of(page: PageNumber) -> u32 {
    page / BLOCK_PAGES as u32
}

/// Number of a block's first page.
pub(crate) fn first_of(block: u32) -> PageNumber {
    block * BLOCK_PAGES as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_split_at_aligned_blocks() {
        let mut blocks = Blocks::default();
        assert!(blocks.add(PageRange::new(Pfn(500), 600)));
        let ranges: Vec<_> =
            (0..blocks.len()).map(|number| blocks.block(number).unwrap().range).collect();
        assert_eq!(
            ranges,
            [
                PageRange::new(Pfn(500), 12),
                PageRange::new(Pfn(512), 512),
                PageRange::new(Pfn(1024), 76)
            ]
        );
        assert_eq!(blocks.pfn(first_of(1) + 5), Some(Pfn(517)));
        assert_eq!(blocks.pfn(first_of(3)), None);
    }

    #[test]
    fn counts_follow_the_records_and_unknown_pages_have_none() {
        let mut blocks = Blocks::default();
        blocks.add(PageRange::new(Pfn(0), 1024));
        let empty = blocks.memory_bytes();
        blocks.set(7, Record::UNKNOWN);
        assert_eq!(blocks.memory_bytes(), empty);
        blocks.set(7, Record::UNKNOWN.with(State::Merged, 1));
        blocks.set(8, Record::UNKNOWN.with(State::Unshared, 99));
        assert_eq!(
            (blocks.count(State::Merged), blocks.count(State::Unshared), blocks.remote()),
            (1, 1, 1)
        );
        assert_eq!(blocks.memory_bytes(), empty + 4096);
        assert_eq!(blocks.block(0).unwrap().merged_pages(), 1);
        blocks.forget(0);
        assert_eq!(
            (blocks.count(State::Merged), blocks.count(State::Unshared), blocks.remote()),
            (0, 0, 0)
        );
        assert_eq!(blocks.memory_bytes(), empty);
    }
}
