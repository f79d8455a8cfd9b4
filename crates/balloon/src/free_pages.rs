//! What a driver told of its free pages, collected.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use ebb_abi::{Order, PageRange};
use ebb_guest_ram::{GuestRam, PageBitmap};
use serde::Serialize;

use crate::{AnswerMessage, EncodingCounters, HintEnd, HintSink};

/// The largest block that Linux's allocator keeps on x86_64 by default: 4 MiB
/// (include/linux/mmzone.h, `MAX_ORDER`).
pub const LARGEST_BLOCK: Order = Order(10);

/// Free pages in figures.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct FreePageSummary {
    /// Bytes named, each page once.
    pub bytes: u64,
    /// Contiguous ranges that they form.
    pub ranges: u64,
    /// Blocks by order that these ranges are made of, as a buddy allocator would have them: aligned
    /// to their size, each as large as possible and at most [`LARGEST_BLOCK`]. Where free
    /// neighbours were named in smaller blocks, the larger one counts.
    pub blocks: [u64; LARGEST_BLOCK.0 as usize + 1],
    /// Bytes of them in whole blocks of 2 MiB.
    pub huge_block_bytes: u64,
    /// The largest range in bytes.
    pub largest_range_bytes: u64,
}

/// The pages of guest memory that a driver told of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FreePageMap(PageBitmap);

impl FreePageMap {
    /// The empty set of pages of this memory.
    pub fn new(ram: &GuestRam) -> Self {
        Self(PageBitmap::new(&ram.page_ranges()))
    }

    /// Adds those of the pages that are guest memory.
    pub fn insert(&mut self, range: PageRange) {
        self.0.insert(range);
    }

    /// Takes pages out, for example because they were written to.
    pub fn remove(&mut self, range: PageRange) {
        self.0.remove(range);
    }

    /// The pages as ranges in ascending order; one that crosses from a region to the next is two.
    pub fn ranges(&self) -> impl Iterator<Item = PageRange> {
        self.0.ranges()
    }

    /// The pages.
    pub fn pages(&self) -> &PageBitmap {
        &self.0
    }

    /// The set in figures.
    pub fn summary(&self) -> FreePageSummary {
        let mut summary = FreePageSummary::default();
        for range in self.ranges() {
            summary.bytes += range.size_bytes();
            summary.ranges += 1;
            summary.huge_block_bytes += range.whole_huge_blocks().size_bytes();
            summary.largest_range_bytes = summary.largest_range_bytes.max(range.size_bytes());
            count_blocks(range, &mut summary.blocks);
        }
        summary
    }
}

/// Takes a range apart into blocks.
fn count_blocks(range: PageRange, blocks: &mut [u64; LARGEST_BLOCK.0 as usize + 1]) {
    let (mut first, end) = (range.start.0, range.end().0);
    while first < end {
        let alignment = first.trailing_zeros();
        let order = alignment.min((end - first).ilog2()).min(u32::from(LARGEST_BLOCK.0));
        blocks[order as usize] += 1;
        first += 1 << order;
    }
}

/// A [`HintSink`] that collects: one half goes to the device, the clone waits for the end.
#[derive(Clone, Debug)]
pub struct FreePageCollector(Arc<(Mutex<Collected>, Condvar)>);

#[derive(Debug)]
struct Collected {
    map: FreePageMap,
    answer: Answer,
}

/// What is known of an answer besides the pages in it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Answer {
    /// How it ended, and when; `None` as long as more may come.
    pub end: Option<(HintEnd, Instant)>,
    /// How its messages named pages; it has no bare arrays.
    pub encodings: EncodingCounters,
    /// Length of all messages in bytes, headers included.
    pub message_bytes: u64,
    /// Time it took the device to read them and to find their ranges, in nanoseconds.
    pub translate_ns: u64,
    /// Memory named that is not in the map because the guest relies on the content of free pages,
    /// in bytes; a page that was named twice counts twice.
    pub poisoned_bytes: u64,
}

impl FreePageCollector {
    /// Nothing was told yet.
    pub fn new(ram: &GuestRam) -> Self {
        let collected = Collected { map: FreePageMap::new(ram), answer: Answer::default() };
        Self(Arc::new((Mutex::new(collected), Condvar::new())))
    }

    fn lock(&self) -> MutexGuard<'_, Collected> {
        self.0.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until no more will come, but not beyond `deadline`; then, `None`. Must not be called
    /// with the device locked.
    pub fn wait(&self, deadline: Instant) -> Option<HintEnd> {
        let mut collected = self.lock();
        while collected.answer.end.is_none() {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            let result = self.0.1.wait_timeout(collected, left);
            collected = result.unwrap_or_else(PoisonError::into_inner).0;
        }
        collected.answer.end.map(|(end, _)| end)
    }

    /// What is known so far besides the pages.
    pub fn answer(&self) -> Answer {
        self.lock().answer
    }

    /// What was told so far.
    pub fn map(&self) -> FreePageMap {
        self.lock().map.clone()
    }

    /// What was told so far, in figures.
    pub fn summary(&self) -> FreePageSummary {
        self.lock().map.summary()
    }
}

impl HintSink for FreePageCollector {
    fn hint(&mut self, ranges: &[PageRange]) {
        let mut collected = self.lock();
        for range in ranges {
            collected.map.insert(*range);
        }
    }

    fn answered(&mut self, message: AnswerMessage) {
        let answer = &mut self.lock().answer;
        answer.encodings.count(message.encoding);
        answer.message_bytes += message.size_bytes;
        answer.translate_ns += message.translate_ns;
        answer.poisoned_bytes += message.poisoned_bytes;
    }

    fn ended(&mut self, end: HintEnd) {
        self.lock().answer.end = Some((end, Instant::now()));
        self.0.1.notify_all();
    }
}
