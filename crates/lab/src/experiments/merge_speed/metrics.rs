//! What is told of the measuring.

use std::collections::BTreeMap;

use super::content::Shape;
use super::measure::{Company, Merging, Scanning};
use crate::report::figures::{DataTable, Value};
use crate::report::results::{Better, MetricInfo, Series, rounded};
use crate::report::statistics::median;

/// Name of the owner's series.
pub(super) const OWNER: &str = "owner";
/// Name of the kernel's series.
pub(super) const KSMD: &str = "ksmd";
/// And with smart scan.
pub(super) const KSMD_SMART: &str = "ksmd-smart";

/// Shapes with duplicates.
pub(super) const MERGED: [Shape; 3] = [Shape::Scattered, Shape::Runs, Shape::Clones];
/// Rates that are compared with the kernel's, and the metric for that.
const COMPARED: [(&str, &str, &str); 5] = [
    ("unique_first_pages_per_cpu_s", "unique_first_times_ksmd", "unique pages, first pass"),
    ("unique_steady_pages_per_cpu_s", "unique_steady_times_ksmd", "unique pages, steady state"),
    ("scattered_freed_per_cpu_s", "scattered_times_ksmd", "scattered duplicates freed"),
    ("runs_freed_per_cpu_s", "runs_times_ksmd", "duplicates in runs of 64 freed"),
    ("clones_freed_per_cpu_s", "clones_times_ksmd", "pages of four clones freed"),
];

/// What a series has measured.
#[derive(Debug, Default)]
pub(super) struct Found {
    pub(super) scannings: Vec<Scanning>,
    pub(super) mergings: Vec<Merging>,
}

/// All metrics.
pub(super) fn metrics() -> Vec<MetricInfo> {
    let higher =
        |name: &str, title: &str, unit: &str| MetricInfo::new(name, title, unit, Better::Higher);
    let lower =
        |name: &str, title: &str, unit: &str| MetricInfo::new(name, title, unit, Better::Lower);
    let mut metrics = vec![
        higher(
            "unique_first_pages_per_cpu_s",
            "Unique pages scanned in a CPU-second, until each was read once",
            "",
        ),
        higher(
            "unique_steady_pages_per_cpu_s",
            "Unique pages scanned in a CPU-second, steady state",
            "",
        ),
        lower("metadata_bytes_per_page", "Metadata for each scanned page", "bytes"),
    ];
    for shape in MERGED {
        let (name, title) = (shape.name(), shape.title());
        metrics.extend([
            higher(
                &format!("{name}_freed_per_cpu_s"),
                &format!("Pages freed in a CPU-second: {title}"),
                "",
            ),
            higher(
                &format!("{name}_busy_freed_per_cpu_s"),
                &format!("Pages freed in a CPU-second, beside a busy thread: {title}"),
                "",
            ),
            higher(
                &format!("{name}_freed_percent"),
                &format!("Freed of what could be: {title}"),
                "%",
            ),
            lower(
                &format!("{name}_write_ns"),
                &format!("First write to a merged page: {title}"),
                "ns",
            ),
            lower(
                &format!("{name}_sibling_loss_percent"),
                &format!("What the busy thread loses meanwhile: {title}"),
                "%",
            ),
        ]);
    }
    metrics.extend(
        COMPARED
            .map(|(_, name, title)| higher(name, &format!("Times as many as ksmd: {title}"), "")),
    );
    metrics
}

/// Fills in a series' metrics and its table.
pub(super) fn series(found: &Found, series: &mut Series) {
    let scanned = |value: &dyn Fn(&Scanning) -> Option<f64>| {
        median(found.scannings.iter().filter_map(value)).map(rounded)
    };
    let mut metrics: BTreeMap<String, Option<f64>> = BTreeMap::from([
        (
            "unique_first_pages_per_cpu_s".to_owned(),
            scanned(&|scanning| scanning.first.per_cpu_s(scanning.first.pages)),
        ),
        (
            "unique_steady_pages_per_cpu_s".to_owned(),
            scanned(&|scanning| scanning.steady.per_cpu_s(scanning.steady.pages)),
        ),
        (
            "metadata_bytes_per_page".to_owned(),
            scanned(&|scanning| Some(scanning.metadata_bytes_per_page)),
        ),
    ]);
    for shape in MERGED {
        let of = |company: Company, value: &dyn Fn(&Merging) -> Option<f64>| {
            let those = found
                .mergings
                .iter()
                .filter(|merging| merging.shape == shape && merging.company == company);
            median(those.filter_map(value)).map(rounded)
        };
        let rate = |merging: &Merging| merging.work.per_cpu_s(merging.freed_pages);
        let name = shape.name();
        metrics.extend([
            (format!("{name}_freed_per_cpu_s"), of(Company::Alone, &rate)),
            (format!("{name}_busy_freed_per_cpu_s"), of(Company::Sibling, &rate)),
            (format!("{name}_freed_percent"), of(Company::Alone, &freed_percent)),
            (format!("{name}_write_ns"), of(Company::Alone, &|merging| merging.write_ns)),
            (format!("{name}_sibling_loss_percent"), of(Company::Sibling, &loss_percent)),
        ]);
    }
    metrics.extend(COMPARED.map(|(_, name, _)| (name.to_owned(), None)));
    series.metrics = metrics;
    if !found.mergings.is_empty() {
        series.details.push(table(&found.mergings));
    }
}

fn freed_percent(merging: &Merging) -> Option<f64> {
    (merging.surplus_pages > 0)
        .then(|| merging.freed_pages as f64 * 100.0 / merging.surplus_pages as f64)
}

/// By how much less the second thread did while pages were merged.
fn loss_percent(merging: &Merging) -> Option<f64> {
    let (before, meanwhile) = merging.sibling_per_s?;
    (before > 0.0).then(|| (1.0 - meanwhile / before) * 100.0)
}

/// Every measurement by itself.
fn table(mergings: &[Merging]) -> DataTable {
    let columns = [
        "memory",
        "second thread",
        "could go, pages",
        "freed, pages",
        "CPU, ms",
        "time, ms",
        "first write, ns",
        "second thread's loss, %",
    ];
    let number =
        |value: Option<f64>| value.map_or(Value::from("-"), |value| Value::from(rounded(value)));
    let row = |merging: &Merging| {
        vec![
            Value::from(merging.shape.title()),
            Value::from(match merging.company {
                Company::Alone => "none",
                Company::Sibling => "busy",
            }),
            Value::from(merging.surplus_pages),
            Value::from(merging.freed_pages),
            Value::from(rounded(merging.work.cpu_ns as f64 / 1e6)),
            Value::from(rounded(merging.work.wall_ns as f64 / 1e6)),
            number(merging.write_ns),
            number(loss_percent(merging)),
        ]
    };
    DataTable {
        title: "every measurement".to_owned(),
        columns: columns.map(str::to_owned).to_vec(),
        rows: mergings.iter().map(row).collect(),
    }
}

/// Says how many times as much as the kernel's thread each series does.
pub(super) fn compare(all: &mut [Series]) {
    let Some(base) =
        all.iter().find(|series| series.name == KSMD).map(|series| series.metrics.clone())
    else {
        return;
    };
    for series in all.iter_mut() {
        for (rate, times, _) in COMPARED {
            let value = |metrics: &BTreeMap<String, Option<f64>>| {
                metrics.get(rate).copied().flatten().filter(|rate| *rate > 0.0)
            };
            let ratio =
                value(&series.metrics).zip(value(&base)).map(|(this, base)| rounded(this / base));
            series.metrics.insert(times.to_owned(), ratio);
        }
    }
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

    fn told(name: &str, cpu_ms: u64) -> Series {
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
        let mut told = Series::new(name, String::new());
        series(&found, &mut told);
        told
    }

    #[test]
    fn every_metric_that_is_described_is_there() {
        let told = told(KSMD, 100);
        let described: Vec<String> = metrics().into_iter().map(|info| info.name).collect();
        assert_eq!(told.metrics.len(), described.len());
        assert!(described.iter().all(|name| told.metrics.contains_key(name)));
        assert_eq!(told.metrics["unique_steady_pages_per_cpu_s"], Some(100_000.0));
        assert_eq!(told.metrics["runs_freed_per_cpu_s"], Some(10_000.0));
        assert_eq!(told.metrics["runs_freed_percent"], Some(50.0));
        assert_eq!(told.metrics["clones_sibling_loss_percent"], Some(25.0));
        assert_eq!(told.metrics["clones_write_ns"], Some(700.0));
        assert_eq!(told.metrics["runs_times_ksmd"], None);
    }

    #[test]
    fn series_are_compared_with_the_kernels_thread_without_smart_scan() {
        let mut all = [told(KSMD, 100), told(KSMD_SMART, 50), told(OWNER, 10)];
        compare(&mut all);
        assert_eq!(all[2].metrics["scattered_times_ksmd"], Some(10.0));
        assert_eq!(all[1].metrics["unique_steady_times_ksmd"], Some(2.0));
        assert_eq!(all[0].metrics["unique_first_times_ksmd"], Some(1.0));
        let mut alone = [told(OWNER, 10)];
        compare(&mut alone);
        assert_eq!(alone[0].metrics["runs_times_ksmd"], None);
    }

    #[test]
    fn nothing_measured_is_told_as_nothing() {
        let mut empty = Series::new(OWNER, String::new());
        series(&Found::default(), &mut empty);
        assert!(empty.metrics.values().all(Option::is_none));
        assert!(empty.details.is_empty());
    }
}
