//! The advisor: how many pages to scan between two sleeps, so that a pass takes as long as it
//! should.
//!
//! It works as the scan-time advisor of Linux's mm/ksm.c (since 6.8;
//! Documentation/admin-guide/mm/ksm.rst): the new number is the old one times the ratio of the
//! pass's time to the target, times a weighted average of how passes changed, and is kept within
//! what the share of a processor allows. Two things differ. The average begins with "no change";
//! Linux's begins with 0 and underestimates the first passes. And there is no least share of a
//! processor (Linux: 10 %): looking at a clean page costs so little here that it would make passes
//! many times faster than asked for.

use std::time::Duration;

use crate::settings::Settings;

/// Weight of the newest change in the average, in percent.
const NEWEST_PERCENT: u64 = 30;

/// What is remembered from pass to pass.
#[derive(Clone, Debug)]
pub struct Advisor {
    last_scan: Option<Duration>,
    /// Average of changes, in percent.
    change_percent: u64,
}

impl Default for Advisor {
    fn default() -> Self {
        Self { last_scan: None, change_percent: 100 }
    }
}

/// A duration in units of 10 ms, at least one. (Linux counts whole seconds.)
fn ticks(duration: Duration) -> u64 {
    (duration.as_millis() as u64 / 10).max(1)
}

impl Advisor {
    /// A pass over all memory took `scan`, of which the processor was used for `cpu`; each step
    /// took `pages_to_scan` pages. Returns how many it should take in the next pass.
    pub fn finished_pass(
        &mut self,
        settings: &Settings,
        pages_to_scan: u64,
        scan: Duration,
        cpu: Duration,
    ) -> u64 {
        let scan_ticks = ticks(scan);
        let target_ticks = ticks(Duration::from_secs(settings.advisor_target_scan_time_s));
        let last_ticks = self.last_scan.map_or(scan_ticks, ticks);
        let cpu_percent = (cpu.as_millis() as u64 * 100 / (scan_ticks * 10)).max(1);

        let change = (scan_ticks * 100 / last_ticks).max(1);
        self.change_percent =
            ((100 - NEWEST_PERCENT) * self.change_percent + NEWEST_PERCENT * change).div_ceil(100);
        self.last_scan = Some(scan);

        let wished = u128::from(pages_to_scan) * u128::from(scan_ticks) / u128::from(target_ticks)
            * u128::from(self.change_percent)
            / 100;
        let pages_per_percent = (pages_to_scan / cpu_percent).max(1);
        u64::try_from(wished)
            .unwrap_or(u64::MAX)
            .min(pages_per_percent * u64::from(settings.advisor_max_cpu_percent))
            .clamp(settings.advisor_min_pages_to_scan, settings.advisor_max_pages_to_scan)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Passes over `memory_pages` with 20 ms of sleep and `page_ns` of work for each page; returns
    /// the last pass's time.
    fn passes(
        settings: &Settings,
        memory_pages: u64,
        page_ns: u64,
        count: usize,
    ) -> (u64, Duration) {
        let (mut advisor, mut pages_to_scan) =
            (Advisor::default(), settings.advisor_min_pages_to_scan);
        let mut scan = Duration::ZERO;
        for _ in 0..count {
            let cpu = Duration::from_nanos(memory_pages * page_ns);
            scan = Duration::from_millis(20) * (memory_pages / pages_to_scan) as u32 + cpu;
            pages_to_scan = advisor.finished_pass(settings, pages_to_scan, scan, cpu);
        }
        (pages_to_scan, scan)
    }

    #[test]
    fn comes_to_the_target_from_both_sides() {
        for memory_pages in [1 << 18, 1 << 20, 1 << 23] {
            let settings = Settings {
                advisor_target_scan_time_s: 60,
                advisor_min_pages_to_scan: 20,
                ..Settings::default()
            };
            let (_, scan) = passes(&settings, memory_pages, 100, 40);
            assert!((54..=66).contains(&scan.as_secs()), "{memory_pages} pages took {scan:?}");
        }
    }

    #[test]
    fn keeps_to_its_limits() {
        let fast = Settings { advisor_target_scan_time_s: 1, ..Settings::default() };
        assert_eq!(passes(&fast, 1 << 24, 1, 30).0, fast.advisor_max_pages_to_scan);
        let slow = Settings { advisor_target_scan_time_s: 80_000, ..Settings::default() };
        assert_eq!(passes(&slow, 1 << 12, 10, 30).0, slow.advisor_min_pages_to_scan);
        // 20 us a page: at 10 % of a processor no more than about 100 pages in 20 ms.
        let busy = Settings {
            advisor_target_scan_time_s: 1,
            advisor_max_cpu_percent: 10,
            advisor_min_pages_to_scan: 1,
            ..Settings::default()
        };
        let (pages, _) = passes(&busy, 1 << 16, 20_000, 30);
        assert!((50..=200).contains(&pages), "{pages}");
    }
}
