//! A store that fails on command.

use std::time::Duration;

use ebb_guest_ram::StableSlot;

use crate::{Answer, Node, Nodes, PageHash, StableStore, StoreCounts, StoreError};

/// Passes all calls on to another store, or fails as if that were gone.
#[derive(Debug)]
pub struct UnreliableStore<S> {
    store: S,
    /// Whether queries and publications fail.
    pub gone: bool,
    /// Whether they fail as if they took too long.
    pub late: bool,
    /// Hashes that are answered with [`Answer::Wanted`] if the store does not know them, as if
    /// another process had such pages.
    pub wanted: Vec<PageHash>,
    /// Hashes that the next call of `notifications` returns.
    pub notifications: Vec<(Node, PageHash)>,
    /// Reservations in force.
    pub reservations: i64,
}

impl<S> UnreliableStore<S> {
    /// Creates a store that does not fail yet.
    pub fn new(store: S) -> Self {
        Self {
            store,
            gone: false,
            late: false,
            wanted: Vec::new(),
            notifications: Vec::new(),
            reservations: 0,
        }
    }

    /// The wrapped store.
    pub fn inner(&self) -> &S {
        &self.store
    }

    fn check(&self) -> Result<(), StoreError> {
        match (self.gone, self.late) {
            (true, _) => Err(StoreError::Gone("simulated".into())),
            (_, true) => Err(StoreError::Late(Duration::from_secs(1))),
            _ => Ok(()),
        }
    }
}

impl<S: StableStore> StableStore for UnreliableStore<S> {
    fn query(
        &mut self,
        node: Node,
        hashes: &[PageHash],
        answers: &mut Vec<Answer>,
    ) -> Result<(), StoreError> {
        self.check()?;
        let begin = answers.len();
        self.store.query(node, hashes, answers)?;
        for (hash, answer) in hashes.iter().zip(&mut answers[begin..]) {
            match answer {
                Answer::Stable(_) => self.reservations += 1,
                Answer::Unknown if self.wanted.contains(hash) => *answer = Answer::Wanted,
                Answer::Unknown | Answer::Wanted => {}
            }
        }
        Ok(())
    }

    fn publish(
        &mut self,
        node: Node,
        hashes: &[PageHash],
        contents: &[u8],
        slots: &mut Vec<StableSlot>,
    ) -> Result<(), StoreError> {
        self.check()?;
        self.store.publish(node, hashes, contents, slots)?;
        self.reservations += hashes.len() as i64;
        Ok(())
    }

    fn shared(&mut self, slot: StableSlot) {
        self.reservations -= 1;
        self.store.shared(slot);
    }

    fn unused(&mut self, slot: StableSlot) {
        self.reservations -= 1;
        self.store.unused(slot);
    }

    fn release(&mut self, slot: StableSlot) {
        self.store.release(slot);
    }

    fn retire(&mut self, slot: StableSlot) {
        self.store.retire(slot);
    }

    fn merge_across_nodes(&mut self, nodes: Nodes) {
        self.store.merge_across_nodes(nodes);
    }

    fn limit_sharing(&mut self, max_page_sharing: u32) {
        self.store.limit_sharing(max_page_sharing);
    }

    fn counts(&self) -> StoreCounts {
        self.store.counts()
    }

    fn take_notifications(&mut self, notifications: &mut Vec<(Node, PageHash)>) {
        notifications.append(&mut self.notifications);
        self.store.take_notifications(notifications);
    }
}
