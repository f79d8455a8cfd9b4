//! The inflate and deflate queues (virtio 1.3 sections 5.5.6.1 and 5.5.6.2).

use ebb_abi::balloon::{Feature, Features, PFN_BYTES};
use ebb_abi::{PAGE_SIZE_BYTES, PageRange, Pfn};

use crate::budget::Budget;
use crate::chain::ChainReader;
use crate::counters::{GuestError, QueueCounters};
use crate::pages::{PageSet, RunBuilder};
use crate::queue::{Chain, DeviceQueue};
use crate::{Balloon, Progress};

/// Page frame numbers read from a chain; Linux sends 256.
pub(crate) const MAX_PFNS_PER_CHAIN: usize = 64 << 10;

/// Pages that may wait for the rest of their huge pages: 64 MiB.
const MAX_PENDING_PAGES: u64 = 16 << 10;

/// Ranges that may wait; as many as go into one `process_madvise`.
const MAX_PENDING_RANGES: usize = 1024;

/// Pages that are in the balloon and have not been discarded.
///
/// Invariant: the driver has named each of them on the inflate queue and not, since, on the deflate queue.
#[derive(Debug, Default)]
pub(crate) struct Pending {
    pages: PageSet,
    /// Whether some whole huge page may be among them.
    has_huge_blocks: bool,
}

impl Pending {
    fn insert(&mut self, range: PageRange) {
        let merged = self.pages.insert(range);
        self.has_huge_blocks |= !merged.whole_huge_blocks().is_empty();
    }

    fn remove(&mut self, range: PageRange) {
        self.pages.remove(range);
    }

    fn is_full(&self) -> bool {
        self.pages.pages() > MAX_PENDING_PAGES || self.pages.range_count() > MAX_PENDING_RANGES
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.pages.pages() * PAGE_SIZE_BYTES
    }

    /// Takes out the whole huge pages.
    fn take_huge_blocks(&mut self) -> Vec<PageRange> {
        if !std::mem::take(&mut self.has_huge_blocks) {
            return Vec::new();
        }
        let blocks: Vec<_> =
            self.pages.iter().map(PageRange::whole_huge_blocks).filter(|blocks| !blocks.is_empty()).collect();
        for range in &blocks {
            self.pages.remove(*range);
        }
        blocks
    }

    #[cfg(any(test, feature = "testing"))]
    pub(crate) fn ranges(&self) -> Vec<PageRange> {
        self.pages.iter().collect()
    }

    pub(crate) fn take_all(&mut self) -> Vec<PageRange> {
        self.has_huge_blocks = false;
        self.pages.take_all()
    }
}

/// Buffers that are reused from chain to chain.
#[derive(Debug, Default)]
pub(crate) struct Scratch {
    pub(crate) bytes: Vec<u8>,
    pub(crate) runs: RunBuilder,
    pub(crate) ranges: Vec<PageRange>,
}

impl Balloon {
    pub(crate) fn process_inflate(&mut self, queue: &mut DeviceQueue, negotiated: Features) -> Progress {
        let may_discard_later = negotiated.contains(Feature::MustTellHost);
        let poisoned = self.is_poisoned(negotiated);
        // What the call before left: the driver has its answer and looks for pages meanwhile.
        let blocks = self.pending.take_huge_blocks();
        self.discard_held(&blocks);

        let ram = self.ram.clone();
        let mut budget = Budget::new();
        let mut unanswered = Vec::new();
        while let Some(chain) = queue.next_chain(ram.memory(), &mut budget, &mut self.faults) {
            let head = chain.head_index();
            self.read_pfns(chain, &mut budget);
            for range in &self.scratch.ranges {
                count(&mut self.counters.inflate, *range);
                if poisoned {
                    self.counters.discard.poisoned_bytes += range.size_bytes();
                } else {
                    self.pending.insert(*range);
                }
            }
            self.counters.inflate.buffers += 1;
            if may_discard_later {
                queue.complete(ram.memory(), head, &mut self.faults);
                if self.pending.is_full() {
                    self.flush();
                }
            } else {
                unanswered.push(head);
            }
        }
        if !may_discard_later {
            // Once answered, the driver may use these pages again without a word.
            let ranges = self.pending.take_all();
            self.discard(&ranges);
            for head in unanswered {
                queue.complete(ram.memory(), head, &mut self.faults);
            }
        }
        let mut progress = queue.finish_round(ram.memory(), &budget, &mut self.faults);
        progress.more |= self.pending.has_huge_blocks;
        progress
    }

    pub(crate) fn process_deflate(&mut self, queue: &mut DeviceQueue) -> Progress {
        let ram = self.ram.clone();
        let mut budget = Budget::new();
        while let Some(chain) = queue.next_chain(ram.memory(), &mut budget, &mut self.faults) {
            let head = chain.head_index();
            self.read_pfns(chain, &mut budget);
            for range in &self.scratch.ranges {
                count(&mut self.counters.deflate, *range);
                self.pending.remove(*range);
            }
            ram.reclaim(&self.scratch.ranges);
            self.counters.deflate.buffers += 1;
            // From here on the driver uses the pages.
            queue.complete(ram.memory(), head, &mut self.faults);
        }
        queue.finish_round(ram.memory(), &budget, &mut self.faults)
    }

    /// Reads the page frame numbers of a chain into `scratch.ranges`: sorted, disjoint, inside guest memory.
    fn read_pfns(&mut self, chain: Chain<'_>, budget: &mut Budget) {
        let scratch = &mut self.scratch;
        let mut reader = ChainReader { memory: self.ram.memory(), budget, faults: &mut self.faults };
        reader.read_bytes(chain, MAX_PFNS_PER_CHAIN * PFN_BYTES, &mut scratch.bytes);
        let (numbers, rest) = scratch.bytes.as_chunks::<PFN_BYTES>();
        if !rest.is_empty() {
            self.faults.count(GuestError::PartialEntry, format_args!("{} bytes too many", rest.len()));
        }
        budget.spend(numbers.len());
        scratch.runs.clear();
        for number in numbers {
            scratch.runs.push(Pfn::from(u32::from_le_bytes(*number)));
        }
        let (runs, doubles) = scratch.runs.finish();
        if doubles > 0 {
            self.faults.count(GuestError::DoublePage, format_args!("{doubles} pages"));
        }
        scratch.ranges.clear();
        let asked: u64 = runs.iter().map(|run| run.pages).sum();
        scratch.ranges.extend(runs.iter().flat_map(|run| self.ram.clip(*run)));
        self.reject_outside(asked);
    }

    /// Accounts for pages asked for that are not in `scratch.ranges`, which holds those that are guest memory.
    pub(crate) fn reject_outside(&mut self, asked_pages: u64) {
        let inside: u64 = self.scratch.ranges.iter().map(|range| range.pages).sum();
        let outside = asked_pages - inside;
        if outside > 0 {
            self.counters.rejected_pages += outside;
            self.faults.count(GuestError::OutsideRam, format_args!("{outside} pages"));
        }
    }

    /// Discards all pages of the balloon that still wait for it. To be called when nothing has come for some
    /// milliseconds after [`Progress::pending`], and before the virtual machine is paused.
    pub fn flush(&mut self) {
        let ranges = self.pending.take_all();
        self.discard_held(&ranges);
    }

    fn discard_held(&mut self, ranges: &[PageRange]) {
        if !ranges.is_empty() {
            let result = self.ram.discard_held(ranges);
            self.account(result);
        }
    }

    /// Discards pages that the driver may use again at once.
    pub(crate) fn discard(&mut self, ranges: &[PageRange]) {
        if !ranges.is_empty() {
            let result = self.ram.discard(ranges);
            self.account(result);
        }
    }
}

pub(crate) fn count(counters: &mut QueueCounters, range: PageRange) {
    counters.bytes += range.size_bytes();
    counters.ranges += 1;
}
