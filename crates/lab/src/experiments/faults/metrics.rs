//! Results of the turns, as metrics and tables of each series.

use ebb_agent::page_faults::{FaultKind, TaskKind};

use super::analysis::{Comparison, Overhead, comparisons, overhead};
use super::slots::{Slot, Turn, Workload};
use super::{CPUS, KINDS, SETTLE_S, TRACKERS};
use crate::harness::driver::Tracker;
use crate::report::figures::{DataTable, Value};
use crate::report::metrics::{self, Metric};
use crate::report::results::{MetricInfo, Series};
use crate::report::statistics::{median, number, quantile};

/// Results of a series.
struct Found {
    /// Its own turns.
    own: Vec<Slot>,
    /// Each compared with those without a tracker.
    compared: Vec<Comparison>,
}

impl Found {
    fn new(slots: &[Slot], turn: Turn) -> Self {
        let own = slots.iter().filter(|slot| slot.turn == turn).cloned().collect();
        Self { own, compared: comparisons(slots, turn) }
    }

    /// The overhead with this workload, or with all.
    fn overhead(&self, kind: Option<FaultKind>) -> Option<Overhead> {
        let of_kind = |one: &Comparison| kind.is_none_or(|kind| one.workload.kind == kind);
        overhead(&self.compared.iter().copied().filter(of_kind).collect::<Vec<_>>())
    }

    /// Pages per second and vCPU, with a workload.
    fn rate(&self, kind: FaultKind) -> Option<f64> {
        let of_kind = self.own.iter().filter(|slot| slot.workload.kind == kind);
        median(of_kind.map(|slot| slot.ops_per_s / f64::from(slot.workload.cpus)))
    }
}

/// All metrics: first those of all workloads together.
fn metrics() -> Vec<Metric<Found>> {
    let mut metrics = vec![Metric::higher(
        "ops_per_s",
        "Pages a second and vCPU, geometric mean of the workloads",
        "",
        |found: &Found| geometric_mean(KINDS.into_iter().filter_map(|(kind, ..)| found.rate(kind))),
    )];
    metrics.extend(overheads("", "all workloads", None));
    for (kind, name, title) in KINDS {
        let rate = format!("Pages a second and vCPU, {title}");
        metrics.push(Metric::higher(
            format!("{name}_ops_per_s"),
            rate,
            "",
            move |found: &Found| found.rate(kind),
        ));
        metrics.extend(overheads(&format!("{name}_"), title, Some(kind)));
    }
    metrics
}

fn overheads(prefix: &str, title: &str, kind: Option<FaultKind>) -> [Metric<Found>; 3] {
    let metric = |bound: &str, words: &str, value: fn(Overhead) -> Option<f64>| {
        let name = format!("{prefix}overhead{bound}_percent");
        Metric::lower(name, format!("{words}, {title}"), "%", move |found: &Found| {
            found.overhead(kind).and_then(value)
        })
    };
    [
        metric("", "Overhead", |found| Some(found.percent)),
        metric("_low", "its 95 % interval: from", |found| Some(found.interval?.0)),
        metric("_high", "its 95 % interval: to", |found| Some(found.interval?.1)),
    ]
}

/// Descriptions of the metrics.
pub(super) fn describe() -> Vec<MetricInfo> {
    metrics::describe(metrics())
}

/// Fills in metrics and tables of all series from the turns so far.
pub(super) fn fill(slots: &[Slot], all: &mut [Series]) {
    let noise_percent = noise_percent(slots);
    for series in all {
        let Some(tracker) = TRACKERS.into_iter().find(|tracker| tracker.name() == series.name)
        else {
            continue;
        };
        let turn = Turn::Of(tracker);
        let found = Found::new(slots, turn);
        metrics::measure(&metrics(), &found, series);
        series.tables = vec![workloads(&found)];
        series.details = vec![turns(slots, turn)];
        series.details.extend(activity(&found.own));
        series.notes.extend(noise_percent.map(|percent| {
            format!(
                "two turns without a tracker differed by {} % (median), including the influence of \
                 other programs on the machine",
                number(Some(percent))
            )
        }));
        if tracker != Tracker::Off {
            series.too_noisy = too_noisy(&found, noise_percent);
        }
    }
}

/// Noise of the comparison of two turns on this host: the difference of two turns without a tracker
/// in percent, if there were two.
fn noise_percent(slots: &[Slot]) -> Option<f64> {
    let same = comparisons(slots, Turn::Of(Tracker::Off));
    median(same.iter().map(|comparison| comparison.overhead_percent.abs()))
}

/// The workloads whose overhead is lost in the machine's noise: it does not exceed the difference
/// of two turns without a tracker, or its interval contains zero, or it has no interval.
fn too_noisy(found: &Found, noise_percent: Option<f64>) -> Vec<String> {
    let all = std::iter::once((None, "all workloads"))
        .chain(KINDS.into_iter().map(|(kind, _, title)| (Some(kind), title)));
    let line = |(kind, title): (Option<FaultKind>, &str)| {
        let Overhead { percent, interval, .. } = found.overhead(kind)?;
        let shown = |value: f64| number(Some(value));
        let reason = match (interval, noise_percent) {
            (_, Some(noise)) if percent.abs() <= noise => {
                format!("two turns without a tracker differ by {} %", shown(noise))
            }
            (Some((low, high)), _) if low <= 0.0 && 0.0 <= high => {
                format!("its 95 % interval is from {} to {}", shown(low), shown(high))
            }
            (None, _) => "it was measured once".to_owned(),
            _ => return None,
        };
        Some(format!("Overhead, {title}: {} % is not certain, {reason}", shown(percent)))
    };
    all.filter_map(line).collect()
}

pub(super) fn geometric_mean(values: impl Iterator<Item = f64>) -> Option<f64> {
    let logarithms: Vec<f64> = values.map(f64::ln).collect();
    (!logarithms.is_empty())
        .then(|| (logarithms.iter().sum::<f64>() / logarithms.len() as f64).exp())
}

pub(super) fn title_of(kind: FaultKind) -> &'static str {
    KINDS.into_iter().find(|(of, ..)| *of == kind).map_or("", |(_, _, title)| title)
}

fn tasks_of(tasks: TaskKind) -> &'static str {
    match tasks {
        TaskKind::Processes => "processes",
        TaskKind::Threads => "threads",
    }
}

/// Comparisons with one workload.
struct OfWorkload {
    workload: Workload,
    rates: Vec<f64>,
    overhead: Overhead,
    percents: Vec<f64>,
    by_guest: Vec<f64>,
}

/// Each workload, with the variation of comparisons and guests.
fn workloads(found: &Found) -> DataTable {
    let tasks = [TaskKind::Processes, TaskKind::Threads];
    let all = KINDS.into_iter().flat_map(|(kind, ..)| {
        CPUS.into_iter().flat_map(move |cpus| tasks.map(|tasks| Workload { cpus, kind, tasks }))
    });
    let of = |workload: Workload| {
        let is = |one: &&Comparison| one.workload == workload;
        let compared: Vec<Comparison> = found.compared.iter().filter(is).copied().collect();
        let own = found.own.iter().filter(|slot| slot.workload == workload);
        Some(OfWorkload {
            workload,
            rates: own.map(|slot| slot.ops_per_s).collect(),
            overhead: overhead(&compared)?,
            percents: compared.iter().map(|one| one.overhead_percent).collect(),
            by_guest: by_boot(&compared),
        })
    };
    let part = |values: &[f64], part| Value::from(quantile(values.iter().copied(), part));
    DataTable::of(
        "by workload, against no tracker",
        &all.filter_map(of).collect::<Vec<_>>(),
        &[
            ("workload", &|of| title_of(of.workload.kind).into()),
            ("vCPUs", &|of| of.workload.cpus.into()),
            ("tasks", &|of| tasks_of(of.workload.tasks).into()),
            ("pages/s", &|of| median(of.rates.iter().copied()).map(f64::round).into()),
            ("overhead, %", &|of| of.overhead.percent.into()),
            ("95 % from", &|of| of.overhead.interval.map(|(low, _)| low).into()),
            ("to", &|of| of.overhead.interval.map(|(_, high)| high).into()),
            ("quartile", &|of| part(&of.percents, 0.25)),
            ("quartile", &|of| part(&of.percents, 0.75)),
            ("lowest guest", &|of| part(&of.by_guest, 0.0)),
            ("highest guest", &|of| part(&of.by_guest, 1.0)),
            ("comparisons", &|of| (of.overhead.count as u64).into()),
        ],
    )
}

/// The median overhead in each guest.
fn by_boot(compared: &[Comparison]) -> Vec<f64> {
    let mut boots: Vec<u32> = compared.iter().map(|comparison| comparison.boot).collect();
    boots.sort_unstable();
    boots.dedup();
    let of = |boot: u32| compared.iter().filter(move |comparison| comparison.boot == boot);
    let middle = |boot| median(of(boot).map(|comparison| comparison.overhead_percent));
    boots.into_iter().filter_map(middle).collect()
}

/// Every turn of the series and of the baseline.
fn turns(slots: &[Slot], turn: Turn) -> DataTable {
    DataTable::of(
        "all turns",
        slots.iter().filter(|slot| slot.turn == turn || slot.turn == Turn::Baseline),
        &[
            ("guest", &|slot: &Slot| (slot.boot + 1).into()),
            ("workload", &|slot| title_of(slot.workload.kind).into()),
            ("vCPUs", &|slot| slot.workload.cpus.into()),
            ("tasks", &|slot| tasks_of(slot.workload.tasks).into()),
            ("round", &|slot| (slot.round + 1).into()),
            ("place", &|slot| (slot.place as u64 + 1).into()),
            ("turn", &|slot| slot.turn.name().into()),
            ("pages/s", &|slot| slot.ops_per_s.round().into()),
        ],
    )
}

/// Counters of the guests' driver per second of each workload, and the cost of a free by its own
/// clock.
fn activity(own: &[Slot]) -> Option<DataTable> {
    /// A mean and momentary values, which do not grow.
    const NO_COUNTERS: [&str; 4] = ["free_ns", "bitmap_set", "percpu_waiting", "isolated_now"];
    let mut names: Vec<&str> = own
        .iter()
        .flat_map(|slot| slot.driver.iter().filter(|(_, value)| *value > 0.0).map(|(name, _)| name))
        .filter(|name| !NO_COUNTERS.contains(name))
        .collect();
    names.sort_unstable();
    names.dedup();
    if names.is_empty() {
        return None;
    }
    let sum = |kind: FaultKind, name: &str| -> f64 {
        own.iter()
            .filter(|slot| slot.workload.kind == kind)
            .map(|slot| slot.driver.get(name).unwrap_or(0.0))
            .sum()
    };
    // A workload does not count the time in which a turn settles, but the driver does.
    let seconds = |kind: FaultKind| -> f64 {
        own.iter()
            .filter(|slot| slot.workload.kind == kind)
            .map(|slot| f64::from(slot.seconds + SETTLE_S))
            .sum::<f64>()
            .max(1.0)
    };
    let kinds = || {
        KINDS.into_iter().filter(|(kind, ..)| own.iter().any(|slot| slot.workload.kind == *kind))
    };
    let row = |name: String, value: &dyn Fn(FaultKind) -> f64| -> Vec<Value> {
        std::iter::once(Value::from(name))
            .chain(kinds().map(|(kind, ..)| Value::from(value(kind))))
            .collect()
    };
    let mut rows: Vec<Vec<Value>> = names
        .iter()
        .map(|name| row(format!("{name} a second"), &|kind| sum(kind, name) / seconds(kind)))
        .collect();
    let of_kind = |kind: FaultKind| own.iter().filter(move |slot| slot.workload.kind == kind);
    rows.push(row("ns a free".to_owned(), &|kind| {
        median(of_kind(kind).filter_map(|slot| slot.free_ns)).unwrap_or(0.0)
    }));
    let mut columns = vec!["the driver's counters".to_owned()];
    columns.extend(kinds().map(|(_, _, title)| title.to_owned()));
    Some(DataTable::new("activity of the driver", columns, rows))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::harness::counters::Counters;

    /// Guests of both sizes in which percpu costs 4 % with page_fault1 and nothing else costs
    /// anything.
    fn slots() -> Vec<Slot> {
        let mut slots = Vec::new();
        for boot in 0..6 {
            for (kind, ..) in KINDS {
                for turn in [Turn::Baseline, Turn::Of(Tracker::Off), Turn::Of(Tracker::Percpu)] {
                    let costs = turn == Turn::Of(Tracker::Percpu) && kind == FaultKind::Fault1;
                    let cpus = CPUS[boot as usize % 2];
                    slots.push(Slot {
                        boot,
                        workload: Workload { cpus, kind, tasks: TaskKind::Processes },
                        round: 0,
                        turn,
                        place: 0,
                        ops_per_s: f64::from(cpus) * if costs { 96_000.0 } else { 100_000.0 },
                        seconds: 1,
                        driver: Counters::of_driver("frees 100\nfree_ns 3\nlost 0\n"),
                        free_ns: Some(25.0),
                    });
                }
            }
        }
        slots
    }

    fn filled(name: &str) -> Series {
        let mut all = [Series::new(name, String::new())];
        fill(&slots(), &mut all);
        let [filled] = all;
        filled
    }

    #[test]
    fn overheads_are_shown_by_workload() {
        let filled = filled("percpu");
        let metric = |name: &str| filled.metrics[name].unwrap();
        assert_eq!(
            (metric("fault1_overhead_percent"), metric("fault2_overhead_percent")),
            (4.0, 0.0)
        );
        assert_eq!(
            (metric("fault1_overhead_low_percent"), metric("fault1_overhead_high_percent")),
            (4.0, 4.0)
        );
        assert_eq!(filled.metrics["fault1_ops_per_s"], Some(96_000.0));
        assert!(metric("ops_per_s") < 100_000.0);
        assert_eq!(filled.tables[0].rows.len(), 8, "four workloads in guests of two sizes");
    }

    #[test]
    fn the_noise_is_the_difference_of_two_turns_without_a_tracker() {
        let filled = filled("none");
        assert_eq!(filled.metrics["overhead_percent"], Some(0.0));
        assert!(filled.details[0].rows.iter().any(|row| row.contains(&Value::from("baseline"))));
        assert!(filled.notes[0].contains("differed by 0 %"), "{:?}", filled.notes);
    }

    #[test]
    fn an_overhead_below_the_noise_is_not_certain() {
        let noisy = filled("percpu").too_noisy;
        assert!(noisy.iter().all(|line| !line.contains("page_fault1:")), "{noisy:?}");
        assert!(
            noisy.contains(
                &"Overhead, page_fault2: 0 % is not certain, two turns without a tracker differ by \
                  0 %"
                    .to_owned()
            ),
            "{noisy:?}"
        );
        assert!(filled("none").too_noisy.is_empty());
    }

    #[test]
    fn the_drivers_counters_explain_the_cost_of_a_free() {
        let filled = filled("percpu");
        let activity = &filled.details[1];
        assert_eq!(activity.rows[0][..2], [Value::from("frees a second"), Value::from(25.0)]);
        assert_eq!(activity.rows.last().unwrap()[1], Value::from(25.0));
    }
}
