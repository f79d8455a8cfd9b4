//! KVM's clock: the effect on guests of a host that mixes clocks that drift apart, and the clock
//! that the real KVM advances with.
//!
//! In January 2020 a kernel took the base of KVM's clock from `CLOCK_MONOTONIC_RAW` and its offset
//! from the clock that NTP slews; after two weeks of uptime a fresh guest could read a negative
//! time and hang (Linux commit 53fafdbb8b21f and "KVM: x86: do not mix raw and monotonic clocks in
//! kvmclock"). The series:
//!
//! - `mixed`, `raw`: both kernels in a model of a host (`ebb_kvm_clock::model`), over uptimes and
//!   slews;
//! - `kvm`: the `/dev/kvm` of this machine, whose clock is real even if its guests are slow;
//! - `kvm-slewed`: the same in the virtual host, whose clock is slewed meanwhile, so that rates
//!   distinguish the clocks;
//! - `guest-continue`, `guest-catch-up`: the clocks of a real Linux guest over pauses, snapshots
//!   and restores, by clock policy.

use ebb_kvm_clock::ClockPolicy;
use ebb_kvm_clock::model::KernelMode;
use serde::Serialize;

use crate::LabError;
use crate::harness::experiment::{Experiment, OnMachine, Run, SeriesPlan, parameters};
use crate::harness::monitor::Setup;
use crate::harness::size::{GuestSize, HostShape};
use crate::harness::testbed::Testbed;
use crate::report::results::{Place, Scale, Series};
use metrics::Found;
use slew::Slew;

mod checks;
mod guests;
mod host_clock;
mod kvm;
mod live;
mod metrics;
mod mixed;
mod model;
mod slew;

/// The experiment.
pub static CLOCK: Experiment = Experiment {
    name: "clock",
    summary: "What a guest's clock shows on a host whose clocks drift apart, in a model and on \
              this machine's KVM",
    host: |scale, _| sizes(scale).host,
    parameters: |scale| parameters(&sizes(scale)),
    metrics: metrics::describe,
    series,
    ..Experiment::DEFAULT
};

/// Sizes of one scale.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
struct Sizes {
    #[serde(flatten)]
    host: HostShape,
    #[serde(flatten)]
    guest: GuestSize,
    /// Seconds for which the real clocks are sampled.
    watch_s: u64,
    /// The longest uptime of the model.
    uptime_days: u64,
    #[serde(flatten)]
    stops: guests::Stops,
}

fn sizes(scale: Scale) -> Sizes {
    let (guest, uptime_days, stops) = (guests::SIZE, 60, guests::stops(scale));
    let (memory_mib, swap_mib, watch_s) = match scale {
        Scale::Demo => (1536, 256, 10),
        Scale::Full => (2048, 512, 120),
    };
    let host = HostShape { memory_mib, swap_mib, nodes: 1 };
    Sizes { host, guest, watch_s, uptime_days, stops }
}

/// Series about the real KVM.
const KVM: &str = "kvm";
/// The same, with a slew.
const KVM_SLEWED: &str = "kvm-slewed";

fn series() -> Vec<SeriesPlan> {
    let machine = |name, summary| SeriesPlan::new(name, summary, Run::Machine(run));
    let guest = |name, summary, clock| {
        SeriesPlan::new(name, summary, Run::Guests(Setup { clock, ..Setup::EBB }, run_guest))
    };
    vec![
        machine(KernelMode::Mixed.name(), "model of a kernel between 53fafdbb8b21f and its fix"),
        machine(KernelMode::Raw.name(), "model of a kernel that uses raw clocks only"),
        machine(KVM, "the KVM of this machine against its clocks, and checks of its clock page"),
        machine(KVM_SLEWED, "the same with a clock slewed by 100 ppm; in the virtual host only")
            .when_named(),
        guest(
            "guest-continue",
            "a Linux guest over pauses and restores that it does not notice",
            ClockPolicy::Continue,
        ),
        guest(
            "guest-catch-up",
            "a Linux guest over pauses and restores during which its clock advances",
            ClockPolicy::CatchUp,
        ),
    ]
}

fn run(machine: OnMachine<'_>, series: &mut Series) -> Result<(), LabError> {
    let mut found = Found::default();
    let outcome = measure(machine, &mut found, series);
    found.measure(series);
    outcome
}

fn measure(
    OnMachine { size, place, events }: OnMachine<'_>,
    found: &mut Found,
    series: &mut Series,
) -> Result<(), LabError> {
    let sizes = sizes(size.scale);
    if let Some(mode) = KernelMode::ALL.into_iter().find(|mode| mode.name() == series.name) {
        events.step(0, "simulates weeks of host time");
        model::sweep(mode, sizes.uptime_days).show(found, series);
        return Ok(());
    }
    let slew = match (series.name == KVM_SLEWED, place) {
        (false, _) => None,
        (true, Place::VirtualHost) => Some(Slew::start()?),
        (true, Place::Direct) => return Err(LabError::SlewsHost(series.name.clone())),
    };
    let outcome = live::run(sizes.watch_s, events, found, series);
    drop(slew);
    outcome
}

fn run_guest(testbed: &mut Testbed<'_>, series: &mut Series) -> Result<(), LabError> {
    let (record, outcome) = guests::run(testbed);
    show_guest(record, series);
    outcome
}

fn show_guest(record: guests::Record, series: &mut Series) {
    record.show(series);
    Found::of_guest(record).measure(series);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::harness::size::RunSize;
    use crate::report::event::Events;
    use std::sync::mpsc;

    fn run_directly(name: &str) -> (Series, Result<(), LabError>) {
        let (sender, _receiver) = mpsc::channel();
        let events = Events::new(sender);
        let size = RunSize { scale: Scale::Demo, guests: None };
        let mut series = Series::new(name, String::new());
        let machine = OnMachine { size, place: Place::Direct, events: &events };
        let outcome = run(machine, &mut series);
        (series, outcome)
    }

    #[test]
    fn the_models_fill_only_their_own_metrics() {
        for mode in KernelMode::ALL {
            let (series, outcome) = run_directly(mode.name());
            outcome.unwrap();
            for name in ["min_system_time_ns", "max_jump_ns", "wall_error_ns"] {
                assert!(series.metrics[name].is_some(), "{name}");
            }
            assert!(series.metrics["drift_ns"].is_none());
            assert!(!series.tables.is_empty() && !series.drawings.is_empty());
        }
    }

    #[test]
    fn the_clock_of_the_machine_is_not_slewed() {
        assert!(matches!(run_directly(KVM_SLEWED).1, Err(LabError::SlewsHost(_))));
    }
}
