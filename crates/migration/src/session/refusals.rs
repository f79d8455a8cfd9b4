//! Log lines of refused connections at a limited rate: a peer that reaches the port can be refused as
//! often as it likes.

use std::time::Instant;

use ebb_local_io::LogLimit;

use super::reason::printable;

/// Connections that a destination has refused.
#[derive(Debug, Default)]
pub struct Refusals {
    count: u64,
    last: Option<String>,
    limit: LogLimit,
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
        if let Some(suppressed) = self.limit.permit(Instant::now()) {
            tracing::warn!(suppressed, "{line}");
        }
        self.last = Some(line);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_of_a_flood_are_counted() {
        let mut refusals = Refusals::default();
        (0..100).for_each(|_| refusals.note("tcp:127.0.0.1:9", "it sent\x1b[2Jgarbage"));
        assert_eq!(refusals.count(), 100);
        let last = refusals.last().unwrap();
        assert!(
            last.contains("tcp:127.0.0.1:9") && last.contains("garbage") && !last.contains('\x1b'),
            "{last}"
        );
    }
}
