//! The decision.

use std::collections::BTreeSet;

use crate::MIB;
use crate::action::{Action, Order};
use crate::explain::{Clamp, Explanation, Rule};
use crate::level::{Cause, Level, part};
use crate::settings::{Class, Profile, Settings};
use crate::shares::{Giver, revoke};
use crate::snapshot::{Machine, Mean, Snapshot};
use crate::state::{MachineState, Squeeze, State};
use crate::trust::{Doubt, Known, assess};

/// What is to be done on a host, and why.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Decision {
    /// What to do, in this order.
    pub orders: Vec<Order>,
    /// One for each machine, in the snapshot's order.
    pub explanations: Vec<Explanation>,
    /// The host's level.
    pub level: Level,
    /// Why it has it.
    pub cause: Cause,
    /// What to remember for the next decision.
    pub state: State,
}

/// Smaller amounts are not worth the guest's work.
const LEAST_GAIN_BYTES: u64 = 32 << 20;
/// How long a pulse may take.
const PULSE_MS: u64 = 10_000;
/// How long a guest that ran short is not squeezed again: ten minutes, then longer, up to an hour
/// (as arcboxlabs/arcbox#469 ended).
const SHORT_MS: u64 = 10 * 60_000;
const SHORT_MOST_MS: u64 = 60 * 60_000;
/// How long a balloon that was given back does not return, unless in an emergency: a host that
/// becomes scarce again by what it has given back would hunt.
const REST_MS: u64 = 60_000;
const REST_MOST_MS: u64 = 60 * 60_000;
/// Pauses of means that cost little.
const RECLAIM_AGAIN_MS: u64 = 5_000;

/// Decides. `settings` are valid ([`Settings::check`]).
pub fn decide(snapshot: &Snapshot, mut state: State, settings: &Settings) -> Decision {
    let snapshot = &snapshot.bounded();
    let at_ms = snapshot.at_ms;
    if state.at_ms.is_some_and(|before| before > at_ms) {
        state.forget_times(at_ms);
    }
    let elapsed_ms = state.at_ms.map_or(0, |before| at_ms - before);
    let cause = state.host.judge(at_ms, &snapshot.host, settings);
    let level = state.host.level;
    let (needed_bytes, wanted_room_bytes) = (0, 0);
    let mut round = Round { snapshot, settings, level, needed_bytes, wanted_room_bytes, state };
    let mut views = round.look();
    round.pause(&mut views, elapsed_ms);
    round.needed_bytes = round.needed();
    round.urgent(&mut views);
    round.take(&mut views);
    round.squeeze(&mut views);
    round.finish(views, cause)
}

/// One machine in a decision.
pub(crate) struct View<'a> {
    pub(crate) machine: &'a Machine,
    pub(crate) profile: &'a Profile,
    profile_name: &'a str,
    known: Result<Known, Doubt>,
    pub(crate) memory: MachineState,
    idle_ms: u64,
    new_kills: u64,
    action: Option<Action>,
    pub(crate) rule: Option<Rule>,
    clamp: Option<Clamp>,
}

impl View<'_> {
    pub(crate) fn decide(&mut self, rule: Rule, action: Option<Action>) {
        (self.rule, self.action) = (Some(rule), action);
    }

    pub(crate) fn has(&self, mean: Mean) -> bool {
        self.machine.means.has(mean) && (mean != Mean::Balloon || self.machine.balloon.is_some())
    }

    fn target_bytes(&self) -> u64 {
        self.machine.balloon.map_or(0, |balloon| balloon.target_bytes)
    }

    pub(crate) fn resident_bytes(&self) -> u64 {
        self.machine.resident_bytes.unwrap_or(0)
    }

    /// What it keeps in any case, and why.
    fn kept(&self, known: &Known) -> (u64, Clamp) {
        let kept_bytes = known.used + self.profile.reserve_bytes;
        if self.profile.floor_bytes > kept_bytes {
            let kept_bytes = self.profile.floor_bytes;
            return (kept_bytes, Clamp::Floor { kept_bytes });
        }
        (kept_bytes, Clamp::Reserve { kept_bytes })
    }

    /// Resident memory that its guest does not need: caches, and free pages.
    fn gain_bytes(&self) -> u64 {
        if let Ok(known) = &self.known {
            return self.resident_bytes().saturating_sub(self.kept(known).0);
        }
        // Unknown: a quarter is assumed, and the result judged as any other.
        let most = self.resident_bytes().saturating_sub(self.profile.floor_bytes);
        most.min(self.resident_bytes() / 4)
    }
}

/// The size of a balloon that leaves this to a machine. It is a whole number of MiB, so that each
/// monitor can have it exactly: otherwise it would seem to be missed for ever.
fn target_that_leaves(view: &View, left_bytes: u64) -> u64 {
    let target_bytes = view.machine.size_bytes.saturating_sub(left_bytes);
    target_bytes - target_bytes % MIB
}

pub(crate) struct Round<'a> {
    pub(crate) snapshot: &'a Snapshot,
    pub(crate) settings: &'a Settings,
    level: Level,
    /// What machines are to give.
    needed_bytes: u64,
    /// What a paused machine lacks to go on.
    pub(crate) wanted_room_bytes: u64,
    pub(crate) state: State,
}

impl<'a> Round<'a> {
    pub(crate) fn at_ms(&self) -> u64 {
        self.snapshot.at_ms
    }

    /// Compares all machines with what is remembered of them.
    fn look(&mut self) -> Vec<View<'a>> {
        let (at_ms, settings) = (self.at_ms(), self.settings);
        let mut before = std::mem::take(&mut self.state.machines);
        let mut names = BTreeSet::new();
        let mut views = Vec::with_capacity(self.snapshot.machines.len());
        for machine in &self.snapshot.machines {
            let (profile_name, profile) = settings.profile(&machine.name);
            let known = assess(machine, at_ms, settings.stale_ms);
            let mut memory = before.remove(&machine.name).unwrap_or_default();
            let (idle_ms, new_kills) = memory.notice(machine, known.as_ref().ok(), at_ms);
            let rule = (!names.insert(&machine.name)).then_some(Rule::SameName);
            views.push(View {
                machine,
                profile,
                profile_name,
                known,
                memory,
                idle_ms,
                new_kills,
                action: None,
                rule,
                clamp: None,
            });
        }
        // A hold survives the machine's absence.
        before.retain(|_, memory| memory.is_held);
        for memory in before.values_mut() {
            memory.paused_until_ms = None;
        }
        self.state.machines = before;
        views
    }

    /// Memory that must be returned until the host is no longer tight.
    fn needed(&self) -> u64 {
        if self.level == Level::Plenty {
            return 0;
        }
        let host = &self.snapshot.host;
        let wanted = part(host.total_bytes, self.settings.tight_percent * 115, 10_000);
        wanted.saturating_sub(host.available_bytes).max(self.wanted_room_bytes)
    }

    /// Rules that apply at any level.
    fn urgent(&mut self, views: &mut [View]) {
        for view in views.iter_mut().filter(|view| view.rule.is_none()) {
            if view.memory.is_held {
                view.decide(Rule::Held, None);
                continue;
            }
            if view.machine.balloon.is_some() {
                self.balloon(view);
            }
        }
    }

    /// Whether a balloon is released, renewed, or required by the profile.
    fn balloon(&self, view: &mut View) {
        let at_ms = self.at_ms();
        let release = Some(Action::Balloon { target_bytes: 0 });
        // A guest that is not believed has no ceiling.
        let ceiling = view.profile.ceiling_bytes.filter(|_| view.known.is_ok());
        let ceiling_target = target_that_leaves(view, ceiling.unwrap_or(view.machine.size_bytes));
        if let Ok(known) = view.known {
            let least_bytes = view.profile.reserve_bytes.min(view.machine.size_bytes / 8) / 2;
            let is_short = known.available < least_bytes || view.new_kills > 0;
            if view.target_bytes() > 0 && is_short {
                let (available_bytes, oom_kills) = (known.available, view.new_kills);
                view.memory.squeeze = None;
                view.memory.squeezing.grow(at_ms, SHORT_MS, SHORT_MOST_MS);
                view.memory.taking.grow(at_ms, SHORT_MS / 10, SHORT_MOST_MS);
                let rule = Rule::GuestShort { available_bytes, least_bytes, oom_kills };
                return view.decide(rule, release);
            }
            let used_bytes = known.used;
            let fits = used_bytes + view.profile.reserve_bytes <= ceiling.unwrap_or(0);
            let is_free = view.memory.squeezing.left_ms(at_ms) == 0;
            if view.target_bytes() < ceiling_target && fits && is_free {
                let ceiling_bytes = ceiling.unwrap_or(0);
                let rule = Rule::Ceiling { ceiling_bytes, used_bytes };
                let action = Action::Balloon { target_bytes: ceiling_target };
                return view.decide(rule, Some(action));
            }
        }
        if view.target_bytes() <= ceiling_target {
            view.memory.squeeze = None;
            return;
        }
        // Also a balloon that was set elsewhere has a lease.
        let lease_ms = self.settings.lease_ms;
        let target_bytes = view.target_bytes();
        let squeeze = *view.memory.squeeze.get_or_insert(Squeeze {
            target_bytes,
            since_ms: at_ms,
            until_ms: at_ms + lease_ms,
            is_pulse: false,
        });
        let back = Some(Action::Balloon { target_bytes: ceiling_target });
        if squeeze.is_pulse {
            let actual_bytes = view.machine.ballooned_bytes();
            let is_done = actual_bytes >= target_bytes || at_ms >= squeeze.until_ms;
            let rule = Rule::Pulsing { actual_bytes, target_bytes };
            if is_done || view.known.is_err() {
                view.memory.squeeze = None;
                return view.decide(rule, back);
            }
            return view.decide(rule, None);
        }
        if at_ms >= squeeze.until_ms {
            view.memory.squeeze = None;
            let held_ms = at_ms.saturating_sub(squeeze.since_ms);
            return view.decide(Rule::LeaseEnded { held_ms }, back);
        }
        if self.level == Level::Plenty {
            view.memory.squeeze = None;
            view.memory.resting.grow(at_ms, REST_MS, REST_MOST_MS);
            return view.decide(Rule::Released { level: self.level }, back);
        }
        if view.known.is_ok()
            && let Some(squeeze) = &mut view.memory.squeeze
        {
            squeeze.until_ms = at_ms + lease_ms;
        }
    }

    /// How long a machine must be idle before its caches are taken; `None`: not at this level.
    fn idle_at_least_ms(&self, class: Class) -> Option<u64> {
        let idle_ms = self.settings.idle_ms;
        match (class, self.level) {
            (Class::Parked, _) | (Class::Batch, Level::Emergency) => Some(0),
            (_, Level::Plenty) | (Class::Latency, Level::Tight) => None,
            (Class::Batch, Level::Tight) | (Class::Latency, Level::Pressed) => Some(idle_ms),
            (Class::Batch, Level::Pressed) | (Class::Latency, Level::Emergency) => {
                Some(idle_ms / 5)
            }
        }
    }

    /// Takes memory that idle machines do not need, the largest amounts first.
    fn take(&mut self, views: &mut [View]) {
        let at_ms = self.at_ms();
        let coming = views.iter().map(|view| view.memory.coming_bytes(view.machine, at_ms));
        let coming = coming.fold(0, u64::saturating_add);
        let mut rest = self.needed_bytes.saturating_sub(coming);
        let mut order: Vec<(u64, usize)> = Vec::new();
        for (index, view) in views.iter_mut().enumerate().filter(|(_, view)| view.rule.is_none()) {
            let gain_bytes = view.gain_bytes();
            if view.memory.squeeze.is_none() && gain_bytes >= LEAST_GAIN_BYTES {
                order.push((gain_bytes, index));
            }
        }
        order.sort_unstable_by(|a, b| b.0.cmp(&a.0).then(a.1.cmp(&b.1)));
        for (gain_bytes, index) in order {
            let view = &mut views[index];
            let is_parked = view.profile.class == Class::Parked;
            if rest == 0 && !is_parked {
                continue;
            }
            if self.take_from(view, gain_bytes) {
                rest = rest.saturating_sub(gain_bytes);
            }
        }
        self.needed_bytes = rest;
    }

    /// Takes memory from one machine in the cheapest way; returns whether that has begun.
    fn take_from(&self, view: &mut View, gain_bytes: u64) -> bool {
        let (at_ms, needed_bytes) = (self.at_ms(), self.needed_bytes);
        let (idle_ms, resident_bytes) = (view.idle_ms, view.resident_bytes());
        let for_ms = view.memory.taking.left_ms(at_ms);
        let is_for_claims = self.takes_for_claims(view);
        if for_ms > 0 && !is_for_claims {
            if self.wanted_room_bytes > 0 && self.reclaim(view) {
                return true;
            }
            view.decide(Rule::Backoff { for_ms }, None);
            return false;
        }
        let needs = self.idle_at_least_ms(view.profile.class);
        let needs = if is_for_claims { Some(0) } else { needs };
        let Some(idle_at_least_ms) = needs.filter(|least| idle_ms >= *least) else {
            return self.reclaim(view);
        };
        let is_idle = idle_ms > 0 || view.profile.class == Class::Parked;
        if view.has(Mean::Park) && (is_idle || is_for_claims) {
            let rule = Rule::Park { needed_bytes, gain_bytes, idle_ms, idle_at_least_ms };
            view.decide(rule, Some(Action::Park));
        } else if view.has(Mean::Balloon) && is_idle && self.may_squeeze(view) {
            let Ok(known) = view.known else { return false };
            let (kept_bytes, clamp) = view.kept(&known);
            let target_bytes = target_that_leaves(view, kept_bytes);
            view.memory.squeeze = Some(Squeeze {
                target_bytes,
                since_ms: at_ms,
                until_ms: at_ms + PULSE_MS,
                is_pulse: true,
            });
            let rule = Rule::Pulse { needed_bytes, gain_bytes, idle_ms };
            view.decide(rule, Some(Action::Balloon { target_bytes }));
            view.clamp = Some(clamp);
        } else if view.has(Mean::Trim) && is_idle && self.level >= Level::Pressed {
            let rule = Rule::Trim { needed_bytes, resident_bytes, idle_ms };
            view.decide(rule, Some(Action::Trim));
        } else {
            return self.reclaim(view);
        }
        view.memory.takes(view.machine, at_ms, gain_bytes);
        true
    }

    /// Whether its caches are evicted, though it works or has read them again the last time: a
    /// machine that grows would be paused for longer than it takes to read them.
    fn takes_for_claims(&self, view: &View) -> bool {
        self.wanted_room_bytes > 0
            && view.profile.class == Class::Batch
            && view.has(Mean::Park)
            && !view.memory.grows(self.at_ms())
            && !view.memory.is_being_judged()
    }

    /// Has a guest report its free memory that the host still holds.
    fn reclaim(&self, view: &mut View) -> bool {
        let Ok(known) = view.known else { return false };
        let busy = view.machine.outside_balloon_bytes().saturating_sub(known.free);
        let stale_bytes = view.resident_bytes().saturating_sub(busy);
        let is_new = view.memory.reclaiming.left_ms(self.at_ms()) == 0;
        if !is_new || !view.has(Mean::Reclaim) || stale_bytes < LEAST_GAIN_BYTES {
            return false;
        }
        let needed_bytes = self.needed_bytes;
        view.decide(Rule::Reclaim { needed_bytes, stale_bytes }, Some(Action::Reclaim));
        view.memory.reclaiming.pause(self.at_ms(), RECLAIM_AGAIN_MS);
        true
    }

    fn may_squeeze(&self, view: &View) -> bool {
        view.memory.squeezing.left_ms(self.at_ms()) == 0
    }

    /// Takes memory by shares, when cheaper means were not enough.
    fn squeeze(&mut self, views: &mut [View]) {
        if self.level < Level::Pressed || self.needed_bytes == 0 {
            return;
        }
        for view in views.iter_mut().filter(|view| view.rule.is_none()) {
            if view.profile.class == Class::Parked && view.has(Mean::Stop) {
                let (needed_bytes, resident_bytes) = (self.needed_bytes, view.resident_bytes());
                let rule = Rule::Stop { needed_bytes, resident_bytes };
                view.decide(rule, Some(Action::Stop));
                self.needed_bytes = self.needed_bytes.saturating_sub(resident_bytes);
            }
        }
        let mut givers = Vec::new();
        let undecided = |view: &View| matches!(view.rule, None | Some(Rule::Backoff { .. }));
        for (index, view) in views.iter().enumerate().filter(|(_, view)| undecided(view)) {
            // A working guest would only read its caches again.
            let least = self.idle_at_least_ms(view.profile.class);
            let is_idle = least.is_some_and(|least| view.idle_ms >= least);
            let rests = view.memory.resting.left_ms(self.at_ms()) > 0;
            // What is given to one that grows is not taken away at once.
            let is_spared = view.memory.grows(self.at_ms())
                || !is_idle
                || rests && self.level < Level::Emergency;
            if is_spared || !view.has(Mean::Balloon) || !self.may_squeeze(view) {
                continue;
            }
            let Ok(known) = &view.known else { continue };
            givers.push((
                index,
                Giver {
                    has_bytes: view.resident_bytes(),
                    used_bytes: known.used,
                    keeps_bytes: view.kept(known).0,
                    shares: view.profile.shares,
                },
            ));
        }
        let only: Vec<Giver> = givers.iter().map(|(_, giver)| *giver).collect();
        let taken = revoke(&only, self.needed_bytes, self.settings.idle_tax_percent);
        for ((index, giver), taken_bytes) in givers.into_iter().zip(taken) {
            if taken_bytes >= LEAST_GAIN_BYTES {
                self.squeeze_one(&mut views[index], giver, taken_bytes);
            }
        }
    }

    fn squeeze_one(&self, view: &mut View, giver: Giver, taken_bytes: u64) {
        let at_ms = self.at_ms();
        // The balloon first takes memory that is not resident.
        let left = giver.has_bytes - taken_bytes;
        let target_bytes = target_that_leaves(view, left);
        if target_bytes <= view.target_bytes() {
            return;
        }
        let since_ms = view.memory.squeeze.map_or(at_ms, |squeeze| squeeze.since_ms);
        let until_ms = at_ms + self.settings.lease_ms;
        let is_pulse = false;
        view.memory.squeeze = Some(Squeeze { target_bytes, since_ms, until_ms, is_pulse });
        let rule = Rule::Shares {
            needed_bytes: self.needed_bytes,
            taken_bytes,
            used_bytes: giver.used_bytes,
            shares: giver.shares,
            cost_milli: giver.cost_milli(self.settings.idle_tax_percent),
        };
        view.decide(rule, Some(Action::Balloon { target_bytes }));
        let clamp = view.known.as_ref().ok().map(|known| view.kept(known));
        view.clamp = clamp.filter(|(kept, _)| left <= *kept).map(|(_, clamp)| clamp);
    }

    fn finish(mut self, views: Vec<View>, cause: Cause) -> Decision {
        let at_ms = self.at_ms();
        let is_new_second = self.state.at_ms.is_none_or(|before| before / 1000 != at_ms / 1000);
        let mut orders = Vec::new();
        let mut explanations = Vec::with_capacity(views.len());
        for view in views {
            let rule = view.rule.unwrap_or(Rule::Enough { level: self.level });
            let name = &view.machine.name;
            // A machine that stands still does not show what it needs.
            if is_new_second && !view.machine.is_paused {
                self.state.history.note(view.profile_name, view.machine, view.known.as_ref());
            }
            let mut memory = view.memory;
            if memory.rule != rule.name() {
                (memory.rule, memory.since_ms) = (rule.name().to_owned(), at_ms);
            }
            if let Some(action) = view.action {
                orders.push(Order { machine: name.clone(), action });
            }
            explanations.push(Explanation {
                machine: name.clone(),
                action: view.action,
                rule,
                clamp: view.clamp,
                doubt: view.known.err(),
                since_ms: memory.since_ms,
            });
            // The first of two machines with one name is remembered.
            if rule != Rule::SameName {
                self.state.machines.insert(name.clone(), memory);
            }
        }
        self.state.at_ms = Some(at_ms);
        let level = self.level;
        Decision { orders, explanations, level, cause, state: self.state }
    }
}
