//! A zone: its free lists, the uses of its pages, and the blocks that a tracker holds.

use std::collections::{BTreeMap, BTreeSet};

use super::pages::{PageUse, Pages};
use super::problem::Problem;
use crate::bitmap::Bitmap;
use crate::buddy::Allocator;
use crate::tracker::{Batch, Flaw, Path, Tracker};
use crate::units::{Block, Order, Pfn};

/// One more than the largest number of a page.
const PAGES_END: u32 = u32::MAX;

/// How far the host is with a block, or a part of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Told {
    /// It was named to the host.
    Waiting,
    /// The host has discarded it.
    Discarded,
    /// The host is done, and may have discarded it.
    Failed,
}

/// A block that a tracker has isolated.
#[derive(Clone, Debug, Default)]
struct Held {
    /// What is to be reported of it, if the tracker's model says.
    named: Option<Vec<Block>>,
    /// Bits that are to be cleared before that.
    uncleared: BTreeSet<Pfn>,
    told: BTreeMap<Block, Told>,
}

/// The bitmap of a zone.
#[derive(Clone, Debug)]
struct Bits {
    model: Bitmap,
    /// The hooks are in place.
    is_hooked: bool,
    /// The zone has a bitmap, as zones of some size do: a bit was set.
    is_in_use: bool,
    /// Drained just now; the hook that follows has to mark it, or not.
    drained: Option<Block>,
    /// Parts of failed reports, whose bits are set again.
    failed: BTreeSet<Pfn>,
}

/// A zone.
#[derive(Clone, Debug)]
pub struct Zone {
    allocator: Allocator,
    pages: Pages,
    held: BTreeMap<Block, Held>,
    bits: Option<Bits>,
    /// Something other than a tracker has isolated blocks: with compaction, a block that is freed
    /// may be handed to the caller that compacts for it without getting to the free lists
    /// (`compaction_capture()`).
    is_compacted: bool,
}

impl Zone {
    /// A zone of which nothing is known.
    pub fn new() -> Self {
        Self {
            allocator: Allocator::empty(PAGES_END),
            pages: Pages::default(),
            held: BTreeMap::new(),
            bits: None,
            is_compacted: false,
        }
    }

    fn require(&self, block: Block, uses: &[PageUse]) -> Result<(), Problem> {
        match self.pages.find_other(block, uses) {
            None => Ok(()),
            Some((page, found)) => Err(Problem::WrongUse { page, found }),
        }
    }

    /// A block is in the free lists. Pages on their way there have arrived. Returns the free block
    /// that it is a part of.
    fn arrive(&mut self, block: Block) -> Result<Block, Problem> {
        self.require(block, &[PageUse::Free, PageUse::Coming, PageUse::Unknown])?;
        for piece in self.pages.pieces(block) {
            if piece.used != PageUse::Free {
                piece.blocks().for_each(|part| {
                    self.allocator.free(part);
                });
            }
        }
        self.pages.set(block, PageUse::Free);
        self.allocator.find(block.first, block.order).ok_or(Problem::NotFree(block))
    }

    /// Whether all pages of a block are free, or may be.
    fn may_be_free(&self, block: Block) -> bool {
        self.pages.find_other(block, &[PageUse::Free, PageUse::Coming]).is_none()
    }

    /// The recording begins, and this is free.
    pub fn begin(&mut self, block: Block, is_known: bool) -> Result<(), Problem> {
        self.require(block, &[PageUse::Unknown])?;
        let whole = self.arrive(block)?;
        if whole != block && whole.order <= Order::BLOCK {
            return Err(Problem::OtherOrder { block, whole });
        }
        if is_known {
            self.allocator.set_reported(block);
        }
        Ok(())
    }

    /// A block leaves the free lists, splitting a larger one.
    pub fn remove(&mut self, block: Block) -> Result<(), Problem> {
        self.settle_drain()?;
        self.arrive(block)?;
        if !self.allocator.take(block) {
            return Err(Problem::NotFree(block));
        }
        self.pages.set(block, PageUse::Removed);
        Ok(())
    }

    /// A block goes from a per-CPU list to the free lists.
    pub fn drain(&mut self, block: Block) -> Result<(), Problem> {
        self.settle_drain()?;
        self.require(block, &[PageUse::Removed, PageUse::Coming, PageUse::Unknown])?;
        self.pages.set(block, PageUse::Coming);
        self.arrive(block)?;
        if let Some(bits) = self.bits.as_mut().filter(|bits| bits.is_hooked) {
            bits.drained = Some(block);
        }
        Ok(())
    }

    /// A caller of the allocator gets a block.
    pub fn allocate(&mut self, block: Block) -> Result<(), Problem> {
        let listed = [PageUse::Removed, PageUse::Coming, PageUse::Unknown];
        if let Err(problem) = self.require(block, &listed) {
            let is_captured = self.is_compacted && block.order > Order(0);
            if !is_captured || self.arrive(block).is_err() || !self.allocator.take(block) {
                return Err(problem);
            }
        }
        self.pages.set(block, PageUse::Allocated);
        Ok(())
    }

    /// A block is going to be free.
    pub fn free(&mut self, block: Block) -> Result<(), Problem> {
        let gone = [
            PageUse::Allocated,
            PageUse::Removed,
            PageUse::Coming,
            PageUse::Taken,
            PageUse::Unknown,
        ];
        self.require(block, &gone)?;
        self.pages.set(block, PageUse::Coming);
        if let Some(bits) = self.bits.as_mut().filter(|bits| bits.is_hooked) {
            bits.model.freed(block, &self.allocator);
        }
        // What it may be merged into unseen does not keep the flag.
        for order in block.order.and_above() {
            let whole = Block::containing(block.first, order);
            if self.allocator.is_reported(whole.buddy()) && self.may_be_free(whole) {
                self.allocator.clear_reported(whole.buddy());
            }
        }
        Ok(())
    }

    /// Exactly this block is taken off the free lists.
    fn isolate_as(&mut self, block: Block, used: PageUse) -> Result<(), Problem> {
        self.settle_drain()?;
        let whole = self.arrive(block)?;
        // From the order of a page block on, buddies may be of kinds that are not merged.
        if whole != block && block.order < Order::BLOCK {
            return Err(Problem::OtherOrder { block, whole });
        }
        if used == PageUse::Held && self.allocator.is_reported(whole) {
            return Err(Problem::KnownToHost(block));
        }
        if !self.allocator.take(block) {
            return Err(Problem::NotFree(block));
        }
        self.pages.set(block, used);
        Ok(())
    }

    /// Something other than a tracker isolates a block.
    pub fn take(&mut self, block: Block) -> Result<(), Problem> {
        self.is_compacted = true;
        self.isolate_as(block, PageUse::Taken)
    }

    /// Something other than a tracker puts a block back.
    pub fn give(&mut self, block: Block) -> Result<(), Problem> {
        self.settle_drain()?;
        self.require(block, &[PageUse::Taken])?;
        self.pages.set(block, PageUse::Coming);
        self.arrive(block).map(drop)
    }

    /// A tracker isolates a block.
    pub fn isolate(&mut self, block: Block) -> Result<(), Problem> {
        self.isolate_as(block, PageUse::Held)?;
        let mut held = Held::default();
        if let Some(bits) = &mut self.bits {
            let parts = block.parts(block.order.min(Order::BLOCK));
            held.uncleared = parts
                .map(|part| Block::containing(part.first, Order::BLOCK).first)
                .filter(|&page| bits.model.is_marked(page))
                .collect();
            let mut batch = Batch::default();
            bits.model.name(&mut batch, block);
            if batch.named.is_empty() {
                return Err(Problem::NotMarked(block));
            }
            held.named = Some(batch.named);
        }
        self.held.insert(block, held);
        Ok(())
    }

    /// The block that a tracker holds and that this is in.
    fn held_around(&mut self, block: Block) -> Result<&mut Held, Problem> {
        let mut around = block.order.and_above().map(|order| Block::containing(block.first, order));
        let whole = around.find(|whole| self.held.contains_key(whole));
        whole.and_then(|whole| self.held.get_mut(&whole)).ok_or(Problem::NotHeld(block))
    }

    /// The host is going to be told of a block.
    pub fn report(&mut self, block: Block) -> Result<(), Problem> {
        let held = self.held_around(block)?;
        if held.named.as_ref().is_some_and(|named| !named.contains(&block))
            || !held.uncleared.is_empty()
        {
            return Err(Problem::NotNamed(block));
        }
        match held.told.insert(block, Told::Waiting) {
            None => Ok(()),
            Some(_) => Err(Problem::ReportedTwice(block)),
        }
    }

    /// The host is done with a block.
    pub fn answer(&mut self, block: Block, told: Told) -> Result<(), Problem> {
        let held = self.held_around(block)?;
        match held.told.insert(block, told) {
            Some(Told::Waiting) => {}
            _ => return Err(Problem::NotReported(block)),
        }
        if let Some(bits) = self.bits.as_mut().filter(|_| told == Told::Failed) {
            bits.failed.extend(block.parts(Order::BLOCK.min(block.order)).map(|part| part.first));
        }
        Ok(())
    }

    /// A tracker puts a block back; the kernel's own reporting flags it then.
    pub fn put_back(&mut self, block: Block, is_flagged: bool) -> Result<(), Problem> {
        self.settle_drain()?;
        self.require(block, &[PageUse::Held])?;
        let held = self.held.remove(&block).ok_or(Problem::NotHeld(block))?;
        if held.told.is_empty() {
            return Err(Problem::PutBackUnreported(block));
        }
        if held.told.values().any(|&told| told == Told::Waiting) {
            return Err(Problem::PutBackUnanswered(block));
        }
        if held.named.is_some_and(|named| named.len() != held.told.len()) {
            return Err(Problem::PutBackUnreported(block));
        }
        self.pages.set(block, PageUse::Coming);
        let whole = self.arrive(block)?;
        let is_discarded = held.told.values().all(|&told| told == Told::Discarded);
        let is_alone = block.order == Order::LARGEST || !self.may_be_free(block.buddy());
        if is_flagged && is_discarded && whole == block && is_alone {
            self.allocator.set_reported(block);
        }
        Ok(())
    }

    /// A block that a tracker still holds.
    pub fn still_held(&self) -> Option<Block> {
        self.held.keys().next().copied()
    }

    /// Tracker `bitmap` is going to run, or does not any more.
    pub fn set_bitmap(&mut self, runs: bool) {
        let model = || Bitmap::new(0, usize::MAX, 0, Flaw::None, &self.allocator);
        self.bits = runs.then(|| Bits {
            model: model(),
            is_hooked: false,
            is_in_use: false,
            drained: None,
            failed: BTreeSet::new(),
        });
    }

    /// The hooks of tracker `bitmap` are in place from now on, or only until now.
    pub fn set_hooked(&mut self, is_hooked: bool) {
        if let Some(bits) = &mut self.bits {
            bits.is_hooked = is_hooked;
            bits.drained = None;
        }
    }

    /// The bit of a block is going to be set.
    pub fn mark(&mut self, block: Block) -> Result<(), Problem> {
        let Some(bits) = &mut self.bits else { return Err(Problem::NoTracker) };
        bits.is_in_use = true;
        if let Some(drained) = bits.drained
            && Block::containing(drained.first, block.order) == block
        {
            bits.drained = None;
            // The bit says that the block is free, so what is on its way there has arrived.
            let whole = self.arrive(block)?;
            if let Some(bits) = &mut self.bits {
                bits.model.merged(drained, whole, Path::CpuList);
            }
            return Ok(());
        }
        let is_expected = bits.model.is_marked(block.first) || bits.failed.remove(&block.first);
        if bits.is_hooked && !is_expected {
            return Err(Problem::MarkedUnfounded(block));
        }
        bits.model.mark_page(block.first);
        Ok(())
    }

    /// The bit of a block is going to be cleared.
    pub fn clear(&mut self, block: Block) -> Result<(), Problem> {
        self.settle_drain()?;
        let Some(bits) = &mut self.bits else { return Err(Problem::NoTracker) };
        let named = self.held.values_mut().any(|held| held.uncleared.remove(&block.first));
        if named || bits.model.clear(block.first) {
            Ok(())
        } else {
            Err(Problem::ClearedUnset(block))
        }
    }

    /// No mark has followed a drained block, and none follows any more.
    fn settle_drain(&mut self) -> Result<(), Problem> {
        let Some(bits) = &mut self.bits else { return Ok(()) };
        let Some(drained) = bits.drained.take() else { return Ok(()) };
        if bits.is_in_use
            && !self.is_compacted
            && !bits.model.is_marked(drained.first)
            && self.allocator.find(drained.first, Order::BLOCK).is_some()
        {
            return Err(Problem::NotMarked(drained));
        }
        Ok(())
    }
}
