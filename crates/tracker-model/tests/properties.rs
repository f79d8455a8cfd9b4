//! The trackers under programs, hosts and timers that come in any order; and each flaw, which has
//! to be found.
//!
//! The flawed variants run through the same functions with the same kind of steps. A flaw that is
//! not found in as many cases as the sound ones have to survive would mean that a property checks
//! nothing.

#![allow(clippy::unwrap_used)]

use ebb_tracker_model::machine::Expected;
use ebb_tracker_model::units::Order;
use ebb_tracker_model::{Answer, Flaw, Kind, Machine, Setup, Step, Violation};
use proptest::prelude::*;
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};

/// Four blocks of the largest order, and an end that is no multiple of anything.
const PAGES: u32 = 4 * 1024 + 512 + 256 + 7;
const CASES: u32 = 400;
/// Entries of the array of `percpu`.
const ENTRIES: usize = 6;

fn setup(kind: Kind, flaw: Flaw, watermark_pages: u32) -> Setup {
    Setup {
        kind,
        flaw,
        pages: PAGES,
        watermark_pages,
        batch_blocks: 2,
        entries: ENTRIES,
        full_above: ENTRIES / 2,
        threshold: 3,
        budget: 1,
    }
}

/// Any free block fills the array of `percpu`.
fn full_soon(flaw: Flaw) -> Setup {
    Setup { entries: 3, full_above: 0, ..setup(Kind::Percpu, flaw, 0) }
}

/// Orders of programs' blocks: single pages, small blocks, huge pages, and those that use no
/// per-CPU list.
fn order() -> impl Strategy<Value = Order> {
    prop_oneof![
        4 => Just(Order(0)),
        2 => (1u8..=8).prop_map(Order),
        4 => Just(Order(9)),
        2 => Just(Order(10)),
    ]
}

fn answer(failures: u32) -> impl Strategy<Value = Answer> {
    prop_oneof![4 => Just(Answer::Discarded), failures => Just(Answer::Failed)]
}

/// What programs do.
fn work() -> impl Strategy<Value = Step> {
    prop_oneof![
        6 => (order(), any::<bool>()).prop_map(|(order, from_top)| Step::Allocate { order, from_top }),
        6 => any::<usize>().prop_map(|index| Step::Free { index }),
        3 => (1usize..6).prop_map(|blocks| Step::Drain { blocks }),
        1 => Just(Step::Land),
    ]
}

/// What the tracker and the host do. `failures`: weight of a failing host.
fn tracking(failures: u32) -> impl Strategy<Value = Step> {
    prop_oneof![
        8 => answer(failures).prop_map(|answer| Step::Advance { answer }),
        3 => any::<usize>().prop_map(|index| Step::HostDiscards { index }),
    ]
}

/// All that can happen.
fn anything() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        12 => work(),
        10 => tracking(1),
        1 => any::<usize>().prop_map(|index| Step::FreePastList { index }),
        1 => Just(Step::Stop),
        1 => Just(Step::Start),
    ];
    prop::collection::vec(step, 1..150)
}

/// What a tracker has to cope with without losing anything.
fn undisturbed(failures: u32) -> impl Strategy<Value = Vec<Step>> {
    prop::collection::vec(prop_oneof![12 => work(), 10 => tracking(failures)], 1..150)
}

/// No page in use is reported, no content is lost, and after a stop all pages are there.
fn is_safe(setup: Setup, steps: &[Step]) -> Result<(), Violation> {
    let mut machine = Machine::new(setup);
    for &step in steps {
        machine.step(step)?;
    }
    machine.finish()
}

/// What is free long enough is reported.
fn reports_all(setup: Setup, steps: &[Step]) -> Result<(), Violation> {
    let mut machine = Machine::new(setup);
    for &step in steps {
        machine.step(step)?;
    }
    machine.settle()?;
    machine.check_reported(Expected::All)
}

/// What is free long enough is reported, or counted as lost.
fn reports_or_counts(setup: Setup, steps: &[Step]) -> Result<(), Violation> {
    let mut machine = Machine::new(setup);
    for &step in steps {
        machine.step(step)?;
    }
    machine.settle()?;
    let losses = machine.losses();
    if losses.lost + losses.not_free + losses.small > 0 {
        return Ok(());
    }
    machine.check_reported(Expected::UsedSinceStart)
}

type Property = fn(Setup, &[Step]) -> Result<(), Violation>;

/// Runs a property over the same cases each time. The first violation that was found, as small as
/// it can be made.
fn search(
    setup: Setup,
    steps: impl Strategy<Value = Vec<Step>>,
    property: Property,
) -> Option<(Violation, Vec<Step>)> {
    let config = Config { cases: CASES, failure_persistence: None, ..Config::default() };
    let mut runner =
        TestRunner::new_with_rng(config, TestRng::deterministic_rng(RngAlgorithm::ChaCha));
    let result = runner.run(&steps, |steps| {
        property(setup, &steps).map_err(|violation| TestCaseError::fail(format!("{violation:?}")))
    });
    match result {
        Ok(()) => None,
        Err(proptest::test_runner::TestError::Fail(_, steps)) => {
            Some((property(setup, &steps).unwrap_err(), steps))
        }
        Err(aborted) => panic!("{aborted}"),
    }
}

const KINDS: [Kind; 3] = [Kind::Percpu, Kind::Bitmap, Kind::Reporting];

#[test]
fn no_page_in_use_is_reported_and_none_is_missing() {
    for kind in KINDS {
        for watermark_pages in [0, 2000] {
            assert_eq!(
                search(setup(kind, Flaw::None, watermark_pages), anything(), is_safe),
                None,
                "{kind:?}"
            );
        }
    }
}

#[test]
fn bitmap_reports_all_that_is_free_long_enough() {
    assert_eq!(search(setup(Kind::Bitmap, Flaw::None, 0), undisturbed(1), reports_all), None);
}

/// With a host that never fails: after a failure the kernel waits for the next free.
#[test]
fn reporting_reports_all_that_is_free_long_enough() {
    assert_eq!(search(setup(Kind::Reporting, Flaw::None, 0), undisturbed(0), reports_all), None);
}

#[test]
fn percpu_counts_what_it_loses() {
    for setup in [setup(Kind::Percpu, Flaw::None, 0), full_soon(Flaw::None)] {
        assert_eq!(search(setup, undisturbed(1), reports_or_counts), None);
    }
}

/// One block in the array and nothing lost: the property above does not hold for want of cases.
#[test]
fn percpu_reports_a_block_that_was_freed() {
    let mut machine = Machine::new(setup(Kind::Percpu, Flaw::None, 0));
    machine.step(Step::Allocate { order: Order::BLOCK, from_top: false }).unwrap();
    machine.step(Step::Free { index: 0 }).unwrap();
    assert!(
        matches!(machine.check_reported(Expected::UsedSinceStart), Ok(())),
        "it is in the per-CPU list"
    );
    machine.step(Step::Drain { blocks: 1 }).unwrap();
    assert!(matches!(
        machine.check_reported(Expected::UsedSinceStart),
        Err(Violation::NeverReported(_))
    ));
    machine.settle().unwrap();
    machine.check_reported(Expected::UsedSinceStart).unwrap();
    assert_eq!((machine.losses().frees, machine.losses().captured), (1, 1));
}

/// Pages of a block that are freed one after the other need one entry, however many they are.
#[test]
fn percpu_needs_one_entry_for_a_block() {
    let mut machine = Machine::new(setup(Kind::Percpu, Flaw::None, 0));
    let pages = Order::BLOCK.pages();
    // The smallest free blocks are used first.
    let others = PAGES % pages;
    for _ in 0..others + pages {
        machine.step(Step::Allocate { order: Order(0), from_top: false }).unwrap();
    }
    for index in (others..others + pages).rev() {
        machine.step(Step::Free { index: index as usize }).unwrap();
        machine.step(Step::Drain { blocks: 1 }).unwrap();
    }
    let losses = machine.losses();
    assert_eq!((losses.frees, losses.captured, losses.again), (pages, 1, pages - 1));
    machine.settle().unwrap();
    machine.check_reported(Expected::UsedSinceStart).unwrap();
}

/// Free blocks that cannot be merged fill the array, and the thread does not get its turn.
#[test]
fn percpu_loses_frees_between_a_full_array_and_its_thread() {
    let mut machine = Machine::new(setup(Kind::Percpu, Flaw::None, 0));
    machine.step(Step::Allocate { order: Order::BLOCK, from_top: false }).unwrap();
    for _ in 0..2 * ENTRIES {
        machine.step(Step::Allocate { order: Order(8), from_top: false }).unwrap();
    }
    // Halves of blocks are taken in ascending order. Every second one, so that none of them finds
    // its buddy free, and no entry stands for two of them.
    for index in (0..ENTRIES).rev().map(|nth| 2 * nth + 1) {
        machine.step(Step::Free { index }).unwrap();
        machine.step(Step::Land).unwrap();
    }
    assert_eq!((machine.losses().captured, machine.losses().lost), (6, 0));
    machine.step(Step::Free { index: 0 }).unwrap();
    machine.step(Step::Drain { blocks: 1 }).unwrap();
    assert_eq!((machine.losses().captured, machine.losses().lost), (6, 1));
    machine.settle().unwrap();
    // The last one was not in the free lists yet when it filled the array.
    assert_eq!((machine.losses().small, machine.losses().not_free), (5, 1));
    assert!(matches!(
        machine.check_reported(Expected::UsedSinceStart),
        Err(Violation::NeverReported(_))
    ));
}

/// A flaw that lets pages in use be discarded.
fn is_unsafe(kind: Kind, flaw: Flaw) {
    let found = search(setup(kind, flaw, 0), anything(), is_safe);
    assert!(
        matches!(found, Some((Violation::ReportedInUse(_) | Violation::ContentLost(_), _))),
        "{kind:?} with {flaw:?}: {found:?}"
    );
}

#[test]
fn reporting_before_isolating_is_found() {
    for kind in KINDS {
        is_unsafe(kind, Flaw::ReportBeforeIsolate);
    }
}

#[test]
fn isolating_without_checking_is_found() {
    is_unsafe(Kind::Percpu, Flaw::IsolateUnchecked);
    is_unsafe(Kind::Bitmap, Flaw::IsolateUnchecked);
}

#[test]
fn putting_back_before_the_answer_is_found() {
    for kind in KINDS {
        is_unsafe(kind, Flaw::PutBackEarly);
    }
}

#[test]
fn stopping_with_blocks_in_hand_is_found() {
    for kind in KINDS {
        let found = search(setup(kind, Flaw::StopForgets, 0), anything(), is_safe);
        assert!(matches!(found, Some((Violation::PagesMissing { .. }, _))), "{kind:?}: {found:?}");
    }
}

#[test]
fn what_never_gets_reported_is_found() {
    let flaws = [
        (Kind::Bitmap, Flaw::FailureForgotten),
        (Kind::Bitmap, Flaw::NoLeftoverWalk),
        (Kind::Bitmap, Flaw::NoSecondWalk),
        (Kind::Bitmap, Flaw::NoSeeding),
        (Kind::Bitmap, Flaw::NoSecondLook),
        (Kind::Reporting, Flaw::FlagOutlivesAllocation),
        (Kind::Reporting, Flaw::FlagOnMerged),
        (Kind::Reporting, Flaw::BudgetEndsAll),
    ];
    for (kind, flaw) in flaws {
        let failures = u32::from(kind == Kind::Bitmap);
        let found = search(setup(kind, flaw, 0), undisturbed(failures), reports_all);
        assert!(
            matches!(found, Some((Violation::NeverReported(_), _))),
            "{kind:?} with {flaw:?}: {found:?}"
        );
    }
}

#[test]
fn an_entry_that_stands_for_a_block_after_its_turn_is_found() {
    let flawed = setup(Kind::Percpu, Flaw::LastEntryKept, 0);
    let found = search(flawed, undisturbed(1), reports_or_counts);
    assert!(matches!(found, Some((Violation::NeverReported(_), _))), "{found:?}");
}

#[test]
fn uncounted_losses_are_found() {
    let found = search(full_soon(Flaw::LossUncounted), undisturbed(1), reports_or_counts);
    assert!(matches!(found, Some((Violation::LossesUncounted(_), _))), "{found:?}");
}
