//! What decides in a series: a simple policy that this program carries out, or `ebbd`.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use ebb_fleet_model::strategy::{Deficit, Ebbd, Law, StaticLimits};
use ebb_fleet_model::{Equipment, HostShape, Recipe, Simulation, Strategy};
use ebb_host_policy::{
    Action, Balloon, GIB, Host, MIB, Machine, Means, Settings, Snapshot, Statistics,
};
use ebb_vmm::api::{BalloonInfo, BalloonState, Client, StatisticsDocument};
use serde_json::{Value, json};

use super::Sizes;
use super::work::Divisors;
use crate::LabError;
use crate::harness::daemon::{Beginning, Daemon, paused};
use crate::harness::host::MemoryState;

/// How often machines are asked and a decision is made.
const INTERVAL: Duration = Duration::from_millis(500);
/// The longest time of an answer of a monitor.
const ANSWER_LIMIT: Duration = Duration::from_secs(2);
/// The oldest statistics that a guest is not asked for again, in milliseconds.
const FRESH_MS: u64 = 1000;
/// How long machines wait for room, in seconds: the most that `ebb run` takes.
const WAIT_S: u64 = 590;

/// What decides.
pub(super) enum Policy {
    /// Decided and carried out here.
    Simple(Simple),
    /// `ebbd`, with the machines in its directory.
    Daemon(Daemon),
}

/// A policy that is carried out here.
pub(super) struct Simple {
    strategy: Box<dyn Strategy>,
    /// Whether it has to know what guests say.
    asks: Asks,
    begin: Instant,
    next: Instant,
    orders: usize,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Asks {
    Guests,
    Nothing,
}

/// A machine that runs.
pub(super) struct Running {
    pub name: String,
    pub size_bytes: u64,
    client: Client,
}

impl Policy {
    /// Sizes are never overcommitted.
    pub fn fixed() -> Self {
        Self::Simple(Simple::new(Box::new(StaticLimits), Asks::Nothing))
    }

    /// The best of the simple policies in the model (`cargo run -p ebb-fleet-model --example
    /// policies`).
    pub fn deficit(sizes: &Sizes) -> Self {
        let bytes = |bytes| sizes.divisors.bytes(bytes);
        let deficit = Deficit {
            law: Law::Change,
            wanted_bytes: bytes(5 * GIB),
            keep_bytes: bytes(512 * MIB),
            admission_bytes: bytes(10 * GIB),
        };
        Self::Simple(Simple::new(Box::new(deficit), Asks::Guests))
    }

    /// `ebbd` with its default policy, but for sizes and times that a scale divides.
    pub fn daemon(sizes: &Sizes, machines: &Path) -> Result<Self, LabError> {
        let Sizes { divisors, host, .. } = *sizes;
        let simulation = Simulation {
            host: HostShape::of(host.memory_mib * MIB),
            equipment: Equipment::ebb(),
            interval_ms: 1000,
            duration_ms: 2_400_000,
        };
        // The history is as long at each scale.
        let sizes_only = Divisors { time: 1, ..divisors };
        let history = Recipe::history().map(|trace| sizes_only.apply(&trace));
        let Ebbd { state, .. } = Ebbd::with_history_of(&simulation, &history);
        let settings = settings(divisors);
        let beginning = Beginning { settings: &settings, state: Some(&state) };
        Ok(Self::Daemon(Daemon::start(machines, &beginning)?))
    }

    /// What monitors of machines are started with.
    pub fn arguments(&self) -> Vec<String> {
        match self {
            Self::Simple(_) => Vec::new(),
            Self::Daemon(daemon) => {
                let (socket, wait) = (daemon.socket().display().to_string(), WAIT_S.to_string());
                ["--via", &socket, "--via-wait", &wait].map(str::to_owned).into()
            }
        }
    }

    /// Whether a monitor may be started for another machine of this size. Those of the daemon ask
    /// for room themselves.
    pub fn admits<'a>(
        &mut self,
        machines: impl Iterator<Item = &'a Running>,
        size_bytes: u64,
    ) -> Result<bool, LabError> {
        let Self::Simple(simple) = self else { return Ok(true) };
        let snapshot = simple.snapshot(machines.map(Running::unasked).collect())?;
        Ok(simple.strategy.admits(&snapshot, size_bytes))
    }

    /// Carries out what is due.
    pub fn act(&mut self, machines: &[&Running]) -> Result<(), LabError> {
        match self {
            Self::Simple(simple) if simple.asks == Asks::Guests => simple.act(machines),
            _ => Ok(()),
        }
    }

    /// The number of orders so far, and how many of them were not explained.
    pub fn orders(&self) -> (usize, usize) {
        match self {
            Self::Simple(simple) => (simple.orders, simple.orders),
            Self::Daemon(daemon) => {
                let orders = daemon.orders();
                (orders.len(), orders.iter().filter(|order| order.why.is_none()).count())
            }
        }
    }

    /// How long it has paused this machine until `end`.
    pub fn paused(&self, machine: &str, end: Instant) -> Duration {
        let Self::Daemon(daemon) = self else { return Duration::ZERO };
        paused(daemon.orders().iter().filter(|order| order.machine == machine), end)
    }

    /// How many orders of `ebbd` there were of each kind.
    pub fn kinds(&self) -> BTreeMap<String, usize> {
        let mut kinds = BTreeMap::new();
        if let Self::Daemon(daemon) = self {
            for order in daemon.orders() {
                let kind = order.action.split(' ').next().unwrap_or_default().to_owned();
                *kinds.entry(kind).or_default() += 1;
            }
        }
        kinds
    }
}

impl Simple {
    fn new(strategy: Box<dyn Strategy>, asks: Asks) -> Self {
        let now = Instant::now();
        Self { strategy, asks, begin: now, next: now, orders: 0 }
    }

    fn snapshot(&self, machines: Vec<Machine>) -> Result<Snapshot, LabError> {
        let memory = MemoryState::read()?;
        let host = Host {
            total_bytes: memory.total_kib << 10,
            available_bytes: memory.available_kib << 10,
            swap: None,
            pressure: None,
        };
        Ok(Snapshot { at_ms: self.begin.elapsed().as_millis() as u64, host, machines })
    }

    fn act(&mut self, machines: &[&Running]) -> Result<(), LabError> {
        if Instant::now() < self.next {
            return Ok(());
        }
        let now_ms = self.begin.elapsed().as_millis() as u64;
        let snapshot = self.snapshot(machines.iter().map(|it| it.asked(now_ms)).collect())?;
        for order in self.strategy.decide(&snapshot) {
            let named = machines.iter().find(|machine| machine.name == order.machine);
            if let (Some(machine), Action::Balloon { target_bytes }) = (named, order.action) {
                self.orders += 1;
                machine.set_balloon(target_bytes);
            }
        }
        self.next = Instant::now() + INTERVAL;
        Ok(())
    }
}

impl Running {
    pub fn new(name: String, size_bytes: u64, socket: PathBuf) -> Self {
        Self { name, size_bytes, client: Client::new(socket, ANSWER_LIMIT) }
    }

    fn unasked(&self) -> Machine {
        Machine {
            name: self.name.clone(),
            size_bytes: self.size_bytes,
            resident_bytes: None,
            swapped_bytes: None,
            processor_ms: None,
            is_paused: false,
            balloon: None,
            statistics: None,
            means: Means::default(),
        }
    }

    fn asked(&self, taken_ms: u64) -> Machine {
        let mut machine = self.unasked();
        let info: Option<BalloonInfo> = self.client.get("/balloon").ok();
        machine.balloon =
            info.filter(|info| info.state != BalloonState::DriverAbsent).map(|info| Balloon {
                target_bytes: info.target_bytes,
                actual_bytes: info.actual_bytes,
            });
        let target = format!("/balloon/statistics?max_age_ms={FRESH_MS}");
        let said: Option<StatisticsDocument> = self.client.get(&target).ok();
        machine.statistics = said.map(|said| Statistics {
            taken_ms,
            total_bytes: said.statistics.total_memory_bytes,
            available_bytes: said.statistics.available_memory_bytes,
            free_bytes: said.statistics.free_memory_bytes,
            caches_bytes: said.statistics.disk_caches_bytes,
            major_faults: said.statistics.major_faults,
            swap_out_bytes: said.statistics.swap_out_bytes,
            oom_kills: said.statistics.oom_kills,
        });
        machine
    }

    fn set_balloon(&self, target_bytes: u64) {
        let body = json!({ "target_bytes": target_bytes & !0xfff });
        // A machine that has ended is found by the series.
        if let Err(error) = self.client.put_json::<Value>("/balloon", &body) {
            tracing::debug!("{}: {error}", self.name);
        }
    }
}

/// The daemon's settings.
fn settings(divisors: Divisors) -> String {
    let default = Settings::default();
    let ms = |ms| divisors.duration(ms).as_millis();
    format!(
        "interval_ms = {}\n[policy]\ncalm_ms = {}\nidle_ms = {}\npause_ms = {}\n\
         [policy.default]\nreserve_bytes = {}\n",
        INTERVAL.as_millis(),
        ms(default.calm_ms),
        ms(default.idle_ms),
        ms(default.pause_ms),
        divisors.bytes(default.default.reserve_bytes)
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_follow_the_scale() {
        let whole = settings(Divisors { memory: 1, time: 1 });
        assert!(whole.contains("idle_ms = 10000\n") && whole.ends_with("= 134217728\n"), "{whole}");
        let part = settings(Divisors { memory: 4, time: 8 });
        assert!(part.contains("calm_ms = 1250\n") && part.ends_with("= 33554432\n"), "{part}");
    }
}
