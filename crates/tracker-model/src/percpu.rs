//! Tracker `percpu`: an array of freed pages, scanned when it is full.

use crate::buddy::Allocator;
use crate::tracker::{Answer, Batch, Flaw, Losses, Path, Tracker, hold};
use crate::units::{Block, Order, Pfn};

/// The tracker's state.
#[derive(Clone, Debug)]
pub struct Percpu {
    entries: Vec<Pfn>,
    size: usize,
    batch_blocks: usize,
    /// The thread has the array.
    handed: bool,
    /// The thread has found out which blocks the entries are in.
    settled: bool,
    losses: Losses,
    flaw: Flaw,
}

impl Percpu {
    /// A tracker with an array of `size` entries.
    pub fn new(size: usize, batch_blocks: usize, flaw: Flaw) -> Self {
        Self {
            entries: Vec::new(),
            size,
            batch_blocks,
            handed: false,
            settled: false,
            losses: Losses::default(),
            flaw,
        }
    }

    /// Replaces pages by the blocks that they are in, each once.
    fn settle(&mut self, allocator: &Allocator) {
        self.settled = true;
        let mut blocks = Vec::new();
        for page in self.entries.drain(..) {
            match allocator.find(page, Order(0)) {
                Some(block) if block.order >= Order::BLOCK => blocks.push(block.first),
                Some(_) => self.losses.small += 1,
                None => self.losses.not_free += 1,
            }
        }
        blocks.sort_unstable();
        blocks.dedup();
        self.entries = blocks;
    }
}

impl Tracker for Percpu {
    fn freed(&mut self, block: Block, allocator: &Allocator) {
        self.losses.frees += 1;
        if self.handed {
            if self.flaw != Flaw::LossUncounted {
                self.losses.lost += 1;
            }
            return;
        }
        self.losses.captured += 1;
        self.entries.push(block.first);
        if self.entries.len() == self.size {
            self.entries.retain(|&page| allocator.find(page, Order(0)).is_some());
            self.losses.not_free += (self.size - self.entries.len()) as u32;
            self.handed = self.entries.len() > self.size - self.size / 8;
        }
    }

    fn merged(&mut self, _block: Block, _into: Block, _path: Path) {}

    fn begin(&mut self, _allocator: &Allocator) -> bool {
        // Full, or flushed by the timer.
        self.handed = !self.entries.is_empty();
        self.settled = false;
        self.handed
    }

    fn fill(&mut self, allocator: &mut Allocator) -> Option<Batch> {
        if !self.settled && self.flaw != Flaw::IsolateUnchecked {
            self.settle(allocator);
        }
        let mut batch = Batch::default();
        while batch.named.len() < self.batch_blocks {
            let Some(page) = self.entries.pop() else { break };
            if self.flaw == Flaw::IsolateUnchecked {
                batch.named.push(Block { first: page, order: Order(0) });
                continue;
            }
            let Some(block) = allocator.find(page, Order::BLOCK) else {
                self.losses.not_free += 1;
                continue;
            };
            if hold(&mut batch, block, allocator, self.flaw) {
                batch.named.push(block);
            } else {
                // Memory is short: the rest is given up.
                self.losses.lost += 1 + self.entries.len() as u32;
                self.entries.clear();
            }
        }
        if batch.named.is_empty() {
            self.handed = false;
            return None;
        }
        Some(batch)
    }

    fn answered(&mut self, named: &[Block], answer: Answer) {
        if answer == Answer::Failed {
            self.losses.lost += (named.len() + self.entries.len()) as u32;
            self.entries.clear();
        }
    }

    fn put_back(&mut self, block: Block, _answer: Answer, allocator: &mut Allocator) {
        allocator.free(block);
    }

    fn losses(&self) -> Losses {
        self.losses
    }
}
