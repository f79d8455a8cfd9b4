//! The switchover: which side runs the guest.

use std::io::{Write, sink};

use ebb_migration::testing::{Activity, Hooks, SimDirty, SimGuest, SimMemory};
use ebb_migration::{BoxError, Cancel, MigrationError, Precopy, RoundSync, Switchover};

use crate::move_it::{REGIONS, Trial};

/// A destination that confirms every round.
struct Content;

impl RoundSync for Content {
    fn wait_round_done(&mut self, _round: u32) -> Result<(), BoxError> {
        Ok(())
    }
}

/// Sends a guest's memory to no destination; `then` decides the switchover.
fn hand_over(then: impl FnOnce(Switchover<'_>, &Hooks)) -> Hooks {
    let hooks = Hooks::new(
        &REGIONS,
        3,
        Activity { steps: 100, burst: 2, cancel_after: None },
        &Cancel::new(),
    );
    let precopy = Precopy {
        config: Trial::default().config,
        memory: &SimMemory(hooks.clone()),
        dirty: &mut SimDirty(hooks.clone()),
        guest: &mut SimGuest(hooks.clone()),
        free_pages: None,
        streams: vec![Box::new(sink()) as Box<dyn Write + Send>],
        round_sync: &mut Content,
        observer: &mut |_| {},
        cancel: Cancel::new(),
    };
    then(precopy.run().unwrap(), &hooks);
    hooks
}

#[test]
fn a_guest_stays_paused_without_a_decision() {
    let hooks = hand_over(|switchover, _| drop(switchover));
    assert!(hooks.world().is_paused() && !hooks.world().is_armed());
    let hooks = hand_over(|switchover, _| {
        assert!(switchover.stay_paused().rounds > 1);
    });
    assert!(hooks.world().is_paused() && !hooks.world().is_armed());
}

#[test]
fn a_release_leaves_the_log_enabled() {
    let hooks = hand_over(|switchover, hooks| {
        let (_, log) = switchover.release();
        assert!(hooks.world().is_armed());
        drop(log);
        assert!(!hooks.world().is_armed());
    });
    assert!(hooks.world().is_paused());
}

#[test]
fn a_guest_that_the_destination_does_not_run_is_resumed_here() {
    let hooks = hand_over(|switchover, _| {
        let (error, report) = switchover.resume_source(MigrationError::Cancelled);
        assert!(matches!(error, MigrationError::Cancelled) && report.rounds > 1);
    });
    hooks.world().check_unharmed();
}
