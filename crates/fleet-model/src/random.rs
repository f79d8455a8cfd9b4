//! Numbers that are the same on every machine and with every version of a library.

/// SplitMix64 (Steele, Lea, Flood: "Fast Splittable Pseudorandom Number Generators", 2014).
#[derive(Clone, Debug)]
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// A generator whose numbers do not depend on how many others are drawn from this one.
    pub(crate) fn split(&mut self) -> Self {
        Self(self.next())
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    }

    /// A number below `end`, which is not 0.
    pub(crate) fn below(&mut self, end: u64) -> u64 {
        self.next() % end
    }

    pub(crate) fn draw(&mut self, from: &Quantiles) -> u64 {
        from.at(self.below(1000))
    }
}

/// A distribution: values at some permilles of its cases, from 0 to 1000, straight in between.
/// (Integers alone: logarithms differ between libraries in their last digits.)
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

    #[test]
    fn numbers_are_those_of_the_paper() {
        // The first numbers of Vigna's splitmix64.c for the seed 1234567.
        let mut random = Random::new(1_234_567);
        let expected = [6_457_827_717_110_365_317, 3_203_168_211_198_807_973];
        assert_eq!([random.next(), random.next()], expected);
    }
}
