//! What traces are like.

#![allow(clippy::unwrap_used)]

use ebb_fleet_model::trace::{Activity, Honesty, JUDGING_SEED, Kind, MachineTrace, Recipe, SEEDS};

fn all(kind: Kind) -> Vec<MachineTrace> {
    let traces = SEEDS.iter().flat_map(|seed| Recipe::fleet(*seed).trace().machines);
    traces.filter(|machine| machine.kind == kind).collect()
}

fn median(values: impl Iterator<Item = u64>) -> u64 {
    let mut values: Vec<u64> = values.collect();
    values.sort_unstable();
    values[values.len() / 2]
}

#[test]
fn agents_are_like_those_that_were_measured() {
    let agents = all(Kind::Agent);
    assert!(agents.len() > 900, "{}", agents.len());
    let peak = median(agents.iter().map(|agent| 10 * agent.most_bytes() / agent.mean_bytes()));
    assert!((135..165).contains(&peak), "{peak} tenths");
    let work = |agent: &MachineTrace| {
        let work = agent.phases.iter().filter(|phase| phase.activity == Activity::Work);
        100 * work.map(|phase| phase.duration_ms).sum::<u64>() / agent.duration_ms()
    };
    let percent = median(agents.iter().map(work));
    assert!((50..75).contains(&percent), "{percent} %");
    for agent in &agents {
        assert!(agent.most_bytes() < agent.size_bytes);
    }
}

#[test]
fn all_kinds_are_there_and_fit_their_machines() {
    for kind in [Kind::Service, Kind::Leak, Kind::Files] {
        let machines = all(kind);
        assert!(machines.len() > 20, "{kind:?}: {}", machines.len());
        assert!(machines.iter().all(|machine| machine.most_bytes() < machine.size_bytes));
    }
    let machines = SEEDS.iter().flat_map(|seed| Recipe::fleet(*seed).trace().machines);
    let dishonest = machines.filter(|machine| machine.statistics != Honesty::Honest).count();
    assert!((40..120).contains(&dishonest), "{dishonest}");
}

/// Results are comparable only if traces do not change, and no policy is tuned with the fourth.
#[test]
fn a_seed_gives_the_same_trace_for_ever() {
    let sum = |seed: u64| {
        let text = serde_json::to_string(&Recipe::fleet(seed).trace()).unwrap();
        twox_hash::XxHash3_64::oneshot(text.as_bytes())
    };
    let sums = [SEEDS[0], SEEDS[1], SEEDS[2], JUDGING_SEED].map(sum);
    assert_eq!(
        sums.map(|sum| format!("{sum:016x}")),
        ["8ed3bce1ebc663e6", "c32a6e1611546503", "29d8eecf4e087084", "584b8235acca4bd0"]
    );
}
