//! The results as one self-contained page: no script, no font and no picture from elsewhere.

use std::fmt::Write as _;

use crate::LabError;
use crate::report::drawing;
use crate::report::figures::DataTable;
use crate::report::plot::{self, Extent};
use crate::report::results::{Better, MemoryLimit, Results, Sample, Series};
use crate::report::table;

/// Colours come from the reader's preference; the drawings take the text's colour for their axes
/// and labels.
const STYLE: &str = "\
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 920px; margin: 2em auto; padding: 0 1em; }
h1 { font-size: 1.5em; margin-bottom: 0; } h2 { font-size: 1.15em; margin-top: 2em; }
table { border-collapse: collapse; } th, td { padding: .25em .8em; border-bottom: 1px solid #8884; }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; }
svg { max-width: 100%; height: auto; } svg text { fill: currentColor; }
figure { margin: 1em 0; } figcaption { font-weight: 600; }
.bars { display: flex; flex-wrap: wrap; gap: 1em 2em; }
.muted { opacity: .75; } .error { color: #d62728; font-weight: 600; } code { font-size: .95em; }
";

/// Text for HTML and for attributes in double quotes.
pub(crate) fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

/// The page.
///
/// # Errors
/// [`LabError::Plot`] when a drawing fails.
pub fn render(results: &Results) -> Result<String, LabError> {
    let mut page = String::new();
    // Writing to a String cannot fail, here and below.
    let title = format!("{} ({})", results.experiment, results.scale);
    let _ = write!(
        page,
        "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width\">\n<title>Ebb lab: {0}</title>\n\
         <style>\n{STYLE}</style>\n</head>\n<body>\n<h1>{0}</h1>\n<p>{1}</p>\n<p class=\"muted\">{2}</p>\n",
        escaped(&title),
        escaped(&results.summary),
        escaped(&table::origin(results)),
    );
    metrics_table(&mut page, results);
    data_tables(&mut page, results);
    drawings(&mut page, results)?;
    metrics_bars(&mut page, results)?;
    if !results.samples.is_empty() {
        timelines(&mut page, results)?;
    }
    if results.series.iter().any(|series| !series.guests.is_empty()) {
        guests(&mut page, results);
    }
    setting(&mut page, results);
    page.push_str("</body>\n</html>\n");
    Ok(page)
}

fn metrics_table(page: &mut String, results: &Results) {
    page.push_str("<h2>Results</h2>\n<table>\n<tr><th></th>");
    for series in &results.series {
        let _ = write!(page, "<th class=\"n\">{}</th>", escaped(&series.name));
    }
    page.push_str("</tr>\n");
    for metric in &results.metrics {
        let _ =
            write!(page, "<tr><td>{}</td>", escaped(&table::heading(&metric.title, &metric.unit)));
        for series in &results.series {
            let value = series.metrics.get(&metric.name).copied().flatten();
            let _ = write!(page, "<td class=\"n\">{}</td>", table::number(value));
        }
        page.push_str("</tr>\n");
    }
    page.push_str("</table>\n<ul>\n");
    for series in &results.series {
        let _ = writeln!(
            page,
            "<li><code>{}</code>: {}</li>",
            escaped(&series.name),
            escaped(&series.setup)
        );
        for note in &series.notes {
            let _ = writeln!(
                page,
                "<li class=\"muted\">{}: {}</li>",
                escaped(&series.name),
                escaped(note)
            );
        }
        if let Some(error) = &series.error {
            let _ = writeln!(
                page,
                "<li class=\"error\">{}: {}</li>",
                escaped(&series.name),
                escaped(error)
            );
        }
    }
    page.push_str("</ul>\n");
}

fn data_tables(page: &mut String, results: &Results) {
    for series in &results.series {
        for table in &series.tables {
            let _ = writeln!(page, "<h2>{}: {}</h2>", escaped(&series.name), escaped(&table.title));
            data_table(page, table);
        }
        for table in &series.details {
            let title = format!("{}: {}", series.name, table.title);
            let _ = writeln!(page, "<details><summary>{}</summary>", escaped(&title));
            data_table(page, table);
            page.push_str("</details>\n");
        }
    }
}

fn data_table(page: &mut String, table: &DataTable) {
    page.push_str("<table>\n<tr>");
    for column in &table.columns {
        let _ = write!(page, "<th class=\"n\">{}</th>", escaped(column));
    }
    page.push_str("</tr>\n");
    for row in &table.rows {
        page.push_str("<tr>");
        for value in row {
            let _ = write!(page, "<td class=\"n\">{}</td>", escaped(&value.shown()));
        }
        page.push_str("</tr>\n");
    }
    page.push_str("</table>\n");
}

fn drawings(page: &mut String, results: &Results) -> Result<(), LabError> {
    for series in &results.series {
        for drawing in &series.drawings {
            let _ = writeln!(
                page,
                "<figure><figcaption>{}: {}</figcaption>\n{}</figure>",
                escaped(&series.name),
                escaped(&drawing.title),
                drawing::lines(drawing)?,
            );
        }
    }
    Ok(())
}

fn metrics_bars(page: &mut String, results: &Results) -> Result<(), LabError> {
    page.push_str("<div class=\"bars\">\n");
    for metric in &results.metrics {
        let direction = match metric.better {
            Better::Higher => "more is better",
            Better::Lower => "less is better",
        };
        let title = table::heading(&metric.title, &metric.unit);
        let _ = writeln!(
            page,
            "<figure><figcaption>{} <span class=\"muted\">({direction})</span></figcaption>\n{}</figure>",
            escaped(&title),
            plot::bars(&results.series, &metric.name, &title)?,
        );
    }
    page.push_str("</div>\n");
    Ok(())
}

fn timelines(page: &mut String, results: &Results) -> Result<(), LabError> {
    let extent = Extent::of(results);
    page.push_str(
        "<h2>Host memory over time</h2>\n<p class=\"muted\">Grey at the bottom: the host itself; above it the \
         resident memory of each guest in the order of starting. Dashed: the host's RAM. Red: swap in use.</p>\n",
    );
    for series in &results.series {
        let samples: Vec<&Sample> = results.samples_of(&series.name).collect();
        let title = format!("Host memory over time, {}", series.name);
        let _ = writeln!(
            page,
            "<figure><figcaption>{}</figcaption>\n{}</figure>",
            escaped(&series.name),
            plot::timeline(&samples, results.host.memory_mib, extent, &title)?,
        );
    }
    Ok(())
}

fn guests(page: &mut String, results: &Results) {
    const HEADINGS: [&str; 9] = [
        "guest",
        "start to init, s",
        "after boot, MiB",
        "program, s",
        "peak, MiB",
        "90 % back, s",
        "idle, MiB",
        "monitor, MiB",
        "host swap, MiB",
    ];
    page.push_str("<h2>Each guest</h2>\n");
    for Series { name, guests, .. } in &results.series {
        let _ = write!(page, "<details><summary>{}</summary>\n<table>\n<tr>", escaped(name));
        for heading in HEADINGS {
            let _ = write!(page, "<th class=\"n\">{heading}</th>");
        }
        page.push_str("</tr>\n");
        for guest in guests {
            let _ = write!(page, "<tr><td class=\"n\">{}</td>", guest.guest);
            for value in [
                guest.start_to_init_s,
                guest.booted_rss_mib,
                guest.program_s,
                guest.peak_mib,
                guest.return_90_s,
                guest.idle_rss_mib,
                guest.monitor_rss_mib,
                guest.swap_used_mib,
            ] {
                let _ = write!(page, "<td class=\"n\">{}</td>", table::number(value));
            }
            page.push_str("</tr>\n");
        }
        page.push_str("</table></details>\n");
    }
}

fn setting(page: &mut String, results: &Results) {
    let with_guests = results.series.iter().any(|series| !series.guests.is_empty());
    let limit = match results.host.limit {
        _ if !with_guests => "no guest of the lab ran",
        MemoryLimit::HostMemory => "the host has the experiment's size; it is full when it swaps",
        MemoryLimit::Budget => {
            "the host has another size; it counts as full when its use has grown by the experiment's size"
        }
    };
    let parameters: Vec<String> =
        results.parameters.iter().map(|(name, value)| format!("{name} = {value}")).collect();
    let machine = &results.machine;
    let _ = write!(
        page,
        "<h2>Setting</h2>\n<p>Machine: {}, {} CPUs, {} MiB, Linux {}. Host of the guests: {limit}. \
         Sizes: {}. Made by <code>ebb-lab run {} --scale {}</code>, version {}; the numbers are in \
         <code>results.json</code>.</p>\n",
        escaped(&machine.cpu),
        machine.cpus,
        machine.memory_mib,
        escaped(&machine.kernel),
        escaped(&parameters.join(", ")),
        escaped(&results.experiment),
        results.scale,
        escaped(&results.ebb_version),
    );
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::figures::{Curve, Drawing};
    use crate::report::results::tests::example;

    #[test]
    fn the_page_needs_nothing_from_elsewhere() {
        let page = render(&example()).unwrap();
        for foreign in ["http://", "https://", "src=", "href=", "@import", "url("] {
            let found: Vec<&str> = page
                .match_indices(foreign)
                .map(|(at, _)| &page[at..(at + 40).min(page.len())])
                .collect();
            // The name of the SVG namespace is no address to fetch from.
            assert!(
                found.iter().all(|text| text.starts_with("http://www.w3.org/2000/svg")),
                "{found:?}"
            );
        }
        assert!(!page.contains("<script"));
    }

    #[test]
    fn the_page_shows_each_series_as_table_bars_and_timeline() {
        let results = example();
        let page = render(&results).unwrap();
        assert_eq!(
            page.matches("aria-label=\"Host memory over time").count(),
            results.series.len()
        );
        assert_eq!(page.matches("<svg").count(), results.series.len() + results.metrics.len());
        assert!(page.contains("<td class=\"n\">4.25</td>"));
    }

    #[test]
    fn tables_and_curves_are_shown_and_guests_that_were_not_there_are_not() {
        let mut results = example();
        results.samples.clear();
        for series in &mut results.series {
            series.guests.clear();
        }
        let rows = vec![vec!["14 d".into(), u64::MAX.into()]];
        let columns = ["uptime", "seen, ns"].map(str::to_owned).to_vec();
        let table = DataTable { title: "time <of> a guest".to_owned(), columns, rows };
        results.series[0].tables.push(table.clone());
        results.series[1].details.push(table);
        let curves =
            vec![Curve { name: "+1 ppm".to_owned(), points: vec![(0.0, 1.0), (14.0, -0.2)] }];
        let [title, x, y] = ["drift", "days", "s"].map(str::to_owned);
        results.series[0].drawings.push(Drawing { title, x, y, curves });
        let page = render(&results).unwrap();
        assert_eq!(page.matches("<td class=\"n\">18446744073709551615</td>").count(), 2);
        assert_eq!(page.matches("time &lt;of&gt; a guest").count(), 2);
        assert!(page.contains("aria-label=\"drift\"") && page.contains("+1 ppm"));
        assert!(!page.contains("Host memory over time") && !page.contains("Each guest"));
        assert!(page.contains("no guest of the lab ran"));
    }

    #[test]
    fn names_and_notes_cannot_break_the_page() {
        let mut results = example();
        results.series[0].error = Some("<script>alert(1)</script>".to_owned());
        let page = render(&results).unwrap();
        assert!(page.contains("A &amp; B"));
        assert!(page.contains("swap was used &lt;by&gt; guest 4"));
        assert!(!page.contains("<script>"));
    }
}
