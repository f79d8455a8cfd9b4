//! Tests on this machine's own KSM: for root, where available.

use super::*;
use crate::testing::MachineKsm;

#[test]
fn the_kernel_accepts_changes_and_their_undoing() {
    let Some(machine) = MachineKsm::take() else { return };
    let sharing = machine.before().get(Knob::MaxPageSharing).unwrap();
    let mut wanted = Values::new()
        .with(Knob::Run, RUN_MERGE)
        .with(Knob::PagesToScan, 123)
        .with(Knob::SleepMillisecs, 5)
        .with(Knob::MaxPageSharing, sharing + 1);
    if let Some(across) = machine.before().get(Knob::MergeAcrossNodes) {
        wanted.set(Knob::MergeAcrossNodes, 1 - across);
    }
    let guard = KsmGuard::new(Ksm::open(Path::new(SYSFS)).unwrap()).unwrap();
    guard.ksm().apply(&wanted).unwrap();
    let now = machine.ksm().settings().unwrap();
    for (knob, value) in wanted.iter() {
        assert_eq!(now.get(knob), Some(value), "{knob:?}");
    }
    if now.get(Knob::AdvisorMode).is_some() {
        guard.ksm().apply(&Values::new().with(Knob::AdvisorMode, ADVISOR_SCAN_TIME)).unwrap();
        let advised = machine.ksm().settings().unwrap();
        assert_eq!(advised.get(Knob::AdvisorMode), Some(ADVISOR_SCAN_TIME));
        // The kernel refuses the number while an advisor is active: here it is omitted.
        guard.ksm().apply(&Values::new().with(Knob::PagesToScan, 5)).unwrap();
    }
    drop(guard);
    assert_eq!(machine.ksm().settings().unwrap(), *machine.before());
}

#[test]
fn the_kernel_rejects_invalid_values() {
    let Some(machine) = MachineKsm::take() else { return };
    let error = machine.ksm().apply(&Values::new().with(Knob::MaxPageSharing, 1)).unwrap_err();
    assert!(
        matches!(error, KsmError::Refused { knob: Knob::MaxPageSharing, value: 1, .. }),
        "{error}"
    );
    assert_eq!(machine.shared(), 0);
}
