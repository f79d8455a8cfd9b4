//! A rate limit for log lines about events that other processes and hosts can cause at any rate.

use std::time::{Duration, Instant};

/// Maximum number of lines in a period.
const LINES: u32 = 5;
const PERIOD: Duration = Duration::from_secs(10);

/// Permits a few lines in each period.
#[derive(Debug, Default)]
pub struct LogLimit {
    period_start: Option<Instant>,
    lines: u32,
    suppressed: u64,
}

impl LogLimit {
    /// Returns the number of lines suppressed since the last one if a line may be logged; else
    /// `None`.
    pub fn permit(&mut self, now: Instant) -> Option<u64> {
        if self.period_start.is_none_or(|start| now.saturating_duration_since(start) >= PERIOD) {
            self.period_start = Some(now);
            self.lines = 0;
        }
        if self.lines == LINES {
            self.suppressed += 1;
            return None;
        }
        self.lines += 1;
        Some(std::mem::take(&mut self.suppressed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flood_becomes_a_few_lines() {
        let (mut limit, begin) = (LogLimit::default(), Instant::now());
        let logged = (0..100).filter(|_| limit.permit(begin).is_some()).count();
        assert_eq!(logged, 5);
        assert_eq!(limit.permit(begin + PERIOD), Some(95));
    }
}
