//! Time that memhog takes in guests on a host that is too small for all of them at once.
//!
//! The second use case of the page hinting series v10 for Linux (2019): three guests, `memhog` in
//! one after the other. Without reporting the guests keep their memory, and the last one makes the
//! host swap.

use std::collections::BTreeMap;

use ebb_agent::protocol::Command;
use serde::Serialize;

use crate::LabError;
use crate::harness::driver::{Driver, Tracker};
use crate::harness::experiment::{Experiment, Needs, Run, SeriesPlan, parameters};
use crate::harness::monitor::{MonitorKind, Setup};
use crate::harness::size::{GuestSize, HostShape};
use crate::harness::testbed::Testbed;
use crate::report::metrics::{self, Metric};
use crate::report::results::{GuestRecord, Scale, Series};

/// The experiment.
pub static MEMHOG: Experiment = Experiment {
    name: "memhog",
    summary: "How long memhog takes in each of three guests, one after the other, on a host too \
              small for all three",
    host: |scale, _| sizes(scale).host,
    parameters: |scale| parameters(&sizes(scale)),
    guests: |_| GUESTS,
    needs: Needs { memhog: true, ..Experiment::DEFAULT.needs },
    metrics: || metrics::describe(metrics()),
    series,
    ..Experiment::DEFAULT
};

/// Guests of the published experiment.
const GUESTS: u32 = 3;

/// Sizes of one scale.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
struct Sizes {
    #[serde(flatten)]
    host: HostShape,
    #[serde(flatten)]
    guest: GuestSize,
    /// Memory that memhog takes: as much as the guest's kernel leaves. The guests have no swap.
    memhog_mib: u64,
}

fn sizes(scale: Scale) -> Sizes {
    match scale {
        Scale::Demo => Sizes {
            host: HostShape { memory_mib: 1792, swap_mib: 1024, nodes: 1 },
            guest: GuestSize { memory_mib: 640, cpus: 1 },
            memhog_mib: 512,
        },
        Scale::Full => Sizes {
            host: HostShape { memory_mib: 15 * 1024, swap_mib: 4096, nodes: 1 },
            guest: GuestSize { memory_mib: 6 * 1024, cpus: 4 },
            memhog_mib: 5376,
        },
    }
}

fn series() -> Vec<SeriesPlan> {
    let ebb = Setup::EBB;
    let tracking = |tracker| Setup { driver: Driver::tracking(tracker), ..ebb };
    let plan = |name, summary, setup| SeriesPlan::new(name, summary, Run::Guests(setup, run));
    vec![
        plan(
            "no-reporting",
            "Ebb, the balloon offers no free page reporting",
            Setup { reporting: false, ..ebb },
        ),
        plan("reporting", "Ebb with free page reporting", ebb),
        plan(
            "bitmap",
            "Ebb with its driver in the guests, which finds free blocks by a bitmap for each zone",
            tracking(Tracker::Bitmap),
        ),
        plan(
            "percpu",
            "Ebb with its driver in the guests, which finds free pages by an array for each CPU",
            tracking(Tracker::Percpu),
        ),
        plan(
            "qemu-reporting",
            "the same guests under QEMU with free page reporting",
            Setup { monitor: MonitorKind::Qemu, ..ebb },
        ),
    ]
}

/// Results of a series.
#[derive(Debug, Default)]
struct Found {
    /// Time that memhog took, by guest.
    memhog_s: BTreeMap<u32, f64>,
    swap_used_mib: f64,
}

fn metrics() -> Vec<Metric<Found>> {
    let of_guest = |guest: u32| {
        let (name, title) = (format!("memhog_guest{guest}_s"), format!("memhog in guest {guest}"));
        Metric::lower(name, title, "s", move |found: &Found| found.memhog_s.get(&guest).copied())
    };
    let mut metrics: Vec<_> = (1..=GUESTS).map(of_guest).collect();
    metrics.push(Metric::lower("swap_used_mib", "Swap used at the end", "MiB", |found: &Found| {
        Some(found.swap_used_mib)
    }));
    metrics
}

fn run(testbed: &mut Testbed<'_>, series: &mut Series) -> Result<(), LabError> {
    let sizes = sizes(testbed.scale());
    let mut records = Vec::new();
    for _ in 0..testbed.guests(GUESTS) {
        records.push(testbed.start_guest(sizes.guest)?);
    }
    let mut found = Found::default();
    let outcome =
        records.iter_mut().try_for_each(|record| hog(testbed, series, &mut found, record, sizes));
    found.swap_used_mib = testbed.usage()?.swap_used_mib;
    metrics::measure(&metrics(), &found, series);
    let ended = testbed.find_ended(&mut records);
    let measured =
        outcome.and_then(|()| testbed.measure_idle(&mut records, sizes.guest)).and(ended);
    series.guests = records;
    measured
}

/// Runs memhog in one guest and waits until its memory is returned.
fn hog(
    testbed: &mut Testbed<'_>,
    series: &mut Series,
    found: &mut Found,
    record: &mut GuestRecord,
    sizes: Sizes,
) -> Result<(), LabError> {
    let command = Command::Memhog { bytes: sizes.memhog_mib << 20 };
    let answer = testbed.run_program(record, command, sizes.memhog_mib)?;
    // By the host's clock: a guest may not see the time for which it waits for its host's swap.
    found.memhog_s.insert(record.guest, answer.waited.as_secs_f64());
    if let (1, Some(program)) = (record.guest, answer.result["program"].as_str()) {
        series.notes.push(format!("program: {program} {}m", sizes.memhog_mib));
    }
    testbed.wait_for_return(record, sizes.memhog_mib)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_guests_fit_and_three_do_not() {
        for scale in [Scale::Demo, Scale::Full] {
            let sizes = sizes(scale);
            // A guest occupies 100 MiB in addition to its program, and as much before it; the host
            // needs memory, too.
            let with_programs = |count: u64| count * sizes.memhog_mib + 3 * 100 + 256;
            assert!(
                with_programs(2) < sizes.host.memory_mib
                    && sizes.host.memory_mib < with_programs(3)
            );
            assert!(with_programs(3) < sizes.host.memory_mib + sizes.host.swap_mib);
            assert!(sizes.memhog_mib < sizes.guest.memory_mib);
        }
    }
}
