//! Cost of a tracker of free pages for programs that do nothing but allocate and free, in page
//! faults per second.
//!
//! The test cases page_fault1 to page_fault3 of will-it-scale, and page_fault1 with huge pages, as
//! in the patch series that the trackers come from (v8 and v10, 2019; v16.1, 2020). The noise of a
//! machine on which anything else runs exceeds the few percent to be measured. Therefore the
//! trackers take turns within each guest, a few seconds each, in an order in which each follows
//! each other equally often; each time is compared with that without a tracker in the same round,
//! and the result is the median of these comparisons with a confidence interval. A second turn
//! without a tracker shows the noise of the comparison.
//!
//! Further series count instructions instead, in an emulator, which have no noise (`counted`), or
//! how often and how long a zone's lock is taken (`locks`).

use ebb_agent::page_faults::{FaultKind, TaskKind};
use serde::Serialize;

use crate::LabError;
use crate::harness::driver::{Driver, Tracker};
use crate::harness::experiment::{Experiment, Run, SeriesPlan, parameters};
use crate::harness::monitor::Setup;
use crate::harness::size::{GuestSize, HostShape};
use crate::harness::testbed::Testbed;
use crate::report::results::{MetricInfo, Scale, Series};

mod analysis;
pub mod counted;
mod locks;
mod metrics;
mod order;
mod slots;

/// The experiment.
pub static FAULTS: Experiment = Experiment {
    name: "faults",
    summary: "What trackers of free pages cost programs that do nothing but allocate and free \
              (will-it-scale page_fault1 to 3)",
    host: |scale, _| sizes(scale).host,
    parameters: |scale| parameters(&sizes(scale)),
    guests: |scale| sizes(scale).boots * CPUS.len() as u32,
    metrics: describe,
    series: || {
        TRACKERS.map(plan).into_iter().chain(counted::plans()).chain(locks::plans()).collect()
    },
    ..Experiment::DEFAULT
};

/// Sizes of one scale.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
struct Sizes {
    #[serde(flatten)]
    host: HostShape,
    guest_mib: u64,
    mapping_mib: u64,
    /// Number of guests for each number of vCPUs.
    boots: u32,
    /// Number of turns of each tracker in a guest with each workload.
    rounds: u32,
    /// Seconds of a turn that count, after those for settling.
    seconds: u32,
    #[serde(skip)]
    kinds: &'static [Kind],
    #[serde(skip)]
    task_kinds: &'static [TaskKind],
}

/// Numbers of vCPUs; as many tasks run.
const CPUS: [u32; 2] = [1, 2];

/// Seconds at the beginning of a turn that do not count. A tracker that was just switched on has
/// initial work: `bitmap` and `reporting` report all free memory after 2 s.
const SETTLE_S: u32 = 3;

/// A workload with its name in metrics and its title.
type Kind = (FaultKind, &'static str, &'static str);

/// All workloads. The last one hardly frees memory: the file's pages stay allocated.
const KINDS: [Kind; 4] = [
    (FaultKind::Fault1, "fault1", "page_fault1"),
    (FaultKind::Fault1Huge, "fault1_huge", "page_fault1 with huge pages"),
    (FaultKind::Fault2, "fault2", "page_fault2"),
    (FaultKind::Fault3, "fault3", "page_fault3"),
];

/// The trackers, by the names of their series. The others are compared with the one that is off.
pub const TRACKERS: [Tracker; 4] =
    [Tracker::Off, Tracker::Percpu, Tracker::Bitmap, Tracker::Reporting];

fn sizes(scale: Scale) -> Sizes {
    match scale {
        Scale::Demo => Sizes {
            host: HostShape { memory_mib: 1792, swap_mib: 256, nodes: 1 },
            guest_mib: 1024,
            mapping_mib: 128,
            boots: 1,
            rounds: 1,
            seconds: 2,
            kinds: KINDS.split_at(3).0,
            task_kinds: &[TaskKind::Processes],
        },
        Scale::Full => Sizes {
            host: HostShape { memory_mib: 3584, swap_mib: 512, nodes: 1 },
            guest_mib: 2048,
            mapping_mib: 128,
            boots: 5,
            rounds: 2,
            seconds: 3,
            kinds: &KINDS,
            task_kinds: &[TaskKind::Processes, TaskKind::Threads],
        },
    }
}

impl Sizes {
    fn guest(self, cpus: u32) -> GuestSize {
        GuestSize { memory_mib: self.guest_mib, cpus }
    }
}

fn plan(tracker: Tracker) -> SeriesPlan {
    let noise =
        "no tracker; its overhead is that of a second turn without one, which shows the noise";
    let summary = summary(tracker, noise);
    let setup = Setup { driver: Driver::tracking(tracker), ..Setup::EBB };
    SeriesPlan::new(tracker.name(), summary, Run::SameGuests(setup, run))
}

/// Summary of a tracker's series; `without` is that of the series without a tracker.
fn summary(tracker: Tracker, without: &'static str) -> &'static str {
    match tracker {
        Tracker::Off => without,
        Tracker::Percpu => "an array of freed pages for each CPU",
        Tracker::Bitmap => "a bitmap of freed blocks for each zone",
        Tracker::Reporting => "the kernel's own page reporting",
    }
}

/// The metrics in time, in instructions and of the zone's lock; the overheads are metrics of the
/// first two.
fn describe() -> Vec<MetricInfo> {
    let mut all = metrics::describe();
    let further = counted::metrics::describe();
    let is_new = |info: &MetricInfo| all.iter().all(|of| of.name != info.name);
    let further: Vec<MetricInfo> = further.into_iter().filter(is_new).collect();
    all.extend(further);
    all.extend(locks::describe());
    all
}

fn run(testbed: &mut Testbed<'_>, series: &mut [Series]) -> Result<(), LabError> {
    // Guests boot without a tracker; each turn switches its own on.
    testbed.run_like(Setup { driver: Driver::among_all(Tracker::Off), ..Setup::EBB });
    slots::run(testbed, sizes(testbed.scale()), series, metrics::fill)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_workload_fits_into_the_guest() {
        for scale in [Scale::Demo, Scale::Full] {
            let sizes = sizes(scale);
            // page_fault2: each task has a file and its copy of it.
            let largest = u64::from(CPUS[1]) * 2 * sizes.mapping_mib;
            assert!(largest + 256 <= sizes.guest_mib);
            assert!(sizes.guest_mib + 512 < sizes.host.memory_mib, "the host must not swap");
        }
    }

    #[test]
    fn the_full_size_has_all_workloads_tasks_and_trackers() {
        let sizes = sizes(Scale::Full);
        assert!(sizes.boots >= 5 && sizes.task_kinds.len() == 2 && sizes.kinds.len() == 4);
        assert_eq!((FAULTS.series)().len(), 12);
    }
}
