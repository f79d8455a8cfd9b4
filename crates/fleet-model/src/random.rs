//! Pseudorandom numbers that are the same on every machine and with every version of a library.

use rand_xoshiro::SplitMix64;
use rand_xoshiro::rand_core::{Rng as _, SeedableRng as _};

/// A source of numbers.
#[derive(Clone, Debug)]
pub(crate) struct Random(SplitMix64);

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        Self(SplitMix64::seed_from_u64(seed))
    }

    /// A source whose numbers do not depend on how many are drawn from this one later.
    pub(crate) fn split(&mut self) -> Self {
        Self::new(self.0.next_u64())
    }

    /// A number below `end`, which is not 0.
    pub(crate) fn below(&mut self, end: u64) -> u64 {
        self.0.next_u64() % end
    }

    pub(crate) fn draw(&mut self, from: &Quantiles) -> u64 {
        from.at(self.below(1000))
    }
}

/// A distribution by its quantiles: pairs of permille, from 0 to 1000, and value, with linear
/// interpolation. Integers only: logarithms differ between libraries in their last digits.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Quantiles(pub(crate) &'static [(u64, u64)]);

impl Quantiles {
    fn at(&self, permille: u64) -> u64 {
        let pairs = self.0.windows(2).map(|pair| (pair[0], pair[1]));
        for ((start, low), (end, high)) in pairs {
            if permille < end {
                return low + (high - low) * (permille - start) / (end - start);
            }
        }
        self.0.last().map_or(0, |last| last.1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_met() {
        let distribution = Quantiles(&[(0, 10), (500, 20), (900, 100), (1000, 1000)]);
        assert_eq!([0, 250, 500, 700, 999].map(|at| distribution.at(at)), [10, 15, 20, 60, 991]);
        let mut random = Random::new(1);
        let mut values: Vec<u64> = (0..10_000).map(|_| random.draw(&distribution)).collect();
        values.sort_unstable();
        assert!(values[0] >= 10 && values[9_999] < 1000);
        assert!(values[5_000].abs_diff(20) <= 2 && values[9_000].abs_diff(100) <= 25);
    }
}
