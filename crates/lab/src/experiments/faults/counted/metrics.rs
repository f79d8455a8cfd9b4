//! Counted instructions, as metrics and tables of each series.

use ebb_agent::page_faults::FaultKind;
use ebb_agent::page_faults::instructions::InstructionReport;

use super::{Count, series_name};
use crate::LabError;
use crate::experiments::faults::KINDS;
use crate::experiments::faults::metrics::{geometric_mean, title_of};
use crate::harness::driver::Tracker;
use crate::report::figures::DataTable;
use crate::report::metrics::{self, Metric};
use crate::report::results::{MetricInfo, Series};

/// A workload's counts beside those without a tracker.
#[derive(Debug, Clone, Copy)]
pub struct Compared {
    own: Count,
    without: Option<Count>,
}

impl Compared {
    /// Instructions for each page, of a part of the workload.
    fn each(count: &Count, part: impl Fn(&InstructionReport) -> u64) -> f64 {
        part(&count.report) as f64 / count.report.pages.max(1) as f64
    }

    /// The same beyond those without a tracker.
    fn extra(&self, part: impl Fn(&InstructionReport) -> u64) -> Option<f64> {
        Some(Self::each(&self.own, &part) - Self::each(self.without.as_ref()?, &part))
    }

    /// Instructions for each page.
    pub fn instructions(&self) -> f64 {
        Self::each(&self.own, all)
    }

    /// Instructions for each page beyond those without a tracker.
    pub fn extra_instructions(&self) -> Option<f64> {
        self.extra(all)
    }

    /// The same in percent of those without a tracker.
    pub fn overhead_percent(&self) -> Option<f64> {
        Some(self.extra(all)? / Self::each(self.without.as_ref()?, all) * 100.0)
    }

    /// Instructions of other tasks in the idle time beyond those without a tracker.
    fn extra_afterwards(&self) -> Option<i64> {
        Some(self.own.report.afterwards as i64 - self.without?.report.afterwards as i64)
    }
}

/// Faults and frees.
fn all(report: &InstructionReport) -> u64 {
    report.fault + report.free
}

/// Compares all workloads with those without a tracker, if these were counted.
pub fn compare(own: &[Count], without: Option<&[Count]>) -> Vec<Compared> {
    let of = |count: &Count| without?.iter().find(|other| other.kind == count.kind).copied();
    own.iter().map(|count| Compared { own: *count, without: of(count) }).collect()
}

/// Results of a series.
struct Found(Vec<Compared>);

impl Found {
    fn of(&self, kind: FaultKind) -> Option<&Compared> {
        self.0.iter().find(|compared| compared.own.kind == kind)
    }

    fn mean(&self) -> Option<f64> {
        geometric_mean(self.0.iter().map(Compared::instructions))
    }

    fn mean_without(&self) -> Option<f64> {
        let without = |compared: &Compared| Some(Compared::each(&compared.without?, all));
        geometric_mean(self.0.iter().filter_map(without))
    }
}

/// All metrics: first those of all workloads together. The overheads have the names of those in
/// time.
fn metrics() -> Vec<Metric<Found>> {
    let mut metrics: Vec<Metric<Found>> = vec![
        Metric::lower(
            "instructions_per_fault",
            "Instructions a page, geometric mean of the workloads",
            "",
            Found::mean,
        ),
        Metric::lower("overhead_percent", "Overhead, all workloads", "%", |found: &Found| {
            Some((found.mean()? / found.mean_without()? - 1.0) * 100.0)
        }),
    ];
    for (kind, name, title) in KINDS {
        let metric = |word: &str, words: &str, unit, value: fn(&Compared) -> Option<f64>| {
            let (name, title) = (format!("{name}_{word}"), format!("{words}, {title}"));
            Metric::lower(name, title, unit, move |found: &Found| found.of(kind).and_then(value))
        };
        metrics.extend([
            metric("instructions_per_fault", "Instructions a page", "", |of| {
                Some(of.instructions())
            }),
            metric("extra_instructions_per_fault", "Extra instructions a page", "", |of| {
                of.extra_instructions()
            }),
            metric("overhead_percent", "Overhead", "%", Compared::overhead_percent),
        ]);
    }
    metrics
}

/// Descriptions of the metrics.
pub(in crate::experiments::faults) fn describe() -> Vec<MetricInfo> {
    metrics::describe(metrics())
}

/// Fills in metrics, tables and errors of all series.
pub(super) fn fill(
    trackers: &[Tracker],
    counted: &[Result<Vec<Count>, LabError>],
    all: &mut [Series],
) {
    let of =
        |tracker: Tracker| trackers.iter().position(|of| *of == tracker).map(|at| &counted[at]);
    let without = of(Tracker::Off).and_then(|counts| counts.as_ref().ok()).map(Vec::as_slice);
    for tracker in trackers.iter().copied() {
        let series = all.iter_mut().find(|series| series.name == series_name(tracker));
        match (series, of(tracker)) {
            (Some(series), Some(Ok(own))) => {
                let found = Found(compare(own, without));
                metrics::measure(&metrics(), &found, series);
                series.tables = vec![workloads(&found)];
            }
            (Some(series), Some(Err(error))) => series.error = Some(error.to_string()),
            _ => {}
        }
    }
}

/// Each workload with its parts.
fn workloads(found: &Found) -> DataTable {
    let each = |of: &Compared, part: fn(&InstructionReport) -> u64| Compared::each(&of.own, part);
    DataTable::of(
        "instructions a page, and beyond those without a tracker",
        &found.0,
        &[
            ("workload", &|of: &Compared| title_of(of.own.kind).into()),
            ("fault", &|of| each(of, |report| report.fault).into()),
            ("free", &|of| each(of, |report| report.free).into()),
            ("extra a fault", &|of| of.extra(|report| report.fault).into()),
            ("extra a free", &|of| of.extra(|report| report.free).into()),
            ("overhead, %", &|of| of.overhead_percent().into()),
            ("other tasks afterwards", &|of| of.own.report.afterwards.into()),
            ("extra of these", &|of| of.extra_afterwards().into()),
        ],
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::figures::Value;

    fn counts(free: u64, afterwards: u64) -> Vec<Count> {
        let report = InstructionReport { pages: 100, fault: 90_000, free, afterwards };
        KINDS.map(|(kind, ..)| Count { kind, report }).into()
    }

    fn filled(trackers: &[Tracker]) -> Vec<Series> {
        let counted: Vec<Result<Vec<Count>, LabError>> = trackers
            .iter()
            .map(|tracker| match tracker {
                Tracker::Off => Ok(counts(10_000, 500)),
                Tracker::Percpu => Ok(counts(12_000, 900)),
                _ => Err(LabError::TestGuest("has ended".to_owned())),
            })
            .collect();
        let mut all: Vec<Series> = trackers
            .iter()
            .map(|tracker| Series::new(series_name(*tracker), String::new()))
            .collect();
        fill(trackers, &counted, &mut all);
        all
    }

    #[test]
    fn overheads_are_relative_to_the_guest_without_a_tracker() {
        let all = filled(&[Tracker::Off, Tracker::Percpu, Tracker::Bitmap]);
        let metric = |at: usize, name: &str| all[at].metrics[name];
        assert_eq!(metric(0, "instructions_per_fault"), Some(1000.0));
        assert_eq!(metric(0, "overhead_percent"), Some(0.0));
        assert_eq!(metric(1, "overhead_percent"), Some(2.0));
        assert_eq!(metric(1, "fault2_extra_instructions_per_fault"), Some(20.0));
        let row: Vec<String> = all[1].tables[0].rows[0].iter().map(Value::shown).collect();
        assert_eq!(row, ["page_fault1", "900", "120", "0", "20", "2", "900", "400"]);
        assert!(all[2].error.as_ref().unwrap().contains("has ended"));
    }

    #[test]
    fn without_that_guest_there_are_no_overheads() {
        let all = filled(&[Tracker::Percpu]);
        assert_eq!(all[0].metrics["fault1_instructions_per_fault"], Some(1020.0));
        assert_eq!(all[0].metrics["overhead_percent"], None);
        assert_eq!(all[0].metrics["fault1_overhead_percent"], None);
    }
}
