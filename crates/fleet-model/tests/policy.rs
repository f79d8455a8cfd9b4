//! The policy on whole traces.

use std::collections::BTreeMap;

use ebb_fleet_model::strategy::{Ebbd, StaticLimits};
use ebb_fleet_model::trace::{Activity, Growth, Honesty, Kind, MachineTrace, Phase, SEEDS};
use ebb_fleet_model::{Equipment, HostShape, Recipe, Simulation, Strategy, Trace};
use ebb_host_policy::{GIB, Host, MIB, Order, Settings, Snapshot};

fn simulation() -> Simulation {
    let (host, equipment) = (HostShape::of(15 * GIB), Equipment::ebb());
    Simulation { host, equipment, interval_ms: 1000, duration_ms: 2_400_000 }
}

#[test]
fn more_machines_than_static_limits_without_harm() {
    let simulation = simulation();
    let policy = Ebbd::with_history_of(&simulation, &Recipe::history());
    let (mut all, mut all_static) = (0, 0);
    for seed in SEEDS {
        let trace = Recipe::fleet(seed).trace();
        let outcome = simulation.run(&trace, &mut policy.clone());
        assert_eq!((outcome.host_kills, outcome.troubles.oom_kills), (0, 0), "{outcome:?}");
        assert_eq!(outcome.swap_out_bytes, 0, "{outcome:?}");
        assert!(outcome.slowdown_milli < 1_020, "{outcome:?}");
        all += outcome.admitted_milli;
        all_static += simulation.run(&trace, &mut StaticLimits).admitted_milli;
    }
    assert!(all > 3 * all_static, "{all} to {all_static}");
}

/// Memory grows at the rate of a processor that is shared or emulated: peaks take half a minute, and
/// meet more often.
#[test]
fn slow_peaks_are_kept_apart() {
    let equipment = Equipment { growth_rate: 200_000_000, ..Equipment::ebb() };
    let simulation = Simulation { equipment, ..simulation() };
    let policy = Ebbd::with_history_of(&simulation, &Recipe::history());
    for seed in SEEDS {
        let trace = Recipe::fleet(seed).trace();
        let outcome = simulation.run(&trace, &mut policy.clone());
        assert_eq!((outcome.host_kills, outcome.troubles.oom_kills), (0, 0), "{outcome:?}");
        assert_eq!(outcome.swap_out_bytes, 0, "{outcome:?}");
        assert!(outcome.troubles.pauses > 0, "{outcome:?}");
    }
}

/// Admits sixteen machines at any time, and leaves the rest to a policy, if there is one.
#[derive(Default)]
struct Sixteen(Option<Ebbd>);

impl Strategy for Sixteen {
    fn decide(&mut self, snapshot: &Snapshot) -> Vec<Order> {
        self.0.as_mut().map(|policy| policy.decide(snapshot)).unwrap_or_default()
    }

    fn admits(&mut self, snapshot: &Snapshot, _size_bytes: u64) -> bool {
        snapshot.machines.len() < 16
    }

    fn is_urgent(&mut self, host: &Host) -> bool {
        self.0.as_mut().is_some_and(|policy| policy.is_urgent(host))
    }
}

/// Far too many machines, as on a host that was full before its daemon started.
#[test]
fn a_host_that_is_too_full_is_not_made_worse() {
    let simulation = Simulation { duration_ms: 1_200_000, ..simulation() };
    for seed in 20..26 {
        let trace = Recipe::fleet(seed).trace();
        let mut targets = BTreeMap::<String, Vec<u64>>::new();
        let managed = simulation.observe(&trace, &mut Sixteen(Some(Ebbd::default())), |moment| {
            for machine in &moment.snapshot.machines {
                let target = machine.balloon.map_or(0, |balloon| balloon.target_bytes);
                let seen = targets.entry(machine.name.clone()).or_default();
                if seen.last().copied().unwrap_or(0) != target {
                    seen.push(target);
                }
            }
        });
        let unmanaged = simulation.run(&trace, &mut Sixteen(None));
        assert!(managed.slowdown_milli < unmanaged.slowdown_milli, "{managed:?} {unmanaged:?}");
        assert!(managed.completed >= unmanaged.completed, "{managed:?} {unmanaged:?}");
        assert!(managed.host_kills <= unmanaged.host_kills, "{managed:?} {unmanaged:?}");
        assert_eq!(managed.troubles.oom_kills, 0, "{managed:?}");
        // No balloon oscillates during these twenty minutes.
        for (machine, targets) in targets {
            let ups = targets.windows(2).filter(|pair| pair[0] == 0 && pair[1] > 8 * MIB).count();
            assert!(ups <= 8, "{machine}: {targets:?}");
        }
    }
}

/// A machine whose highest need lasts for four seconds of its three minutes.
fn with_a_peak() -> MachineTrace {
    let phase = |activity, duration_ms, programs_bytes| Phase {
        activity,
        duration_ms,
        programs_bytes,
        growth: Growth::Burst,
        files_bytes: 50 * MIB,
    };
    MachineTrace {
        arrives_ms: 0,
        kind: Kind::Agent,
        size_bytes: 6 * GIB,
        statistics: Honesty::Honest,
        phases: vec![
            phase(Activity::Wait, 60_000, 150 * MIB),
            phase(Activity::Work, 4_000, 5 * GIB),
            phase(Activity::Wait, 120_000, 150 * MIB),
        ],
    }
}

/// Each of the peaks fits, and all together do not.
#[test]
fn peaks_at_once_come_one_after_the_other() {
    let trace = Trace { machines: (0..3).map(|_| with_a_peak()).collect() };
    let host = HostShape::of(8 * GIB);
    let simulation = Simulation { host, duration_ms: 150_000, ..simulation() };
    let run = |pause_ms| {
        let mut policy = Ebbd::default();
        policy.settings.pause_ms = pause_ms;
        simulation.run(&trace, &mut Sixteen(Some(policy)))
    };
    let (without, with) = (run(0), run(Settings::default().pause_ms));
    assert!(without.swap_out_bytes > GIB, "{without:?}");
    assert_eq!(with.swap_out_bytes, 0, "{with:?}");
    assert!(with.troubles.pauses >= 2, "{with:?}");
}
