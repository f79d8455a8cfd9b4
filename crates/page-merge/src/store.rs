//! Stable pages: content that several pages share. A store belongs to one trust domain.

use std::io;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use ebb_guest_ram::StableSlot;

use crate::hash::PageHash;
use crate::memory::Node;
use crate::settings::Nodes;

/// A store's answer for a content.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    /// No stable page. A store that is shared with others remembers the query.
    Unknown,
    /// A stable page with this hash that may get one more sharer.
    Stable(StableSlot),
    /// No stable page yet, but another process has an equal page: it is worth publishing.
    Wanted,
}

impl Answer {
    /// The slot of a stable page.
    pub(crate) fn slot(self) -> Option<StableSlot> {
        match self {
            Self::Stable(slot) => Some(slot),
            Self::Unknown | Self::Wanted => None,
        }
    }
}

/// Reason why a store could not complete a request.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// The memory file could not be created or extended.
    #[error("no room for another stable page on {node}: {source}")]
    NoRoom {
        /// The node of the page.
        node: Node,
        /// The system error.
        source: io::Error,
    },
    /// The store is in another process, which is gone or does not answer. Merged pages stay merged.
    #[error("the broker of stable pages is gone: {0}")]
    Gone(String),
    /// The store is in another process, which did not answer in time. It may answer later.
    #[error("the broker of stable pages did not answer within {0:?}")]
    Late(Duration),
}

/// Counts of a store.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StoreCounts {
    /// Stable pages with at least one sharer among the pages that use this store.
    pub pages_shared: u64,
    /// Contents with several stable pages, because one has the maximum number of sharers.
    pub stable_node_chains: u64,
    /// Stable pages with such contents.
    pub stable_node_dups: u64,
    /// Memory of the store's tables in this process, in bytes.
    pub metadata_bytes: u64,
}

/// Stable pages of one domain, by node ([`Node::ANY`] where nodes are not kept apart).
pub trait StableStore {
    /// Appends an answer for each hash, of pages in their order. With the answer
    /// [`Answer::Stable`] the slot is *reserved* for one more sharer until
    /// [`shared`](Self::shared) or [`unused`](Self::unused) is called for it.
    fn query(
        &mut self,
        node: Node,
        hashes: &[PageHash],
        answers: &mut Vec<Answer>,
    ) -> Result<(), StoreError>;

    /// Makes stable pages out of `contents` (4096 bytes for each hash), in neighbouring slots where
    /// there is room. Each slot is reserved for one sharer, as with [`query`](Self::query). After
    /// an error nothing is published.
    ///
    /// `node` is that of the memory, if possible, also where pages of all nodes are merged.
    fn publish(
        &mut self,
        node: Node,
        hashes: &[PageHash],
        contents: &[u8],
        slots: &mut Vec<StableSlot>,
    ) -> Result<(), StoreError>;

    /// A page is now backed by this slot, under a reservation.
    fn shared(&mut self, slot: StableSlot);

    /// A reservation is not used. Without sharers and reservations the slot is freed.
    fn unused(&mut self, slot: StableSlot);

    /// A page has released its share. Without sharers and reservations the slot is freed.
    fn release(&mut self, slot: StableSlot);

    /// Admits no more sharers of this slot: its page is on the wrong node. Its shares stay valid.
    fn retire(&mut self, slot: StableSlot) {
        let _ = slot;
    }

    /// Sets whether contents are looked up for all nodes at once, as [`Node::ANY`]. Nothing is
    /// shared at the moment. (A store that is shared with others has its own rule.)
    fn merge_across_nodes(&mut self, nodes: Nodes) {
        let _ = nodes;
    }

    /// Sets the maximum number of pages that share one stable page from now on. Nothing is shared
    /// at the moment. (A store that is shared with others has its own limit.)
    fn limit_sharing(&mut self, max_page_sharing: u32) {
        let _ = max_page_sharing;
    }

    /// The store's counts.
    fn counts(&self) -> StoreCounts {
        StoreCounts::default()
    }

    /// Appends hashes that were [`Answer::Unknown`] and have a stable page by now (for stores
    /// shared with others).
    fn take_notifications(&mut self, notifications: &mut Vec<(Node, PageHash)>) {
        let _ = notifications;
    }

    /// While `hurry` is set, calls do not wait for another process: they fail with
    /// [`StoreError::Late`].
    fn hurry_while(&mut self, hurry: Arc<AtomicBool>) {
        let _ = hurry;
    }

    /// Reason for the loss of the store, once it is lost. A lost store never comes back.
    fn why_gone(&self) -> Option<&str> {
        None
    }
}

impl<S: StableStore + ?Sized> StableStore for Box<S> {
    fn query(
        &mut self,
        node: Node,
        hashes: &[PageHash],
        answers: &mut Vec<Answer>,
    ) -> Result<(), StoreError> {
        (**self).query(node, hashes, answers)
    }

    fn publish(
        &mut self,
        node: Node,
        hashes: &[PageHash],
        contents: &[u8],
        slots: &mut Vec<StableSlot>,
    ) -> Result<(), StoreError> {
        (**self).publish(node, hashes, contents, slots)
    }

    fn shared(&mut self, slot: StableSlot) {
        (**self).shared(slot);
    }

    fn unused(&mut self, slot: StableSlot) {
        (**self).unused(slot);
    }

    fn release(&mut self, slot: StableSlot) {
        (**self).release(slot);
    }

    fn retire(&mut self, slot: StableSlot) {
        (**self).retire(slot);
    }

    fn merge_across_nodes(&mut self, nodes: Nodes) {
        (**self).merge_across_nodes(nodes);
    }

    fn limit_sharing(&mut self, max_page_sharing: u32) {
        (**self).limit_sharing(max_page_sharing);
    }

    fn counts(&self) -> StoreCounts {
        (**self).counts()
    }

    fn take_notifications(&mut self, notifications: &mut Vec<(Node, PageHash)>) {
        (**self).take_notifications(notifications);
    }

    fn hurry_while(&mut self, hurry: Arc<AtomicBool>) {
        (**self).hurry_while(hurry);
    }

    fn why_gone(&self) -> Option<&str> {
        (**self).why_gone()
    }
}
