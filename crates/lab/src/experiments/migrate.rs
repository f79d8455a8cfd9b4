//! Time of a guest's migration to another host, and the part of its memory that is sent.
//!
//! The hints of free pages were proposed with an idle guest of 8 GiB that moved over 10 Gbit/s in
//! 0.5 s instead of 2 s, because its free pages were not sent (Li, "Fast (de)inflating & fast live
//! migration", 2016). Here such a guest uses most of its memory, frees it, and is moved from one
//! network namespace to the other over a link of a known rate, and back the next time. The memory
//! that it holds is checked after each migration.

use serde::Serialize;

use crate::LabError;
use crate::harness::driver::{Driver, Module, Tracker};
use crate::harness::experiment::{Experiment, Needs, Run, Runs, SeriesPlan, parameters};
use crate::harness::link::{Link, Rate};
use crate::harness::monitor::{MonitorKind, Setup};
use crate::harness::size::{GuestSize, HostShape};
use crate::harness::testbed::Testbed;
use crate::report::results::{Scale, Series};
use link_check::Carried;
use strategies::{Settings, Strategy};

mod link_check;
mod metrics;
mod rounds;
mod strategies;
mod subject;

/// The experiment.
pub static MIGRATE: Experiment = Experiment {
    name: "migrate",
    summary: "How long an idle guest that has used most of its memory takes to another host, and \
              what of its memory is sent",
    host: |scale, _| sizes(scale).host,
    parameters: |scale| {
        let constants = [
            ("fast_mbit_s", FAST_MBIT_S),
            ("slow_mbit_s", SLOW_MBIT_S),
            ("downtime_limit_ms", strategies::DOWNTIME_LIMIT_MS),
        ];
        let mut parameters = parameters(&sizes(scale));
        parameters.extend(constants.map(|(name, value)| (name.to_owned(), value)));
        parameters
    },
    needs: Needs { network: true, ..Experiment::DEFAULT.needs },
    metrics: metrics::describe,
    series: || {
        let plan = |(runs, name, summary, setup, _)| SeriesPlan {
            runs,
            ..SeriesPlan::new(name, summary, Run::Guests(setup, run))
        };
        rows().map(plan).into()
    },
    compare: metrics::compare,
    ..Experiment::DEFAULT
};

/// The links.
const FAST_MBIT_S: u64 = 10_000;
const SLOW_MBIT_S: u64 = 1000;
const FAST: Rate = Rate::Megabits(FAST_MBIT_S);
const SLOW: Rate = Rate::Megabits(SLOW_MBIT_S);

/// Sizes of one scale.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
struct Sizes {
    /// Memory for a guest at both ends.
    #[serde(flatten)]
    host: HostShape,
    #[serde(flatten)]
    guest: GuestSize,
    /// Memory that the guest writes and frees before each migration.
    program_mib: u64,
    /// Memory that it keeps, for checks.
    hold_mib: u64,
    /// Memory that it rewrites during a migration under load, and the duration.
    working_set_mib: u64,
    load_s: u64,
    /// Number of migrations while idle over the fast link.
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

/// The series that the others are compared with.
const ALL_PAGES: &str = "all-pages";

/// A series: when it runs, its name, its summary, its setup and its strategy.
type Row = (Runs, &'static str, &'static str, Setup, Strategy);

/// All series.
fn rows() -> [Row; 9] {
    let quiet = Setup { reporting: false, ..Setup::EBB };
    let module = Driver::Module(Module { tracker: Tracker::Off, ..Module::DEFAULT });
    let qemu = Setup { monitor: MonitorKind::Qemu, ..quiet };
    let ebb =
        |zero_pages, holes, free_pages| Strategy::Ebb(Settings { zero_pages, holes, free_pages });
    let lean = |free_pages| ebb("on", "on", free_pages);
    let qemu_hints = Setup { hinting: true, ..qemu };
    let row = |name, summary, setup, strategy| (Runs::ByDefault, name, summary, setup, strategy);
    let named = |name, summary, setup, strategy| (Runs::WhenNamed, name, summary, setup, strategy);
    [
        row(
            ALL_PAGES,
            "every page is sent, regardless of its content",
            quiet,
            ebb("off", "off", "off"),
        ),
        row("zero-skip", "pages that are all zero are not sent", quiet, ebb("on", "off", "off")),
        row(
            "hints",
            "nor are pages that Linux's driver names as free (free page hinting)",
            quiet,
            lean("hints"),
        ),
        row(
            "unused-query",
            "nor are pages that Ebb's driver reports as unused on request",
            Setup { driver: module, ..quiet },
            lean("query"),
        ),
        row(
            "reported",
            "free pages were reported before and are no longer populated",
            Setup::EBB,
            lean("off"),
        ),
        row("qemu", "the same guest under QEMU", qemu, Strategy::Qemu),
        row("qemu-hints", "the same with free page hinting", qemu_hints, Strategy::Qemu),
        named(
            "hints-uncleared",
            "as hints, in a guest that does not clear pages at their allocation, also those that \
             it names",
            Setup { clearing: false, ..quiet },
            lean("hints"),
        ),
        named(
            "qemu-hints-uncleared",
            "as qemu-hints, in such a guest",
            Setup { clearing: false, ..qemu_hints },
            Strategy::Qemu,
        ),
    ]
}

fn run(testbed: &mut Testbed<'_>, series: &mut Series) -> Result<(), LabError> {
    let row = rows().into_iter().find(|(_, name, ..)| *name == series.name);
    let strategy = row.map_or(Strategy::Qemu, |(.., strategy)| strategy);
    series.setup.push_str(&strategy.describe());
    let link = Link::create()?;
    testbed.events().step(0, "measures the link");
    let carried = Carried::measure(&link)?;
    series.notes.extend(carried.notes());
    let mut moved = Vec::new();
    let sizes = sizes(testbed.scale());
    let outcome = rounds::run(testbed, &link, (sizes, strategy), series, &mut moved);
    metrics::fill(moved, carried, series);
    outcome
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_guests_and_their_programs_fit() {
        for scale in [Scale::Demo, Scale::Full] {
            let sizes = sizes(scale);
            assert!(sizes.hold_mib + sizes.program_mib + 192 <= sizes.guest.memory_mib);
            assert!(sizes.working_set_mib < sizes.program_mib);
            assert!(
                2 * sizes.guest.memory_mib + 512 <= sizes.host.memory_mib,
                "the host must not swap"
            );
        }
    }

    #[test]
    fn only_one_series_returns_its_memory_before() {
        for (_, name, _, setup, strategy) in rows() {
            assert_eq!(setup.reporting, name == "reported", "{name}");
            assert_eq!(setup.monitor == MonitorKind::Qemu, strategy == Strategy::Qemu, "{name}");
        }
    }
}
