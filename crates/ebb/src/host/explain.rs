//! One machine, and the decision about it.

use ebb_host_policy::report::MachineStatus;
use ebb_host_policy::{Clamp, Doubt, Machine};

use super::action_text;
use crate::columns::columns;
use crate::ctl::{bytes, duration};

/// What a machine's guest uses by its own statistics.
pub(crate) fn used_bytes(machine: &Machine) -> Option<u64> {
    let available = machine.statistics?.available_bytes?;
    Some(machine.outside_balloon_bytes().saturating_sub(available))
}

/// A machine, and the decision about it.
pub(crate) fn text(status: &MachineStatus, at_ms: u64) -> String {
    let mut lines = facts(status, at_ms);
    let mut line = |name: &str, value: String| lines.push([name.to_owned(), value]);
    match &status.explanation {
        None => line("decision", "none yet".to_owned()),
        Some(why) => {
            line("rule", why.rule.name().replace('_', " "));
            line("because", why.rule.to_string());
            if let Some(clamp) = why.clamp {
                line("limited by", clamp_text(clamp));
            }
            if let Some(doubt) = why.doubt {
                line("doubt", doubt_text(doubt));
            }
            line("action", why.action.map_or_else(|| "none".to_owned(), action_text));
            line("since", format!("{} ago", duration(at_ms.saturating_sub(why.since_ms))));
        }
    }
    columns(&lines)
}

/// What is known of a machine, by name and value.
pub(crate) fn facts(status: &MachineStatus, at_ms: u64) -> Vec<[String; 2]> {
    let mut lines: Vec<[String; 2]> = Vec::new();
    // Names and troubles come from elsewhere: one must not look like a line of its own.
    let mut line =
        |name: &str, value: String| lines.push([name.to_owned(), value.replace('\n', " ")]);
    line("machine", ebb_program::printable(&status.name));
    let process = status.pid.map_or_else(String::new, |pid| format!(", process {pid}"));
    let monitor = ebb_program::printable(status.monitor.as_deref().unwrap_or("unknown"));
    line("monitor", format!("{monitor}, {}{process}", ebb_program::printable(&status.socket)));
    // Only a daemon has profiles.
    if !status.profile.is_empty() {
        line("profile", ebb_program::printable(&status.profile));
    }
    if let Some(machine) = &status.machine {
        inputs(machine, at_ms, &mut line);
    }
    if let Some(trouble) = &status.trouble {
        line("trouble", ebb_program::printable(trouble));
    }
    lines
}

fn inputs(machine: &Machine, at_ms: u64, line: &mut impl FnMut(&str, String)) {
    let size = |value: Option<u64>| value.map_or_else(|| "unknown".to_owned(), bytes);
    line("memory", bytes(machine.size_bytes));
    line("resident", size(machine.resident_bytes));
    if machine.swapped_bytes.is_some_and(|swapped| swapped > 0) {
        line("swapped out", size(machine.swapped_bytes));
    }
    if machine.is_paused {
        line("state", "paused".to_owned());
    }
    if let Some(balloon) = machine.balloon {
        let (actual, target) = (bytes(balloon.actual_bytes), bytes(balloon.target_bytes));
        line("balloon", format!("{actual} of {target}"));
    }
    match machine.statistics {
        None => line("guest", "has not reported statistics".to_owned()),
        Some(said) => {
            let age = duration(at_ms.saturating_sub(said.taken_ms));
            line(
                "guest",
                format!(
                    "{} in use, {} available, {} free, {age} ago",
                    size(used_bytes(machine)),
                    size(said.available_bytes),
                    size(said.free_bytes)
                ),
            );
        }
    }
    let names = machine.means.iter().map(|mean| format!("{mean:?}").to_lowercase());
    line("means", names.collect::<Vec<_>>().join(", "));
}

fn clamp_text(clamp: Clamp) -> String {
    match clamp {
        Clamp::Reserve { kept_bytes } => {
            format!("what its guest uses and its reserve: {} are kept", bytes(kept_bytes))
        }
        Clamp::Floor { kept_bytes } => {
            format!("the floor of its profile: {} are kept", bytes(kept_bytes))
        }
    }
}

fn doubt_text(doubt: Doubt) -> String {
    match doubt {
        Doubt::Never => "its guest has never reported statistics".to_owned(),
        Doubt::Old { age_ms } => format!("its statistics are {} old", duration(age_ms)),
        Doubt::Incomplete => "its statistics have no total or no available memory".to_owned(),
        Doubt::Impossible { said_bytes, most_bytes } => format!(
            "its statistics are impossible: {} of at most {}",
            bytes(said_bytes),
            bytes(most_bytes)
        ),
    }
}
