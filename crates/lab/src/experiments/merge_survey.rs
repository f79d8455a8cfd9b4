//! Which pages of real guests are equal, and how they lie: what there is to merge, before anything
//! is merged.
//!
//! The memory of each guest is read from outside, page by page, while the guest is idle.

use ebb_agent::protocol::Command;
use serde::Serialize;

use super::density;
use crate::LabError;
use crate::harness::debian;
use crate::harness::devices::Device;
use crate::harness::experiment::{Experiment, Needs, Run, SeriesPlan, parameters};
use crate::harness::monitor::{Setup, System};
use crate::harness::size::{GuestSize, HostShape};
use crate::harness::survey::contents_of_process;
use crate::harness::testbed::Testbed;
use crate::report::figures::DataTable;
use crate::report::metrics::{self, Metric};
use crate::report::results::{Scale, Series};
use equal::{Equals, LENGTHS};

mod equal;

/// The experiment.
pub static MERGE_SURVEY: Experiment = Experiment {
    name: "merge-survey",
    summary: "Which pages of idle guests are equal, and in how long runs",
    host: |scale, _| sizes(scale).host,
    parameters: |scale| parameters(&sizes(scale)),
    guests: |scale| sizes(scale).guests,
    needs: Needs {
        guest_modules: &["crc32c_generic", "ext4"],
        guest_programs: &[debian::SHELL],
        ..Experiment::DEFAULT.needs
    },
    metrics: || metrics::describe(metrics()),
    series: || {
        let plan = |name, summary, setup| SeriesPlan::new(name, summary, Run::Guests(setup, run));
        let uncompressed = Setup { uncompressed_kernel: true, ..Setup::EBB };
        vec![
            plan(BOOTED, "guests that have booted", Setup::EBB),
            plan(
                "program",
                "guests in which a program has used most of the memory and exited",
                Setup::EBB,
            ),
            plan(
                "uncompressed",
                "the same with an uncompressed kernel, which chooses no random addresses for \
                 itself",
                uncompressed,
            ),
            plan(
                DEBIAN,
                "the same, and then a Python, a compiler and others have run in a Debian on one \
                 disk, in each guest in another order",
                Setup { system: System::AgentWithDebian, ..uncompressed },
            ),
        ]
    },
    ..Experiment::DEFAULT
};

/// Name of the series without a program.
const BOOTED: &str = "booted";
/// Name of the series in which programs read files.
const DEBIAN: &str = "debian";
/// What they do, each guest beginning with another one.
const PROGRAMS: [&str; 4] = [
    "python3 -c \"import asyncio, ctypes, decimal, email.mime.text, http.client, json, sqlite3, \
     logging.config, multiprocessing.pool, ssl, tarfile, unittest.mock, xml.etree.ElementTree\"",
    "gcc -O1 -c -o /tmp/blocksort.o /usr/src/bzip2/blocksort.c",
    "python3 -m test -q test_bisect test_heapq",
    "dpkg --list",
];

/// Sizes of one scale: those of the experiment `density`, with few guests.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
struct Sizes {
    #[serde(flatten)]
    host: HostShape,
    #[serde(flatten)]
    guest: GuestSize,
    program_mib: u64,
    guests: u32,
}

/// Number of guests.
const GUESTS: u32 = 3;

fn sizes(scale: Scale) -> Sizes {
    let density::Sizes { host, guest, program_mib, .. } = density::sizes(scale);
    Sizes { host, guest, program_mib, guests: GUESTS }
}

fn metrics() -> Vec<Metric<Equals>> {
    fn mib(pages: u64) -> f64 {
        pages as f64 / 256.0
    }
    fn each(all: &Equals, pages: u64) -> Option<f64> {
        (all.guests > 0).then(|| mib(pages) / all.guests as f64)
    }
    fn of_equal(all: &Equals, pages: u64) -> Option<f64> {
        (all.equal > 0).then(|| pages as f64 * 100.0 / all.equal as f64)
    }
    let runs = |name: &str, title: &str, from: usize, to: usize| {
        Metric::lower(name, title, "%", move |all: &Equals| {
            of_equal(all, all.runs[from..to].iter().map(|(_, pages)| pages).sum())
        })
    };
    vec![
        Metric::lower("present_mib", "Memory of a guest at the host", "MiB", |all: &Equals| {
            each(all, all.present)
        }),
        Metric::lower("zero_mib", "of these zeros", "MiB", |all: &Equals| each(all, all.zeros)),
        Metric::lower("equal_mib", "of these equal to another page", "MiB", |all: &Equals| {
            each(all, all.equal)
        }),
        Metric::higher("surplus_mib", "What merging could free", "MiB", |all: &Equals| {
            each(all, all.zeros + all.surplus)
        }),
        Metric::higher(
            "surplus_alone_mib",
            "What merging within a guest could free",
            "MiB",
            |all: &Equals| each(all, all.zeros + all.surplus_alone),
        ),
        Metric::higher(
            "same_place_percent",
            "Equal pages that another guest has at the same place",
            "%",
            |all: &Equals| of_equal(all, all.same_place),
        ),
        Metric::higher(
            "dense_percent",
            "Equal pages in blocks of 2 MiB of which half are equal pages or zeros",
            "%",
            |all: &Equals| of_equal(all, all.dense),
        ),
        runs("single_percent", "Equal pages that are single", 0, 1),
        runs("short_percent", "in runs of 2 to 7", 1, 3),
        runs("medium_percent", "in runs of 8 to 63", 3, 6),
        runs("long_percent", "in runs of 64 and more", 6, LENGTHS),
    ]
}

fn run(testbed: &mut Testbed<'_>, series: &mut Series) -> Result<(), LabError> {
    let sizes = sizes(testbed.scale());
    let is_debian = series.name == DEBIAN;
    let disk = is_debian.then(|| testbed.work_disk()).transpose()?;
    let disk = disk.as_ref().map(|disk| Device::SharedDisk { path: disk.path() });
    for turn in 0..testbed.guests(sizes.guests) as usize {
        let mut record = testbed.start_with(sizes.guest, disk.as_slice())?;
        if series.name != BOOTED {
            let command = Command::AllocTouchExit { bytes: sizes.program_mib << 20 };
            testbed.run_program(&mut record, command, sizes.program_mib)?;
        }
        if is_debian {
            testbed.events().step(record.guest, "runs programs of a Debian");
            let mut programs = PROGRAMS;
            programs.rotate_left(turn % PROGRAMS.len());
            let guest = testbed.guest(record.guest)?;
            debian::enter(guest)?;
            for program in programs {
                debian::run(guest, program)?;
            }
        }
        testbed.wait_for_return(&mut record, sizes.program_mib)?;
        series.guests.push(record);
    }
    let mut memories = Vec::new();
    for guest in series.guests.iter().map(|record| record.guest).collect::<Vec<_>>() {
        testbed.events().step(guest, "its memory is read");
        memories.push(contents_of_process(testbed.pid(guest)?)?);
    }
    let found = Equals::of(&memories);
    metrics::measure(&metrics(), &found, series);
    series.details.push(table(&found));
    Ok(())
}

/// Numbers of runs by length.
fn table(found: &Equals) -> DataTable {
    let rows: Vec<(String, u64, u64)> = found
        .runs
        .iter()
        .enumerate()
        .map(|(power, (runs, pages))| {
            let (from, to) = (1_u64 << power, (2_u64 << power) - 1);
            let length = match power {
                0 => "1".to_owned(),
                power if power + 1 == LENGTHS => format!("{from} and more"),
                _ => format!("{from} to {to}"),
            };
            (length, *runs, *pages)
        })
        .collect();
    DataTable::of(
        "runs of neighbours that are equal to neighbours elsewhere",
        &rows,
        &[
            ("pages", &|row| row.0.as_str().into()),
            ("runs", &|row| row.1.into()),
            ("pages in them", &|row| row.2.into()),
            ("of all equal pages, %", &|row| {
                (row.2 as f64 * 100.0 / found.equal.max(1) as f64).into()
            }),
        ],
    )
}
