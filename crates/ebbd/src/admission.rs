//! Machines that are about to start: those that wait for room, and the room that is kept for those
//! that were admitted.

use std::collections::{BTreeMap, VecDeque};

use ebb_host_policy::{Machine, Means, Snapshot};

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
    waiting: VecDeque<Ticket>,
    kept: BTreeMap<String, Kept>,
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

#[derive(Clone, Copy, Debug)]
struct Kept {
    size_bytes: u64,
    until_ms: u64,
}

impl Admissions {
    /// Adds a machine at the queue's end; `None` if the queue is full.
    pub fn enter(&mut self) -> Option<Ticket> {
        if self.waiting.len() >= MOST_WAITING {
            self.counts.queue_full += 1;
            return None;
        }
        self.next += 1;
        self.waiting.push_back(Ticket(self.next));
        self.waiting.back().copied()
    }

    /// Removes a machine from the queue that was not admitted.
    pub fn leave(&mut self, ticket: Ticket) {
        if self.remove(ticket) {
            self.counts.refused += 1;
        }
    }

    /// Removes a machine from the queue, and keeps room for it.
    pub fn admit(&mut self, ticket: Ticket, name: &str, size_bytes: u64, now_ms: u64) {
        self.remove(ticket);
        self.keep(name, size_bytes, now_ms);
        self.counts.admitted += 1;
    }

    /// Whether it was there.
    fn remove(&mut self, ticket: Ticket) -> bool {
        let before = self.waiting.len();
        self.waiting.retain(|other| *other != ticket);
        self.waiting.len() < before
    }

    /// What was counted so far.
    pub fn counts(&self) -> Counts {
        Counts { waiting: self.waiting.len(), ..self.counts }
    }

    /// How many machines wait before this one.
    pub fn before(&self, ticket: Ticket) -> usize {
        self.waiting.iter().take_while(|other| **other != ticket).count()
    }

    /// Keeps room for a machine.
    fn keep(&mut self, name: &str, size_bytes: u64, now_ms: u64) {
        if self.kept.len() < MOST_KEPT {
            let until_ms = now_ms.saturating_add(KEPT_MS);
            self.kept.insert(name.to_owned(), Kept { size_bytes, until_ms });
        }
    }

    /// The same host with the machines that room is kept for. Those that have appeared are
    /// forgotten.
    pub fn with_kept(&mut self, snapshot: &Snapshot, now_ms: u64) -> Snapshot {
        self.kept.retain(|name, kept| {
            let has_appeared = snapshot.machines.iter().any(|machine| machine.name == *name);
            !has_appeared && now_ms < kept.until_ms
        });
        let kept = self.kept.iter().map(|(name, kept)| Machine {
            name: name.clone(),
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
            admissions.keep(name, 1, 0);
        }
        admissions.with_kept(&empty, 0)
    }

    fn names(snapshot: &Snapshot) -> Vec<&str> {
        snapshot.machines.iter().map(|machine| machine.name.as_str()).collect()
    }

    #[test]
    fn the_queue_keeps_its_order() {
        let mut admissions = Admissions::default();
        let [a, b, c] = std::array::from_fn(|_| admissions.enter().unwrap());
        assert_eq!([a, b, c].map(|ticket| admissions.before(ticket)), [0, 1, 2]);
        admissions.leave(b);
        assert_eq!([a, c].map(|ticket| admissions.before(ticket)), [0, 1]);
        admissions.leave(a);
        assert_eq!(admissions.before(c), 0);
        while admissions.waiting.len() < MOST_WAITING {
            admissions.enter().unwrap();
        }
        assert_eq!(admissions.enter(), None);
    }

    #[test]
    fn each_machine_is_counted_once() {
        let mut admissions = Admissions::default();
        let [a, b, _] = std::array::from_fn(|_| admissions.enter().unwrap());
        admissions.admit(a, "a", GIB, 0);
        // Its place is left again when its client has the answer.
        admissions.leave(a);
        admissions.leave(b);
        let counts = Counts { admitted: 1, refused: 1, queue_full: 0, waiting: 1 };
        assert_eq!(admissions.counts(), counts);
        while admissions.enter().is_some() {}
        assert_eq!(admissions.counts().queue_full, 1);
    }

    #[test]
    fn room_is_kept_until_the_machine_appears_or_for_a_while() {
        let mut admissions = Admissions::default();
        admissions.keep("a", GIB, 1_000);
        admissions.keep("b", GIB, 2_000);
        let with = admissions.with_kept(&host(&[]), 3_000);
        assert_eq!(names(&with), ["a", "b"]);
        assert!(with.machines.iter().all(|machine| machine.size_bytes == GIB));
        assert_eq!(names(&admissions.with_kept(&host(&["a"]), 4_000)), ["a", "b"]);
        // It ended at once: its room is not kept again.
        assert_eq!(names(&admissions.with_kept(&host(&[]), 5_000)), ["b"]);
        assert!(admissions.with_kept(&host(&[]), 2_000 + KEPT_MS).machines.is_empty());
    }
}
