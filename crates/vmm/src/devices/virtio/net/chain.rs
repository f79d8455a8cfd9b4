//! The memory of a driver's chain.

use ebb_guest_ram::GuestMemory;
use virtio_queue::DescriptorChain;
use vm_memory::GuestAddress;

use super::parts::{MAX_PARTS, Parts};

/// Most descriptors of a chain that are looked at. An indirect table may have many more.
const MAX_DESCRIPTORS: usize = 1024;

/// The side that writes to a chain's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Direction {
    /// The device writes.
    ToGuest,
    /// The device reads.
    FromGuest,
}

/// Why a chain cannot be used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Unusable {
    /// It is not memory, or has very many descriptors.
    Invalid,
    /// It does not fit behind the parts that are there.
    TooManyParts,
}

/// Appends the memory of a chain's descriptors of that direction, without its first `skip` bytes.
/// After an error, some of them may have been appended.
pub(super) fn push(
    parts: &mut Parts,
    chain: DescriptorChain<&GuestMemory>,
    direction: Direction,
    skip: usize,
) -> Result<(), Unusable> {
    let mut skip = skip;
    for (index, descriptor) in chain.enumerate() {
        if index >= MAX_DESCRIPTORS {
            return Err(Unusable::Invalid);
        }
        if descriptor.is_write_only() != (direction == Direction::ToGuest) {
            continue;
        }
        let length = descriptor.len() as usize;
        let skipped = skip.min(length);
        skip -= skipped;
        if length == skipped {
            continue;
        }
        let address = descriptor.addr().0.checked_add(skipped as u64).ok_or(Unusable::Invalid)?;
        if parts.push(GuestAddress(address), length - skipped).is_none() {
            let full = parts.count() >= MAX_PARTS;
            return Err(if full { Unusable::TooManyParts } else { Unusable::Invalid });
        }
    }
    Ok(())
}
