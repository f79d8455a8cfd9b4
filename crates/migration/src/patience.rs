//! How long hints are worth waiting for.
//!
//! A page that is sent before it is named is sent in vain, and a page takes the link longer than
//! the guest takes to name it. So a round waits as long as pages are named faster than a link would
//! carry them.

use std::time::Duration;

use ebb_abi::PAGE_SIZE_BYTES;

use crate::Config;
use crate::rate::Bandwidth;

/// How long the guest may take until it names its first page: its driver works in the background.
const START: Duration = Duration::from_secs(2);

/// Over how much time the rate is looked at. Shorter gaps are hiccups of one of both sides.
const WINDOW: Duration = Duration::from_millis(500);

/// Decides whether to go on waiting.
#[derive(Debug)]
pub(crate) struct Patience {
    limit: Duration,
    min_bytes_per_s: u64,
    /// Beginning of the window, and pages named by then.
    window: Option<(Duration, u64)>,
}

impl Patience {
    /// For a link of this measured bandwidth. Half of it is enough: what is not sent is worth
    /// something, too.
    pub(crate) fn new(config: &Config, bandwidth: Bandwidth) -> Self {
        let link = bandwidth.bytes_per_s().map_or(config.hint_rate, |bytes_per_s| bytes_per_s / 2);
        let min_bytes_per_s = link.min(config.bandwidth_limit.unwrap_or(u64::MAX));
        Self { limit: config.hint_wait, min_bytes_per_s, window: None }
    }

    /// Whether to go on, after so much time and with so many pages named.
    pub(crate) fn goes_on(&mut self, elapsed: Duration, named_pages: u64) -> bool {
        if elapsed >= self.limit {
            return false;
        }
        let Some((start, named_before)) = self.window else {
            if named_pages > 0 {
                self.window = Some((elapsed, 0));
            }
            return named_pages > 0 || elapsed < START;
        };
        let time = elapsed.saturating_sub(start);
        if time < WINDOW {
            return true;
        }
        self.window = Some((elapsed, named_pages));
        let named_bytes = (named_pages - named_before) * PAGE_SIZE_BYTES;
        named_bytes as f64 >= self.min_bytes_per_s as f64 * time.as_secs_f64()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = (1 << 20) / PAGE_SIZE_BYTES;

    fn milliseconds(number: u64) -> Duration {
        Duration::from_millis(number)
    }

    fn patience(bandwidth_limit: Option<u64>, bandwidth: Bandwidth) -> Patience {
        let hint_wait = milliseconds(5000);
        let config =
            Config { hint_rate: 100 << 20, hint_wait, bandwidth_limit, ..Config::default() };
        Patience::new(&config, bandwidth)
    }

    fn unknown() -> Patience {
        patience(None, Bandwidth::default())
    }

    #[test]
    fn a_guest_that_says_nothing_is_given_up_soon() {
        let mut patience = unknown();
        assert!(patience.goes_on(milliseconds(1999), 0));
        assert!(!patience.goes_on(milliseconds(2000), 0));
    }

    #[test]
    fn fast_hints_are_waited_for_up_to_the_limit() {
        let mut patience = unknown();
        for time in (20..5000).step_by(20) {
            assert!(patience.goes_on(milliseconds(time), time * MIB / 10), "{time}");
        }
        assert!(!patience.goes_on(milliseconds(5000), 1 << 30));
    }

    #[test]
    fn slow_hints_are_not() {
        let mut patience = unknown();
        assert!(patience.goes_on(milliseconds(100), MIB));
        assert!(patience.goes_on(milliseconds(599), MIB));
        assert!(patience.goes_on(milliseconds(600), 50 * MIB));
        assert!(!patience.goes_on(milliseconds(1100), 99 * MIB));
    }

    #[test]
    fn a_slow_link_makes_slow_hints_worth_it() {
        let mut measured = Bandwidth::default();
        measured.observe(20 << 20, 20 << 20, milliseconds(1000));
        let limited = patience(Some(10 << 20), Bandwidth::default());
        for mut patience in [limited, patience(None, measured)] {
            assert!(patience.goes_on(milliseconds(100), 1));
            assert!(patience.goes_on(milliseconds(600), 5 * MIB));
            assert!(!patience.goes_on(milliseconds(1100), 9 * MIB));
        }
    }

    #[test]
    fn a_fast_link_does_not_wait_for_slow_hints() {
        let mut measured = Bandwidth::default();
        measured.observe(1000 << 20, 1000 << 20, milliseconds(1000));
        let mut patience = patience(None, measured);
        assert!(patience.goes_on(milliseconds(100), 1));
        assert!(!patience.goes_on(milliseconds(600), 200 * MIB));
    }
}
