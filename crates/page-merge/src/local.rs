//! A store of stable pages in this process: an index and counts of sharers over [`Slots`].

mod chains;
mod entries;

use crate::{
    memory::{Node, PageHash},
    settings::MAX_PAGE_SHARING,
    slots::Slots,
    store::{Answer, Slot, StableStore, StoreCounts, StoreError},
    table::Table,
};
use chains::Chains;
use entries::{Entries, Entry};

/// Stable pages of one domain, for members in this process only.
///
/// A content has one stable page. When that has as many sharers as it may have, another stable page
/// with the same content is made, and they form a *chain* (as in Linux's mm/ksm.c: unmapping a page
/// with millions of sharers would take the kernel too long). A page of a chain without sharers goes
/// back to the host at once, and a chain with one page left is none any more. New sharers go to the
/// fullest page that has room, so that the others run empty.
pub struct LocalStore<T> {
    slots: T,
    max_page_sharing: u16,
    indexes: Vec<Index>,
    entries: Entries,
}

/// Stable pages of one node that may get more sharers some day.
struct Index {
    node: Node,
    /// One stable page for each content.
    table: Table,
    /// All stable pages of the contents that have several.
    chains: Chains,
}

impl<T: Slots> LocalStore<T> {
    /// An empty store that puts stable pages into `slots`.
    pub fn new(slots: T) -> Self {
        Self { slots, max_page_sharing: 256, indexes: Vec::new(), entries: Entries::default() }
    }

    /// Where the stable pages are.
    pub fn slots(&self) -> &T {
        &self.slots
    }

    /// Where the stable pages are.
    pub fn slots_mut(&mut self) -> &mut T {
        &mut self.slots
    }

    /// Shares and reservations of a stable page; 0 if there is none in this slot.
    pub fn references(&self, slot: Slot) -> u32 {
        self.entries.number(slot).map_or(0, |number| self.entries.get(number).references().into())
    }

    fn index(&mut self, node: Node) -> usize {
        if let Some(place) = self.indexes.iter().position(|index| index.node == node) {
            return place;
        }
        self.indexes.push(Index { node, table: Table::default(), chains: Chains::default() });
        self.indexes.len() - 1
    }

    /// The stable page with this content that should get the next sharer.
    fn with_room(&self, index: usize, hash: PageHash) -> Option<u32> {
        let index = &self.indexes[index];
        if index.chains.contains(hash) {
            return index.chains.fullest_below(hash, self.max_page_sharing);
        }
        let number = index.table.find(hash, |number| self.entries.get(number).hash() == hash)?;
        (self.entries.get(number).references() < self.max_page_sharing).then_some(number)
    }

    /// Changes the number of references to a stable page.
    fn count(&mut self, number: u32, references: u16) {
        let entry = self.entries.get(number);
        if !entry.is_retired() {
            let node = self.entries.node(number);
            let index = self.index(node);
            self.indexes[index].chains.count(entry.hash(), number, entry.references(), references);
        }
        self.entries.set(number, entry.with_references(references));
    }

    /// Puts a new stable page into the index.
    fn put(&mut self, index: usize, number: u32) {
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

    /// Takes a stable page out of the index.
    fn take_out(&mut self, number: u32) {
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

    /// One reference less.
    fn drop_reference(&mut self, slot: Slot) {
        let Some(number) = self.entries.number(slot) else {
            tracing::error!(?slot, "a share of a stable page that does not exist was given up");
            return;
        };
        let entry = self.entries.get(number);
        if entry.references() > 1 {
            self.count(number, entry.references() - 1);
            return;
        }
        if !entry.is_retired() {
            self.take_out(number);
        }
        self.entries.remove(number);
        self.slots.free(slot);
    }
}

impl<T: Slots> StableStore for LocalStore<T> {
    fn query(
        &mut self,
        node: Node,
        hashes: &[PageHash],
        answers: &mut Vec<Answer>,
    ) -> Result<(), StoreError> {
        let index = self.index(node);
        for &hash in hashes {
            answers.push(match self.with_room(index, hash) {
                None => Answer::Unknown,
                Some(number) => {
                    self.count(number, self.entries.get(number).references() + 1);
                    Answer::Stable(self.entries.slot(number))
                }
            });
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
        let mut new = Vec::with_capacity(hashes.len());
        let page_bytes = contents.len().checked_div(hashes.len()).unwrap_or(0);
        let mut outcome = self.slots.allocate(node, hashes.len(), &mut new);
        let mut begin = 0;
        while outcome.is_ok() && begin < new.len() {
            let run =
                new[begin..].windows(2).take_while(|pair| pair[0].is_followed_by(pair[1])).count()
                    + 1;
            outcome = self
                .slots
                .write(new[begin], &contents[begin * page_bytes..(begin + run) * page_bytes]);
            begin += run;
        }
        if let Err(source) = outcome {
            for slot in new {
                self.slots.free(slot);
            }
            return Err(StoreError::NoRoom { node, source });
        }
        let index = self.index(node);
        for (&slot, &hash) in new.iter().zip(hashes) {
            let number = self.entries.add(slot, node, Entry::new(hash, 1));
            self.put(index, number);
        }
        slots.append(&mut new);
        Ok(())
    }

    fn shared(&mut self, _slot: Slot) {
        // A reservation is counted as a share already.
    }

    fn unused(&mut self, slot: Slot) {
        self.drop_reference(slot);
    }

    fn release(&mut self, slot: Slot) {
        self.drop_reference(slot);
    }

    fn retire(&mut self, slot: Slot) {
        if let Some(number) = self.entries.number(slot)
            && !self.entries.get(number).is_retired()
        {
            self.take_out(number);
            self.entries.set(number, self.entries.get(number).retired());
        }
    }

    fn limit_sharing(&mut self, max_page_sharing: u32) {
        self.max_page_sharing = max_page_sharing.clamp(2, MAX_PAGE_SHARING) as u16;
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

    fn news(&mut self, _news: &mut Vec<(Node, PageHash)>) {
        // All members are in this process, and find each other in its unstable index.
    }
}

#[cfg(test)]
mod tests;
