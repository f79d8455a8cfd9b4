//! What a series about a guest's clock found, as metrics, tables and curves.

use ebb_agent::clock_watch::{CpuReport, Steps};
use ebb_kvm_clock::ClockPolicy;

use super::interval::{Interval, Look};
use super::{Cycle, Kind, Record, lost};
use crate::report::figures::{Curve, DataTable, Drawing, Value};
use crate::report::results::{Better, MetricInfo, Series, rounded};
use crate::report::statistics::{median, quantile};

/// The reach of a guest's clock against its policy's promise.
const REACH_NS: i64 = 1_000_000;
/// The part of errors that is not above the 95th percentile.
const MOST: f64 = 0.95;
const MIB: f64 = (1_u64 << 20) as f64;

/// The metrics that only these series have.
pub(in crate::experiments::clock) fn metrics() -> Vec<MetricInfo> {
    let lower =
        |name: &str, title: &str, unit: &str| MetricInfo::new(name, title, unit, Better::Lower);
    let mut metrics = vec![
        lower("backward_steps", "Steps backward seen by a reader", ""),
        lower("warps", "Warps between vCPUs", ""),
        lower("kernel_complaints", "Complaints of the guest's kernel", ""),
    ];
    for (kind, title) in [
        (Kind::Unstopped, "without a stop"),
        (Kind::Pause, "over a pause"),
        (Kind::Restore, "over a restore"),
    ] {
        for (measure, words) in MEASURES {
            metrics.push(lower(&name(kind, measure), &format!("{words} {title}"), "ns"));
        }
    }
    metrics.extend([
        lower("kvm_error_ns", "Largest error of KVM's clock over a stop", "ns"),
        lower("gap_ns", "Largest gap of a reader beyond the stop", "ns"),
        lower("snapshot_ms", "Time to write a snapshot", "ms"),
        lower("snapshot_mib", "Snapshot on the disk", "MiB"),
        lower("restore_ms", "Restore to the guest's first answer", "ms"),
    ]);
    metrics
}

/// What is told of the errors of a kind of stops, and how it is called.
const MEASURES: [(&str, &str); 4] = [
    ("error", "Error"),
    ("error_p95", "95 % of errors"),
    ("error_max", "Largest error"),
    ("uncertainty", "Uncertainty of the error"),
];

fn name(kind: Kind, measure: &str) -> String {
    let kind = match kind {
        Kind::Unstopped => "unstopped",
        Kind::Pause => "pause",
        Kind::Restore => "restore",
    };
    format!("{kind}_{measure}_ns")
}

/// Errors of one kind of stops.
struct Distribution {
    errors: Vec<Interval>,
}

impl Distribution {
    fn sizes(&self) -> impl Iterator<Item = f64> {
        self.errors.iter().map(|error| error.middle_ns().abs() as f64)
    }

    fn uncertainties(&self) -> impl Iterator<Item = f64> {
        self.errors.iter().map(|error| error.uncertainty_ns() as f64)
    }

    /// In the order of [`MEASURES`].
    fn measures(&self) -> [Option<f64>; 4] {
        [
            median(self.sizes()),
            quantile(self.sizes(), MOST),
            quantile(self.sizes(), 1.0),
            median(self.uncertainties()),
        ]
    }

    fn count(&self, is: impl Fn(&Interval) -> bool) -> Value {
        Value::from(self.errors.iter().filter(|error| is(error)).count() as u64)
    }

    fn row(&self, kind: Kind) -> Vec<Value> {
        let us = |value: Option<f64>| Value::from(rounded(value.unwrap_or(0.0) / 1e3));
        let [middle, most, largest, uncertainty] = self.measures();
        vec![
            Value::from(kind.name()),
            self.count(|_| true),
            us(median(self.errors.iter().map(|error| error.middle_ns() as f64))),
            us(middle),
            us(most),
            us(largest),
            us(uncertainty),
            us(quantile(self.uncertainties(), 1.0)),
            self.count(|error| error.middle_ns().abs() <= REACH_NS),
            self.count(|error| error.at_most_ns() <= REACH_NS),
            self.count(|error| error.surely_ns() > REACH_NS),
        ]
    }
}

const DISTRIBUTION_COLUMNS: [&str; 11] = [
    "between two looks",
    "times",
    "median with sign, us",
    "median, us",
    "95 %, us",
    "largest, us",
    "known to within (median), us",
    "(largest), us",
    "within 1 ms",
    "surely",
    "surely not",
];

impl Record {
    fn distribution(&self, kind: Kind) -> Distribution {
        let of_kind = self.cycles.iter().filter(|cycle| cycle.kind == kind);
        Distribution { errors: of_kind.map(|cycle| cycle.error(self.policy)).collect() }
    }

    /// Steps that a clock must not make, of all readers.
    fn steps(&self, which: impl Fn(&CpuReport) -> Steps) -> Steps {
        self.watched.cpus.iter().map(which).fold(Steps::default(), |all, steps| Steps {
            count: all.count + steps.count,
            largest: all.largest.max(steps.largest),
        })
    }

    /// What a clock of the guest has gained on the promise since the first look, at the end of each
    /// cycle: with `continue` it is to lose all stops so far.
    fn gained(&self, clock: fn(&Look) -> Interval) -> Vec<Interval> {
        let Some(first) = self.cycles.first() else { return Vec::new() };
        let mut late = Interval::ZERO;
        let since_first = self.cycles.iter().map(|cycle| {
            late = late.plus(lost(self.policy, cycle.stopped.time));
            clock(&cycle.after).minus(clock(&first.before)).plus(late)
        });
        since_first.collect()
    }

    pub(super) fn tell(&self, series: &mut Series) {
        let mut put =
            |name: &str, value: Option<f64>| series.metrics.insert(name.to_owned(), value);
        if !self.cycles.is_empty() {
            let backward = self.steps(|cpu| cpu.backward);
            let real = self.steps(|cpu| cpu.realtime_backward);
            let warps = self.steps(|cpu| cpu.warps);
            put("backward_steps", Some((backward.count + real.count) as f64));
            put("warps", Some(warps.count as f64));
            put("kernel_complaints", Some(self.complaints.len() as f64));
            let smallest = self
                .cycles
                .iter()
                .flat_map(|cycle| [cycle.before.smallest_ns, cycle.after.smallest_ns]);
            put("min_system_time_ns", smallest.min().map(|ns| ns as f64));
            let forward =
                self.cycles.iter().map(|cycle| cycle.error(self.policy).low_ns).max().unwrap_or(0);
            let steps =
                [backward.largest, real.largest, warps.largest, forward.max(0).unsigned_abs()];
            put("max_jump_ns", steps.into_iter().max().map(|ns| ns as f64));
            let wall = self
                .gained(|look| look.real)
                .into_iter()
                .map(|error| error.middle_ns().unsigned_abs());
            put("wall_error_ns", wall.max().map(|ns| ns as f64));
        }
        let mut rows = Vec::new();
        for kind in Kind::ALL {
            let distribution = self.distribution(kind);
            for ((measure, _), value) in MEASURES.into_iter().zip(distribution.measures()) {
                put(&name(kind, measure), value);
            }
            if !distribution.errors.is_empty() {
                rows.push(distribution.row(kind));
            }
        }
        let gap = self.stops().map(|cycle| cycle.gap_beyond_ns(self.policy)).max();
        put("gap_ns", gap.map(|ns| ns as f64));
        let kvm = self
            .stops()
            .filter_map(|cycle| cycle.stopped.kvm_error_ns)
            .map(i64::unsigned_abs)
            .max();
        put("kvm_error_ns", kvm.map(|ns| ns as f64));
        let costs = || self.cycles.iter().filter_map(|cycle| cycle.cost);
        put("snapshot_ms", median(costs().map(|cost| cost.save_ms as f64)));
        put("snapshot_mib", median(costs().map(|cost| rounded(cost.stored_bytes as f64 / MIB))));
        put("restore_ms", median(costs().map(|cost| rounded(cost.first_answer_ms))));
        series.tables.push(DataTable {
            title: "the guest's monotonic clock against the policy's promise".to_owned(),
            columns: DISTRIBUTION_COLUMNS.map(str::to_owned).to_vec(),
            rows,
        });
        series.details.push(self.details());
        series.drawings.extend([
            drawing(
                "guest's monotonic time less the promise, since the first look",
                &self.gained(|look| look.monotonic),
            ),
            self.errors(),
            drawing(
                "guest's real time less the promise, since the first look",
                &self.gained(|look| look.real),
            ),
        ]);
        self.note(series);
    }

    fn stops(&self) -> impl Iterator<Item = &Cycle> {
        self.cycles.iter().filter(|cycle| cycle.kind != Kind::Unstopped)
    }

    fn note(&self, series: &mut Series) {
        let promise = match self.policy {
            ClockPolicy::Continue => "the host's time less the stops",
            ClockPolicy::CatchUp => "the host's time",
        };
        series.notes.push(format!(
            "the guest's clock source is {}; the policy promises {promise}; a stop lasts from and to the instants for which the \
             monitor read and set KVM's clock",
            self.clock_source
        ));
        let seen = self.cycles.iter().filter(|cycle| cycle.after.seen).count();
        series.notes.push(format!(
            "{seen} of {} looks saw the guest's clock in its memory, where readers on its vCPUs write it, and are known to within the \
             time between the host's looks there; others went over the console{}, and are known to within the ways of commands and answers. \
             The same without a stop shows what that is worth",
            self.cycles.len(),
            self.console_only.as_ref().map(|why| format!(" ({why})")).unwrap_or_default(),
        ));
        let disagree = self.cycles.iter().filter(|cycle| !cycle.stopped.agrees).count();
        if disagree > 0 {
            series.notes.push(format!(
                "what the monitor says of {disagree} stops cannot be, by when it was asked for them; they count by that"
            ));
        }
        series
            .notes
            .push(format!("the readers in the guest made {} readings", self.watched.readings()));
        if let Some(first) = self.cycles.first() {
            series.notes.push(format!(
                "the guest's real time was {:+.1} ms ahead of the host's when it was looked at first; its error counts from there",
                ms(first.before.real.middle_ns())
            ));
        }
        let gap = |cycle: &Cycle| cycle.gap_beyond_ns(self.policy);
        let unstopped =
            self.cycles.iter().filter(|cycle| cycle.kind == Kind::Unstopped).map(gap).max();
        if let Some(unstopped_ns) = unstopped {
            series.notes.push(format!(
                "a reader sleeps between its bursts and waits for its processor: without a stop its largest gap is {unstopped_ns} ns"
            ));
        }
        let faults = self.watched.faults();
        series.notes.extend(faults.into_iter().map(|fault| format!("the readers saw {fault}")));
        series
            .notes
            .extend(self.complaints.iter().map(|line| format!("the guest's kernel: {line}")));
    }

    fn details(&self) -> DataTable {
        let row = |(number, cycle): (usize, &Cycle)| {
            let error = cycle.error(self.policy);
            let cost =
                |of: fn(&super::Cost) -> Value| cycle.cost.as_ref().map_or(Value::from(""), of);
            vec![
                Value::from(number as u64 + 1),
                Value::from(cycle.kind.name()),
                Value::from(cycle.planned.as_millis() as u64),
                Value::from(cycle.stopped.time.middle_ns()),
                Value::from(cycle.stopped.time.uncertainty_ns()),
                cycle.stopped.kvm_error_ns.map_or(Value::from(""), Value::from),
                Value::from(error.middle_ns()),
                Value::from(error.uncertainty_ns()),
                Value::from(cycle.after.monotonic.uncertainty_ns()),
                Value::from(cycle.after.real.middle_ns()),
                Value::from(cycle.gap_beyond_ns(self.policy)),
                cost(|cost| Value::from(cost.save_ms)),
                cost(|cost| Value::from(cost.stored_bytes)),
                cost(|cost| Value::from(cost.ram_bytes)),
                cost(|cost| Value::from(rounded(cost.first_answer_ms))),
            ]
        };
        let columns = [
            "number",
            "between two looks",
            "planned, ms",
            "stopped, ns",
            "to within, ns",
            "error of KVM's clock, ns",
            "error, ns",
            "to within, ns",
            "a look is good to, ns",
            "real time ahead of the host's, ns",
            "a reader's gap beyond the stop, ns",
            "saved in, ms",
            "stored, bytes",
            "guest memory in it, bytes",
            "restored to first answer, ms",
        ];
        DataTable {
            title: "all looks".to_owned(),
            columns: columns.map(str::to_owned).to_vec(),
            rows: self.cycles.iter().enumerate().map(row).collect(),
        }
    }

    /// The error of each cycle.
    fn errors(&self) -> Drawing {
        let curve = |kind: Kind| Curve {
            name: kind.name().to_owned(),
            points: (1_u32..)
                .zip(&self.cycles)
                .filter(|(_, cycle)| cycle.kind == kind)
                .map(|(number, cycle)| {
                    (f64::from(number), ms(cycle.error(self.policy).middle_ns()))
                })
                .collect(),
        };
        Drawing {
            title: "error against the promise, each by itself".to_owned(),
            x: "looks".to_owned(),
            y: "ms".to_owned(),
            curves: Kind::ALL.map(curve).to_vec(),
        }
    }
}

fn ms(ns: i64) -> f64 {
    ns as f64 / 1e6
}

/// Intervals by their number: the guess and both bounds.
fn drawing(title: &str, intervals: &[Interval]) -> Drawing {
    let curve = |name: &str, of: fn(Interval) -> i64| Curve {
        name: name.to_owned(),
        points: (1_u32..)
            .zip(intervals)
            .map(|(number, interval)| (f64::from(number), ms(of(*interval))))
            .collect(),
    };
    Drawing {
        title: title.to_owned(),
        x: "looks".to_owned(),
        y: "ms".to_owned(),
        curves: vec![
            curve("measured", Interval::middle_ns),
            curve("at least", |interval| interval.low_ns),
            curve("at most", |interval| interval.high_ns),
        ],
    }
}
