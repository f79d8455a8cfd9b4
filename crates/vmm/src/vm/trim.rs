//! Discards guest memory that was touched but is all zero.
//!
//! A page can only be checked and discarded while no thread writes to it, so vCPUs and device
//! threads are paused for a slice of memory at a time.

use std::time::{Duration, Instant};

use ebb_abi::{PageRange, Pfn};

use super::{Vm, VmError, lock};
use crate::api::vm::{TrimReport, VmState};

/// Most resident memory scanned in one pause, in pages: some milliseconds.
const SLICE_PAGES: u64 = (64 << 20) / ebb_abi::PAGE_SIZE_BYTES;
/// Time limit of one call, during which the API thread serves no other client.
const TIME_LIMIT: Duration = Duration::from_secs(1);
/// The guest runs at least this many times as long as it was paused.
const RUN_SHARE: u32 = 1;

impl Vm {
    /// Scans guest memory from where the last call ended.
    pub(super) fn trim_some(&self) -> Result<TrimReport, VmError> {
        let started = Instant::now();
        let mut report = TrimReport::default();
        let mut cursor = lock(&self.trim_cursor);
        let regions: Vec<PageRange> =
            self.ram.regions().iter().map(ebb_guest_ram::Region::pages).collect();
        for region in regions {
            while *cursor < region.end().0 {
                if started.elapsed() >= TIME_LIMIT {
                    return Ok(report);
                }
                let start = (*cursor).max(region.start.0);
                let end = (start + SLICE_PAGES).min(region.end().0);
                let pause =
                    self.trim_slice(PageRange::new(Pfn(start), end - start), &mut report)?;
                *cursor = end;
                std::thread::park_timeout(pause * RUN_SHARE);
            }
        }
        *cursor = 0;
        report.complete = true;
        Ok(report)
    }

    /// Scans one slice; returns how long a running machine was paused for it.
    fn trim_slice(&self, slice: PageRange, report: &mut TrimReport) -> Result<Duration, VmError> {
        let state = lock(&self.state);
        let running = match *state {
            VmState::Running => true,
            VmState::Paused => false,
            // Another monitor has it, or will have it soon.
            _ => return Ok(Duration::ZERO),
        };
        let stopped = Instant::now();
        if running {
            self.stop_all();
        }
        let result = self.ram.discard_zeros(slice);
        if running {
            self.continue_all();
        }
        drop(state);
        let pause = if running { stopped.elapsed() } else { Duration::ZERO };
        let scan = result?;
        report.scanned_bytes += scan.scanned_bytes;
        report.returned_bytes += scan.returned_bytes;
        report.pauses += u64::from(running);
        report.longest_pause_us =
            report.longest_pause_us.max(u64::try_from(pause.as_micros()).unwrap_or(u64::MAX));
        Ok(pause)
    }
}
