//! Who was refused, told at a limited rate: whoever reaches the port can be refused as often as he
//! likes.

use std::time::{Duration, Instant};

use super::error::printable;

/// Lines in a period.
const LINES: u32 = 5;
const PERIOD: Duration = Duration::from_secs(10);

/// Connections that a destination has refused.
#[derive(Debug, Default)]
pub struct Refusals {
    count: u64,
    last: Option<String>,
    period_start: Option<Instant>,
    lines: u32,
    suppressed: u64,
}

impl Refusals {
    /// How many.
    pub const fn count(&self) -> u64 {
        self.count
    }

    /// The last one: who, and why.
    pub fn last(&self) -> Option<&str> {
        self.last.as_deref()
    }

    pub(super) fn note(&mut self, peer: &str, problem: &str) {
        self.count += 1;
        let line = format!("a connection from {peer} was refused: {}", printable(problem, 400));
        if let Some(suppressed) = self.permit(Instant::now()) {
            tracing::warn!(suppressed, "{line}");
        }
        self.last = Some(line);
    }

    /// Whether a line may be logged; if so, how many have been left out since the last one.
    fn permit(&mut self, now: Instant) -> Option<u64> {
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
    fn a_flood_becomes_a_few_lines_and_all_are_counted() {
        let mut refusals = Refusals::default();
        let begin = Instant::now();
        let logged = (0..100).filter(|_| refusals.permit(begin).is_some()).count();
        assert_eq!(logged, 5);
        assert_eq!(refusals.permit(begin + PERIOD), Some(95));
        (0..100).for_each(|_| refusals.note("tcp:127.0.0.1:9", "it sent\x1b[2Jgarbage"));
        assert_eq!(refusals.count(), 100);
        let last = refusals.last().unwrap();
        assert!(
            last.contains("tcp:127.0.0.1:9") && last.contains("garbage") && !last.contains('\x1b'),
            "{last}"
        );
    }
}
