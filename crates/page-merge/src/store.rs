//! Stable pages: content that several pages share. A store belongs to one trust domain.

use std::io;
use std::time::Duration;

use ebb_guest_ram::StableSlot;

use crate::hash::PageHash;
use crate::memory::Node;

/// What a store knows of a content.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    /// Nothing. A store that is shared with others remembers that it was asked.
    Unknown,
    /// A stable page with this hash that may get one more sharer.
    Stable(StableSlot),
    /// No stable page yet, but somebody else has a page like this: it is worth publishing.
    Wanted,
}

/// Why a store could not do what it was asked for.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// The memory file could not be made or made larger.
    #[error("no room for another stable page on {node}: {source}")]
    NoRoom {
        /// Where it should have been.
        node: Node,
        /// What the kernel said.
        source: io::Error,
    },
    /// The store is another process, which is gone or does not answer. What is merged stays as it
    /// is.
    #[error("the broker of stable pages is gone: {0}")]
    Gone(String),
    /// The store is another process, which did not answer in time. It may answer later.
    #[error("the broker of stable pages did not answer within {0:?}")]
    Late(Duration),
}

/// What there is in a store.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StoreCounts {
    /// Stable pages with at least one sharer among the pages that use this store.
    pub pages_shared: u64,
    /// Contents that several stable pages have, because one has as many sharers as it may have.
    pub stable_node_chains: u64,
    /// Stable pages with such contents.
    pub stable_node_dups: u64,
    /// Memory that the store's own tables take up in this process.
    pub metadata_bytes: u64,
}

/// Stable pages of one domain, by node ([`Node::ANY`] where nodes are not kept apart).
pub trait StableStore {
    /// Appends an answer for each hash. With the answer [`Answer::Stable`] the slot is *reserved*
    /// for one more sharer until [`shared`](Self::shared) or [`unused`](Self::unused) is called for
    /// it.
    fn query(
        &mut self,
        node: Node,
        hashes: &[PageHash],
        answers: &mut Vec<Answer>,
    ) -> Result<(), StoreError>;

    /// Makes stable pages out of `contents` (4096 bytes for each hash), in neighbouring slots where
    /// there is room. Each slot is reserved for one sharer, as with [`query`](Self::query). After
    /// an error nothing is published.
    fn publish(
        &mut self,
        node: Node,
        hashes: &[PageHash],
        contents: &[u8],
        slots: &mut Vec<StableSlot>,
    ) -> Result<(), StoreError>;

    /// A page has this slot in its place now, under a reservation.
    fn shared(&mut self, slot: StableSlot);

    /// A reservation is not needed. Without sharers and reservations the slot is given back to the
    /// host.
    fn unused(&mut self, slot: StableSlot);

    /// A page has given up its share. Without sharers and reservations the slot is given back to
    /// the host.
    fn release(&mut self, slot: StableSlot);

    /// No more sharers for this slot: its page is not on the node that it should be on. The shares
    /// it has stay valid.
    fn retire(&mut self, slot: StableSlot) {
        let _ = slot;
    }

    /// How many pages may share one stable page from now on. Nothing is shared at the moment. (A
    /// store that is shared with others has rules of its own.)
    fn limit_sharing(&mut self, max_page_sharing: u32) {
        let _ = max_page_sharing;
    }

    /// What there is.
    fn counts(&self) -> StoreCounts {
        StoreCounts::default()
    }

    /// Appends hashes that were [`Answer::Unknown`] once and have a stable page by now (for stores
    /// shared with others).
    fn take_notifications(&mut self, notifications: &mut Vec<(Node, PageHash)>) {
        let _ = notifications;
    }

    /// Why the store is lost, once it is. A lost store never comes back.
    fn why_gone(&self) -> Option<&str> {
        None
    }
}
