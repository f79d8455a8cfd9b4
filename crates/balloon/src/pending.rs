//! Pages of the balloon that wait to be discarded, and their discard.
//!
//! Discarding takes long: about a millisecond for a few huge pages. It happens outside of the lock
//! that guards the device, through a [`Discarder`], so that neither the driver's register accesses
//! nor the API wait for it. The set has its own lock, which is held while its pages are being
//! discarded, so that removing pages from the balloon waits for the discard.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use ebb_abi::{PAGE_SIZE_BYTES, PageRange};
use ebb_guest_ram::{GuestRam, RangeSet};

use crate::counters::DiscardCounters;
use crate::log_limit::LogLimit;
use crate::verify::{ReportCheck, overwrite};

/// Maximum number of pages that wait for the rest of their huge pages: 64 MiB.
const MAX_PENDING_PAGES: u64 = 16 << 10;

/// Maximum number of waiting ranges; the limit of one `process_madvise`.
const MAX_PENDING_RANGES: usize = 1024;

/// Number of pages in whole huge pages, 8 MiB, from which they are discarded: each discard
/// interrupts the vCPUs to flush their address translations, whatever its size.
const DUE_PAGES: u64 = 2 << 10;

/// Pages in the balloon that have not been discarded.
///
/// Invariant: the driver has named each of them on the inflate queue and not, since then, on the
/// deflate queue.
#[derive(Debug, Default)]
struct Pending {
    pages: RangeSet,
    /// Pages added since whole huge pages were last removed.
    fresh_pages: u64,
    check: ReportCheck,
    counters: DiscardCounters,
    limit: LogLimit,
}

impl Pending {
    /// Removes and returns the whole huge pages.
    fn take_huge_blocks(&mut self) -> Vec<PageRange> {
        self.fresh_pages = 0;
        let blocks: Vec<_> = self
            .pages
            .iter()
            .map(PageRange::whole_huge_blocks)
            .filter(|blocks| !blocks.is_empty())
            .collect();
        for range in &blocks {
            self.pages.remove(*range);
        }
        blocks
    }

    fn take_all(&mut self) -> Vec<PageRange> {
        self.fresh_pages = 0;
        self.pages.take_all()
    }

    /// Returns whether all pages read as zeros now.
    fn discard(&mut self, ram: &GuestRam, ranges: &[PageRange]) -> bool {
        if ranges.is_empty() {
            return true;
        }
        if self.check == ReportCheck::Overwrite {
            self.counters.verified_pages += overwrite(ram, ranges);
        }
        let started = Instant::now();
        let result = ram.discard_ballooned(ranges);
        self.counters.took(started);
        match result {
            Ok(outcome) => {
                self.counters.add(outcome);
                outcome.is_complete()
            }
            Err(error) => {
                self.counters.failures += 1;
                self.limit.log_host_error(&error);
                false
            }
        }
    }
}

/// Result of adding pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub(crate) enum Inserted {
    /// The pages wait.
    Waiting,
    /// There were too many, and all waiting pages have been discarded.
    Discarded,
}

/// Discards the pages of a balloon, from any thread and without the lock that guards the device.
#[derive(Clone, Debug)]
pub struct Discarder {
    ram: Arc<GuestRam>,
    pending: Arc<Mutex<Pending>>,
}

impl Discarder {
    pub(crate) fn new(ram: Arc<GuestRam>) -> Self {
        Self { ram, pending: Arc::default() }
    }

    fn lock(&self) -> MutexGuard<'_, Pending> {
        self.pending.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sets the check of pages before they are discarded.
    pub(crate) fn set_check(&self, check: ReportCheck) {
        self.lock().check = check;
    }

    /// The check of pages before they are discarded.
    pub(crate) fn check(&self) -> ReportCheck {
        self.lock().check
    }

    /// Discards whole huge pages. Must be called after [`Progress::due`](crate::Progress::due).
    pub fn discard_due(&self) {
        let mut pending = self.lock();
        let blocks = pending.take_huge_blocks();
        pending.discard(&self.ram, &blocks);
    }

    /// Discards all waiting pages. Must be called some milliseconds after the last activity
    /// following [`Progress::pending`](crate::Progress::pending), and before the virtual machine is
    /// paused.
    pub fn flush(&self) {
        let mut pending = self.lock();
        let ranges = pending.take_all();
        pending.discard(&self.ram, &ranges);
    }

    /// Adds pages of the inflate queue. If that exceeds the bounds, all waiting pages are discarded
    /// immediately.
    pub(crate) fn insert(&self, ranges: &[PageRange]) -> Inserted {
        let mut pending = self.lock();
        for range in ranges {
            pending.pages.insert(*range);
            pending.fresh_pages += range.pages;
        }
        if pending.pages.pages() > MAX_PENDING_PAGES
            || pending.pages.range_count() > MAX_PENDING_RANGES
        {
            let ranges = pending.take_all();
            pending.discard(&self.ram, &ranges);
            return Inserted::Discarded;
        }
        Inserted::Waiting
    }

    /// Discards pages of the inflate queue at once; returns whether all of them read as zeros now.
    pub(crate) fn discard_now(&self, ranges: &[PageRange]) -> bool {
        self.lock().discard(&self.ram, ranges)
    }

    /// Removes pages named on the deflate queue.
    pub(crate) fn remove(&self, ranges: &[PageRange]) {
        let mut pending = self.lock();
        for range in ranges {
            pending.pages.remove(*range);
        }
    }

    /// Drops all pages: they belong to the guest again.
    pub(crate) fn clear(&self) {
        let mut pending = self.lock();
        pending.counters.dropped_bytes += pending.pages.pages() * PAGE_SIZE_BYTES;
        pending.take_all();
    }

    /// Number of waiting bytes.
    pub fn pending_bytes(&self) -> u64 {
        self.lock().pages.pages() * PAGE_SIZE_BYTES
    }

    /// Whether there are enough pages for [`discard_due`](Self::discard_due).
    pub(crate) fn is_due(&self) -> bool {
        self.lock().fresh_pages >= DUE_PAGES
    }

    pub(crate) fn counters(&self) -> DiscardCounters {
        self.lock().counters
    }

    #[cfg(any(test, feature = "testing"))]
    pub(crate) fn ranges(&self) -> Vec<PageRange> {
        self.lock().pages.iter().collect()
    }
}
