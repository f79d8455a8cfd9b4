//! Pauses of machines that grow, on a host that carries them out.

#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;

use ebb_host_policy::{
    Action, Class, Decision, GIB, Host, MIB, Machine, Mean, Means, Profile, Rule, Settings,
    Snapshot, State, decide, fit, is_urgent,
};
use proptest::prelude::*;

const TOTAL_BYTES: u64 = 12 * GIB;

/// A machine, and what it is about to take.
#[derive(Clone, Debug)]
struct Guest {
    name: String,
    size_bytes: u64,
    has_bytes: u64,
    wants_bytes: u64,
    means: Means,
    /// The end of its pause.
    paused_until_ms: u64,
    is_paused_elsewhere: bool,
}

fn guest(name: &str, means: &[Mean]) -> Guest {
    Guest {
        name: name.to_owned(),
        size_bytes: 8 * GIB,
        has_bytes: GIB / 2,
        wants_bytes: GIB / 2,
        means: means.iter().copied().collect(),
        paused_until_ms: 0,
        is_paused_elsewhere: false,
    }
}

/// A host, with the policy's state.
struct World {
    now_ms: u64,
    guests: Vec<Guest>,
    settings: Settings,
    state: State,
}

impl World {
    fn of(guests: Vec<Guest>) -> Self {
        let latency = Profile { class: Class::Latency, ..Profile::default() };
        let settings = Settings {
            profiles: [("latency".to_owned(), latency)].into(),
            machines: [("web-*".to_owned(), "latency".to_owned())].into(),
            ..Settings::default()
        };
        let state = State::default();
        let mut world = Self { now_ms: 100_000, guests, settings, state };
        world.decide();
        world
    }

    fn host(&self) -> Host {
        let used: u64 = self.guests.iter().map(|guest| guest.has_bytes).sum();
        let available_bytes = TOTAL_BYTES.saturating_sub(used);
        Host { total_bytes: TOTAL_BYTES, available_bytes, swap: None, pressure: None }
    }

    fn is_paused(&self, guest: &Guest) -> bool {
        guest.is_paused_elsewhere || guest.paused_until_ms > self.now_ms
    }

    fn snapshot(&self) -> Snapshot {
        let machine = |guest: &Guest| Machine {
            name: guest.name.clone(),
            size_bytes: guest.size_bytes,
            resident_bytes: Some(guest.has_bytes),
            swapped_bytes: Some(0),
            processor_ms: None,
            is_paused: self.is_paused(guest),
            balloon: None,
            statistics: None,
            means: guest.means,
        };
        let machines = self.guests.iter().map(machine).collect();
        Snapshot { at_ms: self.now_ms, host: self.host(), machines }
    }

    /// Machines that run take up to 3 GB/s, and give back at once.
    fn pass(&mut self, ms: u64) {
        for index in 0..self.guests.len() {
            let is_paused = self.is_paused(&self.guests[index]);
            let guest = &mut self.guests[index];
            if !is_paused {
                let grown = guest.has_bytes + 3_000_000 * ms;
                guest.has_bytes = grown.min(guest.wants_bytes);
            }
        }
        self.now_ms += ms;
    }

    fn decide(&mut self) -> Decision {
        let state = std::mem::take(&mut self.state);
        let decision = decide(&self.snapshot(), state, &self.settings);
        self.state = decision.state.clone();
        for order in &decision.orders {
            let guest = self.guests.iter_mut().find(|guest| guest.name == order.machine).unwrap();
            match order.action {
                Action::Pause { for_ms } => guest.paused_until_ms = self.now_ms + for_ms,
                Action::Resume => guest.paused_until_ms = 0,
                _ => {}
            }
        }
        decision
    }
}

fn rule(decision: &Decision, name: &str) -> Rule {
    decision.explanations.iter().find(|why| why.machine == name).unwrap().rule
}

/// Two machines that grow by 6 GiB at once, of which the second is paused.
fn one_waits() -> World {
    let mut world = World::of(vec![guest("a", &[Mean::Pause]), guest("b", &[Mean::Pause])]);
    for guest in &mut world.guests {
        guest.wants_bytes = 7 * GIB;
    }
    // The first is always the one that began.
    world.guests[0].has_bytes += GIB / 4;
    for _ in 0..20 {
        world.pass(100);
        world.decide();
    }
    assert!(world.is_paused(&world.guests[1]), "{:?}", world.guests);
    world
}

#[test]
fn the_second_waits_for_the_first() {
    let mut world = one_waits();
    // The first gets all that it wants, and keeps it for a while.
    for _ in 0..30 {
        world.pass(100);
        world.decide();
        assert!(world.host().available_bytes >= TOTAL_BYTES / 25, "{:?}", world.host());
    }
    let decision = world.decide();
    let why = rule(&decision, "b");
    assert!(matches!(why, Rule::Delay { running: 1, .. }), "{why:?}");
    assert_eq!(world.guests[0].has_bytes, 7 * GIB);
    let nothing = fit(&world.snapshot(), &world.state, &world.settings, "default", MIB, 9);
    assert_eq!((nothing.machines, nothing.delayed), (0, 1), "{nothing:?}");
    world.guests[0].wants_bytes = GIB;
    world.pass(100);
    let decision = world.decide();
    let why = rule(&decision, "b");
    assert!(matches!(why, Rule::Resumed { .. }), "{why:?}");
    for _ in 0..30 {
        world.pass(100);
        assert!(world.decide().orders.is_empty());
    }
    assert_eq!(world.guests[1].has_bytes, 7 * GIB);
}

/// Machines that never have enough, on a host that is full.
#[test]
fn after_its_longest_pause_a_machine_runs() {
    let mut world = one_waits();
    world.settings.pause_ms = 10_000;
    let (mut paused_ms, mut ran_ms) = (Vec::new(), Vec::new());
    let (mut was_paused, mut since_ms) = (true, world.now_ms);
    for _ in 0..1000 {
        for guest in &mut world.guests {
            guest.size_bytes += GIB / 8;
            guest.wants_bytes = guest.has_bytes + GIB / 16;
        }
        world.pass(100);
        world.decide();
        if world.is_paused(&world.guests[1]) != was_paused {
            let times = if was_paused { &mut paused_ms } else { &mut ran_ms };
            times.push(world.now_ms - since_ms);
            (was_paused, since_ms) = (!was_paused, world.now_ms);
        }
    }
    let longest_ms = world.settings.pause_ms;
    assert!(paused_ms.len() >= 2, "{paused_ms:?} {ran_ms:?}");
    assert!(paused_ms.iter().all(|ms| *ms <= longest_ms), "{paused_ms:?}");
    assert!(ran_ms.iter().all(|ms| *ms >= 3 * longest_ms), "{ran_ms:?}");
}

/// One that is near its end is not stopped halfway by one that has begun earlier.
#[test]
fn the_smallest_claim_goes_first() {
    let mut world = one_waits();
    world.settings.pause_ms = 0;
    // It cannot get all that it wants.
    world.guests[1].wants_bytes = 5 * GIB;
    world.guests[0].wants_bytes = 3 * GIB;
    for _ in 0..20 {
        world.pass(100);
        world.decide();
    }
    world.settings.pause_ms = Settings::default().pause_ms;
    for guest in &mut world.guests {
        guest.wants_bytes = 8 * GIB;
    }
    world.pass(100);
    let decision = world.decide();
    let pauses: Vec<_> = decision.orders.iter().map(|order| &order.machine).collect();
    assert_eq!(pauses, ["a"], "{:?}", decision.explanations);
}

#[test]
fn a_pause_ends_when_the_machine_must_not_wait() {
    let resumes = |why: &str, world: &mut World| {
        world.pass(100);
        let decision = world.decide();
        let order = decision.orders.iter().find(|order| order.machine == "b");
        let action = order.map(|order| order.action);
        assert_eq!(action, Some(Action::Resume), "{why}: {:?}", decision.explanations);
        for _ in 0..10 {
            world.pass(100);
            let decision = world.decide();
            assert!(decision.orders.iter().all(|order| order.machine != "b"), "{decision:?}");
        }
    };
    let mut held = one_waits();
    held.state.hold("b", true);
    resumes("held", &mut held);
    let mut latency = one_waits();
    latency.settings.default.class = Class::Latency;
    resumes("latency", &mut latency);
    let mut never = one_waits();
    never.settings.pause_ms = 0;
    resumes("never", &mut never);
    let mut plenty = one_waits();
    plenty.guests[0].wants_bytes = GIB;
    resumes("plenty", &mut plenty);
}

#[test]
fn a_clock_that_goes_back_ends_pauses() {
    let mut world = one_waits();
    world.now_ms = 50_000;
    world.guests[1].paused_until_ms = 51_000;
    let decision = world.decide();
    assert!(matches!(rule(&decision, "b"), Rule::Resumed { .. }), "{decision:?}");
}

#[test]
fn what_is_paused_elsewhere_stays_paused() {
    let mut world = one_waits();
    let mut other = guest("c", &[Mean::Pause, Mean::Park, Mean::Trim]);
    other.has_bytes = GIB;
    other.is_paused_elsewhere = true;
    world.guests.push(other);
    for step in 0..300 {
        if step == 50 {
            world.guests[0].wants_bytes = GIB;
        }
        world.pass(100);
        let decision = world.decide();
        assert_eq!(rule(&decision, "c"), Rule::PausedElsewhere);
        assert!(decision.orders.iter().all(|order| order.machine != "c"), "{decision:?}");
    }
}

#[test]
fn falling_memory_is_urgent() {
    let mut world = World::of(vec![guest("a", &[Mean::Pause]), guest("b", &[Mean::Pause])]);
    let is_urgent = |world: &World| is_urgent(&world.host(), &world.state, &world.settings);
    assert!(!is_urgent(&world));
    world.guests[0].wants_bytes = 7 * GIB;
    world.pass(100);
    // A tenth of a second may be too short to be seen.
    world.pass(300);
    assert!(is_urgent(&world));
    world.decide();
    assert!(is_urgent(&world));
    world.guests[0].wants_bytes = world.guests[0].has_bytes;
    for _ in 0..4 {
        world.pass(100);
        world.decide();
    }
    assert!(!is_urgent(&world));
    world.settings.pause_ms = 0;
    world.guests[0].wants_bytes = 7 * GIB;
    world.pass(300);
    assert!(!is_urgent(&world));
}

/// What a machine does next: what it wants in eighths of its size, or nothing new.
fn wishes() -> impl Strategy<Value = Vec<(u64, usize, u64)>> {
    prop::collection::vec((20_u64..1500, 0_usize..6, 0_u64..9), 20..120)
}

proptest! {
    /// Whatever machines do, and however long it is from one decision to the next.
    #[test]
    fn pauses_are_short_and_only_of_those_that_may_wait(
        wishes in wishes(),
        pause_ms in prop_oneof![Just(0_u64), 100_u64..12_000],
    ) {
        let guests = ["a", "b", "c", "held", "web-1"].map(|name| guest(name, &[Mean::Pause]));
        let mut world = World::of(guests.into_iter().chain([guest("without", &[])]).collect());
        world.settings.pause_ms = pause_ms;
        world.settings.check().unwrap();
        world.state.hold("held", true);
        let mut paused_since = BTreeMap::<String, u64>::new();
        let mut paused_ms = BTreeMap::<String, u64>::new();
        let mut step = |world: &mut World, ms: u64| {
            world.pass(ms);
            let before: Vec<bool> = world.guests.iter().map(|it| world.is_paused(it)).collect();
            let decision = world.decide();
            let (mut all_wait, mut has_delays, mut is_hopeless) = (true, false, true);
            for ((guest, was_paused), why) in
                world.guests.iter().zip(before).zip(&decision.explanations)
            {
                if was_paused {
                    let began_ms = world.now_ms - ms;
                    let since = *paused_since.entry(guest.name.clone()).or_insert(began_ms);
                    *paused_ms.entry(guest.name.clone()).or_default() += ms;
                    assert!(world.now_ms - since <= pause_ms, "{why:?}");
                } else {
                    paused_since.remove(&guest.name);
                }
                if let Rule::Delay { running, claim_bytes, room_bytes, expected_bytes, .. } =
                    why.rule
                {
                    assert!(["a", "b", "c"].contains(&&*guest.name), "{why:?}");
                    is_hopeless &= running == 0 && claim_bytes > room_bytes + expected_bytes;
                    has_delays = true;
                    assert!(world.is_paused(guest), "{why:?}");
                } else {
                    assert!(!world.is_paused(guest), "{why:?}");
                    all_wait = false;
                }
            }
            assert!(!all_wait);
            assert!(!has_delays || !is_hopeless, "{:?}", decision.explanations);
        };
        let began_ms = world.now_ms;
        for (ms, index, eighths) in wishes {
            world.guests[index].wants_bytes = eighths * GIB + 100 * MIB;
            step(&mut world, ms);
        }
        // Nothing is wanted any more.
        for guest in &mut world.guests {
            guest.wants_bytes = guest.has_bytes;
        }
        for _ in 0..pause_ms / 100 + 20 {
            step(&mut world, 100);
        }
        assert!(world.guests.iter().all(|guest| !world.is_paused(guest)));
        // In the long run at most a quarter of the time.
        let all_ms = world.now_ms - began_ms;
        for ms in paused_ms.into_values() {
            assert!(ms <= all_ms / 4 + pause_ms + 2000, "{ms} of {all_ms}");
        }
    }
}
