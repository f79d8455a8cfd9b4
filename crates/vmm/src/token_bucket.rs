//! A token bucket: how much may pass in a time, without a clock of its own.

use std::time::{Duration, Instant};

/// Parts of a token: those that a rate of one token a second adds in a nanosecond.
const PARTS: i128 = 1_000_000_000;
/// Longest wait that is announced. Who waits for longer asks again.
const MOST_WAIT: Duration = Duration::from_secs(3600);

/// A bucket that holds up to `burst` tokens and gains `per_second` of them in a second.
///
/// In any time, at most `burst` plus the tokens gained pass. A request for more than `burst` passes
/// when the bucket is full, and leaves a debt that is paid off before anything else passes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TokenBucket {
    per_second: u64,
    burst: u64,
    /// Tokens in the bucket at `filled_at`, in parts; negative for a debt.
    level: i128,
    filled_at: Instant,
}

impl TokenBucket {
    /// A full bucket. Rate and burst are at least 1.
    pub fn new(per_second: u64, burst: u64, now: Instant) -> Self {
        let (per_second, burst) = (per_second.max(1), burst.max(1));
        Self { per_second, burst, level: i128::from(burst) * PARTS, filled_at: now }
    }

    /// Changes rate and burst. A debt is forgiven: it was made under another limit.
    pub fn change(&mut self, per_second: u64, burst: u64, now: Instant) {
        self.fill(now);
        (self.per_second, self.burst) = (per_second.max(1), burst.max(1));
        self.level = self.level.clamp(0, self.full());
    }

    /// How long it takes until `tokens` may pass; zero if they may now.
    pub fn wait(&mut self, tokens: u64, now: Instant) -> Duration {
        self.fill(now);
        let missing = i128::from(tokens.min(self.burst)) * PARTS - self.level;
        if missing <= 0 {
            return Duration::ZERO;
        }
        let rate = i128::from(self.per_second);
        let nanoseconds = (missing + rate - 1) / rate;
        u64::try_from(nanoseconds).map_or(MOST_WAIT, Duration::from_nanos).min(MOST_WAIT)
    }

    /// Takes `tokens`, which may leave a debt.
    pub fn take(&mut self, tokens: u64, now: Instant) {
        self.fill(now);
        self.level = self.level.saturating_sub(i128::from(tokens) * PARTS);
    }

    /// Takes `tokens` if they may pass now.
    pub fn try_take(&mut self, tokens: u64, now: Instant) -> bool {
        let passes = self.wait(tokens, now).is_zero();
        if passes {
            self.take(tokens, now);
        }
        passes
    }

    fn full(&self) -> i128 {
        i128::from(self.burst) * PARTS
    }

    fn fill(&mut self, now: Instant) {
        let elapsed = now.saturating_duration_since(self.filled_at).as_nanos();
        let gained = i128::try_from(elapsed)
            .map_or(i128::MAX, |elapsed| elapsed.saturating_mul(i128::from(self.per_second)));
        self.level = self.level.saturating_add(gained).min(self.full());
        self.filled_at = self.filled_at.max(now);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_burst_passes_and_then_the_rate() {
        let begin = Instant::now();
        let mut bucket = TokenBucket::new(100, 10, begin);
        assert!(bucket.try_take(10, begin));
        assert!(!bucket.try_take(1, begin));
        assert_eq!(bucket.wait(3, begin), Duration::from_millis(30));
        assert!(bucket.try_take(3, begin + Duration::from_millis(30)));
        assert!(!bucket.try_take(1, begin + Duration::from_millis(30)));
        assert!(!bucket.try_take(11, begin + Duration::from_millis(129)));
        assert!(bucket.try_take(11, begin + Duration::from_millis(130)));
    }

    #[test]
    fn a_request_above_the_burst_leaves_a_debt() {
        let begin = Instant::now();
        let mut bucket = TokenBucket::new(10, 10, begin);
        assert!(bucket.try_take(30, begin));
        assert_eq!(bucket.wait(1, begin), Duration::from_millis(2100));
        bucket.change(1, 5, begin);
        assert_eq!(bucket.wait(1, begin), Duration::from_secs(1));
    }

    #[test]
    fn a_clock_that_goes_back_gains_nothing() {
        let begin = Instant::now();
        let later = begin + Duration::from_secs(1);
        let mut bucket = TokenBucket::new(1, 1, later);
        assert!(bucket.try_take(1, later));
        assert!(!bucket.try_take(1, begin));
        assert!(!bucket.try_take(1, later));
    }

    proptest! {
        /// Over any steps of any length.
        #[test]
        fn never_more_than_burst_and_rate_pass(
            rate in 1_u64..1 << 40,
            burst in 1_u64..1 << 40,
            steps in prop::collection::vec((0_u64..1 << 34, 0_u64..1 << 41), 1..100),
        ) {
            let begin = Instant::now();
            let (mut bucket, mut now) = (TokenBucket::new(rate, burst, begin), begin);
            let (mut passed, mut largest) = (0_u128, u128::from(burst));
            for (nanoseconds, tokens) in steps {
                now += Duration::from_nanos(nanoseconds);
                if bucket.try_take(tokens, now) {
                    passed += u128::from(tokens);
                    largest = largest.max(u128::from(tokens));
                }
                let gained = now.duration_since(begin).as_nanos() * u128::from(rate) / PARTS as u128;
                // A single request may exceed the burst: the rest of it is a debt.
                prop_assert!(passed <= largest + gained);
            }
        }

        /// The announced wait is enough, and a nanosecond less is not.
        #[test]
        fn nothing_starves(
            rate in 1_u64 << 10..1 << 30,
            burst in 1_u64..1 << 30,
            first in 0_u64..1 << 31,
            second in 1_u64..1 << 31,
        ) {
            let begin = Instant::now();
            let mut bucket = TokenBucket::new(rate, burst, begin);
            prop_assert!(bucket.try_take(first, begin));
            let mut now = begin;
            while !bucket.try_take(second, now) {
                let wait = bucket.wait(second, now);
                prop_assert!(!wait.is_zero());
                let early = now + wait.saturating_sub(Duration::from_nanos(1));
                prop_assert!(!bucket.clone().try_take(second, early));
                now += wait;
                if wait < MOST_WAIT {
                    prop_assert!(bucket.clone().try_take(second, now));
                }
            }
        }

        #[test]
        fn huge_values_do_not_overflow(
            rate: u64,
            burst: u64,
            steps in prop::collection::vec((0_u64..1 << 62, any::<u64>(), any::<bool>()), 1..50),
        ) {
            let mut now = Instant::now();
            let mut bucket = TokenBucket::new(rate, burst, now);
            for (seconds, tokens, force) in steps {
                now = now.checked_add(Duration::from_secs(seconds)).unwrap_or(now);
                prop_assert!(bucket.wait(tokens, now) <= MOST_WAIT);
                if force { bucket.take(tokens, now) } else { bucket.try_take(tokens, now); }
                bucket.change(tokens, rate, now);
            }
        }
    }
}
