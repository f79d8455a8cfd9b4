//! Slots for stable pages.

use std::io;

use ebb_guest_ram::merge::Freed;
use ebb_guest_ram::{StableMemory, StableSlot};

use crate::memory::Node;

/// Memory files with room for stable pages, by node.
pub trait Slots {
    /// Appends `pages` free slots of `node` ([`Node::ANY`]: any node), neighbours in ascending
    /// order as far as possible; none after an error.
    fn allocate(&mut self, node: Node, pages: usize, slots: &mut Vec<StableSlot>)
    -> io::Result<()>;

    /// Fills neighbouring slots from `first` on, one for each page in `contents`. They were
    /// allocated and are not mapped.
    fn write(&mut self, first: StableSlot, contents: &[u8]) -> io::Result<()>;

    /// Copies a written page into `content`.
    fn read(&self, slot: StableSlot, content: &mut [u8]) -> io::Result<()>;

    /// Frees a slot that is not mapped. Returns the number of the segment if this was its last
    /// slot, and the segment was closed.
    fn free(&mut self, slot: StableSlot) -> Option<u32>;
}

impl Slots for StableMemory {
    fn allocate(
        &mut self,
        node: Node,
        pages: usize,
        slots: &mut Vec<StableSlot>,
    ) -> io::Result<()> {
        let node = (node != Node::ANY).then_some(node.0);
        let pages =
            u32::try_from(pages).map_err(|_| io::Error::from(io::ErrorKind::InvalidInput))?;
        Ok(Self::allocate(self, node, pages, slots)?)
    }

    fn write(&mut self, first: StableSlot, contents: &[u8]) -> io::Result<()> {
        Ok(Self::write(self, first, contents)?)
    }

    fn read(&self, slot: StableSlot, content: &mut [u8]) -> io::Result<()> {
        Ok(Self::read(self, slot, content)?)
    }

    fn free(&mut self, slot: StableSlot) -> Option<u32> {
        match Self::free(self, slot) {
            Freed::Segment(number) => Some(number),
            Freed::Kept | Freed::Punched | Freed::Unknown => None,
        }
    }
}
