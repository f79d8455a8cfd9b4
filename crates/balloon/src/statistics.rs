//! The statistics queue (virtio 1.3 section 5.5.6.3).
//!
//! There is one buffer. The driver fills it and makes it available; the device keeps it until it
//! wants newer values, and returns it to request them.

use std::time::{Duration, Instant};

use ebb_abi::balloon::{QueueKind, StatisticsEntry, StatisticsTag};
use serde::{Deserialize, Serialize};

use crate::budget::Budget;
use crate::chain::{ChainReader, Directions};
use crate::counters::GuestError;
use crate::queue::DeviceQueue;
use crate::{Balloon, Progress};

/// Entries read from a buffer; Linux sends up to 16.
const MAX_ENTRIES: usize = 256;

/// A guest's report about its memory (virtio 1.3 section 5.5.6.4; tags 10 to 15 as in Linux
/// include/uapi/linux/virtio_balloon.h). null means "not reported", never zero.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema), schemars(rename = "Statistics"))]
pub struct StatisticsValues {
    /// Tag 0: memory swapped in since boot.
    pub swap_in_bytes: Option<u64>,
    /// Tag 1: memory swapped out since boot.
    pub swap_out_bytes: Option<u64>,
    /// Tag 2: page faults that needed I/O, since boot.
    pub major_faults: Option<u64>,
    /// Tag 3: page faults that needed no I/O, since boot.
    pub minor_faults: Option<u64>,
    /// Tag 4: unused memory.
    pub free_memory_bytes: Option<u64>,
    /// Tag 5: total memory of the guest, without the balloon.
    pub total_memory_bytes: Option<u64>,
    /// Tag 6: an estimate of the memory available to programs without swapping.
    pub available_memory_bytes: Option<u64>,
    /// Tag 7: file caches that can be reclaimed quickly.
    pub disk_caches_bytes: Option<u64>,
    /// Tag 8: huge pages allocated since boot.
    pub hugetlb_allocations: Option<u64>,
    /// Tag 9: huge pages that could not be allocated, since boot.
    pub hugetlb_failures: Option<u64>,
    /// Tag 10: processes killed for lack of memory, since boot.
    pub oom_kills: Option<u64>,
    /// Tag 11: allocations that had to reclaim memory themselves, since boot.
    pub allocation_stalls: Option<u64>,
    /// Tag 12: memory scanned in the background, since boot.
    pub async_scan_bytes: Option<u64>,
    /// Tag 13: memory scanned by allocations, since boot.
    pub direct_scan_bytes: Option<u64>,
    /// Tag 14: memory reclaimed in the background, since boot.
    pub async_reclaim_bytes: Option<u64>,
    /// Tag 15: memory reclaimed by allocations, since boot.
    pub direct_reclaim_bytes: Option<u64>,
}

/// A guest's memory statistics.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Statistics {
    /// The guest's last report.
    #[serde(flatten)]
    pub values: StatisticsValues,
    /// Time since the values arrived, in milliseconds; `None` if none ever arrived.
    pub age_ms: Option<u64>,
    /// Number of reports received. A requester of new values waits for this to grow.
    pub updates: u64,
}

/// Location of the statistics buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum StatisticsBuffer {
    /// The feature was not negotiated or no driver is loaded.
    Absent,
    /// The driver has it, and returns it with new values.
    WithDriver,
    /// The device has it.
    WithDevice,
}

/// Result of a poll.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StatisticsPoll {
    /// Whether the statistics queue's interrupt must be raised.
    pub interrupt: bool,
    /// When to poll again; `None` while there is no interval.
    pub next: Option<Instant>,
}

/// The latest values and the buffer.
#[derive(Debug, Default)]
pub(crate) struct Collector {
    values: [Option<u64>; StatisticsTag::COUNT],
    received: Option<Instant>,
    updates: u64,
    /// Head of the chain that the device holds.
    pub(crate) held: Option<u16>,
    interval: Option<Duration>,
    next_poll: Option<Instant>,
}

impl Collector {
    pub(crate) fn new(interval: Option<Duration>) -> Self {
        Self { interval, ..Self::default() }
    }

    pub(crate) fn interval(&self) -> Option<Duration> {
        self.interval
    }

    /// Stores a buffer's content. Values that it lacks are unknown from now on, and unknown tags
    /// are skipped.
    fn receive(&mut self, entries: &[[u8; StatisticsEntry::SIZE_BYTES]], now: Instant) {
        self.values = [None; StatisticsTag::COUNT];
        for entry in entries.iter().map(|bytes| StatisticsEntry::from_bytes(*bytes)) {
            if let Some(tag) = StatisticsTag::from_number(entry.tag) {
                self.values[usize::from(tag.number())] = Some(entry.value);
            }
        }
        self.received = Some(now);
        self.updates += 1;
    }

    /// Drops the driver's buffer and values.
    pub(crate) fn reset(&mut self) {
        *self = Self { interval: self.interval, updates: self.updates, ..Self::default() };
    }

    fn report(&self, now: Instant) -> Statistics {
        let value = |tag: StatisticsTag| self.values[usize::from(tag.number())];
        let age = self.received.map(|received| now.saturating_duration_since(received));
        let values = StatisticsValues {
            swap_in_bytes: value(StatisticsTag::SwapIn),
            swap_out_bytes: value(StatisticsTag::SwapOut),
            major_faults: value(StatisticsTag::MajorFaults),
            minor_faults: value(StatisticsTag::MinorFaults),
            free_memory_bytes: value(StatisticsTag::FreeMemory),
            total_memory_bytes: value(StatisticsTag::TotalMemory),
            available_memory_bytes: value(StatisticsTag::AvailableMemory),
            disk_caches_bytes: value(StatisticsTag::DiskCaches),
            hugetlb_allocations: value(StatisticsTag::HugetlbAllocations),
            hugetlb_failures: value(StatisticsTag::HugetlbFailures),
            oom_kills: value(StatisticsTag::OomKills),
            allocation_stalls: value(StatisticsTag::AllocationStalls),
            async_scan_bytes: value(StatisticsTag::AsyncScans),
            direct_scan_bytes: value(StatisticsTag::DirectScans),
            async_reclaim_bytes: value(StatisticsTag::AsyncReclaims),
            direct_reclaim_bytes: value(StatisticsTag::DirectReclaims),
        };
        Statistics {
            values,
            age_ms: age.map(|age| u64::try_from(age.as_millis()).unwrap_or(u64::MAX)),
            updates: self.updates,
        }
    }
}

impl Balloon {
    pub(crate) fn process_statistics(&mut self, queue: &mut DeviceQueue) -> Progress {
        let ram = self.ram.clone();
        let mut budget = Budget::new();
        while let Some(chain) = queue.next_chain(ram.memory(), &mut budget, &mut self.faults) {
            let head = chain.head_index();
            let mut reader =
                ChainReader { memory: ram.memory(), budget: &mut budget, faults: &mut self.faults };
            reader.read_bytes(
                chain,
                MAX_ENTRIES * StatisticsEntry::SIZE_BYTES,
                Directions::One,
                &mut self.scratch.bytes,
            );
            let (entries, rest) = self.scratch.bytes.as_chunks::<{ StatisticsEntry::SIZE_BYTES }>();
            if !rest.is_empty() {
                self.faults
                    .count(GuestError::PartialEntry, format_args!("{} bytes too many", rest.len()));
            }
            self.statistics.receive(entries, Instant::now());
            self.counters.statistics.buffers += 1;
            if head >= queue.size() {
                // A chain that can never be returned must not take the place of one that can.
                queue.complete(ram.memory(), head, &mut self.faults);
            } else if let Some(former) = self.statistics.held.replace(head) {
                self.faults.count(GuestError::ExtraStatistics, "a second statistics buffer");
                queue.complete(ram.memory(), former, &mut self.faults);
            }
        }
        queue.finish_round(ram.memory(), &budget, &mut self.faults)
    }

    /// Requests new values from the driver by returning its buffer, if the device has it. Returns
    /// whether the statistics queue's interrupt must be raised.
    ///
    /// The guest may never answer; [`Statistics::updates`] counts the answers.
    pub fn request_statistics(&mut self) -> bool {
        let memory = self.ram.memory();
        let Some(active) = &mut self.active else { return false };
        let Some(queue) = active.queue_mut(QueueKind::Statistics) else { return false };
        let Some(head) = self.statistics.held.take() else { return false };
        queue.complete(memory, head, &mut self.faults);
        queue.wants_interrupt(memory)
    }

    /// The latest values.
    pub fn statistics(&self) -> Statistics {
        self.statistics.report(Instant::now())
    }

    /// Location of the statistics buffer.
    pub fn statistics_buffer(&self) -> StatisticsBuffer {
        let exists =
            self.active.as_ref().is_some_and(|active| active.has_queue(QueueKind::Statistics));
        match self.statistics.held {
            Some(_) => StatisticsBuffer::WithDevice,
            None if exists => StatisticsBuffer::WithDriver,
            None => StatisticsBuffer::Absent,
        }
    }

    /// Sets how often [`poll_statistics`](Self::poll_statistics) requests new values; `None` for
    /// never.
    pub fn set_statistics_interval(&mut self, interval: Option<Duration>) {
        self.statistics.interval = interval.filter(|interval| !interval.is_zero());
        self.statistics.next_poll = None;
    }

    /// Interval between requests for statistics.
    pub fn statistics_interval(&self) -> Option<Duration> {
        self.statistics.interval
    }

    /// Requests new values if they are due. The owner calls this at the time given in the result,
    /// and after the interval was changed. A guest that has not answered is not asked again until
    /// it has.
    pub fn poll_statistics(&mut self, now: Instant) -> StatisticsPoll {
        let Some(interval) = self.statistics.interval else { return StatisticsPoll::default() };
        let due = self.statistics.next_poll.is_none_or(|next| now >= next);
        if due {
            self.statistics.next_poll = Some(now + interval);
        }
        StatisticsPoll {
            interrupt: due && self.request_statistics(),
            next: self.statistics.next_poll,
        }
    }
}
