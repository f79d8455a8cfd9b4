//! How long a round waits for hints.
//!
//! A page that is sent before it is hinted is sent in vain, and sending a page takes longer than
//! hinting it. So a round waits as long as pages are hinted faster than the link would carry them.

use std::time::Duration;

use ebb_abi::PAGE_SIZE_BYTES;

use crate::Config;
use crate::rate::Bandwidth;

/// Time within which the guest must hint its first page: its driver works in the background.
const START: Duration = Duration::from_secs(2);

/// Period over which the rate is measured. Shorter gaps are hiccups of one side.
const WINDOW: Duration = Duration::from_millis(500);

/// Decides whether to keep waiting.
#[derive(Debug)]
pub(crate) struct HintDeadline {
    limit: Duration,
    min_bytes_per_s: u64,
    /// Start of the window, and number of pages hinted by then.
    window: Option<(Duration, u64)>,
}

impl HintDeadline {
    /// For a link of this measured bandwidth. Half of it is enough, since a page that is not sent
    /// also saves bandwidth.
    pub(crate) fn new(config: &Config, bandwidth: Bandwidth) -> Self {
        let link = bandwidth.bytes_per_s().map_or(config.hint_rate, |bytes_per_s| bytes_per_s / 2);
        let min_bytes_per_s = link.min(config.bandwidth_limit.unwrap_or(u64::MAX));
        Self { limit: config.hint_wait, min_bytes_per_s, window: None }
    }

    /// Whether to keep waiting after `elapsed`, with `hinted_pages` pages hinted so far.
    pub(crate) fn keep_waiting(&mut self, elapsed: Duration, hinted_pages: u64) -> bool {
        if elapsed >= self.limit {
            return false;
        }
        let Some((start, hinted_before)) = self.window else {
            if hinted_pages > 0 {
                self.window = Some((elapsed, 0));
            }
            return hinted_pages > 0 || elapsed < START;
        };
        let time = elapsed.saturating_sub(start);
        if time < WINDOW {
            return true;
        }
        self.window = Some((elapsed, hinted_pages));
        let hinted_bytes = (hinted_pages - hinted_before) * PAGE_SIZE_BYTES;
        hinted_bytes as f64 >= self.min_bytes_per_s as f64 * time.as_secs_f64()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = (1 << 20) / PAGE_SIZE_BYTES;

    fn milliseconds(number: u64) -> Duration {
        Duration::from_millis(number)
    }

    fn deadline(bandwidth_limit: Option<u64>, bandwidth: Bandwidth) -> HintDeadline {
        let hint_wait = milliseconds(5000);
        let config =
            Config { hint_rate: 100 << 20, hint_wait, bandwidth_limit, ..Config::default() };
        HintDeadline::new(&config, bandwidth)
    }

    fn unknown() -> HintDeadline {
        deadline(None, Bandwidth::default())
    }

    #[test]
    fn a_silent_guest_is_not_waited_for() {
        let mut deadline = unknown();
        assert!(deadline.keep_waiting(milliseconds(1999), 0));
        assert!(!deadline.keep_waiting(milliseconds(2000), 0));
    }

    #[test]
    fn fast_hints_are_waited_for_up_to_the_limit() {
        let mut deadline = unknown();
        for time in (20..5000).step_by(20) {
            assert!(deadline.keep_waiting(milliseconds(time), time * MIB / 10), "{time}");
        }
        assert!(!deadline.keep_waiting(milliseconds(5000), 1 << 30));
    }

    #[test]
    fn slow_hints_are_not_waited_for() {
        let mut deadline = unknown();
        assert!(deadline.keep_waiting(milliseconds(100), MIB));
        assert!(deadline.keep_waiting(milliseconds(599), MIB));
        assert!(deadline.keep_waiting(milliseconds(600), 50 * MIB));
        assert!(!deadline.keep_waiting(milliseconds(1100), 99 * MIB));
    }

    #[test]
    fn slow_hints_are_waited_for_on_a_slow_link() {
        let mut measured = Bandwidth::default();
        measured.observe(20 << 20, 20 << 20, milliseconds(1000));
        let limited = deadline(Some(10 << 20), Bandwidth::default());
        for mut deadline in [limited, deadline(None, measured)] {
            assert!(deadline.keep_waiting(milliseconds(100), 1));
            assert!(deadline.keep_waiting(milliseconds(600), 5 * MIB));
            assert!(!deadline.keep_waiting(milliseconds(1100), 9 * MIB));
        }
    }

    #[test]
    fn slow_hints_are_not_waited_for_on_a_fast_link() {
        let mut measured = Bandwidth::default();
        measured.observe(1000 << 20, 1000 << 20, milliseconds(1000));
        let mut deadline = deadline(None, measured);
        assert!(deadline.keep_waiting(milliseconds(100), 1));
        assert!(!deadline.keep_waiting(milliseconds(600), 200 * MIB));
    }
}
