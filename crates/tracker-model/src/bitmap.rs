//! Tracker `bitmap`: one bit for each block of [`Order::BLOCK`], set when it becomes free.

use std::collections::BTreeSet;

use crate::buddy::Allocator;
use crate::tracker::{Answer, Batch, Flaw, Losses, Path, Tracker, hold};
use crate::units::{Block, Order, Pfn};

/// The tracker's state.
#[derive(Clone, Debug)]
pub struct Bitmap {
    /// Number of blocks.
    blocks: usize,
    /// The set bits.
    bits: BTreeSet<usize>,
    /// Blocks that were marked before they were free.
    coming: BTreeSet<usize>,
    threshold: usize,
    batch_blocks: usize,
    cursor: usize,
    threshold_timer: bool,
    leftover_timer: bool,
    losses: Losses,
    flaw: Flaw,
}

impl Bitmap {
    /// A tracker that finds what is free already.
    pub fn new(
        pages: u32,
        threshold: usize,
        batch_blocks: usize,
        flaw: Flaw,
        allocator: &Allocator,
    ) -> Self {
        let blocks = pages.div_ceil(Order::BLOCK.pages()) as usize;
        let mut bitmap = Self {
            blocks,
            bits: BTreeSet::new(),
            coming: BTreeSet::new(),
            threshold,
            batch_blocks,
            cursor: 0,
            threshold_timer: false,
            leftover_timer: false,
            losses: Losses::default(),
            flaw,
        };
        if flaw != Flaw::NoSeeding {
            for bit in 0..blocks {
                let block = block_of(bit);
                if allocator
                    .find(block.first, Order::BLOCK)
                    .is_some_and(|found| !allocator.is_reported(found))
                {
                    bitmap.mark(bit);
                }
            }
        }
        bitmap
    }

    /// Whether the bit of the block is set that a page is in.
    pub fn is_marked(&self, page: Pfn) -> bool {
        self.bits.contains(&bit_of(page))
    }

    /// Sets the bit of the block that a page is in.
    pub fn mark_page(&mut self, page: Pfn) {
        self.mark(bit_of(page));
    }

    /// Clears that bit. Whether it was set.
    pub fn clear(&mut self, page: Pfn) -> bool {
        self.bits.remove(&bit_of(page))
    }

    fn mark(&mut self, bit: usize) {
        if self.bits.insert(bit) {
            self.losses.captured += 1;
            self.queue();
        }
    }

    fn queue(&mut self) {
        let set = self.bits.len();
        if set >= self.threshold {
            self.threshold_timer = true;
        } else if set > 0 && self.flaw != Flaw::NoLeftoverWalk {
            self.leftover_timer = true;
        }
    }

    /// Adds what is to be reported of a block that is held.
    pub(crate) fn name(&mut self, batch: &mut Batch, block: Block) {
        let parts: Vec<Block> =
            block.parts(Order::BLOCK).filter(|part| self.clear(part.first)).collect();
        if parts.len() == block.parts(Order::BLOCK).count() {
            batch.named.push(block);
        } else {
            batch.named.extend(parts);
        }
    }
}

fn bit_of(page: Pfn) -> usize {
    (page.0 >> Order::BLOCK.0) as usize
}

fn block_of(bit: usize) -> Block {
    Block { first: Pfn((bit as u32) << Order::BLOCK.0), order: Order::BLOCK }
}

impl Tracker for Bitmap {
    fn freed(&mut self, block: Block, _allocator: &Allocator) {
        if block.order.has_cpu_list() {
            return;
        }
        self.losses.frees += 1;
        for part in block.parts(block.order.min(Order::BLOCK)) {
            let bit = bit_of(part.first);
            if self.flaw != Flaw::NoSecondLook {
                self.coming.insert(bit);
            }
            self.mark(bit);
        }
    }

    fn merged(&mut self, block: Block, into: Block, path: Path) {
        if path == Path::CpuList {
            self.losses.frees += 1;
            if into.order >= Order::BLOCK {
                self.mark(bit_of(block.first));
            }
        }
    }

    fn begin(&mut self, _allocator: &Allocator) -> bool {
        let fired = std::mem::take(if self.threshold_timer {
            &mut self.threshold_timer
        } else {
            &mut self.leftover_timer
        });
        if fired {
            self.cursor = 0;
        }
        fired
    }

    fn fill(&mut self, allocator: &mut Allocator) -> Option<Batch> {
        let mut batch = Batch::default();
        while self.cursor < self.blocks && batch.named.len() < self.batch_blocks {
            let bit = self.cursor;
            self.cursor += 1;
            if !self.bits.contains(&bit) {
                continue;
            }
            if self.flaw == Flaw::IsolateUnchecked {
                self.bits.remove(&bit);
                batch.named.push(block_of(bit));
                continue;
            }
            let Some(block) = allocator.find(block_of(bit).first, Order::BLOCK) else {
                if !self.coming.remove(&bit) {
                    self.bits.remove(&bit);
                }
                continue;
            };
            if allocator.is_reported(block) {
                self.bits.remove(&bit);
            } else if hold(&mut batch, block, allocator, self.flaw) {
                self.name(&mut batch, block);
            } else {
                // Memory is short: what is left waits.
                self.cursor = self.blocks;
            }
        }
        if batch.named.is_empty() && self.cursor == self.blocks {
            if self.flaw != Flaw::NoSecondWalk {
                self.queue();
            }
            return None;
        }
        Some(batch)
    }

    fn answered(&mut self, named: &[Block], answer: Answer) {
        if answer == Answer::Failed {
            if self.flaw != Flaw::FailureForgotten {
                for part in named.iter().flat_map(|block| block.parts(Order::BLOCK)) {
                    self.bits.insert(bit_of(part.first));
                }
            }
            // The walk ends, and the next one begins later.
            self.cursor = self.blocks;
        }
    }

    fn put_back(&mut self, block: Block, _answer: Answer, allocator: &mut Allocator) {
        allocator.free(block);
    }

    fn losses(&self) -> Losses {
        self.losses
    }
}
