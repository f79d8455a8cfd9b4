use proptest::option;
use proptest::prelude::*;

use super::*;

const MIB: u64 = 1 << 20;
const KEEP: u64 = 32 * MIB;

fn sample(available_mib: u64, balloon_mib: u64) -> Sample {
    let statistics = StatisticsValues {
        available_memory_bytes: Some(available_mib * MIB),
        disk_caches_bytes: Some(100 * MIB),
        major_faults: Some(1000),
        swap_in_bytes: Some(MIB),
        oom_kills: Some(1),
        ..StatisticsValues::default()
    };
    Sample { statistics, balloon_bytes: balloon_mib * MIB, on_the_way_bytes: 0 }
}

#[test]
fn a_pulse_takes_all_but_what_the_guest_keeps() {
    let first = sample(800, 100);
    assert_eq!(next(&first, &first, &first, 100 * MIB, KEEP, 0), Next::Inflate(868 * MIB));
    // Under way, and then at the target with more than was expected.
    let now = sample(500, 400);
    assert_eq!(next(&first, &first, &now, 868 * MIB, KEEP, 0), Next::Wait);
    let now = sample(72, 868);
    assert_eq!(next(&first, &first, &now, 868 * MIB, KEEP, 0), Next::Inflate(908 * MIB));
    let now = sample(36, 904);
    assert_eq!(next(&first, &first, &now, 908 * MIB, KEEP, 0), Next::Done);
}

#[test]
fn a_guest_that_answers_late_is_waited_for() {
    let mut late = Unanswered::new(64 * MIB);
    assert_eq!([(); 5].map(|()| late.is_late(64 * MIB)), [true, true, true, true, false]);
    // As long as its balloon grows, however slowly, it is not given up; a smaller one is no sign.
    let mut late = Unanswered::new(0);
    assert!((1..100).all(|pages| late.is_late(pages * 4096)));
    assert_eq!([(); 5].map(|()| late.is_late(4096)), [true, true, true, true, false]);
}

#[test]
fn a_guest_that_needs_its_memory_ends_the_pulse() {
    let first = sample(800, 0);
    let halfway = sample(400, 400);
    let decide = |now: &Sample| next(&first, &halfway, now, 768 * MIB, KEEP, 0);
    assert_eq!(decide(&halfway), Next::Wait);
    let with = |change: &dyn Fn(&mut StatisticsValues)| {
        let mut now = halfway;
        change(&mut now.statistics);
        decide(&now)
    };
    let needed = |next| matches!(next, Next::Needed(_));
    assert!(needed(with(&|values| values.available_memory_bytes = Some(380 * MIB))));
    let on_the_way = Sample { on_the_way_bytes: 30 * MIB, ..sample(370, 400) };
    assert_eq!(decide(&on_the_way), Next::Wait);
    // All is taken from the guest, but has not arrived: giving it back now would discard nothing.
    let on_the_way = Sample { on_the_way_bytes: 368 * MIB, ..sample(32, 400) };
    assert_eq!(decide(&on_the_way), Next::Wait);
    // Less than it keeps is available: for a moment, or because its programs take it.
    let on_the_way = Sample { on_the_way_bytes: 376 * MIB, ..sample(11, 400) };
    let decide = |looks| next(&first, &halfway, &on_the_way, 776 * MIB, 24 * MIB, looks);
    assert_eq!(decide(STARVED_LOOKS - 1), Next::Wait);
    assert!(matches!(decide(STARVED_LOOKS), Next::Needed(_)));
    let on_the_way = Sample { on_the_way_bytes: 368 * MIB, ..sample(15, 400) };
    assert!(needed(next(&first, &halfway, &on_the_way, 768 * MIB, KEEP, 0)));
    assert!(needed(with(&|values| values.oom_kills = Some(2))));
    assert!(needed(with(&|values| values.swap_in_bytes = Some(MIB + 4096))));
    assert!(needed(with(&|values| values.major_faults = Some(1200))));
    assert!(needed(with(&|values| values.disk_caches_bytes = Some(120 * MIB))));
    // Not less than the estimates' errors.
    assert_eq!(with(&|values| values.available_memory_bytes = Some(390 * MIB)), Next::Wait);
    assert_eq!(with(&|values| values.major_faults = Some(1100)), Next::Wait);
    assert_eq!(with(&|values| values.disk_caches_bytes = Some(10 * MIB)), Next::Wait);
    // Values that a guest does not report are no sign of anything, but one is necessary.
    assert_eq!(with(&|values| values.oom_kills = None), Next::Wait);
    let unknown = with(&|values| values.available_memory_bytes = None);
    assert_eq!(unknown, Next::Unknown("available memory"));
}

fn any_sample() -> impl Strategy<Value = Sample> {
    let value = || option::weighted(0.9, prop_oneof![0..64 * MIB, any::<u64>()]);
    (value(), value(), value(), value(), value(), any::<u64>()).prop_map(
        |(available, caches, faults, swapped, kills, balloon_bytes)| Sample {
            statistics: StatisticsValues {
                available_memory_bytes: available,
                disk_caches_bytes: caches,
                major_faults: faults,
                swap_in_bytes: swapped,
                oom_kills: kills,
                ..StatisticsValues::default()
            },
            balloon_bytes,
            on_the_way_bytes: balloon_bytes.rotate_left(7),
        },
    )
}

proptest! {
    /// Any guest: no panic, the target only grows, and by no more than the guest says it can give.
    #[test]
    fn a_guest_never_gives_more_than_it_has(
        first in any_sample(),
        last in any_sample(),
        now in any_sample(),
        target in any::<u64>(),
        keep in any::<u64>(),
    ) {
        if let Next::Inflate(bytes) = next(&first, &last, &now, target, keep, 0) {
            let available = now.statistics.available_memory_bytes.unwrap();
            prop_assert!(bytes > target);
            prop_assert!(bytes - now.balloon_bytes <= available - keep);
        }
    }

    /// A guest that does as it is told, with any part of its memory in use: the pulse ends after a
    /// few steps, and what it keeps is never touched.
    #[test]
    fn a_pulse_of_an_idle_guest_ends(
        memory in 0..4096 * MIB,
        keep in 0..1024 * MIB,
        steps in 1..20u64,
    ) {
        let at = |balloon_bytes: u64| Sample {
            statistics: StatisticsValues {
                available_memory_bytes: Some(memory.saturating_sub(balloon_bytes)),
                ..StatisticsValues::default()
            },
            balloon_bytes,
            on_the_way_bytes: 0,
        };
        let (first, mut now, mut target) = (at(0), at(0), 0);
        for _ in 0..2 * steps + 2 {
            let last = now;
            match next(&first, &last, &now, target, keep, 0) {
                Next::Inflate(bytes) => target = bytes,
                Next::Wait => now = at((now.balloon_bytes + target.div_ceil(steps)).min(target)),
                Next::Done => {
                    prop_assert!(memory - now.balloon_bytes >= keep.min(memory));
                    return Ok(());
                }
                other => prop_assert!(false, "{other:?}"),
            }
        }
        prop_assert!(false, "the pulse does not end");
    }
}
