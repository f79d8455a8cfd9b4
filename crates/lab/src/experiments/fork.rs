//! How long a machine under load stands still for a checkpoint in memory and for a snapshot, what
//! that costs its huge pages, how soon a fork answers, and how long it has its relatives' random
//! numbers (`random`).
//!
//! Each measurement of a pause has a new guest, since a checkpoint leaves huge pages split where
//! they are written to. The pause of a snapshot whose memory is copied in it, as it was before
//! copies on write, is that of a fork: the same memory under the same load.

mod random;

use std::thread;
use std::time::{Duration, Instant};

use ebb_agent::protocol::Command;
use ebb_vmm::api::{CopiedWhile, VmInfo};
use serde::Serialize;

use crate::LabError;
use crate::harness::experiment::{Experiment, Needs, Run, SeriesPlan, parameters};
use crate::harness::forks::{Fork, SOCKET_MODULE, Snapshot, TEMPLATE, Template};
use crate::harness::host;
use crate::harness::monitor::Setup;
use crate::harness::size::{GuestSize, HostShape};
use crate::harness::testbed::{Testbed, footprint_mib};
use crate::report::figures::DataTable;
use crate::report::metrics::{self, Metric};
use crate::report::results::{Scale, Series};
use crate::report::statistics::rounded;

/// The experiment.
pub static FORK: Experiment = Experiment {
    name: "fork",
    summary: "How long a machine under load stands still for a checkpoint, by resident size, with \
              and without huge pages, how soon a fork answers, and how long it reads random \
              numbers of its relatives",
    host: |scale, series| sizes(scale).host_of(series),
    parameters: |scale| parameters(&sizes(scale)),
    needs: Needs { guest_modules: &[SOCKET_MODULE], ..Experiment::DEFAULT.needs },
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
    /// Guests whose pauses are measured, of each series.
    rounds: u32,
    /// Times from a checkpoint to the last two looks at the machine's huge pages.
    later_s: u64,
    last_s: u64,
    /// Machines that are forked one by one, and as many restores.
    single_forks: u32,
    /// Machines of one `ebb fork -n`.
    many_forks: u32,
    /// Machines whose random numbers are compared, and how long their guest has run before.
    random_forks: u32,
    random_idle_s: u64,
}

fn sizes(scale: Scale) -> Sizes {
    match scale {
        Scale::Demo => Sizes {
            host: HostShape { memory_mib: 2816, swap_mib: 256, nodes: 1 },
            guest: GuestSize { memory_mib: 1024, cpus: 2 },
            rounds: 2,
            later_s: 10,
            last_s: 30,
            single_forks: 5,
            many_forks: 25,
            random_forks: 8,
            random_idle_s: 30,
        },
        Scale::Full => Sizes {
            host: HostShape { memory_mib: 3072, swap_mib: 512, nodes: 1 },
            guest: GuestSize { memory_mib: 1024, cpus: 2 },
            rounds: 5,
            later_s: 10,
            last_s: 30,
            single_forks: 20,
            many_forks: 100,
            random_forks: 64,
            random_idle_s: 30,
        },
    }
}

impl Sizes {
    /// The host of a series: three times the load's memory (the guest's, what it writes after the
    /// checkpoint, and a snapshot's file, which is in memory in the virtual host) and the rest.
    fn host_of(self, series: &str) -> HostShape {
        let further_mib = resident_mib(series).unwrap_or(0).saturating_sub(USUAL_MIB);
        HostShape { memory_mib: self.host.memory_mib + 3 * further_mib, ..self.host }
    }

    /// A guest that has room for this load.
    fn guest_of(self, resident_mib: u64) -> GuestSize {
        GuestSize { memory_mib: self.guest.memory_mib.max(resident_mib + 512), ..self.guest }
    }
}

/// Largest resident size of the series that run by default.
const USUAL_MIB: u64 = 512;
/// Resident sizes; the last one runs when it is named.
const RESIDENT_MIB: [u64; 3] = [128, USUAL_MIB, 1536];

/// The resident size in the name of a series.
fn resident_mib(series: &str) -> Option<u64> {
    series.rsplit('-').next()?.parse().ok()
}

fn series() -> Vec<SeriesPlan> {
    let small = Setup { huge_pages: false, ..Setup::EBB };
    let plan = |name, summary, setup| SeriesPlan::new(name, summary, Run::Guests(setup, pauses));
    vec![
        plan("huge-128", "up to 128 MiB of load, huge pages", Setup::EBB),
        plan("small-128", "the same with pages of 4 KiB", small),
        plan("huge-512", "up to 512 MiB of load, huge pages", Setup::EBB),
        plan("small-512", "the same with pages of 4 KiB", small),
        plan("huge-1536", "up to 1536 MiB of load, huge pages", Setup::EBB).when_named(),
        plan("small-1536", "the same with pages of 4 KiB", small).when_named(),
        SeriesPlan::new(
            "answers",
            "an idle guest: forks and restores until they answer",
            Run::Guests(Setup::EBB, answers),
        ),
        SeriesPlan::new(
            "random",
            "forks whose guests read random numbers all the time",
            Run::Guests(Setup::EBB, random::random),
        ),
    ]
}

/// Largest part of the load's memory for which a guest is waited for: it frees, too.
const LOADED_PART: f64 = 0.9;
/// Time limit for that, and interval of looking.
const LOAD_LIMIT: Duration = Duration::from_secs(30);
const LOOK_INTERVAL: Duration = Duration::from_millis(100);
/// Duration of the load, longer than a round. It ends with its guest.
const LOAD_S: u64 = 3600;
/// Time between a snapshot and the checkpoint, and for which a guest is idle after its boot.
const REST: Duration = Duration::from_secs(2);
/// Number of a fork.
const FORK_NUMBER: u32 = TEMPLATE + 1;

/// What one guest under load has shown.
#[derive(Debug, Clone, Default, PartialEq)]
struct Pause {
    resident_mib: f64,
    /// Of a snapshot whose memory was copied while the guest ran.
    snapshot_ms: Option<f64>,
    checkpoint_ms: f64,
    /// The part of it in which the process was forked.
    forked_ms: f64,
    /// Of a second checkpoint, after the last look.
    next_ms: f64,
    /// Of a snapshot of a fork, whose memory was copied in the pause.
    stopped_ms: Option<f64>,
    /// Shares of huge pages before and right after the checkpoint, and at the last two looks.
    huge_percent: [Option<f64>; 4],
}

/// Results of a series.
#[derive(Debug, Default)]
struct Found {
    pauses: Vec<Pause>,
    /// Times from the start of `ebb fork`, or of `ebb restore`, to the guest's first answer.
    fork_ms: Vec<f64>,
    restore_ms: Vec<f64>,
    many_s: Option<f64>,
    /// Random numbers of each fork.
    common: Vec<random::Common>,
}

fn metrics() -> Vec<Metric<Found>> {
    fn each(name: &str, title: &str, unit: &str, of: fn(&Pause) -> Option<f64>) -> Metric<Found> {
        Metric::median(name, title, unit, move |found: &Found| {
            found.pauses.iter().filter_map(of).collect()
        })
    }
    let of_pauses_and_answers = vec![
        each("resident_mib", "Resident memory at the pause", "MiB", |it| Some(it.resident_mib)),
        each("pause_ms", "Pause for a checkpoint", "ms", |it| Some(it.checkpoint_ms)),
        each("forked_ms", "the part of fork(2)", "ms", |it| Some(it.forked_ms)),
        each("next_pause_ms", "Pause for a second checkpoint", "ms", |it| Some(it.next_ms)),
        each("snapshot_pause_ms", "Pause for a snapshot", "ms", |it| it.snapshot_ms),
        each("stopped_pause_ms", "Pause for a snapshot that is copied in the pause", "ms", |it| {
            it.stopped_ms
        }),
        each("huge_before_percent", "Memory in huge pages before the checkpoint", "%", |it| {
            it.huge_percent[0]
        })
        .better_higher(),
        each("huge_after_percent", "right after it", "%", |it| it.huge_percent[1]).better_higher(),
        each("huge_later_percent", "10 s after it", "%", |it| it.huge_percent[2]).better_higher(),
        each("huge_last_percent", "30 s after it", "%", |it| it.huge_percent[3]).better_higher(),
        Metric::median("fork_answer_ms", "ebb fork until the guest answers", "ms", |it: &Found| {
            it.fork_ms.clone()
        }),
        Metric::median(
            "restore_answer_ms",
            "ebb restore until the guest answers",
            "ms",
            |it: &Found| it.restore_ms.clone(),
        ),
        Metric::lower("many_forks_s", "Many machines by one ebb fork", "s", |it: &Found| it.many_s),
    ];
    of_pauses_and_answers.into_iter().chain(random::its_metrics()).collect()
}

fn pauses(testbed: &mut Testbed<'_>, series: &mut Series) -> Result<(), LabError> {
    let sizes = sizes(testbed.scale());
    let load_mib = resident_mib(&series.name).unwrap_or(RESIDENT_MIB[0]);
    let mut found = Found::default();
    let outcome = (1..=sizes.rounds).try_for_each(|round| {
        found.pauses.push(pause(testbed, sizes, load_mib, round)?);
        Ok(())
    });
    metrics::measure(&metrics(), &found, series);
    series.details.extend(table(&found.pauses));
    outcome
}

/// Measures the pauses of a new guest.
fn pause(
    testbed: &Testbed<'_>,
    sizes: Sizes,
    load_mib: u64,
    round: u32,
) -> Result<Pause, LabError> {
    let size = sizes.guest_of(load_mib);
    let mut template = Template::start(testbed, size, None)?;
    let step = |text: &str| testbed.events().step(TEMPLATE, text);
    step("is loaded");
    template.guest.begin(Command::Churn {
        bytes: load_mib << 20,
        tasks: size.cpus,
        seed: round.into(),
        operations: None,
        seconds: Some(LOAD_S),
    })?;
    let pid = template.guest.pid();
    let resident = |template: &mut Template| {
        footprint_mib(pid).ok_or_else(|| template.guest.lost("its memory"))
    };
    let begun = Instant::now();
    while resident(&mut template)? < load_mib as f64 * LOADED_PART && begun.elapsed() < LOAD_LIMIT {
        thread::sleep(LOOK_INTERVAL);
    }
    step("is saved");
    let snapshot_ms = paused_ms(&template.snapshot()?, CopiedWhile::Running);
    thread::sleep(REST);
    step("is kept in a checkpoint");
    let huge = || host::huge_percent(pid, size.memory_mib).map(rounded);
    let (resident_mib, before) = (resident(&mut template)?, huge());
    let (checkpoint, report) = template.checkpoint()?;
    let after = huge();
    step("goes on");
    thread::sleep(Duration::from_secs(sizes.later_s));
    let later = huge();
    thread::sleep(Duration::from_secs(sizes.last_s - sizes.later_s));
    let last = huge();
    let (_, next) = template.checkpoint()?;
    // So that the fork has the processors for itself, as the machine had them.
    let paused = template.client().put::<VmInfo>("/vm/pause");
    paused.map_err(|error| LabError::unexpected(TEMPLATE, error))?;
    testbed.events().step(FORK_NUMBER, "is forked and saved");
    let fork = checkpoint.fork(FORK_NUMBER)?;
    fork.wait_answer()?;
    let stopped_ms = paused_ms(&fork.snapshot_in_pause()?, CopiedWhile::Stopped);
    Ok(Pause {
        resident_mib: rounded(resident_mib),
        snapshot_ms,
        checkpoint_ms: ms(report.paused_us),
        forked_ms: ms(report.forked_us),
        next_ms: ms(next.paused_us),
        stopped_ms,
        huge_percent: [before, after, later, last],
    })
}

/// The pause for a snapshot whose memory was copied in this way.
fn paused_ms(snapshot: &Snapshot, copied: CopiedWhile) -> Option<f64> {
    (snapshot.report.copied == copied).then_some(snapshot.report.paused_ms as f64)
}

fn ms(us: u64) -> f64 {
    us as f64 / 1000.0
}

fn answers(testbed: &mut Testbed<'_>, series: &mut Series) -> Result<(), LabError> {
    let sizes = sizes(testbed.scale());
    let mut found = Found::default();
    let outcome = answer(testbed, sizes, &mut found);
    metrics::measure(&metrics(), &found, series);
    outcome
}

fn answer(testbed: &Testbed<'_>, sizes: Sizes, found: &mut Found) -> Result<(), LabError> {
    let template = Template::start(testbed, sizes.guest, None)?;
    thread::sleep(REST);
    let snapshot = template.snapshot()?;
    let (checkpoint, _) = template.checkpoint()?;
    let ms = |time: Duration| rounded(time.as_secs_f64() * 1000.0);
    // In turns, since a machine's speed varies over time.
    for number in (0..sizes.single_forks).map(|index| FORK_NUMBER + 2 * index) {
        testbed.events().step(number, "is forked");
        let begun = Instant::now();
        let fork = checkpoint.fork(number)?;
        fork.wait_answer()?;
        found.fork_ms.push(ms(begun.elapsed()));
        drop(fork);
        testbed.events().step(number + 1, "is restored");
        found.restore_ms.push(ms(snapshot.restore(testbed, number + 1)?));
    }
    testbed.events().step(0, "forks many machines");
    let first = FORK_NUMBER + 2 * sizes.single_forks;
    let begun = Instant::now();
    let forks = checkpoint.fork_many(first, sizes.many_forks)?;
    found.many_s = Some(rounded(begun.elapsed().as_secs_f64()));
    // They run, too.
    forks.iter().try_for_each(Fork::wait_answer)
}

/// The measurements of each guest.
fn table(pauses: &[Pause]) -> Option<DataTable> {
    (!pauses.is_empty()).then(|| {
        DataTable::of(
            "pauses, each row a guest",
            pauses,
            &[
                ("resident, MiB", &|it| it.resident_mib.into()),
                ("snapshot, ms", &|it| it.snapshot_ms.into()),
                ("checkpoint, ms", &|it| it.checkpoint_ms.into()),
                ("of which fork(2), ms", &|it| it.forked_ms.into()),
                ("second checkpoint, ms", &|it| it.next_ms.into()),
                ("snapshot copied in the pause, ms", &|it| it.stopped_ms.into()),
                ("huge before, %", &|it| it.huge_percent[0].into()),
                ("right after, %", &|it| it.huge_percent[1].into()),
                ("10 s later, %", &|it| it.huge_percent[2].into()),
                ("30 s later, %", &|it| it.huge_percent[3].into()),
            ],
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_host_has_room_for_a_guest_its_copies_and_a_file() {
        for scale in [Scale::Demo, Scale::Full] {
            let sizes = sizes(scale);
            for plan in series() {
                let Some(resident_mib) = resident_mib(plan.name) else { continue };
                assert!(RESIDENT_MIB.contains(&resident_mib), "{}", plan.name);
                assert!(resident_mib + 256 < sizes.guest_of(resident_mib).memory_mib);
                assert!(3 * resident_mib + 1024 < sizes.host_of(plan.name).memory_mib);
            }
        }
    }

    #[test]
    fn pauses_of_all_guests_count() {
        let pause = |checkpoint_ms, stopped_ms| Pause {
            checkpoint_ms,
            stopped_ms,
            huge_percent: [Some(90.0), Some(80.0), None, None],
            ..Pause::default()
        };
        let pauses = vec![pause(4.0, Some(900.0)), pause(8.0, None), pause(5.0, None)];
        let found = Found { pauses, ..Found::default() };
        let mut series = Series::new("huge-128", String::new());
        metrics::measure(&metrics(), &found, &mut series);
        assert_eq!(series.metrics["pause_ms"], Some(5.0));
        assert_eq!(series.spread.get("pause_ms"), Some(&[4.0, 8.0]));
        assert_eq!(series.metrics["stopped_pause_ms"], Some(900.0));
        assert_eq!(series.metrics["huge_later_percent"], None);
        assert_eq!(series.metrics["fork_answer_ms"], None);
        assert_eq!(table(&found.pauses).unwrap().rows.len(), 3);
    }
}
