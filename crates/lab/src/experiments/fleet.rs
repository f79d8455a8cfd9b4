//! How many machines with agents' work a host admits under a policy, and what that costs their
//! work: real guests follow traces of `ebb-fleet-model`.
//!
//! The traces are those on which the policy's results count in the model. A scale divides the
//! memory of host and machines by one number and all times by another, also those of the policies.

mod policy;
mod work;

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use ebb_agent::protocol::Command;
use ebb_agent::trace_load::TraceReport;
use ebb_fleet_model::trace::JUDGING_SEED;
use ebb_fleet_model::{Recipe, Trace};
use serde::Serialize;
use serde_json::Value;

use crate::LabError;
use crate::harness::devices::{Device, HostCache, QemuEngine};
use crate::harness::driver::{Driver, Tracker};
use crate::harness::experiment::{Experiment, Needs, Run, SeriesPlan, parameters};
use crate::harness::guest::{Answer, Begun};
use crate::harness::host;
use crate::harness::monitor::Setup;
use crate::harness::size::{GuestSize, HostShape};
use crate::harness::testbed::Testbed;
use crate::report::figures::DataTable;
use crate::report::metrics::{self, Metric};
use crate::report::results::{Scale, Series};
use crate::report::statistics::rounded;
use policy::{Policy, Running};
use work::Divisors;

/// The experiment.
pub static FLEET: Experiment = Experiment {
    name: "fleet",
    summary: "How many machines with agents' work a host admits under a policy, and what that \
              costs their work",
    host: |scale, _| sizes(scale).host,
    parameters: |scale| parameters(&sizes(scale)),
    guests: |_| MOST_MACHINES,
    needs: Needs { daemon: true, ..Needs::NONE },
    metrics: || metrics::describe(metrics()),
    series,
    compare: |all| metrics::compare(&metrics(), "static", all),
    ..Experiment::DEFAULT
};

/// Sizes of one scale.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
struct Sizes {
    #[serde(flatten)]
    host: HostShape,
    #[serde(flatten)]
    divisors: Divisors,
    /// Duration of a series.
    duration_s: u64,
}

/// More machines than a series starts, for the progress bar.
const MOST_MACHINES: u32 = 60;
/// How often the machines are looked at.
const LOOK: Duration = Duration::from_millis(50);
/// How often the progress is shown, in seconds.
const PROGRESS_S: u64 = 30;
/// The directory of the monitors' sockets.
const MACHINES: &str = "machines";
/// Where a guest's files are, and where it reports how far its work is.
const FILES: &str = "/dev/vda";
const REPORT: &str = "/trace-report";

fn sizes(scale: Scale) -> Sizes {
    match scale {
        Scale::Demo => Sizes {
            host: HostShape { memory_mib: 3072, swap_mib: 1024, nodes: 1 },
            divisors: Divisors { memory: 5, time: 4 },
            duration_s: 240,
        },
        Scale::Full => Sizes {
            host: HostShape { memory_mib: 15 << 10, swap_mib: 4096, nodes: 1 },
            divisors: Divisors { memory: 1, time: 2 },
            duration_s: 600,
        },
    }
}

fn series() -> Vec<SeriesPlan> {
    // All guests have the same means, whatever the policy does with them.
    let setup = Setup { driver: Driver::tracking(Tracker::Off), ..Setup::EBB };
    let plan = |name, summary, run| SeriesPlan::new(name, summary, Run::Guests(setup, run));
    vec![
        plan(
            "static",
            "machines start as long as their sizes fit in the host's memory",
            |testbed, series| run(testbed, series, |_, _| Ok(Policy::fixed())),
        ),
        plan(
            "deficit",
            "machines start while two thirds of the host's memory are available; balloons change \
             by shares of what the host lacks to one third",
            |testbed, series| run(testbed, series, |sizes, _| Ok(Policy::deficit(sizes))),
        ),
        plan(
            "ebbd",
            "machines start when ebbd admits them, and ebbd decides what is done to them; it has a \
             history of other traces",
            |testbed, series| run(testbed, series, Policy::daemon),
        ),
    ]
}

/// What was found in a series.
#[derive(Debug, Default)]
struct Found {
    /// Machine-milliseconds of the second half, and how long that was.
    admitted_ms: u64,
    second_half_ms: u64,
    most: usize,
    completed: usize,
    work_ms: u64,
    late_ms: u64,
    paused_ms: u64,
    waited_ms: u64,
    swap_out_bytes: u64,
    orders: usize,
    unexplained: usize,
    /// How many orders there were of each kind.
    kinds: BTreeMap<String, usize>,
    /// Machines that ended before their work did, or whose work was killed, and how.
    losses: Vec<String>,
    /// All others whose work was begun.
    worked: Vec<Worked>,
}

/// What a machine has done until its end, or until the series'.
#[derive(Debug)]
struct Worked {
    name: String,
    size_mib: u64,
    begun_s: f64,
    took: Duration,
    /// How long it was paused, and how long its vCPU waited for a processor.
    paused_ms: u64,
    waited_ms: u64,
    report: TraceReport,
}

impl Worked {
    fn late_ms(&self) -> u64 {
        (self.took.as_millis() as u64).saturating_sub(self.report.own_ms)
    }
}

fn metrics() -> Vec<Metric<Found>> {
    fn count(name: &str, title: &str, value: fn(&Found) -> usize) -> Metric<Found> {
        Metric::lower(name, title, "", move |found| Some(value(found) as f64))
    }
    let part = |of: u64, all: u64| (all > 0).then(|| of as f64 / all as f64);
    vec![
        Metric::higher("admitted", "Machines at a time (second half)", "", move |found: &Found| {
            part(found.admitted_ms, found.second_half_ms)
        }),
        Metric::ratio("admitted_ratio", "Times the machines of static limits", "admitted"),
        count("most_admitted", "Most machines at a time", |found| found.most).better_higher(),
        count("completed", "Machines that did all of their work", |found| found.completed)
            .better_higher(),
        Metric::lower("slowdown", "Duration of work", "x", move |found: &Found| {
            part(found.work_ms + found.late_ms, found.work_ms)
        }),
        Metric::lower("slowdown_paused", "… of it: paused", "x", move |found: &Found| {
            part(found.paused_ms, found.work_ms)
        }),
        Metric::lower(
            "slowdown_processor",
            "… of it: no processor",
            "x",
            move |found: &Found| part(found.waited_ms, found.work_ms),
        ),
        count("oom_kills", "Machines or programs killed", |found| found.losses.len()),
        Metric::lower("swap_mib", "Written to swap", "MiB", |found: &Found| {
            Some(host::mib(found.swap_out_bytes >> 10))
        }),
        count("actions", "Actions of the policy", |found| found.orders),
        count("explanations_missing", "Actions without explanation", |found| found.unexplained),
    ]
}

fn run(
    testbed: &mut Testbed<'_>,
    series: &mut Series,
    policy: fn(&Sizes, &Path) -> Result<Policy, LabError>,
) -> Result<(), LabError> {
    let sizes = sizes(testbed.scale());
    let folder = tempfile::tempdir().map_err(LabError::of_file(std::env::temp_dir()))?;
    let machines = folder.path().join(MACHINES);
    fs::create_dir(&machines).map_err(LabError::of_file(&machines))?;
    let mut fleet = Fleet {
        policy: policy(&sizes, &machines)?,
        trace: sizes.divisors.apply(&Recipe::fleet(JUDGING_SEED).trace()),
        most: testbed.guests(u32::MAX) as usize,
        testbed,
        folder: folder.path(),
        begin: Instant::now(),
        next: 0,
        machines: Vec::new(),
        found: Found::default(),
    };
    let outcome = fleet.run(Duration::from_secs(sizes.duration_s));
    let Fleet { found, .. } = fleet;
    metrics::measure(&metrics(), &found, series);
    if !found.kinds.is_empty() {
        let kinds = found.kinds.iter().map(|(kind, count)| format!("{kind} {count}"));
        series.notes.push(format!("orders: {}", kinds.collect::<Vec<_>>().join(", ")));
    }
    series.notes.extend(found.losses.iter().cloned());
    series.details.push(DataTable::of(
        "machines that worked",
        &found.worked,
        &[
            ("machine", &|it| it.name.clone().into()),
            ("MiB", &|it| it.size_mib.into()),
            ("begun, s", &|it| rounded(it.begun_s).into()),
            ("took, s", &|it| rounded(it.took.as_secs_f64()).into()),
            ("late, s", &|it| rounded(it.late_ms() as f64 / 1000.0).into()),
            ("paused, s", &|it| rounded(it.paused_ms as f64 / 1000.0).into()),
            ("without a processor, s", &|it| rounded(it.waited_ms as f64 / 1000.0).into()),
        ],
    ));
    outcome
}

/// A series while it runs.
struct Fleet<'a, 'b> {
    // Dropped before the guests: it undoes what it has taken from them.
    policy: Policy,
    testbed: &'a mut Testbed<'b>,
    folder: &'a Path,
    trace: Trace,
    /// The most machines that are started.
    most: usize,
    begin: Instant,
    /// How many machines of the trace were started.
    next: usize,
    machines: Vec<Machine>,
    found: Found,
}

/// A machine that was started.
struct Machine {
    guest: u32,
    /// Its number in the trace.
    number: usize,
    running: Running,
    disk: PathBuf,
    /// Its work, once its guest is there.
    work: Option<Begun>,
    /// How long its vCPU had waited for a processor before.
    waited_ms: f64,
}

impl Fleet<'_, '_> {
    fn run(&mut self, duration: Duration) -> Result<(), LabError> {
        let swapped = host::swap_out_bytes()?;
        let mut before = Duration::ZERO;
        loop {
            let now = self.begin.elapsed();
            if now >= duration {
                break;
            }
            let working = self.machines.iter().filter(|machine| machine.work.is_some());
            let working: Vec<_> = working.map(|machine| &machine.running).collect();
            let count = working.len();
            if let Some(passed) = now.checked_sub(before.max(duration / 2)) {
                self.found.admitted_ms += count as u64 * passed.as_millis() as u64;
                self.found.second_half_ms += passed.as_millis() as u64;
            }
            if now.as_secs() / PROGRESS_S > before.as_secs() / PROGRESS_S {
                let (now_s, all_s) = (now.as_secs(), duration.as_secs());
                let completed = self.found.completed;
                let text = format!("{now_s} of {all_s} s: {count} work, {completed} have ended");
                self.testbed.events().step(0, text);
            }
            before = now;
            self.found.most = self.found.most.max(count);
            self.policy.act(&working)?;
            self.look()?;
            self.admit(now)?;
            thread::sleep(LOOK);
        }
        // What follows is not part of the series.
        self.found.swap_out_bytes = host::swap_out_bytes()?.saturating_sub(swapped);
        (self.found.orders, self.found.unexplained) = self.policy.orders();
        self.found.kinds = self.policy.kinds();
        self.count_unfinished()
    }

    /// Starts the next machine, one at a time.
    fn admit(&mut self, now: Duration) -> Result<(), LabError> {
        let number = self.next;
        let Some(next) = self.trace.machines.get(number).filter(|_| number < self.most) else {
            return Ok(());
        };
        let is_starting = self.machines.iter().any(|machine| machine.work.is_none());
        if is_starting || now < Duration::from_millis(next.arrives_ms) {
            return Ok(());
        }
        let running = self.machines.iter().map(|machine| &machine.running);
        if !self.policy.admits(running, next.size_bytes)? {
            return Ok(());
        }
        let name = format!("{:?}-{number}", next.kind).to_lowercase();
        let disk = self.folder.join(format!("{name}.disk"));
        // All of it is a hole, which occupies nothing in the host.
        let made = File::create(&disk).and_then(|file| file.set_len(work::files_bytes(next)));
        made.map_err(LabError::of_file(&disk))?;
        let device =
            Device::Disk { path: &disk, cache: HostCache::Used, engine: QemuEngine::Threads };
        let socket = self.folder.join(MACHINES).join(format!("{name}.sock"));
        let size = GuestSize { memory_mib: next.size_bytes >> 20, cpus: 1 };
        let arguments = self.policy.arguments();
        let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
        let guest = self.testbed.begin_start(size, &socket, &[device], &arguments)?;
        let running = Running::new(name, next.size_bytes, socket);
        self.machines.push(Machine { guest, number, running, disk, work: None, waited_ms: 0.0 });
        self.next += 1;
        Ok(())
    }

    /// Begins the work of guests that are ready, and removes machines that have ended.
    fn look(&mut self) -> Result<(), LabError> {
        for mut machine in std::mem::take(&mut self.machines) {
            if self.goes_on(&mut machine)? {
                self.machines.push(machine);
            } else {
                self.testbed.end_guest(machine.guest);
                fs::remove_file(&machine.disk).map_err(LabError::of_file(&machine.disk))?;
            }
        }
        Ok(())
    }

    fn goes_on(&mut self, machine: &mut Machine) -> Result<bool, LabError> {
        let guest = self.testbed.guest(machine.guest)?;
        let end = match (guest.ended_by_itself(), machine.work) {
            (Some(error), _) => Err(error),
            (None, Some(begun)) => guest.end_of(begun),
            (None, None) if guest.is_ready() => {
                let load = work::load(&self.trace.machines[machine.number], FILES, REPORT);
                machine.waited_ms = host::vcpus_waited_ms(guest.pid()).unwrap_or(0.0);
                guest.begin(Command::TraceLoad(load)).map(|begun| {
                    machine.work = Some(begun);
                    None
                })
            }
            (None, None) => Ok(None),
        };
        match end {
            Ok(None) => Ok(true),
            Ok(Some(Answer { answered, result, .. })) => {
                self.found.completed += 1;
                self.count(machine, answered, result)?;
                Ok(false)
            }
            Err(error) => {
                tracing::debug!("{error}");
                let text = error.to_string();
                let first = text.lines().next().unwrap_or_default().to_owned();
                self.found.losses.push(format!("{}: {first}", machine.running.name));
                Ok(false)
            }
        }
    }

    /// Counts the work of machines that have not done all of it.
    fn count_unfinished(&mut self) -> Result<(), LabError> {
        for machine in std::mem::take(&mut self.machines) {
            if machine.work.is_none() {
                continue;
            }
            let asked = Instant::now();
            let answer = self.testbed.ask(machine.guest, Command::read_file(REPORT))?;
            let report = answer["text"].as_str().and_then(|text| serde_json::from_str(text).ok());
            let report = report
                .ok_or_else(|| LabError::unexpected(machine.guest, "its report cannot be read"))?;
            self.count(&machine, asked, report)?;
        }
        Ok(())
    }

    /// Counts what a machine has done until this moment.
    fn count(&mut self, machine: &Machine, at: Instant, report: Value) -> Result<(), LabError> {
        let report: TraceReport = serde_json::from_value(report)
            .map_err(|error| LabError::unexpected(machine.guest, error))?;
        let Some(begun) = machine.work.map(Begun::sent) else { return Ok(()) };
        let waited_ms = self.testbed.vcpus_waited_ms(machine.guest)? - machine.waited_ms;
        let worked = Worked {
            name: machine.running.name.clone(),
            size_mib: machine.running.size_bytes >> 20,
            begun_s: (begun - self.begin).as_secs_f64(),
            took: at.saturating_duration_since(begun),
            paused_ms: self.policy.paused(&machine.running.name, at).as_millis() as u64,
            waited_ms: waited_ms as u64,
            report,
        };
        self.found.work_ms += report.work_ms;
        self.found.late_ms += worked.late_ms();
        self.found.paused_ms += worked.paused_ms;
        self.found.waited_ms += worked.waited_ms;
        self.found.worked.push(worked);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lateness_is_what_exceeds_the_work_and_the_waits() {
        let report = TraceReport { own_ms: 900, work_ms: 500, parts: 3 };
        let worked = |took_ms| Worked {
            name: "agent-0".to_owned(),
            size_mib: 1,
            begun_s: 0.0,
            took: Duration::from_millis(took_ms),
            paused_ms: 0,
            waited_ms: 0,
            report,
        };
        assert_eq!([850, 900, 1000].map(|ms| worked(ms).late_ms()), [0, 0, 100]);
    }

    #[test]
    fn static_limits_have_room_for_some_machines_and_not_for_all() {
        for scale in [Scale::Demo, Scale::Full] {
            let Sizes { host, divisors, duration_s } = sizes(scale);
            let trace = divisors.apply(&Recipe::fleet(JUDGING_SEED).trace());
            let mib: Vec<u64> = trace.machines.iter().map(|it| it.size_bytes >> 20).collect();
            assert!(mib.iter().take(3).sum::<u64>() < 2 * host.memory_mib);
            assert!(mib.iter().all(|size| *size < host.memory_mib), "{mib:?}");
            assert!(mib.iter().take(10).sum::<u64>() > host.memory_mib);
            let last = trace.machines.last().map_or(0, |machine| machine.arrives_ms);
            assert!(last > 500 * duration_s, "machines arrive until the end: {last}");
        }
    }
}
