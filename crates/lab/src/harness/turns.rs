//! Series that take turns, since a machine's speed varies over time.

use crate::LabError;
use crate::report::results::Series;

/// Runs each series once in each round; returns what was found, by series, and the first error,
/// which ends the rounds.
///
/// Each series is the first one of a round about as often as the others.
pub fn in_turns<F>(
    rounds: u32,
    all: &mut [Series],
    mut turn: impl FnMut(&mut Series) -> Result<F, LabError>,
) -> (Vec<Vec<F>>, Result<(), LabError>) {
    let count = all.len();
    let mut found: Vec<Vec<F>> = all.iter().map(|_| Vec::new()).collect();
    for round in 0..rounds as usize {
        for index in (0..count).map(|position| (position + round) % count) {
            match turn(&mut all[index]) {
                Ok(one) => found[index].push(one),
                Err(error) => return (found, Err(error)),
            }
        }
    }
    (found, Ok(()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn series() -> Vec<Series> {
        ["a", "b", "c"].map(|name| Series::new(name, String::new())).into()
    }

    #[test]
    fn each_series_has_its_turn_in_each_round_and_another_one_begins() {
        let mut order = String::new();
        let (found, outcome) = in_turns(2, &mut series(), |series| {
            order.push_str(&series.name);
            Ok(order.len())
        });
        outcome.unwrap();
        assert_eq!(order, "abcbca");
        assert_eq!(found, [[1, 6], [2, 4], [3, 5]]);
    }

    #[test]
    fn an_error_ends_the_rounds_and_keeps_what_was_found() {
        let (found, outcome) = in_turns(3, &mut series(), |series| {
            if series.name == "c" { Err(LabError::NoDirectKvm("here".to_owned())) } else { Ok(1) }
        });
        assert!(outcome.is_err());
        assert_eq!(found, [vec![1], vec![1], vec![]]);
    }
}
