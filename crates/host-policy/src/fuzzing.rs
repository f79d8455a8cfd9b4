//! Body of the fuzz target of decisions: any host, any words of guests, any clock, and a state from
//! a damaged file. It also runs as an ordinary test.

#![allow(clippy::unwrap_used)]

use std::collections::BTreeSet;

use serde_json::Value;

use crate::snapshot::{Balloon, Host, Machine, Mean, Means, Pressure, Snapshot, Statistics, Swap};
use crate::{
    Action, Class, Decision, GIB, Level, MIB, Order, Profile, Rule, Settings, State, decide, fit,
    is_urgent,
};

/// A fuzz target by name.
pub type Target = (&'static str, fn(&[u8]));

/// All targets.
pub const TARGETS: [Target; 1] = [("host_decisions", decisions)];

/// Most decisions of a run, so that long inputs do not take long.
const MOST_DECISIONS: usize = 16;

/// Decides about one snapshot after the other.
///
/// # Panics
/// If a decision takes what it may not, or does not explain itself.
pub fn decisions(data: &[u8]) {
    let mut input = Input(data);
    let settings = settings();
    settings.check().unwrap();
    let mut state = State::default();
    state.hold("held", true);
    let mut last = None;
    for _ in 0..MOST_DECISIONS {
        if input.0.is_empty() {
            break;
        }
        let snapshot = match &last {
            Some(last) if input.byte() > 63 => input.later(last),
            _ => input.snapshot(),
        };
        let file = serde_json::to_value(&state).unwrap();
        let paused = paused(&state);
        is_urgent(&snapshot.host, &state, &settings);
        let decision = decide(&snapshot, state, &settings);
        check(&snapshot, &decision, &settings);
        check_pauses(&snapshot, &decision, &settings, &paused);
        // What was written to a file and read again decides the same.
        let again = decide(&snapshot, serde_json::from_value(file).unwrap(), &settings);
        assert_eq!(again, decision);
        last = Some((snapshot.clone(), decision.orders));
        state = decision.state;
        assert_eq!(state.held().collect::<Vec<_>>(), ["held"]);
        fit(&snapshot, &state, &settings, "default", input.size(), 3);
        if input.byte() > 127 {
            state = input.damaged(state);
        }
    }
}

fn settings() -> Settings {
    let profile = |class, floor_bytes| Profile { floor_bytes, class, ..Profile::default() };
    let small = Profile { ceiling_bytes: Some(2 * GIB), ..profile(Class::Batch, 0) };
    let profiles = [
        ("web", profile(Class::Latency, GIB)),
        ("parked", profile(Class::Parked, 0)),
        ("small", small),
    ];
    let machines = [("web-*", "web"), ("parked-*", "parked"), ("db", "small")];
    Settings {
        profiles: profiles.map(|(name, profile)| (name.to_owned(), profile)).into(),
        machines: machines.map(|(machine, name)| (machine.to_owned(), name.to_owned())).into(),
        ..Settings::default()
    }
}

fn check(snapshot: &Snapshot, decision: &Decision, settings: &Settings) {
    assert_eq!(decision.explanations.len(), snapshot.machines.len());
    let actions = decision.explanations.iter().filter(|it| it.action.is_some());
    assert_eq!(actions.count(), decision.orders.len());
    for (machine, why) in snapshot.machines.iter().zip(&decision.explanations) {
        assert_eq!(machine.name, why.machine);
        let Some(action) = why.action else { continue };
        assert!(machine.name != "held" || action == Action::Resume);
        // Each action names its inputs.
        let document = serde_json::to_value(why.rule).unwrap();
        let inputs = document.as_object().unwrap().iter().filter(|(key, _)| *key != "name");
        assert!(inputs.count() > 0, "{document}");
        assert!(why.rule.to_string().len() > 10);
        assert_eq!(document["name"], why.rule.name());
        let profile = settings.profile(&machine.name).1;
        let is_parked = profile.class == Class::Parked;
        let mean = match action {
            Action::Balloon { target_bytes } => {
                assert_eq!(target_bytes % MIB, 0);
                if target_bytes > machine.balloon.unwrap().target_bytes {
                    check_raise(machine, target_bytes, profile, why.doubt.is_some());
                    let is_ceiling = matches!(why.rule, Rule::Ceiling { .. });
                    assert!(decision.level > Level::Plenty || is_ceiling || is_parked, "{why:?}");
                }
                continue;
            }
            Action::Park => Mean::Park,
            Action::Reclaim => Mean::Reclaim,
            Action::Trim => Mean::Trim,
            // See below.
            Action::Pause { .. } | Action::Resume => continue,
            Action::Stop => {
                assert!(is_parked && decision.level >= Level::Pressed);
                Mean::Stop
            }
        };
        assert!(machine.means.has(mean), "{why:?}");
        assert!(decision.level > Level::Plenty || is_parked, "{why:?}");
    }
}

/// Machines that are paused by a decision.
fn paused(state: &State) -> BTreeSet<String> {
    let paused = state.machines.iter().filter(|(_, machine)| machine.paused_until_ms.is_some());
    paused.map(|(name, _)| name.clone()).collect()
}

/// Only machines that may wait are paused, not for too long, and with hope. Those that were paused
/// elsewhere are left alone. `before` are those that were paused by the decisions before.
fn check_pauses(
    snapshot: &Snapshot,
    decision: &Decision,
    settings: &Settings,
    before: &BTreeSet<String>,
) {
    let at_ms = snapshot.bounded().at_ms;
    let mut is_hopeless = true;
    for (machine, why) in snapshot.machines.iter().zip(&decision.explanations) {
        let is_ours = before.contains(&machine.name);
        if machine.is_paused {
            let is_pausing = matches!(why.action, Some(Action::Pause { .. } | Action::Resume));
            assert!(why.action.is_none() || is_ours && is_pausing, "{why:?}");
        }
        if why.action == Some(Action::Resume) {
            assert!(is_ours && matches!(why.rule, Rule::Resumed { .. }), "{why:?}");
        }
        let Rule::Delay { claim_bytes, room_bytes, expected_bytes, running, paused_ms, .. } =
            why.rule
        else {
            assert!(!matches!(why.action, Some(Action::Pause { .. })), "{why:?}");
            continue;
        };
        assert!(settings.profile(&machine.name).1.class != Class::Latency, "{why:?}");
        assert!(machine.means.has(Mean::Pause) && machine.name != "held", "{why:?}");
        assert!(paused_ms < settings.pause_ms, "{why:?}");
        is_hopeless &= running == 0 && claim_bytes > room_bytes.saturating_add(expected_bytes);
        let until_ms = decision.state.machines[&machine.name].paused_until_ms.unwrap();
        assert!((at_ms..=at_ms + settings.pause_ms - paused_ms).contains(&until_ms), "{why:?}");
    }
    let delayed = decision.explanations.iter().filter(|why| matches!(why.rule, Rule::Delay { .. }));
    let delayed: BTreeSet<String> = delayed.map(|why| why.machine.clone()).collect();
    assert_eq!(paused(&decision.state), delayed);
    // Another machine goes on, or what the first of them lacks is expected.
    assert!(delayed.is_empty() || !is_hopeless, "{:?}", decision.explanations);
}

/// A balloon takes nothing that the guest uses, or that the profile keeps for it, and nothing from
/// a guest that is not believed.
fn check_raise(machine: &Machine, target_bytes: u64, profile: &Profile, is_doubted: bool) {
    assert!(!is_doubted, "{machine:?}");
    let available = machine.statistics.unwrap().available_bytes.unwrap();
    let used = machine.outside_balloon_bytes().saturating_sub(available);
    let left = machine.size_bytes - target_bytes;
    assert!(left >= used + profile.reserve_bytes, "{left} of {machine:?}");
    assert!(left >= profile.floor_bytes, "{left} of {machine:?}");
}

/// The rest of the input; zeros follow.
struct Input<'a>(&'a [u8]);

impl Input<'_> {
    fn byte(&mut self) -> u8 {
        let (first, rest) = self.0.split_first().unwrap_or((&0, &[]));
        self.0 = rest;
        *first
    }

    fn any(&mut self) -> u64 {
        (0..8).fold(0, |number, _| number << 8 | u64::from(self.byte()))
    }

    /// Up to 8 GiB, 0, or any.
    fn size(&mut self) -> u64 {
        match self.byte() {
            0..4 => 0,
            4..8 => self.any(),
            units => u64::from(units) * (GIB / 32) + u64::from(self.byte()),
        }
    }

    /// Up to 200 s, 0, or any.
    fn time(&mut self) -> u64 {
        match self.byte() {
            0..4 => 0,
            4..8 => self.any(),
            units => u64::from(units) * 800,
        }
    }

    fn option<T>(&mut self, some: impl FnOnce(&mut Self) -> T) -> Option<T> {
        (self.byte() > 31).then(|| some(self))
    }

    fn snapshot(&mut self) -> Snapshot {
        let at_ms = self.time();
        let host = Host {
            total_bytes: 8 * (self.size() / 8),
            available_bytes: self.size(),
            swap: self.option(|input| Swap {
                total_bytes: GIB,
                used_bytes: input.size(),
                out_bytes: input.size(),
            }),
            pressure: self
                .option(|input| Pressure { some_us: input.time(), full_us: input.time() }),
        };
        let count = self.byte() % 5;
        let machines = (0..count).map(|_| self.machine()).collect();
        Snapshot { at_ms, host, machines }
    }

    /// The same machines a moment later: orders to pause and to resume are carried out, and some
    /// machines grow or are paused elsewhere.
    fn later(&mut self, (snapshot, orders): &(Snapshot, Vec<Order>)) -> Snapshot {
        let mut snapshot = snapshot.bounded();
        snapshot.at_ms += 20 * u64::from(self.byte());
        for machine in &mut snapshot.machines {
            for order in orders.iter().filter(|order| order.machine == machine.name) {
                match order.action {
                    Action::Pause { .. } => machine.is_paused = true,
                    Action::Resume => machine.is_paused = false,
                    _ => {}
                }
            }
            let grown_bytes = match self.byte() {
                units @ 64..224 => u64::from(units) * (GIB / 256),
                224.. => {
                    machine.is_paused = !machine.is_paused;
                    0
                }
                _ => 0,
            };
            if let Some(resident_bytes) =
                machine.resident_bytes.as_mut().filter(|_| !machine.is_paused)
            {
                *resident_bytes += grown_bytes;
                let available_bytes = &mut snapshot.host.available_bytes;
                *available_bytes = available_bytes.saturating_sub(grown_bytes);
            }
        }
        snapshot
    }

    fn machine(&mut self) -> Machine {
        const NAMES: [&str; 7] = ["a", "b", "web-1", "web-2", "db", "parked-1", "held"];
        const MEANS: [Mean; 7] = [
            Mean::Reporting,
            Mean::Reclaim,
            Mean::Trim,
            Mean::Park,
            Mean::Balloon,
            Mean::Stop,
            Mean::Pause,
        ];
        let name = NAMES[usize::from(self.byte()) % NAMES.len()].to_owned();
        let chosen = self.byte();
        let all = MEANS.into_iter().enumerate();
        let means: Means =
            all.filter(|(bit, _)| chosen & 1 << bit != 0).map(|(_, mean)| mean).collect();
        Machine {
            name,
            size_bytes: self.size(),
            resident_bytes: self.option(Self::size),
            swapped_bytes: self.option(Self::size),
            processor_ms: self.option(Self::time),
            is_paused: self.byte() > 223,
            balloon: self
                .option(|input| Balloon { target_bytes: input.size(), actual_bytes: input.size() }),
            statistics: self.option(|input| Statistics {
                taken_ms: input.time(),
                total_bytes: input.option(Self::size),
                available_bytes: input.option(Self::size),
                free_bytes: input.option(Self::size),
                caches_bytes: None,
                major_faults: input.option(Self::size),
                swap_out_bytes: None,
                oom_kills: input.option(|input| u64::from(input.byte())),
            }),
            means,
        }
    }

    /// The same state with some other numbers in one of its parts.
    fn damaged(&mut self, state: State) -> State {
        const PARTS: [&str; 4] = ["machines", "machines", "host", "history"];
        let mut document = serde_json::to_value(&state).unwrap();
        let part = &mut document[PARTS[usize::from(self.byte()) % PARTS.len()]];
        let mut numbers = Vec::new();
        collect(part, &mut numbers);
        for number in numbers {
            match self.byte() % 4 {
                0 => *number = self.any().into(),
                1 => *number = self.time().into(),
                _ => {}
            }
        }
        serde_json::from_value(document).unwrap_or(state)
    }
}

/// All numbers of a document, and the first of long lists.
fn collect<'a>(value: &'a mut Value, numbers: &mut Vec<&'a mut Value>) {
    match value {
        Value::Number(_) => numbers.push(value),
        Value::Array(values) => {
            values.iter_mut().take(4).for_each(|value| collect(value, numbers));
        }
        Value::Object(values) => values.values_mut().for_each(|value| collect(value, numbers)),
        _ => {}
    }
}
