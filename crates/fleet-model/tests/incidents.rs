//! The naive policies meet their incidents again.

#![allow(clippy::unwrap_used)]

use ebb_fleet_model::Strategy;
use ebb_fleet_model::incidents::{Incident, all};
use ebb_fleet_model::strategy::{
    Deficit, Ebbd, GuestAvailable, IdleTarget, Law, Nothing, PressureAverage,
};
use ebb_host_policy::{GIB, MIB};

fn incident(name: &str) -> Incident {
    all().into_iter().find(|incident| incident.name.ends_with(name)).unwrap()
}

#[track_caller]
fn goes_wrong(name: &str, mut strategy: impl Strategy, what: &str) {
    let error = incident(name).survives(&mut strategy).unwrap_err();
    assert!(error.starts_with(what), "{name}: {error}");
}

fn deficit(law: Law) -> Deficit {
    Deficit { law, wanted_bytes: GIB, keep_bytes: 256 * MIB, admission_bytes: 0 }
}

#[test]
fn an_idle_target_starves_services() {
    goes_wrong("#390", IdleTarget::arcbox(), "out of puff");
}

#[test]
fn an_idle_target_that_fails_open_oscillates() {
    let strategy = IdleTarget { fails_open_ms: Some(100_000), ..IdleTarget::arcbox() };
    goes_wrong("#469", strategy, "squeezes");
}

#[test]
fn memory_given_back_in_parts_stalls() {
    goes_wrong(
        "#30227",
        GuestAvailable { keep_bytes: 256 * MIB, step_bytes: 256 * MIB },
        "stalled",
    );
}

#[test]
fn reporting_alone_swaps() {
    goes_wrong("#34723", Nothing { admission_bytes: 0 }, "written to swap");
}

#[test]
fn statistics_that_are_not_there_leave_it_inert() {
    goes_wrong("#244", deficit(Law::Change), "written to swap");
}

#[test]
fn deflation_by_the_guest_hangs() {
    goes_wrong("#4324", IdleTarget::arcbox(), "stalled");
}

#[test]
fn what_was_once_touched_is_swapped() {
    goes_wrong("#3920", Nothing { admission_bytes: 0 }, "written to swap");
}

#[test]
fn averages_stay() {
    goes_wrong("averages of pressure", PressureAverage::default(), "squeezes");
}

#[test]
fn the_deficit_alone_hunts() {
    goes_wrong("hunting", deficit(Law::Target), "changes of direction");
}

#[test]
fn ebbd_survives_them_all() {
    let lines = all().into_iter().map(|incident| {
        let result = incident.survives(&mut Ebbd::default());
        (result.is_err(), format!("{}: {result:?}", incident.name))
    });
    let failed: Vec<String> = lines.filter(|(failed, _)| *failed).map(|(_, line)| line).collect();
    assert!(failed.is_empty(), "{}", failed.join("\n"));
}
