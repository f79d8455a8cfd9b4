//! How fast machines grow.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// The time over which a rate is the mean, in milliseconds.
const WINDOW_MS: u64 = 10_000;
/// Most samples of a machine.
const MOST_SAMPLES: usize = 32;

/// Sizes of machines in the last seconds.
#[derive(Debug, Default)]
pub(super) struct Growth {
    samples: BTreeMap<String, VecDeque<Sample>>,
}

#[derive(Clone, Copy, Debug)]
struct Sample {
    at_ms: u64,
    bytes: u64,
}

impl Growth {
    /// Adds a size, with the time at which it was measured.
    pub(super) fn add(&mut self, machine: &str, at_ms: u64, bytes: u64) {
        let samples = self.samples.entry(machine.to_owned()).or_default();
        match samples.back() {
            // The same answer again.
            Some(last) if last.at_ms == at_ms => return,
            // A clock that has gone back.
            Some(last) if last.at_ms > at_ms => samples.clear(),
            _ => {}
        }
        samples.push_back(Sample { at_ms, bytes });
        let is_old = |sample: &Sample| sample.at_ms.saturating_add(WINDOW_MS) < at_ms;
        // Two are needed for a rate, also if one is old.
        while samples.len() > 2 && (samples.len() > MOST_SAMPLES || is_old(&samples[0])) {
            samples.pop_front();
        }
    }

    /// The rate of the last seconds in bytes per second; `None` before there are two sizes.
    pub(super) fn rate(&self, machine: &str) -> Option<i64> {
        let samples = self.samples.get(machine)?;
        let (first, last) = (samples.front()?, samples.back()?);
        let elapsed = i128::from(last.at_ms) - i128::from(first.at_ms);
        let grown = i128::from(last.bytes) - i128::from(first.bytes);
        let rate = (grown * 1000).checked_div(elapsed)?;
        Some(rate.clamp(i64::MIN.into(), i64::MAX.into()) as i64)
    }

    /// Forgets all machines but these.
    pub(super) fn retain(&mut self, machines: &BTreeSet<String>) {
        self.samples.retain(|machine, _| machines.contains(machine));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rate_is_the_mean_of_the_last_seconds() {
        let mut growth = Growth::default();
        assert_eq!(growth.rate("a"), None);
        growth.add("a", 0, 5_000_000);
        assert_eq!(growth.rate("a"), None);
        for second in 1..=20 {
            growth.add("a", 1000 * second, 5_000_000 + 300 * second);
            growth.add("a", 1000 * second, 0);
        }
        assert_eq!(growth.rate("a"), Some(300));
        for second in 21..=40 {
            growth.add("a", 1000 * second, 5_000_000 - 700 * second);
        }
        assert_eq!(growth.rate("a"), Some(-700));
        assert_eq!(growth.samples["a"].len(), 11);
    }

    #[test]
    fn absurd_numbers_and_clocks_do_no_harm() {
        let mut growth = Growth::default();
        growth.add("a", 0, 0);
        growth.add("a", 1, u64::MAX);
        assert_eq!(growth.rate("a"), Some(i64::MAX));
        growth.add("a", u64::MAX, 0);
        assert!(growth.rate("a").is_some());
        growth.add("a", 7, 1);
        assert_eq!(growth.rate("a"), None);
        for at_ms in 8..1000 {
            growth.add("a", at_ms, 1);
        }
        assert_eq!(growth.samples["a"].len(), MOST_SAMPLES);
        growth.retain(&BTreeSet::new());
        assert!(growth.samples.is_empty());
    }
}
