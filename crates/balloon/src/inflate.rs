//! The inflate and deflate queues (virtio 1.3 sections 5.5.6.1 and 5.5.6.2; docs/extension.md,
//! "Inflate and deflate").

use std::time::Instant;

use ebb_abi::PageRange;
use ebb_abi::balloon::{Feature, Features, QueueKind};

use crate::budget::Budget;
use crate::chain::Chain;
use crate::counters::GuestError;
use crate::initialized::has_bitmaps;
use crate::message::{Message, Verdict};
use crate::pages::RunBuilder;
use crate::pending::Inserted;
use crate::queue::DeviceQueue;
use crate::verify::{ReportCheck, overwrite};
use crate::{Balloon, Progress};

/// Buffers reused from chain to chain.
#[derive(Debug, Default)]
pub(crate) struct Scratch {
    pub(crate) bytes: Vec<u8>,
    pub(crate) runs: RunBuilder,
    pub(crate) ranges: Vec<PageRange>,
}

impl Balloon {
    pub(crate) fn process_inflate(
        &mut self,
        queue: &mut DeviceQueue,
        negotiated: Features,
    ) -> Progress {
        // A bitmap says what has been discarded.
        let may_discard_later =
            negotiated.contains(Feature::MustTellHost) && !has_bitmaps(negotiated);
        let poisoned = self.is_poisoned(negotiated);
        let ram = self.ram.clone();
        let mut budget = Budget::new();
        let mut unanswered = Vec::new();
        while let Some(mut message) =
            self.next_message(queue, QueueKind::Inflate, negotiated, &mut budget)
        {
            while self.next_portion(&mut message, QueueKind::Inflate, &mut budget) {
                let inserted = self.inflate(&mut message, poisoned);
                // Pages that are due are best discarded before more arrive, outside of the device's
                // lock; a discard done here held the lock long enough.
                let is_enough = match inserted {
                    Inserted::Waiting => self.discarder.is_due(),
                    Inserted::Discarded => true,
                };
                if is_enough && may_discard_later && !message.is_finished() {
                    budget.exhaust();
                }
            }
            if !message.is_finished() {
                queue.keep(message);
                break;
            }
            let head = message.head;
            let bitmap = message.bitmap.take();
            self.finish_message(message);
            if let Some(bitmap) = bitmap {
                let written = bitmap.write(ram.memory());
                self.counters.initialized_bytes += bitmap.initialized_bytes(written);
                queue.complete_written(ram.memory(), head, written, &mut self.faults);
            } else if may_discard_later {
                queue.complete(ram.memory(), head, &mut self.faults);
            } else {
                unanswered.push(head);
            }
        }
        if !may_discard_later {
            // Once answered, the driver may use these pages again without notice.
            self.discarder.flush();
            for head in unanswered {
                queue.complete(ram.memory(), head, &mut self.faults);
            }
        }
        queue.finish_round(ram.memory(), &budget, &mut self.faults)
    }

    pub(crate) fn process_deflate(
        &mut self,
        queue: &mut DeviceQueue,
        negotiated: Features,
    ) -> Progress {
        let ram = self.ram.clone();
        let mut budget = Budget::new();
        while let Some(mut message) =
            self.next_message(queue, QueueKind::Deflate, negotiated, &mut budget)
        {
            while self.next_portion(&mut message, QueueKind::Deflate, &mut budget) {
                self.discarder.remove(&self.scratch.ranges);
                ram.reclaim(&self.scratch.ranges);
            }
            if !message.is_finished() {
                queue.keep(message);
                break;
            }
            if message.verdict == Verdict::Refused {
                self.settle_balloon();
            }
            let head = message.head;
            self.finish_message(message);
            // From here on the driver may use the pages.
            queue.complete(ram.memory(), head, &mut self.faults);
        }
        queue.finish_round(ram.memory(), &budget, &mut self.faults)
    }

    /// The message in progress, or the next one.
    pub(crate) fn next_message(
        &mut self,
        queue: &mut DeviceQueue,
        kind: QueueKind,
        negotiated: Features,
        budget: &mut Budget,
    ) -> Option<Message> {
        if let Some(message) = queue.take_message() {
            return Some(message);
        }
        let ram = self.ram.clone();
        let chain = queue.next_chain(ram.memory(), budget, &mut self.faults)?;
        Some(self.read_timed_message(chain, kind, negotiated, budget))
    }

    /// Reads a message and accounts for the time.
    pub(crate) fn read_timed_message(
        &mut self,
        chain: Chain<'_>,
        kind: QueueKind,
        negotiated: Features,
        budget: &mut Budget,
    ) -> Message {
        let started = Instant::now();
        let mut message = self.read_message(chain, kind, negotiated, budget);
        message.translate_ns = self.counters.queue_mut(kind).translated(started);
        message
    }

    /// Puts the next pages of a message into `scratch.ranges` and counts them. Returns whether
    /// there were any; otherwise the message is finished or the budget exhausted.
    pub(crate) fn next_portion(
        &mut self,
        message: &mut Message,
        kind: QueueKind,
        budget: &mut Budget,
    ) -> bool {
        if message.is_finished() || budget.is_exhausted() {
            return false;
        }
        let started = Instant::now();
        message.next_portion(&self.ram, budget, &mut self.scratch.ranges);
        let counters = self.counters.queue_mut(kind);
        message.translate_ns += counters.translated(started);
        for range in &self.scratch.ranges {
            counters.count(*range);
        }
        !self.scratch.ranges.is_empty()
    }

    /// Adds the pages in `scratch.ranges` to the balloon.
    fn inflate(&mut self, message: &mut Message, poisoned: bool) -> Inserted {
        if poisoned {
            let bytes: u64 = self.scratch.ranges.iter().map(|range| range.size_bytes()).sum();
            self.counters.discard.poisoned_bytes += bytes;
            if let Some(bitmap) = &mut message.bitmap {
                bitmap.add(false);
            }
            return Inserted::Waiting;
        }
        if let Some(bitmap) = &mut message.bitmap {
            bitmap.add(self.discarder.discard_now(&self.scratch.ranges));
            return Inserted::Discarded;
        }
        self.discarder.insert(&self.scratch.ranges)
    }

    /// Discards all waiting pages and drops the remaining state: the driver is about to use pages
    /// of the balloon without naming them, so pages named earlier must not be discarded after this.
    fn settle_balloon(&mut self) {
        self.discarder.flush();
        self.ram.reclaim_all();
    }

    /// Accounts for named pages that are not guest memory.
    pub(crate) fn reject_outside(&mut self, pages: u64) {
        if pages > 0 {
            self.counters.rejected_pages = self.counters.rejected_pages.saturating_add(pages);
            self.faults.count(GuestError::OutsideRam, format_args!("{pages} pages"));
        }
    }

    /// Discards all pages of the balloon that wait, see
    /// [`Discarder::flush`](crate::Discarder::flush).
    pub fn flush(&mut self) {
        self.discarder.flush();
    }

    /// Discards pages that the driver may use again immediately; returns whether all of them read
    /// as zeros now.
    pub(crate) fn discard(&mut self, ranges: &[PageRange]) -> bool {
        if ranges.is_empty() {
            return true;
        }
        if self.discarder.check() == ReportCheck::Overwrite {
            self.counters.discard.verified_pages += overwrite(&self.ram, ranges);
        }
        let started = Instant::now();
        let result = self.ram.discard(ranges);
        self.counters.discard.took(started);
        self.account(result)
    }
}
