//! Metrics: each has a description and a function that computes it from the results.

use crate::report::results::{Better, MetricInfo, Series};
use crate::report::statistics::{median, number, quantile, rounded};

/// A metric of an experiment whose series have results of type `F`.
pub struct Metric<F> {
    info: MetricInfo,
    source: Source<F>,
}

/// Computes the measurements of a metric from the results.
type Values<F> = Box<dyn Fn(&F) -> Vec<f64>>;

/// Source of a metric's value.
enum Source<F> {
    /// Repeated measurements, of which the median is shown, or a single one. A time that was never
    /// reached is infinite.
    Values(Values<F>),
    /// Ratio of a series to the one that all are compared with, by this metric; above 1 if better.
    Ratio(&'static str),
    /// Excess over the one that all are compared with, by this metric, in percent.
    Excess(&'static str),
}

impl<F> Metric<F> {
    fn new(
        (name, title, unit): (impl Into<String>, impl Into<String>, &str),
        better: Better,
        source: Source<F>,
    ) -> Self {
        let info =
            MetricInfo { name: name.into(), title: title.into(), unit: unit.to_owned(), better };
        Self { info, source }
    }

    /// A metric that is better when it is lower: name with unit, title, unit, and its function.
    pub fn lower(
        name: impl Into<String>,
        title: impl Into<String>,
        unit: &str,
        value: impl Fn(&F) -> Option<f64> + 'static,
    ) -> Self {
        let values = move |found: &F| value(found).into_iter().collect();
        Self::new((name, title, unit), Better::Lower, Source::Values(Box::new(values)))
    }

    /// A metric that is better when it is higher.
    pub fn higher(
        name: impl Into<String>,
        title: impl Into<String>,
        unit: &str,
        value: impl Fn(&F) -> Option<f64> + 'static,
    ) -> Self {
        Self::lower(name, title, unit, value).better_higher()
    }

    /// The median of repeated measurements, of which a lower one is better.
    pub fn median(
        name: impl Into<String>,
        title: impl Into<String>,
        unit: &str,
        values: impl Fn(&F) -> Vec<f64> + 'static,
    ) -> Self {
        Self::new((name, title, unit), Better::Lower, Source::Values(Box::new(values)))
    }

    /// The same metric, if a higher value is better.
    #[must_use]
    pub fn better_higher(mut self) -> Self {
        self.info.better = Better::Higher;
        self
    }

    /// The same metric, of a part of the results.
    pub fn within<G: 'static>(self, part: fn(&G) -> Option<&F>) -> Metric<G>
    where
        F: 'static,
    {
        let source =
            match self.source {
                Source::Values(values) => Source::Values(Box::new(move |whole: &G| {
                    part(whole).map_or_else(Vec::new, &values)
                }) as Box<_>),
                Source::Ratio(of) => Source::Ratio(of),
                Source::Excess(of) => Source::Excess(of),
            };
        Metric { info: self.info, source }
    }

    /// Ratio of a series to the base of [`compare`] by the metric `of`; above 1 if better.
    pub fn ratio(name: &str, title: impl Into<String>, of: &'static str) -> Self {
        Self::new((name, title, ""), Better::Higher, Source::Ratio(of))
    }

    /// Percent by which a series is above the base of [`compare`] by the metric `of`, of which a
    /// lower value is better.
    pub fn excess(name: &str, title: impl Into<String>, of: &'static str) -> Self {
        Self::new((name, title, "%"), Better::Lower, Source::Excess(of))
    }
}

/// Descriptions of the metrics, for the document.
pub fn describe<F>(metrics: Vec<Metric<F>>) -> Vec<MetricInfo> {
    metrics.into_iter().map(|metric| metric.info).collect()
}

/// Fills in all metrics of a series, and the spread of those that were measured repeatedly; metrics
/// that were not measured are `None`, and so are ratios.
pub fn measure<F>(metrics: &[Metric<F>], found: &F, series: &mut Series) {
    for Metric { info, source } in metrics {
        let values = match source {
            Source::Values(values) => values(found),
            Source::Ratio(_) | Source::Excess(_) => Vec::new(),
        };
        let bound = |part| quantile(values.iter().copied(), part).map(rounded);
        if let (Some(low), Some(high), 2..) = (bound(0.0), bound(1.0), values.len())
            && high.is_finite()
        {
            series.spread.insert(info.name.clone(), [low, high]);
        }
        // A time that was never reached is infinite, and so is a median of mostly such times.
        let value = median(values).filter(|value| value.is_finite());
        series.metrics.insert(info.name.clone(), value.map(rounded));
    }
}

/// Fills in the ratios of each series to the series `base`, and lists those that are lost in the
/// machine's noise because repeated measurements of both overlap.
pub fn compare<F>(metrics: &[Metric<F>], base: &str, all: &mut [Series]) {
    let Some(base) = all.iter().find(|series| series.name == base).cloned() else { return };
    for series in all {
        for Metric { info, source } in metrics {
            let (Source::Ratio(of) | Source::Excess(of)) = source else { continue };
            let better = metrics.iter().find(|metric| metric.info.name == *of);
            let value = |of_series: &Series| {
                of_series.metrics.get(*of).copied().flatten().filter(|value| *value > 0.0)
            };
            let ratio = value(series).zip(value(&base)).map(|(this, base)| {
                let higher = better.is_some_and(|metric| metric.info.better == Better::Higher);
                rounded(match source {
                    Source::Excess(_) => (this / base - 1.0) * 100.0,
                    _ if higher => this / base,
                    _ => base / this,
                })
            });
            series.metrics.insert(info.name.clone(), ratio);
            let overlap = series.spread.get(*of).zip(base.spread.get(*of)).filter(
                |([low, high], [base_low, base_high])| low <= base_high && base_low <= high,
            );
            if let (Some((this, other)), Some(ratio), false) =
                (overlap, ratio, series.name == base.name)
            {
                let bounds = |of: &[f64; 2]| of.map(|bound| number(Some(bound))).join(" to ");
                series.too_noisy.push(format!(
                    "{}: {} is not certain, repeated measurements overlap ({}, and {} of {})",
                    info.title,
                    number(Some(ratio)),
                    bounds(this),
                    bounds(other),
                    base.name
                ));
            }
        }
    }
}

/// Lists the metrics by which a series under Ebb, `ebb` or `ebb-WORD`, cannot be told from the same
/// under QEMU, because repeated measurements overlap.
pub fn mark_noise<F>(metrics: &[Metric<F>], all: &mut [Series]) {
    let peers = all.to_vec();
    for series in all {
        let name = series.name.replacen("ebb", "qemu", 1);
        let Some(peer) = peers.iter().find(|peer| peer.name == name && name != series.name) else {
            continue;
        };
        for Metric { info, .. } in metrics {
            let spreads = series.spread.get(&info.name).zip(peer.spread.get(&info.name));
            let Some(([low, high], [peer_low, peer_high])) = spreads else { continue };
            if low <= peer_high && peer_low <= high {
                let bounds = [low, high, peer_low, peer_high].map(|bound| number(Some(*bound)));
                let [low, high, peer_low, peer_high] = bounds;
                series.too_noisy.push(format!(
                    "{}: repeated measurements overlap ({low} to {high}, and {peer_low} to \
                     {peer_high} of {name})",
                    info.title
                ));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    type Found = Vec<f64>;

    fn metrics() -> Vec<Metric<Found>> {
        vec![
            Metric::median("time_ms", "Time", "ms", |found: &Found| found.clone()),
            Metric::higher("first", "First", "", |found: &Found| found.first().copied()),
            Metric::ratio("times_faster", "Times as fast", "time_ms"),
            Metric::ratio("times_first", "Times as high", "first"),
        ]
    }

    fn measured(name: &str, found: &[f64]) -> Series {
        let mut series = Series::new(name, String::new());
        measure(&metrics(), &found.to_vec(), &mut series);
        series
    }

    #[test]
    fn every_described_metric_is_measured() {
        let series = measured("a", &[3.0, 5.0, 4.0]);
        let described = describe(metrics());
        assert_eq!(described.len(), series.metrics.len());
        assert!(described.iter().all(|info| series.metrics.contains_key(&info.name)));
        assert_eq!(series.metrics["time_ms"], Some(4.0));
        assert_eq!(series.spread.get("time_ms"), Some(&[3.0, 5.0]));
        assert_eq!((series.metrics["first"], series.spread.get("first")), (Some(3.0), None));
        assert_eq!(measured("a", &[]).metrics["time_ms"], None);
        let late = measured("a", &[1.0, f64::INFINITY, f64::INFINITY]);
        assert_eq!((late.metrics["time_ms"], late.spread.get("time_ms")), (None, None));
        assert_eq!(measured("a", &[1.0, f64::INFINITY, 2.0]).metrics["time_ms"], Some(2.0));
    }

    #[test]
    fn ratios_are_above_one_for_the_better_series() {
        let mut all = [measured("base", &[100.0]), measured("fast", &[50.0])];
        compare(&metrics(), "base", &mut all);
        assert_eq!(all[1].metrics["times_faster"], Some(2.0));
        assert_eq!(all[1].metrics["times_first"], Some(0.5));
        assert_eq!(all[0].metrics["times_faster"], Some(1.0));
        compare(&metrics(), "other", &mut all[1..]);
        assert_eq!(all[1].metrics["times_faster"], Some(2.0), "without a base nothing changes");
    }

    #[test]
    fn overlapping_measurements_are_too_noisy() {
        let mut all = [
            measured("base", &[90.0, 110.0]),
            measured("near", &[80.0, 95.0]),
            measured("far", &[10.0, 20.0]),
        ];
        compare(&metrics(), "base", &mut all);
        assert!(all[0].too_noisy.is_empty() && all[2].too_noisy.is_empty());
        assert_eq!(
            all[1].too_noisy,
            ["Times as fast: 1.14 is not certain, repeated measurements overlap (80 to 95, and \
              90 to 110 of base)"]
        );
    }

    #[test]
    fn overlaps_with_the_peer_are_marked() {
        let mut all = [
            measured("ebb", &[90.0, 110.0]),
            measured("qemu", &[100.0, 120.0]),
            measured("ebb-direct", &[10.0, 20.0]),
            measured("qemu-direct", &[100.0, 120.0]),
            measured("ebb-alone", &[10.0, 20.0]),
        ];
        mark_noise(&metrics(), &mut all);
        assert_eq!(
            all[0].too_noisy,
            ["Time: repeated measurements overlap (90 to 110, and 100 to 120 of qemu)"]
        );
        assert!(all[1..].iter().all(|series| series.too_noisy.is_empty()));
    }
}
