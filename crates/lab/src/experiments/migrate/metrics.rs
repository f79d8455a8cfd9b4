//! Results of the migrations of a series, as metrics and a table, and the comparison of series.

use ebb_vmm::api::MigrationRound;

use super::ALL_PAGES;
use super::link_check::Carried;
use super::rounds::{Case, Moved};
use crate::report::figures::DataTable;
use crate::report::metrics::{self, Metric};
use crate::report::results::{MetricInfo, Series};

/// Results of a series.
#[derive(Debug)]
struct Found {
    moved: Vec<Moved>,
    carried: Carried,
}

/// A metric that each migration has: its name before and after the case, title, unit, the cases in
/// which it is shown, value.
type Measure = (
    (&'static str, &'static str),
    &'static str,
    &'static str,
    &'static [Case],
    fn(&Moved) -> Option<f64>,
);

const ALL: &[Case] = &[Case::Fast, Case::Slow, Case::Busy];
const FAST_AND_BUSY: &[Case] = &[Case::Fast, Case::Busy];
const FAST_ONLY: &[Case] = &[Case::Fast];

const MEASURES: [Measure; 9] = [
    (("total", "_ms"), "Total time", "ms", ALL, |moved| Some(moved.report.total_ms)),
    (("downtime", "_ms"), "Downtime", "ms", ALL, |moved| Some(moved.report.downtime_ms)),
    (("bytes_sent", ""), "Bytes sent", "", ALL, |moved| Some(moved.report.bytes_sent as f64)),
    (("sent_to_used", ""), "Bytes sent for each byte that the guest uses", "", ALL, |moved| {
        (moved.used_bytes > 0).then(|| moved.report.bytes_sent as f64 / moved.used_bytes as f64)
    }),
    (("rounds", ""), "Rounds", "", FAST_AND_BUSY, |moved| Some(moved.report.rounds as f64)),
    (
        ("pages_skipped", ""),
        "Pages not sent since the guest named them as free",
        "",
        FAST_AND_BUSY,
        |moved| Some(moved.report.pages_skipped? as f64),
    ),
    (("source_cpu", "_ms"), "Processor time at the source", "ms", FAST_AND_BUSY, |moved| {
        moved.report.source_cpu_ms
    }),
    (("used_bytes", ""), "Memory that the guest uses", "bytes", FAST_ONLY, |moved| {
        Some(moved.used_bytes as f64)
    }),
    (
        ("answered", "_ms"),
        "Until the guest answers at the other end",
        "ms",
        FAST_AND_BUSY,
        |moved| Some(moved.answered_ms),
    ),
];

fn metric(case: Case, measure: Measure) -> Metric<Found> {
    let ((before, behind), title, unit, _, value) = measure;
    let (name, words) = match case {
        Case::Fast => ("", ""),
        Case::Slow => ("_1g", ", over 1 Gbit/s"),
        Case::Busy => ("_load", ", under load"),
    };
    let (name, title) = (format!("{before}{name}{behind}"), format!("{title}{words}"));
    Metric::median(name, title, unit, move |found: &Found| {
        found.moved.iter().filter(|moved| moved.case == case).filter_map(value).collect()
    })
}

/// All metrics; those without a case in their title are of an idle guest over the fast link.
fn metrics() -> Vec<Metric<Found>> {
    let of_case = |case: &Case| {
        let case = *case;
        let shown = MEASURES.into_iter().filter(move |(.., cases, _)| cases.contains(&case));
        shown.map(move |measure| metric(case, measure))
    };
    let link = |name: &str, rate: &str, value: fn(&Carried) -> f64| {
        let title = format!("Plain transfer, {rate}");
        Metric::higher(name, title, "Mbit/s", move |found: &Found| Some(value(&found.carried)))
    };
    let mut metrics: Vec<_> = ALL.iter().flat_map(of_case).collect();
    metrics.extend([
        Metric::ratio("times_faster", "Times as fast as all-pages", "total_ms"),
        Metric::ratio(
            "times_fewer_bytes",
            "Bytes sent by all-pages for each byte sent",
            "bytes_sent",
        ),
        link("link_10g_mbit_s", "link of 10 Gbit/s", |carried| carried.fast),
        link("link_1g_mbit_s", "link of 1 Gbit/s", |carried| carried.slow),
        link("link_unshaped_mbit_s", "link without a limit", |carried| carried.unshaped),
    ]);
    metrics
}

/// Descriptions of the metrics.
pub(super) fn describe() -> Vec<MetricInfo> {
    metrics::describe(metrics())
}

/// Fills in the results that do not depend on other series.
pub(super) fn fill(moved: Vec<Moved>, carried: Carried, series: &mut Series) {
    let found = Found { moved, carried };
    metrics::measure(&metrics(), &found, series);
    series.details.push(table(&found.moved));
    series.details.extend(rounds_table(&found.moved));
}

/// Compares each series with sending all pages.
pub(super) fn compare(all: &mut [Series]) {
    metrics::compare(&metrics(), ALL_PAGES, all);
}

fn mib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}

/// All migrations.
fn table(moved: &[Moved]) -> DataTable {
    let used = |moved: &Moved| moved.used_bytes.max(1) as f64;
    DataTable::of(
        "migrations",
        moved,
        &[
            ("link", &|moved| moved.case.rate().describe().into()),
            ("guest", &|moved| moved.case.load().into()),
            ("total, ms", &|moved| moved.report.total_ms.into()),
            ("downtime, ms", &|moved| moved.report.downtime_ms.into()),
            ("sent, MiB", &|moved| mib(moved.report.bytes_sent).into()),
            ("used by the guest, MiB", &|moved| mib(moved.used_bytes).into()),
            ("sent / used", &|moved| (moved.report.bytes_sent as f64 / used(moved)).into()),
            ("rounds", &|moved| moved.report.rounds.into()),
            ("pages of data", &|moved| moved.report.pages_data.into()),
            ("zero", &|moved| moved.report.pages_zero.into()),
            ("not held", &|moved| moved.report.pages_discarded.into()),
            ("named free", &|moved| moved.report.pages_skipped.into()),
            ("source CPU, ms", &|moved| moved.report.source_cpu_ms.into()),
            ("answered, ms", &|moved| moved.answered_ms.into()),
        ],
    )
}

/// All rounds of all migrations, if the monitor reports them.
fn rounds_table(moved: &[Moved]) -> Option<DataTable> {
    type Of<'a> = (&'a Moved, &'a MigrationRound);
    let all: Vec<Of<'_>> = moved
        .iter()
        .flat_map(|moved| moved.report.rounds_detail.iter().map(move |round| (moved, round)))
        .collect();
    let table = || {
        DataTable::of(
            "rounds of the migrations",
            &all,
            &[
                ("link", &|(moved, _): &Of<'_>| moved.case.rate().describe().into()),
                ("guest", &|(moved, _)| moved.case.load().into()),
                ("round", &|(_, round)| round.round.into()),
                ("ms", &|(_, round)| round.elapsed_ms.into()),
                ("of that waiting for the guest's free pages", &|(_, round)| {
                    round.hint_wait_ms.into()
                }),
                ("pages of data", &|(_, round)| round.pages_data.into()),
                ("zero", &|(_, round)| round.pages_zero.into()),
                ("not held", &|(_, round)| round.pages_discarded.into()),
                ("named free", &|(_, round)| round.pages_skipped.into()),
                ("sent, MiB", &|(_, round)| mib(round.bytes_sent).into()),
                ("pages written meanwhile", &|(_, round)| round.pages_written.into()),
            ],
        )
    };
    (!all.is_empty()).then(table)
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

    fn filled(name: &str, total_ms: f64) -> Series {
        let mut filled = Series::new(name, String::new());
        let moves = vec![
            moved(Case::Fast, total_ms),
            moved(Case::Fast, total_ms),
            moved(Case::Slow, 10.0 * total_ms),
            moved(Case::Busy, 2.0 * total_ms),
        ];
        fill(moves, Carried { unshaped: 3.0, fast: 2.0, slow: 1.0 }, &mut filled);
        filled
    }

    #[test]
    fn metrics_follow_from_the_migrations() {
        let mut all = [filled(ALL_PAGES, 400.0), filled("hints", 100.0)];
        compare(&mut all);
        for series in &all {
            assert!(series.metrics.values().all(Option::is_some), "{:?}", series.metrics);
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
    fn without_all_pages_no_series_is_compared() {
        let mut alone = [filled("hints", 100.0)];
        compare(&mut alone);
        assert_eq!(alone[0].metrics["times_faster"], None);
    }
}
