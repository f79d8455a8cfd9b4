//! A store that fails when it is told to.

use std::time::Duration;

use crate::{Answer, Node, PageHash, Slot, StableStore, StoreCounts, StoreError};

/// Passes everything on to another store, or fails as if that were gone.
#[derive(Debug)]
pub struct UnreliableStore<S> {
    store: S,
    /// Whether questions and publishing fail.
    pub gone: bool,
    /// Whether they fail as if it took too long.
    pub late: bool,
    /// Hashes that are answered with [`Answer::Wanted`] if the store does not know them, as if
    /// another process had such pages.
    pub wanted: Vec<PageHash>,
    /// What the next call of `news` tells.
    pub news: Vec<(Node, PageHash)>,
    /// Reservations that have not ended.
    pub reservations: i64,
}

impl<S> UnreliableStore<S> {
    /// A store that does not fail yet.
    pub fn new(store: S) -> Self {
        Self {
            store,
            gone: false,
            late: false,
            wanted: Vec::new(),
            news: Vec::new(),
            reservations: 0,
        }
    }

    /// The store behind it.
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
        slots: &mut Vec<Slot>,
    ) -> Result<(), StoreError> {
        self.check()?;
        self.store.publish(node, hashes, contents, slots)?;
        self.reservations += hashes.len() as i64;
        Ok(())
    }

    fn shared(&mut self, slot: Slot) {
        self.reservations -= 1;
        self.store.shared(slot);
    }

    fn unused(&mut self, slot: Slot) {
        self.reservations -= 1;
        self.store.unused(slot);
    }

    fn release(&mut self, slot: Slot) {
        self.store.release(slot);
    }

    fn retire(&mut self, slot: Slot) {
        self.store.retire(slot);
    }

    fn limit_sharing(&mut self, max_page_sharing: u32) {
        self.store.limit_sharing(max_page_sharing);
    }

    fn counts(&self) -> StoreCounts {
        self.store.counts()
    }

    fn news(&mut self, news: &mut Vec<(Node, PageHash)>) {
        news.append(&mut self.news);
        self.store.news(news);
    }
}
