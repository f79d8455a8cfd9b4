//! The inflate and deflate queues (virtio 1.3 sections 5.5.6.1 and 5.5.6.2).

use ebb_abi::balloon::{Feature, Features, PFN_BYTES};
use ebb_abi::{PageRange, Pfn};

use crate::budget::Budget;
use crate::chain::ChainReader;
use crate::counters::{GuestError, QueueCounters};
use crate::pages::RunBuilder;
use crate::queue::{Chain, DeviceQueue};
use crate::{Balloon, Progress};

/// Page frame numbers read from a chain; Linux sends 256.
pub(crate) const MAX_PFNS_PER_CHAIN: usize = 64 << 10;

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
        let ram = self.ram.clone();
        let mut budget = Budget::new();
        let mut unanswered = Vec::new();
        while let Some(chain) = queue.next_chain(ram.memory(), &mut budget, &mut self.faults) {
            let head = chain.head_index();
            self.read_pfns(chain, &mut budget);
            for range in &self.scratch.ranges {
                count(&mut self.counters.inflate, *range);
            }
            self.counters.inflate.buffers += 1;
            if poisoned {
                let bytes: u64 = self.scratch.ranges.iter().map(|range| range.size_bytes()).sum();
                self.counters.discard.poisoned_bytes += bytes;
            } else {
                self.discarder.insert(&self.scratch.ranges);
            }
            if may_discard_later {
                queue.complete(ram.memory(), head, &mut self.faults);
            } else {
                unanswered.push(head);
            }
        }
        if !may_discard_later {
            // Once answered, the driver may use these pages again without a word.
            self.discarder.flush();
            for head in unanswered {
                queue.complete(ram.memory(), head, &mut self.faults);
            }
        }
        queue.finish_round(ram.memory(), &budget, &mut self.faults)
    }

    pub(crate) fn process_deflate(&mut self, queue: &mut DeviceQueue) -> Progress {
        let ram = self.ram.clone();
        let mut budget = Budget::new();
        while let Some(chain) = queue.next_chain(ram.memory(), &mut budget, &mut self.faults) {
            let head = chain.head_index();
            self.read_pfns(chain, &mut budget);
            for range in &self.scratch.ranges {
                count(&mut self.counters.deflate, *range);
            }
            self.discarder.remove(&self.scratch.ranges);
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

    /// Discards all pages of the balloon that still wait for it, see [`Discarder::flush`](crate::Discarder::flush).
    pub fn flush(&mut self) {
        self.discarder.flush();
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
