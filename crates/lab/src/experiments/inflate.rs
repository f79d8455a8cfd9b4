//! Speed of inflating and deflating a guest's balloon, by the encoding of its pages in the driver's
//! messages.
//!
//! A guest fills its balloon to seven eighths of its memory: idle, as in the patch series of 2016
//! that proposed a bitmap (an idle guest of 8 GiB, 7 GiB in the balloon, 4126 ms with arrays of
//! page numbers and 590 ms with the bitmap), and after a program has used all of it, which is the
//! case that gives memory back. Linux's own driver sends 256 page numbers of 4 KiB in a buffer and
//! waits for each (drivers/virtio/virtio_balloon.c).

use ebb_agent::protocol::Command;
use serde::Serialize;

use crate::LabError;
use crate::harness::driver::{Blocks, Driver, Encoding, Module, Tracker};
use crate::harness::experiment::{Experiment, Run, SeriesPlan, parameters};
use crate::harness::monitor::{MonitorKind, Setup};
use crate::harness::size::{GuestSize, HostShape};
use crate::harness::testbed::Testbed;
use crate::report::results::{GuestRecord, Scale, Series};
use crate::report::statistics::rounded;
use rounds::{Direction, Memory, Round};

mod metrics;
mod rounds;

/// The experiment.
pub static INFLATE: Experiment = Experiment {
    name: "inflate",
    summary: "How fast the balloon of a guest inflates to most of its memory and deflates again, \
              by how the driver names its pages",
    host: |scale, _| sizes(scale).host,
    parameters: |scale| parameters(&sizes(scale)),
    metrics: metrics::describe,
    series,
    compare: metrics::compare,
    ..Experiment::DEFAULT
};

/// Sizes of one scale.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
struct Sizes {
    #[serde(flatten)]
    host: HostShape,
    #[serde(flatten)]
    guest: GuestSize,
    balloon_mib: u64,
    program_mib: u64,
    /// Number of inflations while the guest is idle, and after the program.
    rounds: u32,
}

fn sizes(scale: Scale) -> Sizes {
    match scale {
        Scale::Demo => Sizes {
            host: HostShape { memory_mib: 1792, swap_mib: 512, nodes: 1 },
            guest: GuestSize { memory_mib: 1024, cpus: 1 },
            balloon_mib: 768,
            program_mib: 768,
            rounds: 3,
        },
        Scale::Full => Sizes {
            host: HostShape { memory_mib: 10 * 1024, swap_mib: 1024, nodes: 1 },
            guest: GuestSize { memory_mib: 8 * 1024, cpus: 1 },
            balloon_mib: 7 * 1024,
            program_mib: 7 * 1024,
            rounds: 3,
        },
    }
}

fn series() -> Vec<SeriesPlan> {
    let quiet = Setup { reporting: false, ..Setup::EBB };
    let module = |module| Setup { driver: Driver::Module(module), ..quiet };
    let plain = Module { tracker: Tracker::Off, ..Module::DEFAULT };
    let pages = Module { blocks: Blocks::SinglePages, ..plain };
    let pfn = Setup { extension: false, ..module(pages) };
    let bitmap_pages = module(Module { encoding: Encoding::Bitmap, ..pages });
    let by_default = [
        ("stock", "Linux's own driver: arrays of 256 single pages", quiet),
        (metrics::PFN, "ebb_balloon as the standard has it: arrays of 256 single pages", pfn),
        (
            "bitmap",
            "ebb_balloon, bitmaps of the largest free blocks",
            module(Module { encoding: Encoding::Bitmap, ..plain }),
        ),
        (
            "ranges",
            "ebb_balloon, ranges of the largest free blocks",
            module(Module { encoding: Encoding::Ranges, ..plain }),
        ),
        (
            "qemu",
            "the same guest and its own driver under QEMU",
            Setup { monitor: MonitorKind::Qemu, ..quiet },
        ),
    ];
    let when_named = [
        (
            "bitmap-pages",
            "ebb_balloon, bitmaps of single pages, as in the patch series",
            bitmap_pages,
        ),
        (
            "ranges-pages",
            "ebb_balloon, ranges of single pages",
            module(Module { encoding: Encoding::Ranges, ..pages }),
        ),
        (
            "stock-uncleared",
            "Linux's own driver in a guest that does not clear pages at their allocation",
            Setup { clearing: false, ..quiet },
        ),
        (
            "pfn-uncleared",
            "ebb_balloon as the standard has it, in such a guest",
            Setup { clearing: false, ..pfn },
        ),
        (
            "bitmap-pages-uncleared",
            "ebb_balloon, bitmaps of single pages, in such a guest",
            Setup { clearing: false, ..bitmap_pages },
        ),
        (
            "stock-no-thp",
            "Linux's own driver, guest memory without transparent huge pages",
            Setup { huge_pages: false, ..quiet },
        ),
    ];
    let plan = |(name, summary, setup)| SeriesPlan::new(name, summary, Run::Guests(setup, run));
    let named = when_named.map(|row| plan(row).when_named());
    by_default.map(plan).into_iter().chain(named).collect()
}

fn run(testbed: &mut Testbed<'_>, series: &mut Series) -> Result<(), LabError> {
    let sizes = sizes(testbed.scale());
    let mut record = testbed.start_controlled_guest(sizes.guest)?;
    let mut rounds = Vec::new();
    let outcome = measure(testbed, &mut record, sizes, &mut rounds);
    metrics::fill(&rounds, series);
    series.guests.push(record);
    outcome
}

fn measure(
    testbed: &mut Testbed<'_>,
    record: &mut GuestRecord,
    sizes: Sizes,
    rounds: &mut Vec<Round>,
) -> Result<(), LabError> {
    for memory in [Memory::Idle, Memory::Used] {
        for _ in 0..sizes.rounds {
            if memory == Memory::Used {
                let command = Command::AllocTouchExit { bytes: sizes.program_mib << 20 };
                testbed.run_program(record, command, sizes.program_mib)?;
            }
            for direction in [Direction::Inflate, Direction::Deflate] {
                let target_mib = match direction {
                    Direction::Inflate => sizes.balloon_mib,
                    Direction::Deflate => 0,
                };
                let round = Round::measure(testbed, record.guest, memory, direction, target_mib)?;
                if direction == Direction::Inflate {
                    record.idle_rss_mib = Some(rounded(round.left_mib));
                }
                rounds.push(round);
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_balloon_leaves_memory_for_the_guest() {
        for scale in [Scale::Demo, Scale::Full] {
            let sizes = sizes(scale);
            assert!(sizes.balloon_mib + 256 <= sizes.guest.memory_mib);
            assert!(sizes.guest.memory_mib + 512 < sizes.host.memory_mib, "the host must not swap");
        }
    }

    #[test]
    fn only_the_standards_series_do_not_use_the_extension() {
        for plan in series() {
            let setup = plan.setup().unwrap();
            assert_eq!(!setup.extension, plan.name.starts_with(metrics::PFN), "{}", plan.name);
            assert!(!setup.reporting, "only the balloon returns memory");
        }
    }
}
