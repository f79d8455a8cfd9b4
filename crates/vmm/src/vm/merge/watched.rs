//! A store of stable pages that tells when its broker is gone.

use std::sync::{Arc, Mutex};

use ebb_guest_ram::StableSegments;
use ebb_page_merge::broker::BrokerStore;
use ebb_page_merge::{Answer, Node, PageHash, Slot, StableStore, StoreCounts, StoreError};

use crate::vm::lock;

/// Why the broker is gone, once it is.
#[derive(Clone, Default)]
pub(super) struct Loss(Arc<Mutex<Option<String>>>);

impl Loss {
    /// The reason.
    pub(super) fn reason(&self) -> Option<String> {
        lock(&self.0).clone()
    }
}

/// A store that can become useless.
pub(super) trait Losable: StableStore {
    /// Why it is useless, if it is.
    fn why_gone(&self) -> Option<&str>;
}

impl Losable for BrokerStore<Arc<StableSegments>> {
    fn why_gone(&self) -> Option<&str> {
        Self::why_gone(self)
    }
}

/// The store, watched.
pub(super) struct Watched<S> {
    store: S,
    loss: Loss,
    is_told: bool,
}

impl<S: Losable> Watched<S> {
    /// Watches `store`.
    pub(super) fn new(store: S) -> (Self, Loss) {
        let loss = Loss::default();
        (Self { store, loss: loss.clone(), is_told: false }, loss)
    }

    /// Looks whether the store is still of use, after a call that may have found out.
    fn look(&mut self) {
        if self.is_told {
            return;
        }
        if let Some(reason) = self.store.why_gone() {
            let reason =
                format!("the broker of shared pages is gone ({reason}); what is merged stays so");
            // The store has said so on standard error already.
            *lock(&self.loss.0) = Some(reason);
            self.is_told = true;
        }
    }
}

impl<S: Losable> StableStore for Watched<S> {
    fn query(
        &mut self,
        node: Node,
        hashes: &[PageHash],
        answers: &mut Vec<Answer>,
    ) -> Result<(), StoreError> {
        let result = self.store.query(node, hashes, answers);
        self.look();
        result
    }

    fn publish(
        &mut self,
        node: Node,
        hashes: &[PageHash],
        contents: &[u8],
        slots: &mut Vec<Slot>,
    ) -> Result<(), StoreError> {
        let result = self.store.publish(node, hashes, contents, slots);
        self.look();
        result
    }

    fn shared(&mut self, slot: Slot) {
        self.store.shared(slot);
    }

    fn unused(&mut self, slot: Slot) {
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
        self.store.news(news);
        self.look();
    }
}
