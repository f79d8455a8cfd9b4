//! Memory files of this process as the core's own store sees them.

use std::io;
use std::sync::Arc;

use ebb_guest_ram::{StableError, StableMemory, StableSegments, StableSlot};

use crate::memory::Node;
use crate::slots::Slots;
use crate::store::Slot;

impl From<StableSlot> for Slot {
    fn from(slot: StableSlot) -> Self {
        Self { segment: slot.segment, index: slot.index }
    }
}

impl From<Slot> for StableSlot {
    fn from(slot: Slot) -> Self {
        Self { segment: slot.segment, index: slot.index }
    }
}

/// Stable pages for the machines of this process, by node.
#[derive(Debug)]
pub struct OwnSlots {
    memory: StableMemory,
    slots: Vec<StableSlot>,
}

impl OwnSlots {
    /// Slots in files that are known as `segments`, which the machines' memories were enabled to be
    /// merged with.
    pub fn new(segments: Arc<StableSegments>) -> Self {
        Self { memory: StableMemory::own(segments), slots: Vec::new() }
    }

    /// Number of stable pages.
    pub fn pages_in_use(&self) -> u64 {
        self.memory.pages_in_use()
    }
}

impl Slots for OwnSlots {
    fn allocate(&mut self, node: Node, pages: usize, slots: &mut Vec<Slot>) -> io::Result<()> {
        let node = (node != Node::ANY).then_some(node.0);
        let pages =
            u32::try_from(pages).map_err(|_| io::Error::from(io::ErrorKind::InvalidInput))?;
        self.slots.clear();
        self.memory.allocate(node, pages, &mut self.slots).map_err(into_io)?;
        slots.extend(self.slots.iter().copied().map(Slot::from));
        Ok(())
    }

    fn write(&mut self, first: Slot, contents: &[u8]) -> io::Result<()> {
        self.memory.write(first.into(), contents).map_err(into_io)
    }

    fn free(&mut self, slot: Slot) {
        self.memory.free(slot.into());
    }
}

/// The system's answer if there is one, so that its kind can be told.
fn into_io(error: StableError) -> io::Error {
    let kind = match &error {
        StableError::Create { source, .. }
        | StableError::BindNode { source, .. }
        | StableError::Map { source, .. }
        | StableError::Write { source, .. } => source.kind(),
        _ => io::ErrorKind::InvalidInput,
    };
    io::Error::new(kind, error)
}
