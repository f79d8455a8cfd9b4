//! Log lines that a guest can cause, at a limited rate: a guest must not be able to fill the host's log.

use std::sync::Mutex;
use std::sync::PoisonError;
use std::time::{Duration, Instant};

/// Lines in a burst, for each place in the code.
const BURST: u32 = 5;
/// One more line is allowed after this time.
const REFILL: Duration = Duration::from_secs(10);

/// A token bucket.
#[derive(Debug)]
pub struct RateLimit {
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    tokens: u32,
    refilled: Option<Instant>,
    suppressed: u64,
}

impl RateLimit {
    /// A full bucket.
    pub const fn new() -> Self {
        Self { state: Mutex::new(State { tokens: BURST, refilled: None, suppressed: 0 }) }
    }

    /// Whether a line may be written now; if so, how many were left out before it.
    pub fn permit(&self, now: Instant) -> Option<u64> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let since = now.saturating_duration_since(*state.refilled.get_or_insert(now));
        let refill = u32::try_from(since.as_secs() / REFILL.as_secs()).unwrap_or(u32::MAX);
        if refill > 0 {
            state.tokens = state.tokens.saturating_add(refill).min(BURST);
            state.refilled = Some(now);
        }
        if state.tokens == 0 {
            state.suppressed += 1;
            return None;
        }
        state.tokens -= 1;
        Some(std::mem::take(&mut state.suppressed))
    }
}

impl Default for RateLimit {
    fn default() -> Self {
        Self::new()
    }
}

/// Warns of something that the guest did, at most a few times a minute for each place that says so.
#[macro_export]
macro_rules! guest_log {
    ($($argument:tt)+) => {{
        static LIMIT: $crate::guest_log::RateLimit = $crate::guest_log::RateLimit::new();
        if let Some(suppressed) = LIMIT.permit(std::time::Instant::now()) {
            tracing::warn!(suppressed, $($argument)+);
        }
    }};
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flood_becomes_a_few_lines() {
        let limit = RateLimit::new();
        let start = Instant::now();
        let written = (0..10_000).filter(|_| limit.permit(start).is_some()).count();
        assert_eq!(written, BURST as usize);
        assert_eq!(limit.permit(start + REFILL), Some(10_000 - u64::from(BURST)));
        assert_eq!(limit.permit(start + REFILL), None);
    }
}
