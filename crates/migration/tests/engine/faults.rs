//! Failures of the engine's surroundings: the guest continues, and the error names the cause.

use std::cell::Cell;
use std::io::{Read, Write};

use ebb_abi::PageRange;
use ebb_guest_ram::PageBitmap;
use ebb_migration::testing::{
    Activity, Hooks, Link, SimDirty, SimGuest, SimHints, SimMemory, TestTarget, link,
};
use ebb_migration::{
    BoxError, Cancel, DirtySource, Failure, FreePageSource, Guest, HintReceiver, MigrationError,
    Precopy, Receiver, Report, SourceMemory, TargetMemory,
};

use crate::move_it::{REGIONS, Trial};

/// The operation that fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fault {
    Arm,
    Sync,
    Clear,
    Held,
    Read,
    Pause,
    Resume,
    Disarm,
    Ask,
    Write,
}

/// An implementation with a fault.
struct Faulty<T>(T, Fault);

impl<T> Faulty<T> {
    fn fail(&self, fault: Fault) -> Result<(), BoxError> {
        if self.1 == fault { Err(format!("{fault:?} does not work").into()) } else { Ok(()) }
    }
}

impl DirtySource for Faulty<SimDirty> {
    fn arm(&mut self) -> Result<(), BoxError> {
        self.0.arm()?;
        self.fail(Fault::Arm)
    }

    fn sync(&mut self, found: &mut PageBitmap) -> Result<(), BoxError> {
        self.fail(Fault::Sync)?;
        self.0.sync(found)
    }

    fn clear(&mut self, range: PageRange) -> Result<(), BoxError> {
        self.fail(Fault::Clear)?;
        self.0.clear(range)
    }

    fn disarm(&mut self) -> Result<(), BoxError> {
        self.0.disarm()?;
        self.fail(Fault::Disarm)
    }
}

impl SourceMemory for Faulty<SimMemory> {
    fn regions(&self) -> Vec<PageRange> {
        self.0.regions()
    }

    fn held(&self, range: PageRange, held: &mut Vec<PageRange>) -> Result<(), BoxError> {
        self.fail(Fault::Held)?;
        self.0.held(range, held)
    }

    fn read(&self, range: PageRange, bytes: &mut [u8]) -> Result<(), BoxError> {
        self.fail(Fault::Read)?;
        self.0.read(range, bytes)
    }
}

impl Guest for Faulty<SimGuest> {
    fn flush(&mut self) -> Result<(), BoxError> {
        self.0.flush()
    }

    fn pause_and_save(&mut self) -> Result<(), BoxError> {
        self.0.pause_and_save()?;
        self.fail(Fault::Pause)
    }

    fn resume(&mut self) -> Result<(), BoxError> {
        self.fail(Fault::Resume)?;
        self.0.resume()
    }

    fn throttle(&mut self, percent: u8) -> Result<(), BoxError> {
        self.0.throttle(percent)
    }
}

impl FreePageSource for Faulty<SimHints> {
    fn start(&mut self, hints: HintReceiver) -> Result<(), BoxError> {
        self.fail(Fault::Ask)?;
        self.0.start(hints)
    }

    fn stop(&mut self) {
        self.0.stop();
    }

    fn finish(&mut self) {
        self.0.finish();
    }
}

impl TargetMemory for Faulty<TestTarget> {
    fn regions(&self) -> Vec<PageRange> {
        self.0.regions()
    }

    fn write(&self, range: PageRange, bytes: &[u8]) -> Result<(), BoxError> {
        self.fail(Fault::Write)?;
        self.0.write(range, bytes)
    }

    fn zero(&self, range: PageRange) -> Result<(), BoxError> {
        self.0.zero(range)
    }

    fn discard(&self, range: PageRange) -> Result<(), BoxError> {
        self.0.discard(range)
    }
}

/// Migrates a guest with a fault; also returns its world.
fn migrate(fault: Fault) -> (Hooks, Result<Report, Box<Failure>>) {
    let (cancel, target_cancel) = (Cancel::new(), Cancel::new());
    let activity = Activity { steps: 900, burst: 2, cancel_after: None };
    let hooks = Hooks::new(&REGIONS, 11, activity, &cancel);
    let target = Faulty(TestTarget::new(&REGIONS), fault);
    let Link { send, receive, mut rounds, mut confirm } =
        link(2, None, &cancel, &target_cancel).unwrap();
    let result = std::thread::scope(|scope| {
        scope.spawn(|| {
            let receiver = Receiver {
                memory: &target,
                streams: receive
                    .into_iter()
                    .map(|stream| Box::new(stream) as Box<dyn Read + Send>)
                    .collect(),
                round_done: &mut |round| Ok(confirm.write_all(&round.to_le_bytes())?),
                cancel: target_cancel.clone(),
            };
            let result = receiver.run();
            if result.is_err() {
                target_cancel.cancel();
            }
        });
        let precopy = Precopy {
            config: Trial::default().config,
            memory: &Faulty(SimMemory(hooks.clone()), fault),
            dirty: &mut Faulty(SimDirty(hooks.clone()), fault),
            guest: &mut Faulty(SimGuest(hooks.clone()), fault),
            free_pages: Some(&mut Faulty(SimHints(hooks.clone()), fault)),
            streams: send.into_iter().map(|wire| Box::new(wire) as Box<dyn Write + Send>).collect(),
            round_sync: &mut rounds,
            observer: &mut |_| {},
            cancel: cancel.clone(),
        };
        let result = precopy.run().map(ebb_migration::Switchover::complete);
        cancel.cancel();
        result
    });
    if result.is_ok() {
        hooks.world().check_moved(&|page, bytes| target.0.read(page, bytes));
    }
    (hooks, result)
}

/// Message of a failure after which the guest runs as before.
fn harmless_failure(fault: Fault) -> String {
    let (hooks, result) = migrate(fault);
    hooks.world().check_unharmed();
    result.unwrap_err().to_string()
}

#[test]
fn each_failure_is_reported_and_the_guest_continues() {
    for (fault, message) in [
        (Fault::Arm, "cannot enable the dirty log: Arm does not work"),
        (Fault::Sync, "cannot read the dirty log: Sync does not work"),
        (Fault::Clear, "cannot write-protect pages again: Clear does not work"),
        (Fault::Pause, "the guest could not be paused and its state saved: Pause does not work"),
    ] {
        assert_eq!(harmless_failure(fault), message);
    }
    for (fault, start, end) in [
        (
            Fault::Held,
            "cannot query the populated pages of guest memory [",
            "): Held does not work",
        ),
        (Fault::Read, "cannot read guest memory [", "): Read does not work"),
        (Fault::Write, "cannot send to the destination on stream ", "; did it give up?"),
    ] {
        let message = harmless_failure(fault);
        assert!(
            message.starts_with(start) && message.ends_with(end)
                || fault == Fault::Write
                    && message.starts_with("the destination did not confirm round 0"),
            "{fault:?}: {message}"
        );
    }
}

#[test]
fn a_guest_without_hints_is_migrated() {
    let (_, result) = migrate(Fault::Ask);
    let report = result.unwrap();
    assert_eq!(report.hints_error.as_deref(), Some("Ask does not work"));
    assert_eq!(report.pages.skipped, 0);
}

#[test]
fn a_failure_to_disable_the_log_does_not_fail_a_migration() {
    assert!(migrate(Fault::Disarm).1.is_ok());
}

/// The pause succeeds, and all later steps fail.
#[test]
fn a_guest_that_cannot_be_resumed_is_reported() {
    let hooks = Hooks::new(
        &REGIONS,
        1,
        Activity { steps: 0, burst: 1, cancel_after: None },
        &Cancel::new(),
    );
    let cancel = Cancel::new();
    let Link { send, mut rounds, confirm, receive: _receive } =
        link(1, None, &cancel, &Cancel::new()).unwrap();
    let rounds_left = Cell::new(1);
    let mut round_sync = FailsLater { rounds: &mut rounds, confirm, left: &rounds_left };
    let precopy = Precopy {
        config: Trial::default().config,
        memory: &SimMemory(hooks.clone()),
        dirty: &mut SimDirty(hooks.clone()),
        guest: &mut Faulty(SimGuest(hooks.clone()), Fault::Resume),
        free_pages: None,
        streams: send
            .into_iter()
            .map(|_| Box::new(std::io::sink()) as Box<dyn Write + Send>)
            .collect(),
        round_sync: &mut round_sync,
        observer: &mut |_| {},
        cancel,
    };
    let failure = precopy.run().err().unwrap();
    let MigrationError::Resume { first, .. } = &failure.error else { panic!("{failure}") };
    assert!(matches!(**first, MigrationError::NotConfirmed { round: 1, .. }), "{failure}");
}

/// Confirms some rounds.
struct FailsLater<'a> {
    rounds: &'a mut dyn ebb_migration::RoundSync,
    confirm: std::os::unix::net::UnixStream,
    left: &'a Cell<u32>,
}

impl ebb_migration::RoundSync for FailsLater<'_> {
    fn wait_round_done(&mut self, round: u32) -> Result<(), BoxError> {
        let left = self.left.replace(self.left.get().saturating_sub(1));
        if left == 0 {
            return Err("the destination is gone".into());
        }
        self.confirm.write_all(&round.to_le_bytes())?;
        self.rounds.wait_round_done(round)
    }
}
