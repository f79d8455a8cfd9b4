//! How many machines from one template fit on a host, what each of them takes, and how soon it
//! answers.
//!
//! The template has worked before its checkpoint, as one that has everything loaded, and ends after
//! it: the checkpoint keeps the memory. Its guest reads the root of a Debian from a disk and writes
//! to memory only, so that all machines can share the disk.

use std::panic::resume_unwind;
use std::path::Path;
use std::sync::Barrier;
use std::thread;
use std::time::{Duration, Instant};

use ebb_agent::protocol::Command;
use ebb_vmm::api::{MergeInfo, MergeState};
use serde::Serialize;

use crate::LabError;
use crate::harness::balloon;
use crate::harness::debian;
use crate::harness::experiment::{Experiment, Needs, Run, SeriesPlan, parameters};
use crate::harness::forks::{Fork, SOCKET_MODULE, TEMPLATE, Template};
use crate::harness::guest::Guest;
use crate::harness::host::{self, MemoryKinds, MemoryState};
use crate::harness::incoming;
use crate::harness::merging::{self, Merging, Nodes};
use crate::harness::monitor::{MonitorKind, Setup, System};
use crate::harness::size::{GuestSize, HostShape};
use crate::harness::testbed::Testbed;
use crate::report::figures::{Curve, Drawing};
use crate::report::metrics::{self, Metric};
use crate::report::results::{Scale, Series};
use crate::report::statistics::{quantile, rounded};

/// The experiment.
pub static CLONES: Experiment = Experiment {
    name: "clones",
    summary: "How many machines from one template fit on a host without swap, what each of them \
              takes, and how soon it answers",
    host: |scale, _| sizes(scale).host,
    parameters: |scale| parameters(&sizes(scale)),
    guests: |scale| sizes(scale).most_untouched,
    needs: Needs {
        modules: &[incoming::HOST_SOCKET_MODULE],
        guest_modules: &["crc32c_generic", "ext4", SOCKET_MODULE],
        guest_programs: &[debian::SHELL],
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
    /// Memory of the program of a machine that works.
    program_mib: u64,
    /// Memory that a parked guest keeps available.
    keep_mib: u64,
    /// Most machines of a series, even if the host has room for more: of the one whose machines do
    /// nothing, and of the others.
    most_untouched: u32,
    most_worked: u32,
    /// Machines that are made at the same time.
    together: u32,
    /// Time after which machines that do nothing answer again.
    idle_s: u64,
}

fn sizes(scale: Scale) -> Sizes {
    match scale {
        Scale::Demo => Sizes {
            host: HostShape { memory_mib: 1536, swap_mib: 256, nodes: 1 },
            guest: GuestSize { memory_mib: 512, cpus: 1 },
            program_mib: 256,
            keep_mib: 24,
            most_untouched: 400,
            most_worked: 6,
            together: 25,
            idle_s: 10,
        },
        Scale::Full => Sizes {
            host: HostShape { memory_mib: 15 * 1024, swap_mib: 1024, nodes: 1 },
            guest: GuestSize { memory_mib: 5 * 1024, cpus: 1 },
            program_mib: 256,
            keep_mib: 24,
            // Of 32768 processes and threads that a small Linux has numbers for.
            most_untouched: 3000,
            most_worked: 200,
            together: 25,
            idle_s: 60,
        },
    }
}

/// The series whose machines do nothing, work, and are parked after it.
const UNTOUCHED: &str = "untouched";
const WORKED: &str = "worked";
const PARKED: &str = "parked";
/// And the one whose monitors merge what the machines have written.
const MERGED: &str = "merged";
const MERGED_SMALL: &str = "merged-small";
/// The peer of the first one.
const QEMU: &str = "qemu";

fn series() -> Vec<SeriesPlan> {
    // Hundreds of idle guests that look at their clocks keep an emulated host's processors busy.
    let setup = Setup { system: System::AgentWithDebian, seldom_wakes: true, ..Setup::EBB };
    let plan = |name, summary| SeriesPlan::new(name, summary, Run::Guests(setup, run));
    let merged = Setup { merging: Merging::Owner(Nodes::Across), ..setup };
    vec![
        plan(UNTOUCHED, "machines that have answered once"),
        SeriesPlan::new(
            QEMU,
            "the same by QEMU, which maps the memory's file privately (-incoming)",
            Run::Guests(Setup { monitor: MonitorKind::Qemu, ..setup }, run),
        ),
        plan(WORKED, "each has used 256 MiB, freed them, and run some of Python's tests"),
        plan(PARKED, "and was parked after it"),
        SeriesPlan::new(
            MERGED,
            "each has worked, and the monitors merge equal pages",
            Run::Guests(merged, run),
        ),
        SeriesPlan::new(
            MERGED_SMALL,
            "the same with pages of 4 KiB (thp=off)",
            Run::Guests(Setup { huge_pages: false, ..merged }, run),
        )
        .when_named(),
    ]
}

/// The work after the program.
const WORK: &str = "python3 -m test -q test_bisect test_heapq";
/// Time limit for each part of the work; a host that swaps may be slow.
const WORK_LIMIT: Duration = Duration::from_secs(300);
/// Time for which a machine is left alone after its work. Linux reports what a program has freed
/// after 2 s, most of it while the work goes on.
const REST: Duration = Duration::from_secs(3);
/// Time for which all machines are left alone whose monitors merge.
const MERGE_REST: Duration = Duration::from_secs(30);
/// A host with less than this part of its RAM available has no room: `ebb fork` refuses, or waits
/// in vain for a checkpoint that is being swapped in.
const NO_ROOM_PART: u64 = 50;

/// The host's memory at a moment, MiB.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Look {
    used_mib: f64,
    kinds: MemoryKinds,
}

impl Look {
    fn new(testbed: &Testbed<'_>) -> Result<Self, LabError> {
        Ok(Self { used_mib: testbed.usage()?.used_mib, kinds: MemoryKinds::read()? })
    }
}

/// Results of a series.
#[derive(Debug, Default)]
struct Found {
    /// Machines with which the host did not swap, and whether no further one fits.
    fitting: u32,
    is_full: bool,
    /// The host before the first machine, and with those that fit.
    before: Option<Look>,
    with_all: Option<Look>,
    /// The host with those that fit, when all have been idle for a time and have answered again,
    /// and the times of these answers.
    later: Option<Look>,
    again_ms: Vec<f64>,
    /// Memory that each of them shares.
    shared_mib: Vec<f64>,
    /// Times from the start of `ebb fork` to the guest's first answer: one after the other, and at
    /// the same time.
    answer_ms: Vec<f64>,
    together_ms: Vec<f64>,
    work_s: Vec<f64>,
    park_s: Vec<f64>,
    merge_cpu_s: Vec<f64>,
}

impl Found {
    /// Whether the first answer takes longer the more machines there are.
    fn drawing(&self) -> Drawing {
        let points = (1..).zip(&self.answer_ms).map(|(count, ms)| (f64::from(count), *ms));
        Drawing {
            title: "time of the first answer".to_owned(),
            x: "machines".to_owned(),
            y: "ms".to_owned(),
            curves: vec![Curve { name: "first answer".to_owned(), points: points.collect() }],
        }
    }

    /// Growth of the host's memory for each machine.
    fn each_mib(&self, of: impl Fn(&Look) -> f64) -> Option<f64> {
        self.each_mib_until(self.with_all.as_ref()?, of)
    }

    fn each_mib_until(&self, now: &Look, of: impl Fn(&Look) -> f64) -> Option<f64> {
        Some((of(now) - of(self.before.as_ref()?)) / f64::from(self.fitting))
    }
}

fn metrics() -> Vec<Metric<Found>> {
    fn each(name: &str, title: &str, of: fn(&Look) -> f64) -> Metric<Found> {
        Metric::lower(name, title, "MiB", move |found: &Found| found.each_mib(of))
    }
    fn times(
        [name, p99]: [&str; 2],
        title: &str,
        of: fn(&Found) -> &Vec<f64>,
    ) -> [Metric<Found>; 2] {
        [
            Metric::median(name, title, "ms", move |found: &Found| of(found).clone()),
            Metric::lower(p99, "its 99th percentile", "ms", move |found: &Found| {
                quantile(of(found).iter().copied(), 0.99)
            }),
        ]
    }
    let known =
        |look: &Look| look.kinds.anonymous_mib + look.kinds.page_tables_mib + look.kinds.kernel_mib;
    let mut all = vec![
        Metric::higher("clones_without_swap", "Machines without swap", "", |found: &Found| {
            found.is_full.then(|| f64::from(found.fitting))
        }),
        each("clone_mib", "What the host has in use more, for each machine", |it| it.used_mib),
        each("own_mib", "of it memory of its processes", |it| it.kinds.anonymous_mib),
        each("page_tables_mib", "of it page tables", |it| it.kinds.page_tables_mib),
        each("kernel_mib", "of it memory that the kernel counts as its own", |it| {
            it.kinds.kernel_mib
        }),
        Metric::lower("other_mib", "the rest, mostly of KVM", "MiB", move |found: &Found| {
            found.each_mib(|look| look.used_mib - known(look))
        }),
        Metric::median("shared_mib", "Memory that it shares", "MiB", |found: &Found| {
            found.shared_mib.clone()
        })
        .better_higher(),
    ];
    all.extend(times(
        ["first_answer_ms", "first_answer_p99_ms"],
        "From a machine's start until its guest answers",
        |found| &found.answer_ms,
    ));
    all.push(Metric::lower(
        "idle_mib",
        "What the host has in use more when all were idle for a time and have answered again",
        "MiB",
        |found: &Found| found.each_mib_until(found.later.as_ref()?, |it| it.used_mib),
    ));
    all.extend(times(["again_ms", "again_p99_ms"], "An answer after that", |found| {
        &found.again_ms
    }));
    all.extend(times(
        ["together_answer_ms", "together_answer_p99_ms"],
        "the same for 25 at once",
        |found| &found.together_ms,
    ));
    all.push(Metric::median("work_s", "The work", "s", |found: &Found| found.work_s.clone()));
    all.push(Metric::median("park_s", "Parking", "s", |found: &Found| found.park_s.clone()));
    all.push(Metric::median(
        "merge_cpu_s",
        "Processor time of a monitor's merging",
        "s",
        |found: &Found| found.merge_cpu_s.clone(),
    ));
    all
}

fn run(testbed: &mut Testbed<'_>, series: &mut Series) -> Result<(), LabError> {
    testbed.prepare_merging()?;
    let disk = testbed.work_disk()?;
    let mut found = Found::default();
    let outcome = match testbed.setup().monitor {
        MonitorKind::Ebb => clones(testbed, disk.path(), series, &mut found),
        MonitorKind::Qemu => incoming_clones(testbed, disk.path(), series, &mut found),
    };
    metrics::measure(&metrics(), &found, series);
    series.drawings.push(found.drawing());
    outcome
}

fn clones(
    testbed: &Testbed<'_>,
    disk: &Path,
    series: &mut Series,
    found: &mut Found,
) -> Result<(), LabError> {
    let sizes = sizes(testbed.scale());
    let mut template = Template::start(testbed, sizes.guest, Some(disk))?;
    prepare(testbed, &mut template.guest)?;
    let (checkpoint, _) = template.checkpoint()?;
    testbed.events().step(TEMPLATE, "ends");
    template.end();
    testbed.show(&[]);
    if series.name == UNTOUCHED {
        testbed.events().step(0, "forks several machines at once");
        found.together_ms = together(testbed.guests(sizes.together), |number| {
            let fork = checkpoint.fork(number)?;
            fork.wait_answer()?;
            Ok(fork)
        })?;
    }
    let planned = if series.name == UNTOUCHED { sizes.most_untouched } else { sizes.most_worked };
    let (end, forks) = fill(testbed, planned, found, |number, found| {
        let begun = Instant::now();
        let fork = checkpoint.fork(number)?;
        fork.wait_answer()?;
        found.answer_ms.push(ms(begun.elapsed()));
        if series.name != UNTOUCHED {
            testbed.events().step(number, "works");
            let elapsed = work(&mut fork.console(&template)?, sizes)?;
            found.work_s.push(rounded(elapsed.as_secs_f64()));
            thread::sleep(REST);
        }
        if series.name == PARKED {
            testbed.events().step(number, "is parked");
            found.park_s.push(park(number, &fork, sizes.keep_mib)?);
        }
        let pid = fork.pid();
        Ok((fork, pid))
    })?;
    if [MERGED, MERGED_SMALL].contains(&series.name.as_str()) {
        testbed.events().step(0, "leaves all machines alone");
        thread::sleep(MERGE_REST);
        found.with_all = Some(Look::new(testbed)?);
        series.notes.push(merged(&forks, found)?);
    }
    if series.name == UNTOUCHED {
        answer_again(testbed, forks, found, |fork| fork.wait_answer())?;
    }
    found.is_full = end != End::Most;
    series.notes.push(end.describe(found.fitting));
    Ok(())
}

/// Machines of QEMU that have answered once.
fn incoming_clones(
    testbed: &Testbed<'_>,
    disk: &Path,
    series: &mut Series,
    found: &mut Found,
) -> Result<(), LabError> {
    let sizes = sizes(testbed.scale());
    let mut template = incoming::Template::start(testbed, sizes.guest, disk)?;
    prepare(testbed, &mut template.guest)?;
    testbed.events().step(TEMPLATE, "ends");
    template.save()?;
    testbed.show(&[]);
    testbed.events().step(0, "continues several machines at once");
    found.together_ms =
        together(testbed.guests(sizes.together), |number| template.continue_in(testbed, number))?;
    let (end, guests) = fill(testbed, sizes.most_untouched, found, |number, found| {
        let begun = Instant::now();
        let guest = template.continue_in(testbed, number)?;
        found.answer_ms.push(ms(begun.elapsed()));
        let pid = guest.pid();
        Ok((guest, pid))
    })?;
    answer_again(testbed, guests, found, incoming::answer)?;
    found.is_full = end != End::Most;
    series.notes.push(end.describe(found.fitting));
    Ok(())
}

/// Has the template work, as one that has everything loaded.
fn prepare(testbed: &Testbed<'_>, guest: &mut Guest) -> Result<(), LabError> {
    testbed.events().step(TEMPLATE, "works");
    debian::enter(guest)?;
    work(guest, sizes(testbed.scale()))?;
    thread::sleep(REST);
    Ok(())
}

/// Has the machines with which the host did not swap answer once more, when all have been idle.
fn answer_again<T>(
    testbed: &Testbed<'_>,
    mut machines: Vec<T>,
    found: &mut Found,
    answer: impl Fn(&mut T) -> Result<(), LabError>,
) -> Result<(), LabError> {
    machines.truncate(found.fitting as usize);
    testbed.events().step(0, "leaves all machines alone");
    thread::sleep(Duration::from_secs(sizes(testbed.scale()).idle_s));
    for machine in &mut machines {
        let begun = Instant::now();
        answer(machine)?;
        found.again_ms.push(ms(begun.elapsed()));
    }
    found.later = Some(Look::new(testbed)?);
    Ok(())
}

/// Why no further machines are made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    Swapped,
    NoRoom,
    Most,
}

impl End {
    fn describe(self, fitting: u32) -> String {
        match self {
            Self::Swapped => format!("ended when the host swapped with machine {}", fitting + 1),
            Self::NoRoom => "ended when there was no room for a further machine".to_owned(),
            Self::Most => format!(
                "ended with {fitting} machines, the most of this run; the host had not swapped"
            ),
        }
    }
}

/// Makes machines until the host is full or there are as many as planned. `make` returns a machine
/// and its monitor's process.
fn fill<T>(
    testbed: &Testbed<'_>,
    planned: u32,
    found: &mut Found,
    mut make: impl FnMut(u32, &mut Found) -> Result<(T, u32), LabError>,
) -> Result<(End, Vec<T>), LabError> {
    thread::sleep(REST);
    found.before = Some(Look::new(testbed)?);
    let mut machines = Vec::new();
    for number in (0..testbed.guests(planned)).map(|index| TEMPLATE + 1 + index) {
        testbed.events().step(number, "is made");
        let (machine, pid) = match make(number, found) {
            Err(_) if found.fitting > 0 && has_no_room()? => return Ok((End::NoRoom, machines)),
            made => made?,
        };
        machines.push(machine);
        if testbed.usage()?.swap_used_mib > testbed.swap_threshold_mib() {
            return Ok((End::Swapped, machines));
        }
        found.fitting += 1;
        found.with_all = Some(Look::new(testbed)?);
        found.shared_mib.extend(host::shared_mib(pid));
    }
    Ok((End::Most, machines))
}

/// Takes the processor time of merging; describes what was merged.
fn merged(forks: &[Fork], found: &mut Found) -> Result<String, LabError> {
    let mut merged_bytes = 0;
    for fork in forks {
        let info = fork.client().get::<MergeInfo>("/merge");
        let info = info.map_err(|error| LabError::unexpected(fork.number(), error))?;
        if info.state != MergeState::Merging {
            let what = format!("its pages are not merged: {:?}", info.reason);
            return Err(LabError::unexpected(fork.number(), what));
        }
        merged_bytes += info.statistics.and_then(|all| all.merged_bytes).unwrap_or(0);
        let ns = merging::monitor_running_ns(fork.pid())?;
        found.merge_cpu_s.push(rounded(Duration::from_nanos(ns).as_secs_f64()));
    }
    Ok(format!("{} MiB of the machines' memory are merged", merged_bytes >> 20))
}

/// Whether the host has no memory available.
fn has_no_room() -> Result<bool, LabError> {
    let state = MemoryState::read()?;
    Ok(state.available_kib < state.total_kib / NO_ROOM_PART)
}

/// Makes machines at the same time; returns their times until they answered. All run until the last
/// one has.
fn together<T>(
    count: u32,
    make: impl Fn(u32) -> Result<T, LabError> + Sync,
) -> Result<Vec<f64>, LabError> {
    let begun = Instant::now();
    let all_have_answered = Barrier::new(count as usize);
    let answer = |number| {
        let made = make(number);
        let answer_ms = ms(begun.elapsed());
        all_have_answered.wait();
        made.map(|_machine| answer_ms)
    };
    thread::scope(|scope| {
        let answer = &answer;
        let start = |index| scope.spawn(move || answer(TEMPLATE + 1 + index));
        let all: Vec<_> = (0..count).map(start).collect();
        all.into_iter().map(|it| it.join().unwrap_or_else(|panic| resume_unwind(panic))).collect()
    })
}

/// A program that uses memory and ends, then the work in Debian; returns its time by the guest's
/// clock.
fn work(guest: &mut Guest, sizes: Sizes) -> Result<Duration, LabError> {
    let program = Command::AllocTouchExit { bytes: sizes.program_mib << 20 };
    let program = guest.command(program, WORK_LIMIT, &mut || {})?;
    Ok(program.elapsed + debian::run(guest, WORK)?)
}

/// Parks a machine; returns the time of the call in seconds.
fn park(number: u32, fork: &Fork, keep_mib: u64) -> Result<f64, LabError> {
    let begun = Instant::now();
    balloon::park(&fork.client(), keep_mib).map_err(|error| LabError::unexpected(number, error))?;
    Ok(rounded(begun.elapsed().as_secs_f64()))
}

fn ms(time: Duration) -> f64 {
    rounded(time.as_secs_f64() * 1000.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn guest_and_host_have_room_for_the_program() {
        for scale in [Scale::Demo, Scale::Full] {
            let sizes = sizes(scale);
            assert!(sizes.program_mib + 192 < sizes.guest.memory_mib);
            assert!(sizes.guest.memory_mib + 512 < sizes.host.memory_mib);
            assert!(sizes.most_worked < sizes.most_untouched);
        }
    }

    #[test]
    fn memory_is_that_of_each_machine() {
        let look = |used_mib, anonymous_mib, page_tables_mib, kernel_mib| Look {
            used_mib,
            kinds: MemoryKinds { anonymous_mib, page_tables_mib, kernel_mib },
        };
        let found = Found {
            fitting: 4,
            is_full: true,
            before: Some(look(100.0, 50.0, 2.0, 20.0)),
            with_all: Some(look(116.0, 58.0, 4.0, 22.0)),
            answer_ms: (1..=100).map(f64::from).collect(),
            ..Found::default()
        };
        let mut series = Series::new(UNTOUCHED, String::new());
        metrics::measure(&metrics(), &found, &mut series);
        let metric = |name: &str| series.metrics[name];
        assert_eq!(metric("clones_without_swap"), Some(4.0));
        assert_eq!(metric("clone_mib"), Some(4.0));
        assert_eq!((metric("own_mib"), metric("page_tables_mib")), (Some(2.0), Some(0.5)));
        assert_eq!((metric("kernel_mib"), metric("other_mib")), (Some(0.5), Some(1.0)));
        assert_eq!(metric("first_answer_p99_ms"), Some(99.0));
        assert_eq!((metric("together_answer_ms"), metric("park_s")), (None, None));
    }

    #[test]
    fn a_host_that_has_room_for_more_has_no_number_of_machines() {
        let mut series = Series::new(WORKED, String::new());
        metrics::measure(&metrics(), &Found::default(), &mut series);
        assert!(series.metrics.values().all(Option::is_none));
        let found = Found { fitting: 6, ..Found::default() };
        metrics::measure(&metrics(), &found, &mut series);
        assert_eq!(series.metrics["clones_without_swap"], None);
        assert!(End::Most.describe(6).contains("6 machines"));
        assert!(End::Swapped.describe(6).contains("machine 7"));
    }
}
