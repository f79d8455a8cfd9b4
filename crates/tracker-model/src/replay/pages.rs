//! What the pages of a zone are used for, as ranges.

use std::collections::BTreeMap;

use crate::units::{Block, Order, Pfn};

/// What a page is used for, as far as a recording shows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PageUse {
    /// No event has named it: in use, in a per-CPU list, or freed just before the recording.
    Unknown,
    /// In the free lists.
    Free,
    /// It has left the free lists: in a per-CPU list, or handed to a caller that no event shows.
    Removed,
    /// A caller of the allocator has it.
    Allocated,
    /// Freed: in a per-CPU list, or on its way to the free lists, or there already.
    Coming,
    /// Isolated by something other than a tracker.
    Taken,
    /// Isolated by a tracker.
    Held,
}

/// Consecutive pages with the same use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// The first one.
    pub first: u32,
    /// The one after the last.
    pub end: u32,
    /// Their use.
    pub used: PageUse,
}

/// Uses of pages. Memory is in proportion to the changes, whatever the size of memory.
#[derive(Clone, Debug, Default)]
pub struct Pages {
    /// By first page: end and use. Pages in between are unknown.
    ranges: BTreeMap<u32, (u32, PageUse)>,
}

impl Pages {
    /// The uses of a block's pages, in order and without gaps.
    pub fn pieces(&self, block: Block) -> Vec<Piece> {
        let (first, end) = (block.first.0, block.first.0 + block.order.pages());
        let before = self.ranges.range(..first).next_back().filter(|(_, range)| range.0 > first);
        let mut pieces = Vec::new();
        let mut at = first;
        for (&start, &(stop, used)) in before.into_iter().chain(self.ranges.range(first..end)) {
            if start > at {
                pieces.push(Piece { first: at, end: start, used: PageUse::Unknown });
            }
            pieces.push(Piece { first: start.max(first), end: stop.min(end), used });
            at = stop;
        }
        if at < end {
            pieces.push(Piece { first: at, end, used: PageUse::Unknown });
        }
        pieces
    }

    /// The first page whose use is none of these.
    pub fn find_other(&self, block: Block, uses: &[PageUse]) -> Option<(Pfn, PageUse)> {
        let pieces = self.pieces(block);
        let other = pieces.iter().find(|piece| !uses.contains(&piece.used))?;
        Some((Pfn(other.first), other.used))
    }

    /// Gives all pages of a block this use.
    pub fn set(&mut self, block: Block, used: PageUse) {
        let (first, end) = (block.first.0, block.first.0 + block.order.pages());
        if let Some((&start, &(stop, other))) = self.ranges.range(..first).next_back()
            && stop > first
        {
            self.ranges.insert(start, (first, other));
            if stop > end {
                self.ranges.insert(end, (stop, other));
            }
        }
        while let Some((&start, &(stop, other))) = self.ranges.range(first..end).next() {
            self.ranges.remove(&start);
            if stop > end {
                self.ranges.insert(end, (stop, other));
            }
        }
        self.ranges.insert(first, (end, used));
    }
}

impl Piece {
    /// The largest aligned blocks that these pages are made of.
    pub fn blocks(self) -> impl Iterator<Item = Block> {
        let mut at = self.first;
        std::iter::from_fn(move || {
            let left = self.end - at;
            if left == 0 {
                return None;
            }
            let aligned = at.trailing_zeros().min(left.ilog2());
            let order = Order(aligned.min(u32::from(Order::LARGEST.0)) as u8);
            let block = Block { first: Pfn(at), order };
            at += order.pages();
            Some(block)
        })
    }
}
