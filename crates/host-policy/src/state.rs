//! What is remembered from one decision to the next.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::growth::Growth;
use crate::history::History;
use crate::level::LevelState;
use crate::snapshot::Machine;
use crate::trust::Known;

/// What is remembered of a host and its machines. It can be written to a file and read again. With
/// [`State::default`] no history is known, and few machines are admitted at first.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct State {
    /// The host's level.
    pub host: LevelState,
    /// What machines have needed.
    pub history: History,
    pub(crate) at_ms: Option<u64>,
    /// What the host had left above the limit of an emergency.
    pub(crate) room_bytes: u64,
    /// Whether a machine grows fast or is paused.
    pub(crate) is_urgent: bool,
    pub(crate) machines: BTreeMap<String, MachineState>,
}

impl State {
    /// A state that knows what machines have needed, and nothing else.
    pub fn with_history(history: History) -> Self {
        Self { history, ..Self::default() }
    }

    /// Sets whether a machine is held: nothing is done to a machine that is.
    pub fn hold(&mut self, machine: &str, is_held: bool) {
        self.machines.entry(machine.to_owned()).or_default().is_held = is_held;
    }

    /// The machines that are held.
    pub fn held(&self) -> impl Iterator<Item = &str> {
        let held = self.machines.iter().filter(|(_, machine)| machine.is_held);
        held.map(|(name, _)| name.as_str())
    }
}

/// What is remembered of a machine.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct MachineState {
    pub(crate) is_held: bool,
    /// When it was last seen to work, and when it was last looked at for that.
    active_ms: Option<u64>,
    looked_ms: Option<u64>,
    processor_ms: Option<u64>,
    available_bytes: Option<u64>,
    oom_kills: Option<u64>,
    /// What it had, in memory and in swap.
    pub(crate) has_bytes: Option<u64>,
    pub(crate) growth: Option<Growth>,
    /// The end of the lease of a pause that was decided here.
    pub(crate) paused_until_ms: Option<u64>,
    /// For how long it was paused in the last time.
    pub(crate) paused_ms: u64,
    /// Not paused again for this time.
    pub(crate) pausing: Backoff,
    pub(crate) squeeze: Option<Squeeze>,
    pub(crate) taking: Backoff,
    pub(crate) reclaiming: Backoff,
    pub(crate) squeezing: Backoff,
    pub(crate) resting: Backoff,
    /// The last time that something was taken from it otherwise.
    taken: Option<Taken>,
    /// The rule that applied last, and since when.
    pub(crate) rule: String,
    pub(crate) since_ms: u64,
}

/// A balloon that is there because of a decision.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Squeeze {
    pub(crate) target_bytes: u64,
    pub(crate) since_ms: u64,
    pub(crate) until_ms: u64,
    /// Whether it is given back as soon as it has reached its size.
    pub(crate) is_pulse: bool,
}

/// Memory that a machine was asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Taken {
    at_ms: u64,
    gain_bytes: u64,
    /// What it occupied then, and the least since.
    before_bytes: u64,
    least_bytes: u64,
    major_faults: Option<u64>,
}

impl Taken {
    fn came_bytes(&self) -> u64 {
        self.before_bytes.saturating_sub(self.least_bytes)
    }
}

/// How long something is not tried again.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Backoff {
    until_ms: u64,
    last_ms: u64,
}

impl Backoff {
    /// Waits at least `first_ms`, twice as long as the last time, and `most_ms` at most.
    pub(crate) fn grow(&mut self, at_ms: u64, first_ms: u64, most_ms: u64) {
        self.last_ms = self.last_ms.saturating_mul(2).clamp(first_ms, most_ms);
        self.until_ms = at_ms + self.last_ms;
    }

    /// Waits for `ms`, and what comes next is short again.
    pub(crate) fn pause(&mut self, at_ms: u64, ms: u64) {
        *self = Self { until_ms: at_ms + ms, last_ms: 0 };
    }

    pub(crate) fn left_ms(self, at_ms: u64) -> u64 {
        self.until_ms.saturating_sub(at_ms)
    }
}

/// Memory that was asked for is expected within this time.
pub(crate) const IN_FLIGHT_MS: u64 = 5_000;
/// After this time the result is judged.
const JUDGED_MS: u64 = 30_000;
/// The first and the longest pause after an attempt that returned little.
const AGAIN_MS: u64 = 30_000;
const VAIN_MS: u64 = 30 * 60_000;
/// A machine is idle below these: thousandths of a processor, and change of available memory.
const IDLE_PROCESSOR_MILLI: u64 = 50;
const IDLE_CHANGE_BYTES: u64 = 16 << 20;
/// A machine is looked at for that after this time at the earliest: statistics of guests are not
/// newer, and processor time has steps.
const LOOK_MS: u64 = 500;

impl MachineState {
    /// Takes notice of a machine. Returns how long it has been idle, and how many processes its
    /// guest has killed since the last time.
    pub(crate) fn notice(
        &mut self,
        machine: &Machine,
        known: Option<&Known>,
        at_ms: u64,
    ) -> (u64, u64) {
        let kills = machine.statistics.and_then(|said| said.oom_kills);
        let new_kills = self.oom_kills.zip(kills).map_or(0, |(old, new)| new.saturating_sub(old));
        self.oom_kills = kills;
        self.judge(machine, at_ms);
        let elapsed_ms = self.looked_ms.map_or(u64::MAX, |before| at_ms.saturating_sub(before));
        if elapsed_ms >= LOOK_MS {
            self.look(machine, known, at_ms, elapsed_ms);
        }
        (at_ms.saturating_sub(self.active_ms.unwrap_or(at_ms)), new_kills)
    }

    /// Sees whether it works.
    fn look(&mut self, machine: &Machine, known: Option<&Known>, at_ms: u64, elapsed_ms: u64) {
        let ran = self.processor_ms.zip(machine.processor_ms);
        let ran_milli =
            ran.map(|(before, now)| 1000 * now.saturating_sub(before) / elapsed_ms.max(1));
        let change = self.available_bytes.zip(known.map(|known| known.available));
        let change = change.map(|(before, now)| before.abs_diff(now));
        let is_idle = match (ran_milli, change) {
            (Some(milli), _) => milli < IDLE_PROCESSOR_MILLI,
            (None, Some(change)) => change < IDLE_CHANGE_BYTES,
            (None, None) => false,
        };
        // One that is paused might work.
        if !is_idle || machine.is_paused || self.active_ms.is_none() {
            self.active_ms = Some(at_ms);
        }
        self.looked_ms = Some(at_ms);
        self.processor_ms = machine.processor_ms;
        self.available_bytes = known.map(|known| known.available);
    }

    /// Notes that memory is taken from a machine.
    pub(crate) fn takes(&mut self, machine: &Machine, at_ms: u64, gain_bytes: u64) {
        let before_bytes = machine.resident_bytes.unwrap_or(0);
        let major_faults = machine.statistics.and_then(|said| said.major_faults);
        let least_bytes = before_bytes;
        self.taken = Some(Taken { at_ms, gain_bytes, before_bytes, least_bytes, major_faults });
        // Until the result is judged.
        self.taking.until_ms = at_ms + JUDGED_MS;
    }

    /// Memory that is still expected: what it was asked for a short time ago, and what its balloon
    /// has not reached yet.
    pub(crate) fn coming_bytes(&self, machine: &Machine, at_ms: u64) -> u64 {
        let is_new = |since_ms| at_ms.saturating_sub(since_ms) < IN_FLIGHT_MS;
        let taken = self.taken.filter(|taken| is_new(taken.at_ms));
        let taken = taken.map_or(0, |taken| taken.gain_bytes.saturating_sub(taken.came_bytes()));
        let squeezed = self.squeeze.filter(|it| !it.is_pulse && is_new(it.since_ms));
        let balloon = squeezed.and(machine.balloon).unwrap_or_default();
        taken.saturating_add(balloon.target_bytes.saturating_sub(balloon.actual_bytes))
    }

    /// Whether something was taken from it, and the result is not known yet.
    pub(crate) fn is_being_judged(&self) -> bool {
        self.taken.is_some()
    }

    /// Judges the last attempt: there is a pause if little was returned, or if it was read again.
    fn judge(&mut self, machine: &Machine, at_ms: u64) {
        let Some(taken) = &mut self.taken else { return };
        let now = machine.resident_bytes.unwrap_or(0);
        let age_ms = at_ms.saturating_sub(taken.at_ms);
        if age_ms <= IN_FLIGHT_MS {
            taken.least_bytes = taken.least_bytes.min(now);
        }
        if age_ms < JUDGED_MS {
            return;
        }
        let came = taken.came_bytes();
        let faults = machine.statistics.and_then(|said| said.major_faults);
        let again = taken.major_faults.zip(faults);
        let again = again.map_or(0, |(old, new)| 4096 * new.saturating_sub(old));
        if came < taken.gain_bytes / 4 || again > came / 2 {
            self.taking.grow(at_ms, AGAIN_MS, VAIN_MS);
        } else {
            self.taking.pause(at_ms, 0);
        }
        self.taken = None;
    }

    /// Forgets times, after a clock has gone back.
    pub(crate) fn forget_times(&mut self, at_ms: u64) {
        (self.active_ms, self.looked_ms, self.taken) = (None, None, None);
        (self.has_bytes, self.growth) = (None, None);
        // It is resumed by the next decision.
        self.paused_until_ms = self.paused_until_ms.and(Some(u64::MAX));
        self.since_ms = at_ms;
        let Self { taking, reclaiming, squeezing, resting, pausing, .. } = self;
        for backoff in [taking, reclaiming, squeezing, resting, pausing] {
            *backoff = Backoff::default();
        }
        if let Some(squeeze) = &mut self.squeeze {
            (squeeze.since_ms, squeeze.until_ms) = (at_ms, at_ms);
        }
    }
}

impl State {
    /// Forgets times, after a clock has gone back.
    pub(crate) fn forget_times(&mut self, at_ms: u64) {
        self.host.forget_times(at_ms);
        self.at_ms = None;
        for machine in self.machines.values_mut() {
            machine.forget_times(at_ms);
        }
    }
}
