//! How long a guest takes to another host, and what of its memory goes over the link.
//!
//! The hints of free pages were proposed with an idle guest of 8 GiB that moved over 10 Gbit/s in
//! 0.5 s instead of 2 s, because its free pages were not sent (Li, "Fast (de)inflating & fast live
//! migration", 2016). Here such a guest has used most of its memory and freed it again, is moved
//! from one network namespace to the other over a link of a known rate, and the next time back.
//! What it holds is checked after each migration.

use std::collections::BTreeMap;

use crate::LabError;
use crate::harness::driver::{Driver, Module, Tracker};
use crate::harness::experiment::{
    Experiment, HostShape, NeedsNetwork, Runs, SeriesPlan, Subject as Of,
};
use crate::harness::link::Rate;
use crate::harness::monitor::{Clearing, GuestSize, Hinting, MonitorKind, Reporting, Setup};
use crate::harness::testbed::Testbed;
use crate::report::results::{MetricInfo, Scale, Series};
use rounds::Plan;
use strategies::{FreePages, Settings, Switch, Way};

mod link_check;
mod metrics;
mod rounds;
mod strategies;
mod subject;

/// The experiment.
#[derive(Debug, Clone, Copy)]
pub struct Migrate;

/// The links.
const FAST: Rate = Rate::Megabits(10_000);
const SLOW: Rate = Rate::Megabits(1000);

/// Sizes of one scale.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Sizes {
    /// Room for a guest at both ends.
    host: HostShape,
    guest: GuestSize,
    /// What the guest writes and frees before each migration.
    program_mib: u64,
    /// What it keeps, to be checked.
    hold_mib: u64,
    /// What it rewrites while it is moved under load, and for how long.
    working_set_mib: u64,
    load_s: u64,
    /// How often it is moved idle over the fast link.
    repeats: u32,
}

fn sizes(scale: Scale) -> Sizes {
    match scale {
        Scale::Demo => Sizes {
            host: HostShape { memory_mib: 2816, swap_mib: 256, nodes: 1 },
            guest: GuestSize { memory_mib: 1024, cpus: 1 },
            program_mib: 768,
            hold_mib: 32,
            working_set_mib: 32,
            load_s: 10,
            repeats: 1,
        },
        Scale::Full => Sizes {
            host: HostShape { memory_mib: 17 * 1024 + 512, swap_mib: 512, nodes: 1 },
            guest: GuestSize { memory_mib: 8 * 1024, cpus: 1 },
            program_mib: 7 * 1024,
            hold_mib: 256,
            working_set_mib: 128,
            load_s: 60,
            repeats: 2,
        },
    }
}

/// A series: its name, what it shows, how its guests are run and how they are moved.
struct Row {
    name: &'static str,
    summary: &'static str,
    runs: Runs,
    setup: Setup,
    way: Way,
}

/// The series that the others are compared with.
const ALL_PAGES: &str = "all-pages";

/// All series.
fn rows() -> [Row; 9] {
    let quiet = Setup { reporting: Reporting::Off, ..Setup::EBB };
    let module = Driver::Module(Module { tracker: Tracker::Off, ..Module::DEFAULT });
    let qemu = Setup { monitor: MonitorKind::Qemu, ..quiet };
    let ebb = |zero_pages, holes, free_pages| Way::Ebb(Settings { zero_pages, holes, free_pages });
    let lean = |free_pages| ebb(Switch::On, Switch::On, free_pages);
    let row = |name, summary, setup, way| Row { name, summary, runs: Runs::ByDefault, setup, way };
    let named =
        |name, summary, setup, way| Row { runs: Runs::WhenNamed, ..row(name, summary, setup, way) };
    let qemu_hints = Setup { hinting: Hinting::On, ..qemu };
    [
        row(
            ALL_PAGES,
            "every page is sent, whatever is in it",
            quiet,
            ebb(Switch::Off, Switch::Off, FreePages::Off),
        ),
        row(
            "zero-skip",
            "pages that are all zero are not sent",
            quiet,
            ebb(Switch::On, Switch::Off, FreePages::Off),
        ),
        row(
            "hints",
            "nor are pages that Linux's driver names as free (free page hinting)",
            quiet,
            lean(FreePages::Hints),
        ),
        row(
            "unused-query",
            "nor are pages that Ebb's driver answers to be unused",
            Setup { driver: module, ..quiet },
            lean(FreePages::Query),
        ),
        row(
            "reported",
            "free pages were reported before, and the host does not hold them any more",
            Setup::EBB,
            lean(FreePages::Off),
        ),
        row("qemu", "the same guest under QEMU", qemu, Way::Qemu),
        row("qemu-hints", "the same with free page hinting", qemu_hints, Way::Qemu),
        named(
            "hints-uncleared",
            "as hints, in a guest that does not clear pages at their allocation, also those that it names",
            Setup { clearing: Clearing::Off, ..quiet },
            lean(FreePages::Hints),
        ),
        named(
            "qemu-hints-uncleared",
            "as qemu-hints, in such a guest",
            Setup { clearing: Clearing::Off, ..qemu_hints },
            Way::Qemu,
        ),
    ]
}

impl Experiment for Migrate {
    fn name(&self) -> &'static str {
        "migrate"
    }

    fn summary(&self) -> &'static str {
        "How long an idle guest that has used most of its memory takes to another host, and what of its memory is sent"
    }

    fn host(&self, scale: Scale) -> HostShape {
        sizes(scale).host
    }

    fn parameters(&self, scale: Scale) -> BTreeMap<String, u64> {
        let sizes = sizes(scale);
        let rate = |rate: Rate| match rate {
            Rate::Unshaped => 0,
            Rate::Megabits(rate) => rate,
        };
        BTreeMap::from([
            ("host_mib".to_owned(), sizes.host.memory_mib),
            ("swap_mib".to_owned(), sizes.host.swap_mib),
            ("guest_mib".to_owned(), sizes.guest.memory_mib),
            ("guest_cpus".to_owned(), u64::from(sizes.guest.cpus)),
            ("program_mib".to_owned(), sizes.program_mib),
            ("hold_mib".to_owned(), sizes.hold_mib),
            ("working_set_mib".to_owned(), sizes.working_set_mib),
            ("load_s".to_owned(), sizes.load_s),
            ("repeats".to_owned(), u64::from(sizes.repeats)),
            ("fast_mbit_s".to_owned(), rate(FAST)),
            ("slow_mbit_s".to_owned(), rate(SLOW)),
            ("downtime_limit_ms".to_owned(), strategies::DOWNTIME_LIMIT_MS),
        ])
    }

    fn metrics(&self) -> Vec<MetricInfo> {
        metrics::metrics()
    }

    fn series(&self) -> Vec<SeriesPlan> {
        let plan = |row: Row| SeriesPlan {
            name: row.name,
            summary: row.summary,
            runs: row.runs,
            subject: Of::Guests(row.setup),
        };
        rows().map(plan).into()
    }

    fn needs_network(&self) -> NeedsNetwork {
        NeedsNetwork::Yes
    }

    fn guests(&self, _scale: Scale) -> u32 {
        1
    }

    fn run(&self, testbed: &mut Testbed<'_>, series: &mut Series) -> Result<(), LabError> {
        let row = rows().into_iter().find(|row| row.name == series.name);
        let way = row.map_or(Way::Qemu, |row| row.way);
        series.setup.push_str(&way.describe());
        rounds::run(testbed, Plan { sizes: sizes(testbed.scale()), way }, series)
    }

    fn compare(&self, series: &mut [Series]) {
        metrics::compare(series);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_guests_and_what_they_do_fit() {
        for scale in [Scale::Demo, Scale::Full] {
            let sizes = sizes(scale);
            assert!(sizes.hold_mib + sizes.program_mib + 192 <= sizes.guest.memory_mib);
            assert!(sizes.working_set_mib < sizes.program_mib);
            assert!(
                2 * sizes.guest.memory_mib + 512 <= sizes.host.memory_mib,
                "no swap shall disturb"
            );
        }
    }

    #[test]
    fn only_one_series_gives_its_memory_back_before() {
        for row in rows() {
            assert_eq!(
                row.setup.reporting == Reporting::On,
                row.name == "reported",
                "{}",
                row.name
            );
            assert_eq!(
                row.setup.monitor == MonitorKind::Qemu,
                row.way == Way::Qemu,
                "{}",
                row.name
            );
        }
    }
}
