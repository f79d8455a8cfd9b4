//! Counters by name: those of the guest's driver, and those of the monitor.

use std::collections::BTreeMap;

/// Counters at one time, or their growth between two times.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Counters(BTreeMap<String, f64>);

impl Counters {
    /// Reads lines of a name and a value, as in `/sys/kernel/debug/ebb_balloon/counters`; other
    /// lines are ignored.
    pub fn of_driver(text: &str) -> Self {
        Self(text.lines().filter_map(|line| split(line.trim())).collect())
    }

    /// Reads Prometheus' text format as Ebb writes it. The name of a counter with a label is
    /// followed by the label's value, for example `ebb_balloon_errors_total/bad_address`.
    pub fn of_monitor(text: &str) -> Self {
        let lines = text.lines().filter(|line| !line.starts_with('#'));
        Self(
            lines
                .filter_map(split)
                .map(|(name, value)| match name.split_once('{') {
                    None => (name, value),
                    Some((name, labels)) => {
                        (format!("{name}/{}", labels.split('"').nth(1).unwrap_or_default()), value)
                    }
                })
                .collect(),
        )
    }

    /// The counter with this name, if any.
    pub fn get(&self, name: &str) -> Option<f64> {
        self.0.get(name).copied()
    }

    /// All of them, by name.
    pub fn iter(&self) -> impl Iterator<Item = (&str, f64)> {
        self.0.iter().map(|(name, value)| (name.as_str(), *value))
    }

    /// Growth of each counter since `earlier`.
    #[must_use]
    pub fn since(&self, earlier: &Self) -> Self {
        let grown = |(name, value): (&String, &f64)| {
            (name.clone(), value - earlier.get(name).unwrap_or(0.0))
        };
        Self(self.0.iter().map(grown).collect())
    }
}

fn split(line: &str) -> Option<(String, f64)> {
    let (name, value) = line.rsplit_once(' ')?;
    Some((name.trim_end().to_owned(), value.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_drivers_lines_are_read_and_others_ignored() {
        let counters = Counters::of_driver("tracker bitmap\ncaptured 12\nallocate_ns   3400\n\n");
        assert_eq!(
            counters.iter().collect::<Vec<_>>(),
            [("allocate_ns", 3400.0), ("captured", 12.0)]
        );
    }

    #[test]
    fn a_monitors_labels_are_part_of_the_name() {
        let text =
            "# HELP a b\n# TYPE a counter\na_total 7\nb_total{kind=\"inflate\"} 9\nup 1.500\n";
        let counters = Counters::of_monitor(text);
        assert_eq!(counters.get("a_total"), Some(7.0));
        assert_eq!(counters.get("b_total/inflate"), Some(9.0));
        assert_eq!(counters.get("up"), Some(1.5));
        assert_eq!(counters.get("HELP"), None);
    }

    #[test]
    fn growth_is_by_name_and_new_counters_start_at_zero() {
        let earlier = Counters::of_driver("messages 2\n");
        let grown = Counters::of_driver("messages 5\nrequests 1\n").since(&earlier);
        assert_eq!(grown.iter().collect::<Vec<_>>(), [("messages", 3.0), ("requests", 1.0)]);
    }

    #[test]
    fn the_monitors_output_can_be_read() {
        use ebb_vmm::api::prometheus;
        let text = prometheus::render(&ebb_vmm::api::Metrics {
            balloon: Some(ebb_vmm::api::BalloonMetrics {
                target_bytes: 3,
                ..ebb_vmm::api::BalloonMetrics::default()
            }),
            ..ebb_vmm::api::Metrics::default()
        });
        let counters = Counters::of_monitor(&text);
        assert_eq!(counters.get("ebb_balloon_target_bytes"), Some(3.0));
        assert_eq!(counters.get("ebb_balloon_discard_syscalls_total"), Some(0.0));
    }
}
