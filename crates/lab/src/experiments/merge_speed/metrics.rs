//! Results of the measurements, as metrics and a table, and the comparison of the sides.

use super::content::Shape;
use super::measure::{Company, Merging, Scanning};
use crate::report::figures::DataTable;
use crate::report::metrics::{self, Metric};
use crate::report::results::{MetricInfo, Series};

/// Name of the owners' series.
pub(super) const OWNER: &str = "owner";
/// Name of the owners' series with more mappings than Linux allows by default.
pub(super) const MANY_MAPPINGS: &str = "owner-mappings";
/// Name of the kernel's series.
pub(super) const KSMD: &str = "ksmd";

/// Shapes with duplicates.
pub(super) const MERGED: [Shape; 4] =
    [Shape::Runs, Shape::Clones, Shape::Scattered, Shape::ScatteredSmall];

/// Measurements of a series.
#[derive(Debug, Default)]
pub(super) struct Found {
    pub(super) scannings: Vec<Scanning>,
    pub(super) mergings: Vec<Merging>,
}

/// Computes a metric from one measurement.
type Value = fn(&Merging) -> Option<f64>;

/// All metrics.
fn metrics() -> Vec<Metric<Found>> {
    let mut metrics: Vec<Metric<Found>> = MERGED.into_iter().flat_map(of_shape).collect();
    metrics.extend([
        scanned("unique_first_pages_per_cpu_s", "Unique pages read in a CPU-second", "", |one| {
            one.first_per_cpu_s
        })
        .better_higher(),
        scanned(
            "unique_steady_pages_per_cpu_s",
            "Unique pages passed over in a CPU-second later, most without being read",
            "",
            |one| one.steady_per_cpu_s,
        )
        .better_higher(),
        scanned("unique_huge_percent", "Huge pages left: unique pages", "%", |one| {
            huge_percent(one.huge_pages)
        })
        .better_higher(),
        scanned("metadata_bytes_per_page", "Metadata for each unique page", "bytes", |one| {
            Some(one.metadata_bytes_per_page)
        }),
    ]);
    let times =
        |name, title, of| Metric::ratio(name, format!("Times as many as ksmd: {title}"), of);
    metrics.extend([
        times("runs_times_ksmd", "duplicates in runs of 64 freed", "runs_freed_per_cpu_s"),
        times("clones_times_ksmd", "pages of two clones freed", "clones_freed_per_cpu_s"),
        times("small_times_ksmd", "scattered small pages freed", "small_freed_per_cpu_s"),
        times("unique_first_times_ksmd", "unique pages read", "unique_first_pages_per_cpu_s"),
    ]);
    metrics
}

fn scanned(
    name: &str,
    title: &str,
    unit: &str,
    value: fn(&Scanning) -> Option<f64>,
) -> Metric<Found> {
    Metric::median(name, title, unit, move |found: &Found| {
        found.scannings.iter().filter_map(value).collect()
    })
}

fn of_shape(shape: Shape) -> Vec<Metric<Found>> {
    let metric = |company, name: &str, title: &str, unit: &str, value: Value| {
        let name = format!("{}_{name}", shape.name());
        Metric::median(name, format!("{title}: {}", shape.title()), unit, move |found: &Found| {
            let of = |one: &&Merging| one.shape == shape && one.company == company;
            found.mergings.iter().filter(of).filter_map(value).collect()
        })
    };
    let alone = |name, title, unit, value| metric(Company::Alone, name, title, unit, value);
    vec![
        alone(
            "freed_per_cpu_s",
            "Pages freed in a second of all processor time",
            "",
            freed_per_cpu_s,
        )
        .better_higher(),
        alone("freed_percent", "Freed of what could be", "%", freed_percent).better_higher(),
        alone("huge_percent", "Huge pages left", "%", |one| huge_percent(one.huge_pages))
            .better_higher(),
        alone("write_ns", "First write to a page with an equal one", "ns", |one| {
            one.equal_write_ns
        }),
        alone("other_write_ns", "First write to another page", "ns", |one| one.unequal_write_ns),
        metric(
            Company::Sibling,
            "sibling_loss_percent",
            "What a busy thread of the process loses meanwhile",
            "%",
            loss_percent,
        ),
    ]
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

fn freed_per_cpu_s(merging: &Merging) -> Option<f64> {
    merging.price().per_cpu_s(merging.freed_pages)
}

fn freed_percent(merging: &Merging) -> Option<f64> {
    (merging.surplus_pages > 0)
        .then(|| merging.freed_pages as f64 * 100.0 / merging.surplus_pages as f64)
}

fn huge_percent((before, after): (u64, u64)) -> Option<f64> {
    (before > 0).then(|| after as f64 * 100.0 / before as f64)
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
    let ms = |ns: u64| ns as f64 / 1e6;
    DataTable::of(
        "every measurement",
        mergings,
        &[
            ("memory", &|one| one.shape.title().into()),
            ("second thread", &|one| company(one.company).into()),
            ("could go, pages", &|one| one.surplus_pages.into()),
            ("freed, pages", &|one| one.freed_pages.into()),
            ("CPU of the processes, ms", &|one| ms(one.work.members).into()),
            ("of the broker, ms", &|one| ms(one.price().broker).into()),
            ("of kernel threads, ms", &|one| ms(one.price().kernel).into()),
            ("of reading again, ms", &|one| ms(one.reading.members).into()),
            ("time, ms", &|one| ms(one.wall_ns).into()),
            ("huge pages before", &|one| one.huge_pages.0.into()),
            ("after", &|one| one.huge_pages.1.into()),
            ("first write, ns", &|one| one.equal_write_ns.into()),
            ("to another page, ns", &|one| one.unequal_write_ns.into()),
            ("second thread's loss, %", &|one| loss_percent(one).into()),
        ],
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::experiments::merge_speed::price::Price;

    const MS: u64 = 1_000_000;

    fn merging(shape: Shape, company: Company, cpu_ms: u64) -> Merging {
        let price = |share| Price { members: cpu_ms * MS * share / 4, ..Price::default() };
        Merging {
            shape,
            company,
            work: price(3),
            reading: price(1),
            wall_ns: 2 * cpu_ms * MS,
            surplus_pages: 2000,
            freed_pages: 1000,
            huge_pages: (16, 12),
            equal_write_ns: Some(700.0),
            unequal_write_ns: Some(90.0),
            sibling_per_s: (company == Company::Sibling).then_some((200.0, 150.0)),
        }
    }

    fn filled(name: &str, cpu_ms: u64) -> Series {
        let rate = Some(10_000.0 * 1000.0 / cpu_ms as f64);
        let found = Found {
            scannings: vec![Scanning {
                first_per_cpu_s: rate,
                steady_per_cpu_s: rate,
                metadata_bytes_per_page: 64.0,
                huge_pages: (64, 64),
            }],
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
        assert_eq!(filled.metrics["unique_huge_percent"], Some(100.0));
        assert_eq!(filled.metrics["runs_freed_per_cpu_s"], Some(10_000.0), "all of the price");
        assert_eq!(filled.metrics["runs_freed_percent"], Some(50.0));
        assert_eq!(filled.metrics["runs_huge_percent"], Some(75.0));
        assert_eq!(filled.metrics["clones_sibling_loss_percent"], Some(25.0));
        assert_eq!(filled.metrics["clones_write_ns"], Some(700.0));
        assert_eq!(filled.metrics["small_other_write_ns"], Some(90.0));
        assert_eq!(filled.metrics["runs_times_ksmd"], None);
    }

    #[test]
    fn series_are_compared_with_the_kernels_thread() {
        let mut all = [filled(KSMD, 100), filled(OWNER, 10)];
        compare(&mut all);
        assert_eq!(all[1].metrics["small_times_ksmd"], Some(10.0));
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
