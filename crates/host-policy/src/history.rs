//! What machines have needed on this host, and how many more fit.
//!
//! Each profile has a histogram of what its machines needed, second by second, as parts of their
//! sizes. How many fit follows from the distribution of the sum of all machines' needs. A need that
//! was never observed is possible: by the rule of three, an event that did not happen in n
//! independent observations has a probability below 3/n (with 95 % confidence). A machine is
//! assumed to need all of its size with that probability; without history it is 1.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::level::{Level, part};
use crate::settings::Settings;
use crate::snapshot::{MOST, Machine, Mean, Snapshot};
use crate::state::State;
use crate::trust::{Doubt, Known, assess};

/// Parts that a size is divided into.
const PARTS: usize = 256;
/// After so many, all observations lose half of their weight: about a day of fifty machines.
const MOST_OBSERVATIONS: u64 = 4_000_000;
/// How long a need lasts: observations within this time are one.
const LASTS_SECONDS: u64 = 10;
/// Parts that a host's memory is divided into.
const CELLS: usize = 512;
/// No machine and its monitor need less.
const LEAST_BYTES: u64 = 1 << 20;

/// What machines have needed, by profile and by the binary logarithm of their size.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct History {
    profiles: BTreeMap<String, BTreeMap<u32, Alike>>,
}

/// What machines of a profile and of about one size have needed.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
struct Alike {
    /// While their statistics were used.
    known: Needs,
    /// While they were not: all that they have counts.
    doubted: Needs,
}

/// How much was needed how often.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
struct Needs {
    /// How often a machine needed so many parts of its size, rounded up; empty or [`PARTS`].
    counts: Vec<u64>,
    sum: u64,
}

impl History {
    /// Records what a machine needs. Called once a second.
    pub(crate) fn note(&mut self, profile: &str, machine: &Machine, known: Result<&Known, &Doubt>) {
        if machine.size_bytes == 0 {
            return;
        }
        if !self.profiles.contains_key(profile) {
            self.profiles.insert(profile.to_owned(), BTreeMap::new());
        }
        if let Some(sizes) = self.profiles.get_mut(profile) {
            let Alike { known: all, doubted } = sizes.entry(log(machine.size_bytes)).or_default();
            let needs = if known.is_ok() { all } else { doubted };
            needs.note(need_bytes(machine, known), machine.size_bytes);
        }
    }

    /// For how long machines of a profile have been observed, together.
    pub fn observed_seconds(&self, profile: &str) -> u64 {
        let sizes = self.profiles.get(profile).into_iter().flat_map(BTreeMap::values);
        sizes.fold(0, |sum, it| sum.saturating_add(it.observed_seconds()))
    }

    fn alike(&self, profile: &str, size_log: u32) -> Option<&Alike> {
        self.profiles.get(profile)?.get(&size_log)
    }
}

impl Alike {
    fn observed_seconds(&self) -> u64 {
        self.known.sum.saturating_add(self.doubted.sum)
    }
}

fn log(size_bytes: u64) -> u32 {
    size_bytes.max(1).ilog2()
}

/// Memory of the host that a machine cannot do without.
fn need_bytes(machine: &Machine, known: Result<&Known, &Doubt>) -> u64 {
    let has = machine.resident_bytes.map(|it| it + machine.swapped_bytes.unwrap_or(0));
    let has = has.unwrap_or(machine.size_bytes);
    match known {
        // A margin for files in use, and for free pages that are not reported yet.
        Ok(known) => has.min(known.used + known.used / 4 + (32 << 20)),
        Err(_) => has,
    }
}

/// In which part of a machine's size a need ends.
fn part_of(need_bytes: u64, size_bytes: u64) -> usize {
    part(need_bytes, PARTS as u64, size_bytes).min(PARTS as u64 - 1) as usize
}

impl Needs {
    fn note(&mut self, need_bytes: u64, size_bytes: u64) {
        self.counts.resize(PARTS, 0);
        let count = &mut self.counts[part_of(need_bytes, size_bytes)];
        *count = count.saturating_add(1);
        self.sum = self.sum.saturating_add(1);
        if self.sum >= MOST_OBSERVATIONS {
            for count in &mut self.counts {
                *count /= 2;
            }
            self.sum = self.counts.iter().fold(0, |sum, count| sum.saturating_add(*count));
        }
    }
}

/// How many more machines fit.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Fit {
    /// The number of machines.
    pub machines: u64,
    /// The probability that the host has too little at a time, with one machine more than these, in
    /// millionths: machines that can be paused need what they do on the mean, and one of them all
    /// that it can claim.
    pub risk_of_next_ppm: u64,
    /// The probability that all together need more than there is, with one machine more than these,
    /// in millionths: as far as they can be paused, they are delayed then.
    pub delay_of_next_ppm: u64,
    /// The limits of these two ([`Settings::risk_ppm`] and [`Settings::delay_ppm`]).
    pub risk_limit_ppm: u64,
    /// See there.
    pub delay_limit_ppm: u64,
    /// For how long machines of the profile and about this size have been observed, in seconds.
    pub observed_seconds: u64,
    /// Memory that machines can have, those that run included.
    pub capacity_bytes: u64,
    /// What those that run need on the mean.
    pub needed_bytes: u64,
    /// What a new one needs on the mean.
    pub needed_by_one_bytes: u64,
    /// The most that one machine that can be paused can need beyond its mean, the next one
    /// included.
    pub largest_claim_bytes: u64,
    /// The host's level: above tight none fits.
    pub level: Level,
    /// The number of machines that are paused, since they grew: while there are any, none fits.
    pub delayed: usize,
}

impl Fit {
    /// Why no more fit than these.
    pub fn reason(&self) -> String {
        let percent = |ppm: u64| format!("{}.{:04} %", ppm / 10_000, ppm % 10_000);
        let exceeded = |what: &str, ppm: u64, limit: u64| {
            let (now, limit) = (percent(ppm), percent(limit));
            format!("with one more, the probability that {what} would be {now} (limit {limit})")
        };
        if self.level > Level::Tight {
            format!("the host is {}", self.level)
        } else if self.delayed > 0 {
            format!("machines that grew are paused now: {}", self.delayed)
        } else if self.risk_of_next_ppm > self.risk_limit_ppm {
            let what = "the host has too little, even with machines paused,";
            exceeded(what, self.risk_of_next_ppm, self.risk_limit_ppm)
        } else if self.delay_of_next_ppm > self.delay_limit_ppm {
            let what = "all need more than there is at a time";
            exceeded(what, self.delay_of_next_ppm, self.delay_limit_ppm)
        } else {
            "no more were asked for".to_owned()
        }
    }
}

/// How many more machines of this size and profile fit, up to `most`.
pub fn fit(
    snapshot: &Snapshot,
    state: &State,
    settings: &Settings,
    profile: &str,
    size_bytes: u64,
    most: u64,
) -> Fit {
    let (snapshot, size_bytes) = (&snapshot.bounded(), size_bytes.min(MOST));
    let host = &snapshot.host;
    let has = |machine: &Machine| {
        machine.resident_bytes.unwrap_or(0) + machine.swapped_bytes.unwrap_or(0)
    };
    let swapped = host.swap.map_or(0, |swap| swap.used_bytes);
    let held: u64 = snapshot.machines.iter().map(has).sum();
    let kept = part(host.total_bytes, settings.emergency_percent, 100);
    let capacity_bytes = (host.available_bytes + held).saturating_sub(swapped + kept);
    let grid = Grid { cell_bytes: (capacity_bytes / CELLS as u64).max(1) };

    // Machines of one profile, of about one size, that need about the same now, are alike.
    let mut alike = BTreeMap::<(&str, u32, u64, usize, bool, Delays), u64>::new();
    for machine in &snapshot.machines {
        let known = assess(machine, snapshot.at_ms, settings.stale_ms);
        let now = need_bytes(machine, known.as_ref());
        let (name, profile) = settings.profile(&machine.name);
        let is_held = state.machines.get(&machine.name).is_some_and(|it| it.is_held);
        let may_wait = !is_held && machine.means.has(Mean::Pause) && settings.may_pause(profile);
        let delays = if may_wait { Delays::Possible } else { Delays::Impossible };
        let (size_log, size_bytes) = (log(machine.size_bytes), round_up(machine.size_bytes));
        let now = part_of(now, machine.size_bytes);
        *alike.entry((name, size_log, size_bytes, now, known.is_ok(), delays)).or_default() += 1;
    }
    let mut sum = Sum::nothing();
    for ((profile, size_log, size_bytes, now, is_known, delays), count) in alike {
        let alike = state.history.alike(profile, size_log);
        let needs = alike.map(|it| if is_known { &it.known } else { &it.doubted });
        let need = grid.need(needs.as_slice(), size_bytes, now);
        sum.add(&grid, &need, size_bytes, delays, count);
    }
    // Whether a new one will be believed is not known. Its monitor is like the others.
    let alike_one = state.history.alike(profile, log(size_bytes));
    let size_bytes = round_up(size_bytes);
    let needs: Vec<&Needs> = alike_one.iter().flat_map(|it| [&it.known, &it.doubted]).collect();
    let one = grid.need(&needs, size_bytes, 0);
    let may_wait = snapshot.machines.iter().all(|machine| machine.means.has(Mean::Pause))
        && settings.may_pause(settings.profiles.get(profile).unwrap_or(&settings.default));
    let delays = if may_wait { Delays::Possible } else { Delays::Impossible };
    let mut fit = Fit {
        machines: 0,
        risk_of_next_ppm: 0,
        delay_of_next_ppm: 0,
        risk_limit_ppm: settings.risk_ppm,
        delay_limit_ppm: settings.delay_ppm,
        observed_seconds: alike_one.map_or(0, Alike::observed_seconds),
        capacity_bytes,
        needed_bytes: sum.all.mean_bytes(&grid),
        needed_by_one_bytes: one.mean_bytes(&grid),
        largest_claim_bytes: 0,
        level: state.host.level,
        delayed: state.machines.values().filter(|it| it.paused_until_ms.is_some()).count(),
    };
    if fit.level > Level::Tight || fit.delayed > 0 {
        (fit.risk_of_next_ppm, fit.delay_of_next_ppm) = (1_000_000, 1_000_000);
        return fit;
    }
    let with = |count| {
        let mut with = sum.clone();
        with.add(&grid, &one, size_bytes, delays, count);
        with
    };
    let fits = |count| {
        let with = with(count);
        with.with_delays(&grid).too_much_ppm() <= settings.risk_ppm
            && with.all.too_much_ppm() <= settings.delay_ppm
    };
    fit.machines = largest(most, fits);
    let with_next = with(fit.machines.saturating_add(1));
    fit.largest_claim_bytes = with_next.largest_claim_bytes;
    fit.risk_of_next_ppm = with_next.with_delays(&grid).too_much_ppm();
    fit.delay_of_next_ppm = with_next.all.too_much_ppm();
    fit
}

/// The largest number up to `most` for which `holds`, which holds for all numbers below it.
fn largest(most: u64, holds: impl Fn(u64) -> bool) -> u64 {
    let (mut yes, mut no) = (0, 1);
    while yes < most && no <= most && holds(no) {
        (yes, no) = (no, no.saturating_mul(2));
    }
    if yes == most {
        return most;
    }
    no = no.min(most.saturating_add(1));
    while no - yes > 1 {
        let middle = yes + (no - yes) / 2;
        if holds(middle) {
            yes = middle;
        } else {
            no = middle;
        }
    }
    yes
}

/// Rounds up to a few significant bits, by 3 % at most, so that there are few different sizes.
fn round_up(bytes: u64) -> u64 {
    let step = (bytes / 64).max(1).next_power_of_two();
    bytes.next_multiple_of(step)
}

/// Whether a machine can be paused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Delays {
    Possible,
    Impossible,
}

/// What several machines need.
#[derive(Clone)]
struct Sum {
    all: Distribution,
    /// Only those that cannot be paused.
    unpaused: Distribution,
    /// What the others need on the mean, and the most that one of them can need beyond that.
    paused_bytes: u64,
    largest_claim_bytes: u64,
}

impl Sum {
    fn nothing() -> Self {
        let (all, unpaused) = (Distribution::nothing(), Distribution::nothing());
        Self { all, unpaused, paused_bytes: 0, largest_claim_bytes: 0 }
    }

    /// Adds so many machines of a size with this need.
    fn add(
        &mut self,
        grid: &Grid,
        one: &Distribution,
        size_bytes: u64,
        delays: Delays,
        count: u64,
    ) {
        let several = one.clone().times(count);
        self.all = self.all.and(&several);
        if delays == Delays::Impossible {
            self.unpaused = self.unpaused.and(&several);
            return;
        }
        let mean_bytes = one.mean_bytes(grid);
        let claim_bytes = size_bytes.saturating_sub(mean_bytes);
        self.paused_bytes = self.paused_bytes.saturating_add(mean_bytes.saturating_mul(count));
        self.largest_claim_bytes = self.largest_claim_bytes.max(claim_bytes);
    }

    /// What is needed at a time if machines are paused: one after the other gets what it claims.
    fn with_delays(&self, grid: &Grid) -> Distribution {
        self.unpaused.and(&grid.exactly(self.paused_bytes.saturating_add(self.largest_claim_bytes)))
    }
}

/// Memory in cells.
struct Grid {
    cell_bytes: u64,
}

impl Grid {
    fn exactly(&self, bytes: u64) -> Distribution {
        let mut distribution = Distribution::default();
        distribution.add(bytes.div_ceil(self.cell_bytes), 1.0);
        distribution
    }

    /// What a machine needs, at least the part of its size that it needs now.
    fn need(&self, needs: &[&Needs], size_bytes: u64, now: usize) -> Distribution {
        let mut distribution = Distribution::default();
        // A need between two cells is one of them, with the same mean: rounded up, those of many
        // machines would be far more than they are.
        let mut add = |bytes: u64, probability: f64| {
            let bytes = bytes.max(LEAST_BYTES);
            let below = bytes / self.cell_bytes;
            let above = (bytes % self.cell_bytes) as f64 / self.cell_bytes as f64;
            distribution.add(below, probability * (1.0 - above));
            distribution.add(below + 1, probability * above);
        };
        let unseen = (3 * LASTS_SECONDS) as f64;
        let sum = needs.iter().map(|needs| needs.sum as f64).sum::<f64>() + unseen;
        add(size_bytes, unseen / sum);
        for (index, count) in needs.iter().flat_map(|needs| needs.counts.iter().enumerate()) {
            if *count > 0 {
                let parts = index.max(now) as u64 + 1;
                add(part(size_bytes, parts, PARTS as u64), *count as f64 / sum);
            }
        }
        distribution
    }
}

/// Probabilities of needing 0, 1, 2 ... cells, and more than all.
#[derive(Clone, Default)]
struct Distribution {
    /// Without those after the last one that is possible.
    cells: Vec<f64>,
    too_much: f64,
}

impl Distribution {
    fn nothing() -> Self {
        Self { cells: vec![1.0], too_much: 0.0 }
    }

    /// Adds the probability of needing so many cells.
    fn add(&mut self, cell: u64, probability: f64) {
        if probability == 0.0 {
            return;
        }
        if cell >= CELLS as u64 {
            self.too_much += probability;
            return;
        }
        let cell = cell as usize;
        self.cells.resize(self.cells.len().max(cell + 1), 0.0);
        self.cells[cell] += probability;
    }

    /// The sum of two independent ones.
    fn and(&self, other: &Self) -> Self {
        let length = (self.cells.len() + other.cells.len()).saturating_sub(1).min(CELLS);
        let mut cells = vec![0.0; length];
        let mut too_much = self.too_much + other.too_much - self.too_much * other.too_much;
        for (index, a) in self.cells.iter().enumerate().filter(|(_, a)| **a > 0.0) {
            let room = (CELLS - index).min(other.cells.len());
            let (fits, over) = other.cells.split_at(room);
            for (cell, b) in cells[index..].iter_mut().zip(fits) {
                *cell += a * b;
            }
            too_much += a * over.iter().sum::<f64>();
        }
        Self { cells, too_much }
    }

    /// The sum of so many.
    fn times(mut self, mut count: u64) -> Self {
        let mut all = Self::nothing();
        while count > 0 {
            if count % 2 == 1 {
                all = all.and(&self);
            }
            count /= 2;
            if count > 0 {
                self = self.and(&self);
            }
        }
        all
    }

    fn too_much_ppm(&self) -> u64 {
        (self.too_much * 1e6).ceil().min(1e6) as u64
    }

    fn mean_bytes(&self, grid: &Grid) -> u64 {
        let cells = self.cells.iter().enumerate();
        let mean: f64 = cells.map(|(index, probability)| index as f64 * probability).sum();
        let mean = mean + self.too_much * CELLS as f64;
        (mean * grid.cell_bytes as f64) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn the_largest_number_is_found(bound in 0..200_u64, most in 0..300_u64) {
            prop_assert_eq!(largest(most, |number| number <= bound), bound.min(most));
        }

        #[test]
        fn sums_keep_the_mean(
            needs in prop::collection::vec(1..400_u64, 1..30),
            cell in 1..90_u64,
        ) {
            let grid = Grid { cell_bytes: cell << 20 };
            let mut sum = Distribution::nothing();
            for mib in &needs {
                let mut counts = vec![0; PARTS];
                counts[PARTS - 1] = 1;
                let sum_of_one = Needs { counts, sum: 1 };
                sum = sum.and(&grid.need(&[&sum_of_one], mib << 20, 0));
            }
            let all = needs.iter().sum::<u64>() << 20;
            let fits = all.div_ceil(grid.cell_bytes) + needs.len() as u64 <= CELLS as u64;
            prop_assume!(fits);
            prop_assert!(sum.too_much == 0.0);
            prop_assert!(sum.mean_bytes(&grid).abs_diff(all) < 1 << 10);
        }
    }

    #[test]
    fn the_largest_of_all_numbers_needs_few_tries() {
        let tries = std::cell::Cell::new(0);
        let found = largest(u64::MAX, |number| {
            tries.set(tries.get() + 1);
            number <= 1 << 40
        });
        assert!(found == 1 << 40 && tries.get() < 100, "{found} {}", tries.get());
    }
}
