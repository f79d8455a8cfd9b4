//! What the migrations of a series come to, as metrics and a table, and how the series compare.

use std::collections::BTreeMap;

use ebb_vmm::api::MigrationRound;

use super::ALL_PAGES;
use super::link_check::Carried;
use super::rounds::{Case, Moved};
use crate::report::figures::{DataTable, Value};
use crate::report::results::{Better, MetricInfo, Series, rounded};
use crate::report::statistics::median;

/// A metric that each migration has.
struct Measure {
    /// Its name before and behind the case.
    name: (&'static str, &'static str),
    title: &'static str,
    unit: &'static str,
    cases: &'static [Case],
    of: fn(&Moved) -> Option<f64>,
}

const ALL: &[Case] = &[Case::Fast, Case::Slow, Case::Busy];
const FAST_AND_BUSY: &[Case] = &[Case::Fast, Case::Busy];
const FAST_ONLY: &[Case] = &[Case::Fast];

const MEASURES: [Measure; 9] = [
    Measure {
        name: ("total", "_ms"),
        title: "Total time",
        unit: "ms",
        cases: ALL,
        of: |moved| Some(moved.report.total_ms),
    },
    Measure {
        name: ("downtime", "_ms"),
        title: "Downtime",
        unit: "ms",
        cases: ALL,
        of: |moved| Some(moved.report.downtime_ms),
    },
    Measure {
        name: ("bytes_sent", ""),
        title: "Bytes sent",
        unit: "",
        cases: ALL,
        of: |moved| Some(moved.report.bytes_sent as f64),
    },
    Measure {
        name: ("sent_to_used", ""),
        title: "Bytes sent for each byte that the guest uses",
        unit: "",
        cases: ALL,
        of: |moved| {
            (moved.used_bytes > 0).then(|| moved.report.bytes_sent as f64 / moved.used_bytes as f64)
        },
    },
    Measure {
        name: ("rounds", ""),
        title: "Rounds",
        unit: "",
        cases: FAST_AND_BUSY,
        of: |moved| Some(moved.report.rounds as f64),
    },
    Measure {
        name: ("pages_skipped", ""),
        title: "Pages not sent since the guest named them as free",
        unit: "",
        cases: FAST_AND_BUSY,
        of: |moved| Some(moved.report.pages_skipped? as f64),
    },
    Measure {
        name: ("source_cpu", "_ms"),
        title: "Processor time at the source",
        unit: "ms",
        cases: FAST_AND_BUSY,
        of: |moved| moved.report.source_cpu_ms,
    },
    Measure {
        name: ("used_bytes", ""),
        title: "Memory that the guest uses",
        unit: "bytes",
        cases: FAST_ONLY,
        of: |moved| Some(moved.used_bytes as f64),
    },
    Measure {
        name: ("answered", "_ms"),
        title: "Until the guest answers at the other end",
        unit: "ms",
        cases: FAST_AND_BUSY,
        of: |moved| Some(moved.answered_ms),
    },
];

/// What a series gains over that which sends all pages: the metric and what it is made from.
const GAINS: [(&str, &str, &str); 2] = [
    ("times_faster", "total_ms", "Times as fast as all-pages"),
    ("times_fewer_bytes", "bytes_sent", "All-pages sends so many times as much"),
];

impl Measure {
    fn metric(&self, case: Case) -> String {
        let (before, behind) = self.name;
        let case = match case {
            Case::Fast => "",
            Case::Slow => "_1g",
            Case::Busy => "_load",
        };
        format!("{before}{case}{behind}")
    }

    fn title(&self, case: Case) -> String {
        match case {
            Case::Fast => self.title.to_owned(),
            Case::Slow => format!("{}, over 1 Gbit/s", self.title),
            Case::Busy => format!("{}, under load", self.title),
        }
    }
}

/// All metrics; those without a case in their title are of an idle guest over the fast link.
pub(super) fn metrics() -> Vec<MetricInfo> {
    let mut metrics = Vec::new();
    for case in ALL {
        for measure in MEASURES.iter().filter(|measure| measure.cases.contains(case)) {
            let (name, title) = (measure.metric(*case), measure.title(*case));
            metrics.push(MetricInfo::new(&name, &title, measure.unit, Better::Lower));
        }
    }
    metrics.extend(GAINS.map(|(name, _, title)| MetricInfo::new(name, title, "", Better::Higher)));
    let link = |name: &str, rate: &str| {
        MetricInfo::new(name, &format!("Plain transfer, {rate}"), "Mbit/s", Better::Higher)
    };
    metrics.extend([
        link("link_10g_mbit_s", "link of 10 Gbit/s"),
        link("link_1g_mbit_s", "link of 1 Gbit/s"),
        link("link_unshaped_mbit_s", "link without a limit"),
    ]);
    metrics
}

/// Fills in what is known without the other series.
pub(super) fn series(moved: &[Moved], carried: Carried, series: &mut Series) {
    let mut metrics: BTreeMap<String, Option<f64>> = BTreeMap::new();
    for case in ALL {
        for measure in MEASURES.iter().filter(|measure| measure.cases.contains(case)) {
            let those = moved.iter().filter(|moved| moved.case == *case);
            metrics
                .insert(measure.metric(*case), median(those.filter_map(measure.of)).map(rounded));
        }
    }
    metrics.extend(GAINS.map(|(name, ..)| (name.to_owned(), None)));
    metrics.extend([
        ("link_10g_mbit_s".to_owned(), Some(carried.fast)),
        ("link_1g_mbit_s".to_owned(), Some(carried.slow)),
        ("link_unshaped_mbit_s".to_owned(), Some(carried.unshaped)),
    ]);
    series.metrics = metrics;
    series.details.push(table(moved));
    series.details.extend(rounds_table(moved));
}

/// Every migration by itself.
fn table(moved: &[Moved]) -> DataTable {
    const COLUMNS: [&str; 14] = [
        "link",
        "guest",
        "total, ms",
        "downtime, ms",
        "sent, MiB",
        "used by the guest, MiB",
        "sent / used",
        "rounds",
        "pages of data",
        "zero",
        "not held",
        "named free",
        "source CPU, ms",
        "answered, ms",
    ];
    let mib = |bytes: u64| Value::from(rounded(bytes as f64 / f64::from(1 << 20)));
    let count = |pages: Option<u64>| pages.map_or_else(|| Value::from("-"), Value::from);
    let row = |moved: &Moved| {
        let report = &moved.report;
        vec![
            Value::from(moved.case.rate().describe()),
            Value::from(moved.case.load()),
            Value::from(rounded(report.total_ms)),
            Value::from(rounded(report.downtime_ms)),
            mib(report.bytes_sent),
            mib(moved.used_bytes),
            Value::from(rounded(report.bytes_sent as f64 / moved.used_bytes.max(1) as f64)),
            Value::from(report.rounds),
            count(report.pages_data),
            count(report.pages_zero),
            count(report.pages_discarded),
            count(report.pages_skipped),
            report.source_cpu_ms.map_or_else(|| Value::from("-"), |ms| Value::from(rounded(ms))),
            Value::from(rounded(moved.answered_ms)),
        ]
    };
    DataTable {
        title: "migrations".to_owned(),
        columns: COLUMNS.map(str::to_owned).into(),
        rows: moved.iter().map(row).collect(),
    }
}

/// Every round of every migration, where the monitor tells them.
fn rounds_table(moved: &[Moved]) -> Option<DataTable> {
    const COLUMNS: [&str; 11] = [
        "link",
        "guest",
        "round",
        "ms",
        "of that waiting for the guest's free pages",
        "pages of data",
        "zero",
        "not held",
        "named free",
        "sent, MiB",
        "pages written meanwhile",
    ];
    let row = |moved: &Moved, round: &MigrationRound| {
        vec![
            Value::from(moved.case.rate().describe()),
            Value::from(moved.case.load()),
            Value::from(round.round),
            Value::from(round.elapsed_ms),
            Value::from(round.hint_wait_ms),
            Value::from(round.pages_data),
            Value::from(round.pages_zero),
            Value::from(round.pages_discarded),
            Value::from(round.pages_skipped),
            Value::from(rounded(round.bytes_sent as f64 / f64::from(1 << 20))),
            Value::from(round.pages_written),
        ]
    };
    let rows: Vec<_> = moved
        .iter()
        .flat_map(|moved| moved.report.rounds_detail.iter().map(move |round| row(moved, round)))
        .collect();
    let columns = COLUMNS.map(str::to_owned).into();
    (!rows.is_empty()).then(|| DataTable {
        title: "rounds of the migrations".to_owned(),
        columns,
        rows,
    })
}

/// Says of each series how much better it is than sending all pages.
pub(super) fn compare(all: &mut [Series]) {
    let Some(base) = all.iter().find(|series| series.name == ALL_PAGES) else { return };
    let base = base.metrics.clone();
    for series in all {
        for (gain, metric, _) in GAINS {
            let value = |metrics: &BTreeMap<String, Option<f64>>| {
                metrics.get(metric).copied().flatten().filter(|value| *value > 0.0)
            };
            let ratio =
                value(&base).zip(value(&series.metrics)).map(|(base, this)| rounded(base / this));
            series.metrics.insert(gain.to_owned(), ratio);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::experiments::migrate::strategies::Report;

    fn moved(case: Case, total_ms: f64) -> Moved {
        let report = Report {
            total_ms,
            downtime_ms: 9.0,
            bytes_sent: total_ms as u64 * 1000,
            rounds: 2,
            pages_skipped: Some(7),
            source_cpu_ms: Some(80.0),
            rounds_detail: vec![MigrationRound {
                round: 1,
                pages_data: 5,
                ..MigrationRound::default()
            }],
            ..Report::default()
        };
        Moved { case, report, answered_ms: total_ms + 20.0, used_bytes: 100_000 }
    }

    fn told(name: &str, total_ms: f64) -> Series {
        let mut told = Series::new(name, String::new());
        let moves = [
            moved(Case::Fast, total_ms),
            moved(Case::Fast, total_ms),
            moved(Case::Slow, 10.0 * total_ms),
            moved(Case::Busy, 2.0 * total_ms),
        ];
        series(&moves, Carried { unshaped: 3.0, fast: 2.0, slow: 1.0 }, &mut told);
        told
    }

    #[test]
    fn every_metric_that_is_described_is_there() {
        let described: Vec<String> = metrics().into_iter().map(|info| info.name).collect();
        let mut all = [told(ALL_PAGES, 400.0), told("hints", 100.0)];
        compare(&mut all);
        for series in &all {
            assert_eq!(series.metrics.len(), described.len());
            assert!(
                described.iter().all(|name| series.metrics[name].is_some()),
                "{:?}",
                series.metrics
            );
        }
        let metrics = &all[1].metrics;
        assert_eq!((metrics["total_ms"], metrics["total_1g_ms"]), (Some(100.0), Some(1000.0)));
        assert_eq!(
            (metrics["bytes_sent_load"], metrics["sent_to_used"]),
            (Some(200_000.0), Some(1.0))
        );
        assert_eq!((metrics["times_faster"], metrics["times_fewer_bytes"]), (Some(4.0), Some(4.0)));
        assert_eq!(all[1].details[0].rows.len(), 4);
        assert_eq!(all[1].details[1].rows.len(), 4);
        assert!(
            all[1]
                .details
                .iter()
                .all(|table| table.rows.iter().all(|row| row.len() == table.columns.len()))
        );
    }

    #[test]
    fn without_all_pages_there_is_nothing_to_compare_with() {
        let mut alone = [told("hints", 100.0)];
        compare(&mut alone);
        assert_eq!(alone[0].metrics["times_faster"], None);
    }
}
