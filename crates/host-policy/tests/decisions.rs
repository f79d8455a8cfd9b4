//! What holds for every decision, whatever a host, its guests and its clock say.

#![allow(clippy::unwrap_used)]

use ebb_host_policy::{
    Action, Balloon, Class, Decision, GIB, Host, Level, MIB, Machine, Mean, Means, Pressure,
    Profile, Rule, Settings, Snapshot, State, Statistics, Swap, decide, fit,
};
use proptest::prelude::*;

/// Sizes as they are, and sizes that cannot be.
fn bytes(likely: u64) -> impl Strategy<Value = u64> {
    prop_oneof![8 => 0..likely, 1 => Just(0), 1 => any::<u64>()]
}

fn statistics() -> impl Strategy<Value = Statistics> {
    let value = || prop::option::weighted(0.9, bytes(8 * GIB));
    (bytes(200_000), value(), value(), value(), prop::option::of(0_u64..9), value()).prop_map(
        |(taken_ms, total_bytes, available_bytes, free_bytes, oom_kills, major_faults)| {
            Statistics {
                taken_ms,
                total_bytes,
                available_bytes,
                free_bytes,
                caches_bytes: None,
                major_faults,
                swap_out_bytes: None,
                oom_kills,
            }
        },
    )
}

fn means() -> impl Strategy<Value = Means> {
    let all = [Mean::Reporting, Mean::Reclaim, Mean::Trim, Mean::Park, Mean::Balloon, Mean::Stop];
    prop::sample::subsequence(all.to_vec(), 0..=all.len()).prop_map(Means::from)
}

fn machine() -> impl Strategy<Value = Machine> {
    let balloon = (bytes(8 * GIB), bytes(8 * GIB));
    let balloon =
        balloon.prop_map(|(target_bytes, actual_bytes)| Balloon { target_bytes, actual_bytes });
    (
        prop::sample::select(vec!["a", "b", "web-1", "web-2", "db", "parked-1"]),
        bytes(8 * GIB),
        prop::option::weighted(0.9, bytes(8 * GIB)),
        prop::option::weighted(0.7, bytes(200_000)),
        prop::option::weighted(0.8, balloon),
        prop::option::weighted(0.8, statistics()),
        means(),
    )
        .prop_map(
            |(name, size_bytes, resident_bytes, processor_ms, balloon, statistics, means)| {
                let name = name.to_owned();
                let swapped_bytes = resident_bytes.filter(|bytes| bytes % 3 == 0);
                Machine {
                    name,
                    size_bytes,
                    resident_bytes,
                    swapped_bytes,
                    processor_ms,
                    balloon,
                    statistics,
                    means,
                }
            },
        )
}

fn snapshots() -> impl Strategy<Value = Vec<Snapshot>> {
    let host = (bytes(64 * GIB), bytes(64 * GIB), bytes(GIB), bytes(1_000_000)).prop_map(
        |(total_bytes, available_bytes, out_bytes, full_us)| Host {
            total_bytes,
            available_bytes,
            swap: Some(Swap { total_bytes: GIB, used_bytes: out_bytes, out_bytes }),
            pressure: Some(Pressure { some_us: full_us, full_us }),
        },
    );
    let snapshot = (bytes(200_000), host, prop::collection::vec(machine(), 0..6))
        .prop_map(|(at_ms, host, machines)| Snapshot { at_ms, host, machines });
    prop::collection::vec(snapshot, 1..6)
}

fn settings() -> Settings {
    let profile = |class, floor_bytes| Profile { class, floor_bytes, ..Profile::default() };
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
        // Each action names what it looked at.
        let document = serde_json::to_value(why.rule).unwrap();
        let inputs = document.as_object().unwrap().iter().filter(|(key, _)| *key != "name");
        assert!(inputs.count() > 0, "{document}");
        assert!(why.rule.to_string().len() > 10);
        assert_eq!(document["name"], why.rule.name());
        let profile = settings.profile(&machine.name).1;
        let is_parked = profile.class == Class::Parked;
        let mean = match action {
            Action::Balloon { target_bytes } => {
                let raises = target_bytes > machine.balloon.unwrap().target_bytes;
                if raises {
                    check_raise(machine, target_bytes, profile, why.doubt.is_some());
                    let is_ceiling = matches!(why.rule, Rule::Ceiling { .. });
                    assert!(decision.level > Level::Plenty || is_ceiling || is_parked, "{why:?}");
                }
                continue;
            }
            Action::Park => Mean::Park,
            Action::Reclaim => Mean::Reclaim,
            Action::Trim => Mean::Trim,
            Action::Stop => {
                assert!(is_parked && decision.level >= Level::Pressed);
                Mean::Stop
            }
        };
        assert!(machine.means.has(mean), "{why:?}");
        assert!(decision.level > Level::Plenty || is_parked, "{why:?}");
    }
}

/// Nothing is taken that a guest uses, or that it may keep, or from a guest that is not believed.
fn check_raise(machine: &Machine, target_bytes: u64, profile: &Profile, is_doubted: bool) {
    assert!(!is_doubted, "{machine:?}");
    let available = machine.statistics.unwrap().available_bytes.unwrap();
    let used = machine.outside_balloon_bytes().saturating_sub(available);
    let left = machine.size_bytes - target_bytes;
    assert!(left >= used + profile.reserve_bytes, "{left} of {machine:?}");
    assert!(left >= profile.floor_bytes, "{left} of {machine:?}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1024))]
    #[test]
    fn whatever_is_seen(snapshots in snapshots()) {
        let settings = settings();
        let mut state = State::default();
        state.hold("b", true);
        for snapshot in &snapshots {
            let before = serde_json::to_string(&state).unwrap();
            let decision = decide(snapshot, state, &settings);
            check(snapshot, &decision, &settings);
            prop_assert!(decision.orders.iter().all(|order| order.machine != "b"));
            // What was written to a file and read again decides the same.
            let again = decide(snapshot, serde_json::from_str(&before).unwrap(), &settings);
            prop_assert_eq!(&again, &decision);
            state = decision.state;
            fit(snapshot, &state, &settings, "default", GIB, 3);
        }
        prop_assert_eq!(state.held().collect::<Vec<_>>(), ["b"]);
    }
}

/// An idle machine of 4 GiB, most of which is caches.
fn idle(name: &str, at_ms: u64) -> Machine {
    let means = [Mean::Reporting, Mean::Reclaim, Mean::Trim, Mean::Park, Mean::Balloon];
    Machine {
        name: name.to_owned(),
        size_bytes: 4 * GIB,
        resident_bytes: Some(3 * GIB),
        swapped_bytes: Some(0),
        processor_ms: Some(5),
        balloon: Some(Balloon::default()),
        statistics: Some(Statistics {
            taken_ms: at_ms,
            total_bytes: Some(4 * GIB - 80 * MIB),
            available_bytes: Some(3 * GIB + 512 * MIB),
            free_bytes: Some(GIB),
            caches_bytes: Some(2 * GIB),
            major_faults: Some(0),
            swap_out_bytes: Some(0),
            oom_kills: Some(0),
        }),
        means: means.into_iter().collect(),
    }
}

fn host(available_percent: u64) -> Host {
    let available_bytes = 20 * GIB * available_percent / 100;
    Host { total_bytes: 20 * GIB, available_bytes, swap: None, pressure: None }
}

fn still(second: u64, available_percent: u64) -> Snapshot {
    let at_ms = 1000 * second;
    let machines = ["a", "b", "c"].map(|name| idle(name, at_ms)).into();
    Snapshot { at_ms, host: host(available_percent), machines }
}

/// Decides second after second.
fn go_on(
    state: &mut State,
    seconds: std::ops::Range<u64>,
    mut see: impl FnMut(u64) -> Snapshot,
    mut each: impl FnMut(u64, &Decision),
) {
    for second in seconds {
        let decision = decide(&see(second), std::mem::take(state), &Settings::default());
        each(second, &decision);
        *state = decision.state;
    }
}

#[test]
fn what_does_not_help_is_given_up() {
    let mut hours = [0; 4];
    let count = |second: u64, decision: &Decision| {
        hours[second as usize / 3600] += decision.orders.len();
    };
    go_on(&mut State::default(), 0..4 * 3600, |second| still(second, 20), count);
    assert!(hours[0] >= 3, "{hours:?}");
    assert!(hours[1] <= 12 && hours[3] <= 9, "{hours:?}");
}

#[test]
fn the_largest_is_parked_and_no_more_than_needed() {
    let see = |second| {
        let mut snapshot = still(second, 30);
        let largest = &mut snapshot.machines[1];
        largest.resident_bytes = Some(4 * GIB);
        largest.statistics.as_mut().unwrap().free_bytes = Some(0);
        snapshot
    };
    let mut orders = Vec::new();
    go_on(&mut State::default(), 0..12, see, |_, decision| {
        orders.extend(decision.orders.clone());
    });
    assert_eq!(orders.len(), 1, "{orders:?}");
    assert_eq!((orders[0].machine.as_str(), orders[0].action), ("b", Action::Park));
}

/// A guest that works, has nothing but a balloon, and says nothing more once that grows.
#[test]
fn a_balloon_ends_with_its_guests_words() {
    let balloon = std::cell::Cell::new(Balloon::default());
    let raised = std::cell::Cell::new(None);
    let mut released = None;
    let see = |second: u64| {
        let mut snapshot = still(second, 2);
        snapshot.machines.truncate(1);
        let machine = &mut snapshot.machines[0];
        machine.means = [Mean::Balloon].into_iter().collect();
        machine.processor_ms = Some(1000 * second);
        machine.balloon = Some(balloon.get());
        if let (Some(raised), Some(said)) = (raised.get(), &mut machine.statistics) {
            said.taken_ms = 1000 * raised;
        }
        snapshot
    };
    go_on(&mut State::default(), 100..300, see, |second, decision| {
        for order in &decision.orders {
            let Action::Balloon { target_bytes } = order.action else { panic!("{order:?}") };
            balloon.set(Balloon { target_bytes, ..Balloon::default() });
            match target_bytes {
                0 => released = released.or(Some(second)),
                _ => raised.set(raised.get().or(Some(second))),
            }
        }
    });
    let (raised, released) = (raised.get().unwrap(), released.unwrap());
    let lease = Settings::default().lease_ms / 1000;
    let stale = Settings::default().stale_ms / 1000;
    assert!((lease..=lease + stale).contains(&(released - raised)), "{raised} to {released}");
}

#[test]
fn a_guest_that_runs_short_gets_everything_at_once() {
    let see = |second| {
        let mut snapshot = still(second, 60);
        let machine = &mut snapshot.machines[0];
        machine.balloon = Some(Balloon { target_bytes: 3 * GIB, actual_bytes: 3 * GIB });
        let said = machine.statistics.as_mut().unwrap();
        (said.total_bytes, said.available_bytes) = (Some(GIB - 80 * MIB), Some(20 * MIB));
        said.free_bytes = Some(10 * MIB);
        snapshot
    };
    go_on(&mut State::default(), 5..6, see, |_, decision| {
        let (order, why) = (&decision.orders[0], &decision.explanations[0]);
        assert_eq!(order.machine, "a");
        assert_eq!(order.action, Action::Balloon { target_bytes: 0 });
        assert!(matches!(why.rule, Rule::GuestShort { .. }), "{why:?}");
    });
}

#[test]
fn how_many_fit_grows_with_what_is_known() {
    let (settings, mut state) = (Settings::default(), State::default());
    let see = |second: u64| {
        let mut snapshot = still(second, 80);
        for machine in &mut snapshot.machines {
            machine.resident_bytes = Some(600 * MIB);
        }
        snapshot
    };
    let fits = |state: &State, second| fit(&see(second), state, &settings, "default", 4 * GIB, 99);
    let first = fits(&state, 0);
    // 17 GiB for machines of which each may need 4, and three that run.
    assert_eq!((first.machines, first.observed_seconds), (1, 0), "{first:?}");
    let mut last = first.machines;
    for hour in [1, 4, 30] {
        go_on(&mut state, last * 900..hour * 900, see, |_, _| {});
        let now = fits(&state, hour * 900);
        assert!(now.machines >= last, "{now:?}");
        last = now.machines;
    }
    // Not as many as 600 MiB each would allow: what was never seen may happen.
    assert!((8..26).contains(&last), "{last}");
    // A host that is pressed takes nobody.
    let mut pressed = see(99_000);
    pressed.host = host(8);
    state = decide(&pressed, state, &settings).state;
    assert_eq!(fit(&pressed, &state, &settings, "default", MIB, 9).machines, 0);
}
