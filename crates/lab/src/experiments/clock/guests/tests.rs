//! Evaluation of samples and stops; the samples themselves need a guest.

use super::*;
use crate::report::results::Series;
use ebb_agent::clock_watch::{CpuReport, Steps};
use ebb_vmm::api::{ClockInfo, ClockInstant};

const MS: i64 = 1_000_000;

fn known(low_ns: i64, high_ns: i64) -> Interval {
    Interval::between(low_ns, high_ns)
}

/// A sample of a guest whose clocks are `ahead_ns` ahead of the host's, known to within a tenth of
/// a millisecond.
fn look(at_s: f64, ahead_ns: i64) -> Look {
    let ahead = known(ahead_ns - MS / 10, ahead_ns + MS / 10);
    Look {
        at_s,
        monotonic: ahead,
        real: ahead,
        seen: true,
        smallest_ns: 5_000 * MS + (at_s * 1e9) as i64,
    }
}

fn stop(asked: Interval, stopped: (u64, u64), started: (u64, u64)) -> Stop {
    let instant = |(clock_ns, realtime_ns)| Some(ClockInstant { clock_ns, realtime_ns });
    Stop {
        asked,
        reported: ClockInfo {
            stopped: instant(stopped),
            started: instant(started),
            ..ClockInfo::default()
        },
    }
}

fn pause(before: Look, after: Look, stopped_ns: i64) -> Cycle {
    let stopped =
        Stopped { time: known(stopped_ns, stopped_ns), kvm_error_ns: Some(3), agrees: true };
    Cycle {
        kind: Kind::Pause,
        planned: Duration::ZERO,
        before,
        after,
        stopped,
        gap_ns: 0,
        cost: None,
    }
}

fn record(policy: ClockPolicy, cycles: Vec<Cycle>) -> Record {
    let cpu = CpuReport { warps: Steps { count: 2, largest: 40 }, ..CpuReport::default() };
    Record {
        policy,
        cycles,
        watched: WatchReport { cpus: vec![cpu, cpu] },
        clock_source: "kvm-clock".to_owned(),
        console_only: None,
        complaints: Vec::new(),
    }
}

fn shown(record: Record) -> Series {
    let mut series = Series::new("guest-continue", String::new());
    crate::experiments::clock::show_guest(record, &mut series);
    series
}

#[test]
fn the_monitors_report_of_a_stop_is_used_if_it_is_consistent() {
    let asked = known(90, 120);
    let reported = |policy| Stopped::by(&stop(asked, (500, 1_000), (507, 1_100)), policy);
    assert_eq!(
        reported(ClockPolicy::Continue),
        Stopped { time: known(100, 100), kvm_error_ns: Some(7), agrees: true }
    );
    assert_eq!(reported(ClockPolicy::CatchUp).kvm_error_ns, Some(-93));
    let late = Stopped::by(&stop(asked, (500, 1_000), (500, 1_121)), ClockPolicy::Continue);
    assert_eq!(late, Stopped { time: asked, kvm_error_ns: None, agrees: false });
    let silent = Stop { asked, reported: ClockInfo::default() };
    let silent = Stopped::by(&silent, ClockPolicy::CatchUp);
    assert_eq!(silent, Stopped { time: asked, kvm_error_ns: None, agrees: true });
}

#[test]
fn the_error_is_the_deviation_from_the_policy() {
    let (before, after) = (look(0.0, 0), look(1.0, -100 * MS));
    let cycle = pause(before, after, 98 * MS);
    assert_eq!(cycle.error(ClockPolicy::Continue), known(-2 * MS - MS / 5, -2 * MS + MS / 5));
    assert_eq!(cycle.error(ClockPolicy::CatchUp).middle_ns(), -100 * MS);
}

#[test]
fn gaps_of_readers_are_expected_in_guests_that_catch_up() {
    let cycle = Cycle { gap_ns: 105, ..pause(look(0.0, 0), look(1.0, 0), 100) };
    assert_eq!(cycle.gap_beyond_ns(ClockPolicy::CatchUp), 5);
    assert_eq!(cycle.gap_beyond_ns(ClockPolicy::Continue), 105);
}

#[test]
fn metrics_follow_from_the_cycles() {
    // The guest loses both pauses, and jumps ahead by 4 ms at the second.
    let looks = [look(0.0, 0), look(1.0, -50 * MS), look(2.0, -146 * MS)];
    let cycles = vec![pause(looks[0], looks[1], 50 * MS), pause(looks[1], looks[2], 100 * MS)];
    let series = shown(record(ClockPolicy::Continue, cycles));
    let metric = |name: &str| series.metrics[name];
    let ms = |ns: i64| Some(ns as f64);
    assert_eq!(metric("pause_error_max_ns"), ms(4 * MS));
    assert_eq!(metric("pause_error_ns"), ms(2 * MS));
    assert_eq!(metric("pause_uncertainty_ns"), ms(MS / 5));
    // The certain part of the jump.
    assert_eq!(metric("max_jump_ns"), ms(4 * MS - MS / 5));
    assert_eq!(metric("wall_error_ns"), ms(4 * MS));
    assert_eq!(metric("min_system_time_ns"), ms(5_000 * MS));
    assert_eq!(metric("kvm_error_ns"), Some(3.0));
    assert_eq!((metric("warps"), metric("backward_steps")), (Some(4.0), Some(0.0)));
    assert_eq!(metric("restore_error_ns"), None);
    assert!(series.notes.iter().any(|note| note.contains("CPU 0: 2 warps")), "{:?}", series.notes);
    // One is certainly within 1 ms of the policy, one certainly not.
    let row = &series.tables[0].rows[0];
    assert_eq!(row[row.len() - 3..], [1_u64, 1, 1].map(crate::report::figures::Value::from));
    let curve = &series.drawings[0].curves[0];
    assert_eq!(curve.points, [(1.0, 0.0), (2.0, 4.0)]);
}

#[test]
fn a_guest_that_did_not_start_leaves_the_metrics_empty() {
    let series = shown(record(ClockPolicy::Continue, Vec::new()));
    assert!(series.metrics.values().all(Option::is_none), "{:?}", series.metrics);
}
