use super::*;

fn present() -> Values {
    let values = [
        (Knob::Run, RUN_MERGE),
        (Knob::PagesToScan, 100),
        (Knob::SleepMillisecs, 20),
        (Knob::AdvisorMode, ADVISOR_NONE),
        (Knob::AdvisorMaxCpu, 70),
        (Knob::AdvisorTargetScanTime, 200),
        (Knob::MergeAcrossNodes, 1),
        (Knob::MaxPageSharing, 256),
    ];
    values.into_iter().collect()
}

fn after(change: &MergeChange) -> MergeSettings {
    let mut values_after = present();
    for (knob, value) in values(change, &present()).iter() {
        values_after.set(knob, value);
    }
    settings(&values_after, MergeRun::Merge)
}

#[test]
fn a_pace_is_what_was_asked_for() {
    assert_eq!(settings(&present(), MergeRun::Merge).pages_per_second, Some(5000));
    for pages_per_second in [1, 10, 50, 5000, 1_000_000] {
        let change = MergeChange { pages_per_second: Some(pages_per_second), ..MergeChange::default() };
        assert_eq!(after(&change).pages_per_second, Some(pages_per_second));
    }
}

#[test]
fn a_fixed_pace_and_the_advisor_exclude_each_other() {
    let advised = after(&MergeChange { target_scan_seconds: Some(60), ..MergeChange::default() });
    assert_eq!(
        (advised.target_scan_seconds, advised.cpu_percent, advised.pages_per_second),
        (Some(60), Some(70), None)
    );
    let limited = after(&MergeChange { cpu_percent: Some(5), ..MergeChange::default() });
    assert_eq!((limited.target_scan_seconds, limited.cpu_percent), (Some(200), Some(5)));
    let fixed = MergeChange { pages_per_second: Some(100), cpu_percent: Some(5), ..MergeChange::default() };
    assert_eq!((after(&fixed).cpu_percent, after(&fixed).pages_per_second), (None, Some(100)));
}

#[test]
fn a_kernel_without_advisor_can_have_a_pace() {
    let old: Values = present().iter().filter(|(knob, _)| *knob < Knob::AdvisorMode).collect();
    let change = MergeChange { pages_per_second: Some(100), ..MergeChange::default() };
    assert_eq!(values(&change, &old).get(Knob::AdvisorMode), None);
    let advised = MergeChange { cpu_percent: Some(5), ..MergeChange::default() };
    assert!(values(&advised, &old).get(Knob::AdvisorMode).is_some(), "which the kernel then refuses");
}

#[test]
fn what_somebody_else_decides_is_a_conflict() {
    let error = refused(KsmError::Busy { knob: Knob::MergeAcrossNodes, pages_shared: 5 });
    assert!(matches!(&error, ControlError::WrongState { message, .. } if message.contains("unmerge first")));
    let error = refused(KsmError::Record { path: "/run/x".into(), problem: "y".to_owned() });
    assert!(matches!(error, ControlError::Failed { .. }));
}
