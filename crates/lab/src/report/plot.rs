//! Plots as SVG text, drawn with plotters.
//!
//! Texts and axes take the page's colour (`currentColor`, set by the style sheet of
//! [`crate::report::page`]); areas and bars use a palette that reads on light and on dark ground.

use plotters::coord::Shift;
use plotters::prelude::*;

use crate::LabError;
use crate::report::results::{Results, Sample, Series};
use crate::report::table;

/// Size of the plot of a series over time, in CSS pixels.
const TIMELINE_SIZE: (u32, u32) = (880, 300);
/// Width of a bar chart and height of one bar with its space.
const BARS_WIDTH: u32 = 430;
const BAR_HEIGHT: u32 = 26;
/// Axes and texts; the style sheet replaces it by the page's text colour.
pub(crate) const NEUTRAL: RGBColor = RGBColor(0x80, 0x80, 0x80);
/// The host's own memory, at the bottom of the stack.
const HOST: RGBColor = RGBColor(0x9a, 0xa0, 0xa6);
/// Swap: the one thing that must catch the eye.
const SWAP: RGBColor = RGBColor(0xd6, 0x27, 0x28);
/// Guests, repeated; neighbours differ in lightness too, so that the stack reads without colours.
const GUESTS: [RGBColor; 6] = [
    RGBColor(0x1f, 0x77, 0xb4),
    RGBColor(0x7f, 0xb8, 0xe0),
    RGBColor(0x2a, 0x8c, 0x6e),
    RGBColor(0x8f, 0xd1, 0xb5),
    RGBColor(0x6a, 0x51, 0xa3),
    RGBColor(0xb3, 0xa2, 0xd6),
];

/// Limits of the plots of several series, so that they can be compared by eye.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Extent {
    /// End of the time axis in seconds.
    pub seconds: f64,
    /// End of the memory axis in MiB.
    pub mib: f64,
}

impl Extent {
    /// Holds every sample of the results and the host's memory.
    pub fn of(results: &Results) -> Self {
        let seconds =
            results.samples.iter().map(|sample| sample.t_ms as f64 / 1000.0).fold(1.0, f64::max);
        let highest = results
            .samples
            .iter()
            .map(|sample| {
                stacked(sample).last().map_or(0.0, |layer| layer.1).max(sample.swap_used_mib)
            })
            .fold(results.host.memory_mib as f64, f64::max);
        Self { seconds, mib: highest * 1.04 }
    }
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
///
/// # Errors
/// [`LabError::Plot`] when the drawing library refuses, which a bounded number of samples does not
/// cause.
pub fn timeline(
    samples: &[&Sample],
    host_memory_mib: u64,
    extent: Extent,
    title: &str,
) -> Result<String, LabError> {
    let mut svg = String::new();
    {
        let area = SVGBackend::with_string(&mut svg, TIMELINE_SIZE).into_drawing_area();
        draw_timeline(&area, samples, host_memory_mib, extent)
            .map_err(|error| LabError::Plot(error.to_string()))?;
        area.present().map_err(|error| LabError::Plot(error.to_string()))?;
    }
    Ok(labelled(&svg, title))
}

fn draw_timeline(
    area: &DrawingArea<SVGBackend<'_>, Shift>,
    samples: &[&Sample],
    host_memory_mib: u64,
    extent: Extent,
) -> Result<(), Box<dyn std::error::Error>> {
    let mut chart = ChartBuilder::on(area)
        .margin(8)
        .margin_right(16)
        .x_label_area_size(34)
        .y_label_area_size(64)
        .build_cartesian_2d(0.0..extent.seconds, 0.0..extent.mib)?;
    let text = ("sans-serif", 12).into_font().color(&NEUTRAL);
    chart
        .configure_mesh()
        .disable_x_mesh()
        .light_line_style(NEUTRAL.mix(0.0))
        .bold_line_style(NEUTRAL.mix(0.25))
        .axis_style(NEUTRAL)
        .label_style(text.clone())
        .axis_desc_style(text)
        .x_desc("seconds")
        .y_desc("MiB at the host")
        .y_label_formatter(&|value| format!("{value:.0}"))
        .x_label_formatter(&|value| format!("{value:.0}"))
        .draw()?;
    let seconds = |sample: &Sample| sample.t_ms as f64 / 1000.0;
    let layers: Vec<Vec<(f64, f64)>> = samples.iter().map(|sample| stacked(sample)).collect();
    let depth = layers.iter().map(Vec::len).max().unwrap_or(0);
    for layer in 0..depth {
        // A guest that is not there yet, or not any more, has no height.
        let edge = |index: usize| {
            let all = &layers[index];
            all.get(layer)
                .copied()
                .unwrap_or_else(|| all.last().map_or((0.0, 0.0), |last| (last.1, last.1)))
        };
        let upper = (0..samples.len()).map(|index| (seconds(samples[index]), edge(index).1));
        let lower = (0..samples.len()).rev().map(|index| (seconds(samples[index]), edge(index).0));
        let color = if layer == 0 { HOST } else { GUESTS[(layer - 1) % GUESTS.len()] };
        let outline: Vec<(f64, f64)> = upper.chain(lower).collect();
        chart.draw_series(std::iter::once(Polygon::new(outline, color.mix(0.85))))?;
    }
    let limit = host_memory_mib as f64;
    chart.draw_series(DashedLineSeries::new(
        [(0.0, limit), (extent.seconds, limit)],
        6,
        4,
        NEUTRAL.stroke_width(1),
    ))?;
    let swap = samples.iter().map(|sample| (seconds(sample), sample.swap_used_mib));
    chart.draw_series(LineSeries::new(swap, SWAP.stroke_width(2)))?;
    Ok(())
}

/// One metric of every series as horizontal bars with the value beside each.
///
/// # Errors
/// As [`timeline`].
pub fn bars(series: &[Series], metric: &str, title: &str) -> Result<String, LabError> {
    let mut svg = String::new();
    {
        let height = BAR_HEIGHT * series.len() as u32 + 8;
        let area = SVGBackend::with_string(&mut svg, (BARS_WIDTH, height)).into_drawing_area();
        draw_bars(&area, series, metric).map_err(|error| LabError::Plot(error.to_string()))?;
        area.present().map_err(|error| LabError::Plot(error.to_string()))?;
    }
    Ok(labelled(&svg, title))
}

fn draw_bars(
    area: &DrawingArea<SVGBackend<'_>, Shift>,
    series: &[Series],
    metric: &str,
) -> Result<(), Box<dyn std::error::Error>> {
    const NAME_WIDTH: i32 = 150;
    const VALUE_WIDTH: i32 = 60;
    let value = |series: &Series| series.metrics.get(metric).copied().flatten();
    let largest = series.iter().filter_map(value).fold(0.0, f64::max);
    let span = f64::from(BARS_WIDTH as i32 - NAME_WIDTH - VALUE_WIDTH);
    let text = ("sans-serif", 13).into_font().color(&NEUTRAL);
    for (index, series) in series.iter().enumerate() {
        let top = 4 + (BAR_HEIGHT * index as u32) as i32;
        area.draw(&Text::new(series.name.clone(), (0, top + 5), text.clone()))?;
        let measured = value(series);
        let length = match measured {
            Some(measured) if largest > 0.0 => (measured.max(0.0) / largest * span).round() as i32,
            _ => 0,
        };
        let bar = [(NAME_WIDTH, top + 2), (NAME_WIDTH + length, top + BAR_HEIGHT as i32 - 4)];
        area.draw(&Rectangle::new(bar, GUESTS[0].filled()))?;
        let label = table::number(measured);
        area.draw(&Text::new(label, (NAME_WIDTH + length + 6, top + 5), text.clone()))?;
    }
    Ok(())
}

/// Makes the picture scale with the page and tells screen readers what it is.
pub(crate) fn labelled(svg: &str, title: &str) -> String {
    let attributes =
        format!("<svg role=\"img\" aria-label=\"{}\" ", crate::report::page::escaped(title));
    svg.replacen("<svg ", &attributes, 1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::results::tests::example;

    #[test]
    fn layers_stand_on_each_other_and_reach_what_the_host_uses() {
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
    fn the_extent_holds_all_samples() {
        let results = example();
        let extent = Extent::of(&results);
        assert!(extent.seconds >= 2.0);
        assert!(extent.mib >= 2000.0);
    }

    #[test]
    fn a_timeline_has_one_area_a_guest_and_one_for_the_host() {
        let results = example();
        let samples: Vec<&Sample> = results.samples_of("no-reporting").collect();
        let svg = timeline(&samples, 2000, Extent::of(&results), "a \"b\"").unwrap();
        assert_eq!(svg.matches("<polygon").count(), 3);
        assert!(svg.starts_with("<svg role=\"img\" aria-label=\"a &quot;b&quot;\""));
        assert!(svg.contains("MiB at the host"));
    }

    #[test]
    fn a_series_without_samples_is_an_empty_plot() {
        let svg = timeline(&[], 2000, Extent { seconds: 1.0, mib: 2000.0 }, "none").unwrap();
        assert_eq!(svg.matches("<polygon").count(), 0);
        assert!(svg.trim_end().ends_with("</svg>"));
    }

    #[test]
    fn bars_are_as_long_as_their_values_are_large() {
        let results = example();
        let svg = bars(&results.series, "guests_without_swap", "guests").unwrap();
        let widths: Vec<f64> = svg
            .lines()
            .filter(|line| line.contains("<rect") && line.contains("#1F77B4"))
            .filter_map(|line| line.split("width=\"").nth(1)?.split('"').next()?.parse().ok())
            .collect();
        assert_eq!(widths.len(), 2);
        assert!((widths[0] / widths[1] - 3.0 / 8.0).abs() < 0.02, "{widths:?}");
    }

    #[test]
    fn a_metric_nobody_measured_draws_dashes_only() {
        let results = example();
        let svg = bars(&results.series, "monitor_rss_mib", "monitor").unwrap();
        assert_eq!(svg.lines().filter(|line| line.trim() == "-").count(), 2);
    }
}
