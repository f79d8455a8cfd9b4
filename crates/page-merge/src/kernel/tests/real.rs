//! On this machine's own KSM: for root, where there is one. Whatever else uses it takes the same lock.

use std::fs::File;

use rustix::fs::{FlockOperation, flock};

use super::*;

/// The machine's KSM, and its settings, which are put back in any case.
struct Real {
    ksm: Ksm,
    before: Values,
    _lock: File,
}

impl Real {
    fn take() -> Option<Self> {
        if !rustix::process::geteuid().is_root() {
            eprintln!("left out: only root may change KSM's settings");
            return None;
        }
        let lock = File::options().write(true).create(true).truncate(false).open("/tmp/ksm.lock").unwrap();
        flock(&lock, FlockOperation::LockExclusive).unwrap();
        let ksm = match Ksm::open(Path::new(SYSFS)) {
            Ok(ksm) => ksm,
            Err(error) => {
                eprintln!("left out: {error}");
                return None;
            }
        };
        let before = ksm.settings().unwrap();
        Some(Self { ksm, before, _lock: lock })
    }

    fn shared(&self) -> u64 {
        self.ksm.counters().unwrap().count(Counter::PagesShared)
    }
}

impl Drop for Real {
    fn drop(&mut self) {
        self.ksm.apply(&self.before).unwrap();
    }
}

#[test]
fn the_kernel_takes_changes_and_has_them_taken_back() {
    let Some(real) = Real::take() else { return };
    let folder = tempfile::tempdir().unwrap();
    let join = |wanted: &Values| {
        let ksm = Arc::new(Ksm::open(Path::new(SYSFS)).unwrap());
        KsmUsers::open(folder.path()).unwrap().join(ksm, "test", wanted)
    };
    let sharing = real.before.get(Knob::MaxPageSharing).unwrap();
    let mut wanted = Values::new()
        .with(Knob::Run, RUN_MERGE)
        .with(Knob::PagesToScan, 123)
        .with(Knob::SleepMillisecs, 5)
        .with(Knob::MaxPageSharing, sharing + 1);
    if let Some(across) = real.before.get(Knob::MergeAcrossNodes) {
        wanted.set(Knob::MergeAcrossNodes, 1 - across);
    }
    let membership = join(&wanted).unwrap();
    let now = real.ksm.settings().unwrap();
    for (knob, value) in wanted.iter() {
        assert_eq!(now.get(knob), Some(value), "{knob:?}");
    }
    if now.get(Knob::AdvisorMode).is_some() {
        membership.change(&Values::new().with(Knob::AdvisorMode, ADVISOR_SCAN_TIME)).unwrap();
        let advised = real.ksm.settings().unwrap();
        assert_eq!(advised.get(Knob::AdvisorMode), Some(ADVISOR_SCAN_TIME));
        // The kernel refuses the number itself while there is an advisor: here it is left out.
        membership.change(&Values::new().with(Knob::PagesToScan, 5)).unwrap();
    }
    drop(membership);
    assert_eq!(real.ksm.settings().unwrap(), real.before);
}

#[test]
fn the_kernel_says_what_it_does_not_take() {
    let Some(real) = Real::take() else { return };
    let error = real.ksm.apply(&Values::new().with(Knob::MaxPageSharing, 1)).unwrap_err();
    assert!(matches!(error, KsmError::Refused { knob: Knob::MaxPageSharing, value: 1, .. }), "{error}");
    assert_eq!(real.shared(), 0);
}
