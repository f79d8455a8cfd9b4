//! A host that runs a trace under a policy.
//!
//! Time goes in steps of a tenth of a second. Modelled are: memory of programs and caches; free
//! memory that the host still holds, and its reporting; a balloon with the speed of a good one;
//! programs that wait, read files again, or are killed; and a host that swaps, with a disk of
//! limited speed, and kills the largest machine when nothing is left. Not modelled: processors
//! (each machine has its own), NUMA nodes, huge pages, merging.

use ebb_host_policy::{Order, Snapshot};

use crate::STEP_MS;
use crate::guest::{Equipment, Guest, Troubles};
use crate::host::{HostModel, HostShape};
use crate::strategy::Strategy;
use crate::trace::Trace;

/// How a trace is run.
#[derive(Clone, Copy, Debug)]
pub struct Simulation {
    /// The host.
    pub host: HostShape,
    /// What all of its machines have.
    pub equipment: Equipment,
    /// How often the policy decides, in milliseconds, apart from urgent decisions.
    pub interval_ms: u64,
    /// How long the run takes, in milliseconds.
    pub duration_ms: u64,
}

/// How a run went.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Outcome {
    /// Mean number of machines in the second half of the run, in thousandths.
    pub admitted_milli: u64,
    /// The largest number of machines.
    pub most_admitted: usize,
    /// Machines that have done all of their work.
    pub completed: usize,
    /// Duration of all work in relation to its duration without any shortage, in thousandths.
    pub slowdown_milli: u64,
    /// Machines that the host has killed.
    pub host_kills: u64,
    /// Sums of all guests.
    pub troubles: Troubles,
    /// Written to swap.
    pub swap_out_bytes: u64,
    /// The largest use of swap.
    pub most_swap_bytes: u64,
    /// Orders of the policy.
    pub orders: usize,
}

/// A decision of a policy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Moment {
    /// Its input.
    pub snapshot: Snapshot,
    /// Its result.
    pub orders: Vec<Order>,
}

impl Simulation {
    /// Runs a trace.
    pub fn run(&self, trace: &Trace, strategy: &mut dyn Strategy) -> Outcome {
        self.observe(trace, strategy, |_| {})
    }

    /// Runs a trace, and calls `see` with each decision.
    pub fn observe(
        &self,
        trace: &Trace,
        strategy: &mut dyn Strategy,
        mut see: impl FnMut(&Moment),
    ) -> Outcome {
        let mut run = Run::new(self);
        while run.now_ms < self.duration_ms {
            let is_regular = run.now_ms.is_multiple_of(self.interval_ms);
            if is_regular || strategy.is_urgent(&run.host.seen()) {
                let moment = run.decide(strategy);
                see(&moment);
            }
            if is_regular {
                run.admit(strategy, trace);
            }
            run.step();
        }
        run.finish()
    }
}

struct Run {
    simulation: Simulation,
    now_ms: u64,
    host: HostModel,
    guests: Vec<Guest>,
    /// How many machines of the trace have been started.
    started: usize,
    outcome: Outcome,
    work_us: u64,
    working_us: u64,
    /// Sum over the steps of the second half.
    admitted: u64,
}

impl Run {
    fn new(simulation: &Simulation) -> Self {
        Self {
            simulation: *simulation,
            now_ms: 0,
            host: HostModel::new(simulation.host),
            guests: Vec::new(),
            started: 0,
            outcome: Outcome::default(),
            work_us: 0,
            working_us: 0,
            admitted: 0,
        }
    }

    fn seen(&mut self) -> Snapshot {
        let now_ms = self.now_ms;
        let machines = self.guests.iter_mut().map(|guest| guest.seen(now_ms)).collect();
        Snapshot { at_ms: now_ms, host: self.host.seen(), machines }
    }

    fn decide(&mut self, strategy: &mut dyn Strategy) -> Moment {
        let snapshot = self.seen();
        let orders = strategy.decide(&snapshot);
        self.outcome.orders += orders.len();
        for order in &orders {
            let named = self.guests.iter_mut().find(|guest| guest.name == order.machine);
            if let Some(guest) = named {
                guest.act(order.action);
            }
        }
        Moment { snapshot, orders }
    }

    /// Starts machines that have arrived, in their order, as long as the policy has room.
    fn admit(&mut self, strategy: &mut dyn Strategy, trace: &Trace) {
        while let Some(next) = trace.machines.get(self.started) {
            let snapshot = self.seen();
            if next.arrives_ms > self.now_ms || !strategy.admits(&snapshot, next.size_bytes) {
                return;
            }
            let name = format!("{:?}-{}", next.kind, self.started).to_lowercase();
            let equipment = self.simulation.equipment;
            let guest = Guest::start(name, next.clone(), equipment, self.now_ms, &mut self.host);
            self.guests.push(guest);
            self.started += 1;
        }
    }

    fn step(&mut self) {
        self.swap_out();
        let (mut waited, mut worked) = (0, 0);
        // The order changes with each step, so that no machine is always served first.
        let count = self.guests.len();
        let first = (self.now_ms / STEP_MS) as usize;
        for index in 0..count {
            let guest = &mut self.guests[(first + index) % count];
            let works = guest.works();
            let has_waited = guest.step(&mut self.host);
            worked += usize::from(works || has_waited);
            waited += usize::from(has_waited);
        }
        if self.host.end(waited, worked) {
            self.kill_largest();
        }
        self.remove_ended();
        self.outcome.most_admitted = self.outcome.most_admitted.max(self.guests.len());
        self.now_ms += STEP_MS;
        if self.now_ms > self.simulation.duration_ms / 2 {
            self.admitted += self.guests.len() as u64;
        }
    }

    /// Machines that wait or are paused are swapped out first, the largest of them before others.
    fn swap_out(&mut self) {
        let mut wanted = self.host.begin();
        while wanted > 0 {
            let key = |guest: &Guest| (guest.swappable() > 0, !guest.works(), guest.swappable());
            let Some(guest) = self.guests.iter_mut().max_by_key(|guest| key(guest)) else { return };
            let bytes = guest.swappable().min(wanted);
            if bytes == 0 {
                return;
            }
            guest.swap_out(bytes, &mut self.host);
            wanted -= bytes;
        }
    }

    fn kill_largest(&mut self) {
        let largest = self.guests.iter().enumerate().max_by_key(|(_, guest)| guest.resident());
        if let Some((index, _)) = largest {
            self.outcome.host_kills += 1;
            self.remove(index);
        }
    }

    fn remove_ended(&mut self) {
        let mut index = 0;
        while index < self.guests.len() {
            if self.guests[index].phase().is_none() {
                self.outcome.completed += 1;
                self.remove(index);
            } else {
                index += 1;
            }
        }
    }

    fn remove(&mut self, index: usize) {
        let mut guest = self.guests.remove(index);
        guest.end(&mut self.host);
        self.count(&guest);
    }

    fn count(&mut self, guest: &Guest) {
        self.work_us += guest.work_us;
        self.working_us += guest.working_us;
        let (all, own) = (&mut self.outcome.troubles, guest.troubles);
        all.oom_kills += own.oom_kills;
        all.out_of_puff_ms += own.out_of_puff_ms;
        all.stalled_ms += own.stalled_ms;
        all.refault_bytes += own.refault_bytes;
        all.pauses += own.pauses;
        all.paused_ms += own.paused_ms;
    }

    fn finish(mut self) -> Outcome {
        for guest in std::mem::take(&mut self.guests) {
            self.count(&guest);
        }
        let steps = (self.simulation.duration_ms / STEP_MS / 2).max(1);
        Outcome {
            admitted_milli: 1000 * self.admitted / steps,
            slowdown_milli: (1000 * self.working_us).checked_div(self.work_us).unwrap_or(1000),
            swap_out_bytes: self.host.swap_out_bytes(),
            most_swap_bytes: self.host.most_swap_bytes,
            ..self.outcome
        }
    }
}
