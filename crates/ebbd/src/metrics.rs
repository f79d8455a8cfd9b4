//! Metrics of the host and its machines in Prometheus' text exposition format, version 0.0.4
//! (<https://prometheus.io/docs/instrumenting/exposition_formats/>).
//!
//! The encoder is this file's own. That of the monitor's metrics knows one label, `kind`, and is
//! tied to the monitor's documents; the crate `prometheus-client` writes OpenMetrics only, and
//! keeps a registry of values, while all values here come from one status.
//!
//! Each machine has at most 20 series, and a host at most
//! [`MOST_MACHINES`](crate::fleet::MOST_MACHINES) machines. Values of labels come from names of
//! files: they are escaped, and a second machine of the same name is left out.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::{self, Write as _};

use ebb_host_policy::report::{MachineStatus, Status};
use ebb_host_policy::{Action, Level, Settings, Statistics};

use crate::admission::Counts;

mod machine;

/// The content type of the format.
pub const CONTENT_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

/// The levels, the best first.
const LEVELS: [Level; 4] = [Level::Plenty, Level::Tight, Level::Pressed, Level::Emergency];

/// The names of actions, as in their documents.
const ACTIONS: [&str; 7] = ["balloon", "reclaim", "trim", "park", "pause", "resume", "stop"];

/// The index of an action in [`ACTIONS`].
fn index(action: Action) -> usize {
    match action {
        Action::Balloon { .. } => 0,
        Action::Reclaim => 1,
        Action::Trim => 2,
        Action::Park => 3,
        Action::Pause { .. } => 4,
        Action::Resume => 5,
        Action::Stop => 6,
    }
}

/// What the daemon counts from its start.
#[derive(Clone, Debug, Default)]
pub struct Counters {
    decisions: u64,
    orders: [u64; ACTIONS.len()],
    by_machine: BTreeMap<String, [u64; ACTIONS.len()]>,
}

impl Counters {
    /// Counts a decision.
    pub fn decided(&mut self) {
        self.decisions += 1;
    }

    /// Counts an order of a decision.
    pub fn ordered(&mut self, machine: &str, action: Action) {
        self.orders[index(action)] += 1;
        if let Some(orders) = self.by_machine.get_mut(machine) {
            orders[index(action)] += 1;
        } else {
            let mut orders = [0; ACTIONS.len()];
            orders[index(action)] = 1;
            self.by_machine.insert(machine.to_owned(), orders);
        }
    }

    /// Forgets machines that have gone, so that those that come and go take no memory.
    pub fn keep_only(&mut self, machines: &BTreeSet<&str>) {
        self.by_machine.retain(|name, _| machines.contains(name.as_str()));
    }
}

/// All that metrics are made from.
#[derive(Clone, Debug)]
pub struct Observed {
    /// The host and its machines at the last decision.
    pub status: Status,
    /// What was counted until then.
    pub counters: Counters,
    /// Machines that have asked for room.
    pub admissions: Counts,
    /// The available memory below which a level begins, in bytes; none for plenty.
    pub limits: [(Level, u64); 3],
}

impl Observed {
    /// Adds to a status what the daemon has counted and what its settings say.
    pub fn new(
        status: Status,
        counters: Counters,
        admissions: Counts,
        settings: &Settings,
    ) -> Self {
        let total = u128::from(status.host.total_bytes);
        let limit =
            |percent: u64| u64::try_from(total * u128::from(percent) / 100).unwrap_or(u64::MAX);
        let limits = [
            (Level::Tight, limit(settings.tight_percent)),
            (Level::Pressed, limit(settings.pressed_percent)),
            (Level::Emergency, limit(settings.emergency_percent)),
        ];
        Self { status, counters, admissions, limits }
    }
}

/// A value. None is negative, infinite or not a number.
#[derive(Clone, Copy, Debug)]
enum Value {
    Number(u64),
    /// Shown in seconds.
    Microseconds(u64),
}

impl From<u64> for Value {
    fn from(number: u64) -> Self {
        Self::Number(number)
    }
}

impl From<usize> for Value {
    fn from(number: usize) -> Self {
        Self::Number(number as u64)
    }
}

impl From<bool> for Value {
    fn from(is_so: bool) -> Self {
        Self::Number(is_so.into())
    }
}

impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Number(number) => write!(f, "{number}"),
            Self::Microseconds(us) => write!(f, "{}.{:06}", us / 1_000_000, us % 1_000_000),
        }
    }
}

/// The value of a label, escaped.
struct Escaped<'a>(&'a str);

impl fmt::Display for Escaped<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.chars().try_for_each(|character| match character {
            '\\' => f.write_str("\\\\"),
            '"' => f.write_str("\\\""),
            '\n' => f.write_str("\\n"),
            other => f.write_char(other),
        })
    }
}

type Label<'a> = (&'static str, &'a str);

/// The text, which grows by one metric at a time.
#[derive(Debug, Default)]
struct Text(String);

impl Text {
    /// Adds a metric with its series, and nothing if there are none. The prefix `ebbd_` is added to
    /// its name, and it is a counter if that ends in `_total`. Help has neither backslashes nor
    /// ends of lines.
    fn metric<'a, L: AsRef<[Label<'a>]>>(
        &mut self,
        name: &str,
        help: &str,
        series: impl IntoIterator<Item = (L, Value)>,
    ) {
        let kind = if name.ends_with("_total") { "counter" } else { "gauge" };
        let mut is_first = true;
        for (labels, value) in series {
            // Writing to a string cannot fail.
            if std::mem::take(&mut is_first) {
                let _ = write!(self.0, "# HELP ebbd_{name} {help}\n# TYPE ebbd_{name} {kind}\n");
            }
            let _ = write!(self.0, "ebbd_{name}");
            let labels = labels.as_ref();
            for (position, (label, value)) in labels.iter().enumerate() {
                let before = if position == 0 { '{' } else { ',' };
                let _ = write!(self.0, "{before}{label}=\"{}\"", Escaped(value));
            }
            let after = if labels.is_empty() { "" } else { "}" };
            let _ = writeln!(self.0, "{after} {value}");
        }
    }

    /// Adds a metric with one series, or none, without labels.
    fn one(&mut self, name: &str, help: &str, value: impl Into<Option<Value>>) {
        self.metric(name, help, value.into().map(|value| ([] as [Label<'_>; 0], value)));
    }

    /// Adds a metric with one label.
    fn by<'a>(
        &mut self,
        name: &str,
        help: &str,
        label: &'static str,
        values: impl IntoIterator<Item = (&'a str, Value)>,
    ) {
        self.metric(name, help, values.into_iter().map(|(of, value)| ([(label, of)], value)));
    }
}

/// All metrics as text.
pub fn render(observed: &Observed) -> String {
    let mut text = Text::default();
    host(&mut text, observed);
    daemon(&mut text, observed);
    machine::all(&mut text, observed);
    text.0
}

fn host(text: &mut Text, observed: &Observed) {
    let Observed { status, limits, .. } = observed;
    let host = &status.host;
    text.one(
        "host_memory_bytes",
        "Memory that the machines and the rest of the host share.",
        Value::from(host.total_bytes),
    );
    text.one(
        "host_available_bytes",
        "Memory that can be allocated without swapping.",
        Value::from(host.available_bytes),
    );
    text.one(
        "host_swap_bytes",
        "Size of the host's swap.",
        Value::from(host.swap.map_or(0, |swap| swap.total_bytes)),
    );
    text.one(
        "host_swap_used_bytes",
        "Swap in use.",
        Value::from(host.swap.map_or(0, |swap| swap.used_bytes)),
    );
    text.one(
        "host_swapped_out_bytes_total",
        "Memory written to swap since the host's start.",
        host.swap.map(|swap| Value::from(swap.out_bytes)),
    );
    text.one(
        "host_memory_waiting_seconds_total",
        "Time in which at least one task waited for memory (PSI, some).",
        host.pressure.map(|pressure| Value::Microseconds(pressure.some_us)),
    );
    text.one(
        "host_memory_stalled_seconds_total",
        "Time in which all tasks waited for memory (PSI, full).",
        host.pressure.map(|pressure| Value::Microseconds(pressure.full_us)),
    );
    let names = LEVELS.map(|level| (level, level.to_string()));
    text.by(
        "host_level",
        "1 for the host's level, 0 for the others.",
        "level",
        names.iter().map(|(level, name)| (name.as_str(), Value::from(*level == status.level))),
    );
    let limits = limits.map(|(level, limit)| (level.to_string(), limit));
    text.by(
        "host_level_limit_bytes",
        "Available memory below which a level begins.",
        "level",
        limits.iter().map(|(name, limit)| (name.as_str(), Value::from(*limit))),
    );
}

fn daemon(text: &mut Text, observed: &Observed) {
    let Observed { status, counters, admissions, .. } = observed;
    text.by("build_info", "1; the version.", "version", [(&*status.version, Value::from(true))]);
    text.one(
        "problems",
        "Things that are wrong with the daemon itself.",
        Value::from(status.problems.len()),
    );
    text.one("machines", "Sockets of monitors.", Value::from(status.machines.len()));
    text.one("decisions_total", "Decisions.", Value::from(counters.decisions));
    text.by(
        "orders_total",
        "Orders to all machines, also to those that have gone.",
        "action",
        ACTIONS.into_iter().zip(counters.orders.map(Value::from)),
    );
    text.by(
        "admissions_total",
        "Machines that asked for room: admitted, refused, or not even let into the full queue.",
        "result",
        [
            ("admitted", Value::from(admissions.admitted)),
            ("refused", Value::from(admissions.refused)),
            ("queue_full", Value::from(admissions.queue_full)),
        ],
    );
    text.one("admissions_waiting", "Machines that wait for room.", {
        Value::from(admissions.waiting)
    });
}

/// The machines, without those whose name is another's.
fn distinct(status: &Status) -> Vec<&MachineStatus> {
    let mut names = BTreeSet::new();
    status.machines.iter().filter(|machine| names.insert(machine.name.as_str())).collect()
}

fn statistics(machine: &MachineStatus) -> Option<&Statistics> {
    machine.machine.as_ref()?.statistics.as_ref()
}

#[cfg(test)]
mod tests;
