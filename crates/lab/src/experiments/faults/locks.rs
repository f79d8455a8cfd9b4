//! The zone's lock under many tasks: how often it is taken for a page, and for how long.
//!
//! Guests run in the emulator that counts instructions, with a kernel that keeps statistics of its
//! locks (`make zone-lock` compiles it). The emulator executes one vCPU at a time, for as many
//! instructions as the next timer allows. What is exact is therefore how often the lock is taken,
//! with any number of vCPUs, and how long it is held with one. With several, a vCPU is often
//! stopped while it holds the lock, as vCPUs of a crowded host are: the time that it does not run
//! counts as held.

use std::thread;
use std::time::Duration;

use ebb_agent::page_faults::{FaultKind, FaultReport, TaskKind};
use ebb_agent::protocol::Command;
use serde_json::Value;

use super::{TRACKERS, summary};
use crate::LabError;
use crate::error::GuestProblem;
use crate::harness::driver::{Driver, Tracker};
use crate::harness::emulator::Emulator;
use crate::harness::experiment::{OnMachine, Run, SeriesPlan};
use crate::harness::guest::Guest;
use crate::report::event::Events;
use crate::report::figures::DataTable;
use crate::report::metrics::{self, Metric};
use crate::report::results::{MetricInfo, Series};

/// Numbers of vCPUs; as many tasks run. The patch series compare 4 and 16 tasks.
const CPUS: [u32; 3] = [1, 4, 16];
/// Size of each task's mapping in MiB.
const MAPPING_MIB: u64 = 32;
/// Measured time of the guest's clock in seconds, after one that the pages are not counted in.
const SECONDS: u32 = 1;
/// Statistics of locks (Linux Documentation/locking/lockstat.rst).
const LOCK_STAT: &str = "/proc/lock_stat";
/// The class of all zones' locks.
const CLASS: &str = "&zone->lock";
/// Time limit for a boot or a workload, which only an emulator that hangs exceeds.
const LIMIT: Duration = Duration::from_secs(1800);

/// The lock's statistics of a run.
#[derive(Debug, Clone, Copy, PartialEq)]
struct LockCounts {
    /// How often a task had to wait.
    contentions: u64,
    /// How often it was taken.
    acquisitions: u64,
    /// How long it was held in all, in instructions.
    held: f64,
}

/// A guest's run.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Found {
    cpus: u32,
    /// Pages that were written while the lock's statistics were kept.
    pages: u64,
    /// Instructions of all vCPUs meanwhile for each of these pages.
    instructions: f64,
    lock: LockCounts,
}

impl Found {
    fn each(&self, number: f64) -> f64 {
        number / self.pages.max(1) as f64
    }
}

/// Runs of a series, one for each of [`CPUS`].
struct AllFound(Vec<Found>);

impl AllFound {
    fn of(&self, cpus: u32) -> Option<&Found> {
        self.0.iter().find(|found| found.cpus == cpus)
    }
}

fn series_name(tracker: Tracker) -> &'static str {
    match tracker {
        Tracker::Off => "locks-none",
        Tracker::Percpu => "locks-percpu",
        Tracker::Bitmap => "locks-bitmap",
        Tracker::Reporting => "locks-reporting",
    }
}

/// The series, one for each tracker. They need a kernel that is not Debian's.
pub(super) fn plans() -> impl Iterator<Item = SeriesPlan> {
    TRACKERS.into_iter().map(|tracker| {
        let summary = summary(
            tracker,
            "the zone's lock without a tracker, with up to 16 vCPUs (make zone-lock)",
        );
        SeriesPlan::new(series_name(tracker), summary, Run::Emulated(run)).when_named()
    })
}

fn metrics() -> Vec<Metric<AllFound>> {
    let mut metrics: Vec<Metric<AllFound>> = vec![
        Metric::lower(
            "lock_held_instructions",
            "Zone's lock held for a page, one vCPU",
            "instructions",
            |all: &AllFound| all.of(1).map(|found| found.each(found.lock.held)),
        ),
        Metric::lower(
            "lock_held_percent",
            "Zone's lock held, one vCPU",
            "% of instructions",
            |all: &AllFound| {
                all.of(1).map(|found| found.each(found.lock.held) / found.instructions * 100.0)
            },
        ),
    ];
    metrics.extend(CPUS.map(|cpus| {
        Metric::lower(
            format!("lock{cpus}_taken_per_1000_pages"),
            format!("Zone's lock taken for 1000 pages, as many tasks as vCPUs: {cpus}"),
            "",
            move |all: &AllFound| {
                let taken = |found: &Found| found.each(found.lock.acquisitions as f64) * 1000.0;
                all.of(cpus).map(taken)
            },
        )
    }));
    metrics
}

/// Descriptions of the metrics.
pub(super) fn describe() -> Vec<MetricInfo> {
    metrics::describe(metrics())
}

fn run(machine: OnMachine<'_>, all: &mut [Series]) {
    let prepared = tempfile::tempdir()
        .map_err(LabError::of_file(std::env::temp_dir()))
        .and_then(|directory| Ok((Emulator::find(directory.path())?, directory)));
    let (emulator, _directory) = match prepared {
        Ok(prepared) => prepared,
        Err(error) => {
            return all.iter_mut().for_each(|series| series.error = Some(error.to_string()));
        }
    };
    // Guests of different trackers run at the same time, on which counts do not depend; each is
    // bound to the thread that starts it.
    thread::scope(|scope| {
        for (number, series) in (1..).zip(all) {
            let (emulator, events) = (&emulator, machine.events.clone());
            scope.spawn(move || of_tracker(emulator, number, series, &events));
        }
    });
}

/// Runs the guests of a series and fills it in.
fn of_tracker(emulator: &Emulator, number: u32, series: &mut Series, events: &Events) {
    let Some(tracker) = TRACKERS.into_iter().find(|of| series_name(*of) == series.name) else {
        return;
    };
    let found: Result<Vec<Found>, LabError> = CPUS
        .into_iter()
        .map(|cpus| {
            events.step(number, format!("{}: vCPUs and tasks: {cpus}", series.name));
            guest(emulator, number, tracker, cpus)
        })
        .collect();
    match found.and_then(|found| Ok((found, emulator.describe()?))) {
        Ok((found, guests)) => {
            series.notes.push(format!("guests run {guests}"));
            series.tables = vec![table(&found)];
            metrics::measure(&metrics(), &AllFound(found), series);
        }
        Err(error) => series.error = Some(error.to_string()),
    }
}

/// Runs one guest from its boot to its end.
fn guest(emulator: &Emulator, number: u32, tracker: Tracker, cpus: u32) -> Result<Found, LabError> {
    let driver = Driver::among_all(tracker);
    let mut guest = Guest::start(number, emulator.command(driver, cpus))?;
    guest.wait_ready(LIMIT)?;
    guest.require_driver(driver.in_guest())?;
    let mut ask = |command| {
        let answer = guest.command(command, LIMIT, &mut || {})?;
        Ok::<_, LabError>((answer.result, answer.elapsed))
    };
    let failed = |why: String| LabError::guest(number, GuestProblem::Failed(why));
    // Writing 0 forgets what was counted.
    ask(Command::WriteFile { path: LOCK_STAT.to_owned(), text: "0".to_owned() }).map_err(|_| {
        failed(format!(
            "its kernel has no {LOCK_STAT}: run `make zone-lock`, which compiles one that has it"
        ))
    })?;
    let faults = |result: &Value| {
        result["pgfault"].as_u64().ok_or_else(|| failed(format!("no page faults in {result}")))
    };
    let before = faults(&ask(Command::VmStat)?.0)?;
    let (report, elapsed) = ask(Command::PageFaults {
        kind: FaultKind::Fault1,
        tasks: cpus,
        threads: TaskKind::Processes,
        seconds: SECONDS,
        mapping_bytes: MAPPING_MIB << 20,
    })?;
    let _: FaultReport =
        serde_json::from_value(report).map_err(|error| LabError::unexpected(number, error))?;
    let (text, _) = ask(Command::read_file(LOCK_STAT))?;
    let pages = faults(&ask(Command::VmStat)?.0)? - before;
    guest.kill();
    let text = text["text"].as_str().unwrap_or_default();
    let lock = parse(text).ok_or_else(|| failed(format!("no {CLASS} in {LOCK_STAT}: {text}")))?;
    let instructions = elapsed.as_nanos() as f64 / pages.max(1) as f64;
    Ok(Found { cpus, pages, instructions, lock })
}

/// The line of [`CLASS`], whose times are in microseconds with two decimals.
fn parse(text: &str) -> Option<LockCounts> {
    let line =
        text.lines().find_map(|line| line.trim_start().strip_prefix(CLASS)?.strip_prefix(':'))?;
    let fields: Vec<&str> = line.split_ascii_whitespace().collect();
    // con-bounces, contentions, four waiting times, acq-bounces, acquisitions, then the times held:
    // least, most, all, mean.
    let [_, contentions, _, _, _, _, _, acquisitions, _, _, held_us, _] = fields[..] else {
        return None;
    };
    Some(LockCounts {
        contentions: contentions.parse().ok()?,
        acquisitions: acquisitions.parse().ok()?,
        held: held_us.parse::<f64>().ok()? * 1000.0,
    })
}

fn table(all: &[Found]) -> DataTable {
    DataTable::of(
        "the zone's lock",
        all,
        &[
            ("vCPUs and tasks", &|found: &Found| found.cpus.into()),
            ("pages", &|found| found.pages.into()),
            ("instructions a page", &|found| found.instructions.into()),
            ("taken", &|found| found.lock.acquisitions.into()),
            ("pages each", &|found| {
                (found.pages as f64 / found.lock.acquisitions.max(1) as f64).into()
            }),
            ("held each, instructions", &|found| {
                (found.lock.held / found.lock.acquisitions.max(1) as f64).into()
            }),
            ("held a page, instructions", &|found| found.each(found.lock.held).into()),
            ("waited for", &|found| found.lock.contentions.into()),
        ],
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_line_of_the_lock_is_found() {
        let text = "lock_stat version 0.4\n\
            -----\n                              class name    con-bounces\n\
            \n                  &zone->lock/1:  9 9 9 9 9 9 9 9 9 9 9 9\n\
            \n                    &zone->lock:             3              4           0.11\
            \x20          5.50          12.75           0.90            600           1042\
            \x20          0.21          88.10        1500.25           1.43\n\
            \n                    -----------\n                    &zone->lock   4   [<0>] rmqueue\n";
        let expected = LockCounts { contentions: 4, acquisitions: 1042, held: 1_500_250.0 };
        assert_eq!(parse(text), Some(expected));
        assert_eq!(parse("        &zone->lock: 1 2 3\n"), None);
        assert_eq!(parse(""), None);
    }

    #[test]
    fn numbers_are_for_each_page() {
        let lock = LockCounts { contentions: 0, acquisitions: 50, held: 20_000.0 };
        let found = |cpus| Found { cpus, pages: 2000, instructions: 500.0, lock };
        let all = AllFound(vec![found(1), found(16)]);
        let mut series = Series::new("locks-none", String::new());
        metrics::measure(&metrics(), &all, &mut series);
        let metric = |name: &str| series.metrics[name];
        assert_eq!(metric("lock_held_instructions"), Some(10.0));
        assert_eq!(metric("lock_held_percent"), Some(2.0));
        assert_eq!(metric("lock16_taken_per_1000_pages"), Some(25.0));
        assert_eq!(metric("lock4_taken_per_1000_pages"), None);
        assert_eq!(table(&all.0).rows.len(), 2);
    }
}
