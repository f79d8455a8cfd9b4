//! Where a [`LocalStore`](crate::LocalStore) has its stable pages.

use std::io;

use crate::{memory::Node, store::Slot};

/// Memory files with room for stable pages, by node.
pub trait Slots {
    /// Appends `pages` free slots of `node` ([`Node::ANY`]: wherever the kernel likes), neighbours
    /// in ascending order as far as possible. After an error none.
    fn allocate(&mut self, node: Node, pages: usize, slots: &mut Vec<Slot>) -> io::Result<()>;

    /// Fills as many neighbouring slots from `first` on as there are pages in `contents`. They were
    /// allocated and nobody has them mapped.
    fn write(&mut self, first: Slot, contents: &[u8]) -> io::Result<()>;

    /// Gives a slot, which nobody has mapped, back to the host.
    fn free(&mut self, slot: Slot);
}
