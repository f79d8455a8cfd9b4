//! The rate of reboots. One costs the host all of the guest's memory and a kernel to load, and a
//! guest can request it as its first instruction.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// Time over which reboots are counted.
const PERIOD: Duration = Duration::from_secs(60);
/// Reboots in it that take place at once.
const FREE: usize = 5;
/// How long the next one waits; twice as long for each further one.
const FIRST_WAIT: Duration = Duration::from_millis(250);
/// The longest wait.
const MOST_WAIT: Duration = Duration::from_secs(8);

/// The reboots of the last minute.
#[derive(Debug, Default)]
pub(super) struct RecentReboots(VecDeque<Instant>);

impl RecentReboots {
    /// Counts a reboot that is requested at `now`; returns how long it must wait.
    pub(super) fn wait(&mut self, now: Instant) -> Duration {
        let is_old = |at: &Instant| now.saturating_duration_since(*at) >= PERIOD;
        while self.0.front().is_some_and(is_old) {
            self.0.pop_front();
        }
        let wait = self.0.len().checked_sub(FREE).map_or(Duration::ZERO, |above| {
            let doubled = u32::try_from(above).ok().and_then(|above| 1_u32.checked_shl(above));
            doubled
                .and_then(|factor| FIRST_WAIT.checked_mul(factor))
                .map_or(MOST_WAIT, |wait| wait.min(MOST_WAIT))
        });
        // The count is bounded by the waits.
        self.0.push_back(now + wait);
        wait
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_loop_of_reboots_becomes_slow() {
        let (mut recent, begin) = (RecentReboots::default(), Instant::now());
        let mut now = begin;
        let mut waits = Vec::new();
        for _ in 0..100 {
            let wait = recent.wait(now);
            waits.push(wait.as_millis());
            now += wait;
        }
        assert_eq!(waits[..12], [0, 0, 0, 0, 0, 250, 500, 1000, 2000, 4000, 8000, 8000]);
        assert!(now - begin > Duration::from_secs(60) * 100 / 20, "{waits:?}");
        assert!(recent.0.len() < 20);
        // A minute of peace.
        assert_eq!(recent.wait(now + PERIOD), Duration::ZERO);
    }

    #[test]
    fn ordinary_reboots_do_not_wait() {
        let (mut recent, mut now) = (RecentReboots::default(), Instant::now());
        for _ in 0..50 {
            assert_eq!(recent.wait(now), Duration::ZERO);
            now += Duration::from_secs(15);
        }
    }
}
