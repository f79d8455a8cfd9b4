//! KVM's clock: what happens to guests whose host mixes clocks that drift apart, and what the real
//! one counts by.
//!
//! In January 2020 a kernel took the base of KVM's clock from `CLOCK_MONOTONIC_RAW` and its offset
//! from the clock that NTP slews; after two weeks of uptime a fresh guest could read a negative
//! time and hang (Linux commit 53fafdbb8b21f and "KVM: x86: do not mix raw and monotonic clocks in
//! kvmclock"). The series:
//!
//! - `mixed`, `raw`: both kernels in a model of a host (`ebb_kvm_clock::model`), over uptimes and
//!   slews;
//! - `kvm`: the `/dev/kvm` of this machine, whose clock is real however slow its guests are;
//! - `kvm-slewed`: the same in the virtual host, whose clock is slewed meanwhile, so that rates
//!   tell the clocks apart;
//! - `guest-continue`, `guest-catch-up`: the clocks of a real Linux guest over pauses, snapshots
//!   and restores, by clock policy.

use std::collections::BTreeMap;

use ebb_kvm_clock::ClockPolicy;
use ebb_kvm_clock::model::KernelMode;

use crate::LabError;
use crate::harness::experiment::{Experiment, HostShape, OnMachine, Runs, SeriesPlan, Subject};
use crate::harness::monitor::Setup;
use crate::harness::testbed::Testbed;
use crate::report::results::{Better, MetricInfo, Place, Scale, Series};
use slew::Slew;

mod checks;
mod guests;
mod host_clock;
mod kvm;
mod live;
mod mixed;
mod model;
mod slew;

/// The experiment.
#[derive(Debug, Clone, Copy)]
pub struct Clock;

/// Sizes of one scale.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Sizes {
    host: HostShape,
    /// How long the real clocks are watched.
    watch_s: u64,
    /// The longest uptime of the model.
    uptime_days: u64,
}

fn sizes(scale: Scale) -> Sizes {
    match scale {
        Scale::Demo => Sizes {
            host: HostShape { memory_mib: 1536, swap_mib: 256, nodes: 1 },
            watch_s: 10,
            uptime_days: 60,
        },
        Scale::Full => Sizes {
            host: HostShape { memory_mib: 2048, swap_mib: 512, nodes: 1 },
            watch_s: 120,
            uptime_days: 60,
        },
    }
}

/// Series about the real KVM.
const KVM: &str = "kvm";
/// The same, with a slew.
const KVM_SLEWED: &str = "kvm-slewed";

impl Experiment for Clock {
    fn name(&self) -> &'static str {
        "clock"
    }

    fn summary(&self) -> &'static str {
        "What a guest's clock shows on a host whose clocks drift apart, in a model and on this machine's KVM"
    }

    fn host(&self, scale: Scale) -> HostShape {
        sizes(scale).host
    }

    fn parameters(&self, scale: Scale) -> BTreeMap<String, u64> {
        let (sizes, stops) = (sizes(scale), guests::stops(scale));
        BTreeMap::from([
            ("host_mib".to_owned(), sizes.host.memory_mib),
            ("swap_mib".to_owned(), sizes.host.swap_mib),
            ("watch_s".to_owned(), sizes.watch_s),
            ("uptime_days".to_owned(), sizes.uptime_days),
            ("guest_mib".to_owned(), guests::SIZE.memory_mib),
            ("guest_cpus".to_owned(), u64::from(guests::SIZE.cpus)),
            ("pauses".to_owned(), stops.pauses as u64),
            ("restores".to_owned(), stops.restores as u64),
        ])
    }

    fn metrics(&self) -> Vec<MetricInfo> {
        let mut metrics = vec![
            MetricInfo::new(
                "min_system_time_ns",
                "Smallest time of a fresh guest",
                "ns",
                Better::Higher,
            ),
            MetricInfo::new(
                "max_jump_ns",
                "Largest jump at a master clock flip",
                "ns",
                Better::Lower,
            ),
            MetricInfo::new(
                "wall_error_ns",
                "Largest error of the wall clock",
                "ns",
                Better::Lower,
            ),
            MetricInfo::new(
                "raw_deviation_ns",
                "KVM's clock against CLOCK_MONOTONIC_RAW",
                "ns",
                Better::Lower,
            ),
            MetricInfo::new(
                "monotonic_deviation_ns",
                "KVM's clock against CLOCK_MONOTONIC",
                "ns",
                Better::Lower,
            ),
            MetricInfo::new(
                "boottime_deviation_ns",
                "KVM's clock against CLOCK_BOOTTIME",
                "ns",
                Better::Lower,
            ),
            MetricInfo::new(
                "drift_ns",
                "CLOCK_MONOTONIC ahead of raw since boot",
                "ns",
                Better::Lower,
            ),
            MetricInfo::new("failed_checks", "Failed checks of KVM's clock", "", Better::Lower),
        ];
        metrics.extend(guests::metrics());
        metrics
    }

    fn series(&self) -> Vec<SeriesPlan> {
        let plan =
            |name, summary, runs| SeriesPlan { name, summary, runs, subject: Subject::Machine };
        let guest = |name, summary, clock| SeriesPlan {
            name,
            summary,
            runs: Runs::ByDefault,
            subject: Subject::Guests(Setup { clock, ..Setup::EBB }),
        };
        vec![
            plan(
                KernelMode::Mixed.name(),
                "model of a kernel between 53fafdbb8b21f and its fix",
                Runs::ByDefault,
            ),
            plan(
                KernelMode::Raw.name(),
                "model of a kernel that uses raw clocks only",
                Runs::ByDefault,
            ),
            plan(
                KVM,
                "the KVM of this machine against its clocks, and checks of its clock page",
                Runs::ByDefault,
            ),
            plan(
                KVM_SLEWED,
                "the same with a clock slewed by 100 ppm; in the virtual host only",
                Runs::WhenNamed,
            ),
            guest(
                "guest-continue",
                "a Linux guest over pauses and restores that it does not notice",
                ClockPolicy::Continue,
            ),
            guest(
                "guest-catch-up",
                "a Linux guest over pauses and restores in which its clock goes on",
                ClockPolicy::CatchUp,
            ),
        ]
    }

    fn guests(&self, _scale: Scale) -> u32 {
        1
    }

    fn run(&self, testbed: &mut Testbed<'_>, series: &mut Series) -> Result<(), LabError> {
        for metric in self.metrics() {
            series.metrics.insert(metric.name, None);
        }
        guests::run(testbed, series)
    }

    fn run_on_machine(&self, machine: OnMachine<'_>, series: &mut Series) -> Result<(), LabError> {
        let OnMachine { size, place, events } = machine;
        let sizes = sizes(size.scale);
        for metric in self.metrics() {
            series.metrics.insert(metric.name, None);
        }
        if let Some(mode) = KernelMode::ALL.into_iter().find(|mode| mode.name() == series.name) {
            events.step(0, "runs weeks of host time in the model");
            model::sweep(mode, sizes.uptime_days).tell(series);
            return Ok(());
        }
        let slew = match (series.name == KVM_SLEWED, place) {
            (false, _) => None,
            (true, Place::VirtualHost) => Some(Slew::start()?),
            (true, Place::Direct) => return Err(LabError::SlewsHost(series.name.clone())),
        };
        let outcome = live::run(sizes.watch_s, events, series);
        drop(slew);
        outcome
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::harness::experiment::RunSize;
    use crate::report::event::Events;
    use std::sync::mpsc;

    #[test]
    fn the_models_fill_the_metrics_that_are_theirs() {
        let (sender, _receiver) = mpsc::channel();
        let events = Events::new(sender);
        let size = RunSize { scale: Scale::Demo, most_guests: None };
        let machine = OnMachine { size, place: Place::Direct, events: &events };
        for mode in KernelMode::ALL {
            let mut series = Series::new(mode.name(), String::new());
            Clock.run_on_machine(machine, &mut series).unwrap();
            let described: Vec<String> =
                Clock.metrics().into_iter().map(|info| info.name).collect();
            assert_eq!(series.metrics.len(), described.len());
            for name in ["min_system_time_ns", "max_jump_ns", "wall_error_ns"] {
                assert!(series.metrics[name].is_some(), "{name}");
            }
            assert!(series.metrics["drift_ns"].is_none());
            assert!(!series.tables.is_empty() && !series.drawings.is_empty());
        }
    }

    #[test]
    fn the_clock_of_the_machine_itself_is_not_slewed() {
        let (sender, _receiver) = mpsc::channel();
        let events = Events::new(sender);
        let size = RunSize { scale: Scale::Demo, most_guests: None };
        let machine = OnMachine { size, place: Place::Direct, events: &events };
        let mut series = Series::new(KVM_SLEWED, String::new());
        let outcome = Clock.run_on_machine(machine, &mut series);
        assert!(matches!(outcome, Err(LabError::SlewsHost(_))));
    }
}
