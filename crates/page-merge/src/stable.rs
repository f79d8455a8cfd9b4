//! The stable pages of a trust domain: an index, and counts of sharers, over [`Slots`].

mod chains;
mod entries;

use std::io;

use ebb_guest_ram::StableSlot;

use crate::{
    hash::PageHash,
    memory::Node,
    settings::{MAX_PAGE_SHARING, Nodes},
    slots::Slots,
    store::{Answer, StableStore, StoreCounts, StoreError},
    table::Table,
};
use chains::Chains;
use entries::{Entries, Entry};

/// Stable pages of one domain: the store of a machine that shares its pages with no other one, or
/// part of a broker's ledger for all its clients.
///
/// A content normally has one stable page. When that has the maximum number of sharers, another
/// stable page with the same content is made, and they form a *chain* (as in Linux's mm/ksm.c:
/// unmapping a page with millions of sharers would take the kernel too long). A page of a chain
/// without sharers is freed immediately, and a chain with one page left is dissolved. New sharers
/// go to the page behind that of their neighbour, so that one mapping serves both; otherwise to the
/// fullest page that has room, so that the others become empty.
///
/// A stable page takes eight bytes, and five to seven in the index.
#[derive(Debug)]
#[cfg_attr(test, derive(Clone))]
pub struct StablePages<T> {
    slots: T,
    nodes: Nodes,
    max_page_sharing: u16,
    indexes: Vec<Index>,
    entries: Entries,
}

/// Stable pages of one node that may get more sharers.
#[derive(Debug)]
#[cfg_attr(test, derive(Clone))]
struct Index {
    node: Node,
    /// One stable page for each content.
    table: Table,
    /// All stable pages of the contents that have several.
    chains: Chains,
}

/// Result of looking up a content.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Found {
    /// No stable page that could ever get another sharer.
    Nothing,
    /// Stable pages, all of which have the maximum number of sharers.
    Full,
    /// The stable page for the next sharer.
    Available(Number),
}

/// Number of a stable page in this store; a faster key than its slot.
pub(crate) type Number = u32;

/// Result of dropping references to a stable page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Dropped {
    /// The node under which it is looked up.
    pub(crate) node: Node,
    /// Whether references are left.
    pub(crate) left: Left,
}

/// Whether a stable page has references left.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Left {
    /// Some are left.
    Some,
    /// None: the stable page is freed, and with it its segment if it has a number.
    None {
        /// Number of the segment.
        closed: Option<u32>,
    },
}

impl<T: Slots> StablePages<T> {
    /// Creates an empty set of stable pages in `slots`.
    pub fn new(slots: T) -> Self {
        Self {
            slots,
            nodes: Nodes::Apart,
            max_page_sharing: 256,
            indexes: Vec::new(),
            entries: Entries::default(),
        }
    }

    /// The slots.
    pub fn slots(&self) -> &T {
        &self.slots
    }

    /// Shares and reservations of a stable page; 0 if the slot has none.
    pub fn references(&self, slot: StableSlot) -> u32 {
        self.entries.number(slot).map_or(0, |number| self.entries.get(number).references().into())
    }

    /// Number of stable pages.
    pub(crate) fn len(&self) -> u64 {
        self.entries.len()
    }

    /// The node under which a stable page is looked up.
    pub(crate) fn node(&self, slot: StableSlot) -> Option<Node> {
        Some(self.entries.node(self.entries.number(slot)?))
    }

    /// Looks up a content on a node. If it has several stable pages, the one behind `before` is
    /// preferred.
    pub(crate) fn find(&self, node: Node, hash: PageHash, before: Option<StableSlot>) -> Found {
        let Some(index) = self.indexes.iter().find(|index| index.node == node) else {
            return Found::Nothing;
        };
        let available = if index.chains.contains(hash) {
            let behind = before.and_then(|slot| self.entries.number(slot.offset(1)));
            let has_room = |number: &Number| {
                let entry = self.entries.get(*number);
                entry.hash() == hash
                    && !entry.is_retired()
                    && entry.references() < self.max_page_sharing
                    && self.entries.node(*number) == node
            };
            behind
                .filter(has_room)
                .or_else(|| index.chains.fullest_below(hash, self.max_page_sharing))
        } else {
            let same = |number| self.entries.get(number).hash() == hash;
            let Some(number) = index.table.find(hash, same) else { return Found::Nothing };
            Some(number)
                .filter(|&number| self.entries.get(number).references() < self.max_page_sharing)
        };
        available.map_or(Found::Full, Found::Available)
    }

    /// The slot of a stable page.
    pub(crate) fn slot(&self, number: Number) -> StableSlot {
        self.entries.slot(number)
    }

    /// Adds a reference to a stable page that is [`Found::Available`].
    pub(crate) fn reserve(&mut self, number: Number) -> StableSlot {
        self.set_references(number, self.entries.get(number).references() + 1);
        self.entries.slot(number)
    }

    /// Drops references to a stable page; `None` if there is none. It is freed with the last one.
    pub(crate) fn drop_references(&mut self, slot: StableSlot, count: u32) -> Option<Dropped> {
        let Some(number) = self.entries.number(slot) else {
            tracing::error!(?slot, "a share of a stable page that does not exist was released");
            return None;
        };
        let node = self.entries.node(number);
        let entry = self.entries.get(number);
        let left = u32::from(entry.references()).saturating_sub(count) as u16;
        if left > 0 {
            self.set_references(number, left);
            return Some(Dropped { node, left: Left::Some });
        }
        if !entry.is_retired() {
            self.take_out(number);
        }
        self.entries.remove(number);
        Some(Dropped { node, left: Left::None { closed: self.slots.free(slot) } })
    }

    /// The node under which contents are looked up that are published on `node`.
    pub(crate) fn index_of(&self, node: Node) -> Node {
        match self.nodes {
            Nodes::Across => Node::ANY,
            Nodes::Apart => node,
        }
    }

    /// Makes stable pages on `node` with one reference each out of `contents`, one for each of
    /// `hashes`, and appends their slots; none after an error.
    pub(crate) fn make(
        &mut self,
        node: Node,
        hashes: &[PageHash],
        contents: &[u8],
        slots: &mut Vec<StableSlot>,
    ) -> io::Result<()> {
        let mut new = Vec::with_capacity(hashes.len());
        self.slots.allocate(node, hashes.len(), &mut new)?;
        let page_bytes = contents.len().checked_div(hashes.len()).unwrap_or(0);
        let mut rest = contents;
        for run in new.chunk_by(|a, b| a.is_followed_by(*b)) {
            let (these, behind) = rest.split_at(run.len() * page_bytes);
            if let Err(error) = self.slots.write(run[0], these) {
                for slot in new {
                    self.slots.free(slot);
                }
                return Err(error);
            }
            rest = behind;
        }
        let node = self.index_of(node);
        let index = self.index(node);
        for (&slot, &hash) in new.iter().zip(hashes) {
            let number = self.entries.add(slot, node, Entry::new(hash, 1));
            self.put(index, number);
        }
        slots.append(&mut new);
        Ok(())
    }

    fn index(&mut self, node: Node) -> usize {
        if let Some(place) = self.indexes.iter().position(|index| index.node == node) {
            return place;
        }
        self.indexes.push(Index { node, table: Table::default(), chains: Chains::default() });
        self.indexes.len() - 1
    }

    fn set_references(&mut self, number: Number, references: u16) {
        let entry = self.entries.get(number);
        if !entry.is_retired() {
            let index = self.index(self.entries.node(number));
            let chains = &mut self.indexes[index].chains;
            chains.count(entry.hash(), number, entry.references(), references);
        }
        self.entries.set(number, entry.with_references(references));
    }

    /// Adds a new stable page to the index.
    fn put(&mut self, index: usize, number: Number) {
        let entry = self.entries.get(number);
        let (hash, entries) = (entry.hash(), &self.entries);
        let index = &mut self.indexes[index];
        match index.table.find(hash, |number| entries.get(number).hash() == hash) {
            None => index.table.insert(hash, number, |number| entries.get(number).hash()),
            Some(first) => {
                index.chains.add(
                    hash,
                    (entries.get(first).references(), first),
                    (entry.references(), number),
                );
            }
        }
    }

    /// Removes a stable page from the index.
    fn take_out(&mut self, number: Number) {
        let entry = self.entries.get(number);
        let node = self.entries.node(number);
        let index = self.index(node);
        let (hash, entries, index) = (entry.hash(), &self.entries, &mut self.indexes[index]);
        let hash_of = |number| entries.get(number).hash();
        let other = index.chains.remove(hash, number, entry.references());
        if index.table.remove(hash, number, hash_of)
            && let Some(other) = other
        {
            index.table.insert(hash, other, hash_of);
        }
    }
}

impl<T: Slots> StableStore for StablePages<T> {
    fn query(
        &mut self,
        node: Node,
        hashes: &[PageHash],
        answers: &mut Vec<Answer>,
    ) -> Result<(), StoreError> {
        let mut before = None;
        for &hash in hashes {
            let answer = match self.find(node, hash, before) {
                // Without another process that has such a page a full one is useless.
                Found::Nothing | Found::Full => Answer::Unknown,
                Found::Available(number) => Answer::Stable(self.reserve(number)),
            };
            before = answer.slot();
            answers.push(answer);
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
        self.make(node, hashes, contents, slots)
            .map_err(|source| StoreError::NoRoom { node, source })
    }

    fn shared(&mut self, _slot: StableSlot) {
        // A reservation already counts as a share.
    }

    fn unused(&mut self, slot: StableSlot) {
        self.drop_references(slot, 1);
    }

    fn release(&mut self, slot: StableSlot) {
        self.drop_references(slot, 1);
    }

    fn retire(&mut self, slot: StableSlot) {
        if let Some(number) = self.entries.number(slot)
            && !self.entries.get(number).is_retired()
        {
            self.take_out(number);
            self.entries.set(number, self.entries.get(number).retired());
        }
    }

    fn merge_across_nodes(&mut self, nodes: Nodes) {
        self.nodes = nodes;
    }

    fn limit_sharing(&mut self, max_page_sharing: u32) {
        self.max_page_sharing = max_page_sharing.clamp(1, MAX_PAGE_SHARING) as u16;
    }

    fn counts(&self) -> StoreCounts {
        let tables: u64 = self
            .indexes
            .iter()
            .map(|index| index.table.memory_bytes() + index.chains.memory_bytes())
            .sum();
        StoreCounts {
            pages_shared: self.entries.len(),
            stable_node_chains: self.indexes.iter().map(|index| index.chains.len()).sum(),
            stable_node_dups: self.indexes.iter().map(|index| index.chains.pages()).sum(),
            metadata_bytes: tables + self.entries.memory_bytes(),
        }
    }
}

#[cfg(test)]
mod tests;
