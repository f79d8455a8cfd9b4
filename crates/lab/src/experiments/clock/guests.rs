//! The clock of a real Linux guest against its host's, over pauses, snapshots and restores, with a
//! clock policy.
//!
//! A guest's clocks are sampled before and after each stop. The gain of its monotonic clock over
//! the host's must match the policy: zero with `catch-up`, and minus the duration of the stop with
//! `continue`. The same is done without a stop, which shows the precision of the samples. A reader
//! on each vCPU checks for steps backward all the time.

use std::thread;
use std::time::Duration;

use ebb_agent::clock_watch::WatchReport;
use ebb_kvm_clock::ClockPolicy;
use serde::Serialize;

use crate::LabError;
use crate::harness::testbed::Testbed;
use crate::report::results::Scale;
use interval::{Interval, Look};
use subject::{Stop, Subject};

mod board;
mod interval;
mod memory;
pub(super) mod metrics;
mod subject;

pub(super) use subject::SIZE;

/// Durations of pauses, used in turn.
const PAUSES_MS: [u64; 10] = [0, 5, 20, 50, 100, 200, 400, 800, 1500, 3000];
/// Durations for which a saved guest waits, used in turn.
const WAITS_MS: [u64; 5] = [0, 100, 500, 1000, 2000];
/// Time between two samples without a stop.
const UNSTOPPED: Duration = Duration::from_millis(300);

/// Number of stops of each kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub(super) struct Stops {
    #[serde(skip)]
    pub(super) unstopped: usize,
    pub(super) pauses: usize,
    pub(super) restores: usize,
}

pub(super) const fn stops(scale: Scale) -> Stops {
    match scale {
        Scale::Demo => Stops { unstopped: 5, pauses: 10, restores: 5 },
        Scale::Full => Stops { unstopped: 20, pauses: 100, restores: 20 },
    }
}

/// The event between two samples.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// Nothing: the guest runs.
    Unstopped,
    /// Pause and resume.
    Pause,
    /// Snapshot, end of the monitor, restore in another one.
    Restore,
}

impl Kind {
    const ALL: [Self; 3] = [Self::Unstopped, Self::Pause, Self::Restore];

    fn name(self) -> &'static str {
        match self {
            Self::Unstopped => "no stop",
            Self::Pause => "pause",
            Self::Restore => "restore",
        }
    }
}

/// Cost of a snapshot and its restore.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Cost {
    save_ms: u64,
    stored_bytes: u64,
    ram_bytes: u64,
    first_answer_ms: f64,
}

/// Duration of a guest's stop by the host's clock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Stopped {
    time: Interval,
    /// Deviation of KVM's clock from the policy, according to the monitor's report of both ends of
    /// the stop.
    kvm_error_ns: Option<i64>,
    /// Whether the report is consistent with the times of the requests to the monitor.
    agrees: bool,
}

impl Stopped {
    /// No stop.
    const NOT: Self = Self { time: Interval::ZERO, kvm_error_ns: None, agrees: true };

    /// The monitor's report, unless it is inconsistent.
    fn by(stop: &Stop, policy: ClockPolicy) -> Self {
        let asked = Self { time: stop.asked, kvm_error_ns: None, agrees: true };
        let (Some(stopped), Some(started)) = (stop.reported.stopped, stop.reported.started) else {
            return asked;
        };
        let time_ns = started.realtime_ns.cast_signed() - stopped.realtime_ns.cast_signed();
        if !stop.asked.holds(time_ns) {
            return Self { agrees: false, ..asked };
        }
        let promised_ns = match policy {
            ClockPolicy::Continue => 0,
            ClockPolicy::CatchUp => time_ns,
        };
        let advance_ns = started.clock_ns.cast_signed() - stopped.clock_ns.cast_signed();
        Self {
            time: Interval::between(time_ns, time_ns),
            kvm_error_ns: Some(advance_ns - promised_ns),
            agrees: true,
        }
    }
}

/// Two samples and the event in between.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Cycle {
    kind: Kind,
    /// Planned time between the samples.
    planned: Duration,
    before: Look,
    after: Look,
    /// Duration of the stop.
    stopped: Stopped,
    /// Largest difference between two readings of a reader over the stop.
    gap_ns: u64,
    cost: Option<Cost>,
}

impl Cycle {
    /// Deviation of the guest's monotonic clock from the policy; positive if it is ahead.
    fn error(&self, policy: ClockPolicy) -> Interval {
        self.after.monotonic.minus(self.before.monotonic).plus(lost(policy, self.stopped.time))
    }

    /// Excess of a reader's gap over the stop that it must see, in ns.
    fn gap_beyond_ns(&self, policy: ClockPolicy) -> i64 {
        let promised_ns = match policy {
            ClockPolicy::Continue => 0,
            ClockPolicy::CatchUp => self.stopped.time.low_ns,
        };
        self.gap_ns.cast_signed() - promised_ns
    }
}

/// Time that a guest loses by a stop.
fn lost(policy: ClockPolicy, stopped: Interval) -> Interval {
    match policy {
        ClockPolicy::Continue => stopped,
        ClockPolicy::CatchUp => Interval::ZERO,
    }
}

/// All results of a series.
#[derive(Debug)]
pub(super) struct Record {
    policy: ClockPolicy,
    cycles: Vec<Cycle>,
    /// The readers' last report.
    watched: WatchReport,
    clock_source: String,
    /// Why the guest's clock was read over the console only, if it was.
    console_only: Option<String>,
    /// Lines that the guest's kernel has logged since its boot.
    complaints: Vec<String>,
}

/// Runs a series; returns the measurements, including those before a failure.
pub(super) fn run(testbed: &mut Testbed<'_>) -> (Record, Result<(), LabError>) {
    let stops = stops(testbed.scale());
    let mut record = Record {
        policy: testbed.setup().clock,
        cycles: Vec::new(),
        watched: WatchReport::default(),
        clock_source: String::new(),
        console_only: None,
        complaints: Vec::new(),
    };
    let outcome = watch(testbed, stops, &mut record);
    (record, outcome)
}

fn watch(testbed: &mut Testbed<'_>, stops: Stops, record: &mut Record) -> Result<(), LabError> {
    let mut subject = Subject::boot(testbed)?;
    record.clock_source = subject.clock_source()?;
    let before = subject.complaints()?;
    let mut last = subject.look()?;
    let counts = [stops.unstopped, stops.pauses, stops.restores];
    for (kind, count) in Kind::ALL.into_iter().zip(counts) {
        subject.step(format!("{} x {count}", kind.name()));
        for number in 0..count {
            let plan = (kind, planned(kind, number));
            let cycle = cycle(&mut subject, record.policy, plan, last, &mut record.watched)?;
            last = cycle.after;
            record.cycles.push(cycle);
            record.console_only = subject.console_only().map(str::to_owned);
        }
    }
    record.complaints =
        subject.complaints()?.into_iter().filter(|line| !before.contains(line)).collect();
    Ok(())
}

/// Planned time between the samples.
fn planned(kind: Kind, number: usize) -> Duration {
    match kind {
        Kind::Unstopped => UNSTOPPED,
        Kind::Pause => Duration::from_millis(PAUSES_MS[number % PAUSES_MS.len()]),
        Kind::Restore => Duration::from_millis(WAITS_MS[number % WAITS_MS.len()]),
    }
}

fn cycle(
    subject: &mut Subject<'_, '_>,
    policy: ClockPolicy,
    (kind, planned): (Kind, Duration),
    before: Look,
    watched: &mut WatchReport,
) -> Result<Cycle, LabError> {
    // Begins a new interval of the readers' gaps.
    *watched = subject.watched()?;
    let (stopped, cost) = match kind {
        Kind::Unstopped => {
            thread::sleep(planned);
            (Stopped::NOT, None)
        }
        Kind::Pause => (Stopped::by(&subject.pause(planned)?, policy), None),
        Kind::Restore => {
            let saved = subject.save_and_end()?;
            thread::sleep(planned);
            let restored = subject.restore(&saved)?;
            let cost = Cost {
                save_ms: saved.report.elapsed_ms,
                stored_bytes: saved.report.stored_bytes,
                ram_bytes: saved.report.ram_bytes,
                first_answer_ms: restored.first_answer.as_secs_f64() * 1e3,
            };
            (Stopped::by(&restored.stop, policy), Some(cost))
        }
    };
    let after = subject.look()?;
    *watched = subject.watched()?;
    let gap_ns = watched.cpus.iter().map(|cpu| cpu.largest_gap_since_report_ns).max().unwrap_or(0);
    Ok(Cycle { kind, planned, before, after, stopped, gap_ns, cost })
}

#[cfg(test)]
mod tests;
