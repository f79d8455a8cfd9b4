//! Order of the turns of a round.

/// The turns of round `round` among `turns`: each comes once.
///
/// A Latin square in which each turn follows each other one equally often (E. J. Williams,
/// "Experimental designs balanced for the estimation of residual effects of treatments", 1949):
/// after-effects of a turn, and slow changes of the machine, affect all turns equally. For an odd
/// number, two squares are needed, the second the first one backwards.
pub(super) fn order(round: usize, turns: usize) -> Vec<usize> {
    if turns == 0 {
        return Vec::new();
    }
    let (row, square) = (round % turns, round / turns);
    // 0, 1, n - 1, 2, n - 2, ...
    let first =
        (0..turns).map(|at| if at % 2 == 1 { at.div_ceil(2) } else { (turns - at / 2) % turns });
    let mut order: Vec<usize> = first.map(|turn| (turn + row) % turns).collect();
    if turns % 2 == 1 && square % 2 == 1 {
        order.reverse();
    }
    order
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    #[test]
    fn each_turn_comes_once_in_a_round_and_once_in_each_place() {
        for turns in 1..=6 {
            for place in 0..turns {
                let mut seen: Vec<usize> =
                    (0..turns).map(|round| order(round, turns)[place]).collect();
                seen.sort_unstable();
                assert_eq!(seen, (0..turns).collect::<Vec<_>>(), "{turns} turns, place {place}");
            }
            let mut once = order(1, turns);
            once.sort_unstable();
            assert_eq!(once, (0..turns).collect::<Vec<_>>());
        }
        assert!(order(3, 0).is_empty());
    }

    #[test]
    fn each_turn_follows_each_other_one_equally_often() {
        for (turns, rounds) in [(2, 2), (3, 6), (4, 4), (5, 10)] {
            let mut followed = BTreeMap::new();
            for round in 0..rounds {
                for pair in order(round, turns).windows(2) {
                    *followed.entry((pair[0], pair[1])).or_insert(0) += 1;
                }
            }
            assert_eq!(followed.len(), turns * (turns - 1), "{followed:?}");
            let counts: Vec<i32> = followed.into_values().collect();
            assert!(counts.iter().all(|count| *count == counts[0]), "{turns} turns: {counts:?}");
        }
    }
}
