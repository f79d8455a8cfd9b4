//! Limiting and measuring bandwidth.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Longest unused time that may be made up for.
const BURST: Duration = Duration::from_millis(20);

/// Longest sleep, so that a cancelled migration ends soon.
const MAX_SLEEP: Duration = Duration::from_millis(50);

/// Limits the rate of several threads together.
#[derive(Debug)]
pub(crate) struct RateLimiter {
    bytes_per_s: Option<u64>,
    /// Time at which the bytes reserved so far have been sent.
    free_at: Mutex<Option<Instant>>,
}

impl RateLimiter {
    pub(crate) fn new(bytes_per_s: Option<u64>) -> Self {
        Self { bytes_per_s: bytes_per_s.map(|rate| rate.max(1)), free_at: Mutex::new(None) }
    }

    /// Waits until `bytes` may be sent, or until `give_up` returns true.
    pub(crate) fn wait(&self, bytes: u64, give_up: &dyn Fn() -> bool) {
        let Some(mut start) = self.reserve(bytes, Instant::now()) else { return };
        start = start.max(Instant::now());
        while !give_up() {
            let left = start.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return;
            }
            std::thread::park_timeout(left.min(MAX_SLEEP));
        }
    }

    /// Reserves time for `bytes` and returns when they may be sent. `None` if there is no limit.
    fn reserve(&self, bytes: u64, now: Instant) -> Option<Instant> {
        let rate = self.bytes_per_s?;
        let mut free_at = self.free_at.lock().unwrap_or_else(PoisonError::into_inner);
        let earliest = now.checked_sub(BURST).unwrap_or(now);
        let start = free_at.map_or(now, |free_at| free_at.max(earliest));
        *free_at = Some(start + Duration::from_secs_f64(bytes as f64 / rate as f64));
        Some(start)
    }
}

/// Bandwidth measured in rounds.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Bandwidth {
    bytes_per_s: Option<f64>,
}

/// Least number of bytes in a round for a measurement: a smaller round mostly waits for the answer.
const MIN_BYTES: u64 = 1 << 20;

impl Bandwidth {
    /// Adds a round that took `time` for `sent_bytes` on the wire, which stand for `handled_bytes`
    /// of memory.
    pub(crate) fn observe(&mut self, sent_bytes: u64, handled_bytes: u64, time: Duration) {
        let seconds = time.as_secs_f64().max(1e-6);
        if sent_bytes >= MIN_BYTES {
            let measured = sent_bytes as f64 / seconds;
            // Average of old and new: a single round may be an outlier.
            self.bytes_per_s =
                Some(self.bytes_per_s.map_or(measured, |known| f64::midpoint(known, measured)));
        } else if self.bytes_per_s.is_none() && handled_bytes >= MIN_BYTES {
            // Only zeros: the next round will hardly be slower.
            self.bytes_per_s = Some(handled_bytes as f64 / seconds);
        }
    }

    pub(crate) fn bytes_per_s(self) -> Option<u64> {
        self.bytes_per_s.map(|rate| rate as u64)
    }

    /// Time to send this many bytes; `None` if the bandwidth is unknown.
    pub(crate) fn time_for(self, bytes: u64) -> Option<Duration> {
        if bytes == 0 {
            return Some(Duration::ZERO);
        }
        // Capped at a day.
        self.bytes_per_s
            .map(|rate| Duration::from_secs_f64((bytes as f64 / rate.max(1.0)).min(86_400.0)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_spread_over_time() {
        let limiter = RateLimiter::new(Some(1000));
        let now = Instant::now();
        let second = Duration::from_secs(1);
        assert_eq!(limiter.reserve(500, now), Some(now));
        assert_eq!(limiter.reserve(1000, now), Some(now + second / 2));
        assert_eq!(limiter.reserve(1, now), Some(now + second * 3 / 2));
        // Unused time is lost except for the burst.
        let later = now + second * 100;
        assert_eq!(limiter.reserve(1, later), later.checked_sub(BURST));
        assert_eq!(RateLimiter::new(None).reserve(1 << 40, now), None);
    }

    #[test]
    fn small_rounds_are_not_measured() {
        let mut bandwidth = Bandwidth::default();
        let second = Duration::from_secs(1);
        bandwidth.observe(1000, 1000, second);
        assert_eq!(bandwidth.time_for(1), None);
        assert_eq!(bandwidth.time_for(0), Some(Duration::ZERO));
        bandwidth.observe(1000, 64 << 20, second);
        assert_eq!(bandwidth.bytes_per_s(), Some(64 << 20));
        bandwidth.observe(32 << 20, 32 << 20, second);
        assert_eq!(bandwidth.bytes_per_s(), Some(48 << 20));
        bandwidth.observe(1000, 64 << 20, second);
        assert_eq!(bandwidth.time_for(96 << 20), Some(second * 2));
    }
}
