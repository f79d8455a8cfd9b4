//! Policies side by side on the traces that they may be tuned with, or, with the argument `judge`,
//! on the one that counts; with `slow`, programs take memory at 200 MB/s, as on processors that are
//! shared or emulated.

use ebb_fleet_model::strategy::{Deficit, Ebbd, IdleTarget, Law, StaticLimits};
use ebb_fleet_model::trace::{JUDGING_SEED, SEEDS};
use ebb_fleet_model::{Equipment, HostShape, Recipe, Simulation, Strategy};
use ebb_host_policy::{GIB, MIB};

fn main() {
    let is_said = |word: &str| std::env::args().any(|said| said == word);
    let (host, mut equipment) = (HostShape::of(15 * GIB), Equipment::ebb());
    if is_said("slow") {
        equipment.growth_rate = 200_000_000;
    }
    let simulation = Simulation { host, equipment, interval_ms: 1000, duration_ms: 2_400_000 };
    println!(
        "{:>4} {:<26} {:>8} {:>9} {:>8} {:>10} {:>9} {:>9} {:>6} {:>6} {:>8}",
        "seed",
        "policy",
        "admitted",
        "completed",
        "slowdown",
        "host kills",
        "OOM kills",
        "swap MiB",
        "orders",
        "pauses",
        "paused s"
    );
    let experienced = Ebbd::with_history_of(&simulation, &Recipe::history());
    let judged = [JUDGING_SEED];
    let seeds = if is_said("judge") { &judged[..] } else { &SEEDS };
    for &seed in seeds {
        let trace = Recipe::fleet(seed).trace();
        for (name, interval_ms, mut strategy) in policies(&experienced) {
            let outcome = Simulation { interval_ms, ..simulation }.run(&trace, &mut *strategy);
            println!(
                "{seed:>4} {name:<26} {:>8.2} {:>9} {:>8.3} {:>10} {:>9} {:>9} {:>6} {:>6} {:>8.1}",
                outcome.admitted_milli as f64 / 1000.0,
                outcome.completed,
                outcome.slowdown_milli as f64 / 1000.0,
                outcome.host_kills,
                outcome.troubles.oom_kills,
                outcome.swap_out_bytes / MIB,
                outcome.orders,
                outcome.troubles.pauses,
                outcome.troubles.paused_ms as f64 / 1000.0
            );
        }
    }
}

/// Names, intervals in milliseconds, and policies. A faster interval is fair to simple policies,
/// since the last ones make urgent decisions ten times a second.
fn policies(experienced: &Ebbd) -> Vec<(String, u64, Box<dyn Strategy>)> {
    let idle = IdleTarget {
        keep_bytes: GIB,
        idle_ms: 20_000,
        fails_open_ms: Some(100_000),
        admission_bytes: 8 * GIB,
        ..IdleTarget::arcbox()
    };
    let mut all: Vec<(String, u64, Box<dyn Strategy>)> = vec![
        ("static".to_owned(), 1000, Box::new(StaticLimits)),
        ("idle target".to_owned(), 1000, Box::new(idle)),
    ];
    for (wanted, admission) in [(2, 8), (5, 10), (5, 12)] {
        let deficit = Deficit {
            law: Law::Change,
            wanted_bytes: wanted * GIB,
            keep_bytes: 512 * MIB,
            admission_bytes: admission * GIB,
        };
        for interval_ms in [1000, 100] {
            let name = format!("deficit {wanted} GiB, {admission}, {interval_ms} ms");
            all.push((name, interval_ms, Box::new(deficit)));
        }
    }
    all.push(("ebbd".to_owned(), 1000, Box::new(Ebbd::default())));
    all.push(("ebbd, with history".to_owned(), 1000, Box::new(experienced.clone())));
    all
}
