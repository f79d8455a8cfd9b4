//! Costs of the trackers in instructions instead of time, in guests of an emulator that counts
//! them. Two runs differ by far less than a permille, on any machine and beside any load.
//!
//! Each tracker has its own guest, which is the same as that without a tracker up to this
//! parameter. A workload is one pass of mapping, writing and unmapping, followed by idle time in
//! which the tracker reports what was freed: the costs that grow with the number of pages are
//! measured apart from those of reports.

use std::thread;
use std::time::Duration;

use ebb_agent::page_faults::FaultKind;
use ebb_agent::page_faults::instructions::{FaultInstructions, InstructionReport};
use ebb_agent::protocol::Command;

use super::{KINDS, TRACKERS, summary};
use crate::LabError;
use crate::harness::driver::{Driver, Tracker};
use crate::harness::emulator::Emulator;
use crate::harness::experiment::{OnMachine, Run, SeriesPlan};
use crate::harness::guest::Guest;
use crate::report::event::Events;
use crate::report::results::Series;

pub mod metrics;

/// Time limit for a boot or a workload, which only an emulator that hangs exceeds: a busy machine
/// delays it by any factor.
const LIMIT: Duration = Duration::from_secs(1800);

/// Amount of work in each guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Work {
    /// The workloads.
    pub kinds: &'static [FaultKind],
    /// Size of a mapping in MiB.
    pub mapping_mib: u64,
    /// Number of passes that are not measured, before the one that is.
    pub warm_up_passes: u32,
    /// Idle time before and after that one in ms. A tracker reports every 2 s.
    pub idle_ms: u64,
}

/// The work of a series, the same at each scale: counts do not become more exact by repetition.
const WORK: Work = Work {
    kinds: &[FaultKind::Fault1, FaultKind::Fault1Huge, FaultKind::Fault2, FaultKind::Fault3],
    mapping_mib: 128,
    warm_up_passes: 2,
    idle_ms: 5000,
};

/// Counts of a workload in a guest.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Count {
    /// The workload.
    pub kind: FaultKind,
    /// Its instructions.
    pub report: InstructionReport,
}

/// Name of a tracker's series.
fn series_name(tracker: Tracker) -> &'static str {
    match tracker {
        Tracker::Off => "counted-none",
        Tracker::Percpu => "counted-percpu",
        Tracker::Bitmap => "counted-bitmap",
        Tracker::Reporting => "counted-reporting",
    }
}

/// The series, one for each tracker.
pub(super) fn plans() -> impl Iterator<Item = SeriesPlan> {
    TRACKERS.into_iter().map(|tracker| {
        let summary =
            summary(tracker, "instructions without a tracker, in an emulator that counts them");
        SeriesPlan::new(series_name(tracker), summary, Run::Emulated(run))
    })
}

fn run(machine: OnMachine<'_>, all: &mut [Series]) {
    let trackers: Vec<Tracker> = TRACKERS
        .into_iter()
        .filter(|tracker| all.iter().any(|series| series.name == series_name(*tracker)))
        .collect();
    let counted = tempfile::tempdir().map_err(LabError::of_file(std::env::temp_dir()));
    let counted = counted.and_then(|directory| {
        let emulator = Emulator::find(directory.path())?;
        let guests = emulator.describe()?;
        Ok((guests, count(&emulator, &trackers, WORK, Some(machine.events))))
    });
    match counted {
        Ok((guests, counted)) => {
            metrics::fill(&trackers, &counted, all);
            for series in all {
                series.notes.push(format!("guests run {guests}"));
            }
        }
        Err(error) => {
            for series in all {
                series.error = Some(error.to_string());
            }
        }
    }
}

/// Counts the work with each of these trackers, at the same time; counts do not depend on it.
pub fn count(
    emulator: &Emulator,
    trackers: &[Tracker],
    work: Work,
    events: Option<&Events>,
) -> Vec<Result<Vec<Count>, LabError>> {
    thread::scope(|scope| {
        // A guest is bound to the thread that starts it.
        let threads: Vec<_> = (1..)
            .zip(trackers)
            .map(|(number, tracker)| {
                let events = events.cloned();
                scope.spawn(move || guest(emulator, number, *tracker, work, events.as_ref()))
            })
            .collect();
        let join = |thread: thread::ScopedJoinHandle<'_, _>| {
            thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        };
        threads.into_iter().map(join).collect()
    })
}

/// Runs one guest from its boot to its end.
fn guest(
    emulator: &Emulator,
    number: u32,
    tracker: Tracker,
    work: Work,
    events: Option<&Events>,
) -> Result<Vec<Count>, LabError> {
    let step = |what: &str| {
        if let Some(events) = events {
            events.step(number, format!("{}: {what}", series_name(tracker)));
        }
    };
    let driver = Driver::among_all(tracker);
    step("boots in the emulator");
    let mut guest = Guest::start(number, emulator.command(driver, 1))?;
    guest.wait_ready(LIMIT)?;
    guest.require_driver(driver.in_guest())?;
    let mut counts = Vec::new();
    for kind in work.kinds.iter().copied() {
        step(KINDS.into_iter().find(|(of, ..)| *of == kind).map_or("", |(_, name, _)| name));
        let command = Command::FaultInstructions(FaultInstructions {
            kind,
            mapping_bytes: work.mapping_mib << 20,
            warm_up_passes: work.warm_up_passes,
            passes: 1,
            idle_ms: work.idle_ms,
        });
        let answer = guest.command(command, LIMIT, &mut || {})?;
        let report = serde_json::from_value(answer.result)
            .map_err(|error| LabError::unexpected(number, error))?;
        counts.push(Count { kind, report });
    }
    guest.kill();
    Ok(counts)
}
