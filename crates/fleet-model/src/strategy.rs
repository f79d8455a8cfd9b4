//! Memory policies: that of this project, and simple ones in common use to compare it with.

use std::collections::BTreeMap;

use ebb_host_policy::{
    Action, Explanation, Host, MIB, Machine, Order, Settings, Snapshot, State, decide, fit,
    is_urgent,
};

use crate::simulation::Simulation;
use crate::trace::Trace;

/// A policy.
pub trait Strategy {
    /// What is to be done now. Called once per interval, and in each step that is urgent.
    fn decide(&mut self, snapshot: &Snapshot) -> Vec<Order>;

    /// Whether another machine of this size may start now.
    fn admits(&mut self, snapshot: &Snapshot, size_bytes: u64) -> bool;

    /// Whether a decision is to be made before the end of the interval. Called in each step.
    fn is_urgent(&mut self, _host: &Host) -> bool {
        false
    }
}

/// The policy of [`ebb_host_policy`].
#[derive(Clone, Debug, Default)]
pub struct Ebbd {
    /// Its settings.
    pub settings: Settings,
    /// What it remembers.
    pub state: State,
    /// The newest explanations.
    pub explanations: Vec<Explanation>,
}

impl Ebbd {
    /// A policy with the history of traces on the same host.
    pub fn with_history_of(simulation: &Simulation, traces: &[Trace]) -> Self {
        let mut teacher = Self::default();
        for trace in traces {
            teacher.state = State::with_history(std::mem::take(&mut teacher.state).history);
            simulation.run(trace, &mut teacher);
        }
        Self { state: State::with_history(teacher.state.history), ..Self::default() }
    }
}

impl Strategy for Ebbd {
    fn decide(&mut self, snapshot: &Snapshot) -> Vec<Order> {
        let decision = decide(snapshot, std::mem::take(&mut self.state), &self.settings);
        (self.state, self.explanations) = (decision.state, decision.explanations);
        decision.orders
    }

    fn admits(&mut self, snapshot: &Snapshot, size_bytes: u64) -> bool {
        fit(snapshot, &self.state, &self.settings, "default", size_bytes, 1).machines > 0
    }

    fn is_urgent(&mut self, host: &Host) -> bool {
        is_urgent(host, &self.state, &self.settings)
    }
}

/// Sizes are never overcommitted, so nothing is ever done.
#[derive(Clone, Copy, Debug)]
pub struct StaticLimits;

impl Strategy for StaticLimits {
    fn decide(&mut self, _snapshot: &Snapshot) -> Vec<Order> {
        Vec::new()
    }

    fn admits(&mut self, snapshot: &Snapshot, size_bytes: u64) -> bool {
        let sizes: u64 = snapshot.machines.iter().map(|machine| machine.size_bytes).sum();
        sizes + size_bytes <= snapshot.host.total_bytes * 95 / 100
    }
}

/// Machines start while this much of the host's memory is available, and nothing is ever done.
#[derive(Clone, Copy, Debug)]
pub struct Nothing {
    /// Host memory that must be available before another machine starts.
    pub admission_bytes: u64,
}

impl Strategy for Nothing {
    fn decide(&mut self, _snapshot: &Snapshot) -> Vec<Order> {
        Vec::new()
    }

    fn admits(&mut self, snapshot: &Snapshot, _size_bytes: u64) -> bool {
        snapshot.host.available_bytes >= self.admission_bytes
    }
}

/// An idle machine keeps a constant amount of memory, regardless of its guest's needs.
#[derive(Clone, Debug)]
pub struct IdleTarget {
    /// What an idle machine keeps.
    pub keep_bytes: u64,
    /// For how long the guest's available memory must not have changed.
    pub idle_ms: u64,
    /// The balloon of a guest that has had no memory available for this time is released, and the
    /// machine counts as active; `None` if never.
    pub fails_open_ms: Option<u64>,
    /// Host memory that must be available before another machine starts.
    pub admission_bytes: u64,
    /// What is remembered of each machine; nothing at first.
    pub quiet: BTreeMap<String, Quiet>,
}

/// Since when a machine has been quiet.
#[derive(Clone, Copy, Debug)]
pub struct Quiet {
    since_ms: u64,
    available_bytes: u64,
}

impl IdleTarget {
    /// The values of arcboxlabs/arcbox before its pull request 390.
    pub fn arcbox() -> Self {
        Self {
            keep_bytes: 128 * MIB,
            idle_ms: 300_000,
            fails_open_ms: None,
            admission_bytes: 0,
            quiet: BTreeMap::new(),
        }
    }

    fn target(&mut self, now_ms: u64, machine: &Machine) -> Option<u64> {
        let (balloon, available_bytes) = (machine.balloon?, available(machine)?);
        let now = Quiet { since_ms: now_ms, available_bytes };
        let quiet = self.quiet.entry(machine.name.clone()).or_insert(now);
        let since = now_ms - quiet.since_ms;
        if balloon.target_bytes > 0 {
            let fails =
                available_bytes < 8 * MIB && self.fails_open_ms.is_some_and(|ms| since >= ms);
            if !fails {
                return None;
            }
            *quiet = now;
            return Some(0);
        }
        if available_bytes.abs_diff(quiet.available_bytes) > 32 * MIB {
            *quiet = now;
        } else if since >= self.idle_ms {
            *quiet = now;
            return Some(machine.size_bytes.saturating_sub(self.keep_bytes));
        }
        None
    }
}

impl Strategy for IdleTarget {
    fn decide(&mut self, snapshot: &Snapshot) -> Vec<Order> {
        let machines = snapshot.machines.iter();
        let order = |machine| Some(order(machine, self.target(snapshot.at_ms, machine)?));
        machines.filter_map(order).collect()
    }

    fn admits(&mut self, snapshot: &Snapshot, _size_bytes: u64) -> bool {
        snapshot.host.available_bytes >= self.admission_bytes
    }
}

/// The host's deficit is taken from guests in proportion to their available memory.
#[derive(Clone, Copy, Debug)]
pub struct Deficit {
    /// How targets follow from it.
    pub law: Law,
    /// Host memory that is to be available.
    pub wanted_bytes: u64,
    /// What each guest is to have available.
    pub keep_bytes: u64,
    /// Host memory that must be available before another machine starts.
    pub admission_bytes: u64,
}

/// What a deficit decides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Law {
    /// The targets are shares of it.
    Target,
    /// The targets change by shares of it, also back.
    Change,
}

impl Deficit {
    fn target(&self, machine: &Machine, lacks: i128, sums: [i128; 2]) -> Option<u64> {
        let (balloon, available) = (machine.balloon?, available(machine)?);
        let actual = i128::from(balloon.actual_bytes);
        let [spare_of_all, actual_of_all] = sums;
        let spare = i128::from(self.spare(machine));
        let share = spare.min(lacks * spare / spare_of_all.max(1));
        let target = match self.law {
            // A guest that has too little is given a part.
            _ if available < self.keep_bytes / 2 => actual - i128::from(self.keep_bytes / 2),
            Law::Target => share,
            Law::Change if lacks > 0 => actual + share,
            Law::Change => actual + lacks * actual / actual_of_all.max(1),
        };
        let target = target.max(0) as u64;
        (target != balloon.target_bytes).then_some(target)
    }

    fn spare(&self, machine: &Machine) -> u64 {
        let is_there = machine.balloon.and(available(machine));
        is_there.unwrap_or(0).saturating_sub(self.keep_bytes)
    }
}

impl Strategy for Deficit {
    fn decide(&mut self, snapshot: &Snapshot) -> Vec<Order> {
        let lacks = i128::from(self.wanted_bytes) - i128::from(snapshot.host.available_bytes);
        let machines = || snapshot.machines.iter();
        let spare = machines().map(|machine| i128::from(self.spare(machine))).sum();
        let actual = machines().filter_map(|machine| machine.balloon);
        let actual = actual.map(|balloon| i128::from(balloon.actual_bytes)).sum();
        let order = |machine| Some(order(machine, self.target(machine, lacks, [spare, actual])?));
        machines().filter_map(order).collect()
    }

    fn admits(&mut self, snapshot: &Snapshot, _size_bytes: u64) -> bool {
        snapshot.host.available_bytes >= self.admission_bytes
    }
}

/// Each guest keeps a constant amount of available memory, regardless of the host. The balloon
/// inflates in steps, and deflates by what the guest lacks (vm0-ai/vm0 before its pull request
/// 30227).
#[derive(Clone, Copy, Debug)]
pub struct GuestAvailable {
    /// What each guest is to have available.
    pub keep_bytes: u64,
    /// The largest step.
    pub step_bytes: u64,
}

impl Strategy for GuestAvailable {
    fn decide(&mut self, snapshot: &Snapshot) -> Vec<Order> {
        let target = |machine: &Machine| {
            let (balloon, available) = (machine.balloon?, available(machine)?);
            if available > self.keep_bytes * 3 / 2 {
                let step = self.step_bytes.min(available - self.keep_bytes);
                Some(order(machine, balloon.actual_bytes + step))
            } else if available < self.keep_bytes * 3 / 4 {
                let lacks = self.keep_bytes - available;
                Some(order(machine, balloon.actual_bytes.saturating_sub(lacks)))
            } else {
                None
            }
        };
        snapshot.machines.iter().filter_map(target).collect()
    }

    fn admits(&mut self, _snapshot: &Snapshot, _size_bytes: u64) -> bool {
        true
    }
}

/// Squeezes all guests a little as long as the kernel's average of the last ten seconds shows that
/// memory was waited for: `avg10` of /proc/pressure/memory.
#[derive(Clone, Debug, Default)]
pub struct PressureAverage {
    /// Hundredths of a percent, as the kernel prints them.
    average: u64,
    before: Option<(u64, u64)>,
}

impl Strategy for PressureAverage {
    fn decide(&mut self, snapshot: &Snapshot) -> Vec<Order> {
        let Some(pressure) = snapshot.host.pressure else { return Vec::new() };
        let (at_ms, some_us) =
            self.before.replace((snapshot.at_ms, pressure.some_us)).unwrap_or_default();
        let (elapsed_ms, waited_us) = (snapshot.at_ms - at_ms, pressure.some_us - some_us);
        let now = 10 * waited_us / elapsed_ms.max(1);
        // An average over ten seconds that forgets exponentially: 1 - exp(-0.1) a second.
        let change = 95 * elapsed_ms / 1000;
        self.average = (self.average * (1000 - change.min(1000)) + now * change).div_ceil(1000);
        if self.average < 2 {
            return Vec::new();
        }
        let squeeze = |machine: &Machine| {
            let balloon = machine.balloon?;
            let room = available(machine)?.saturating_sub(128 * MIB);
            (room > 0).then(|| order(machine, balloon.actual_bytes + room.min(64 * MIB)))
        };
        snapshot.machines.iter().filter_map(squeeze).collect()
    }

    fn admits(&mut self, _snapshot: &Snapshot, _size_bytes: u64) -> bool {
        true
    }
}

fn available(machine: &Machine) -> Option<u64> {
    machine.statistics?.available_bytes
}

fn order(machine: &Machine, target_bytes: u64) -> Order {
    Order { machine: machine.name.clone(), action: Action::Balloon { target_bytes } }
}
