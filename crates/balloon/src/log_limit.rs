//! A rate limit for log lines that a guest can cause, so that a guest cannot fill the host's log.

use std::time::{Duration, Instant};

/// Maximum number of lines per [`PERIOD`].
const LINES: u32 = 5;

/// See [`LINES`].
const PERIOD: Duration = Duration::from_secs(30);

/// Permits a few lines in each period. Transports use it for errors caused by a guest.
#[derive(Debug, Default)]
pub struct LogLimit {
    period_start: Option<Instant>,
    lines: u32,
    suppressed: u64,
}

impl LogLimit {
    /// Creates a limit under which nothing was logged yet.
    pub const fn new() -> Self {
        Self { period_start: None, lines: 0, suppressed: 0 }
    }

    /// Returns the number of lines suppressed since the last one if a line may be logged at `now`;
    /// else `None`.
    pub fn permit(&mut self, now: Instant) -> Option<u64> {
        let expired =
            self.period_start.is_none_or(|start| now.saturating_duration_since(start) >= PERIOD);
        if expired {
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

    /// Logs an error of the host; a driver can cause these at any rate.
    pub(crate) fn log_host_error(&mut self, error: &dyn std::error::Error) {
        if let Some(suppressed) = self.permit(Instant::now()) {
            tracing::error!(suppressed, "balloon: {error}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flood_becomes_a_few_lines() {
        let mut limit = LogLimit::new();
        let start = Instant::now();
        let written = (0..10_000).filter(|_| limit.permit(start).is_some()).count();
        assert_eq!(written, LINES as usize);
        assert_eq!(limit.permit(start + PERIOD), Some(10_000 - u64::from(LINES)));
    }
}
