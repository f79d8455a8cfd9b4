//! What one call that makes an idle guest small returns to the host, and what it costs the guest's
//! next work.
//!
//! A Debian guest builds a package and runs Python's tests, a program uses most of its memory, and
//! most files are read once: what remains at the host is page cache and fragments more than free
//! memory. Host memory is that of the whole host, so that a guest's cache that moves into the
//! host's counts, and the guest's disk is read past the host's cache.
//!
//! The next work is compared within the guest: in each round it works once without having been
//! parked and once after it, each time after the same program and the same reads. So both have the
//! same history, on a machine whose speed varies with time and from guest to guest. Each history
//! begins without caches: a file that is read once a history would be read twice or more, and a
//! kernel keeps what is read again.

use std::thread;
use std::time::Duration;

use ebb_agent::protocol::Command;
use serde::Serialize;

use crate::LabError;
use crate::harness::devices::{Device, HostCache, QemuEngine};
use crate::harness::driver::{Driver, Module};
use crate::harness::experiment::{Experiment, Needs, Run, SeriesPlan, parameters};
use crate::harness::monitor::{Idle, MonitorKind, Setup, System};
use crate::harness::size::{GuestSize, HostShape};
use crate::harness::testbed::Testbed;
use crate::report::metrics::{self, Metric};
use crate::report::results::{GuestRecord, Scale, Series};
use crate::report::statistics::rounded;
use call::Stage;
use large::{LARGE, LARGE_LEAN};
use many::MANY;
use memory::Moment;
use work::Work;

mod call;
mod large;
mod many;
mod memory;
mod work;

/// The experiment.
pub static PARK: Experiment = Experiment {
    name: "park",
    summary: "What one call that makes an idle guest small returns to the host, and what it costs \
              the guest's next work",
    host: |scale, series| sizes(scale).host_of(series),
    parameters: |scale| parameters(&sizes(scale)),
    needs: Needs {
        // The file system of the guest's disk, and its checksums.
        guest_modules: &["crc32c_generic", "ext4"],
        ..Experiment::DEFAULT.needs
    },
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
    /// Memory of the program that ends before the guest is idle.
    program_mib: u64,
    /// Memory that the guest keeps available.
    keep_mib: u64,
    /// Time for which the guest is idle before it is measured.
    idle_s: u64,
    /// Works without and with a park before.
    rounds: u32,
    /// Level of the compiler's optimization, for which most of the work's time is spent.
    optimization: u64,
    /// Memory of the guests of the series that are named after it, and of their program.
    large_guest_mib: u64,
    large_program_mib: u64,
    /// The same of the series with several guests, and their number.
    many_guest_mib: u64,
    many_program_mib: u64,
    many_guests: u32,
}

fn sizes(scale: Scale) -> Sizes {
    match scale {
        Scale::Demo => Sizes {
            host: HostShape { memory_mib: 2048, swap_mib: 256, nodes: 1 },
            guest: GuestSize { memory_mib: 1024, cpus: 1 },
            program_mib: 700,
            keep_mib: 24,
            idle_s: 5,
            rounds: 1,
            optimization: 0,
            large_guest_mib: 1024,
            large_program_mib: 700,
            many_guest_mib: 512,
            many_program_mib: 256,
            many_guests: 3,
        },
        Scale::Full => Sizes {
            host: HostShape { memory_mib: 3072, swap_mib: 512, nodes: 1 },
            guest: GuestSize { memory_mib: 1024, cpus: 1 },
            program_mib: 700,
            keep_mib: 24,
            idle_s: 15,
            rounds: 3,
            optimization: 2,
            large_guest_mib: 5 * 1024,
            large_program_mib: 4 * 1024,
            many_guest_mib: 2560,
            many_program_mib: 2048,
            many_guests: 6,
        },
    }
}

impl Sizes {
    /// The host of a series.
    fn host_of(&self, series: &str) -> HostShape {
        let guests_mib = match series {
            LARGE | LARGE_LEAN => self.large_guest_mib,
            MANY => self.many_guest_mib * u64::from(self.many_guests),
            _ => self.guest.memory_mib,
        };
        let room_mib = guests_mib + 512;
        HostShape { memory_mib: self.host.memory_mib.max(room_mib), ..self.host }
    }
}

/// The series in which only zero pages are returned.
const TRIM: &str = "trim";

fn series() -> Vec<SeriesPlan> {
    let debian = Setup { system: System::DebianWithAgent, ..Setup::EBB };
    let ebb_driver = Driver::Module(Module::DEFAULT);
    let plan = |name, summary, setup| SeriesPlan::new(name, summary, Run::Guests(setup, run));
    let mut all = vec![
        plan("linux-driver", "Linux's driver, PUT /vm/park", debian),
        plan("ebb-driver", "Ebb's driver, PUT /vm/park", Setup { driver: ebb_driver, ..debian }),
        plan(
            TRIM,
            "Linux's driver, PUT /vm/trim until it is complete",
            Setup { idle: Idle::Trimmed, ..debian },
        ),
        plan(
            "qemu-balloon",
            "Linux's driver under QEMU, whose balloon is inflated and deflated",
            Setup { monitor: MonitorKind::Qemu, ..debian },
        ),
    ];
    all.extend(large::series());
    all.push(many::series());
    all
}

/// Results of a series.
#[derive(Debug, Default)]
struct Found {
    /// Host memory of the idle guest before each park and right after it, in MiB.
    before_mib: Vec<f64>,
    parked_mib: Vec<f64>,
    /// Times of the calls in seconds.
    park_s: Vec<f64>,
    /// Time of the work after a park in percent of that without one.
    next_run_percent: Vec<f64>,
    /// What the work after a park read from the disk, in MiB.
    read_again_mib: Vec<f64>,
    /// The calls' stages, with the number of the round, or of the guest among several.
    stages: Vec<(u32, Stage)>,
    /// The guest's memory at several moments.
    moments: Vec<Moment>,
    /// The works, with what was before them.
    works: Vec<(&'static str, Work)>,
}

fn metrics() -> Vec<Metric<Found>> {
    vec![
        Metric::median(
            "before_mib",
            "Host memory of the idle guest before",
            "MiB",
            |found: &Found| found.before_mib.clone(),
        ),
        Metric::median(
            "parked_mib",
            "Host memory of the idle guest after",
            "MiB",
            |found: &Found| found.parked_mib.clone(),
        ),
        Metric::median("park_s", "The call", "s", |found: &Found| found.park_s.clone()),
        Metric::median(
            "next_run_percent",
            "The guest's next work, relative to the same without the call",
            "%",
            |found: &Found| found.next_run_percent.clone(),
        ),
        Metric::median(
            "read_again_mib",
            "What that work read from the disk; without the call nothing",
            "MiB",
            |found: &Found| found.read_again_mib.clone(),
        ),
    ]
}

impl Found {
    fn fill(&self, series: &mut Series) {
        metrics::measure(&metrics(), self, series);
        series.tables.extend(call::table(&self.stages));
        series.tables.extend(memory::table(&self.moments));
        series.details.extend(work::table(&self.works));
    }
}

fn run(testbed: &mut Testbed<'_>, series: &mut Series) -> Result<(), LabError> {
    let sizes = sizes(testbed.scale());
    let disk = testbed.work_disk()?;
    let base_mib = testbed.usage()?.used_mib;
    let device =
        Device::Disk { path: disk.path(), cache: HostCache::Bypassed, engine: QemuEngine::Threads };
    let mut record = testbed.start_with(sizes.guest, &[device])?;
    let mut found = Found::default();
    let mut guest = ParkedGuest { testbed, record: &mut record, sizes, base_mib };
    let outcome = guest.rounds(&mut found);
    found.fill(series);
    series.guests.push(record);
    outcome
}

/// A guest while it is measured.
struct ParkedGuest<'a, 'b> {
    testbed: &'a mut Testbed<'b>,
    record: &'a mut GuestRecord,
    sizes: Sizes,
    /// The host's use before the guest was started.
    base_mib: f64,
}

impl ParkedGuest<'_, '_> {
    fn rounds(&mut self, found: &mut Found) -> Result<(), LabError> {
        self.idle("is idle after its boot");
        self.look("after boot", found)?;
        for number in 1..=self.sizes.rounds {
            self.live(found)?;
            let without = self.work("no park", found)?;
            self.live(found)?;
            self.park(number, found)?;
            let after = self.work("a park", found)?;
            self.look("after the next work", found)?;
            found.next_run_percent.push(rounded(after.seconds() / without.seconds() * 100.0));
            found.read_again_mib.push(rounded(after.read_mib()));
        }
        Ok(())
    }

    /// What leaves the guest large: its work, a program that uses most of its memory, then many
    /// files; then it is idle.
    fn live(&mut self, found: &mut Found) -> Result<(), LabError> {
        self.testbed.ask(self.record.guest, Command::DropCaches)?;
        self.work("empty caches", found)?;
        let program_mib = self.sizes.program_mib;
        let program = Command::AllocTouchExit { bytes: program_mib << 20 };
        self.testbed.run_program(self.record, program, program_mib)?;
        work::read_files(self.testbed, self.record.guest)?;
        self.idle("is idle");
        Ok(())
    }

    fn park(&mut self, number: u32, found: &mut Found) -> Result<(), LabError> {
        let guest = self.record.guest;
        let before_mib = self.look("before the call", found)?;
        let parked = call::park(self.testbed, guest, self.sizes.keep_mib)?;
        // At once: the call has answered when the host has the memory.
        let parked_mib = self.look("after the call", found)?;
        found.before_mib.push(before_mib);
        found.parked_mib.push(parked_mib);
        found.park_s.push(rounded(parked.elapsed.as_secs_f64()));
        found.stages.extend(parked.stages.into_iter().map(|stage| (number, stage)));
        self.idle("stays idle");
        self.look("a while later", found)?;
        Ok(())
    }

    fn work(&mut self, after: &'static str, found: &mut Found) -> Result<Work, LabError> {
        self.testbed.drop_host_caches()?;
        let work = work::run(self.testbed, self.record.guest, self.sizes.optimization)?;
        found.works.push((after, work));
        Ok(work)
    }

    fn idle(&self, what: &str) {
        self.testbed.events().step(self.record.guest, what);
        thread::sleep(Duration::from_secs(self.sizes.idle_s));
    }

    /// Records the guest's memory; returns that of the host, in MiB.
    fn look(&mut self, when: &'static str, found: &mut Found) -> Result<f64, LabError> {
        // Before the guest is asked, which wakes it.
        let host_mib = self.testbed.usage()?.used_mib - self.base_mib;
        let moment = Moment::new(self.testbed, self.record.guest, when, host_mib)?;
        found.moments.push(moment);
        Ok(rounded(host_mib))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn guest_and_host_have_room_for_the_program() {
        for scale in [Scale::Demo, Scale::Full] {
            let sizes = sizes(scale);
            assert!(sizes.program_mib + 256 < sizes.guest.memory_mib);
            assert!(sizes.large_program_mib + 256 < sizes.large_guest_mib);
            assert!(sizes.many_program_mib + 192 < sizes.many_guest_mib);
            let all_mib = sizes.many_guest_mib * u64::from(sizes.many_guests);
            for (name, guests_mib) in
                [(TRIM, sizes.guest.memory_mib), (LARGE, sizes.large_guest_mib), (MANY, all_mib)]
            {
                assert!(guests_mib + 512 <= sizes.host_of(name).memory_mib, "{name}");
            }
        }
    }

    #[test]
    fn the_names_of_series_and_metrics_are_those_of_the_documents() {
        let names: Vec<_> = series().iter().map(|plan| plan.name).collect();
        assert_eq!(names[..4], ["linux-driver", "ebb-driver", "trim", "qemu-balloon"]);
        let names: Vec<_> = metrics::describe(metrics()).into_iter().map(|it| it.name).collect();
        let expected = ["before_mib", "parked_mib", "park_s", "next_run_percent", "read_again_mib"];
        assert_eq!(names, expected);
    }

    #[test]
    fn the_next_run_is_relative_to_the_one_without_a_park() {
        let found = Found {
            next_run_percent: vec![110.0, 130.0, 120.0],
            parked_mib: vec![150.0],
            ..Found::default()
        };
        let mut series = Series::new("linux-driver", String::new());
        found.fill(&mut series);
        assert_eq!(series.metrics["next_run_percent"], Some(120.0));
        assert_eq!(series.metrics["parked_mib"], Some(150.0));
        assert_eq!(series.metrics["before_mib"], None);
        assert!(series.tables.is_empty() && series.details.is_empty());
    }
}
