//! Merging in the process that owns the memory: [`Memory`](crate::Memory) over guest memory, and
//! [`Slots`](crate::Slots) over memory files.
//!
//! What makes it right, the freezing of pages while they are compared, is in `ebb-guest-ram`
//! (`merge`), since it takes unsafe code; here is what the core calls it.

mod memory;
mod slots;

pub use ebb_guest_ram::{MergeError, MergeUnavailable, StableSegments};
pub use memory::OwnerMemory;
pub use slots::OwnSlots;

#[cfg(test)]
mod tests;
