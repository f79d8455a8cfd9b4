//! Decisions over time.

#![allow(clippy::unwrap_used)]

use ebb_host_policy::{
    Action, Balloon, Decision, Fit, GIB, Host, MIB, Machine, Mean, Profile, Rule, Settings,
    Snapshot, State, Statistics, decide, fit,
};

/// An idle machine of 4 GiB, most of which is caches.
fn idle(name: &str, at_ms: u64) -> Machine {
    let means = [Mean::Reporting, Mean::Reclaim, Mean::Trim, Mean::Park, Mean::Balloon];
    Machine {
        name: name.to_owned(),
        size_bytes: 4 * GIB,
        resident_bytes: Some(3 * GIB),
        swapped_bytes: Some(0),
        processor_ms: Some(5),
        is_paused: false,
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

/// The times, in seconds, at which the balloon of a guest is raised and released that says nothing
/// more from the raise on.
fn raised_and_released(settings: &Settings, available_percent: u64) -> (u64, u64) {
    let (mut state, mut balloon) = (State::default(), Balloon::default());
    let mut raised = None;
    for second in 100..300 {
        let mut snapshot = still(second, available_percent);
        snapshot.machines.truncate(1);
        let machine = &mut snapshot.machines[0];
        machine.means = [Mean::Balloon].into_iter().collect();
        // It works.
        machine.processor_ms = Some(1000 * second);
        machine.balloon = Some(balloon);
        if let (Some(raised), Some(said)) = (raised, &mut machine.statistics) {
            said.taken_ms = 1000 * raised;
        }
        let decision = decide(&snapshot, state, settings);
        for order in decision.orders {
            let Action::Balloon { target_bytes } = order.action else { panic!("{order:?}") };
            balloon = Balloon { target_bytes, ..Balloon::default() };
            match (target_bytes, raised) {
                (0, Some(raised)) => return (raised, second),
                _ => raised = raised.or(Some(second)),
            }
        }
        state = decision.state;
    }
    panic!("{raised:?}, and never released");
}

#[test]
fn a_balloon_ends_with_its_guests_words() {
    let limit = Profile { ceiling_bytes: Some(2 * GIB), ..Profile::default() };
    let limited = Settings { default: limit, ..Settings::default() };
    for (settings, available_percent) in [(Settings::default(), 2), (limited, 80)] {
        let (raised, released) = raised_and_released(&settings, available_percent);
        let (lease, stale) = (settings.lease_ms / 1000, settings.stale_ms / 1000);
        let after = released - raised;
        assert!((stale..=lease + stale + 1).contains(&after), "{raised} to {released}");
    }
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
    assert!(first.reason().contains("limit 0."), "{}", first.reason());
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
    let none = fit(&pressed, &state, &settings, "default", MIB, 9);
    assert_eq!((none.machines, &*none.reason()), (0, "the host is pressed"));
}

#[test]
fn the_limit_that_binds_is_named() {
    let (settings, state) = (Settings::default(), State::default());
    let one = fit(&still(0, 80), &state, &settings, "default", MIB, 1);
    assert_eq!((one.machines, &*one.reason()), (1, "no more were asked for"));
    let reason = |change: fn(&mut Fit)| {
        let mut fit = one.clone();
        change(&mut fit);
        fit.reason()
    };
    assert!(reason(|fit| fit.delayed = 2).ends_with("paused now: 2"));
    let risk = reason(|fit| (fit.risk_of_next_ppm, fit.risk_limit_ppm) = (2023, 100));
    assert!(risk.contains("too little") && risk.ends_with("0.2023 % (limit 0.0100 %)"), "{risk}");
    let delay = reason(|fit| (fit.delay_of_next_ppm, fit.delay_limit_ppm) = (20_001, 20_000));
    assert!(delay.contains("all need more") && delay.ends_with("(limit 2.0000 %)"), "{delay}");
}

/// Machines that run count with what was known of them before: as many as fit are admitted one
/// after the other. The numbers are a host's memory in GiB and what each machine needs in MiB.
#[test]
fn those_that_fit_are_admitted() {
    let settings = Settings { pause_ms: 0, ..Settings::default() };
    let see = |second: u64, total_bytes: u64, need_bytes: u64, running: u64| {
        let mut one = idle("", 1000 * second);
        one.resident_bytes = Some(need_bytes);
        one.statistics.as_mut().unwrap().available_bytes = Some(4 * GIB - need_bytes);
        let machine = |number| Machine { name: format!("m-{number}"), ..one.clone() };
        let available_bytes = total_bytes - running * need_bytes;
        Snapshot {
            at_ms: 1000 * second,
            host: Host { total_bytes, available_bytes, swap: None, pressure: None },
            machines: (0..running).map(machine).collect(),
        }
    };
    let end = 100 * 3600;
    for (total_gib, need_mib) in [(20, 1100), (20, 1300), (40, 800), (100, 1030), (1024, 1030)] {
        let (total_bytes, need_bytes) = (total_gib * GIB, need_mib * MIB);
        let state = (0..end).fold(State::default(), |state, second| {
            decide(&see(second, total_bytes, need_bytes, 1), state, &settings).state
        });
        let fits = |running| {
            let now = see(end, total_bytes, need_bytes, running);
            fit(&now, &state, &settings, "default", 4 * GIB, 1000).machines
        };
        let all = fits(0);
        for running in (0..all).step_by(1 + all as usize / 40).chain([all - 1]) {
            assert!(running + fits(running) >= all, "{need_mib}: {running} of {all}");
        }
        // Above the limit of an emergency, and beside one that needs what was never seen.
        let most = (total_bytes / 100 * 95 - (4 * GIB - need_bytes)) / need_bytes;
        assert!(all <= most && 100 * all >= 85 * most, "{need_mib}: {all} of {most}");
    }
}

#[test]
fn history_counts_seconds() {
    let (settings, mut state) = (Settings::default(), State::default());
    for quarter in 0..40 {
        let mut snapshot = still(quarter / 4, 80);
        snapshot.at_ms += 250 * (quarter % 4);
        state = decide(&snapshot, state, &settings).state;
    }
    // Ten of each of three machines.
    assert_eq!(state.history.observed_seconds("default"), 30);
}

#[test]
fn machines_without_a_size_do_not_fit_without_end() {
    let (settings, state) = (Settings::default(), State::default());
    let fit = fit(&still(0, 80), &state, &settings, "default", 0, u64::MAX);
    assert!(fit.machines <= 20 * 1024, "{fit:?}");
}
