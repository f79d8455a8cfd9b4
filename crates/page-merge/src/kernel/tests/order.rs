//! The order of changes.

use proptest::prelude::*;

use super::*;
use crate::kernel::change::{Action, plan};

fn present() -> Values {
    Copy::new().ksm().settings().unwrap()
}

#[test]
fn unchanged_values_are_not_written() {
    assert_eq!(plan(&present(), &present()).unwrap(), []);
    assert_eq!(plan(&present(), &Values::new()).unwrap(), []);
}

#[test]
fn everything_is_unmerged_before_nodes_are_kept_apart() {
    let steps = plan(&present(), &merge_apart().with(Knob::PagesToScan, 1000)).unwrap();
    assert_eq!(
        steps,
        [
            Action::Unmerge,
            Action::Write(Knob::MergeAcrossNodes, 0),
            Action::Write(Knob::PagesToScan, 1000),
            Action::Write(Knob::Run, RUN_MERGE),
        ]
    );
}

#[test]
fn merging_continues_after_a_change_that_stopped_it() {
    let running = present().with(Knob::Run, RUN_MERGE);
    let steps = plan(&running, &Values::new().with(Knob::MaxPageSharing, 2)).unwrap();
    assert_eq!(
        steps,
        [
            Action::Unmerge,
            Action::Write(Knob::MaxPageSharing, 2),
            Action::Write(Knob::Run, RUN_MERGE)
        ]
    );
    let unmerging = Values::new().with(Knob::MaxPageSharing, 2).with(Knob::Run, RUN_UNMERGE);
    assert_eq!(
        plan(&running, &unmerging).unwrap(),
        [Action::Unmerge, Action::Write(Knob::MaxPageSharing, 2)]
    );
    assert_eq!(
        plan(&running, &Values::new().with(Knob::Run, RUN_UNMERGE)).unwrap(),
        [Action::Unmerge]
    );
}

#[test]
fn the_advisor_is_turned_off_before_its_pages_are_set() {
    let advised = present().with(Knob::AdvisorMode, ADVISOR_SCAN_TIME).with(Knob::PagesToScan, 700);
    let wanted = Values::new().with(Knob::AdvisorMode, ADVISOR_NONE).with(Knob::PagesToScan, 700);
    // It is written although it is 700 now: the kernel resets it when the advisor is turned off.
    assert_eq!(
        plan(&advised, &wanted).unwrap(),
        [Action::Write(Knob::AdvisorMode, ADVISOR_NONE), Action::Write(Knob::PagesToScan, 700)]
    );
    assert_eq!(plan(&advised, &Values::new().with(Knob::PagesToScan, 5)).unwrap(), []);
}

/// The settings that `steps` change.
fn touched(steps: &[Action]) -> Vec<Knob> {
    let of = |step: &Action| match step {
        // Turning the advisor on or off changes the number of pages.
        Action::Write(Knob::AdvisorMode, _) => vec![Knob::AdvisorMode, Knob::PagesToScan],
        Action::Write(knob, _) => vec![*knob],
        Action::Unmerge => vec![Knob::Run],
    };
    steps.iter().flat_map(of).collect()
}

fn any_values() -> impl Strategy<Value = Values> {
    let run = proptest::option::of(0_u64..3);
    let bit = || proptest::option::of(0_u64..2);
    let number = || proptest::option::of(2_u64..6);
    (run, number(), bit(), number(), bit(), bit(), number()).prop_map(
        |(run, pages, across, sharing, zero, advisor, cpu)| {
            let values = [
                (Knob::Run, run),
                (Knob::PagesToScan, pages),
                (Knob::MergeAcrossNodes, across),
                (Knob::MaxPageSharing, sharing),
                (Knob::UseZeroPages, zero),
                (Knob::AdvisorMode, advisor),
                (Knob::AdvisorMaxCpu, cpu),
            ];
            values.into_iter().filter_map(|(knob, value)| Some((knob, value?))).collect()
        },
    )
}

/// Linux's behaviour on a write (mm/ksm.c); `Err` if it refuses.
fn linux(state: &mut Values, shared: &mut u64, step: Action) -> Result<(), &'static str> {
    match step {
        Action::Unmerge => {
            *shared = 0;
            state.set(Knob::Run, RUN_UNMERGE);
        }
        Action::Write(knob, _) if knob.needs_nothing_shared() && *shared > 0 => {
            return Err("EBUSY");
        }
        Action::Write(Knob::PagesToScan, _)
            if state.get(Knob::AdvisorMode) == Some(ADVISOR_SCAN_TIME) =>
        {
            return Err("EINVAL");
        }
        Action::Write(Knob::AdvisorMode, ADVISOR_NONE) => {
            state.set(Knob::AdvisorMode, ADVISOR_NONE);
            state.set(Knob::PagesToScan, 100);
        }
        Action::Write(knob, value) => {
            state.set(knob, value);
            if knob == Knob::Run && value == RUN_MERGE {
                *shared = 5;
            }
        }
    }
    Ok(())
}

proptest! {
    /// Every change is accepted, changes exactly the requested settings, and can be undone by
    /// requesting the previous ones.
    #[test]
    fn every_change_is_accepted_and_can_be_undone(start in any_values(), wanted in any_values()) {
        let before: Values = present().iter().chain(start.iter()).collect();
        let (mut state, mut shared) = (before, 5);
        let steps = plan(&before, &wanted).unwrap();
        for step in &steps {
            prop_assert_eq!(linux(&mut state, &mut shared, *step), Ok(()));
        }
        let advised = |state: &Values| state.get(Knob::AdvisorMode) == Some(ADVISOR_SCAN_TIME);
        for (knob, value) in wanted.iter() {
            if knob != Knob::PagesToScan || !advised(&state) {
                prop_assert_eq!(state.get(knob), Some(value), "{:?}", knob);
            }
        }
        for knob in Knob::ALL.into_iter().filter(|knob| !touched(&steps).contains(knob)) {
            prop_assert_eq!(state.get(knob), before.get(knob), "{:?}", knob);
        }
        for step in plan(&state, &before).unwrap() {
            prop_assert_eq!(linux(&mut state, &mut shared, step), Ok(()));
        }
        for knob in Knob::ALL {
            if knob != Knob::PagesToScan || !advised(&before) {
                prop_assert_eq!(state.get(knob), before.get(knob), "{:?}", knob);
            }
        }
    }
}
