//! The daemon's loop: what is known goes to the decision, and its orders to the monitors.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use ebb_host_policy::report::{Admission, Arrival, MachineStatus, Room, Status};
use ebb_host_policy::{
    Action, Cause, Decision, Explanation, Fit, Host, Level, Machine, Order, Rule, Snapshot, State,
    decide, fit, is_urgent,
};
use ebb_page_merge::kernel::SYSFS;

use crate::admission::{Admissions, KEPT_MS, Ticket};
use crate::common::Common;
use crate::config::{Config, ConfigError};
use crate::fleet::{Fleet, Link, Terms, View};
use crate::host::{Source, Unreadable};
use crate::ksm::{self, KsmSettings};
use crate::metrics::{Counters, Observed};
use crate::monitors::Undo;
use crate::store::{Store, StoreError};
use crate::watchdog::{Entry, Watchdog, undo_last};

/// How often directories are searched for sockets.
const DISCOVER_MS: u64 = 2_000;
/// How often the state is saved.
const SAVE_MS: u64 = 60_000;
/// The most machines that `fit` counts.
const MOST_FIT: u64 = 100_000;

/// A daemon without its API.
#[derive(Debug)]
pub struct Engine {
    config: Config,
    /// Where the configuration came from; `None` for the defaults.
    path: Option<PathBuf>,
    source: Source,
    fleet: Fleet,
    state: State,
    store: Arc<Store>,
    /// The result of the save under way.
    saving: Option<Saving>,
    watchdog: Watchdog,
    /// What is being undone at machines that have left the configuration, and whether it is undone.
    undoing: BTreeMap<Entry, Arc<OnceLock<bool>>>,
    admissions: Admissions,
    last: Option<Last>,
    /// The balloons that this daemon has set: their targets, and when their leases were renewed.
    leases: BTreeMap<String, Lease>,
    /// What is wrong, by what it concerns.
    problems: BTreeMap<String, String>,
    counters: Counters,
    next_ms: u64,
    discover_ms: u64,
    save_ms: u64,
}

type Saving = Arc<OnceLock<Result<(), StoreError>>>;

/// The last decision.
#[derive(Debug)]
struct Last {
    snapshot: Snapshot,
    explanations: BTreeMap<String, Explanation>,
    level: Level,
    cause: Cause,
}

#[derive(Clone, Copy, Debug)]
struct Lease {
    target_bytes: u64,
    renewed_ms: u64,
}

impl Last {
    fn of(snapshot: Snapshot, decision: Decision) -> (Self, Vec<Order>, State) {
        let Decision { orders, explanations, level, cause, state } = decision;
        let by_name = explanations.into_iter().rev().map(|why| (why.machine.clone(), why));
        (Self { snapshot, explanations: by_name.collect(), level, cause }, orders, state)
    }
}

impl Engine {
    /// A daemon that has not decided anything yet.
    pub fn new(config: Config, path: Option<PathBuf>, store: Store, watchdog: Watchdog) -> Self {
        let source = Source::new(config.cgroup.clone());
        let state = store.load();
        let mut engine = Self {
            config,
            path,
            source,
            fleet: Fleet::default(),
            state,
            store: Arc::new(store),
            saving: None,
            watchdog,
            undoing: BTreeMap::new(),
            admissions: Admissions::default(),
            last: None,
            leases: BTreeMap::new(),
            problems: BTreeMap::new(),
            counters: Counters::default(),
            next_ms: 0,
            discover_ms: 0,
            save_ms: 0,
        };
        engine.set_ksm();
        engine
    }

    /// Gives KSM the configured settings.
    fn set_ksm(&mut self) {
        match ksm::change(Path::new(SYSFS), &self.store, &self.config.ksm) {
            Ok(()) => self.solve("ksm"),
            Err(problem) => self.problem("ksm", format!("KSM's settings: {problem}")),
        }
    }

    /// Does what is due. Called ten times a second.
    pub fn tick(&mut self, now_ms: u64) {
        if now_ms >= self.discover_ms {
            self.discover_ms = now_ms + DISCOVER_MS;
            self.discover();
        }
        match self.source.read() {
            Ok(host) => {
                self.solve("host");
                match self.source.missing() {
                    Some(cgroup) => self.problem(
                        "cgroup",
                        format!(
                            "{} does not exist: until it does, all memory of the host counts",
                            cgroup.display()
                        ),
                    ),
                    None => self.solve("cgroup"),
                }
                let is_due = now_ms >= self.next_ms;
                if is_due || is_urgent(&host, &self.state, &self.config.policy) {
                    self.round(self.snapshot(host, now_ms));
                }
                if is_due {
                    self.next_ms = now_ms + self.config.interval_ms;
                    self.watch(now_ms);
                }
            }
            Err(unreadable) => self.problem("host", unreadable.to_string()),
        }
        if self.has_saved() && now_ms >= self.save_ms {
            self.save_ms = now_ms + SAVE_MS;
            // A slow disk must not delay decisions.
            let (store, state) = (self.store.clone(), self.state.clone());
            let saved = Arc::new(OnceLock::new());
            self.saving = Some(saved.clone());
            tokio::task::spawn_blocking(move || saved.set(store.save(&state)));
        }
    }

    fn discover(&mut self) {
        let terms = Terms {
            interval: Duration::from_millis(self.config.interval_ms),
            // Two of three answers may be late.
            fresh_ms: self.config.policy.stale_ms / 3,
            snapshots: self.config.snapshots.clone(),
        };
        let unreadable = self.fleet.discover(&self.config.machines, &self.config.libvirt, &terms);
        self.counters.keep_only(&self.fleet.links().map(|(_, link)| &*link.name).collect());
        let is_still = |about: &str| {
            unreadable.iter().any(|(folder, _)| folder.display().to_string() == about)
        };
        self.problems.retain(|about, _| !about.starts_with('/') || is_still(about));
        for (folder, problem) in unreadable {
            let folder = folder.display().to_string();
            self.problem(&folder, format!("machines are not searched for in {folder}: {problem}"));
        }
    }

    fn snapshot(&self, host: Host, at_ms: u64) -> Snapshot {
        let machines = self.fleet.counted().filter_map(|(_, link, view)| view.machine(&link.name));
        let machines = Common::read().divide(machines.collect());
        Snapshot { at_ms, host, machines }
    }

    fn round(&mut self, snapshot: Snapshot) {
        let state = std::mem::take(&mut self.state);
        let decision = decide(&snapshot, state, &self.config.policy);
        let at_ms = snapshot.at_ms;
        let mut ordered = BTreeSet::new();
        self.counters.decided();
        let (last, orders, state) = Last::of(snapshot, decision);
        for order in &orders {
            self.counters.ordered(&order.machine, order.action);
            let why = last.explanations.get(&order.machine).map(|why| why.rule.to_string());
            tracing::info!(machine = order.machine, action = ?order.action, why, "ordered");
            if let Action::Balloon { target_bytes } = order.action {
                ordered.insert(order.machine.clone());
                self.lease(&order.machine, target_bytes, at_ms);
            }
            self.order(&order.machine, order.action, at_ms);
        }
        self.renew(&last.snapshot.machines, &ordered, at_ms);
        if self.last.as_ref().is_none_or(|before| before.level != last.level) {
            tracing::info!("the host is {}", last.level);
        }
        (self.last, self.state) = (Some(last), state);
    }

    fn order(&mut self, machine: &str, action: Action, now_ms: u64) {
        let lease = Duration::from_millis(self.config.policy.lease_ms);
        let Some((place, link)) = self.fleet.named(machine) else { return };
        // No monitor undoes a stop by itself.
        if (!link.view().undoes_itself || action == Action::Stop)
            && let Some(undo) = Undo::of(action)
        {
            let entry = Entry { place: place.clone(), undo };
            if let Err(error) = self.watchdog.keep(&entry, now_ms) {
                return self.problem("taking", format!("nothing is taken: {error}"));
            }
            self.problems.remove("taking");
        }
        link.order(action, lease);
    }

    /// Settles what is recorded for the case that this process dies: what is undone is forgotten,
    /// and what an earlier daemon has left is undone.
    fn watch(&mut self, now_ms: u64) {
        for entry in self.watchdog.entries() {
            let is_undone = match self.fleet.at(&entry.place) {
                Some(link) => {
                    let is_undone = link.view().is_undone(entry.undo);
                    if !is_undone && !self.is_wanted(&entry, link) {
                        link.order(entry.undo.action(), Duration::ZERO);
                    }
                    self.undoing.remove(&entry);
                    is_undone
                }
                None => self.fleet.has_gone(&entry.place) || self.undo_unlinked(&entry),
            };
            if is_undone {
                self.watchdog.settle(&entry, now_ms);
            }
        }
        let entries = self.watchdog.entries();
        self.undoing.retain(|entry, _| entries.contains(entry));
        match self.watchdog.beat() {
            Ok(()) => self.solve("watchdog"),
            Err(error) => self.problem("watchdog", error.to_string()),
        }
    }

    /// Undoes what was taken from a machine that has left the configuration. Returns whether it is
    /// undone.
    fn undo_unlinked(&mut self, entry: &Entry) -> bool {
        let begin = || {
            let (entry, outcome) = (entry.clone(), Arc::new(OnceLock::new()));
            let told = outcome.clone();
            tokio::spawn(async move { told.set(undo_last(entry).await) });
            outcome
        };
        let outcome = self.undoing.entry(entry.clone()).or_insert_with(begin).get().copied();
        if outcome == Some(false) {
            // It is tried again.
            self.undoing.remove(entry);
        }
        outcome == Some(true)
    }

    /// Whether what was done is to last: not what an earlier daemon has left, and no pause that was
    /// to end, but whose end a monitor has missed.
    fn is_wanted(&self, entry: &Entry, link: &Link) -> bool {
        let why = self.last.as_ref().and_then(|last| last.explanations.get(&link.name));
        let is_to_last = link.view().is_stopping || lasts(entry.undo, why.map(|why| &why.rule));
        !self.watchdog.is_inherited(entry) && is_to_last
    }

    fn lease(&mut self, machine: &str, target_bytes: u64, renewed_ms: u64) {
        if target_bytes == 0 {
            self.leases.remove(machine);
        } else {
            self.leases.insert(machine.to_owned(), Lease { target_bytes, renewed_ms });
        }
    }

    /// Renews the leases of balloons that are to stay as they are. A balloon that has another
    /// target by now was set elsewhere.
    fn renew(&mut self, machines: &[Machine], ordered: &BTreeSet<String>, at_ms: u64) {
        let target = |name: &str| {
            let machine = machines.iter().find(|machine| machine.name == name)?;
            machine.balloon.map(|balloon| balloon.target_bytes)
        };
        let every_ms = self.config.policy.lease_ms / 3;
        let mut renewed = Vec::new();
        self.leases.retain(|name, lease| {
            if ordered.contains(name) || at_ms.saturating_sub(lease.renewed_ms) < every_ms {
                return true;
            }
            let is_same = target(name) == Some(lease.target_bytes & !0xfff);
            if is_same {
                lease.renewed_ms = at_ms;
                renewed.push((name.clone(), lease.target_bytes));
            }
            is_same
        });
        for (machine, target_bytes) in renewed {
            self.order(&machine, Action::Balloon { target_bytes }, at_ms);
        }
    }

    /// Gives back everything that this daemon has taken, before it ends.
    pub fn release(&mut self) {
        let released = Action::Balloon { target_bytes: 0 };
        for machine in std::mem::take(&mut self.leases).into_keys() {
            self.order(&machine, released, 0);
        }
        for Entry { place, undo } in self.watchdog.entries() {
            if let Some(link) = self.fleet.at(&place) {
                link.order(undo.action(), Duration::ZERO);
            }
        }
        self.config.ksm = KsmSettings::default();
        self.set_ksm();
        if let Err(error) = self.store.save(&self.state) {
            tracing::warn!("the state is not saved: {error}");
        }
    }

    /// Whether the last save has ended.
    fn has_saved(&mut self) -> bool {
        let Some(saving) = self.saving.take() else { return true };
        match saving.get() {
            None => self.saving = Some(saving),
            Some(Ok(())) => self.solve("state"),
            Some(Err(error)) => {
                self.problem("state", format!("the state is not saved: {error}"));
            }
        }
        self.saving.is_none()
    }

    fn problem(&mut self, about: &str, problem: String) {
        if self.problems.get(about) != Some(&problem) {
            tracing::warn!("{problem}");
            self.problems.insert(about.to_owned(), problem);
        }
    }

    fn solve(&mut self, about: &str) {
        self.problems.remove(about);
    }

    /// The host and its machines at the last decision; `None` before the first one.
    pub fn status(&self) -> Option<Status> {
        self.last.as_ref().map(|last| self.status_of(last, self.state.host.since_ms))
    }

    /// The host's level and the number of its machines, in a line.
    pub fn summary(&self) -> String {
        match &self.last {
            Some(last) => format!("{}, machines: {}", last.level, self.fleet.links().count()),
            None => "the host's memory cannot be read".to_owned(),
        }
    }

    /// What metrics are made from; `None` before the first decision.
    pub fn observed(&self) -> Option<Observed> {
        let (counters, counts) = (self.counters.clone(), self.admissions.counts());
        Some(Observed::new(self.status()?, counters, counts, &self.config.policy))
    }

    /// What would be decided now. Nothing is done.
    ///
    /// # Errors
    /// The host's memory cannot be read.
    pub fn plan(&self, now_ms: u64) -> Result<Status, Unreadable> {
        let snapshot = self.snapshot(self.source.read()?, now_ms);
        let decision = decide(&snapshot, self.state.clone(), &self.config.policy);
        let (last, _, state) = Last::of(snapshot, decision);
        Ok(self.status_of(&last, state.host.since_ms))
    }

    fn status_of(&self, last: &Last, since_ms: u64) -> Status {
        let held: BTreeSet<&str> = self.state.held().collect();
        // The first of several with the same name.
        let known = last.snapshot.machines.iter().rev();
        let known: BTreeMap<&str, &Machine> = known.map(|it| (it.name.as_str(), it)).collect();
        let domains = self.fleet.domains();
        let machines = self.fleet.links().map(|(place, link)| {
            let Link { name, .. } = link;
            let view = link.view();
            let also = self.fleet.is_also(place, &view, &domains);
            MachineStatus {
                name: name.clone(),
                machine: known.get(name.as_str()).filter(|_| also.is_none()).copied().cloned(),
                monitor: view.kind.map(|kind| kind.name().to_owned()),
                socket: place.to_string(),
                pid: view.pid(),
                profile: self.config.policy.profile(name).0.to_owned(),
                is_held: held.contains(name.as_str()),
                explanation: last.explanations.get(name).filter(|_| also.is_none()).cloned(),
                trouble: also.or_else(|| trouble(&view)),
            }
        });
        Status {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            at_ms: last.snapshot.at_ms,
            level: last.level,
            cause: last.cause,
            since_ms,
            host: last.snapshot.host.clone(),
            machines: machines.collect(),
            problems: self.problems.values().cloned().collect(),
        }
    }

    /// How many more machines fit; `None` before the first decision.
    pub fn fit(&mut self, room: &Room, now_ms: u64) -> Option<Fit> {
        self.fit_most(&room.profile, room.memory_bytes, MOST_FIT, now_ms)
    }

    fn fit_most(&mut self, profile: &str, size_bytes: u64, most: u64, now_ms: u64) -> Option<Fit> {
        let snapshot = &self.last.as_ref()?.snapshot;
        let snapshot = self.admissions.with_kept(snapshot, now_ms);
        Some(fit(&snapshot, &self.state, &self.config.policy, profile, size_bytes, most))
    }

    /// Machines that are about to start.
    pub fn admissions(&mut self) -> &mut Admissions {
        &mut self.admissions
    }

    /// Whether a machine may start, if none waits before it; room is then kept for it. `None`
    /// before the first decision.
    pub fn admit(&mut self, arrival: &Arrival, ticket: Ticket, now_ms: u64) -> Option<Admission> {
        let profile = self.config.policy.profile(&arrival.machine).0.to_owned();
        let fit = self.fit_most(&profile, arrival.memory_bytes, 1, now_ms)?;
        let before = self.admissions.before(ticket) as u64;
        let Arrival { machine, memory_bytes, .. } = arrival;
        let runs = self.fleet.named(machine).is_some();
        let is_admitted = before == 0
            && fit.machines > 0
            && self.admissions.admit(ticket, machine, *memory_bytes, runs, now_ms);
        let kept_ms = if is_admitted { KEPT_MS } else { 0 };
        Some(Admission { is_admitted, kept_ms, before, fit })
    }

    /// Whether a machine of this size never fits.
    pub fn is_larger_than_host(&self, memory_bytes: u64) -> bool {
        self.last.as_ref().is_some_and(|last| memory_bytes > last.snapshot.host.total_bytes)
    }

    /// Whether a profile of this name is configured.
    pub fn has_profile(&self, name: &str) -> bool {
        name == "default" || self.config.policy.profiles.contains_key(name)
    }

    /// The socket of a machine, if there is one of this name.
    pub fn socket(&self, machine: &str) -> Option<&Path> {
        self.fleet.named(machine).map(|(place, _)| place.socket.as_path())
    }

    /// Holds a machine or releases it. Returns its status, or `None` if there is none of this name:
    /// only a machine that is there can be held. `None` before the first decision, too.
    pub fn hold(&mut self, machine: &str, is_held: bool) -> Option<MachineStatus> {
        let is_known = self.fleet.named(machine).is_some();
        if !is_known && !self.state.held().any(|held| held == machine) {
            return None;
        }
        self.state.hold(machine, is_held);
        self.save_ms = 0;
        let mut machines = self.status()?.machines.into_iter();
        // A machine that has gone can still be released.
        let gone = || MachineStatus {
            name: machine.to_owned(),
            machine: None,
            monitor: None,
            socket: String::new(),
            pid: None,
            profile: self.config.policy.profile(machine).0.to_owned(),
            is_held,
            trouble: Some("there is no such machine now".to_owned()),
            explanation: None,
        };
        Some(machines.find(|status| status.name == machine).unwrap_or_else(gone))
    }

    /// The configuration in force.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Reads the configuration file again. With a mistake in it, the old configuration stays.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn reload(&mut self) -> Result<(), ConfigError> {
        let Some(path) = &self.path else { return Ok(()) };
        let config = Config::read(path)?;
        self.source = Source::new(config.cgroup.clone());
        (self.config, self.discover_ms) = (config, 0);
        self.set_ksm();
        tracing::info!("the configuration was read again");
        Ok(())
    }
}

/// Whether what was done is to last under this rule. A balloon that is no longer wanted is released
/// by a decision, since its size is seen; a pause counts as another client's once it is forgotten.
fn lasts(undo: Undo, rule: Option<&Rule>) -> bool {
    match undo {
        Undo::Balloon => true,
        Undo::Pause => matches!(rule, Some(Rule::Delay { .. })),
    }
}

fn trouble(view: &View) -> Option<String> {
    match &view.trouble {
        None if view.kind.is_none() => Some("it has not answered yet".to_owned()),
        None => view.refusal.clone(),
        trouble => trouble.as_ref().map(ToString::to_string),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pause_that_no_decision_wants_is_ended() {
        let delay = Rule::Delay {
            growth_bytes: 1,
            claim_bytes: 1,
            room_bytes: 0,
            expected_bytes: 0,
            running: 1,
            paused_ms: 0,
        };
        assert!(lasts(Undo::Pause, Some(&delay)));
        // A monitor has missed its end: the machine is taken for one that another client paused.
        for rule in [Rule::PausedElsewhere, Rule::Enough { level: Level::Plenty }, Rule::Held] {
            assert!(!lasts(Undo::Pause, Some(&rule)), "{rule}");
            assert!(lasts(Undo::Balloon, Some(&rule)), "{rule}");
        }
        assert!(!lasts(Undo::Pause, None));
    }
}
