//! Counters in the Prometheus text exposition format, version 0.0.4.

use std::fmt::Write as _;

use super::merge::MergeScope;
use super::metrics::{KindCount, Metrics};

use rows::{BALLOON, MACHINE, MERGE, MERGE_OF_MACHINE, Row, Sampled, VSOCK};

mod rows;

/// Renders all metrics as text. A machine without balloon has no `ebb_balloon_*` lines.
pub fn render(metrics: &Metrics) -> String {
    let mut text = String::with_capacity(4096);
    write_rows(&mut text, "ebb_", &MACHINE, metrics);
    if let Some(merge) = &metrics.merge {
        // Counters of the host's kernel have separate names, since each machine publishes the same
        // values.
        let prefix = match merge.scope {
            MergeScope::Machine => "ebb_merge_",
            MergeScope::Host => "ebb_merge_host_",
        };
        write_rows(&mut text, prefix, &MERGE, merge);
        write_rows(&mut text, "ebb_merge_", &MERGE_OF_MACHINE, merge);
    }
    if let Some(balloon) = &metrics.balloon {
        write_rows(&mut text, "ebb_balloon_", &BALLOON, balloon);
    }
    if let Some(vsock) = &metrics.vsock {
        write_rows(&mut text, "ebb_vsock_", &VSOCK, vsock);
    }
    text
}

/// The names of all metrics as Markdown, for the OpenAPI document.
pub fn names() -> String {
    fn list<T>(rows: &[Row<T>], prefix: &str) -> String {
        let name = |row: &Row<T>| format!("`{prefix}{}`", row.name);
        rows.iter().map(name).collect::<Vec<_>>().join(", ")
    }
    format!(
        "{}; with merging `ebb_merge_` + {}, {} (counters of the host's kernel have the prefix \
         `ebb_merge_host_` instead, but for the last two); with a balloon `ebb_balloon_` + {}; \
         with a socket device `ebb_vsock_` + {}. Counters by kind have the label `kind`.",
        list(&MACHINE, "ebb_"),
        list(&MERGE, ""),
        list(&MERGE_OF_MACHINE, ""),
        list(&BALLOON, ""),
        list(&VSOCK, ""),
    )
}

/// Writes `rows`. A row whose name ends in `_total` is a counter; any other is a gauge.
fn write_rows<T>(text: &mut String, prefix: &str, rows: &[Row<T>], counted: &T) {
    for Row { name, help, value } in rows {
        let value = value(counted);
        if matches!(&value, Sampled::None)
            || matches!(&value, Sampled::Kinds(list) if list.is_empty())
        {
            continue;
        }
        let kind = if name.ends_with("_total") { "counter" } else { "gauge" };
        // Writing into a String cannot fail.
        let _ = writeln!(text, "# HELP {prefix}{name} {help}\n# TYPE {prefix}{name} {kind}");
        let _ = match value {
            Sampled::None => Ok(()),
            Sampled::Number(number) => writeln!(text, "{prefix}{name} {number}"),
            Sampled::Milliseconds(ms) => {
                writeln!(text, "{prefix}{name} {}.{:03}", ms / 1000, ms % 1000)
            }
            Sampled::Kinds(counts) => counts.iter().try_for_each(|KindCount { kind, count }| {
                writeln!(text, "{prefix}{name}{{kind=\"{}\"}} {count}", escape(kind))
            }),
        };
    }
}

fn escape(label: &str) -> String {
    label.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

/// One sample of a text in the exposition format.
#[derive(Clone, Debug, PartialEq)]
pub struct Sample {
    /// The metric's name.
    pub name: String,
    /// The value of the label `kind`, if there is one.
    pub kind: Option<String>,
    /// The value.
    pub value: f64,
}

/// Parses the output of [`render`] (no timestamps, no label but `kind`). Returns the first
/// unexpected line as the error.
pub fn parse(text: &str) -> Result<Vec<Sample>, String> {
    text.lines()
        .filter(|line| !line.is_empty() && !line.starts_with('#'))
        .map(|line| parse_sample(line).ok_or_else(|| line.to_owned()))
        .collect()
}

fn parse_sample(line: &str) -> Option<Sample> {
    let (series, value) = line.rsplit_once(' ')?;
    let value = value.parse().ok()?;
    let (name, kind) = match series.split_once('{') {
        Some((name, labels)) => {
            let escaped = labels.strip_prefix("kind=\"")?.strip_suffix("\"}")?;
            (name, Some(unescape(escaped)?))
        }
        None => (series, None),
    };
    let valid = name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_') && !name.is_empty();
    valid.then(|| Sample { name: name.to_owned(), kind, value })
}

fn unescape(escaped: &str) -> Option<String> {
    let mut text = String::with_capacity(escaped.len());
    let mut characters = escaped.chars();
    while let Some(character) = characters.next() {
        match character {
            '\\' => text.push(match characters.next()? {
                'n' => '\n',
                other @ ('\\' | '"') => other,
                _ => return None,
            }),
            '"' => return None,
            other => text.push(other),
        }
    }
    Some(text)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::merge::{MergeReplaced, MergeStatistics};
    use super::super::metrics::BalloonMetrics;
    use super::*;

    fn find<'a>(samples: &'a [Sample], name: &str, kind: Option<&str>) -> Option<&'a Sample> {
        samples.iter().find(|sample| sample.name == name && sample.kind.as_deref() == kind)
    }

    #[test]
    fn milliseconds_are_shown_in_seconds() {
        let metrics = Metrics { uptime_ms: 61_002, ..Metrics::default() };
        let samples = parse(&render(&metrics)).unwrap();
        assert!((find(&samples, "ebb_uptime_seconds", None).unwrap().value - 61.002).abs() < 1e-6);
        assert!(samples.iter().all(|sample| !sample.name.contains("balloon")));
    }

    #[test]
    fn every_sample_has_help_and_type_before_it() {
        let metrics = Metrics {
            balloon: Some(BalloonMetrics::default()),
            vcpu_exits: vec![KindCount::new("io", 7)],
            ..Metrics::default()
        };
        let text = render(&metrics);
        for sample in parse(&text).unwrap() {
            let position = text.find(&format!("\n{}", sample.name)).unwrap_or(0);
            let before = &text[..=position];
            assert!(before.contains(&format!("# HELP {} ", sample.name)), "{}", sample.name);
            let counter = sample.name.ends_with("_total");
            let kind = if counter { "counter" } else { "gauge" };
            assert!(
                before.contains(&format!("# TYPE {} {kind}\n", sample.name)),
                "{}",
                sample.name
            );
        }
    }

    fn merge_names(merge: MergeStatistics) -> Vec<String> {
        let text = render(&Metrics { merge: Some(merge), ..Metrics::default() });
        let samples = parse(&text).unwrap();
        samples
            .into_iter()
            .map(|sample| sample.name)
            .filter(|name| name.contains("merge"))
            .collect()
    }

    #[test]
    fn only_counted_values_are_published() {
        assert!(merge_names(MergeStatistics::default()).is_empty());
        let counted = MergeStatistics {
            pages_shared: Some(3),
            general_profit: Some(-5),
            replaced: Some(MergeReplaced { done: 7, ..MergeReplaced::default() }),
            ..MergeStatistics::default()
        };
        let own = merge_names(counted.clone());
        assert_eq!(own.iter().filter(|name| *name == "ebb_merge_replaced_pages_total").count(), 5);
        assert!(own.contains(&"ebb_merge_pages_shared".to_owned()), "{own:?}");
        let host = merge_names(MergeStatistics { scope: MergeScope::Host, ..counted });
        assert!(host.contains(&"ebb_merge_host_pages_shared".to_owned()), "{host:?}");
        assert!(host.contains(&"ebb_merge_host_general_profit_bytes".to_owned()), "{host:?}");
    }

    #[test]
    fn an_unexpected_line_is_returned() {
        for line in ["ebb", "ebb x", "ebb{other=\"x\"} 1", "ebb{kind=\"\\x\"} 1", "{kind=\"x\"} 1"]
        {
            assert_eq!(parse(line), Err(line.to_owned()));
        }
    }

    proptest! {
        #[test]
        fn labels_read_back(kind in "\\PC{0,12}|[\\\\\"\n]{0,6}", count in 0_u64..1 << 50) {
            let vcpu_exits = vec![KindCount::new(kind.clone(), count)];
            let metrics = Metrics { vcpu_exits, ..Metrics::default() };
            let samples = parse(&render(&metrics)).unwrap();
            let sample = find(&samples, "ebb_vcpu_exits_total", Some(&kind)).unwrap();
            prop_assert!((sample.value - count as f64).abs() < 0.5);
        }
    }
}
