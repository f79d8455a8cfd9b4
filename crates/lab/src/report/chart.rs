//! Charts as SVG text.
//!
//! Texts and axes take the page's colour (`currentColor`), areas and curves a palette that is
//! readable on light and dark backgrounds. Title and legend are text beside the chart, so that they
//! wrap and never cover the curves.

use std::fmt::Write as _;
use std::ops::Range;

use crate::report::figures::{Curve, Drawing};
use crate::report::results::{Results, Sample};
use crate::report::statistics::number;

/// Size of a chart in CSS pixels before scaling, and its margins.
const WIDTH: f64 = 560.0;
const HEIGHT: f64 = 240.0;
const LEFT: f64 = 54.0;
const RIGHT: f64 = 10.0;
const TOP: f64 = 20.0;
const BOTTOM: f64 = 36.0;
/// Approximate number of grid lines.
const TICKS: f64 = 5.0;

/// The host's own memory, at the bottom of the stack.
pub(crate) const HOST: &str = "#9aa0a6";
/// Swap, in the most conspicuous colour.
pub(crate) const SWAP: &str = "#d62728";
/// Guests, repeated; neighbours differ in lightness too, so that the stack is readable without
/// colours.
pub(crate) const GUESTS: [&str; 6] =
    ["#1f77b4", "#7fb8e0", "#2a8c6e", "#8fd1b5", "#6a51a3", "#b3a2d6"];
/// Series and curves, repeated.
pub(crate) const CURVES: [&str; 6] =
    ["#1f77b4", "#e08a1e", "#2a8c6e", "#8e6bbf", "#d62728", "#9aa0a6"];

/// Text for HTML and for attributes in double quotes.
pub(crate) fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

/// Limits of the charts of several series, so that they can be compared by eye.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Extent {
    /// End of the time axis in seconds.
    pub seconds: f64,
    /// End of the memory axis in MiB.
    pub mib: f64,
}

impl Extent {
    /// The limits that contain every sample of the results and the host's memory.
    pub fn of(results: &Results) -> Self {
        let top = |sample: &Sample| {
            stacked(sample).last().map_or(0.0, |layer| layer.1).max(sample.swap_used_mib)
        };
        Self {
            seconds: results.samples.iter().map(seconds).fold(1.0, f64::max),
            mib: results.samples.iter().map(top).fold(results.host.memory_mib as f64, f64::max)
                * 1.04,
        }
    }
}

fn seconds(sample: &Sample) -> f64 {
    sample.t_ms as f64 / 1000.0
}

/// Bottom and top of each layer at one moment: the host's own use first, then the guests in their
/// order.
fn stacked(sample: &Sample) -> Vec<(f64, f64)> {
    let guests: f64 = sample.guest_rss_mib.iter().sum();
    // Both figures are read one after the other, so that the difference can be below zero while
    // guests grow.
    let mut top = (sample.host_used_mib - guests).max(0.0);
    let mut layers = vec![(0.0, top)];
    for rss in &sample.guest_rss_mib {
        layers.push((top, top + rss));
        top += rss;
    }
    layers
}

/// Host memory over time, stacked by guest, with the host's RAM as a dashed line and swap as a red
/// one.
pub fn timeline(samples: &[&Sample], host_memory_mib: u64, extent: Extent, title: &str) -> String {
    let mut chart = Chart::new(title, (0.0..extent.seconds, "s"), (0.0..extent.mib, "MiB"));
    let layers: Vec<Vec<(f64, f64)>> = samples.iter().map(|sample| stacked(sample)).collect();
    let depth = layers.iter().map(Vec::len).max().unwrap_or(0);
    for layer in 0..depth {
        // A guest that has not started, or has ended, has no height.
        let edge = |(sample, all): (&&Sample, &Vec<(f64, f64)>)| {
            let none = all.last().map_or((0.0, 0.0), |last| (last.1, last.1));
            (seconds(sample), all.get(layer).copied().unwrap_or(none))
        };
        let edges: Vec<(f64, (f64, f64))> = samples.iter().zip(&layers).map(edge).collect();
        let upper = edges.iter().map(|(at, (_, top))| (*at, *top));
        let lower = edges.iter().rev().map(|(at, (bottom, _))| (*at, *bottom));
        let color = if layer == 0 { HOST } else { GUESTS[(layer - 1) % GUESTS.len()] };
        chart.shape("polygon", upper.chain(lower), &format!("fill=\"{color}\" opacity=\".85\""));
    }
    let limit = host_memory_mib as f64;
    let dashed = "stroke=\"currentColor\" stroke-dasharray=\"6 4\"";
    chart.shape("polyline", [(0.0, limit), (extent.seconds, limit)], dashed);
    let swap = samples.iter().map(|sample| (seconds(sample), sample.swap_used_mib));
    chart.shape("polyline", swap, &format!("stroke=\"{SWAP}\" stroke-width=\"2\""));
    chart.end()
}

/// Curves over one axis, with a line at zero.
pub fn curves(drawing: &Drawing) -> String {
    let points = || drawing.curves.iter().flat_map(|curve| &curve.points);
    let x = extent(points().map(|point| point.0));
    let y = extent(points().map(|point| point.1).chain([0.0]));
    let zero = [(x.start, 0.0), (x.end, 0.0)];
    let mut chart = Chart::new(&drawing.title, (x, &drawing.x), (y, &drawing.y));
    chart.shape("polyline", zero, "stroke=\"currentColor\" stroke-dasharray=\"6 4\"");
    for (Curve { points, .. }, color) in drawing.curves.iter().zip(CURVES.iter().cycle()) {
        let style = format!("stroke=\"{color}\" stroke-width=\"2\"");
        chart.shape("polyline", points.iter().copied(), &style);
    }
    chart.end()
}

/// The smallest range that contains all values, with a margin; never empty.
fn extent(values: impl Iterator<Item = f64>) -> Range<f64> {
    let (low, high) = values.fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), value| {
        (low.min(value), high.max(value))
    });
    if low > high {
        return 0.0..1.0;
    }
    let room = if high > low { (high - low) * 0.04 } else { 1.0 };
    low - room..high + room
}

/// Round numbers in a range: multiples of 1, 2 or 5 times a power of ten.
fn ticks(range: &Range<f64>) -> Vec<f64> {
    let rough = (range.end - range.start) / TICKS;
    let power = 10_f64.powf(rough.log10().floor());
    let step = [1.0, 2.0, 5.0, 10.0]
        .into_iter()
        .map(|factor| factor * power)
        .find(|step| *step >= rough * 0.999)
        .unwrap_or(rough);
    let first = (range.start / step).ceil() as i64;
    let last = (range.end / step).floor() as i64;
    (first..=last).map(|count| count as f64 * step).collect()
}

/// A chart that is being drawn.
struct Chart {
    svg: String,
    x: Range<f64>,
    y: Range<f64>,
}

impl Chart {
    /// Begins with a grid and its numbers; each axis has a label.
    fn new(title: &str, (x, of_x): (Range<f64>, &str), (y, of_y): (Range<f64>, &str)) -> Self {
        let mut chart = Self { svg: String::new(), x, y };
        let mut svg = format!(
            "<svg role=\"img\" aria-label=\"{}\" xmlns=\"http://www.w3.org/2000/svg\" \
             viewBox=\"0 0 {WIDTH} {HEIGHT}\" font-size=\"12\" fill=\"none\">\n",
            escaped(title)
        );
        let (right, base) = (WIDTH - RIGHT, HEIGHT - BOTTOM);
        // Writing to a String cannot fail, here and below.
        for value in ticks(&chart.y) {
            let (_, at) = chart.place((chart.x.start, value));
            let _ = writeln!(
                svg,
                "<path stroke=\"currentColor\" opacity=\".2\" d=\"M{LEFT} {at:.1}H{right}\"/>\
                 <text text-anchor=\"end\" x=\"{}\" y=\"{:.1}\">{}</text>",
                LEFT - 6.0,
                at + 4.0,
                number(Some(value))
            );
        }
        for value in ticks(&chart.x) {
            let (at, _) = chart.place((value, chart.y.start));
            let _ = writeln!(
                svg,
                "<text text-anchor=\"middle\" x=\"{at:.1}\" y=\"{}\">{}</text>",
                base + 16.0,
                number(Some(value))
            );
        }
        let _ = writeln!(
            svg,
            "<path stroke=\"currentColor\" opacity=\".6\" d=\"M{LEFT} {TOP}V{base}H{right}\"/>\
             <text x=\"2\" y=\"12\">{}</text>\
             <text text-anchor=\"end\" x=\"{right}\" y=\"{}\">{}</text>",
            escaped(of_y),
            HEIGHT - 4.0,
            escaped(of_x)
        );
        chart.svg = svg;
        chart
    }

    /// Position of a point.
    fn place(&self, (x, y): (f64, f64)) -> (f64, f64) {
        let part =
            |range: &Range<f64>, value: f64| (value - range.start) / (range.end - range.start);
        (
            LEFT + part(&self.x, x) * (WIDTH - RIGHT - LEFT),
            HEIGHT - BOTTOM - part(&self.y, y) * (HEIGHT - BOTTOM - TOP),
        )
    }

    /// Adds a shape with these corners, if any.
    fn shape(&mut self, kind: &str, points: impl IntoIterator<Item = (f64, f64)>, style: &str) {
        let places: Vec<String> = points
            .into_iter()
            .map(|point| self.place(point))
            .map(|(x, y)| format!("{x:.1},{y:.1}"))
            .collect();
        if !places.is_empty() {
            let _ = writeln!(self.svg, "<{kind} {style} points=\"{}\"/>", places.join(" "));
        }
    }

    fn end(mut self) -> String {
        self.svg.push_str("</svg>\n");
        self.svg
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::results::tests::example;

    #[test]
    fn layers_are_stacked_up_to_the_hosts_use() {
        let results = example();
        let layers = stacked(&results.samples[2]);
        assert_eq!(layers.len(), 3);
        assert!(layers.windows(2).all(|pair| (pair[0].1 - pair[1].0).abs() < 1e-9));
        assert!((layers[2].1 - results.samples[2].host_used_mib).abs() < 1e-9);
    }

    #[test]
    fn guests_that_outgrow_the_reading_of_the_host_leave_no_negative_layer() {
        let mut sample = example().samples[1].clone();
        sample.host_used_mib = 100.0;
        assert!(stacked(&sample).iter().all(|(bottom, top)| bottom <= top && *bottom >= 0.0));
    }

    #[test]
    fn the_extent_contains_all_samples() {
        let results = example();
        let extent = Extent::of(&results);
        assert!(extent.seconds >= 2.0);
        assert!(extent.mib >= 2000.0);
    }

    #[test]
    fn a_timeline_has_one_area_per_guest_and_one_for_the_host() {
        let results = example();
        let samples: Vec<&Sample> = results.samples_of("no-reporting").collect();
        let svg = timeline(&samples, 2000, Extent::of(&results), "a \"b\"");
        assert_eq!(svg.matches("<polygon").count(), 3);
        assert!(svg.starts_with("<svg role=\"img\" aria-label=\"a &quot;b&quot;\""));
        assert!(svg.contains(">MiB</text>") && svg.contains(">2000</text>"), "{svg}");
    }

    #[test]
    fn a_series_without_samples_is_an_empty_chart() {
        let svg = timeline(&[], 2000, Extent { seconds: 1.0, mib: 2000.0 }, "none");
        assert_eq!(svg.matches("<polygon").count(), 0);
        assert!(svg.trim_end().ends_with("</svg>"));
    }

    #[test]
    fn grids_have_round_numbers() {
        assert_eq!(ticks(&(0.0..2080.0)), [0.0, 500.0, 1000.0, 1500.0, 2000.0]);
        assert_eq!(ticks(&(-1.3..2.6)), [-1.0, 0.0, 1.0, 2.0]);
        assert_eq!(ticks(&(0.0..61.0)), [0.0, 20.0, 40.0, 60.0]);
    }

    fn drawing(curves: &[&[(f64, f64)]]) -> Drawing {
        let [title, x, y] = ["drift", "days", "s"].map(str::to_owned);
        let curve =
            |points: &&[(f64, f64)]| Curve { name: "+1 ppm".to_owned(), points: points.to_vec() };
        Drawing { title, x, y, curves: curves.iter().map(curve).collect() }
    }

    #[test]
    fn every_curve_is_drawn_inside_of_the_axes() {
        let svg = curves(&drawing(&[&[(0.0, 1.0), (14.0, -0.21)], &[(0.0, 1.0), (14.0, 2.21)]]));
        assert!(svg.starts_with("<svg role=\"img\" aria-label=\"drift\""));
        assert!(svg.contains(">days</text>"));
        for color in &CURVES[..2] {
            let is_drawn = |line: &str| line.contains("<polyline") && line.contains(color);
            assert!(svg.lines().any(is_drawn), "{color}");
        }
        let numbers = svg.split("points=\"").skip(1).filter_map(|rest| rest.split('"').next());
        for (x, y) in
            numbers.flat_map(str::split_whitespace).filter_map(|pair| pair.split_once(','))
        {
            let (x, y): (f64, f64) = (x.parse().unwrap(), y.parse().unwrap());
            assert!((LEFT..=WIDTH - RIGHT).contains(&x), "{x}");
            assert!((TOP..=HEIGHT - BOTTOM).contains(&y), "{y}");
        }
    }

    #[test]
    fn curves_without_points_or_with_equal_points_are_drawn() {
        for points in [&[][..], &[&[(0.0, 0.0), (1.0, 0.0)][..]], &[&[(5.0, 5.0)][..]]] {
            assert!(!curves(&drawing(points)).contains("NaN"));
        }
    }
}
