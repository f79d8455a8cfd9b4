//! The clock of a real Linux guest against its host's, over pauses, snapshots and restores, with a clock policy.
//!
//! A guest's clocks are looked at before and after each stop. What its monotonic clock has gained on the host's must be what
//! the policy promises: nothing with `catch-up`, and with `continue` the time that it stood still, lost. The same is done without a stop in
//! between, which shows what the looks themselves are worth. A reader on each vCPU watches for steps backward all the time.

use std::thread;
use std::time::Duration;

use ebb_agent::clock_watch::WatchReport;
use ebb_kvm_clock::ClockPolicy;

use crate::LabError;
use crate::bench::Bench;
use crate::results::{Scale, Series};
use interval::{Interval, Look};
use subject::Subject;

mod interval;
mod subject;
mod tell;

pub(super) use subject::SIZE;
pub(super) use tell::metrics;

/// Lengths of pauses, one after the other and from the beginning again.
const PAUSES_MS: [u64; 10] = [0, 5, 20, 50, 100, 200, 400, 800, 1500, 3000];
/// How long a saved guest waits, likewise.
const WAITS_MS: [u64; 5] = [0, 100, 500, 1000, 2000];
/// Without a stop: the time between two looks.
const UNSTOPPED: Duration = Duration::from_millis(300);

/// How many stops of each kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Stops {
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

/// What happens between two looks.
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

/// What a snapshot and its restore cost.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Cost {
    save_ms: u64,
    stored_bytes: u64,
    ram_bytes: u64,
    first_answer_ms: f64,
}

/// Two looks and what happened in between.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Cycle {
    kind: Kind,
    /// How long the guest was left alone, by plan.
    planned: Duration,
    before: Look,
    after: Look,
    /// How long it stood still, by the host's raw clock.
    stopped: Interval,
    /// The largest difference between two readings of a reader over the stop.
    gap_ns: u64,
    cost: Option<Cost>,
}

impl Cycle {
    /// How far the guest's monotonic clock has gone ahead of the policy's promise.
    fn error(&self, policy: ClockPolicy) -> Interval {
        self.after.monotonic.minus(self.before.monotonic).plus(lost(policy, self.stopped))
    }

    /// How much larger a reader's gap was than the stop that it has to see.
    fn gap_beyond_ns(&self, policy: ClockPolicy) -> i64 {
        let promised_ns = match policy {
            ClockPolicy::Continue => 0,
            ClockPolicy::CatchUp => self.stopped.low_ns,
        };
        self.gap_ns.cast_signed() - promised_ns
    }
}

/// What a guest loses by a stop.
fn lost(policy: ClockPolicy, stopped: Interval) -> Interval {
    match policy {
        ClockPolicy::Continue => stopped,
        ClockPolicy::CatchUp => Interval::ZERO,
    }
}

/// All that a series has seen.
#[derive(Debug)]
struct Record {
    policy: ClockPolicy,
    cycles: Vec<Cycle>,
    /// What the readers have seen, last.
    watched: WatchReport,
    clock_source: String,
    /// Lines of the guest's kernel that were not there when it had booted.
    complaints: Vec<String>,
}

/// Runs a series.
///
/// # Errors
/// What the guest or its monitor did not do; what was measured before is told all the same.
pub(super) fn run(bench: &mut Bench<'_>, series: &mut Series) -> Result<(), LabError> {
    let stops = stops(bench.scale());
    let mut record = Record {
        policy: bench.setup().clock,
        cycles: Vec::new(),
        watched: WatchReport::default(),
        clock_source: String::new(),
        complaints: Vec::new(),
    };
    let outcome = watch(bench, stops, &mut record);
    record.tell(series);
    outcome
}

fn watch(bench: &mut Bench<'_>, stops: Stops, record: &mut Record) -> Result<(), LabError> {
    let mut subject = Subject::boot(bench)?;
    record.clock_source = subject.clock_source()?;
    let before = subject.complaints()?;
    let mut last = subject.look()?;
    let counts = [stops.unstopped, stops.pauses, stops.restores];
    for (kind, count) in Kind::ALL.into_iter().zip(counts) {
        subject.step(format!("{} x {count}", kind.name()));
        for number in 0..count {
            let cycle = cycle(&mut subject, kind, planned(kind, number), last, &mut record.watched)?;
            last = cycle.after;
            record.cycles.push(cycle);
        }
    }
    record.complaints = subject.complaints()?.into_iter().filter(|line| !before.contains(line)).collect();
    Ok(())
}

/// How long the guest is left alone.
fn planned(kind: Kind, number: usize) -> Duration {
    match kind {
        Kind::Unstopped => UNSTOPPED,
        Kind::Pause => Duration::from_millis(PAUSES_MS[number % PAUSES_MS.len()]),
        Kind::Restore => Duration::from_millis(WAITS_MS[number % WAITS_MS.len()]),
    }
}

fn cycle(
    subject: &mut Subject<'_, '_>,
    kind: Kind,
    planned: Duration,
    before: Look,
    watched: &mut WatchReport,
) -> Result<Cycle, LabError> {
    // Begins a new interval of the readers' gaps.
    *watched = subject.watched()?;
    let (stopped, cost) = match kind {
        Kind::Unstopped => {
            thread::sleep(planned);
            (Interval::ZERO, None)
        }
        Kind::Pause => (subject.pause(planned)?, None),
        Kind::Restore => {
            let saved = subject.save_and_end()?;
            thread::sleep(planned);
            let restored = subject.restore()?;
            let cost = Cost {
                save_ms: saved.report.elapsed_ms,
                stored_bytes: saved.report.stored_bytes,
                ram_bytes: saved.report.ram_bytes,
                first_answer_ms: restored.first_answer.as_secs_f64() * 1e3,
            };
            (restored.resumed.minus(saved.stopped), Some(cost))
        }
    };
    let after = subject.look()?;
    *watched = subject.watched()?;
    let gap_ns = watched.cpus.iter().map(|cpu| cpu.largest_gap_since_report_ns).max().unwrap_or(0);
    Ok(Cycle { kind, planned, before, after, stopped, gap_ns, cost })
}
