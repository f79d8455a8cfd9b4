//! Tracker `percpu`: an array of freed pages, scanned when it is full.

use crate::buddy::Allocator;
use crate::tracker::{Answer, Batch, Flaw, Losses, Path, Tracker, hold};
use crate::units::{Block, Order, Pfn};

/// The tracker's state.
#[derive(Clone, Debug)]
pub struct Percpu {
    /// The hook's array.
    entries: Vec<Pfn>,
    /// The last entry, while it stands for its block of [`Order::BLOCK`].
    last: Option<Pfn>,
    size: usize,
    full_above: usize,
    batch_blocks: usize,
    /// There is no room before the thread's turn.
    full: bool,
    /// The thread's array.
    taken: Vec<Pfn>,
    losses: Losses,
    flaw: Flaw,
}

impl Percpu {
    /// A tracker with an array of `size` entries that is full if a scan leaves more than
    /// `full_above`.
    pub fn new(size: usize, full_above: usize, batch_blocks: usize, flaw: Flaw) -> Self {
        Self {
            entries: Vec::new(),
            last: None,
            size,
            full_above,
            batch_blocks,
            full: false,
            taken: Vec::new(),
            losses: Losses::default(),
            flaw,
        }
    }

    /// The array is full: keeps the blocks that are free by now.
    fn scan(&mut self, allocator: &Allocator) {
        let found: Vec<Option<Block>> =
            self.entries.drain(..).map(|page| allocator.find(page, Order(0))).collect();
        self.losses.not_free += found.iter().filter(|block| block.is_none()).count() as u32;
        self.entries = found.into_iter().flatten().map(|block| block.first).collect();
        self.entries.dedup();
        self.last = None;
        self.full = self.entries.len() > self.full_above;
    }

    /// Replaces the pages that the thread has by the blocks that they are in, each once.
    fn settle(&mut self, allocator: &Allocator) {
        let mut blocks = Vec::new();
        for page in self.taken.drain(..) {
            match allocator.find(page, Order(0)) {
                Some(block) if block.order >= Order::BLOCK => blocks.push(block.first),
                Some(_) => self.losses.small += 1,
                None => self.losses.not_free += 1,
            }
        }
        blocks.sort_unstable();
        blocks.dedup();
        self.taken = blocks;
    }
}

impl Tracker for Percpu {
    fn freed(&mut self, block: Block, allocator: &Allocator) {
        self.losses.frees += 1;
        let in_block = |page| Block::containing(page, Order::BLOCK);
        if self.last.map(in_block) == Some(in_block(block.first)) {
            self.losses.again += 1;
            return;
        }
        if self.full {
            if self.flaw != Flaw::LossUncounted {
                self.losses.lost += 1;
            }
            return;
        }
        self.losses.captured += 1;
        self.entries.push(block.first);
        self.last = Some(block.first);
        if self.entries.len() == self.size {
            self.scan(allocator);
        }
    }

    fn merged(&mut self, _block: Block, _into: Block, _path: Path) {}

    fn begin(&mut self, allocator: &Allocator) -> bool {
        // The array is full, or a timer hands it over.
        self.taken = std::mem::take(&mut self.entries);
        self.full = false;
        if self.flaw != Flaw::LastEntryKept {
            self.last = None;
        }
        if self.flaw != Flaw::IsolateUnchecked {
            self.settle(allocator);
        }
        !self.taken.is_empty()
    }

    fn fill(&mut self, allocator: &mut Allocator) -> Option<Batch> {
        let mut batch = Batch::default();
        while batch.named.len() < self.batch_blocks {
            let Some(page) = self.taken.pop() else { break };
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
                self.losses.lost += 1 + self.taken.len() as u32;
                self.taken.clear();
            }
        }
        (!batch.named.is_empty()).then_some(batch)
    }

    fn answered(&mut self, named: &[Block], answer: Answer) {
        if answer == Answer::Failed {
            self.losses.lost += (named.len() + self.taken.len()) as u32;
            self.taken.clear();
        }
    }

    fn put_back(&mut self, block: Block, _answer: Answer, allocator: &mut Allocator) {
        allocator.free(block);
    }

    fn losses(&self) -> Losses {
        self.losses
    }
}
