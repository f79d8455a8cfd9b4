//! The core's interface to the memory that it merges.

use ebb_abi::{PageRange, Pfn};
use ebb_guest_ram::merge::{MergeOutcome, MergeTarget, PageLook};
use ebb_guest_ram::{BrokenCowStats, MergeError, MergeSession, StableSlot};

use crate::hash::{Content, PageHasher};

/// Maximum number of pages per [`Memory::look`]: those of a huge page.
pub const BLOCK_PAGES: u64 = 512;

/// A NUMA node of the host.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Node(pub u32);

impl Node {
    /// No particular node: where pages of all nodes are merged, stable pages are looked up under
    /// this one.
    pub const ANY: Self = Self(u32::MAX);
}

impl std::fmt::Display for Node {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if *self == Self::ANY {
            formatter.write_str("any node")
        } else {
            write!(formatter, "node {}", self.0)
        }
    }
}

/// Memory of a virtual machine, as seen by the core. [`MergeSession`] is that of a machine of this
/// process.
pub trait Memory {
    /// Reason why memory could not be scanned or replaced.
    type Error: std::error::Error + Send + Sync + 'static;

    /// The pages that may be scanned, in ascending order, not overlapping.
    fn ranges(&self) -> Vec<PageRange>;

    /// The first page of `range` that a [`look`](Self::look) may find to be anything else than
    /// absent. The range may span several of the memory's.
    fn first_with_content(&mut self, range: PageRange) -> Result<Option<Pfn>, Self::Error>;

    /// Scans a block of at most [`BLOCK_PAGES`] pages within one range, and fills `looks` with one
    /// entry for each page.
    fn look(&mut self, block: PageRange, looks: &mut Vec<PageLook>) -> Result<(), Self::Error>;

    /// Reads pages (ascending) and appends their contents; `None` for a page that cannot be read.
    /// Reading should mark pages as used as little as possible, and must not allocate absent pages.
    fn hash(
        &mut self,
        pages: &[Pfn],
        hasher: &PageHasher,
        contents: &mut Vec<Option<Content>>,
    ) -> Result<(), Self::Error>;

    /// Whether all memory of the host is on one node.
    fn is_on_one_node(&self) -> bool {
        false
    }

    /// Appends the number of each page's node; `None` if it has none (absent, swapped out).
    fn nodes(&mut self, pages: &[Pfn], nodes: &mut Vec<Option<u32>>) -> Result<(), Self::Error>;

    /// Copies a page into `content` (4096 bytes), to become a stable page. It may be written to
    /// concurrently; only [`replace`](Self::replace) decides.
    fn read(&mut self, page: Pfn, content: &mut [u8]) -> Result<(), Self::Error>;

    /// Replaces pages (ascending): each is frozen, so that no processor and no device can change
    /// it, compared with its target, and replaced only if it is equal. `outcomes` gets an entry for
    /// each. Neighbours with neighbouring slots are replaced together. The list may span several
    /// blocks, and several pages may have the same slot.
    ///
    /// After an error, the entries in `outcomes` are valid, and all pages after them are unchanged:
    /// a page that was replaced is always reported as [`MergeOutcome::Done`]; otherwise its slot
    /// could be freed while it is mapped.
    fn replace(
        &mut self,
        pages: &[(Pfn, MergeTarget)],
        outcomes: &mut Vec<MergeOutcome>,
    ) -> Result<(), Self::Error>;

    /// Makes one huge page of a block of [`BLOCK_PAGES`] pages that are all present and not merged.
    /// Returns true if it is one afterwards; there may be reasons against it.
    fn collapse(&mut self, block: PageRange) -> Result<bool, Self::Error>;

    /// Unmerges every merged page of `range`, and appends the slots that have lost a share, once
    /// for each page.
    fn unmerge(
        &mut self,
        range: PageRange,
        released: &mut Vec<StableSlot>,
    ) -> Result<(), Self::Error>;

    /// Appends the merged pages of `range` (ascending), each with the slot that it shares.
    fn slots(&mut self, range: PageRange, slots: &mut Vec<(Pfn, StableSlot)>);

    /// Makes merged pages (ascending) share other stable pages, if their content is equal: with
    /// [`MergeOutcome::Done`] the former share is reported by
    /// [`take_released`](Self::take_released); otherwise nothing has changed. `outcomes` gets an
    /// entry for each.
    fn move_shares(&mut self, pages: &[(Pfn, StableSlot)], outcomes: &mut Vec<MergeOutcome>);

    /// Statistics of pages that were reported as [`PageLook::Broken`].
    fn broken_cow_stats(&self) -> BrokenCowStats {
        BrokenCowStats::default()
    }

    /// Slots that lost a share without a scan, because the owner discarded pages or shares were
    /// moved; appended once for each page and then forgotten.
    fn take_released(&mut self, released: &mut Vec<StableSlot>);
}

impl Memory for MergeSession {
    type Error = MergeError;

    fn ranges(&self) -> Vec<PageRange> {
        self.ram().page_ranges()
    }

    fn first_with_content(&mut self, range: PageRange) -> Result<Option<Pfn>, MergeError> {
        Self::first_with_content(self, range)
    }

    fn look(&mut self, block: PageRange, looks: &mut Vec<PageLook>) -> Result<(), MergeError> {
        Self::look(self, block, looks)
    }

    fn hash(
        &mut self,
        pages: &[Pfn],
        hasher: &PageHasher,
        contents: &mut Vec<Option<Content>>,
    ) -> Result<(), MergeError> {
        self.read_each(pages, |page| contents.push(page.map(|page| hasher.content(page))));
        Ok(())
    }

    fn is_on_one_node(&self) -> bool {
        Self::is_on_one_node(self)
    }

    fn nodes(&mut self, pages: &[Pfn], nodes: &mut Vec<Option<u32>>) -> Result<(), MergeError> {
        Self::nodes(self, pages, nodes)
    }

    fn read(&mut self, page: Pfn, content: &mut [u8]) -> Result<(), MergeError> {
        let mut result = Ok(());
        self.read_each(&[page], |read| match read {
            Some(page) => content.copy_from_slice(page),
            None => result = Err(MergeError::OutsideRam { range: PageRange::new(page, 1) }),
        });
        result
    }

    fn replace(
        &mut self,
        pages: &[(Pfn, MergeTarget)],
        outcomes: &mut Vec<MergeOutcome>,
    ) -> Result<(), MergeError> {
        Self::replace(self, pages, outcomes)
    }

    fn collapse(&mut self, block: PageRange) -> Result<bool, MergeError> {
        Self::collapse(self, block)
    }

    fn unmerge(
        &mut self,
        range: PageRange,
        released: &mut Vec<StableSlot>,
    ) -> Result<(), MergeError> {
        Self::unmerge(self, range, released)
    }

    fn slots(&mut self, range: PageRange, slots: &mut Vec<(Pfn, StableSlot)>) {
        Self::slots(self, range, slots);
    }

    fn move_shares(&mut self, pages: &[(Pfn, StableSlot)], outcomes: &mut Vec<MergeOutcome>) {
        Self::move_shares(self, pages, outcomes);
    }

    fn broken_cow_stats(&self) -> BrokenCowStats {
        self.ram().broken_cow_stats()
    }

    fn take_released(&mut self, released: &mut Vec<StableSlot>) {
        Self::take_released(self, released);
    }
}

#[cfg(test)]
mod tests;
