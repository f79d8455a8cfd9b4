//! Reads the content of a driver's chain.

use ebb_abi::PageRange;
use ebb_guest_ram::GuestMemory;
use virtio_queue::DescriptorChain;
use vm_memory::{Bytes, GuestMemoryBackend};

use crate::budget::Budget;
use crate::counters::{Faults, GuestError};

/// A descriptor chain in guest memory.
pub(crate) type Chain<'a> = DescriptorChain<&'a GuestMemory>;

/// Maximum number of descriptors read of a chain. Linux uses 1 for page frame numbers and 32 for
/// reports; the bound keeps indirect tables of 65535 entries, which a driver can slip in after the
/// check for them, from costing more than the driver paid for them.
const MAX_DESCRIPTORS: usize = 4096;

/// Direction of a buffer: from driver to device or from device to driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Direction {
    Readable,
    Writable,
}

/// Directions that a chain's descriptors may have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Directions {
    /// Only the one that is read; others are mistakes.
    One,
    /// Both: the rest is read separately.
    Both,
}

/// Context for reading the queues' descriptors.
pub(crate) struct ChainReader<'a> {
    pub(crate) memory: &'a GuestMemory,
    pub(crate) budget: &'a mut Budget,
    pub(crate) faults: &'a mut Faults,
}

impl ChainReader<'_> {
    /// Appends the bytes of the readable descriptors to `bytes`, at most `limit_bytes`, across
    /// descriptor boundaries.
    pub(crate) fn read_bytes(
        &mut self,
        chain: Chain<'_>,
        limit_bytes: usize,
        allowed: Directions,
        bytes: &mut Vec<u8>,
    ) {
        bytes.clear();
        self.for_each(chain, Direction::Readable, allowed, |reader, address, length| {
            let room = limit_bytes - bytes.len();
            if length as usize > room {
                reader
                    .faults
                    .count(GuestError::OversizedChain, format_args!("over {limit_bytes} bytes"));
            }
            let count = room.min(length as usize);
            if !reader.memory.check_range(address, count) {
                reader.faults.count(
                    GuestError::BadAddress,
                    format_args!("{count} bytes at {:#x}", address.0),
                );
                return false;
            }
            let start = bytes.len();
            bytes.resize(start + count, 0);
            if let Err(error) = reader.memory.read_slice(&mut bytes[start..], address) {
                bytes.truncate(start);
                reader.faults.count(GuestError::BadAddress, error);
                return false;
            }
            count == length as usize
        });
    }

    /// Reads the whole pages in the writable descriptors into `ranges`; returns their size in bytes,
    /// with repeated ones.
    pub(crate) fn read_ranges(&mut self, chain: Chain<'_>, ranges: &mut Vec<PageRange>) -> u64 {
        ranges.clear();
        self.for_each(chain, Direction::Writable, Directions::One, |reader, address, length| {
            let Some(range) = PageRange::inside_bytes(address.0, u64::from(length)) else {
                reader.faults.count(
                    GuestError::OutsideRam,
                    format_args!("{length} bytes at {:#x}", address.0),
                );
                return true;
            };
            if range.size_bytes() != u64::from(length) {
                reader.faults.count(
                    GuestError::UnalignedRange,
                    format_args!("{length} bytes at {:#x}", address.0),
                );
            }
            ranges.push(range);
            true
        });
        ranges.iter().map(|range| range.size_bytes()).sum()
    }

    /// Locates the first `wanted_bytes` bytes of the writable descriptors, in at most `limit`
    /// pieces; fewer bytes if guest memory holds fewer of them.
    pub(crate) fn read_space(
        &mut self,
        chain: Chain<'_>,
        wanted_bytes: u32,
        limit: usize,
        allowed: Directions,
    ) -> Vec<(u64, u32)> {
        let mut pieces: Vec<(u64, u32)> = Vec::new();
        let mut room = wanted_bytes;
        self.for_each(chain, Direction::Writable, allowed, |reader, address, length| {
            let taken = room.min(length);
            if pieces.len() == limit || !reader.memory.check_range(address, taken as usize) {
                return false;
            }
            if taken > 0 {
                pieces.push((address.0, taken));
            }
            room -= taken;
            room > 0
        });
        pieces
    }

    /// Calls `visit` with the address and length of each descriptor of a direction until it returns
    /// false.
    fn for_each(
        &mut self,
        chain: Chain<'_>,
        direction: Direction,
        allowed: Directions,
        mut visit: impl FnMut(&mut Self, vm_memory::GuestAddress, u32) -> bool,
    ) {
        let mut descriptors = 0;
        let mut usable = false;
        for descriptor in chain {
            if descriptors == MAX_DESCRIPTORS {
                self.faults.count(
                    GuestError::OversizedChain,
                    format_args!("over {MAX_DESCRIPTORS} descriptors"),
                );
                break;
            }
            descriptors += 1;
            let actual =
                if descriptor.is_write_only() { Direction::Writable } else { Direction::Readable };
            if actual != direction {
                if allowed == Directions::One {
                    self.faults
                        .count(GuestError::WrongDirection, format_args!("{actual:?} descriptor"));
                }
                continue;
            }
            usable |= descriptor.len() > 0;
            if !visit(self, descriptor.addr(), descriptor.len()) {
                break;
            }
        }
        self.budget.spend(descriptors);
        if !usable {
            self.faults.count(GuestError::EmptyChain, format_args!("{descriptors} descriptors"));
        }
    }
}
