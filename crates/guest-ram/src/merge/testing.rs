//! Merges all equal pages at once, for tests of features that must work together with merging.

use std::collections::BTreeMap;
use std::error::Error;
use std::sync::Arc;

use ebb_abi::{PAGE_SIZE_BYTES, Pfn};

use crate::merge::{
    MergeOutcome, MergeSession, MergeTarget, MergeUnavailable, PageLook, StableMemory,
    StableSegments,
};
use crate::{GuestRam, GuestRange, StableSlot};

/// Pages scanned at a time.
const BLOCK_PAGES: u64 = 512;

/// Merges the pages of a memory.
#[derive(Debug)]
pub struct TestMerger {
    session: MergeSession,
    stable: StableMemory,
    /// Content of each stable page that is shared.
    slots: BTreeMap<Vec<u8>, StableSlot>,
    /// Its shares.
    shares: BTreeMap<StableSlot, (u64, Vec<u8>)>,
    looks: Vec<PageLook>,
}

impl TestMerger {
    /// For a memory whose pages are not merged yet.
    ///
    /// # Errors
    /// [`MergeUnavailable`]
    pub fn new(ram: &Arc<GuestRam>) -> Result<Self, MergeUnavailable> {
        let segments = StableSegments::new();
        let stable = StableMemory::own(Arc::clone(&segments));
        ram.enable_merging(segments)?;
        let session = MergeSession::new(Arc::clone(ram))?;
        Ok(Self {
            session,
            stable,
            slots: BTreeMap::new(),
            shares: BTreeMap::new(),
            looks: Vec::new(),
        })
    }

    /// Replaces all populated pages of `range` that can be replaced by stable pages, equal ones by
    /// the same one. Returns their number. Pages of zeros are discarded.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn merge(&mut self, range: GuestRange) -> Result<u64, Box<dyn Error + Send + Sync>> {
        let mut done = 0;
        let parts: Vec<_> = self.session.ram().clip(range).collect();
        for part in parts {
            let mut start = part.start.0;
            while start < part.end().0 {
                let end = (start + 1).next_multiple_of(BLOCK_PAGES).min(part.end().0);
                done += self.merge_block(GuestRange::new(Pfn(start), end - start))?;
                start = end;
            }
        }
        Ok(done)
    }

    fn merge_block(&mut self, block: GuestRange) -> Result<u64, Box<dyn Error + Send + Sync>> {
        let mut looks = std::mem::take(&mut self.looks);
        self.session.look(block, &mut looks)?;
        self.looks = looks;
        for look in &self.looks {
            if let PageLook::Broken(slot) = look {
                give_up(&mut self.shares, &mut self.slots, &mut self.stable, *slot);
            }
        }
        self.release();
        let mut populated = Vec::new();
        self.session.ram().populated_ranges(block, &mut populated)?;
        let mut replacements = Vec::new();
        let mut content = vec![0; PAGE_SIZE_BYTES as usize];
        for page in populated.iter().flat_map(|range| range.start.0..range.end().0).map(Pfn) {
            self.session.ram().read_pages(GuestRange::new(page, 1), &mut content)?;
            let target = if content.iter().all(|byte| *byte == 0) {
                MergeTarget::Zero
            } else {
                MergeTarget::Slot(self.slot_of(&content)?)
            };
            replacements.push((page, target));
        }
        let mut outcomes = Vec::new();
        self.session.replace(&replacements, &mut outcomes)?;
        let mut done = 0;
        for ((_, target), outcome) in replacements.iter().zip(outcomes) {
            match (target, outcome) {
                (_, MergeOutcome::Done) => done += 1,
                (MergeTarget::Slot(slot), _) => {
                    give_up(&mut self.shares, &mut self.slots, &mut self.stable, *slot);
                }
                (MergeTarget::Zero, _) => {}
            }
        }
        Ok(done)
    }

    /// Releases the shares of pages that were discarded. Returns the number of remaining shares.
    pub fn release(&mut self) -> u64 {
        let mut released = Vec::new();
        self.session.take_released(&mut released);
        for slot in released {
            give_up(&mut self.shares, &mut self.slots, &mut self.stable, slot);
        }
        self.shares.values().map(|(shares, _)| shares).sum()
    }

    /// Unmerges all pages of `range`. Returns the number of remaining shares.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn unmerge(&mut self, range: GuestRange) -> Result<u64, Box<dyn Error + Send + Sync>> {
        let mut released = Vec::new();
        self.session.unmerge(range, &mut released)?;
        for slot in released {
            give_up(&mut self.shares, &mut self.slots, &mut self.stable, slot);
        }
        Ok(self.release())
    }

    /// A slot with this content, with one more share.
    fn slot_of(&mut self, content: &[u8]) -> Result<StableSlot, Box<dyn Error + Send + Sync>> {
        let slot = if let Some(slot) = self.slots.get(content) {
            *slot
        } else {
            let mut slots = Vec::new();
            self.stable.allocate(None, 1, &mut slots)?;
            self.stable.write(slots[0], content)?;
            self.slots.insert(content.to_vec(), slots[0]);
            slots[0]
        };
        self.shares.entry(slot).or_insert_with(|| (0, content.to_vec())).0 += 1;
        Ok(slot)
    }
}

/// Removes a share; a slot without shares is free for other content.
///
/// # Panics
/// If it has none: a share was released twice.
fn give_up(
    shares: &mut BTreeMap<StableSlot, (u64, Vec<u8>)>,
    slots: &mut BTreeMap<Vec<u8>, StableSlot>,
    stable: &mut StableMemory,
    slot: StableSlot,
) {
    let Some((count, content)) = shares.get_mut(&slot) else { panic!("{slot:?} has no shares") };
    *count -= 1;
    if *count == 0 {
        slots.remove(content);
        shares.remove(&slot);
        stable.free(slot);
    }
}
