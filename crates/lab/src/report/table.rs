//! The results as a table for a terminal, which is also valid Markdown.

use std::fmt::Write as _;

use comfy_table::{Cell, CellAlignment, Table, presets};

use crate::report::figures::DataTable;
use crate::report::results::{Place, Results, Series};
use crate::report::statistics::number;

/// The heading of a metric with its unit.
pub fn heading(title: &str, unit: &str) -> String {
    if unit.is_empty() { title.to_owned() } else { format!("{title}, {unit}") }
}

/// One line on the origin of the numbers.
pub fn origin(results: &Results) -> String {
    let place = match results.host.place {
        Place::Direct => "directly on this machine",
        Place::VirtualHost => "in the virtual host",
    };
    format!(
        "{} at {} scale, {place}: {} CPUs, {} MiB RAM, {} MiB swap, Linux {}; {:.0} s",
        results.experiment,
        results.scale,
        results.host.cpus,
        results.host.memory_mib,
        results.host.swap_mib,
        results.host.kernel,
        results.elapsed_s,
    )
}

/// Metrics as rows, series as columns, then the notes of each series.
pub fn render(results: &Results) -> String {
    format!("{}\n{}", origin(results), body(results, ""))
}

/// The same as Markdown.
pub fn markdown(results: &Results) -> String {
    format!("{}\n\n{}", origin(results), body(results, "- "))
}

/// The table of the metrics: a row for each that a series has a value of, a column for each series.
pub fn metrics(results: &Results) -> String {
    let mut table = Table::new();
    table.load_style(presets::ASCII_MARKDOWN);
    let cell = |text: String| Cell::new(text).set_alignment(CellAlignment::Right);
    let names = results.series.iter().map(|series| cell(series.name.clone()));
    table.set_header([Cell::new("")].into_iter().chain(names));
    for metric in &results.metrics {
        let value = |series: &Series| series.metrics.get(&metric.name).copied().flatten();
        if results.series.iter().all(|series| value(series).is_none()) {
            continue;
        }
        let values = results.series.iter().map(|series| cell(number(value(series))));
        let title = Cell::new(heading(&metric.title, &metric.unit));
        table.add_row([title].into_iter().chain(values));
    }
    format!("{table}\n")
}

/// The tables, then a line for each note, which begins with `bullet`.
fn body(results: &Results, bullet: &str) -> String {
    let mut text = metrics(results);
    for series in &results.series {
        for data in &series.tables {
            // Writing to a String cannot fail.
            let _ = writeln!(text, "\n{}: {}\n\n{}", series.name, data.title, data_table(data));
        }
    }
    let too_noisy = |line: &String| format!("TOO NOISY TO TELL: {line}");
    // An error may end with lines of a guest's console, which must stay in their list item.
    let plain = |line: &String| if bullet.is_empty() { line.clone() } else { escaped(line) };
    let lines = results.series.iter().flat_map(|series| {
        let notes = series.notes.iter().chain(series.error.as_ref()).map(plain);
        let all = notes.chain(series.too_noisy.iter().map(too_noisy));
        all.map(|line| format!("{bullet}{}: {line}\n", series.name))
    });
    let lines: String = lines.collect();
    if !lines.is_empty() && !bullet.is_empty() {
        text.push('\n');
    }
    text + &lines
}

/// Escapes text so that it stays one paragraph of a Markdown list item.
fn escaped(text: &str) -> String {
    let mut escaped = String::new();
    for character in text.chars() {
        match character {
            '\n' => escaped.push_str(" / "),
            '<' | '>' | '|' | '`' | '[' | ']' | '\\' => escaped.extend(['\\', character]),
            character => escaped.push(character),
        }
    }
    escaped
}

fn data_table(data: &DataTable) -> Table {
    let mut table = Table::new();
    table.load_style(presets::ASCII_MARKDOWN);
    let cell = |text: String| Cell::new(text).set_alignment(CellAlignment::Right);
    table.set_header(data.columns.iter().map(|column| cell(column.clone())));
    for row in &data.rows {
        table.add_row(row.iter().map(|value| cell(value.shown())));
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_a_guest_stay_in_their_item() {
        assert_eq!(escaped("ended:\n# <b>|x`"), "ended: / # \\<b\\>\\|x\\`");
    }
    use crate::report::results::tests::example;

    #[test]
    fn every_metric_is_a_row_and_every_series_a_column() {
        let text = render(&example());
        let header = text.lines().find(|line| line.contains("no-reporting")).unwrap();
        assert!(header.find("no-reporting").unwrap() < header.rfind(" reporting").unwrap());
        let row = text.lines().find(|line| line.contains("90 % returned after, s")).unwrap();
        let values: Vec<&str> =
            row.split([' ', '|']).filter(|word| !word.is_empty()).rev().take(2).collect();
        assert_eq!(values, ["4.25", "-"]);
    }

    #[test]
    fn a_metric_that_no_series_measured_has_no_row() {
        let mut results = example();
        let mut never = results.metrics[0].clone();
        (never.name, never.title) = ("never_s".to_owned(), "Never measured".to_owned());
        results.metrics.push(never);
        assert!(!render(&results).contains("Never measured"));
    }

    #[test]
    fn tables_of_a_series_follow_and_details_do_not() {
        let mut results = example();
        let table = |title: &str| DataTable {
            title: title.to_owned(),
            columns: vec!["uptime".to_owned(), "+1 ppm".to_owned()],
            rows: vec![vec!["14 d".into(), "-0.210".into()]],
        };
        results.series[0].tables.push(table("fresh guests"));
        results.series[0].details.push(table("everything"));
        let text = render(&results);
        assert!(text.contains("\nno-reporting: fresh guests\n\n"), "{text}");
        assert!(text.contains("|   14 d | -0.210 |"), "{text}");
        assert!(!text.contains("everything"));
    }

    #[test]
    fn uncertain_results_are_lines() {
        let mut results = example();
        results.series[1].too_noisy.push("Times as fast: 1.1 is not certain".to_owned());
        assert!(
            render(&results)
                .ends_with("\nreporting: TOO NOISY TO TELL: Times as fast: 1.1 is not certain\n")
        );
    }

    #[test]
    fn notes_and_errors_are_shown_with_their_series() {
        let mut results = example();
        results.series[1].error = Some("guest 2 died".to_owned());
        let text = render(&results);
        assert!(text.contains("no-reporting: swap was used <by> guest 4\n"));
        assert!(text.contains("\nreporting: guest 2 died\n"));
    }
}
