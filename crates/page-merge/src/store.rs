//! Stable pages: content that several pages share. A store belongs to one trust domain.

use std::io;

use crate::memory::{Node, PageHash};

/// The place of a stable page: a page of a memory file of the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Slot {
    /// Number of the file (segment) in the store.
    pub segment: u32,
    /// Number of the page within it.
    pub index: u32,
}

impl Slot {
    /// Whether `other` is the page behind this one, so that both can be mapped in one go.
    pub fn is_followed_by(self, other: Self) -> bool {
        self.segment == other.segment && self.index.checked_add(1) == Some(other.index)
    }
}

/// What a store knows of a content.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    /// Nothing. A store that is shared with others remembers that it was asked.
    Unknown,
    /// A stable page with this hash that may get one more sharer.
    Stable(Slot),
    /// No stable page yet, but somebody else has a page like this: it is worth publishing.
    Wanted,
}

/// Why a store could not do what it was asked for.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// The memory file could not be made or made larger.
    #[error("no room for another stable page on node {node}: {source}", node = node.0)]
    NoRoom {
        /// Where it should have been.
        node: Node,
        /// What the kernel said.
        source: io::Error,
    },
    /// The store is another process, which is gone or does not answer. What is merged stays as it is.
    #[error("the broker of stable pages is gone: {0}")]
    Gone(String),
}

/// Stable pages of one domain, by node.
pub trait StableStore {
    /// Appends an answer for each hash. With the answer [`Answer::Stable`] the slot is *reserved* for one more sharer until
    /// [`shared`](Self::shared) or [`release`](Self::release) is called for it.
    fn query(&mut self, node: Node, hashes: &[PageHash], answers: &mut Vec<Answer>)
    -> Result<(), StoreError>;

    /// Makes stable pages out of `contents` (4096 bytes for each hash), in neighbouring slots where there is room. Each slot is
    /// reserved for one sharer, as with [`query`](Self::query).
    fn publish(
        &mut self,
        node: Node,
        hashes: &[PageHash],
        contents: &[u8],
        slots: &mut Vec<Slot>,
    ) -> Result<(), StoreError>;

    /// A page has this slot in its place now, under a reservation.
    fn shared(&mut self, slot: Slot);

    /// A page has given up its share, or a reservation is not needed. Without sharers the slot is given back to the host.
    fn release(&mut self, slot: Slot);

    /// Appends hashes that were [`Answer::Unknown`] once and have a stable page by now (for stores shared with others).
    fn news(&mut self, news: &mut Vec<(Node, PageHash)>);
}
