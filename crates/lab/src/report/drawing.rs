//! Curves as SVG text.

use plotters::coord::Shift;
use plotters::prelude::*;

use crate::LabError;
use crate::report::figures::{Curve, Drawing};
use crate::report::plot::{NEUTRAL, labelled};
use crate::report::table;

/// Size in CSS pixels.
const SIZE: (u32, u32) = (880, 320);
/// Curves, repeated.
const CURVES: [RGBColor; 6] = [
    RGBColor(0x1f, 0x77, 0xb4),
    RGBColor(0xd6, 0x27, 0x28),
    RGBColor(0x2a, 0x8c, 0x6e),
    RGBColor(0xe0, 0x8a, 0x1e),
    RGBColor(0x6a, 0x51, 0xa3),
    RGBColor(0x9a, 0xa0, 0xa6),
];

/// The drawing, with a legend and a line at zero.
///
/// # Errors
/// [`LabError::Plot`] when the drawing library refuses.
pub fn lines(drawing: &Drawing) -> Result<String, LabError> {
    let mut svg = String::new();
    {
        let area = SVGBackend::with_string(&mut svg, SIZE).into_drawing_area();
        draw(&area, drawing).map_err(|error| LabError::Plot(error.to_string()))?;
        area.present().map_err(|error| LabError::Plot(error.to_string()))?;
    }
    Ok(labelled(&svg, &drawing.title))
}

/// The smallest range with all values in it and some room; never empty.
fn extent(values: impl Iterator<Item = f64>) -> std::ops::Range<f64> {
    let (low, high) = values.fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), value| {
        (low.min(value), high.max(value))
    });
    if low > high {
        return 0.0..1.0;
    }
    let room = if high > low { (high - low) * 0.04 } else { 1.0 };
    low - room..high + room
}

fn draw(
    area: &DrawingArea<SVGBackend<'_>, Shift>,
    drawing: &Drawing,
) -> Result<(), Box<dyn std::error::Error>> {
    let points = || drawing.curves.iter().flat_map(|curve| &curve.points);
    let across = extent(points().map(|point| point.0));
    let along = extent(points().map(|point| point.1).chain([0.0]));
    let mut chart = ChartBuilder::on(area)
        .margin(8)
        .margin_right(16)
        .x_label_area_size(34)
        .y_label_area_size(72)
        .build_cartesian_2d(across.clone(), along)?;
    let text = ("sans-serif", 12).into_font().color(&NEUTRAL);
    let shown = |value: &f64| table::number(Some(*value));
    chart
        .configure_mesh()
        .disable_x_mesh()
        .light_line_style(NEUTRAL.mix(0.0))
        .bold_line_style(NEUTRAL.mix(0.25))
        .axis_style(NEUTRAL)
        .label_style(text.clone())
        .axis_desc_style(text.clone())
        .x_desc(&drawing.x)
        .y_desc(&drawing.y)
        .x_label_formatter(&shown)
        .y_label_formatter(&shown)
        .draw()?;
    let zero = [(across.start, 0.0), (across.end, 0.0)];
    chart.draw_series(DashedLineSeries::new(zero, 6, 4, NEUTRAL.stroke_width(1)))?;
    for (index, Curve { name, points }) in drawing.curves.iter().enumerate() {
        let style = CURVES[index % CURVES.len()].stroke_width(2);
        chart
            .draw_series(LineSeries::new(points.iter().copied(), style))?
            .label(name)
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 18, y)], style));
    }
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::LowerLeft)
        .border_style(NEUTRAL.mix(0.25))
        .label_font(text)
        .draw()?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn drawing(curves: &[(&str, &[(f64, f64)])]) -> Drawing {
        Drawing {
            title: "drift".to_owned(),
            x: "days".to_owned(),
            y: "s".to_owned(),
            curves: curves
                .iter()
                .map(|(name, points)| Curve { name: (*name).to_owned(), points: points.to_vec() })
                .collect(),
        }
    }

    #[test]
    fn every_curve_is_drawn_and_named() {
        let svg = lines(&drawing(&[
            ("+1 ppm", &[(0.0, 1.0), (14.0, -0.21)]),
            ("-1 ppm", &[(0.0, 1.0), (14.0, 2.21)]),
        ]))
        .unwrap();
        assert!(svg.starts_with("<svg role=\"img\" aria-label=\"drift\""));
        for name in ["+1 ppm", "-1 ppm", "days"] {
            assert!(svg.contains(name), "{name}");
        }
        for color in ["#1F77B4", "#D62728"] {
            assert!(
                svg.lines().any(|line| line.contains("<polyline") && line.contains(color)),
                "{color}"
            );
        }
    }

    #[test]
    fn no_points_and_equal_points_are_no_error() {
        assert!(lines(&drawing(&[])).is_ok());
        assert!(lines(&drawing(&[("flat", &[(0.0, 0.0), (1.0, 0.0)])])).is_ok());
        assert!(lines(&drawing(&[("one", &[(5.0, 5.0)])])).is_ok());
    }
}
