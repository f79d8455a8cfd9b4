//! A decision for ten thousand machines, and how many more fit beside them.

use criterion::{Criterion, criterion_group, criterion_main};
use ebb_host_policy::{
    Balloon, GIB, Host, MIB, Machine, Mean, Settings, Snapshot, State, Statistics, decide, fit,
};

const MACHINES: u64 = 10_000;

fn snapshot(at_ms: u64, available_percent: u64) -> Snapshot {
    let total_bytes = MACHINES * GIB;
    let machine = |number: u64| {
        let means = [Mean::Reporting, Mean::Reclaim, Mean::Park, Mean::Balloon];
        Machine {
            name: format!("machine-{number}"),
            size_bytes: 4 * GIB,
            resident_bytes: Some(300 * MIB + number % 97 * 8 * MIB),
            swapped_bytes: Some(0),
            processor_ms: Some(if number.is_multiple_of(3) { at_ms } else { 0 }),
            is_paused: false,
            balloon: Some(Balloon::default()),
            statistics: Some(Statistics {
                taken_ms: at_ms,
                total_bytes: Some(4 * GIB - 80 * MIB),
                available_bytes: Some(4 * GIB - 200 * MIB),
                free_bytes: Some(3 * GIB),
                caches_bytes: Some(500 * MIB),
                major_faults: Some(0),
                swap_out_bytes: Some(0),
                oom_kills: Some(0),
            }),
            means: means.into_iter().collect(),
        }
    };
    let available_bytes = total_bytes / 100 * available_percent;
    let host = Host { total_bytes, available_bytes, swap: None, pressure: None };
    Snapshot { at_ms, host, machines: (0..MACHINES).map(machine).collect() }
}

fn benches(criterion: &mut Criterion) {
    let settings = Settings::default();
    let state = (0..20).fold(State::default(), |state, second| {
        decide(&snapshot(1000 * second, 60), state, &settings).state
    });
    for (name, percent) in [("plenty", 60), ("pressed", 10), ("emergency", 2)] {
        let now = snapshot(20_000, percent);
        criterion.bench_function(&format!("decide/{name}"), |bencher| {
            let decision = || decide(&now, state.clone(), &settings);
            bencher.iter(decision);
        });
    }
    let now = snapshot(20_000, 60);
    criterion.bench_function("fit", |bencher| {
        bencher.iter(|| fit(&now, &state, &settings, "default", 4 * GIB, 1));
    });
}

criterion_group!(decisions, benches);
criterion_main!(decisions);
