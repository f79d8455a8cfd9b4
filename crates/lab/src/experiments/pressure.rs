//! Time from pressure at the host until `ebbd` has got back memory that is free in an idle guest.

use std::hint::black_box;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use ebb_agent::protocol::Command;
use serde::Serialize;

use crate::LabError;
use crate::harness::daemon::{Beginning, Daemon};
use crate::harness::driver::{Driver, Tracker};
use crate::harness::experiment::{Experiment, Needs, Run, SeriesPlan, parameters};
use crate::harness::host::MemoryState;
use crate::harness::monitor::Setup;
use crate::harness::size::{GuestSize, HostShape};
use crate::harness::testbed::{Testbed, footprint_mib};
use crate::report::metrics::{self, Metric};
use crate::report::results::{Scale, Series};
use crate::report::statistics::rounded;

/// The experiment.
pub static PRESSURE: Experiment = Experiment {
    name: "pressure",
    summary: "How long it takes from pressure at the host until ebbd has got back memory that is \
              free in an idle guest",
    host: |scale, _| sizes(scale).host,
    parameters: |scale| parameters(&sizes(scale)),
    needs: Needs { daemon: true, ..Needs::NONE },
    metrics: || metrics::describe(metrics()),
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
    /// What the guest's program uses and frees.
    program_mib: u64,
    /// What is to come back.
    returned_mib: u64,
}

/// Limit of the default policy below which idle guests are asked for memory, in percent.
const TIGHT_PERCENT: u64 = 35;
/// The limit below which the host is pressed.
const PRESSED_PERCENT: u64 = 18;
/// Idle time before the pressure; the policy's own limit is 10 seconds.
const IDLE: Duration = Duration::from_secs(20);
/// Memory that does not come back within this time does not count.
const LIMIT: Duration = Duration::from_secs(60);
/// How often memory is looked at.
const LOOK: Duration = Duration::from_millis(5);
/// Step of the host's program.
const STEP_MIB: usize = 8;

fn sizes(scale: Scale) -> Sizes {
    match scale {
        Scale::Demo => Sizes {
            host: HostShape { memory_mib: 1536, swap_mib: 512, nodes: 1 },
            guest: GuestSize { memory_mib: 640, cpus: 1 },
            program_mib: 448,
            returned_mib: 256,
        },
        Scale::Full => Sizes {
            host: HostShape { memory_mib: 6144, swap_mib: 1024, nodes: 1 },
            guest: GuestSize { memory_mib: 2048, cpus: 1 },
            program_mib: 1536,
            returned_mib: 1024,
        },
    }
}

fn series() -> Vec<SeriesPlan> {
    let plan = |name, summary, setup| SeriesPlan::new(name, summary, Run::Guests(setup, run));
    let ebb = Setup { reporting: false, ..Setup::EBB };
    vec![
        plan(
            "ebb-driver",
            "Ebb's driver in the guest, which reports its free pages on request",
            Setup { driver: Driver::tracking(Tracker::Off), ..ebb },
        ),
        plan("linux-driver", "Linux's driver in the guest, without free page reporting", ebb),
    ]
}

/// Times from the moment at which available memory was below the first limit, in seconds.
#[derive(Debug, Default)]
struct Found {
    ordered: Option<f64>,
    pressed: Option<f64>,
    begun: Option<f64>,
    returned: Option<f64>,
}

fn metrics() -> Vec<Metric<Found>> {
    fn time(name: &str, title: &str, value: fn(&Found) -> Option<f64>) -> Metric<Found> {
        Metric::lower(name, title, "s", value)
    }
    vec![
        time("returned_s", "The memory is back after", |found| found.returned),
        time("ordered_s", "First order after", |found| found.ordered),
        time("begun_s", "First 8 MiB are back after", |found| found.begun),
        time("pressed_s", "The host is pressed after", |found| found.pressed),
    ]
}

fn run(testbed: &mut Testbed<'_>, series: &mut Series) -> Result<(), LabError> {
    let sizes = sizes(testbed.scale());
    let folder = tempfile::tempdir().map_err(LabError::of_file(std::env::temp_dir()))?;
    let mut record = testbed.start_at(sizes.guest, &folder.path().join("idle.sock"))?;
    let program = Command::AllocTouchExit { bytes: sizes.program_mib << 20 };
    testbed.run_program(&mut record, program, sizes.program_mib)?;
    let daemon = Daemon::start(folder.path(), &Beginning::default())?;
    testbed.events().step(record.guest, "is idle");
    thread::sleep(IDLE);
    let pid = testbed.pid(record.guest)?;
    testbed.events().step(0, "a program of the host takes memory");
    let found = press(pid, sizes.returned_mib, &daemon)?;
    metrics::measure(&metrics(), &found, series);
    let orders = daemon.orders().into_iter().map(|order| order.action);
    series.notes.push(format!("orders: {}", orders.collect::<Vec<_>>().join(", ")));
    series.guests.push(record);
    Ok(())
}

/// Takes memory until the host is pressed, and looks at the guest meanwhile.
fn press(pid: u32, returned_mib: u64, daemon: &Daemon) -> Result<Found, LabError> {
    let is_over = AtomicBool::new(false);
    thread::scope(|scope| {
        let program = scope.spawn(|| take_memory(&is_over));
        let watched = watch(pid, returned_mib, daemon);
        is_over.store(true, Ordering::Relaxed);
        // A thread that has panicked has reported it.
        let _ = program.join();
        watched
    })
}

fn percent(state: MemoryState) -> u64 {
    state.available_kib * 100 / state.total_kib.max(1)
}

/// Takes memory until the host is pressed, and keeps it until the end.
fn take_memory(is_over: &AtomicBool) {
    let mut chunks: Vec<Vec<u8>> = Vec::new();
    while !is_over.load(Ordering::Relaxed) {
        let is_pressed = MemoryState::read().is_ok_and(|state| percent(state) < PRESSED_PERCENT);
        if is_pressed || chunks.len() * STEP_MIB > 1 << 14 {
            thread::sleep(LOOK);
            continue;
        }
        chunks.push(vec![1; STEP_MIB << 20]);
    }
    black_box(&chunks);
}

fn watch(pid: u32, returned_mib: u64, daemon: &Daemon) -> Result<Found, LabError> {
    let mut found = Found::default();
    let (begin, mut crossed) = (Instant::now(), None);
    let mut before_mib = footprint_mib(pid).unwrap_or(0.0);
    while begin.elapsed() < LIMIT && found.returned.is_none() {
        let available = percent(MemoryState::read()?);
        let now_mib = footprint_mib(pid).unwrap_or(0.0);
        if crossed.is_none() && available < TIGHT_PERCENT {
            (crossed, before_mib) = (Some(Instant::now()), now_mib);
        }
        if let Some(crossed) = crossed {
            let since_s = rounded(crossed.elapsed().as_secs_f64());
            if available < PRESSED_PERCENT {
                found.pressed.get_or_insert(since_s);
            }
            if before_mib - now_mib >= STEP_MIB as f64 {
                found.begun.get_or_insert(since_s);
            }
            if before_mib - now_mib >= returned_mib as f64 {
                found.returned = Some(since_s);
            }
        }
        thread::sleep(LOOK);
    }
    found.ordered = crossed.and_then(|crossed| {
        let order = daemon.orders().into_iter().find(|order| order.at >= crossed)?;
        Some(rounded((order.at - crossed).as_secs_f64()))
    });
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_guest_frees_more_than_is_to_come_back_and_the_host_has_room() {
        for scale in [Scale::Demo, Scale::Full] {
            let sizes = sizes(scale);
            // The policy leaves 128 MiB of what is available to an idle guest.
            assert!(sizes.program_mib >= sizes.returned_mib + 128);
            assert!(sizes.program_mib + 128 < sizes.guest.memory_mib);
            let left_mib = sizes.host.memory_mib - sizes.guest.memory_mib;
            assert!(left_mib * 100 > sizes.host.memory_mib * TIGHT_PERCENT);
        }
    }
}
