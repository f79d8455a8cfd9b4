//! Which of the machines that grow fast go on, and which are paused.
//!
//! Machines that reach their highest needs at once must not fill the host. This is the banker's
//! algorithm (Dijkstra, EWD 108): what a machine can still take is its claim. Those with the
//! smallest claims go on first: they are the nearest to their highest needs, and to the end of
//! them. One that would take from their claims is paused until there is room.

use serde::{Deserialize, Serialize};

use crate::action::Action;
use crate::decide::{Round, View};
use crate::explain::Rule;
use crate::level::part;
use crate::settings::Settings;
use crate::snapshot::{Host, Machine, Mean};
use crate::state::{MachineState, State};

/// The lease of a pause: if no decision follows, the machine runs again after this time.
const LEASE_MS: u64 = 2_000;
/// Growth is fast if it alone would fill the host within this time. Other means need as long.
const FILLS_MS: u64 = 10_000;
/// Slower growth is never fast, in bytes per second.
const LEAST_RATE: u64 = 32 << 20;
/// A machine that has not grown fast for this time has stopped: some decisions at ten a second.
const STOPPED_MS: u64 = 300;
/// What a machine takes within this time cannot be prevented: the next decision is a tenth of a
/// second away, and has to be carried out.
const REACTION_MS: u64 = 200;
/// What a machine that has stopped growing keeps is expected back within this time.
const KEEPS_MS: u64 = 10_000;
/// After its longest pause a machine runs for at least so many times as long.
const RUNS: u64 = 3;

/// Fast growth of a machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Growth {
    /// When it was last fast.
    last_ms: u64,
    /// What the machine had before, and the most since.
    from_bytes: u64,
    most_bytes: u64,
    /// The last rate, in bytes per second.
    rate: u64,
}

/// A machine that grows, or has grown.
struct Claimant {
    index: usize,
    growth_bytes: u64,
    claim_bytes: u64,
    /// What it takes before the next decision can prevent it.
    step_bytes: u64,
    may_wait: bool,
}

/// What a machine that waits can hope for.
#[derive(Default)]
struct Others {
    /// Machines that go on, or have grown and stopped.
    running: u64,
    /// What the latter have taken, and what was asked for.
    expected_bytes: u64,
}

impl Others {
    fn expect(&mut self, bytes: u64) {
        self.expected_bytes = self.expected_bytes.saturating_add(bytes);
    }
}

/// What a host has left above the limit of an emergency.
fn room_bytes(host: &Host, settings: &Settings) -> u64 {
    let kept = part(host.total_bytes, settings.emergency_percent, 100);
    host.available_bytes.saturating_sub(kept)
}

/// Whether a decision is to be made before the interval's end: machines grow or are paused, or the
/// host's available memory falls fast. It is meant to be asked ten times a second.
pub fn is_urgent(host: &Host, state: &State, settings: &Settings) -> bool {
    let fallen_bytes = state.room_bytes.saturating_sub(room_bytes(host, settings));
    let is_falling = fallen_bytes > (state.room_bytes / 16).max(LEAST_RATE);
    settings.pause_ms > 0 && (state.is_urgent || is_falling)
}

fn has_bytes(machine: &Machine) -> Option<u64> {
    Some(machine.resident_bytes? + machine.swapped_bytes.unwrap_or(0))
}

/// What a machine can still take.
fn claim_bytes(view: &View) -> u64 {
    let machine = view.machine;
    // A ceiling holds only while the balloon is there.
    let ceiling = view.profile.ceiling_bytes.filter(|it| machine.outside_balloon_bytes() <= *it);
    let most_bytes = machine.size_bytes.min(ceiling.unwrap_or(machine.size_bytes));
    most_bytes.saturating_sub(view.resident_bytes())
}

impl MachineState {
    /// Notices how fast a machine has grown. `fast` is in bytes per second.
    fn notice_growth(&mut self, machine: &Machine, at_ms: u64, elapsed_ms: u64, fast: u64) {
        let now = has_bytes(machine);
        let Some((from_bytes, now)) = std::mem::replace(&mut self.has_bytes, now).zip(now) else {
            self.growth = None;
            return;
        };
        let rate = 1000 * now.saturating_sub(from_bytes) / elapsed_ms.max(1);
        let (last_ms, most_bytes) = (at_ms, now);
        if rate >= fast {
            let new = Growth { last_ms, from_bytes, most_bytes, rate };
            let growth = self.growth.get_or_insert(new);
            (growth.last_ms, growth.rate) = (at_ms, rate);
        }
        if let Some(growth) = &mut self.growth {
            growth.most_bytes = growth.most_bytes.max(now);
        }
    }

    /// Whether it grows fast.
    pub(crate) fn grows(&self, at_ms: u64) -> bool {
        self.growth.is_some_and(|growth| at_ms.saturating_sub(growth.last_ms) <= STOPPED_MS)
    }

    fn growth_bytes(&self, growth: &Growth) -> u64 {
        self.has_bytes.unwrap_or(0).saturating_sub(growth.from_bytes)
    }

    /// Whether it has kept at least half of what it had taken, some time after it has stopped.
    fn keeps(&self, growth: &Growth, at_ms: u64) -> bool {
        let half = growth.from_bytes.midpoint(growth.most_bytes);
        let age_ms = at_ms.saturating_sub(growth.last_ms);
        age_ms <= KEEPS_MS && self.has_bytes.is_some_and(|now| now > half)
    }

    /// Counts time for which it was paused from here, and ends pauses whose lease has ended.
    fn notice_pause(&mut self, at_ms: u64, elapsed_ms: u64, longest_ms: u64) {
        match self.paused_until_ms {
            Some(until_ms) => {
                self.paused_ms = self.paused_ms.saturating_add(elapsed_ms.min(LEASE_MS));
                if self.paused_ms >= longest_ms {
                    self.pausing.pause(at_ms, RUNS * longest_ms);
                }
                // It is still this one's to end when its longest time has passed.
                let longest_until_ms = at_ms + longest_ms.saturating_sub(self.paused_ms);
                let until_ms = until_ms.min(at_ms + LEASE_MS);
                let is_leased = until_ms > at_ms;
                self.paused_until_ms = is_leased.then_some(until_ms.min(longest_until_ms));
            }
            // Pauses that follow each other closely are one.
            None => self.paused_ms = self.paused_ms.saturating_sub(elapsed_ms / RUNS),
        }
    }
}

impl Round<'_> {
    /// Pauses machines that would take what others claim, and lets those go on that fit.
    pub(crate) fn pause(&mut self, views: &mut [View], elapsed_ms: u64) {
        let (at_ms, settings) = (self.at_ms(), self.settings);
        let room_bytes = room_bytes(&self.snapshot.host, settings);
        let fast = part(room_bytes, 1000, FILLS_MS).max(LEAST_RATE);
        let (mut growing, mut others) = (Vec::new(), Others::default());
        for (index, view) in views.iter_mut().enumerate().filter(|(_, view)| view.rule.is_none()) {
            view.memory.notice_pause(at_ms, elapsed_ms, settings.pause_ms);
            others.expect(view.memory.coming_bytes(view.machine, at_ms));
            let is_ours = view.memory.paused_until_ms.is_some();
            if view.machine.is_paused && !is_ours {
                (view.memory.growth, view.memory.has_bytes) = (None, None);
                view.decide(Rule::PausedElsewhere, None);
                continue;
            }
            if elapsed_ms > 0 || view.memory.has_bytes.is_none() {
                view.memory.notice_growth(view.machine, at_ms, elapsed_ms, fast);
            }
            let Some(growth) = view.memory.growth else { continue };
            if is_ours || view.memory.grows(at_ms) {
                growing.push(self.claimant(index, view, &growth));
            } else if view.memory.keeps(&growth, at_ms) {
                others.running += 1;
                others.expect(view.memory.growth_bytes(&growth));
            } else {
                view.memory.growth = None;
            }
        }
        // Those that cannot wait are first.
        growing.sort_by_key(|it| (it.may_wait, it.claim_bytes, it.index));
        let (waiting, wanted_room_bytes) = waiting(&growing, room_bytes, others.expected_bytes);
        others.running += (growing.len() - waiting.len()) as u64;
        self.wanted_room_bytes = wanted_room_bytes;
        self.state.is_urgent = growing.iter().any(|it| it.may_wait);
        self.state.room_bytes = room_bytes;
        for (claimant, room_bytes) in waiting {
            self.delay(&mut views[claimant.index], claimant, room_bytes, &others);
        }
        for view in views.iter_mut().filter(|view| view.rule.is_none()) {
            if view.memory.paused_until_ms.take().is_some() {
                let (claim_bytes, paused_ms) = (claim_bytes(view), view.memory.paused_ms);
                let longest_ms = settings.pause_ms;
                let rule = Rule::Resumed { claim_bytes, room_bytes, paused_ms, longest_ms };
                view.decide(rule, Some(Action::Resume));
            }
        }
    }

    fn claimant(&self, index: usize, view: &View, growth: &Growth) -> Claimant {
        let memory = &view.memory;
        let may_wait = !memory.is_held
            && view.has(Mean::Pause)
            && self.settings.may_pause(view.profile)
            && memory.paused_ms < self.settings.pause_ms
            && memory.pausing.left_ms(self.at_ms()) == 0;
        let claim_bytes = claim_bytes(view);
        Claimant {
            index,
            growth_bytes: memory.growth_bytes(growth),
            claim_bytes,
            step_bytes: part(growth.rate, REACTION_MS, 1000).min(claim_bytes),
            may_wait,
        }
    }

    fn delay(&self, view: &mut View, claimant: &Claimant, room_bytes: u64, others: &Others) {
        let at_ms = self.at_ms();
        let Claimant { growth_bytes, claim_bytes, .. } = *claimant;
        let paused_ms = view.memory.paused_ms;
        let Others { running, expected_bytes } = *others;
        let rule = Rule::Delay {
            growth_bytes,
            claim_bytes,
            room_bytes,
            expected_bytes,
            running,
            paused_ms,
        };
        let for_ms = LEASE_MS.min(self.settings.pause_ms.saturating_sub(paused_ms));
        let left_ms = view.memory.paused_until_ms.map_or(0, |until_ms| until_ms - at_ms);
        if view.machine.is_paused && left_ms >= for_ms.min(LEASE_MS / 2) {
            return view.decide(rule, None);
        }
        view.memory.paused_until_ms = Some(at_ms + for_ms);
        view.decide(rule, Some(Action::Pause { for_ms }));
    }
}

/// Those that have to wait, each with the room that the others leave; and the room that is missing.
fn waiting(
    growing: &[Claimant],
    room_bytes: u64,
    expected_bytes: u64,
) -> (Vec<(&Claimant, u64)>, u64) {
    let (mut left, mut waiting, mut wanted) = (room_bytes, Vec::new(), 0);
    for it in growing {
        // A machine whose claim does not fit goes on step by step: it may end before. But none does
        // so while another waits for that room.
        let goes_step_by_step = waiting.is_empty() && it.claim_bytes > left;
        let takes = if goes_step_by_step { it.step_bytes } else { it.claim_bytes };
        wanted = it.claim_bytes.saturating_sub(left).max(wanted);
        if it.may_wait && takes > left {
            waiting.push((it, left));
        } else {
            left = left.saturating_sub(it.claim_bytes);
        }
    }
    // All wait only if that helps the first one.
    let helps =
        |(it, left): &(&Claimant, u64)| it.claim_bytes <= left.saturating_add(expected_bytes);
    if waiting.len() == growing.len() && waiting.first().is_some_and(|first| !helps(first)) {
        waiting.remove(0);
    }
    (waiting, wanted)
}
