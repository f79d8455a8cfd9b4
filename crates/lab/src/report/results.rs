//! Results of a run of an experiment: the document `results.json`.
//!
//! Names carry their units (`_s`, `_mib`), so that a number can be read without this file;
//! `metrics[]` describes them once for tables and plots. A metric that could not be measured is
//! `null`, never 0.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::report::figures::{DataTable, Drawing};

/// Version of the document's shape; raised when a reader of an older document would misread a newer
/// one.
pub const SCHEMA_VERSION: u32 = 1;

/// Size of an experiment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Scale {
    /// About a tenth of the published experiment, which takes a few minutes on two cores.
    Demo,
    /// The size of the published experiment.
    Full,
}

impl Scale {
    /// The name used on the command line and in documents.
    pub fn name(self) -> &'static str {
        match self {
            Scale::Demo => "demo",
            Scale::Full => "full",
        }
    }
}

impl std::fmt::Display for Scale {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str(self.name())
    }
}

/// The physical (or rented) machine a run was started on.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Machine {
    /// Processor as `/proc/cpuinfo` names it.
    pub cpu: String,
    /// Processors the run may use.
    pub cpus: u32,
    /// RAM in MiB.
    pub memory_mib: u64,
    /// Release of the running kernel.
    pub kernel: String,
}

/// Place of the guests' host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Place {
    /// The guests ran on the machine itself.
    Direct,
    /// The guests ran in the virtual host: QEMU with nested SVM, started for this run.
    VirtualHost,
}

/// The host of the guests: the machine itself or the virtual host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Host {
    /// Its place.
    pub place: Place,
    /// Limit of the guests' memory: the host's own RAM, or a budget on a machine of another size.
    pub limit: MemoryLimit,
    /// Processors.
    pub cpus: u32,
    /// RAM in MiB as its kernel counts it (`MemTotal`).
    pub memory_mib: u64,
    /// Swap space in MiB.
    pub swap_mib: u64,
    /// NUMA nodes with memory.
    pub nodes: u32,
    /// Release of its kernel.
    pub kernel: String,
}

/// When the host counts as full in a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum MemoryLimit {
    /// The host has the experiment's size: it is full when it swaps.
    HostMemory,
    /// The host is larger or smaller: it counts as full when its use has grown by the experiment's
    /// size, and use beyond that counts as swap.
    Budget,
}

/// Direction in which a metric is better.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Better {
    /// A larger value is better.
    Higher,
    /// A smaller value is better.
    Lower,
}

/// Description of one metric, for tables and plots.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MetricInfo {
    /// Key in [`Series::metrics`], with the unit at its end.
    pub name: String,
    /// Heading for people.
    pub title: String,
    /// Unit for people; empty for a count.
    pub unit: String,
    /// Which way it is better.
    pub better: Better,
}

/// Results of a series.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Series {
    /// Its name, as given to `--series`.
    pub name: String,
    /// The monitor and the settings that make this series.
    pub setup: String,
    /// Value by metric; `None` (null) if it was not measured or never reached.
    pub metrics: BTreeMap<String, Option<f64>>,
    /// Records of the guests, in the order of starting.
    pub guests: Vec<GuestRecord>,
    /// Tables of the data behind the metrics, shown with them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tables: Vec<DataTable>,
    /// Longer tables, for reference.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub details: Vec<DataTable>,
    /// Curves.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub drawings: Vec<Drawing>,
    /// Reason for the end of the series, and notes for the reader of its numbers.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub notes: Vec<String>,
    /// Lowest and highest of the repeated measurements behind a metric, by its name.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub spread: BTreeMap<String, [f64; 2]>,
    /// Differences that are lost in the machine's noise.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub too_noisy: Vec<String>,
    /// The error that ended the series early; its metrics cover the measurements until then.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

impl Series {
    /// A series in which nothing has been measured yet.
    pub fn new(name: &str, setup: String) -> Self {
        Self {
            name: name.to_owned(),
            setup,
            metrics: BTreeMap::new(),
            guests: Vec::new(),
            tables: Vec::new(),
            details: Vec::new(),
            drawings: Vec::new(),
            notes: Vec::new(),
            spread: BTreeMap::new(),
            too_noisy: Vec::new(),
            error: None,
        }
    }
}

/// Record of one guest of a series.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct GuestRecord {
    /// Number in the order of starting, from 1.
    pub guest: u32,
    /// Seconds from the start of the monitor to the guest agent's first event.
    pub start_to_init_s: Option<f64>,
    /// Host memory of the guest's process right before its program started, MiB.
    pub booted_rss_mib: Option<f64>,
    /// Seconds the program ran, by the guest's clock.
    pub program_s: Option<f64>,
    /// The most host memory (resident and swapped) its process had while and after its program ran,
    /// MiB.
    pub peak_mib: Option<f64>,
    /// Seconds from the program's end until 90 % of its memory was returned to the host; null if
    /// never.
    pub return_90_s: Option<f64>,
    /// Host memory of its process when the series ended, RAM and monitor, resident and swapped,
    /// MiB.
    pub idle_rss_mib: Option<f64>,
    /// The same, with each shared page divided by the number of its mappings, MiB.
    #[serde(default)]
    pub idle_pss_mib: Option<f64>,
    /// Resident memory of its monitor without the guest's RAM, MiB.
    pub monitor_rss_mib: Option<f64>,
    /// Memory in use in the guest at the end of the series: its RAM without the memory that its
    /// kernel counts as free, so kernel, page structures and programs, MiB.
    #[serde(default)]
    pub guest_in_use_mib: Option<f64>,
    /// Memory that is free in the guest then, but in pieces below 2 MiB, which Linux does not
    /// report by default, MiB.
    #[serde(default)]
    pub guest_fragments_mib: Option<f64>,
    /// How the guest ended by itself before its series; it is then not counted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ended: Option<String>,
    /// Swap the host had in use after this guest's program, MiB.
    pub swap_used_mib: Option<f64>,
}

/// The state of the host at one moment.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Sample {
    /// Series that was running.
    pub series: String,
    /// Milliseconds since that series began.
    pub t_ms: u64,
    /// Number of the last started guest; 0 before the first.
    pub guest: u32,
    /// Host memory in use, MiB: what is not [available](crate::harness::host::MemoryState).
    pub host_used_mib: f64,
    /// Swap in use, MiB.
    pub swap_used_mib: f64,
    /// Resident memory of each guest's process in the order of starting, MiB.
    pub guest_rss_mib: Vec<f64>,
}

/// The whole document.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Results {
    /// [`SCHEMA_VERSION`].
    pub schema: u32,
    /// Name of the experiment.
    pub experiment: String,
    /// The experiment's summary in a sentence.
    pub summary: String,
    /// Its size.
    pub scale: Scale,
    /// The sizes that make this scale, by name with unit.
    pub parameters: BTreeMap<String, u64>,
    /// Version of `ebb`.
    pub ebb_version: String,
    /// Seconds since 1970 at the start.
    pub started_unix_s: u64,
    /// Seconds the run took.
    pub elapsed_s: f64,
    /// The machine the run was started on.
    pub machine: Machine,
    /// The host of the guests.
    pub host: Host,
    /// Descriptions of the metrics.
    pub metrics: Vec<MetricInfo>,
    /// One entry per series, in the order of running.
    pub series: Vec<Series>,
    /// The host over time.
    pub samples: Vec<Sample>,
}

impl Results {
    /// The samples of one series, in the order of time.
    pub fn samples_of<'a>(&'a self, series: &'a str) -> impl Iterator<Item = &'a Sample> {
        self.samples.iter().filter(move |sample| sample.series == series)
    }

    /// The first error that ended a series, with the name of the series.
    pub fn first_error(&self) -> Option<(&str, &str)> {
        self.series
            .iter()
            .find_map(|series| series.error.as_deref().map(|error| (series.name.as_str(), error)))
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// A document with two series, used by the tests of the table and the report as well.
    pub(crate) fn example() -> Results {
        let series = |name: &str, guests: f64, returned: Option<f64>| Series {
            metrics: BTreeMap::from([
                ("guests_without_swap".to_owned(), Some(guests)),
                ("return_90_s".to_owned(), returned),
            ]),
            guests: vec![GuestRecord { guest: 1, return_90_s: returned, ..GuestRecord::default() }],
            notes: vec!["swap was used <by> guest 4".to_owned()],
            ..Series::new(name, format!("ebb, {name}"))
        };
        let metric = |name: &str, title: &str, unit: &str, better| {
            let [name, title, unit] = [name, title, unit].map(str::to_owned);
            MetricInfo { name, title, unit, better }
        };
        let sample = |series: &str, t_ms: u64, rss: &[f64], swap: f64| Sample {
            series: series.to_owned(),
            t_ms,
            guest: rss.len() as u32,
            host_used_mib: rss.iter().sum::<f64>() + 150.0,
            swap_used_mib: swap,
            guest_rss_mib: rss.to_vec(),
        };
        Results {
            schema: SCHEMA_VERSION,
            experiment: "density".to_owned(),
            summary: "How many guests fit".to_owned(),
            scale: Scale::Demo,
            parameters: BTreeMap::from([("guest_mib".to_owned(), 512)]),
            ebb_version: "0.1.0".to_owned(),
            started_unix_s: 1_790_000_000,
            elapsed_s: 61.5,
            machine: Machine {
                cpu: "A & B".to_owned(),
                cpus: 2,
                memory_mib: 24_000,
                kernel: "6.1.0".to_owned(),
            },
            host: Host {
                place: Place::VirtualHost,
                limit: MemoryLimit::HostMemory,
                cpus: 2,
                memory_mib: 2000,
                swap_mib: 512,
                nodes: 1,
                kernel: "6.1.0".to_owned(),
            },
            metrics: vec![
                metric("guests_without_swap", "Guests without swap", "", Better::Higher),
                metric("return_90_s", "90 % returned after", "s", Better::Lower),
            ],
            series: vec![series("no-reporting", 3.0, None), series("reporting", 8.0, Some(4.25))],
            samples: vec![
                sample("no-reporting", 0, &[], 0.0),
                sample("no-reporting", 1000, &[430.0], 0.0),
                sample("no-reporting", 2000, &[430.0, 440.0], 12.0),
                sample("reporting", 0, &[], 0.0),
                sample("reporting", 1000, &[80.0], 0.0),
            ],
        }
    }

    #[test]
    fn a_document_survives_json() {
        let results = example();
        let text = serde_json::to_string(&results).unwrap();
        assert_eq!(serde_json::from_str::<Results>(&text).unwrap(), results);
    }

    #[test]
    fn missing_measurements_are_null_and_present() {
        let document = serde_json::to_value(example()).unwrap();
        let metrics = &document["series"][0]["metrics"];
        assert!(metrics.as_object().unwrap().contains_key("return_90_s"));
        assert!(metrics["return_90_s"].is_null());
        assert_eq!(metrics["guests_without_swap"], 3.0);
        assert_eq!(document["scale"], "demo");
        assert_eq!(document["host"]["place"], "virtual-host");
    }

    #[test]
    fn samples_are_found_by_series() {
        let results = example();
        assert_eq!(results.samples_of("no-reporting").count(), 3);
        assert_eq!(
            results.samples_of("reporting").map(|sample| sample.t_ms).collect::<Vec<_>>(),
            [0, 1000]
        );
        assert_eq!(results.samples_of("other").count(), 0);
    }

    #[test]
    fn the_first_error_is_named_with_its_series() {
        let mut results = example();
        assert_eq!(results.first_error(), None);
        results.series[1].error = Some("guest 2 died".to_owned());
        assert_eq!(results.first_error(), Some(("reporting", "guest 2 died")));
    }
}
