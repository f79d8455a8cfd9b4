//! How long forks read the same random numbers as their relatives: until their kernels' generators
//! have been given something of their own.

use std::collections::BTreeMap;
use std::thread;
use std::time::Duration;

use ebb_agent::protocol::Command;
use ebb_agent::random_numbers::{Number, NumbersReport};

use super::{FORK_NUMBER, Found, REST, Sizes, sizes};
use crate::LabError;
use crate::harness::forks::{Fork, TEMPLATE, Template};
use crate::harness::testbed::Testbed;
use crate::report::figures::DataTable;
use crate::report::metrics::{self, Metric};
use crate::report::results::Series;
use crate::report::statistics::{quantile, rounded};

/// Port of the guest's program.
const PORT: u32 = 53;
/// Pause between two numbers: many machines read at the same time.
const PAUSE: Duration = Duration::from_millis(2);
/// Upper bounds of the histogram's classes, in ms; one more is above them.
const CLASSES_MS: [u32; 12] = [0, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000];

/// What a fork has in common with its relatives.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Common {
    /// The machine's number.
    machine: u32,
    /// Numbers that it has read since the checkpoint.
    read: usize,
    /// How many of them a relative has read since the checkpoint, too.
    pub(super) equal: usize,
    /// From the first one since the checkpoint to the last one in common, by the guest's clock.
    pub(super) window_ms: f64,
    /// From the first one since the checkpoint to the request for its numbers.
    asked_ms: f64,
}

/// What a machine has read.
struct Machine {
    number: u32,
    report: NumbersReport,
}

impl Machine {
    fn new(number: u32, bytes: &[u8]) -> Result<Self, LabError> {
        let report = serde_json::from_slice(bytes);
        let report = report.map_err(|error| LabError::unexpected(number, error))?;
        Ok(Self { number, report })
    }

    /// Index of the first number that only this one of two machines has begun to read.
    fn first_apart(&self, other: &Self) -> usize {
        let pairs = self.report.numbers.iter().zip(&other.report.numbers);
        pairs.take_while(|(one, other)| one.ns == other.ns).count()
    }
}

/// The metrics of this series.
pub(super) fn its_metrics() -> Vec<Metric<Found>> {
    fn all(found: &Found, of: fn(&Common) -> f64) -> impl Iterator<Item = f64> {
        found.common.iter().map(of)
    }
    fn most(found: &Found, of: fn(&Common) -> f64) -> Option<f64> {
        quantile(all(found, of), 1.0)
    }
    let equal: fn(&Common) -> f64 = |it| it.equal as f64;
    let window_ms: fn(&Common) -> f64 = |it| it.window_ms;
    let title = "Random numbers of a fork that a relative has read, too";
    vec![
        Metric::median("equal_numbers", title, "", move |it: &Found| all(it, equal).collect()),
        Metric::lower("equal_numbers_max", "of the fork with most", "", move |it: &Found| {
            most(it, equal)
        }),
        Metric::median("window_ms", "Time in which it reads them", "ms", move |it: &Found| {
            all(it, window_ms).collect()
        }),
        Metric::lower("window_max_ms", "of the fork with the longest", "ms", move |it: &Found| {
            most(it, window_ms)
        }),
    ]
}

/// Runs the series.
pub(super) fn random(testbed: &mut Testbed<'_>, series: &mut Series) -> Result<(), LabError> {
    let sizes = sizes(testbed.scale());
    let machines = machines(testbed, sizes)?;
    let driver = if machines.iter().any(|machine| machine.report.generation_driver) {
        "have a driver for the VM generation id, besides Ebb's agent"
    } else {
        "have no driver for the VM generation id: Ebb's agent gives them new random numbers"
    };
    series.notes.push(format!("the guests' kernels {driver}"));
    let common = common(&machines)?;
    series.tables.push(histogram(&common));
    series.details.push(table(&common));
    let found = Found { common, ..Found::default() };
    metrics::measure(&super::metrics(), &found, series);
    none_after_ready(&machines)
}

/// What all machines have read, the one that goes on first.
fn machines(testbed: &Testbed<'_>, sizes: Sizes) -> Result<Vec<Machine>, LabError> {
    let mut template = Template::start(testbed, sizes.guest, None)?;
    template.guest.begin(Command::GuestAgent)?;
    // A kernel that has just booted makes a new key every second or two, after 30 s every 15 s and
    // later every minute (Linux drivers/char/random.c, `crng_has_old_seed`), which would count.
    thread::sleep(Duration::from_secs(sizes.random_idle_s));
    let pause_us = PAUSE.as_micros() as u64;
    template.guest.begin(Command::RandomNumbers { port: PORT, pause_us })?;
    thread::sleep(REST);
    testbed.events().step(TEMPLATE, "is kept in a checkpoint");
    let (checkpoint, _) = template.checkpoint()?;
    testbed.events().step(TEMPLATE, "forks many machines");
    let forks = checkpoint.fork_many(FORK_NUMBER, sizes.random_forks)?;
    // All are asked at once, as soon as they are ready.
    let reports = thread::scope(|scope| {
        let ask = |fork| scope.spawn(move || Fork::read_from(fork, PORT));
        let asked: Vec<_> = forks.iter().map(ask).collect();
        let lost = |_panicked| Err(LabError::unexpected(TEMPLATE, "a thread has panicked"));
        let of_forks = asked.into_iter().map(|thread| thread.join().unwrap_or_else(lost));
        std::iter::once(template.read_from(PORT)).chain(of_forks).collect::<Vec<_>>()
    });
    if let Some(fork) = forks.iter().find(|fork| !fork.reseeded()) {
        let problem = "its agent has not confirmed that its random numbers are new";
        return Err(LabError::unexpected(fork.number(), problem));
    }
    let numbers = std::iter::once(TEMPLATE).chain(forks.iter().map(Fork::number));
    numbers.zip(reports).map(|(number, report)| Machine::new(number, &report?)).collect()
}

/// The numbers of each machine that it has begun to read since the checkpoint, with how many
/// machines have read each.
struct Since<'a> {
    of_each: Vec<&'a [Number]>,
    readers: BTreeMap<[u64; 2], u32>,
}

impl<'a> Since<'a> {
    fn new(machines: &'a [Machine]) -> Self {
        let first = machines.first();
        let apart = |machine| first.map_or(0, |first| first.first_apart(machine));
        // The same in all of them, unless two clocks have read the same.
        let begin = machines.iter().skip(1).map(apart).min().unwrap_or(0);
        let of_each: Vec<&[Number]> =
            machines.iter().map(|machine| &machine.report.numbers[begin..]).collect();
        let mut readers = BTreeMap::new();
        for number in of_each.iter().copied().flatten() {
            *readers.entry(number.value).or_default() += 1;
        }
        Self { of_each, readers }
    }

    fn is_common(&self, number: &Number) -> bool {
        self.readers.get(&number.value).is_some_and(|&count| count > 1)
    }
}

/// What each fork has in common with any other machine.
fn common(machines: &[Machine]) -> Result<Vec<Common>, LabError> {
    let since = Since::new(machines);
    let of_forks = machines.iter().zip(&since.of_each).skip(1);
    let common = |(machine, numbers): (&Machine, &&[Number])| {
        let number = machine.number;
        let first = numbers.first().ok_or_else(|| LabError::unexpected(number, NO_NUMBER))?;
        let since_first = |ns: u64| rounded(ns.saturating_sub(first.ns) as f64 / 1e6);
        let equal = || numbers.iter().filter(|number| since.is_common(number));
        Ok(Common {
            machine: number,
            read: numbers.len(),
            equal: equal().count(),
            window_ms: equal().next_back().map_or(0.0, |last| since_first(last.ns)),
            asked_ms: since_first(machine.report.asked_ns),
        })
    };
    of_forks.map(common).collect()
}

const NO_NUMBER: &str = "it has read no number since the checkpoint";

/// Checks that no machine has read a number of a relative after `ebb fork` had reported it.
fn none_after_ready(machines: &[Machine]) -> Result<(), LabError> {
    let since = Since::new(machines);
    for (machine, numbers) in machines.iter().zip(&since.of_each) {
        let after = numbers.iter().filter(|number| number.ns >= machine.report.asked_ns);
        let equal = after.filter(|number| since.is_common(number)).count();
        if equal > 0 {
            let problem =
                format!("{equal} of its random numbers after `ebb fork` are a relative's");
            return Err(LabError::unexpected(machine.number, problem));
        }
    }
    Ok(())
}

/// How many forks have windows of which length.
fn histogram(common: &[Common]) -> DataTable {
    let above = CLASSES_MS.iter().map(|&ms| (Some(ms), f64::from(ms))).chain([(None, f64::MAX)]);
    let mut below_ms = f64::NEG_INFINITY;
    let rows = above.map(|(bound, most_ms)| {
        let is_in = |it: &&Common| it.window_ms > below_ms && it.window_ms <= most_ms;
        let count = common.iter().filter(is_in).count() as u64;
        below_ms = most_ms;
        let bound = bound.map_or_else(|| "more".to_owned(), |ms| ms.to_string());
        vec![bound.into(), count.into()]
    });
    DataTable::new(
        "forks by the time in which they read random numbers of a relative",
        ["up to, ms", "forks"],
        rows,
    )
}

/// The numbers of each fork.
fn table(common: &[Common]) -> DataTable {
    DataTable::of(
        "random numbers since the checkpoint, each row a fork",
        common,
        &[
            ("machine", &|it| it.machine.into()),
            ("read", &|it| (it.read as u64).into()),
            ("also read by a relative", &|it| (it.equal as u64).into()),
            ("last of these after, ms", &|it| it.window_ms.into()),
            ("asked after, ms", &|it| it.asked_ms.into()),
        ],
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::figures::Value;

    const MS: u64 = 1_000_000;

    /// A machine with two numbers from before the checkpoint, and these since, one each 10 ms.
    fn machine(number: u32, first_ms: u64, since: &[u64], asked_ms: u64) -> Machine {
        let number_at =
            |ms: u64, value| Number { ns: ms * MS + u64::from(number), value: [value; 2] };
        let before = [1, 2].map(|value| Number { ns: value * MS, value: [value; 2] });
        let since = (0..).zip(since).map(|(index, &value)| number_at(first_ms + 10 * index, value));
        let numbers = before.into_iter().chain(since).collect();
        let report = NumbersReport { asked_ns: asked_ms * MS, numbers, ..Default::default() };
        Machine { number, report }
    }

    #[test]
    fn numbers_since_the_checkpoint_are_compared_with_all_relatives() {
        let machines = [
            machine(1, 100, &[50, 51, 60, 61], 0),
            machine(2, 200, &[50, 70, 51, 71], 0),
            machine(3, 100, &[80, 81, 82, 83], 0),
            machine(4, 103, &[90, 70, 91], 0),
        ];
        let common = common(&machines).unwrap();
        let found: Vec<_> = common.iter().map(|it| (it.read, it.equal, it.window_ms)).collect();
        assert_eq!(found, [(4, 3, 20.0), (4, 0, 0.0), (3, 1, 10.0)]);
        let counts: Vec<_> =
            histogram(&common).rows.into_iter().map(|row| row[1].clone()).collect();
        assert_eq!(counts[..4], [1_u64, 1, 1, 0].map(Value::from));
        let found = Found { common, ..Found::default() };
        let mut series = Series::new("random", String::new());
        metrics::measure(&super::super::metrics(), &found, &mut series);
        assert_eq!(series.metrics["equal_numbers"], Some(1.0));
        assert_eq!(series.metrics["equal_numbers_max"], Some(3.0));
        assert_eq!(series.metrics["window_max_ms"], Some(20.0));
        assert_eq!(series.metrics["pause_ms"], None);
    }

    #[test]
    fn a_common_number_after_the_report_is_an_error() {
        let machines = |asked_ms| {
            let of_fork = machine(2, 200, &[50, 70, 51, 71], asked_ms);
            [machine(1, 100, &[50, 51, 60, 61], 125), of_fork]
        };
        assert!(none_after_ready(&machines(221)).is_ok());
        let error = none_after_ready(&machines(220)).unwrap_err().to_string();
        assert!(error.contains("guest 2") && error.contains("1 of its random numbers"), "{error}");
        let without = common(&[machine(1, 100, &[50], 0), machine(2, 200, &[], 0)]);
        assert!(without.unwrap_err().to_string().contains(NO_NUMBER));
    }
}
