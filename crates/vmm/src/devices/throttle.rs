//! Limits of a device's requests, as token buckets.
//!
//! A device asks before each request. When it may not proceed, it stops taking requests from its
//! queue; its thread continues by a timer. The lock is held for arithmetic only, so the API and a
//! reader of metrics do not wait for a device that waits for a disk.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use crate::config::RateLimits;
use crate::token_bucket::TokenBucket;

/// Without a burst of its own, a limit allows what it allows in a second, divided by this.
const BURSTS_A_SECOND: u64 = 10;

/// Whether a request may proceed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use]
pub enum Admission {
    /// It counts as done.
    Now,
    /// Not yet: leave it in its queue. [`Throttle::resume_at`] has the time.
    Later,
}

/// The limits of a device and what is left of them.
#[derive(Debug)]
pub struct Throttle(Mutex<State>);

#[derive(Debug)]
struct State {
    limits: RateLimits,
    bandwidth: Option<TokenBucket>,
    ops: Option<TokenBucket>,
    /// When the request at the head of the queue may proceed, while it waits.
    resume_at: Option<Instant>,
    delayed: u64,
}

impl Throttle {
    /// A device with `limits` that was idle.
    pub fn new(limits: RateLimits, now: Instant) -> Self {
        let (bandwidth, ops, resume_at) = (None, None, None);
        let throttle = Self(Mutex::new(State { limits, bandwidth, ops, resume_at, delayed: 0 }));
        throttle.set(limits, now);
        throttle
    }

    /// Changes the limits. Wake the device's thread afterwards.
    pub fn set(&self, limits: RateLimits, now: Instant) {
        let mut state = self.lock();
        state.limits = limits;
        change(&mut state.bandwidth, limits.bandwidth, limits.bandwidth_burst, now);
        change(&mut state.ops, limits.ops, limits.ops_burst, now);
        state.resume_at = None;
    }

    /// Asks for a request that transfers `bytes`.
    pub fn admit(&self, bytes: u64, now: Instant) -> Admission {
        let state = &mut *self.lock();
        let wait = |bucket: &mut Option<TokenBucket>, tokens| {
            bucket.as_mut().map(|bucket| bucket.wait(tokens, now)).unwrap_or_default()
        };
        let wait = wait(&mut state.bandwidth, bytes).max(wait(&mut state.ops, 1));
        if !wait.is_zero() {
            state.delayed += u64::from(state.resume_at.is_none());
            state.resume_at = Some(now + wait);
            return Admission::Later;
        }
        if let Some(bandwidth) = &mut state.bandwidth {
            bandwidth.take(bytes, now);
        }
        if let Some(ops) = &mut state.ops {
            ops.take(1, now);
        }
        state.resume_at = None;
        Admission::Now
    }

    /// Asks for a request of unknown size, which is counted by [`charge`](Self::charge) once it was
    /// made.
    pub fn ready(&self, now: Instant) -> Admission {
        let state = &mut *self.lock();
        let wait = |bucket: &mut Option<TokenBucket>| {
            bucket.as_mut().map(|bucket| bucket.wait(1, now)).unwrap_or_default()
        };
        let wait = wait(&mut state.bandwidth).max(wait(&mut state.ops));
        if wait.is_zero() {
            state.resume_at = None;
            return Admission::Now;
        }
        state.delayed += u64::from(state.resume_at.is_none());
        state.resume_at = Some(now + wait);
        Admission::Later
    }

    /// Counts a request that has transferred `bytes`. What exceeds the limits delays the next one.
    pub fn charge(&self, bytes: u64, now: Instant) {
        let state = &mut *self.lock();
        if let Some(bandwidth) = &mut state.bandwidth {
            bandwidth.take(bytes, now);
        }
        if let Some(ops) = &mut state.ops {
            ops.take(1, now);
        }
    }

    /// When the device may continue, if it waits.
    pub fn resume_at(&self) -> Option<Instant> {
        self.lock().resume_at
    }

    /// Ends a wait whose time has come; returns whether there was one.
    pub fn resume(&self, now: Instant) -> bool {
        let mut state = self.lock();
        let due = state.resume_at.is_some_and(|at| at <= now);
        if due {
            state.resume_at = None;
        }
        due
    }

    /// The limits.
    pub fn limits(&self) -> RateLimits {
        self.lock().limits
    }

    /// Number of requests that had to wait.
    pub fn delayed(&self) -> u64 {
        self.lock().delayed
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn change(bucket: &mut Option<TokenBucket>, rate: Option<u64>, burst: Option<u64>, now: Instant) {
    let Some(rate) = rate else {
        *bucket = None;
        return;
    };
    let burst = burst.unwrap_or(rate / BURSTS_A_SECOND);
    match bucket {
        Some(bucket) => bucket.change(rate, burst, now),
        None => *bucket = Some(TokenBucket::new(rate, burst, now)),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn both_limits_hold_and_each_delayed_request_is_counted_once() {
        let begin = Instant::now();
        let limits = RateLimits {
            bandwidth: Some(1000),
            ops: Some(10),
            ops_burst: Some(2),
            ..RateLimits::default()
        };
        let throttle = Throttle::new(limits, begin);
        assert_eq!(throttle.admit(50, begin), Admission::Now);
        assert_eq!(throttle.admit(50, begin), Admission::Now);
        assert_eq!(throttle.admit(50, begin), Admission::Later);
        assert_eq!(throttle.resume_at(), Some(begin + Duration::from_millis(100)));
        assert_eq!(throttle.admit(50, begin), Admission::Later);
        assert_eq!(throttle.delayed(), 1);
        assert!(!throttle.resume(begin));
        let later = begin + Duration::from_millis(100);
        assert!(throttle.resume(later));
        assert!(!throttle.resume(later));
        assert_eq!(throttle.admit(50, later), Admission::Now);
        // A refused request takes nothing from either bucket.
        let much_later = begin + Duration::from_secs(1);
        assert_eq!(throttle.admit(100, much_later), Admission::Now);
        assert_eq!(throttle.admit(100, much_later), Admission::Later);
        assert_eq!(throttle.admit(0, much_later), Admission::Now);
    }

    #[test]
    fn a_request_of_unknown_size_delays_the_next_ones() {
        let begin = Instant::now();
        let limits = RateLimits { bandwidth: Some(1000), ..RateLimits::default() };
        let throttle = Throttle::new(limits, begin);
        assert_eq!(throttle.ready(begin), Admission::Now);
        throttle.charge(1099, begin);
        assert_eq!(throttle.ready(begin), Admission::Later);
        // The burst of 100 leaves a debt of 999, and one more must be there.
        assert_eq!(throttle.resume_at(), Some(begin + Duration::from_secs(1)));
        assert_eq!((throttle.ready(begin), throttle.delayed()), (Admission::Later, 1));
        assert_eq!(throttle.ready(begin + Duration::from_secs(1)), Admission::Now);
        assert_eq!(throttle.resume_at(), None);
    }

    #[test]
    fn a_change_ends_the_wait() {
        let begin = Instant::now();
        let limits = RateLimits { ops: Some(1), ..RateLimits::default() };
        let throttle = Throttle::new(limits, begin);
        assert_eq!(throttle.admit(0, begin), Admission::Now);
        assert_eq!(throttle.admit(0, begin), Admission::Later);
        throttle.set(RateLimits::default(), begin);
        assert_eq!(throttle.resume_at(), None);
        assert_eq!(throttle.admit(u64::MAX, begin), Admission::Now);
        assert_eq!(throttle.limits(), RateLimits::default());
    }
}
