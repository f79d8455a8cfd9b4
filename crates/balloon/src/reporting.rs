//! The page reporting queue (virtio 1.3 section 5.5.6.7; Linux mm/page_reporting.c).
//!
//! The guest keeps reported pages isolated until the device returns the buffer. So they are
//! discarded before that, and never remembered: a moment later they may be in use.

use std::time::Instant;

use ebb_abi::PageRange;
use ebb_abi::balloon::Features;

use crate::budget::Budget;
use crate::chain::{Chain, ChainReader};
use crate::queue::DeviceQueue;
use crate::{Balloon, Progress};

impl Balloon {
    pub(crate) fn process_reporting(
        &mut self,
        queue: &mut DeviceQueue,
        negotiated: Features,
    ) -> Progress {
        let poisoned = self.is_poisoned(negotiated);
        let ram = self.ram.clone();
        let mut budget = Budget::new();
        while let Some(chain) = queue.next_chain(ram.memory(), &mut budget, &mut self.faults) {
            let head = chain.head_index();
            let mistakes = self.faults.counts().total();
            let started = Instant::now();
            let named_bytes = self.read_ranges(chain, &mut budget);
            self.counters.reporting.translated(started);
            let ranges = std::mem::take(&mut self.scratch.ranges);
            for range in &ranges {
                self.counters.reporting.count(*range);
                if poisoned {
                    self.counters.discard.poisoned_bytes += range.size_bytes();
                }
            }
            let discarded = !poisoned && self.discard(&ranges);
            self.scratch.ranges = ranges;
            self.counters.reporting.buffers += 1;
            let length = self.reported_length(negotiated, discarded, named_bytes, mistakes);
            queue.complete_written(ram.memory(), head, length, &mut self.faults);
        }
        queue.finish_round(ram.memory(), &budget, &mut self.faults)
    }

    /// Reads the ranges of a chain's writable descriptors into `scratch.ranges`: sorted, disjoint,
    /// inside guest memory. Returns the bytes of the pages named, whether in memory or not, with
    /// repeated ones.
    pub(crate) fn read_ranges(&mut self, chain: Chain<'_>, budget: &mut Budget) -> u64 {
        let mut ranges = std::mem::take(&mut self.scratch.ranges);
        let mut reader =
            ChainReader { memory: self.ram.memory(), budget, faults: &mut self.faults };
        let named_bytes = reader.read_ranges(chain, &mut ranges);
        ebb_guest_ram::coalesce(&mut ranges);
        let pages = |ranges: &[PageRange]| -> u64 { ranges.iter().map(|range| range.pages).sum() };
        self.scratch.ranges.extend(ranges.iter().flat_map(|range| self.ram.clip(*range)));
        self.reject_outside(pages(&ranges) - pages(&self.scratch.ranges));
        named_bytes
    }
}
