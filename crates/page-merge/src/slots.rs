//! Where stable pages are.

use std::io;

use ebb_guest_ram::merge::Freed;
use ebb_guest_ram::{StableMemory, StableSlot};

use crate::memory::Node;

/// Memory files with room for stable pages, by node.
pub trait Slots {
    /// Appends `pages` free slots of `node` ([`Node::ANY`]: wherever the kernel likes), neighbours
    /// in ascending order as far as possible. After an error none.
    fn allocate(&mut self, node: Node, pages: usize, slots: &mut Vec<StableSlot>)
    -> io::Result<()>;

    /// Fills as many neighbouring slots from `first` on as there are pages in `contents`. They were
    /// allocated and are not mapped.
    fn write(&mut self, first: StableSlot, contents: &[u8]) -> io::Result<()>;

    /// Copies a page that was written into `content`.
    fn read(&self, slot: StableSlot, content: &mut [u8]) -> io::Result<()>;

    /// Gives a slot, which is not mapped, back to the host. Returns the number of the segment if it
    /// was the last one of it, and the segment was closed.
    fn free(&mut self, slot: StableSlot) -> Option<u32>;

    /// Pages that the segments may have memory for, whether their slots are in use or not.
    fn capacity(&self) -> u64;
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

    fn capacity(&self) -> u64 {
        self.pages_in_use() + self.pages_kept()
    }
}
