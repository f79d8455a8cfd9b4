//! Results of the measurements, as metrics and a table, and the comparison of the sides.

use super::content::Shape;
use super::measure::{Company, Merging, Scanning};
use crate::report::figures::DataTable;
use crate::report::metrics::{self, Metric};
use crate::report::results::{MetricInfo, Series};

/// Name of the owner's series.
pub(super) const OWNER: &str = "owner";
/// Name of the kernel's series.
pub(super) const KSMD: &str = "ksmd";
/// Name of the kernel's series with smart scan.
pub(super) const KSMD_SMART: &str = "ksmd-smart";

/// Shapes with duplicates.
pub(super) const MERGED: [Shape; 3] = [Shape::Scattered, Shape::Runs, Shape::Clones];

/// Measurements of a series.
#[derive(Debug, Default)]
pub(super) struct Found {
    pub(super) scannings: Vec<Scanning>,
    pub(super) mergings: Vec<Merging>,
}

/// All metrics.
fn metrics() -> Vec<Metric<Found>> {
    fn scanned(name: &str, title: &str, value: fn(&Scanning) -> Option<f64>) -> Metric<Found> {
        Metric::median(name, title, "", move |found: &Found| {
            found.scannings.iter().filter_map(value).collect()
        })
        .better_higher()
    }
    let merged = |shape: Shape, company, name: &str, title: &str, unit, value: Value| {
        let (name, title) =
            (format!("{}_{name}", shape.name()), format!("{title}: {}", shape.title()));
        Metric::median(name, title, unit, move |found: &Found| {
            let of = |one: &&Merging| one.shape == shape && one.company == company;
            found.mergings.iter().filter(of).filter_map(value).collect()
        })
    };
    let times =
        |name, title, of| Metric::ratio(name, format!("Times as many as ksmd: {title}"), of);
    let mut metrics = vec![
        scanned(
            "unique_first_pages_per_cpu_s",
            "Unique pages scanned in a CPU-second, until each was read once",
            |scanning| scanning.first.per_cpu_s(scanning.first.pages),
        ),
        scanned(
            "unique_steady_pages_per_cpu_s",
            "Unique pages scanned in a CPU-second, steady state",
            |scanning| scanning.steady.per_cpu_s(scanning.steady.pages),
        ),
        Metric::median(
            "metadata_bytes_per_page",
            "Metadata for each scanned page",
            "bytes",
            |found: &Found| found.scannings.iter().map(|one| one.metadata_bytes_per_page).collect(),
        ),
    ];
    let (rate, busy) = ("Pages freed in a CPU-second", Company::Sibling);
    let beside = "Pages freed in a CPU-second, beside a busy thread";
    let freed = "Freed of what could be";
    let loss = "What the busy thread loses meanwhile";
    for shape in MERGED {
        let alone =
            |name, title, unit, value| merged(shape, Company::Alone, name, title, unit, value);
        metrics.extend([
            alone("freed_per_cpu_s", rate, "", freed_rate).better_higher(),
            merged(shape, busy, "busy_freed_per_cpu_s", beside, "", freed_rate).better_higher(),
            alone("freed_percent", freed, "%", freed_percent).better_higher(),
            alone("write_ns", "First write to a merged page", "ns", |merging| merging.write_ns),
            merged(shape, busy, "sibling_loss_percent", loss, "%", loss_percent),
        ]);
    }
    metrics.extend([
        times(
            "unique_first_times_ksmd",
            "unique pages, first pass",
            "unique_first_pages_per_cpu_s",
        ),
        times(
            "unique_steady_times_ksmd",
            "unique pages, steady state",
            "unique_steady_pages_per_cpu_s",
        ),
        times("scattered_times_ksmd", "scattered duplicates freed", "scattered_freed_per_cpu_s"),
        times("runs_times_ksmd", "duplicates in runs of 64 freed", "runs_freed_per_cpu_s"),
        times("clones_times_ksmd", "pages of four clones freed", "clones_freed_per_cpu_s"),
    ]);
    metrics
}

/// Computes a metric from one measurement.
type Value = fn(&Merging) -> Option<f64>;

fn freed_rate(merging: &Merging) -> Option<f64> {
    merging.work.per_cpu_s(merging.freed_pages)
}

/// Descriptions of the metrics.
pub(super) fn describe() -> Vec<MetricInfo> {
    metrics::describe(metrics())
}

/// Compares each series with the kernel's thread.
pub(super) fn compare(all: &mut [Series]) {
    metrics::compare(&metrics(), KSMD, all);
}

/// Fills in a series' metrics and its table.
pub(super) fn fill(found: &Found, series: &mut Series) {
    metrics::measure(&metrics(), found, series);
    if !found.mergings.is_empty() {
        series.details.push(table(&found.mergings));
    }
}

fn freed_percent(merging: &Merging) -> Option<f64> {
    (merging.surplus_pages > 0)
        .then(|| merging.freed_pages as f64 * 100.0 / merging.surplus_pages as f64)
}

/// Slowdown of the second thread during merging, in percent.
fn loss_percent(merging: &Merging) -> Option<f64> {
    let (before, meanwhile) = merging.sibling_per_s?;
    (before > 0.0).then(|| (1.0 - meanwhile / before) * 100.0)
}

/// All measurements.
fn table(mergings: &[Merging]) -> DataTable {
    let company = |company| match company {
        Company::Alone => "none",
        Company::Sibling => "busy",
    };
    DataTable::of(
        "every measurement",
        mergings,
        &[
            ("memory", &|one| one.shape.title().into()),
            ("second thread", &|one| company(one.company).into()),
            ("could go, pages", &|one| one.surplus_pages.into()),
            ("freed, pages", &|one| one.freed_pages.into()),
            ("CPU, ms", &|one| (one.work.cpu_ns as f64 / 1e6).into()),
            ("time, ms", &|one| (one.work.wall_ns as f64 / 1e6).into()),
            ("first write, ns", &|one| one.write_ns.into()),
            ("second thread's loss, %", &|one| loss_percent(one).into()),
        ],
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::experiments::merge_speed::side::Work;

    const MS: u64 = 1_000_000;

    fn merging(shape: Shape, company: Company, cpu_ms: u64) -> Merging {
        Merging {
            shape,
            company,
            work: Work { cpu_ns: cpu_ms * MS, wall_ns: 2 * cpu_ms * MS, pages: 4000 },
            surplus_pages: 2000,
            freed_pages: 1000,
            write_ns: (company == Company::Alone).then_some(700.0),
            sibling_per_s: (company == Company::Sibling).then_some((200.0, 150.0)),
        }
    }

    fn filled(name: &str, cpu_ms: u64) -> Series {
        let work = Work { cpu_ns: cpu_ms * MS, wall_ns: 0, pages: 10_000 };
        let found = Found {
            scannings: vec![Scanning { first: work, steady: work, metadata_bytes_per_page: 64.0 }],
            mergings: MERGED
                .into_iter()
                .flat_map(|shape| {
                    [Company::Alone, Company::Sibling]
                        .map(|company| merging(shape, company, cpu_ms))
                })
                .collect(),
        };
        let mut filled = Series::new(name, String::new());
        fill(&found, &mut filled);
        filled
    }

    #[test]
    fn metrics_follow_from_the_measurements() {
        let filled = filled(KSMD, 100);
        assert_eq!(filled.metrics["unique_steady_pages_per_cpu_s"], Some(100_000.0));
        assert_eq!(filled.metrics["runs_freed_per_cpu_s"], Some(10_000.0));
        assert_eq!(filled.metrics["runs_freed_percent"], Some(50.0));
        assert_eq!(filled.metrics["clones_sibling_loss_percent"], Some(25.0));
        assert_eq!(filled.metrics["clones_write_ns"], Some(700.0));
        assert_eq!(filled.metrics["runs_times_ksmd"], None);
    }

    #[test]
    fn series_are_compared_with_the_kernels_thread_without_smart_scan() {
        let mut all = [filled(KSMD, 100), filled(KSMD_SMART, 50), filled(OWNER, 10)];
        compare(&mut all);
        assert_eq!(all[2].metrics["scattered_times_ksmd"], Some(10.0));
        assert_eq!(all[1].metrics["unique_steady_times_ksmd"], Some(2.0));
        assert_eq!(all[0].metrics["unique_first_times_ksmd"], Some(1.0));
        let mut alone = [filled(OWNER, 10)];
        compare(&mut alone);
        assert_eq!(alone[0].metrics["runs_times_ksmd"], None);
    }

    #[test]
    fn missing_measurements_are_empty() {
        let mut empty = Series::new(OWNER, String::new());
        fill(&Found::default(), &mut empty);
        assert!(empty.metrics.values().all(Option::is_none));
        assert!(empty.details.is_empty());
    }
}
