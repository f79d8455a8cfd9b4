//! How fast a guest can be made smaller and larger again, by how its driver names the pages of the
//! balloon.
//!
//! A guest fills its balloon to seven eighths of its memory: idle, as in the patch series of 2016
//! that proposed a bitmap (an idle guest of 8 GiB, 7 GiB in the balloon, 4126 ms with arrays of
//! page numbers and 590 ms with the bitmap), and after a program has used all of it, which is the
//! case that gives memory back. Linux's own driver sends 256 page numbers of 4 KiB in a buffer and
//! waits for each (drivers/virtio/virtio_balloon.c).

use std::collections::BTreeMap;

use ebb_agent::protocol::Command;

use crate::LabError;
use crate::harness::driver::{Blocks, Driver, Encoding, Extension, Module, Tracker};
use crate::harness::experiment::{Experiment, HostShape, Runs, SeriesPlan, Subject};
use crate::harness::monitor::{Clearing, GuestSize, HugePages, MonitorKind, Reporting, Setup};
use crate::harness::testbed::Testbed;
use crate::report::results::{GuestRecord, MetricInfo, Scale, Series, rounded};
use rounds::{Direction, Memory, Round};

mod metrics;
mod rounds;

/// The experiment.
#[derive(Debug, Clone, Copy)]
pub struct Inflate;

/// Sizes of one scale.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Sizes {
    host: HostShape,
    guest: GuestSize,
    balloon_mib: u64,
    program_mib: u64,
    /// How often the balloon is inflated while the guest is idle, and how often after the program.
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

impl Experiment for Inflate {
    fn name(&self) -> &'static str {
        "inflate"
    }

    fn summary(&self) -> &'static str {
        "How fast the balloon of a guest inflates to most of its memory and deflates again, by how the driver names its \
         pages"
    }

    fn host(&self, scale: Scale) -> HostShape {
        sizes(scale).host
    }

    fn parameters(&self, scale: Scale) -> BTreeMap<String, u64> {
        let sizes = sizes(scale);
        BTreeMap::from([
            ("host_mib".to_owned(), sizes.host.memory_mib),
            ("swap_mib".to_owned(), sizes.host.swap_mib),
            ("guest_mib".to_owned(), sizes.guest.memory_mib),
            ("guest_cpus".to_owned(), u64::from(sizes.guest.cpus)),
            ("balloon_mib".to_owned(), sizes.balloon_mib),
            ("program_mib".to_owned(), sizes.program_mib),
            ("rounds".to_owned(), u64::from(sizes.rounds)),
        ])
    }

    fn metrics(&self) -> Vec<MetricInfo> {
        metrics::metrics()
    }

    fn series(&self) -> Vec<SeriesPlan> {
        let quiet = Setup { reporting: Reporting::Off, ..Setup::EBB };
        let module = |module| Setup { driver: Driver::Module(module), ..quiet };
        let plain = Module { tracker: Tracker::Off, ..Module::DEFAULT };
        let pages = Module { blocks: Blocks::SinglePages, ..plain };
        let pfn = Setup { extension: Extension::Withheld, ..module(pages) };
        let bitmap_pages = module(Module { encoding: Encoding::Bitmap, ..pages });
        let plan = |name, summary, runs, setup| SeriesPlan {
            name,
            summary,
            runs,
            subject: Subject::Guests(setup),
        };
        vec![
            plan("stock", "Linux's own driver: arrays of 256 single pages", Runs::ByDefault, quiet),
            plan(
                metrics::PFN,
                "ebb_balloon as the standard has it: arrays of 256 single pages",
                Runs::ByDefault,
                pfn,
            ),
            plan(
                "bitmap",
                "ebb_balloon, bitmaps of the largest free blocks",
                Runs::ByDefault,
                module(Module { encoding: Encoding::Bitmap, ..plain }),
            ),
            plan(
                "ranges",
                "ebb_balloon, ranges of the largest free blocks",
                Runs::ByDefault,
                module(Module { encoding: Encoding::Ranges, ..plain }),
            ),
            plan(
                "qemu",
                "the same guest and its own driver under QEMU",
                Runs::ByDefault,
                Setup { monitor: MonitorKind::Qemu, ..quiet },
            ),
            plan(
                "bitmap-pages",
                "ebb_balloon, bitmaps of single pages, as in the patch series",
                Runs::WhenNamed,
                bitmap_pages,
            ),
            plan(
                "ranges-pages",
                "ebb_balloon, ranges of single pages",
                Runs::WhenNamed,
                module(Module { encoding: Encoding::Ranges, ..pages }),
            ),
            plan(
                "stock-uncleared",
                "Linux's own driver in a guest that does not clear pages at their allocation",
                Runs::WhenNamed,
                Setup { clearing: Clearing::Off, ..quiet },
            ),
            plan(
                "pfn-uncleared",
                "ebb_balloon as the standard has it, in such a guest",
                Runs::WhenNamed,
                Setup { clearing: Clearing::Off, ..pfn },
            ),
            plan(
                "bitmap-pages-uncleared",
                "ebb_balloon, bitmaps of single pages, in such a guest",
                Runs::WhenNamed,
                Setup { clearing: Clearing::Off, ..bitmap_pages },
            ),
            plan(
                "stock-no-thp",
                "Linux's own driver, guest memory without transparent huge pages",
                Runs::WhenNamed,
                Setup { huge_pages: HugePages::Off, ..quiet },
            ),
        ]
    }

    fn guests(&self, _scale: Scale) -> u32 {
        1
    }

    fn run(&self, testbed: &mut Testbed<'_>, series: &mut Series) -> Result<(), LabError> {
        let sizes = sizes(testbed.scale());
        let mut record = testbed.start_controlled_guest(sizes.guest)?;
        let mut rounds = Vec::new();
        let outcome = measure(testbed, &mut record, sizes, &mut rounds);
        metrics::series(&rounds, series);
        series.guests.push(record);
        outcome
    }

    fn compare(&self, series: &mut [Series]) {
        metrics::compare(series);
    }
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
    fn the_balloon_leaves_the_guest_room_to_live() {
        for scale in [Scale::Demo, Scale::Full] {
            let sizes = sizes(scale);
            assert!(sizes.balloon_mib + 256 <= sizes.guest.memory_mib);
            assert!(sizes.guest.memory_mib + 512 < sizes.host.memory_mib, "no swap shall disturb");
        }
    }

    #[test]
    fn only_the_standards_series_do_without_the_extension() {
        for plan in Inflate.series() {
            let Subject::Guests(setup) = plan.subject else { panic!("{} has no guest", plan.name) };
            assert_eq!(
                setup.extension == Extension::Withheld,
                plan.name.starts_with(metrics::PFN),
                "{}",
                plan.name
            );
            assert_eq!(setup.reporting, Reporting::Off, "only the balloon returns memory");
        }
    }
}
