//! Results of the series about clocks, as metrics.

use super::guests::Record;
use crate::report::metrics::{self, Metric};
use crate::report::results::{MetricInfo, Series};

/// Results of a series in ns; `None` for those that it does not measure.
#[derive(Debug, Default)]
pub(super) struct Found {
    pub(super) min_system_time: Option<f64>,
    pub(super) max_jump: Option<f64>,
    pub(super) wall_error: Option<f64>,
    /// KVM's clock against the host's clocks, in the order of `HostClock::ALL`.
    pub(super) deviations: [Option<f64>; 3],
    pub(super) drift: Option<f64>,
    pub(super) failed_checks: Option<f64>,
    pub(super) guest: Option<Record>,
}

impl Found {
    /// The results of a series with a guest.
    pub(super) fn of_guest(record: Record) -> Self {
        Self {
            min_system_time: record.min_system_time_ns(),
            max_jump: record.max_jump_ns(),
            wall_error: record.wall_error_ns(),
            guest: Some(record),
            ..Self::default()
        }
    }

    /// Fills in the metrics.
    pub(super) fn measure(&self, series: &mut Series) {
        metrics::measure(&metrics(), self, series);
    }
}

fn metrics() -> Vec<Metric<Found>> {
    type Of = fn(&Found) -> Option<f64>;
    let lower = |name, title, value: Of| Metric::lower(name, title, "ns", value);
    let smallest: Of = |found| found.min_system_time;
    let mut metrics = vec![
        lower("min_system_time_ns", "Smallest time of a fresh guest", smallest).better_higher(),
        lower("max_jump_ns", "Largest jump at a master clock flip", |found| found.max_jump),
        lower("wall_error_ns", "Largest error of the wall clock", |found| found.wall_error),
        lower("raw_deviation_ns", "KVM's clock against CLOCK_MONOTONIC_RAW", |found| {
            found.deviations[0]
        }),
        lower("monotonic_deviation_ns", "KVM's clock against CLOCK_MONOTONIC", |found| {
            found.deviations[1]
        }),
        lower("boottime_deviation_ns", "KVM's clock against CLOCK_BOOTTIME", |found| {
            found.deviations[2]
        }),
        lower("drift_ns", "CLOCK_MONOTONIC ahead of raw since boot", |found| found.drift),
        Metric::lower("failed_checks", "Failed checks of KVM's clock", "", |found: &Found| {
            found.failed_checks
        }),
    ];
    let of_guest = super::guests::metrics::metrics().into_iter();
    metrics.extend(of_guest.map(|metric| metric.within(|found: &Found| found.guest.as_ref())));
    metrics
}

/// Descriptions of the metrics.
pub(super) fn describe() -> Vec<MetricInfo> {
    metrics::describe(metrics())
}
