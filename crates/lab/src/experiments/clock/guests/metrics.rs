//! Results of a series about a guest's clock, as metrics, tables and curves.

use ebb_agent::clock_watch::{CpuReport, Steps};
use ebb_kvm_clock::ClockPolicy;

use super::interval::{Interval, Look};
use super::{Cost, Cycle, Kind, Record, lost};
use crate::report::figures::{Curve, DataTable, Drawing, Value};
use crate::report::metrics::Metric;
use crate::report::results::Series;
use crate::report::statistics::{median, quantile};

/// Tolerance for a guest's clock against its policy.
const REACH_NS: i64 = 1_000_000;
/// The 95th percentile, as a fraction.
const MOST: f64 = 0.95;
const MIB: f64 = (1_u64 << 20) as f64;

/// The metrics of these series only.
pub(in crate::experiments::clock) fn metrics() -> Vec<Metric<Record>> {
    type Of = fn(&Record) -> Option<f64>;
    let lower = |name, title, unit, value: Of| Metric::lower(name, title, unit, value);
    let mut metrics = vec![
        lower("backward_steps", "Steps backward seen by a reader", "", |record| {
            let (backward, real) =
                (record.steps(|cpu| cpu.backward)?, record.steps(|cpu| cpu.realtime_backward)?);
            Some((backward.count + real.count) as f64)
        }),
        lower("warps", "Warps between vCPUs", "", |record| {
            Some(record.steps(|cpu| cpu.warps)?.count as f64)
        }),
        lower("kernel_complaints", "Complaints of the guest's kernel", "", |record| {
            record.cycles.first()?;
            Some(record.complaints.len() as f64)
        }),
    ];
    for (kind, name, title) in [
        (Kind::Unstopped, "unstopped", "without a stop"),
        (Kind::Pause, "pause", "over a pause"),
        (Kind::Restore, "restore", "over a restore"),
    ] {
        metrics.extend(MEASURES.map(|(measure, words, value)| {
            let (name, title) = (format!("{name}_{measure}_ns"), format!("{words} {title}"));
            Metric::lower(name, title, "ns", move |record: &Record| {
                value(&record.distribution(kind))
            })
        }));
    }
    metrics.extend([
        lower("kvm_error_ns", "Largest error of KVM's clock over a stop", "ns", |record| {
            let errors = record.stops().filter_map(|cycle| cycle.stopped.kvm_error_ns);
            Some(errors.map(i64::unsigned_abs).max()? as f64)
        }),
        lower("gap_ns", "Largest gap of a reader beyond the stop", "ns", |record| {
            Some(record.stops().map(|cycle| cycle.gap_beyond_ns(record.policy)).max()? as f64)
        }),
        lower("snapshot_ms", "Time to write a snapshot", "ms", |record| {
            median(record.costs().map(|cost| cost.save_ms as f64))
        }),
        lower("snapshot_mib", "Snapshot on the disk", "MiB", |record| {
            median(record.costs().map(|cost| cost.stored_bytes as f64 / MIB))
        }),
        lower("restore_ms", "Restore to the guest's first answer", "ms", |record| {
            median(record.costs().map(|cost| cost.first_answer_ms))
        }),
    ]);
    metrics
}

/// Metrics of the errors of a kind of stops: name, title, value.
type Measure = (&'static str, &'static str, fn(&Distribution) -> Option<f64>);
const MEASURES: [Measure; 4] = [
    ("error", "Error", |errors| median(errors.sizes())),
    ("error_p95", "95 % of errors", |errors| quantile(errors.sizes(), MOST)),
    ("error_max", "Largest error", |errors| quantile(errors.sizes(), 1.0)),
    ("uncertainty", "Uncertainty of the error", |errors| median(errors.uncertainties())),
];

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

    fn count(&self, is: impl Fn(&Interval) -> bool) -> Value {
        Value::from(self.errors.iter().filter(|error| is(error)).count() as u64)
    }

    fn table(all: &[(Kind, Self)]) -> DataTable {
        let us = |ns: Option<f64>| Value::from(ns.unwrap_or(0.0) / 1e3);
        let middle =
            |errors: &Self| median(errors.errors.iter().map(|error| error.middle_ns() as f64));
        DataTable::of(
            "the guest's monotonic clock against the policy's promise",
            all,
            &[
                ("between two samples", &|(kind, _)| kind.name().into()),
                ("times", &|(_, errors)| errors.count(|_| true)),
                ("median with sign, us", &|(_, errors)| us(middle(errors))),
                ("median, us", &|(_, errors)| us(median(errors.sizes()))),
                ("95 %, us", &|(_, errors)| us(quantile(errors.sizes(), MOST))),
                ("largest, us", &|(_, errors)| us(quantile(errors.sizes(), 1.0))),
                ("known to within (median), us", &|(_, errors)| us(median(errors.uncertainties()))),
                ("(largest), us", &|(_, errors)| us(quantile(errors.uncertainties(), 1.0))),
                ("within 1 ms", &|(_, errors)| {
                    errors.count(|error| error.middle_ns().abs() <= REACH_NS)
                }),
                ("surely", &|(_, errors)| errors.count(|error| error.at_most_ns() <= REACH_NS)),
                ("surely not", &|(_, errors)| errors.count(|error| error.surely_ns() > REACH_NS)),
            ],
        )
    }
}

impl Record {
    fn distribution(&self, kind: Kind) -> Distribution {
        let of_kind = self.cycles.iter().filter(|cycle| cycle.kind == kind);
        Distribution { errors: of_kind.map(|cycle| cycle.error(self.policy)).collect() }
    }

    /// Invalid steps of a clock, of all readers; `None` if it was never sampled.
    fn steps(&self, which: impl Fn(&CpuReport) -> Steps) -> Option<Steps> {
        self.cycles.first()?;
        let all = self.watched.cpus.iter().map(which);
        Some(all.fold(Steps::default(), |all, steps| Steps {
            count: all.count + steps.count,
            largest: all.largest.max(steps.largest),
        }))
    }

    /// The smallest time that the guest has read.
    pub(in crate::experiments::clock) fn min_system_time_ns(&self) -> Option<f64> {
        let cycles = self.cycles.iter();
        let smallest = cycles.flat_map(|cycle| [cycle.before.smallest_ns, cycle.after.smallest_ns]);
        Some(smallest.min()? as f64)
    }

    /// The largest step of its clock, or certain jump ahead over a stop.
    pub(in crate::experiments::clock) fn max_jump_ns(&self) -> Option<f64> {
        let ahead = self.cycles.iter().map(|cycle| cycle.error(self.policy).low_ns).max()?;
        let steps = [
            self.steps(|cpu| cpu.backward)?.largest,
            self.steps(|cpu| cpu.realtime_backward)?.largest,
            self.steps(|cpu| cpu.warps)?.largest,
            ahead.max(0).unsigned_abs(),
        ];
        Some(steps.into_iter().max()? as f64)
    }

    /// The largest error of its real time.
    pub(in crate::experiments::clock) fn wall_error_ns(&self) -> Option<f64> {
        let errors = self.gained(|look| look.real).into_iter();
        Some(errors.map(|error| error.middle_ns().unsigned_abs()).max()? as f64)
    }

    fn costs(&self) -> impl Iterator<Item = Cost> {
        self.cycles.iter().filter_map(|cycle| cycle.cost)
    }

    /// Deviation of a clock of the guest from the policy since the first sample, at the end of each
    /// cycle: with `continue` it must have lost all stops so far.
    fn gained(&self, clock: fn(&Look) -> Interval) -> Vec<Interval> {
        let Some(first) = self.cycles.first() else { return Vec::new() };
        let mut late = Interval::ZERO;
        let since_first = self.cycles.iter().map(|cycle| {
            late = late.plus(lost(self.policy, cycle.stopped.time));
            clock(&cycle.after).minus(clock(&first.before)).plus(late)
        });
        since_first.collect()
    }

    /// Adds tables, curves and notes to the document.
    pub(in crate::experiments::clock) fn show(&self, series: &mut Series) {
        let all = Kind::ALL.map(|kind| (kind, self.distribution(kind)));
        let some: Vec<_> = all.into_iter().filter(|(_, all)| !all.errors.is_empty()).collect();
        series.tables.push(Distribution::table(&some));
        series.details.push(self.details());
        series.drawings.extend([
            drawing(
                "guest's monotonic time less the promise, since the first sample",
                &self.gained(|look| look.monotonic),
            ),
            self.errors(),
            drawing(
                "guest's real time less the promise, since the first sample",
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
            "the guest's clock source is {}; the policy promises {promise}; a stop lasts from the \
             instant at which the monitor read KVM's clock to the one for which it set it",
            self.clock_source
        ));
        let seen = self.cycles.iter().filter(|cycle| cycle.after.seen).count();
        series.notes.push(format!(
            "{seen} of {} samples were taken from the guest's memory, where readers on its vCPUs \
             write the clock, with the precision of the host's polling; others were taken over the \
             console{}, with the precision of the delays of commands and answers. The samples \
             without a stop show the resulting precision",
            self.cycles.len(),
            self.console_only.as_ref().map(|why| format!(" ({why})")).unwrap_or_default(),
        ));
        let disagree = self.cycles.iter().filter(|cycle| !cycle.stopped.agrees).count();
        if disagree > 0 {
            series.notes.push(format!(
                "the monitor's report of {disagree} stops is inconsistent with the times of the \
                 requests, which are used instead"
            ));
        }
        series
            .notes
            .push(format!("the readers in the guest made {} readings", self.watched.readings()));
        if let Some(first) = self.cycles.first() {
            series.notes.push(format!(
                "the guest's real time was {:+.1} ms ahead of the host's at the first sample; its \
                 error counts from there",
                ms(first.before.real.middle_ns())
            ));
        }
        let gap = |cycle: &Cycle| cycle.gap_beyond_ns(self.policy);
        let unstopped =
            self.cycles.iter().filter(|cycle| cycle.kind == Kind::Unstopped).map(gap).max();
        if let Some(unstopped_ns) = unstopped {
            series.notes.push(format!(
                "a reader sleeps between bursts and waits for its processor: its largest gap \
                 without a stop is {unstopped_ns} ns"
            ));
        }
        let faults = self.watched.faults();
        series.notes.extend(faults.into_iter().map(|fault| format!("the readers saw {fault}")));
        series
            .notes
            .extend(self.complaints.iter().map(|line| format!("the guest's kernel: {line}")));
    }

    fn details(&self) -> DataTable {
        type Of<'a> = (usize, &'a Cycle);
        let cost =
            |cycle: &Cycle, of: fn(&Cost) -> Value| cycle.cost.as_ref().map_or(Value::from(""), of);
        DataTable::of(
            "all samples",
            &self.cycles.iter().enumerate().collect::<Vec<_>>(),
            &[
                ("number", &|(number, _): &Of<'_>| (*number as u64 + 1).into()),
                ("between two samples", &|(_, cycle)| cycle.kind.name().into()),
                ("planned, ms", &|(_, cycle)| (cycle.planned.as_millis() as u64).into()),
                ("stopped, ns", &|(_, cycle)| cycle.stopped.time.middle_ns().into()),
                ("to within, ns", &|(_, cycle)| cycle.stopped.time.uncertainty_ns().into()),
                ("error of KVM's clock, ns", &|(_, cycle)| {
                    cycle.stopped.kvm_error_ns.map_or(Value::from(""), Value::from)
                }),
                ("error, ns", &|(_, cycle)| cycle.error(self.policy).middle_ns().into()),
                ("to within, ns", &|(_, cycle)| cycle.error(self.policy).uncertainty_ns().into()),
                ("precision of a sample, ns", &|(_, cycle)| {
                    cycle.after.monotonic.uncertainty_ns().into()
                }),
                ("real time ahead of the host's, ns", &|(_, cycle)| {
                    cycle.after.real.middle_ns().into()
                }),
                ("a reader's gap beyond the stop, ns", &|(_, cycle)| {
                    cycle.gap_beyond_ns(self.policy).into()
                }),
                ("saved in, ms", &|(_, cycle)| cost(cycle, |cost| cost.save_ms.into())),
                ("stored, bytes", &|(_, cycle)| cost(cycle, |cost| cost.stored_bytes.into())),
                ("guest memory in it, bytes", &|(_, cycle)| {
                    cost(cycle, |cost| cost.ram_bytes.into())
                }),
                ("restored to first answer, ms", &|(_, cycle)| {
                    cost(cycle, |cost| cost.first_answer_ms.into())
                }),
            ],
        )
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
            title: "error against the promise, by cycle".to_owned(),
            x: "looks".to_owned(),
            y: "ms".to_owned(),
            curves: Kind::ALL.map(curve).to_vec(),
        }
    }
}

fn ms(ns: i64) -> f64 {
    ns as f64 / 1e6
}

/// Intervals by their number: the estimate and both bounds.
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
