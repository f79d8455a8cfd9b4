//! From turns to overheads: each turn is compared with those without a tracker in its own round.

use std::collections::BTreeMap;

use super::slots::{Slot, Turn, Workload};
use crate::harness::driver::Tracker;
use crate::report::statistics::{self, median};

/// Confidence level: the fraction of cases in which the interval contains the true value.
const CONFIDENCE: f64 = 0.95;
/// Minimum number of guests to estimate the variation between guests.
const FEWEST_BOOTS: usize = 3;

/// A turn compared with those without a tracker in its round.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Comparison {
    pub(super) boot: u32,
    pub(super) workload: Workload,
    /// Decrease of operations compared with those without a tracker, in percent.
    pub(super) overhead_percent: f64,
}

/// All comparisons of a turn: each with the mean of the other turns without a tracker in its round.
pub(super) fn comparisons(slots: &[Slot], turn: Turn) -> Vec<Comparison> {
    let compare = |slot: &Slot| {
        let round = |of: &Slot| (of.boot, of.workload, of.round);
        let without: Vec<f64> = slots
            .iter()
            .filter(|other| other.turn != turn && other.turn.tracker() == Tracker::Off)
            .filter(|other| round(other) == round(slot))
            .map(|other| other.ops_per_s)
            .collect();
        let mean = without.iter().sum::<f64>() / without.len() as f64;
        (mean > 0.0).then(|| Comparison {
            boot: slot.boot,
            workload: slot.workload,
            overhead_percent: (1.0 - slot.ops_per_s / mean) * 100.0,
        })
    };
    slots.iter().filter(|slot| slot.turn == turn).filter_map(compare).collect()
}

/// Summary of comparisons.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Overhead {
    /// The median.
    pub(super) percent: f64,
    /// The bounds of its confidence interval; `None` for a single comparison.
    pub(super) interval: Option<(f64, f64)>,
    /// Number of comparisons.
    pub(super) count: usize,
}

/// The median of comparisons with its confidence interval: by resampling guests, and comparisons
/// within them (bootstrap). With fewer than three guests, only comparisons are resampled, and the
/// variation between guests is not included.
pub(super) fn overhead(comparisons: &[Comparison]) -> Option<Overhead> {
    let percent = median(comparisons.iter().map(|comparison| comparison.overhead_percent))?;
    let mut by_boot: BTreeMap<u32, Vec<f64>> = BTreeMap::new();
    for comparison in comparisons {
        by_boot.entry(comparison.boot).or_default().push(comparison.overhead_percent);
    }
    let groups: Vec<Vec<f64>> = if by_boot.len() >= FEWEST_BOOTS {
        by_boot.into_values().collect()
    } else {
        vec![comparisons.iter().map(|comparison| comparison.overhead_percent).collect()]
    };
    let interval =
        if comparisons.len() > 1 { statistics::median_interval(&groups, CONFIDENCE) } else { None };
    Some(Overhead { percent, interval, count: comparisons.len() })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::harness::counters::Counters;
    use ebb_agent::page_faults::{FaultKind, TaskKind};

    const WORKLOAD: Workload =
        Workload { cpus: 1, kind: FaultKind::Fault1, tasks: TaskKind::Processes };

    fn slot(boot: u32, round: u32, turn: Turn, ops_per_s: f64) -> Slot {
        Slot {
            boot,
            workload: WORKLOAD,
            round,
            turn,
            place: 0,
            ops_per_s,
            seconds: 2,
            driver: Counters::default(),
            free_ns: None,
        }
    }

    #[test]
    fn a_turn_is_compared_with_its_own_round() {
        let bitmap = Turn::Of(Tracker::Bitmap);
        // The machine is twice as fast in the second round.
        let slots = [
            slot(0, 0, Turn::Baseline, 1000.0),
            slot(0, 0, bitmap, 980.0),
            slot(0, 1, bitmap, 1960.0),
            slot(0, 1, Turn::Baseline, 2000.0),
            slot(1, 0, bitmap, 500.0),
        ];
        let found: Vec<f64> =
            comparisons(&slots, bitmap).into_iter().map(|found| found.overhead_percent).collect();
        assert_eq!(found.len(), 2, "a turn without its baseline is not compared");
        assert!(found.iter().all(|percent| (percent - 2.0).abs() < 1e-9), "{found:?}");
    }

    #[test]
    fn others_are_compared_with_both_turns_without_a_tracker() {
        let (none, percpu) = (Turn::Of(Tracker::Off), Turn::Of(Tracker::Percpu));
        let slots = [
            slot(0, 0, Turn::Baseline, 1000.0),
            slot(0, 0, percpu, 990.0),
            slot(0, 0, none, 1200.0),
        ];
        let percent = |turn| comparisons(&slots, turn)[0].overhead_percent;
        assert!((percent(percpu) - 10.0).abs() < 1e-9);
        assert!((percent(none) + 20.0).abs() < 1e-9);
    }

    fn comparison(boot: u32, overhead_percent: f64) -> Comparison {
        Comparison { boot, workload: WORKLOAD, overhead_percent }
    }

    #[test]
    fn the_interval_contains_the_median_and_grows_with_the_variation_between_guests() {
        assert_eq!(overhead(&[]), None);
        assert_eq!(overhead(&[comparison(0, 1.5)]).unwrap().interval, None);
        let alike: Vec<Comparison> =
            (0..20).map(|at| comparison(at % 5, 1.0 + f64::from(at % 3))).collect();
        let apart: Vec<Comparison> =
            (0..20).map(|at| comparison(at % 5, 10.0 * f64::from(at % 5))).collect();
        let width = |comparisons: &[Comparison]| {
            let found = overhead(comparisons).unwrap();
            let (low, high) = found.interval.unwrap();
            assert!(low <= found.percent && found.percent <= high, "{found:?}");
            high - low
        };
        assert!(width(&alike) < width(&apart));
    }
}
