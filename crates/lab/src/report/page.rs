//! The results as one self-contained page: no external scripts, fonts or images.
//!
//! It shows the host's memory over time, then each metric as a small chart of all series, then the
//! numbers.

use std::fmt::Write as _;

use crate::report::chart::{self, CURVES, Extent, GUESTS, HOST, SWAP, escaped};
use crate::report::figures::DataTable;
use crate::report::results::{
    Better, GuestRecord, MemoryLimit, MetricInfo, Results, Sample, Series,
};
use crate::report::statistics::number;
use crate::report::table::{heading, origin};

/// Colours come from the reader's preference; charts take the text's colour for axes and labels.
const STYLE: &str = "\
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1160px; margin: 0 auto; padding: 1em; }
h1 { font-size: 1.5em; margin: 0; } h2 { font-size: 1.15em; margin: 2em 0 .6em; }
.grid { display: grid; gap: 1em;
  grid-template-columns: repeat(auto-fill, minmax(min(100%, 30em), 1fr)); }
.small { grid-template-columns: repeat(auto-fill, minmax(min(100%, 17em), 1fr)); }
figure { margin: 0; padding: .6em .8em; border: 1px solid #8885; border-radius: 6px; min-width: 0; }
figcaption { font-weight: 600; line-height: 1.3; margin-bottom: .4em; }
svg { display: block; width: 100%; height: auto; } svg text { fill: currentColor; }
.legend { display: flex; flex-wrap: wrap; gap: .2em 1.2em; margin: .3em 0 .8em; font-size: .9em; }
.legend i { display: inline-block; width: 1em; height: .8em; margin-right: .4em; }
.bars { display: grid; grid-template-columns: fit-content(40%) 1fr max-content; gap: .15em .6em;
  align-items: center; font-size: .9em; overflow-wrap: anywhere; }
.bars b { font-weight: 400; text-align: right; white-space: nowrap;
  font-variant-numeric: tabular-nums; }
.bars div { position: relative; height: .9em; min-width: 3em; }
.bars div * { position: absolute; top: 0; bottom: 0; min-width: 1px; border-radius: 1px; }
.bars s { top: 45%; bottom: 45%; background: currentColor; opacity: .7; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; }
th, td { padding: .25em .8em; border-bottom: 1px solid #8884; text-align: left;
  vertical-align: top; }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
details { margin: .4em 0; } summary { cursor: pointer; } li { margin: .15em 0; }
.muted { opacity: .75; font-weight: 400; } .error { color: #d62728; font-weight: 600; }
.noisy { border-left: 4px solid #e08a1e; padding: .1em 1em; } code { font-size: .95em; }
";

/// The mark of a dashed line.
const DASHED: &str = "repeating-linear-gradient(90deg, currentColor 0 4px, transparent 4px 7px) 0 \
                      50%/100% 2px no-repeat";

/// The page.
pub fn render(results: &Results) -> String {
    let mut page = String::new();
    let title = format!("{} ({})", results.experiment, results.scale);
    // Writing to a String cannot fail, here and below.
    let _ = write!(
        page,
        "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width\">\n<title>Ebb lab: {0}</title>\n\
         <style>\n{STYLE}</style>\n</head>\n<body>\n<h1>{0}</h1>\n<p>{1}</p>\n\
         <p class=\"muted\">{2}</p>\n",
        escaped(&title),
        escaped(&results.summary),
        escaped(&origin(results)),
    );
    errors(&mut page, results);
    timelines(&mut page, results);
    drawings(&mut page, results);
    metrics_bars(&mut page, results);
    metrics_table(&mut page, results);
    data_tables(&mut page, results);
    guests(&mut page, results);
    setting(&mut page, results);
    page.push_str("</body>\n</html>\n");
    page
}

/// Errors and uncertain results, before anything else.
fn errors(page: &mut String, results: &Results) {
    for Series { name, error, too_noisy, .. } in &results.series {
        if let Some(error) = error {
            let _ = writeln!(page, "<p class=\"error\">{}: {}</p>", escaped(name), escaped(error));
        }
        if !too_noisy.is_empty() {
            let lines: Vec<String> = too_noisy.iter().map(|line| escaped(line)).collect();
            let _ = writeln!(
                page,
                "<p class=\"noisy\">{}: lost in the machine's noise. {}.</p>",
                escaped(name),
                lines.join(".<br>")
            );
        }
    }
}

/// Colours with their meaning.
fn legend<'a>(page: &mut String, entries: impl IntoIterator<Item = (&'a str, &'a str)>) {
    page.push_str("<div class=\"legend\">");
    for (color, name) in entries {
        let _ = write!(page, "<span><i style=\"background:{color}\"></i>{}</span>", escaped(name));
    }
    page.push_str("</div>\n");
}

fn timelines(page: &mut String, results: &Results) {
    if results.samples.is_empty() {
        return;
    }
    let extent = Extent::of(results);
    page.push_str("<h2>Host memory over time</h2>\n");
    let most = results.samples.iter().map(|sample| sample.guest_rss_mib.len()).max().unwrap_or(0);
    let names: Vec<String> =
        (1..=most.min(GUESTS.len())).map(|guest| format!("guest {guest}")).collect();
    let guests = GUESTS.into_iter().zip(names.iter().map(String::as_str));
    let repeated = (most > GUESTS.len()).then_some(("none", "and so on, in the order of starting"));
    let all = [(HOST, "the host itself")].into_iter().chain(guests).chain(repeated);
    legend(page, all.chain([(SWAP, "swap in use"), (DASHED, "the host's RAM")]));
    page.push_str("<div class=\"grid\">\n");
    for Series { name, .. } in &results.series {
        let samples: Vec<&Sample> = results.samples_of(name).collect();
        // Series that ran together have their samples under the first one's name.
        if samples.is_empty() {
            continue;
        }
        let title = format!("Host memory over time, {name}");
        let chart = chart::timeline(&samples, results.host.memory_mib, extent, &title);
        let name = escaped(name);
        let _ = writeln!(page, "<figure><figcaption>{name}</figcaption>\n{chart}</figure>");
    }
    page.push_str("</div>\n");
}

fn drawings(page: &mut String, results: &Results) {
    if results.series.iter().all(|series| series.drawings.is_empty()) {
        return;
    }
    page.push_str("<h2>Curves</h2>\n<div class=\"grid\">\n");
    for series in &results.series {
        for drawing in &series.drawings {
            let title = escaped(&format!("{}: {}", series.name, drawing.title));
            let chart = chart::curves(drawing);
            let _ = writeln!(page, "<figure><figcaption>{title}</figcaption>\n{chart}");
            let names = drawing.curves.iter().map(|curve| curve.name.as_str());
            legend(page, CURVES.into_iter().cycle().zip(names));
            page.push_str("</figure>\n");
        }
    }
    page.push_str("</div>\n");
}

/// A chart for each metric that any series has.
fn metrics_bars(page: &mut String, results: &Results) {
    page.push_str("<h2>Metrics</h2>\n");
    if results.series.iter().any(|series| !series.spread.is_empty()) {
        let words = "Lines reach from the lowest to the highest of repeated measurements.";
        let _ = writeln!(page, "<p class=\"muted\">{words}</p>");
    }
    page.push_str("<div class=\"grid small\">\n");
    for metric in &results.metrics {
        if results.series.iter().any(|series| value(series, metric).is_some()) {
            bars(page, &results.series, metric);
        }
    }
    page.push_str("</div>\n");
}

fn value(series: &Series, metric: &MetricInfo) -> Option<f64> {
    series.metrics.get(&metric.name).copied().flatten()
}

/// One metric of every series as horizontal bars from zero with the value beside each, and a line
/// from the lowest to the highest of repeated measurements.
fn bars(page: &mut String, all: &[Series], metric: &MetricInfo) {
    let better = match metric.better {
        Better::Higher => "more is better",
        Better::Lower => "less is better",
    };
    let _ = writeln!(
        page,
        "<figure><figcaption>{} <span class=\"muted\">({better})</span></figcaption>\n<div \
         class=\"bars\">",
        escaped(&heading(&metric.title, &metric.unit)),
    );
    let spread = |series: &Series| series.spread.get(&metric.name).copied();
    let values = || {
        let bounds = all.iter().filter_map(spread).flatten();
        all.iter().filter_map(|series| value(series, metric)).chain(bounds).chain([0.0])
    };
    let (low, high) = (values().fold(0.0, f64::min), values().fold(0.0, f64::max));
    let span = if high > low { high - low } else { 1.0 };
    let style = |from: f64, to: f64| {
        let percent = |length: f64| length / span * 100.0;
        format!("left:{:.1}%;width:{:.1}%", percent(from.min(to) - low), percent((to - from).abs()))
    };
    for (series, color) in all.iter().zip(CURVES.iter().cycle()) {
        let measured = value(series, metric);
        let _ = write!(page, "<span>{}</span><div>", escaped(&series.name));
        if let Some(measured) = measured {
            let style = style(0.0, measured);
            let _ = write!(page, "<i style=\"background:{color};{style}\"></i>");
        }
        if let Some([from, to]) = spread(series) {
            let _ = write!(page, "<s style=\"{}\"></s>", style(from, to));
        }
        let _ = writeln!(page, "</div><b>{}</b>", number(measured));
    }
    page.push_str("</div></figure>\n");
}

fn metrics_table(page: &mut String, results: &Results) {
    page.push_str("<h2>Numbers</h2>\n<div class=\"scroll\"><table>\n<tr><th></th>");
    for series in &results.series {
        let _ = write!(page, "<th class=\"n\">{}</th>", escaped(&series.name));
    }
    page.push_str("</tr>\n");
    for metric in &results.metrics {
        let title = escaped(&heading(&metric.title, &metric.unit));
        let _ = write!(page, "<tr><td>{title}</td>");
        for series in &results.series {
            let _ = write!(page, "<td class=\"n\">{}</td>", number(value(series, metric)));
        }
        page.push_str("</tr>\n");
    }
    page.push_str("</table></div>\n<ul>\n");
    for Series { name, setup, notes, .. } in &results.series {
        let _ = writeln!(page, "<li><code>{}</code>: {}</li>", escaped(name), escaped(setup));
        for note in notes {
            let line = escaped(&format!("{name}: {note}"));
            let _ = writeln!(page, "<li class=\"muted\">{line}</li>");
        }
    }
    page.push_str("</ul>\n");
}

fn data_tables(page: &mut String, results: &Results) {
    for series in &results.series {
        for table in &series.tables {
            let title = escaped(&format!("{}: {}", series.name, table.title));
            let _ = writeln!(page, "<h2>{title}</h2>");
            data_table(page, table);
        }
        for table in &series.details {
            folded(page, &format!("{}: {}", series.name, table.title), table);
        }
    }
}

fn folded(page: &mut String, title: &str, table: &DataTable) {
    let _ = writeln!(page, "<details><summary>{}</summary>", escaped(title));
    data_table(page, table);
    page.push_str("</details>\n");
}

fn data_table(page: &mut String, table: &DataTable) {
    page.push_str("<div class=\"scroll\"><table>\n<tr>");
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
    page.push_str("</table></div>\n");
}

fn guests(page: &mut String, results: &Results) {
    if results.series.iter().all(|series| series.guests.is_empty()) {
        return;
    }
    page.push_str("<h2>Each guest</h2>\n");
    for Series { name, guests, .. } in &results.series {
        let table = DataTable::of(
            "",
            guests,
            &[
                ("guest", &|guest: &GuestRecord| guest.guest.into()),
                ("start to init, s", &|guest| guest.start_to_init_s.into()),
                ("after boot, MiB", &|guest| guest.booted_rss_mib.into()),
                ("program, s", &|guest| guest.program_s.into()),
                ("peak, MiB", &|guest| guest.peak_mib.into()),
                ("90 % back, s", &|guest| guest.return_90_s.into()),
                ("idle, MiB", &|guest| guest.idle_rss_mib.into()),
                ("monitor, MiB", &|guest| guest.monitor_rss_mib.into()),
                ("host swap, MiB", &|guest| guest.swap_used_mib.into()),
            ],
        );
        folded(page, name, &table);
    }
}

fn setting(page: &mut String, results: &Results) {
    let with_guests = results.series.iter().any(|series| !series.guests.is_empty());
    let limit = match results.host.limit {
        _ if !with_guests => "no guest of the lab ran",
        MemoryLimit::HostMemory => "the host has the experiment's size; it is full when it swaps",
        MemoryLimit::Budget => {
            "the host has another size; it counts as full when its use has grown by the \
             experiment's size"
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
    fn the_page_has_no_external_references() {
        let page = render(&example());
        for foreign in ["http://", "https://", "src=", "href=", "@import", "url("] {
            let found: Vec<&str> = page
                .match_indices(foreign)
                .map(|(at, _)| &page[at..(at + 40).min(page.len())])
                .collect();
            // The name of the SVG namespace is not fetched.
            assert!(
                found.iter().all(|text| text.starts_with("http://www.w3.org/2000/svg")),
                "{found:?}"
            );
        }
        assert!(!page.contains("<script"));
    }

    #[test]
    fn the_page_shows_time_then_bars_then_numbers() {
        let results = example();
        let page = render(&results);
        let timelines = page.matches("aria-label=\"Host memory over time").count();
        assert_eq!(timelines, results.series.len());
        assert_eq!(page.matches("class=\"bars\"").count(), results.metrics.len());
        let places =
            ["Host memory over time", "<h2>Metrics", "<h2>Numbers"].map(|it| page.find(it));
        assert!(places.is_sorted() && places[0].is_some(), "{places:?}");
        assert!(page.contains("<td class=\"n\">4.25</td>"));
    }

    #[test]
    fn bars_are_as_long_as_their_values_and_begin_at_zero() {
        let mut series = example().series;
        let metric = example().metrics.remove(0);
        series[0].metrics.insert(metric.name.clone(), Some(-2.0));
        series[1].spread.insert(metric.name.clone(), [6.0, 8.0]);
        let mut page = String::new();
        bars(&mut page, &series, &metric);
        assert!(page.contains(";left:0.0%;width:20.0%\"></i></div><b>-2</b>"), "{page}");
        assert!(page.contains(";left:20.0%;width:80.0%\"></i>"), "{page}");
        assert!(page.contains("<s style=\"left:80.0%;width:20.0%\">"), "{page}");
    }

    #[test]
    fn missing_values_are_dashes_and_metrics_without_values_have_no_chart() {
        let mut results = example();
        let page = render(&results);
        assert!(page.contains("<span>no-reporting</span><div></div><b>-</b>"), "{page}");
        results.metrics.push(MetricInfo {
            name: "other".to_owned(),
            title: "Never measured".to_owned(),
            unit: String::new(),
            better: Better::Lower,
        });
        assert_eq!(render(&results).matches("Never measured").count(), 1);
    }

    #[test]
    fn uncertain_results_come_first() {
        let mut results = example();
        results.series[1].too_noisy.push("Times as fast: 1.1 is not certain".to_owned());
        let page = render(&results);
        let at = page.find("lost in the machine's noise. Times as fast: 1.1").unwrap();
        assert!(at < page.find("<h2>").unwrap());
    }

    #[test]
    fn tables_and_curves_are_shown_without_guests() {
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
        let page = render(&results);
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
        let page = render(&results);
        assert!(page.contains("A &amp; B"));
        assert!(page.contains("swap was used &lt;by&gt; guest 4"));
        assert!(!page.contains("<script>"));
    }
}
