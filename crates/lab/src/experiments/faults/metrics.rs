//! What the turns come to, as metrics and tables of each series.

use ebb_agent::page_faults::{FaultKind, TaskKind};

use super::analysis::{Comparison, Overhead, comparisons, overhead};
use super::slots::{Slot, Turn, Workload};
use super::{CPUS, KINDS, SETTLE_S, TRACKERS};
use crate::harness::driver::Tracker;
use crate::report::figures::{DataTable, Value};
use crate::report::results::{Better, MetricInfo, Series, rounded};
use crate::report::statistics::{median, quantile};

/// What the metrics of all workloads together are called.
const ALL: &str = "";

/// All metrics.
pub(super) fn metrics() -> Vec<MetricInfo> {
    let mut metrics = vec![MetricInfo::new(
        "ops_per_s",
        "Pages a second and vCPU, geometric mean of the workloads",
        "",
        Better::Higher,
    )];
    let groups = std::iter::once((ALL, "all workloads"))
        .chain(KINDS.into_iter().map(|(_, name, title)| (name, title)));
    for (name, title) in groups {
        if name != ALL {
            let title = format!("Pages a second and vCPU, {title}");
            metrics.push(MetricInfo::new(&named(name, "ops_per_s"), &title, "", Better::Higher));
        }
        for (measure, words) in [
            ("", "Overhead"),
            ("_low", "its 95 % interval: from"),
            ("_high", "its 95 % interval: to"),
        ] {
            let metric = named(name, &format!("overhead{measure}_percent"));
            metrics.push(MetricInfo::new(
                &metric,
                &format!("{words}, {title}"),
                "%",
                Better::Lower,
            ));
        }
    }
    metrics
}

fn named(group: &str, metric: &str) -> String {
    if group == ALL { metric.to_owned() } else { format!("{group}_{metric}") }
}

/// Fills in metrics and tables of all series from the turns so far.
pub(super) fn series(slots: &[Slot], all: &mut [Series]) {
    let noise = noise(slots);
    for series in all {
        let Some(tracker) = TRACKERS.into_iter().find(|tracker| tracker.name() == series.name)
        else {
            continue;
        };
        one(slots, Turn::Of(tracker), series);
        series.notes.extend(noise.clone());
    }
}

/// What the comparison of two turns is worth on this host, if there were two without a tracker.
fn noise(slots: &[Slot]) -> Option<String> {
    let same = comparisons(slots, Turn::Of(Tracker::Off));
    let percent = median(same.iter().map(|comparison| comparison.overhead_percent.abs()))?;
    Some(format!(
        "two turns without a tracker differed by {} % (median); anything else that the machine does goes into that",
        crate::report::table::number(Some(percent))
    ))
}

fn one(slots: &[Slot], turn: Turn, series: &mut Series) {
    let compared = comparisons(slots, turn);
    let own: Vec<&Slot> = slots.iter().filter(|slot| slot.turn == turn).collect();
    let rate = |kind: FaultKind| {
        let of_kind = own.iter().filter(|slot| slot.workload.kind == kind);
        median(of_kind.map(|slot| slot.ops_per_s / f64::from(slot.workload.cpus)))
    };
    let of_kind = |kind: FaultKind| -> Vec<Comparison> {
        compared.iter().copied().filter(|comparison| comparison.workload.kind == kind).collect()
    };
    let mut metrics: Vec<(String, Option<f64>)> = Vec::new();
    let mut tell = |group: &str, found: Option<Overhead>| {
        let bound = |of: fn((f64, f64)) -> f64| found.and_then(|found| found.interval).map(of);
        metrics.push((named(group, "overhead_percent"), found.map(|found| found.percent)));
        metrics.push((named(group, "overhead_low_percent"), bound(|(low, _)| low)));
        metrics.push((named(group, "overhead_high_percent"), bound(|(_, high)| high)));
    };
    tell(ALL, overhead(&compared));
    for (kind, name, _) in KINDS {
        tell(name, overhead(&of_kind(kind)));
    }
    metrics.push((
        "ops_per_s".to_owned(),
        geometric_mean(KINDS.into_iter().filter_map(|(kind, ..)| rate(kind))),
    ));
    metrics.extend(KINDS.map(|(kind, name, _)| (named(name, "ops_per_s"), rate(kind))));
    series.metrics = metrics.into_iter().map(|(name, value)| (name, value.map(rounded))).collect();
    series.tables = vec![workloads(&own, &compared)];
    series.details = vec![turns(slots, turn)];
    series.details.extend(activity(&own));
}

fn geometric_mean(values: impl Iterator<Item = f64>) -> Option<f64> {
    let logarithms: Vec<f64> = values.map(f64::ln).collect();
    (!logarithms.is_empty())
        .then(|| (logarithms.iter().sum::<f64>() / logarithms.len() as f64).exp())
}

fn title_of(kind: FaultKind) -> &'static str {
    KINDS.into_iter().find(|(of, ..)| *of == kind).map_or("", |(_, _, title)| title)
}

fn tasks_of(tasks: TaskKind) -> &'static str {
    match tasks {
        TaskKind::Processes => "processes",
        TaskKind::Threads => "threads",
    }
}

fn number(value: Option<f64>) -> Value {
    value.map_or_else(|| Value::from("-"), |value| Value::from(rounded(value)))
}

/// Each workload by itself, with how comparisons and guests vary.
fn workloads(own: &[&Slot], compared: &[Comparison]) -> DataTable {
    let mut rows = Vec::new();
    for (kind, _, title) in KINDS {
        for cpus in CPUS {
            for tasks in [TaskKind::Processes, TaskKind::Threads] {
                let workload = Workload { cpus, kind, tasks };
                let of: Vec<Comparison> = compared
                    .iter()
                    .copied()
                    .filter(|comparison| comparison.workload == workload)
                    .collect();
                let Some(found) = overhead(&of) else { continue };
                let rates =
                    own.iter().filter(|slot| slot.workload == workload).map(|slot| slot.ops_per_s);
                let percents = || of.iter().map(|comparison| comparison.overhead_percent);
                let guests = by_boot(&of);
                rows.push(vec![
                    Value::from(title),
                    Value::from(u64::from(cpus)),
                    Value::from(tasks_of(tasks)),
                    number(median(rates).map(f64::round)),
                    number(Some(found.percent)),
                    number(found.interval.map(|(low, _)| low)),
                    number(found.interval.map(|(_, high)| high)),
                    number(quantile(percents(), 0.25)),
                    number(quantile(percents(), 0.75)),
                    number(quantile(guests.iter().copied(), 0.0)),
                    number(quantile(guests, 1.0)),
                    Value::from(found.count as u64),
                ]);
            }
        }
    }
    let columns = [
        "workload",
        "vCPUs",
        "tasks",
        "pages/s",
        "overhead, %",
        "95 % from",
        "to",
        "quartile",
        "quartile",
        "lowest guest",
        "highest guest",
        "comparisons",
    ];
    DataTable {
        title: "by workload, against no tracker".to_owned(),
        columns: columns.map(str::to_owned).into(),
        rows,
    }
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
    let columns = ["guest", "workload", "vCPUs", "tasks", "round", "place", "turn", "pages/s"]
        .map(str::to_owned);
    let rows =
        slots.iter().filter(|slot| slot.turn == turn || slot.turn == Turn::Baseline).map(|slot| {
            vec![
                Value::from(u64::from(slot.boot) + 1),
                Value::from(title_of(slot.workload.kind)),
                Value::from(u64::from(slot.workload.cpus)),
                Value::from(tasks_of(slot.workload.tasks)),
                Value::from(u64::from(slot.round) + 1),
                Value::from(slot.place as u64 + 1),
                Value::from(slot.turn.name()),
                Value::from(slot.ops_per_s.round()),
            ]
        });
    DataTable { title: "all turns".to_owned(), columns: columns.into(), rows: rows.collect() }
}

/// What the guests' driver counted in a second of each workload, and what a free cost by its own
/// clock.
fn activity(own: &[&Slot]) -> Option<DataTable> {
    /// A mean and numbers of the moment, which do not grow.
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
    // The time in which a turn settles is not in what its workload counts, but in what the driver
    // does.
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
            .chain(kinds().map(|(kind, ..)| Value::from(rounded(value(kind)))))
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
    Some(DataTable { title: "what the driver did".to_owned(), columns, rows })
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

    fn told(name: &str) -> Series {
        let mut all = [Series::new(name, String::new())];
        series(&slots(), &mut all);
        let [told] = all;
        told
    }

    #[test]
    fn every_metric_that_is_described_is_there() {
        let described: Vec<String> = metrics().into_iter().map(|info| info.name).collect();
        let told = told("percpu");
        assert_eq!(told.metrics.len(), described.len());
        assert!(described.iter().all(|name| told.metrics.contains_key(name)));
    }

    #[test]
    fn overheads_are_told_by_workload() {
        let told = told("percpu");
        let metric = |name: &str| told.metrics[name].unwrap();
        assert_eq!(
            (metric("fault1_overhead_percent"), metric("fault2_overhead_percent")),
            (4.0, 0.0)
        );
        assert_eq!(
            (metric("fault1_overhead_low_percent"), metric("fault1_overhead_high_percent")),
            (4.0, 4.0)
        );
        assert_eq!(told.metrics["fault1_ops_per_s"], Some(96_000.0));
        assert!(metric("ops_per_s") < 100_000.0);
        assert_eq!(told.tables[0].rows.len(), 8, "four workloads in guests of two sizes");
    }

    #[test]
    fn the_noise_is_that_of_two_turns_without_a_tracker() {
        let told = told("none");
        assert_eq!(told.metrics["overhead_percent"], Some(0.0));
        assert!(told.details[0].rows.iter().any(|row| row.contains(&Value::from("baseline"))));
        assert!(told.notes[0].contains("differed by 0 %"), "{:?}", told.notes);
    }

    #[test]
    fn the_drivers_counters_explain_what_a_free_costs() {
        let told = told("percpu");
        let activity = &told.details[1];
        assert_eq!(activity.rows[0][..2], [Value::from("frees a second"), Value::from(25.0)]);
        assert_eq!(activity.rows.last().unwrap()[1], Value::from(25.0));
    }
}
