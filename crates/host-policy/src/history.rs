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

    fn alike(&self, profile: &str, size_bytes: u64) -> Option<&Alike> {
        self.profiles.get(profile)?.get(&log(size_bytes))
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

impl Needs {
    fn note(&mut self, need_bytes: u64, size_bytes: u64) {
        self.counts.resize(PARTS, 0);
        let index = part(need_bytes, PARTS as u64, size_bytes).min(PARTS as u64 - 1);
        let count = &mut self.counts[index as usize];
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
    let mut alike = BTreeMap::<(&str, u64, u64, bool, Delays), u64>::new();
    for machine in &snapshot.machines {
        let known = assess(machine, snapshot.at_ms, settings.stale_ms);
        let now = need_bytes(machine, known.as_ref());
        let (name, profile) = settings.profile(&machine.name);
        let sizes = (round_up(machine.size_bytes), grid.whole_cells(now));
        let is_held = state.machines.get(&machine.name).is_some_and(|it| it.is_held);
        let may_wait = !is_held && machine.means.has(Mean::Pause) && settings.may_pause(profile);
        let delays = if may_wait { Delays::Possible } else { Delays::Impossible };
        *alike.entry((name, sizes.0, sizes.1, known.is_ok(), delays)).or_default() += 1;
    }
    let mut sum = Sum::nothing();
    for ((profile, size_bytes, now_bytes, is_known, delays), count) in alike {
        let alike = state.history.alike(profile, size_bytes);
        let needs = alike.map(|it| if is_known { &it.known } else { &it.doubted });
        let need = grid.need(needs.as_slice(), size_bytes, now_bytes);
        sum.add(&grid, &need, size_bytes, delays, count);
    }
    // Whether a new one will be believed is not known. Its monitor is like the others.
    let alike_one = state.history.alike(profile, size_bytes);
    let needs: Vec<&Needs> = alike_one.iter().flat_map(|it| [&it.known, &it.doubted]).collect();
    let one = grid.need(&needs, size_bytes, 0);
    let may_wait = snapshot.machines.iter().all(|machine| machine.means.has(Mean::Pause))
        && settings.may_pause(settings.profiles.get(profile).unwrap_or(&settings.default));
    let delays = if may_wait { Delays::Possible } else { Delays::Impossible };
    let mut fit = Fit {
        machines: 0,
        risk_of_next_ppm: 0,
        delay_of_next_ppm: 0,
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
    loop {
        sum.add(&grid, &one, size_bytes, delays, 1);
        fit.largest_claim_bytes = sum.largest_claim_bytes;
        fit.risk_of_next_ppm = sum.with_delays(&grid).too_much_ppm();
        fit.delay_of_next_ppm = sum.all.too_much_ppm();
        let is_too_much = fit.risk_of_next_ppm > settings.risk_ppm
            || fit.delay_of_next_ppm > settings.delay_ppm
            || fit.machines == most;
        if is_too_much {
            return fit;
        }
        fit.machines += 1;
    }
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
    /// Rounded up: a difference within a cell makes none in a distribution. Memory that machines
    /// occupy has few different values, since the host has only so many cells.
    fn whole_cells(&self, bytes: u64) -> u64 {
        bytes.div_ceil(self.cell_bytes).saturating_mul(self.cell_bytes)
    }

    fn exactly(&self, bytes: u64) -> Distribution {
        let mut distribution = Distribution { cells: vec![0.0; CELLS], too_much: 0.0 };
        match distribution.cells.get_mut(bytes.div_ceil(self.cell_bytes) as usize) {
            Some(cell) => *cell = 1.0,
            None => distribution.too_much = 1.0,
        }
        distribution
    }

    /// What a machine needs, at least what it needs now.
    fn need(&self, needs: &[&Needs], size_bytes: u64, now_bytes: u64) -> Distribution {
        let mut distribution = Distribution { cells: vec![0.0; CELLS], too_much: 0.0 };
        let mut add = |bytes: u64, probability: f64| {
            // At least one cell, so that the number of machines is bounded.
            let cell = bytes.max(now_bytes).max(1).div_ceil(self.cell_bytes) as usize;
            match distribution.cells.get_mut(cell) {
                Some(cell) => *cell += probability,
                None => distribution.too_much += probability,
            }
        };
        let unseen = (3 * LASTS_SECONDS) as f64;
        let sum = needs.iter().map(|needs| needs.sum as f64).sum::<f64>() + unseen;
        add(size_bytes, unseen / sum);
        for (index, count) in needs.iter().flat_map(|needs| needs.counts.iter().enumerate()) {
            if *count > 0 {
                add(part(size_bytes, index as u64 + 1, PARTS as u64), *count as f64 / sum);
            }
        }
        distribution
    }
}

/// Probabilities of needing 0, 1, 2 ... cells, and more than all.
#[derive(Clone)]
struct Distribution {
    cells: Vec<f64>,
    too_much: f64,
}

impl Distribution {
    fn nothing() -> Self {
        let mut cells = vec![0.0; CELLS];
        cells[0] = 1.0;
        Self { cells, too_much: 0.0 }
    }

    /// The sum of two independent ones.
    fn and(&self, other: &Self) -> Self {
        let mut cells = vec![0.0; CELLS];
        let mut too_much = self.too_much + other.too_much - self.too_much * other.too_much;
        for (index, a) in self.cells.iter().enumerate().filter(|(_, a)| **a > 0.0) {
            let (fits, over) = other.cells.split_at(CELLS - index);
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
