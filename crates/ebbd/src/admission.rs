//! Machines that are about to start: those that wait for room, and the room that is kept for those
//! that were admitted.

use std::collections::{BTreeSet, VecDeque};

use ebb_host_policy::{Machine, Means, Snapshot};

use crate::rights::User;

/// How long room is kept for a machine that does not appear, in milliseconds.
pub const KEPT_MS: u64 = 30_000;
/// The most machines that wait.
const MOST_WAITING: usize = 500;
/// The most machines that room is kept for.
const MOST_KEPT: usize = 10_000;

/// A place in the queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ticket(u64);

/// The queue, and the room that is kept.
#[derive(Debug, Default)]
pub struct Admissions {
    next: u64,
    waiting: VecDeque<(Ticket, User)>,
    kept: Vec<Kept>,
    counts: Counts,
}

/// What became of machines that asked for room.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// They were admitted.
    pub admitted: u64,
    /// They left without room: it did not come in time, or their client has gone.
    pub refused: u64,
    /// Too many others waited.
    pub queue_full: u64,
    /// They wait now.
    pub waiting: usize,
}

/// Room for one machine.
#[derive(Clone, Debug)]
struct Kept {
    name: String,
    size_bytes: u64,
    until_ms: u64,
    /// Whether the machine of this name is another one: one that ran already, or that other room
    /// was kept for.
    is_another: bool,
}

impl Admissions {
    /// Adds a machine of this user at the queue's end; `None` if the queue is full.
    pub fn enter(&mut self, user: User) -> Option<Ticket> {
        if self.waiting.len() >= MOST_WAITING {
            self.counts.queue_full += 1;
            return None;
        }
        self.next += 1;
        let ticket = Ticket(self.next);
        self.waiting.push_back((ticket, user));
        Some(ticket)
    }

    /// Removes a machine from the queue that was not admitted.
    pub fn leave(&mut self, ticket: Ticket) {
        if self.remove(ticket) {
            self.counts.refused += 1;
        }
    }

    /// Removes a machine from the queue, and keeps room for it, unless room is kept for too many.
    /// Returns whether it is. A machine of this name that `runs` already is not it.
    pub fn admit(
        &mut self,
        ticket: Ticket,
        name: &str,
        size_bytes: u64,
        runs: bool,
        now_ms: u64,
    ) -> bool {
        if self.kept.len() >= MOST_KEPT {
            return false;
        }
        self.remove(ticket);
        self.keep(name, size_bytes, runs, now_ms);
        self.counts.admitted += 1;
        true
    }

    /// Whether it was there.
    fn remove(&mut self, ticket: Ticket) -> bool {
        let before = self.waiting.len();
        self.waiting.retain(|(other, _)| *other != ticket);
        self.waiting.len() < before
    }

    /// What was counted so far.
    pub fn counts(&self) -> Counts {
        Counts { waiting: self.waiting.len(), ..self.counts }
    }

    /// How many machines of the same user wait before this one: no user waits for another one's.
    pub fn before(&self, ticket: Ticket) -> usize {
        let place = self.waiting.iter().position(|(other, _)| *other == ticket);
        let user = place.and_then(|place| self.waiting.get(place)).map(|(_, user)| *user);
        let earlier = self.waiting.iter().take(place.unwrap_or(0));
        earlier.filter(|(_, other)| Some(*other) == user).count()
    }

    fn keep(&mut self, name: &str, size_bytes: u64, runs: bool, now_ms: u64) {
        let until_ms = now_ms.saturating_add(KEPT_MS);
        self.kept.push(Kept { name: name.to_owned(), size_bytes, until_ms, is_another: runs });
    }

    /// The same host with the machines that room is kept for. When a machine appears, the room
    /// that was kept first for its name is forgotten.
    pub fn with_kept(&mut self, snapshot: &Snapshot, now_ms: u64) -> Snapshot {
        let mut there = BTreeSet::new();
        if !self.kept.is_empty() {
            there.extend(snapshot.machines.iter().map(|machine| machine.name.as_str()));
        }
        let mut appeared = BTreeSet::new();
        self.kept.retain_mut(|kept| {
            let has_appeared = !kept.is_another && there.contains(kept.name.as_str());
            let is_first = has_appeared && appeared.insert(kept.name.clone());
            kept.is_another |= has_appeared;
            !is_first && now_ms < kept.until_ms
        });
        let kept = self.kept.iter().map(|kept| Machine {
            name: kept.name.clone(),
            size_bytes: kept.size_bytes,
            // It occupies nothing yet. What it will need follows from its profile.
            resident_bytes: Some(0),
            swapped_bytes: None,
            processor_ms: None,
            is_paused: false,
            balloon: None,
            statistics: None,
            means: Means::default(),
        });
        let mut with = snapshot.clone();
        with.machines.extend(kept);
        with
    }
}

#[cfg(test)]
mod tests {
    use ebb_host_policy::{GIB, Host};

    use super::*;

    fn host(names: &[&str]) -> Snapshot {
        let host = Host { total_bytes: GIB, available_bytes: GIB, swap: None, pressure: None };
        let mut admissions = Admissions::default();
        let empty = Snapshot { at_ms: 0, host, machines: Vec::new() };
        for name in names {
            admissions.keep(name, 1, false, 0);
        }
        admissions.with_kept(&empty, 0)
    }

    fn names(snapshot: &Snapshot) -> Vec<&str> {
        snapshot.machines.iter().map(|machine| machine.name.as_str()).collect()
    }

    #[test]
    fn the_queue_keeps_its_order() {
        let mut admissions = Admissions::default();
        let [a, b, c] = std::array::from_fn(|_| admissions.enter(User::of(5)).unwrap());
        assert_eq!([a, b, c].map(|ticket| admissions.before(ticket)), [0, 1, 2]);
        // Machines of other users have a queue of their own.
        let other = [0, 1].map(|_| admissions.enter(User::of(6)).unwrap());
        assert_eq!(other.map(|ticket| admissions.before(ticket)), [0, 1]);
        admissions.leave(b);
        assert_eq!([a, c, other[1]].map(|ticket| admissions.before(ticket)), [0, 1, 1]);
        admissions.leave(a);
        assert_eq!(admissions.before(c), 0);
        while admissions.waiting.len() < MOST_WAITING {
            admissions.enter(User::of(5)).unwrap();
        }
        assert_eq!(admissions.enter(User::of(7)), None);
    }

    #[test]
    fn each_machine_is_counted_once() {
        let mut admissions = Admissions::default();
        let [a, b, _] = std::array::from_fn(|_| admissions.enter(User::of(5)).unwrap());
        assert!(admissions.admit(a, "a", GIB, false, 0));
        // Its place is left again when its client has the answer.
        admissions.leave(a);
        admissions.leave(b);
        let counts = Counts { admitted: 1, refused: 1, queue_full: 0, waiting: 1 };
        assert_eq!(admissions.counts(), counts);
        while admissions.enter(User::of(5)).is_some() {}
        assert_eq!(admissions.counts().queue_full, 1);
    }

    #[test]
    fn room_is_kept_until_the_machine_appears_or_for_a_while() {
        let mut admissions = Admissions::default();
        admissions.keep("a", GIB, false, 1_000);
        admissions.keep("b", GIB, false, 2_000);
        let with = admissions.with_kept(&host(&[]), 3_000);
        assert_eq!(names(&with), ["a", "b"]);
        assert!(with.machines.iter().all(|machine| machine.size_bytes == GIB));
        assert_eq!(names(&admissions.with_kept(&host(&["a"]), 4_000)), ["a", "b"]);
        // It ended at once: its room is not kept again.
        assert_eq!(names(&admissions.with_kept(&host(&[]), 5_000)), ["b"]);
        assert!(admissions.with_kept(&host(&[]), 2_000 + KEPT_MS).machines.is_empty());
    }

    #[test]
    fn room_for_several_of_one_name_is_kept_for_each() {
        let mut admissions = Admissions::default();
        let after = |admissions: &mut Admissions, running: &[&str], now_ms| {
            names(&admissions.with_kept(&host(running), now_ms)).len() - running.len()
        };
        admissions.keep("a", GIB, false, 0);
        admissions.keep("a", GIB, false, 0);
        assert_eq!(after(&mut admissions, &[], 1), 2);
        // One has appeared, for as long as it may.
        assert_eq!(after(&mut admissions, &["a"], 2), 1);
        assert_eq!(after(&mut admissions, &["a"], 3), 1);
        // A machine that runs is not the one that is about to start.
        admissions.keep("a", GIB, true, 4);
        assert_eq!(after(&mut admissions, &["a"], 5), 2);
        assert_eq!(after(&mut admissions, &["a"], KEPT_MS + 1), 1);
        assert_eq!(after(&mut admissions, &["a"], KEPT_MS + 4), 0);
    }

    #[test]
    fn no_machine_is_admitted_without_room_that_is_kept() {
        let mut admissions = Admissions::default();
        (0..MOST_KEPT).for_each(|number| admissions.keep(&number.to_string(), 1, false, 0));
        let ticket = admissions.enter(User::of(5)).unwrap();
        assert!(!admissions.admit(ticket, "a", 1, false, 0));
        assert_eq!((admissions.before(ticket), admissions.counts().admitted), (0, 0));
    }
}
