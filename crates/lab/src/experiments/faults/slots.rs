//! Guests in which the trackers take turns.

use std::time::Duration;

use ebb_agent::page_faults::{FaultKind, FaultReport, TaskKind};
use ebb_agent::protocol::Command;
use serde_json::Value;

use super::order::order;
use super::{CPUS, SETTLE_S, Sizes, TRACKERS};
use crate::LabError;
use crate::harness::counters::Counters;
use crate::harness::driver::Tracker;
use crate::harness::testbed::Testbed;
use crate::report::event::Event;
use crate::report::results::{GuestRecord, Series};

/// Path of the module's parameter for the tracker.
const PARAMETER: &str = "/sys/module/ebb_balloon/parameters/tracker";
/// Maximum time of a turn beyond its seconds.
const TURN_LIMIT: Duration = Duration::from_secs(120);
/// Number of retries after a failed guest; emulated hosts lose one occasionally.
const ATTEMPTS: u32 = 2;

/// A kind of turn in a round.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Turn {
    /// No tracker, with which all others are compared.
    Baseline,
    /// A series.
    Of(Tracker),
}

impl Turn {
    /// The tracker that is on during the turn.
    pub(super) fn tracker(self) -> Tracker {
        match self {
            Self::Baseline => Tracker::Off,
            Self::Of(tracker) => tracker,
        }
    }

    /// Its name in documents.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Baseline => "baseline",
            Self::Of(tracker) => tracker.name(),
        }
    }
}

/// The workload of a turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Workload {
    pub(super) cpus: u32,
    pub(super) kind: FaultKind,
    pub(super) tasks: TaskKind,
}

/// One turn.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Slot {
    pub(super) boot: u32,
    pub(super) workload: Workload,
    pub(super) round: u32,
    pub(super) turn: Turn,
    /// Place in its round, from 0.
    pub(super) place: usize,
    pub(super) ops_per_s: f64,
    /// Seconds that counted.
    pub(super) seconds: u32,
    /// Growth of the counters of the guest's driver.
    pub(super) driver: Counters,
    /// Mean time of a call of the tracker's hook in ns, if any was timed.
    pub(super) free_ns: Option<f64>,
}

/// Runs all guests; the measurements are filled in after each of them, even if some fail.
///
/// # Errors
/// The first failure of a guest that the retries could not replace.
pub(super) fn run(
    testbed: &mut Testbed<'_>,
    sizes: Sizes,
    series: &mut [Series],
    fill: impl Fn(&[Slot], &mut [Series]),
) -> Result<(), LabError> {
    let turns = turns(series);
    let guests = testbed.guests(sizes.boots * CPUS.len() as u32);
    let (mut slots, mut records, mut notes) = (Vec::new(), Vec::new(), Vec::new());
    let mut outcome = Ok(());
    for boot in 0..guests {
        let cpus = CPUS[boot as usize % CPUS.len()];
        for attempt in 1..=ATTEMPTS {
            match guest(testbed, sizes, (boot, cpus), &turns) {
                Ok((record, measured)) => {
                    records.push(record);
                    slots.extend(measured);
                    break;
                }
                Err(error) if attempt < ATTEMPTS => {
                    notes.push(format!("a guest failed and was run again: {error}"));
                }
                Err(error) => outcome = outcome.and(Err(error)),
            }
        }
        for series in series.iter_mut() {
            series.guests.clone_from(&records);
            series.notes.clone_from(&notes);
        }
        fill(&slots, series);
        for series in series.iter() {
            testbed.events().send(Event::SeriesSoFar(series.clone()));
        }
    }
    outcome
}

/// The kinds of turns: the baseline, and each series.
fn turns(series: &[Series]) -> Vec<Turn> {
    let chosen = |tracker: &Tracker| series.iter().any(|series| series.name == tracker.name());
    std::iter::once(Turn::Baseline)
        .chain(TRACKERS.into_iter().filter(chosen).map(Turn::Of))
        .collect()
}

/// Runs one guest from its boot to its end.
fn guest(
    testbed: &mut Testbed<'_>,
    sizes: Sizes,
    (boot, cpus): (u32, u32),
    turns: &[Turn],
) -> Result<(GuestRecord, Vec<Slot>), LabError> {
    let record = testbed.start_guest(sizes.guest(cpus))?;
    let measured = rounds(testbed, sizes, &record, (boot, cpus), turns);
    testbed.end_guest(record.guest);
    Ok((record, measured?))
}

fn rounds(
    testbed: &mut Testbed<'_>,
    sizes: Sizes,
    record: &GuestRecord,
    (boot, cpus): (u32, u32),
    turns: &[Turn],
) -> Result<Vec<Slot>, LabError> {
    let mut slots = Vec::new();
    for round in 0..sizes.rounds {
        for (kind_at, (kind, name, _)) in sizes.kinds.iter().copied().enumerate() {
            for (task_at, tasks) in sizes.task_kinds.iter().copied().enumerate() {
                let what = match tasks {
                    TaskKind::Processes => "processes",
                    TaskKind::Threads => "threads",
                };
                testbed
                    .events()
                    .step(record.guest, format!("{name}, {cpus} {what}, round {}", round + 1));
                let workload = Workload { cpus, kind, tasks };
                // Workloads and guests begin with different rows of the square.
                let row = (boot / CPUS.len() as u32 * sizes.rounds + round) as usize
                    + kind_at
                    + 2 * task_at;
                for (place, at) in order(row, turns.len()).into_iter().enumerate() {
                    let turn = turns[at];
                    let taken = take_turn(testbed, sizes, record.guest, workload, turn)?;
                    slots.push(Slot {
                        boot,
                        workload,
                        round,
                        turn,
                        place,
                        ops_per_s: taken.ops_per_s,
                        seconds: sizes.seconds,
                        // The driver's value is a mean since the tracker was switched on, which was
                        // for this turn.
                        free_ns: taken.after.get("free_ns").filter(|free_ns| *free_ns > 0.0),
                        driver: taken.after.since(&taken.before),
                    });
                }
            }
        }
    }
    Ok(slots)
}

/// Result of a turn.
struct Taken {
    ops_per_s: f64,
    before: Counters,
    after: Counters,
}

fn take_turn(
    testbed: &mut Testbed<'_>,
    sizes: Sizes,
    guest: u32,
    workload: Workload,
    turn: Turn,
) -> Result<Taken, LabError> {
    switch(testbed, guest, turn.tracker())?;
    let before = testbed.driver_counters(guest)?.unwrap_or_default();
    let command = Command::PageFaults {
        kind: workload.kind,
        tasks: workload.cpus,
        threads: workload.tasks,
        // The agent omits the first second.
        seconds: SETTLE_S - 1 + sizes.seconds,
        mapping_bytes: sizes.mapping_mib << 20,
    };
    let limit = TURN_LIMIT + Duration::from_secs(u64::from(sizes.seconds));
    let report = testbed.work(guest, command, limit)?;
    let after = testbed.driver_counters(guest)?.unwrap_or_default();
    let report: FaultReport =
        serde_json::from_value(report).map_err(|error| LabError::unexpected(guest, error))?;
    let ops_per_s = settled_rate(&report.samples).ok_or_else(|| {
        LabError::unexpected(guest, format!("{} samples of a turn", report.samples.len()))
    })?;
    Ok(Taken { ops_per_s, before, after })
}

/// The mean of the seconds that count; the agent omits the first second. Not a median: passes over
/// memory occur every two seconds and are the main cost.
fn settled_rate(samples: &[f64]) -> Option<f64> {
    let counted = samples.get(SETTLE_S as usize - 1..).filter(|counted| !counted.is_empty())?;
    Some(counted.iter().sum::<f64>() / counted.len() as f64)
}

/// Switches to this tracker.
fn switch(testbed: &mut Testbed<'_>, guest: u32, tracker: Tracker) -> Result<(), LabError> {
    let path = PARAMETER.to_owned();
    testbed.ask(guest, Command::WriteFile { path, text: tracker.name().to_owned() })?;
    let now: Value = testbed.ask(guest, Command::read_file(PARAMETER))?;
    match now["text"].as_str().map(str::trim) {
        Some(name) if name == tracker.name() => Ok(()),
        name => {
            let what = format!("its tracker is {name:?} and should be {}", tracker.name());
            Err(LabError::unexpected(guest, what))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_seconds_do_not_count() {
        assert_eq!(settled_rate(&[1.0, 1.0, 30.0, 50.0]), Some(40.0));
        assert_eq!(settled_rate(&[1.0, 1.0]), None);
        assert_eq!(settled_rate(&[]), None);
    }

    #[test]
    fn every_series_has_a_turn_and_the_baseline_always() {
        let series = |names: &[&str]| {
            names.iter().map(|name| Series::new(name, String::new())).collect::<Vec<_>>()
        };
        assert_eq!(turns(&series(&["bitmap"])), [Turn::Baseline, Turn::Of(Tracker::Bitmap)]);
        let all = turns(&series(&["none", "percpu", "bitmap", "reporting"]));
        assert_eq!(all.len(), 5);
        assert_eq!((all[0].tracker(), all[1].tracker()), (Tracker::Off, Tracker::Off));
    }
}
