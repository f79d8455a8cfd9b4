//! Contents with several stable pages.

use std::collections::{BTreeSet, HashMap};

use crate::hash::PageHash;

/// For each such content, the references and the numbers of its stable pages, in order.
#[derive(Clone, Debug, Default)]
pub(super) struct Chains {
    chains: HashMap<PageHash, BTreeSet<(u16, u32)>>,
    pages: u64,
}

impl Chains {
    /// Whether several pages have this content.
    pub(super) fn contains(&self, hash: PageHash) -> bool {
        self.chains.contains_key(&hash)
    }

    /// The page of a chain with the most references among those with fewer than `most`; the first
    /// of several.
    pub(super) fn fullest_below(&self, hash: PageHash, most: u16) -> Option<u32> {
        let chain = self.chains.get(&hash)?;
        let (references, _) = *chain.range(..(most, 0)).next_back()?;
        chain.range((references, 0)..).next().map(|(_, number)| *number)
    }

    /// Adds a page with a content that another page already has.
    pub(super) fn add(&mut self, hash: PageHash, first: (u16, u32), another: (u16, u32)) {
        let chain = self.chains.entry(hash).or_default();
        let before = chain.len();
        if chain.is_empty() {
            chain.insert(first);
        }
        chain.insert(another);
        self.pages += (chain.len() - before) as u64;
    }

    /// Updates the number of references of a page.
    pub(super) fn count(&mut self, hash: PageHash, number: u32, old: u16, new: u16) {
        if let Some(chain) = self.chains.get_mut(&hash)
            && chain.remove(&(old, number))
        {
            chain.insert((new, number));
        }
    }

    /// Removes a page. Returns another page of its chain; a chain with one page left is dissolved.
    pub(super) fn remove(&mut self, hash: PageHash, number: u32, references: u16) -> Option<u32> {
        let chain = self.chains.get_mut(&hash)?;
        self.pages -= u64::from(chain.remove(&(references, number)));
        let other = chain.last().map(|(_, number)| *number);
        if chain.len() < 2 {
            self.pages -= chain.len() as u64;
            self.chains.remove(&hash);
        }
        other
    }

    /// Number of chains.
    pub(super) fn len(&self) -> u64 {
        self.chains.len() as u64
    }

    /// Number of pages in chains.
    pub(super) fn pages(&self) -> u64 {
        self.pages
    }

    /// Memory, as an estimate: the standard library does not report it.
    pub(super) fn memory_bytes(&self) -> u64 {
        (self.chains.capacity() * size_of::<(PageHash, BTreeSet<(u16, u32)>)>()) as u64
            + self.pages * 16
    }
}
