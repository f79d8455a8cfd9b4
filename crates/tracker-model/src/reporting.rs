//! Tracker `reporting`: the kernel's own free page reporting (Linux mm/page_reporting.c).

use crate::buddy::Allocator;
use crate::tracker::{Answer, Batch, Flaw, Losses, Path, Tracker, hold};
use crate::units::{Block, Order};

/// The tracker's state.
#[derive(Clone, Debug)]
pub struct Reporting {
    requested: bool,
    batch_blocks: usize,
    /// Batches that a pass may report, in all.
    budget: usize,
    left: usize,
    flaw: Flaw,
}

impl Reporting {
    /// A tracker that begins with a pass over all that is free.
    pub fn new(batch_blocks: usize, budget: usize, flaw: Flaw) -> Self {
        Self { requested: true, batch_blocks, budget, left: 0, flaw }
    }
}

impl Tracker for Reporting {
    fn freed(&mut self, _block: Block, _allocator: &Allocator) {}

    fn merged(&mut self, _block: Block, into: Block, _path: Path) {
        if into.order >= Order::BLOCK {
            self.requested = true;
        }
    }

    fn begin(&mut self, _allocator: &Allocator) -> bool {
        self.left = self.budget;
        std::mem::take(&mut self.requested)
    }

    fn fill(&mut self, allocator: &mut Allocator) -> Option<Batch> {
        let unreported: Vec<Block> = allocator
            .blocks(Order::BLOCK)
            .filter(|&block| !allocator.is_reported(block))
            .take(self.batch_blocks)
            .collect();
        if unreported.is_empty() {
            return None;
        }
        if self.left == 0 {
            self.requested |= self.flaw != Flaw::BudgetEndsAll;
            return None;
        }
        self.left -= 1;
        let mut batch = Batch::default();
        for block in unreported {
            if !hold(&mut batch, block, allocator, self.flaw) {
                break;
            }
            batch.named.push(block);
        }
        // Memory is short: nothing could be taken, and the next free asks again.
        (!batch.named.is_empty()).then_some(batch)
    }

    fn answered(&mut self, _named: &[Block], answer: Answer) {
        if answer == Answer::Failed {
            // The kernel gives up until the next free.
            self.left = 0;
        }
    }

    fn put_back(&mut self, block: Block, answer: Answer, allocator: &mut Allocator) {
        let into = allocator.free(block);
        if answer == Answer::Discarded && (into == block || self.flaw == Flaw::FlagOnMerged) {
            allocator.set_reported(into);
        }
    }

    fn losses(&self) -> Losses {
        Losses::default()
    }
}
