//! Counters in the Prometheus text exposition format, version 0.0.4.

use std::fmt::Write as _;

use super::control::{KindCount, Metrics};

mod merge;

/// Whether a value may fall.
#[derive(Clone, Copy)]
enum Kind {
    /// May rise and fall.
    Gauge,
    /// Only rises.
    Counter,
}

/// All metrics as text. A machine without balloon has no `ebb_balloon_*` lines.
pub fn render(metrics: &Metrics) -> String {
    let mut text = Text(String::with_capacity(4096));
    text.value(
        Kind::Gauge,
        "ebb_memory_bytes",
        "Guest memory, without regard to the balloon.",
        metrics.memory_bytes,
    );
    text.value(
        Kind::Gauge,
        "ebb_guest_resident_bytes",
        "Guest memory that the host holds at present.",
        metrics.guest_resident_bytes,
    );
    text.value(
        Kind::Gauge,
        "ebb_guest_shared_bytes",
        "Shared pages that are mapped for guest memory at present.",
        metrics.guest_shared_bytes,
    );
    text.value(
        Kind::Gauge,
        "ebb_process_resident_bytes",
        "Resident memory of the monitor process, with guest memory.",
        metrics.process_resident_bytes,
    );
    text.value(
        Kind::Gauge,
        "ebb_overhead_resident_bytes",
        "Resident memory of the monitor process, without guest memory.",
        metrics
            .process_resident_bytes
            .saturating_sub(metrics.guest_resident_bytes)
            .saturating_sub(metrics.guest_shared_bytes),
    );
    text.help(Kind::Gauge, "ebb_uptime_seconds", "Time since the vCPUs were started.");
    text.line(format_args!(
        "ebb_uptime_seconds {}.{:03}",
        metrics.uptime_ms / 1000,
        metrics.uptime_ms % 1000
    ));
    text.kinds("ebb_vcpu_exits_total", "vCPU exits to the monitor, by kind.", &metrics.vcpu_exits);
    if let Some(merge) = &metrics.merge {
        merge::render(&mut text, merge);
    }
    let Some(balloon) = &metrics.balloon else {
        return text.0;
    };
    let gauges = [
        ("ebb_balloon_target_bytes", "The size the balloon should get to.", balloon.target_bytes),
        (
            "ebb_balloon_actual_bytes",
            "The size the guest says the balloon has.",
            balloon.actual_bytes,
        ),
    ];
    for (name, help, value) in gauges {
        text.value(Kind::Gauge, name, help, value);
    }
    let counters = [
        (
            "ebb_balloon_reported_bytes_total",
            "Memory the guest reported as free.",
            balloon.reported_bytes,
        ),
        (
            "ebb_balloon_inflated_bytes_total",
            "Memory the guest put into the balloon.",
            balloon.inflated_bytes,
        ),
        (
            "ebb_balloon_deflated_bytes_total",
            "Memory the guest took out of the balloon.",
            balloon.deflated_bytes,
        ),
        (
            "ebb_balloon_discarded_bytes_total",
            "Memory given back to the host.",
            balloon.discarded_bytes,
        ),
        (
            "ebb_balloon_discarded_ranges_total",
            "Ranges given back to the host, after coalescing.",
            balloon.discarded_ranges,
        ),
        (
            "ebb_balloon_discard_syscalls_total",
            "System calls that gave memory back to the host.",
            balloon.discard_syscalls,
        ),
        (
            "ebb_balloon_discard_nanoseconds_total",
            "Time the host took to take memory back.",
            balloon.discard_ns,
        ),
        (
            "ebb_balloon_verified_pages_total",
            "Pages overwritten before they were given back, to check the guest.",
            balloon.verified_pages,
        ),
    ];
    for (name, help, value) in counters {
        text.value(Kind::Counter, name, help, value);
    }
    let by_kind = [
        (
            "ebb_balloon_kept_bytes_total",
            "Memory given away and kept, by reason.",
            &balloon.kept_bytes,
        ),
        (
            "ebb_balloon_translate_nanoseconds_total",
            "Time it took to read what came on a queue and to find its ranges.",
            &balloon.translate_ns,
        ),
        (
            "ebb_balloon_queue_buffers_total",
            "Buffers that came on a queue.",
            &balloon.queue_buffers,
        ),
        (
            "ebb_balloon_queue_bytes_total",
            "Bytes of the arrays and messages that came on a queue.",
            &balloon.queue_bytes,
        ),
        (
            "ebb_balloon_messages_total",
            "Arrays and messages that named pages, by the way they did.",
            &balloon.messages,
        ),
        (
            "ebb_balloon_free_page_requests_total",
            "Requests for free pages, by what became of them.",
            &balloon.requests,
        ),
    ];
    for (name, help, counts) in by_kind {
        text.kinds(name, help, counts);
    }
    text.kinds(
        "ebb_balloon_errors_total",
        "Mistakes of the guest and failures of the host, by kind.",
        &balloon.errors,
    );
    text.0
}

struct Text(String);

impl Text {
    fn line(&mut self, line: std::fmt::Arguments<'_>) {
        // Writing into a String cannot fail.
        let _ = self.0.write_fmt(line);
        self.0.push('\n');
    }

    fn help(&mut self, kind: Kind, name: &str, help: &str) {
        let kind = match kind {
            Kind::Gauge => "gauge",
            Kind::Counter => "counter",
        };
        self.line(format_args!("# HELP {name} {help}\n# TYPE {name} {kind}"));
    }

    fn value(&mut self, kind: Kind, name: &str, help: &str, value: u64) {
        self.help(kind, name, help);
        self.line(format_args!("{name} {value}"));
    }

    fn kinds(&mut self, name: &str, help: &str, counts: &[KindCount]) {
        if counts.is_empty() {
            return;
        }
        self.help(Kind::Counter, name, help);
        for KindCount { kind, count } in counts {
            self.0.push_str(name);
            self.0.push_str("{kind=\"");
            for character in kind.chars() {
                match character {
                    '\\' => self.0.push_str("\\\\"),
                    '"' => self.0.push_str("\\\""),
                    '\n' => self.0.push_str("\\n"),
                    other => self.0.push(other),
                }
            }
            self.line(format_args!("\"}} {count}"));
        }
    }
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

/// Reads back what [`render`] writes (no timestamps, no label but `kind`). Returns the first line
/// that is something else as the error.
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

    use super::super::control::BalloonMetrics;
    use super::*;

    fn find<'a>(samples: &'a [Sample], name: &str, kind: Option<&str>) -> Option<&'a Sample> {
        samples.iter().find(|sample| sample.name == name && sample.kind.as_deref() == kind)
    }

    #[test]
    fn overhead_is_the_process_without_the_guest() {
        let metrics = Metrics {
            guest_resident_bytes: 1000,
            guest_shared_bytes: 300,
            process_resident_bytes: 1800,
            uptime_ms: 61_002,
            ..Metrics::default()
        };
        let samples = parse(&render(&metrics)).unwrap();
        assert!(
            (find(&samples, "ebb_overhead_resident_bytes", None).unwrap().value - 500.0).abs()
                < 0.1
        );
        assert!((find(&samples, "ebb_uptime_seconds", None).unwrap().value - 61.002).abs() < 1e-6);
        assert!(samples.iter().all(|sample| !sample.name.contains("balloon")));
    }

    #[test]
    fn every_sample_has_help_and_type_before_it() {
        let metrics = Metrics {
            balloon: Some(BalloonMetrics {
                errors: vec![KindCount::new("bad_address", 1), KindCount::new("too_long", 2)],
                ..BalloonMetrics::default()
            }),
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

    #[test]
    fn strange_text_is_returned() {
        for line in ["ebb", "ebb x", "ebb{other=\"x\"} 1", "ebb{kind=\"\\x\"} 1", "{kind=\"x\"} 1"]
        {
            assert_eq!(parse(line), Err(line.to_owned()));
        }
    }

    proptest! {
        #[test]
        fn labels_read_back(kind in "\\PC{0,12}|[\\\\\"\n]{0,6}", count in 0_u64..1 << 50) {
            let metrics = Metrics { vcpu_exits: vec![KindCount::new(kind.clone(), count)], ..Metrics::default() };
            let samples = parse(&render(&metrics)).unwrap();
            let sample = find(&samples, "ebb_vcpu_exits_total", Some(&kind)).unwrap();
            prop_assert!((sample.value - count as f64).abs() < 0.5);
        }
    }
}
