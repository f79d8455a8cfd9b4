//! The time that the parts of a monitor's start take.

use std::time::Instant;

use crate::api::metrics::KindCount;

/// Parts of a start, one after the other.
#[derive(Debug)]
pub(super) struct StartParts {
    since: Instant,
    ended: Vec<KindCount>,
}

impl StartParts {
    /// The first part begins.
    pub fn new() -> Self {
        Self { since: Instant::now(), ended: Vec::new() }
    }

    /// A part ended at this time, and the next one began.
    pub fn end(&mut self, name: &'static str, at: Instant) {
        let us = at.saturating_duration_since(self.since).as_micros();
        self.ended.push(KindCount::new(name, u64::try_from(us).unwrap_or(u64::MAX)));
        self.since = at;
    }

    /// Microseconds that each part took.
    pub fn counts(&self) -> Vec<KindCount> {
        self.ended.clone()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn each_part_begins_where_the_one_before_it_ended() {
        let mut parts = StartParts::new();
        let begin = parts.since;
        parts.end("build", begin + Duration::from_millis(3));
        parts.end("load", begin + Duration::from_millis(10));
        assert_eq!(parts.counts(), [KindCount::new("build", 3000), KindCount::new("load", 7000)]);
    }
}
