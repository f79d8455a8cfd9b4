//! What it costs to have freed memory back soon: a guest that allocates and frees all the time, and
//! the time until the memory of a program that ends for good is back at the host.
//!
//! With Linux's own reporting, a shorter delay returns memory sooner and makes programs slower that
//! use it again: it has to be provided anew. So both are measured in the same guest.

use std::thread;
use std::time::{Duration, Instant};

use ebb_agent::protocol::Command;
use serde::Serialize;

use crate::LabError;
use crate::harness::driver::{Driver, Module, Tracker};
use crate::harness::experiment::{Experiment, Run, SeriesPlan, parameters};
use crate::harness::monitor::{MonitorKind, Setup};
use crate::harness::size::{GuestSize, HostShape};
use crate::harness::testbed::Testbed;
use crate::report::metrics::{self, Metric};
use crate::report::results::{GuestRecord, Scale, Series};
use crate::report::statistics::rounded;

/// The experiment.
pub static CHURN: Experiment = Experiment {
    name: "churn",
    summary: "How soon freed memory is back at the host, and what that costs a guest that uses it \
              again at once",
    host: |scale, _| sizes(scale).host,
    parameters: |scale| parameters(&sizes(scale)),
    metrics: || metrics::describe(metrics()),
    compare: |all| metrics::compare(&metrics(), NONE, all),
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
    program_mib: u64,
    /// Runs of the program one after the other.
    rounds: u32,
    /// Time between two of them.
    gap_ms: u64,
}

fn sizes(scale: Scale) -> Sizes {
    match scale {
        Scale::Demo => Sizes {
            host: HostShape { memory_mib: 1792, swap_mib: 512, nodes: 1 },
            guest: GuestSize { memory_mib: 1024, cpus: 1 },
            program_mib: 512,
            rounds: 8,
            gap_ms: 400,
        },
        Scale::Full => Sizes {
            host: HostShape { memory_mib: 8 * 1024, swap_mib: 1024, nodes: 1 },
            guest: GuestSize { memory_mib: 5 * 1024, cpus: 1 },
            program_mib: 4 * 1024,
            rounds: 12,
            gap_ms: 400,
        },
    }
}

/// The series that all are compared with: nothing is reported.
const NONE: &str = "none";
/// The series in which the host requests the memory at the end.
const RECLAIM: &str = "reclaim";

fn series() -> Vec<SeriesPlan> {
    let plan = |name, summary, setup| SeriesPlan::new(name, summary, Run::Guests(setup, run));
    let module = |tracker| Setup { driver: Driver::tracking(tracker), ..Setup::EBB };
    let late = Module { report_delay_ms: Some(0), ..Module::DEFAULT };
    let qemu = Setup { monitor: MonitorKind::Qemu, ..Setup::EBB };
    vec![
        plan(NONE, "Ebb's driver, which reports nothing", module(Tracker::Off)),
        plan("linux-driver", "Linux's driver and reporting", Setup::EBB),
        plan(
            "reporting",
            "Ebb's driver, Linux's reporting and early reports",
            module(Tracker::Reporting),
        ),
        plan(
            "reporting-late",
            "the same without early reports",
            Setup { driver: Driver::Module(late), ..Setup::EBB },
        ),
        plan("bitmap", "Ebb's driver, a bitmap for each zone", module(Tracker::Bitmap)),
        plan("percpu", "Ebb's driver, an array for each CPU", module(Tracker::Percpu)),
        plan(
            RECLAIM,
            "Ebb's driver, which reports on request of the host only",
            module(Tracker::Off),
        ),
        plan("qemu-linux-driver", "the same as linux-driver under QEMU", qemu),
    ]
}

/// Results of a series.
#[derive(Debug, Default)]
struct Found {
    /// Times of allocating and writing the program's memory, without the first.
    allocation_ms: Vec<f64>,
    back_90_s: Option<f64>,
    reclaim_s: Option<f64>,
    returned_mib: Option<f64>,
}

fn metrics() -> Vec<Metric<Found>> {
    vec![
        Metric::lower(
            "back_90_s",
            "90 % of a program's memory is back after",
            "s",
            |found: &Found| found.back_90_s,
        ),
        Metric::median(
            "allocation_ms",
            "Allocating and writing memory that was just freed",
            "ms",
            |found: &Found| found.allocation_ms.clone(),
        ),
        Metric::excess(
            "allocation_percent",
            "More time for that than without any reports",
            "allocation_ms",
        ),
        Metric::lower("reclaim_s", "The request for it", "s", |found: &Found| found.reclaim_s),
        Metric::higher("returned_mib", "Returned after the last run", "MiB", |found: &Found| {
            found.returned_mib
        }),
    ]
}

fn run(testbed: &mut Testbed<'_>, series: &mut Series) -> Result<(), LabError> {
    let sizes = sizes(testbed.scale());
    let mut record = testbed.start_controlled_guest(sizes.guest)?;
    let mut found = Found::default();
    let outcome = churn(testbed, &mut record, sizes, series.name == RECLAIM, &mut found);
    metrics::measure(&metrics(), &found, series);
    series.guests.push(record);
    outcome
}

fn churn(
    testbed: &mut Testbed<'_>,
    record: &mut GuestRecord,
    sizes: Sizes,
    reclaims: bool,
    found: &mut Found,
) -> Result<(), LabError> {
    let command = || Command::AllocTouchExit { bytes: sizes.program_mib << 20 };
    for round in 0..=sizes.rounds {
        let answer = testbed.run_program(record, command(), sizes.program_mib)?;
        // The first run takes memory that the host has never provided.
        if round > 0 {
            found.allocation_ms.extend(answer.result["touch_ms"].as_f64());
        }
        if round < sizes.rounds {
            thread::sleep(Duration::from_millis(sizes.gap_ms));
        }
    }
    let peak_mib = testbed.footprint_mib(record.guest)?.max(record.peak_mib.unwrap_or(0.0));
    record.peak_mib = Some(peak_mib);
    let ended = Instant::now();
    if reclaims {
        testbed.reclaim(record.guest)?;
        found.reclaim_s = Some(rounded(ended.elapsed().as_secs_f64()));
    }
    let before_s = ended.elapsed().as_secs_f64();
    testbed.wait_for_return(record, sizes.program_mib)?;
    found.back_90_s = record.return_90_s.map(|return_s| rounded(before_s + return_s));
    found.returned_mib = Some(rounded(peak_mib - testbed.footprint_mib(record.guest)?));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn guest_and_host_have_room_for_the_program() {
        for scale in [Scale::Demo, Scale::Full] {
            let sizes = sizes(scale);
            assert!(sizes.program_mib + 256 < sizes.guest.memory_mib);
            assert!(sizes.guest.memory_mib + 512 <= sizes.host.memory_mib);
        }
    }
}
