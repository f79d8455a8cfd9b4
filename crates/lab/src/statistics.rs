//! Summaries of a handful of measurements.

/// The median: the middle value, or the mean of the two middle ones. `None` without values.
///
/// Values that are not numbers (NaN) are left out; they say that nothing was measured.
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

/// The median of measurements of which some never came: one that is missing counts as later than each that came,
/// so that the median is `None` when most of them are missing.
///
/// For times with a limit: leaving the missing ones out would make a series look faster the more often it failed.
pub fn median_or_never(values: impl IntoIterator<Item = Option<f64>>) -> Option<f64> {
    median(values.into_iter().map(|value| value.unwrap_or(f64::INFINITY))).filter(|value| value.is_finite())
}

/// The smallest value that at least this part (0 to 1) of all values does not exceed: 1 for the largest. `None` without values.
///
/// Values that are not numbers (NaN) are left out.
pub fn quantile(values: impl IntoIterator<Item = f64>, part: f64) -> Option<f64> {
    let mut sorted: Vec<f64> = values.into_iter().filter(|value| !value.is_nan()).collect();
    sorted.sort_by(f64::total_cmp);
    let rank = (part * sorted.len() as f64).ceil().max(1.0) as usize;
    sorted.get(rank.min(sorted.len()).checked_sub(1)?).copied()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_middle_of_odd_and_even_counts() {
        assert_eq!(median([]), None);
        assert_eq!(median([7.0]), Some(7.0));
        assert_eq!(median([3.0, 1.0, 2.0]), Some(2.0));
        assert_eq!(median([4.0, 1.0, 3.0, 2.0]), Some(2.5));
        assert_eq!(median([f64::NAN, 5.0]), Some(5.0));
    }

    #[test]
    fn missing_values_count_as_late() {
        assert_eq!(median_or_never([Some(1.0), None, Some(2.0)]), Some(2.0));
        assert_eq!(median_or_never([Some(1.0), None, None]), None);
        assert_eq!(median_or_never([Some(1.0), None]), None);
        assert_eq!(median_or_never([]), None);
    }

    #[test]
    fn quantiles_are_values_that_were_there() {
        let values = || (1..=20).map(f64::from);
        assert_eq!(quantile(values(), 0.95), Some(19.0));
        assert_eq!(quantile(values(), 1.0), Some(20.0));
        assert_eq!(quantile(values(), 0.0), Some(1.0));
        assert_eq!(quantile([3.0, f64::NAN], 0.5), Some(3.0));
        assert_eq!(quantile([], 0.5), None);
    }

    proptest! {
        #[test]
        fn at_most_half_of_the_values_lie_on_either_side(values in prop::collection::vec(-1e6..1e6f64, 1..50)) {
            let middle = median(values.iter().copied()).unwrap();
            let below = values.iter().filter(|&&value| value < middle).count();
            let above = values.iter().filter(|&&value| value > middle).count();
            prop_assert!(below <= values.len() / 2 && above <= values.len() / 2);
        }
    }
}
