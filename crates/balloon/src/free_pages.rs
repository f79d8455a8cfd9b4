//! Collection of the free pages that a driver named.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use ebb_abi::{Order, PageRange};
use ebb_guest_ram::{GuestRam, PageBitmap};
use serde::Serialize;

use crate::{AnswerMessage, EncodingCounters, HintEnd, HintSink};

/// The largest block of Linux's allocator on x86_64 by default: 4 MiB (include/linux/mmzone.h,
/// `MAX_ORDER`).
pub const LARGEST_BLOCK: Order = Order(10);

/// Summary of a set of free pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct FreePageSummary {
    /// Bytes named, each page counted once.
    pub bytes: u64,
    /// Number of contiguous ranges.
    pub ranges: u64,
    /// Number of blocks by order in these ranges, as a buddy allocator would form them: aligned to
    /// their size, each as large as possible and at most [`LARGEST_BLOCK`]. Where adjacent free
    /// blocks were named separately, the larger block counts.
    pub blocks: [u64; LARGEST_BLOCK.0 as usize + 1],
    /// Bytes of them in whole blocks of 2 MiB.
    pub huge_block_bytes: u64,
    /// Size of the largest range in bytes.
    pub largest_range_bytes: u64,
}

/// Set of free pages named by a driver.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FreePageMap(PageBitmap);

impl FreePageMap {
    /// An empty set for this memory.
    pub fn new(ram: &GuestRam) -> Self {
        Self(PageBitmap::new(&ram.page_ranges()))
    }

    /// Adds the pages of the range that are guest memory.
    pub fn insert(&mut self, range: PageRange) {
        self.0.insert(range);
    }

    /// Removes pages, for example because they were written to.
    pub fn remove(&mut self, range: PageRange) {
        self.0.remove(range);
    }

    /// The pages as ranges in ascending order; a range that crosses regions is split.
    pub fn ranges(&self) -> impl Iterator<Item = PageRange> {
        self.0.ranges()
    }

    /// The pages as a bitmap.
    pub fn pages(&self) -> &PageBitmap {
        &self.0
    }

    /// Summary of the set.
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

/// Splits a range into blocks and counts them.
fn count_blocks(range: PageRange, blocks: &mut [u64; LARGEST_BLOCK.0 as usize + 1]) {
    let (mut first, end) = (range.start.0, range.end().0);
    while first < end {
        let alignment = first.trailing_zeros();
        let order = alignment.min((end - first).ilog2()).min(u32::from(LARGEST_BLOCK.0));
        blocks[order as usize] += 1;
        first += 1 << order;
    }
}

/// A [`HintSink`] that collects the pages; a clone of it waits for the end.
#[derive(Clone, Debug)]
pub struct FreePageCollector(Arc<(Mutex<Collected>, Condvar)>);

#[derive(Debug)]
struct Collected {
    map: FreePageMap,
    answer: Answer,
}

/// Properties of an answer, apart from its pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Answer {
    /// How and when it ended; `None` as long as more may follow.
    pub end: Option<(HintEnd, Instant)>,
    /// Encodings of its messages; it has no bare arrays.
    pub encodings: EncodingCounters,
    /// Length of all messages in bytes, headers included.
    pub message_bytes: u64,
    /// Time the device spent reading them and computing their ranges, in nanoseconds.
    pub translate_ns: u64,
    /// Bytes named but not in the map because the guest relies on the content of free pages; a page
    /// that was named twice counts twice.
    pub poisoned_bytes: u64,
}

impl FreePageCollector {
    /// Creates an empty collector.
    pub fn new(ram: &GuestRam) -> Self {
        let collected = Collected { map: FreePageMap::new(ram), answer: Answer::default() };
        Self(Arc::new((Mutex::new(collected), Condvar::new())))
    }

    fn lock(&self) -> MutexGuard<'_, Collected> {
        self.0.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for the end of the answer, but not beyond `deadline`; then returns `None`. Must not be
    /// called with the device locked.
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

    /// Properties of the answer so far.
    pub fn answer(&self) -> Answer {
        self.lock().answer
    }

    /// Pages named so far.
    pub fn map(&self) -> FreePageMap {
        self.lock().map.clone()
    }

    /// Summary of the pages named so far.
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
