//! The allocator: free lists by order, split, merge, isolate, put back (Linux mm/page_alloc.c).
//!
//! Each function is one step under the zone's lock.

use std::collections::BTreeSet;

use crate::units::{Block, Order, Pfn};

/// What the Reported flag of a free block does when the block leaves its list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FlagOnRemoval {
    /// It is cleared, as it has to be.
    Cleared,
    /// It stays, and is there when the block is free again.
    Kept,
}

/// A zone's free memory.
#[derive(Clone, Debug)]
pub struct Allocator {
    pages: u32,
    /// Blocks are not isolated if that leaves fewer free pages than this.
    watermark_pages: u32,
    lists: Vec<BTreeSet<Pfn>>,
    reported: BTreeSet<Block>,
    flag_on_removal: FlagOnRemoval,
    free_pages: u32,
}

impl Allocator {
    /// An allocator of pages 0 to `pages`, none of them free, without a watermark.
    pub fn empty(pages: u32) -> Self {
        Self {
            pages,
            watermark_pages: 0,
            lists: vec![BTreeSet::new(); usize::from(Order::LARGEST.0) + 1],
            reported: BTreeSet::new(),
            flag_on_removal: FlagOnRemoval::Cleared,
            free_pages: 0,
        }
    }

    /// An allocator of pages 0 to `pages`, all of them free.
    pub fn new(pages: u32, watermark_pages: u32, flag_on_removal: FlagOnRemoval) -> Self {
        let mut allocator = Self { watermark_pages, flag_on_removal, ..Self::empty(pages) };
        for page in 0..pages {
            allocator.free(Block { first: Pfn(page), order: Order(0) });
        }
        allocator
    }

    /// Pages in all free lists.
    pub fn free_pages(&self) -> u32 {
        self.free_pages
    }

    /// Whether exactly this block is free.
    pub fn has(&self, block: Block) -> bool {
        self.list(block.order).contains(&block.first)
    }

    /// The free block of at least an order that a page is in.
    pub fn find(&self, page: Pfn, least: Order) -> Option<Block> {
        least.and_above().map(|order| Block::containing(page, order)).find(|&block| self.has(block))
    }

    /// All free blocks of at least an order.
    pub fn blocks(&self, least: Order) -> impl Iterator<Item = Block> {
        least
            .and_above()
            .flat_map(|order| self.list(order).iter().map(move |&first| Block { first, order }))
    }

    /// Takes a block of an order, splitting a larger one if there is none. `from_top` prefers high
    /// addresses.
    pub fn allocate(&mut self, order: Order, from_top: bool) -> Option<Block> {
        let from = order.and_above().find(|&order| !self.list(order).is_empty())?;
        let list = self.list(from);
        let block = if from_top {
            let end = list.last()?.0 + from.pages();
            Block { first: Pfn(end - order.pages()), order }
        } else {
            Block { first: *list.first()?, order }
        };
        self.take(block).then_some(block)
    }

    /// Takes this block, splitting the free block that it is in. Whether it is in one.
    pub fn take(&mut self, block: Block) -> bool {
        let Some(mut whole) = self.find(block.first, block.order) else { return false };
        self.remove(whole);
        while whole.order > block.order {
            let half = whole.first_half();
            let kept = if block.first < half.buddy().first { half } else { half.buddy() };
            self.insert(kept.buddy());
            whole = kept;
        }
        true
    }

    /// Gives a block back. Returns what it is a part of after merging.
    pub fn free(&mut self, block: Block) -> Block {
        let mut block = block;
        while block.order < Order::LARGEST && self.has(block.buddy()) {
            self.remove(block.buddy());
            block = block.parent();
        }
        self.insert(block);
        block
    }

    /// Takes out exactly this block (`__isolate_free_page`). False if it is not free or memory is
    /// short.
    #[must_use]
    pub fn isolate(&mut self, block: Block) -> bool {
        let enough = self.free_pages >= self.watermark_pages + block.order.pages();
        let taken = enough && self.has(block);
        if taken {
            self.remove(block);
        }
        taken
    }

    /// Marks a free block as known to the host.
    pub fn set_reported(&mut self, block: Block) {
        self.reported.insert(block);
    }

    /// Takes that back, because the block may have been merged.
    pub fn clear_reported(&mut self, block: Block) {
        self.reported.remove(&block);
    }

    /// Whether a free block is known to the host.
    pub fn is_reported(&self, block: Block) -> bool {
        self.reported.contains(&block)
    }

    /// Checks what has to hold between any two steps.
    pub fn validate(&self) -> Result<(), String> {
        let mut end = 0;
        let mut blocks: Vec<Block> = self.blocks(Order(0)).collect();
        blocks.sort_unstable();
        for &block in &blocks {
            if block != Block::containing(block.first, block.order) {
                return Err(format!("{block:?} is not aligned"));
            }
            if block.first.0 < end {
                return Err(format!("{block:?} overlaps the one before"));
            }
            end = block.first.0 + block.order.pages();
            if end > self.pages {
                return Err(format!("{block:?} is beyond the end"));
            }
            if block.order < Order::LARGEST && self.has(block.buddy()) {
                return Err(format!("{block:?} and its buddy are not merged"));
            }
        }
        let listed: u32 = blocks.iter().map(|block| block.order.pages()).sum();
        if listed != self.free_pages {
            return Err(format!(
                "{} pages are counted and {listed} are in the lists",
                self.free_pages
            ));
        }
        Ok(())
    }

    fn list(&self, order: Order) -> &BTreeSet<Pfn> {
        &self.lists[usize::from(order.0)]
    }

    fn insert(&mut self, block: Block) {
        self.lists[usize::from(block.order.0)].insert(block.first);
        self.free_pages += block.order.pages();
    }

    fn remove(&mut self, block: Block) {
        self.lists[usize::from(block.order.0)].remove(&block.first);
        self.free_pages -= block.order.pages();
        if self.flag_on_removal == FlagOnRemoval::Cleared {
            self.reported.remove(&block);
        }
    }
}
