//! The model itself: whatever a policy orders, no memory appears or disappears.

#![allow(clippy::unwrap_used)]

use ebb_fleet_model::strategy::StaticLimits;
use ebb_fleet_model::trace::{JUDGING_SEED, SEEDS};
use ebb_fleet_model::{Equipment, HostShape, Recipe, Simulation, Strategy};
use ebb_host_policy::{Action, GIB, Host, Machine, Order, Snapshot};
use proptest::prelude::{Just, ProptestConfig, prop, prop_oneof, proptest};

/// Random orders.
struct Anything {
    state: u64,
    most: usize,
}

impl Anything {
    fn next(&mut self, end: u64) -> u64 {
        // Knuth's linear congruential generator (MMIX); its high bits.
        self.state = self.state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (self.state >> 33) % end
    }
}

impl Strategy for Anything {
    fn decide(&mut self, snapshot: &Snapshot) -> Vec<Order> {
        let mut orders = Vec::new();
        for machine in &snapshot.machines {
            let target_bytes = machine.size_bytes * self.next(120) / 100;
            let for_ms = self.next(5_000);
            let action = match self.next(10) {
                0 => Action::Balloon { target_bytes },
                1 => Action::Park,
                2 => Action::Reclaim,
                3 => Action::Balloon { target_bytes: 0 },
                4 => Action::Pause { for_ms },
                5 => Action::Resume,
                _ => continue,
            };
            orders.push(Order { machine: machine.name.clone(), action });
        }
        orders
    }

    fn admits(&mut self, snapshot: &Snapshot, _size_bytes: u64) -> bool {
        snapshot.machines.len() < self.most
    }

    fn is_urgent(&mut self, _host: &Host) -> bool {
        self.next(4) == 0
    }
}

fn hosts() -> impl proptest::strategy::Strategy<Value = HostShape> {
    use proptest::strategy::Strategy as _;
    (2_u64..16, prop::option::of(0_u64..8)).prop_map(|(total, swap)| HostShape {
        swap_bytes: swap.map(|swap| swap * GIB),
        ..HostShape::of(total * GIB)
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]
    #[test]
    fn memory_is_conserved(
        host in hosts(),
        seed: u64,
        most in 1_usize..30,
        equipment in prop_oneof![Just(Equipment::ebb()), Just(Equipment::balloon())],
    ) {
        let recipe = Recipe { every_ms: 2_000, machines: 60, ..Recipe::fleet(seed) };
        let simulation = Simulation { host, equipment, interval_ms: 1000, duration_ms: 200_000 };
        let mut strategy = Anything { state: seed, most };
        simulation.observe(&recipe.trace(), &mut strategy, |moment| {
            let machines = &moment.snapshot.machines;
            let resident: u64 = machines.iter().filter_map(|machine| machine.resident_bytes).sum();
            let swapped: u64 = machines.iter().filter_map(|machine| machine.swapped_bytes).sum();
            let seen = &moment.snapshot.host;
            let held = resident + host.base_bytes + seen.available_bytes;
            // What the kernel keeps for itself is not available.
            let kernels = seen.total_bytes / 200;
            assert!(held <= seen.total_bytes && held + kernels >= seen.total_bytes, "{moment:?}");
            assert_eq!(swapped, seen.swap.map_or(0, |swap| swap.used_bytes));
            for machine in machines {
                let balloon = machine.balloon.unwrap();
                let inside = machine.resident_bytes.unwrap() + machine.swapped_bytes.unwrap();
                assert!(inside + balloon.actual_bytes <= machine.size_bytes, "{machine:?}");
            }
        });
    }
}

/// Pauses one machine again and again.
struct Pauses;

impl Strategy for Pauses {
    fn decide(&mut self, snapshot: &Snapshot) -> Vec<Order> {
        let runs = snapshot.machines.iter().find(|machine| !machine.is_paused);
        let order = |machine: &Machine| Order {
            machine: machine.name.clone(),
            action: Action::Pause { for_ms: 500 },
        };
        runs.map(order).into_iter().collect()
    }

    fn admits(&mut self, snapshot: &Snapshot, _size_bytes: u64) -> bool {
        snapshot.machines.is_empty()
    }
}

/// Half of each second: twice the time for the work.
#[test]
fn pauses_take_time_and_end_by_themselves() {
    let (host, equipment) = (HostShape::of(15 * GIB), Equipment::ebb());
    let simulation = Simulation { host, equipment, interval_ms: 1000, duration_ms: 60_000 };
    let trace = Recipe { machines: 1, every_ms: 0, ..Recipe::fleet(5) }.trace();
    let outcome = simulation.observe(&trace, &mut Pauses, |moment| {
        // The pause of the last second has ended.
        assert!(moment.snapshot.machines.iter().all(|machine| !machine.is_paused), "{moment:?}");
    });
    assert_eq!((outcome.troubles.pauses, outcome.troubles.paused_ms), (59, 29_500), "{outcome:?}");
    assert!((1_500..2_500).contains(&outcome.slowdown_milli), "{outcome:?}");
}

/// Machines whose sizes all fit.
#[test]
fn static_limits_slow_nothing_down() {
    let (host, equipment) = (HostShape::of(15 * GIB), Equipment::ebb());
    let simulation = Simulation { host, equipment, interval_ms: 1000, duration_ms: 2_400_000 };
    for seed in SEEDS.into_iter().chain([JUDGING_SEED]) {
        let outcome = simulation.run(&Recipe::fleet(seed).trace(), &mut StaticLimits);
        // Programs grow by 3 GB/s at most, which takes its time on an empty host, too.
        assert!(outcome.slowdown_milli < 1_020, "{outcome:?}");
        assert_eq!((outcome.swap_out_bytes, outcome.host_kills), (0, 0), "{outcome:?}");
        assert_eq!(outcome.troubles.oom_kills, 0, "{outcome:?}");
        assert!(outcome.most_admitted >= 2 && outcome.completed > 0, "{outcome:?}");
    }
}

/// A run depends on the trace and the policy alone.
#[test]
fn runs_are_repeatable() {
    let (host, equipment) = (HostShape::of(8 * GIB), Equipment::ebb());
    let simulation = Simulation { host, equipment, interval_ms: 1000, duration_ms: 300_000 };
    let run = || {
        let mut moments = Vec::new();
        let mut strategy = Anything { state: 7, most: 12 };
        let trace = Recipe::fleet(5).trace();
        let outcome =
            simulation.observe(&trace, &mut strategy, |moment| moments.push(moment.clone()));
        (outcome, moments)
    };
    assert_eq!(run(), run());
}
