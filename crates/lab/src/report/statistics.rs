//! Summaries of a few measurements, and formatting of numbers.

/// The median: the middle value, or the mean of the two middle ones. `None` without values.
///
/// NaN values are ignored; they mean that nothing was measured.
pub fn median(values: impl IntoIterator<Item = f64>) -> Option<f64> {
    let mut sorted: Vec<f64> = values.into_iter().filter(|value| !value.is_nan()).collect();
    sorted.sort_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    match sorted.len() {
        0 => None,
        length if length % 2 == 1 => Some(sorted[middle]),
        _ => Some(f64::midpoint(sorted[middle - 1], sorted[middle])),
    }
}

/// The smallest value that at least this part (0 to 1) of all values does not exceed: 1 for the
/// largest. `None` without values.
///
/// NaN values are ignored.
pub fn quantile(values: impl IntoIterator<Item = f64>, part: f64) -> Option<f64> {
    let mut sorted: Vec<f64> = values.into_iter().filter(|value| !value.is_nan()).collect();
    sorted.sort_by(f64::total_cmp);
    let rank = (part * sorted.len() as f64).ceil().max(1.0) as usize;
    sorted.get(rank.min(sorted.len()).checked_sub(1)?).copied()
}

/// Rounds for a document: three decimals are below the noise of every measurement.
pub fn rounded(value: f64) -> f64 {
    (value * 1000.0).round() / 1000.0
}

/// Formats a value with its significant decimals; a dash if it was not measured.
pub fn number(value: Option<f64>) -> String {
    match value {
        None => "-".to_owned(),
        Some(value) if value.fract().abs() < 1e-9 => format!("{value:.0}"),
        Some(value) if value.abs() >= 100.0 => format!("{value:.0}"),
        Some(value) if value.abs() >= 10.0 => format!("{value:.1}"),
        Some(value) => format!("{value:.2}"),
    }
}

/// Number of resamples for an interval.
const DRAWS: usize = 2000;

/// An interval that contains the true median with this confidence (0 to 1), by resampling with
/// replacement (bootstrap): groups first, then as many values of each as it has. Groups vary as a
/// whole, for example the guests in which values were measured. `None` without values. The same
/// values give the same interval.
pub fn median_interval(groups: &[Vec<f64>], confidence: f64) -> Option<(f64, f64)> {
    let groups: Vec<&[f64]> =
        groups.iter().map(Vec::as_slice).filter(|group| !group.is_empty()).collect();
    let mut draw = Random(0);
    let mut medians = Vec::with_capacity(DRAWS);
    for _ in 0..DRAWS {
        let mut values = Vec::new();
        for _ in 0..groups.len() {
            let group = draw.one_of(&groups)?;
            for _ in 0..group.len() {
                values.push(*draw.one_of(group)?);
            }
        }
        medians.push(median(values)?);
    }
    let outside = (1.0 - confidence) / 2.0;
    Some((quantile(medians.iter().copied(), outside)?, quantile(medians, 1.0 - outside)?))
}

/// A deterministic pseudorandom generator (SplitMix64: G. Steele, D. Lea and C. Flood, "Fast
/// splittable pseudorandom number generators", 2014).
#[derive(Debug, Clone)]
pub struct Random(pub u64);

impl Random {
    /// The next number.
    pub fn draw(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// A number below `limit`, which is not 0.
    pub fn below(&mut self, limit: usize) -> usize {
        (self.draw() % limit as u64) as usize
    }

    fn one_of<'a, T>(&mut self, all: &'a [T]) -> Option<&'a T> {
        if all.is_empty() { None } else { all.get(self.below(all.len())) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn numbers_have_their_significant_decimals() {
        assert_eq!(number(None), "-");
        assert_eq!(number(Some(3.0)), "3");
        assert_eq!(number(Some(4.256)), "4.26");
        assert_eq!(number(Some(42.16)), "42.2");
        assert_eq!(number(Some(326.4)), "326");
    }

    #[test]
    fn the_median_of_odd_and_even_counts() {
        assert_eq!(median([]), None);
        assert_eq!(median([7.0]), Some(7.0));
        assert_eq!(median([3.0, 1.0, 2.0]), Some(2.0));
        assert_eq!(median([4.0, 1.0, 3.0, 2.0]), Some(2.5));
        assert_eq!(median([f64::NAN, 5.0]), Some(5.0));
    }

    #[test]
    fn quantiles_are_among_the_values() {
        let values = || (1..=20).map(f64::from);
        assert_eq!(quantile(values(), 0.95), Some(19.0));
        assert_eq!(quantile(values(), 1.0), Some(20.0));
        assert_eq!(quantile(values(), 0.0), Some(1.0));
        assert_eq!(quantile([3.0, f64::NAN], 0.5), Some(3.0));
        assert_eq!(quantile([], 0.5), None);
    }

    #[test]
    fn an_interval_is_narrow_for_many_values_that_agree() {
        assert_eq!(median_interval(&[], 0.95), None);
        assert_eq!(median_interval(&[vec![2.0], Vec::new()], 0.95), Some((2.0, 2.0)));
        let values = |count: u32| (0..count).map(|at| f64::from(at % 10)).collect::<Vec<_>>();
        let width = |groups: &[Vec<f64>]| {
            let (low, high) = median_interval(groups, 0.95).unwrap();
            high - low
        };
        assert!(width(&[values(1000)]) < width(&[values(20)]));
        // The precision of values that agree within their groups depends on the number of groups.
        let groups: Vec<Vec<f64>> = (0..10).map(|at| vec![f64::from(at); 100]).collect();
        assert!(width(&groups) > width(&[values(1000)]));
    }

    proptest! {
        #[test]
        fn at_most_half_of_the_values_lie_on_either_side(
            values in prop::collection::vec(-1e6..1e6f64, 1..50),
        ) {
            let middle = median(values.iter().copied()).unwrap();
            let below = values.iter().filter(|&&value| value < middle).count();
            let above = values.iter().filter(|&&value| value > middle).count();
            prop_assert!(below <= values.len() / 2 && above <= values.len() / 2);
        }
    }
}
