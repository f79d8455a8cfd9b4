//! Pages that the device has initialized (docs/zeroed-pages.md): reports and inflated pages are
//! answered with what the guest needs not clear again.
//!
//! An answer covers a buffer as a whole: all of its pages, or none. One page that was kept, for
//! whatever reason, makes it none, and so does a mistake of the driver in it.

use ebb_abi::balloon::{Feature, Features};
use ebb_abi::{PAGE_SIZE_BYTES, PageRange, Pfn};
use ebb_guest_ram::GuestMemory;
use vm_memory::{Bytes, GuestAddress};

use crate::Balloon;
use crate::budget::Budget;
use crate::chain::{Chain, ChainReader, Directions};

/// Maximum number of descriptors for a bitmap that are used. Linux's proposed driver has one.
const MAX_PIECES: usize = 16;

/// Whether buffers of the inflate queue end with a bitmap for the device. The proposal numbers the
/// bits by the standard's arrays; the extension's messages have none.
pub(crate) const fn has_bitmaps(negotiated: Features) -> bool {
    negotiated.contains(Feature::DeviceInitOnInflate) && !negotiated.has_messages()
}

/// The bitmap with which a buffer of the inflate queue is answered.
#[derive(Debug)]
pub(crate) struct InitBitmap {
    /// Addresses and lengths in bytes of the parts of its place.
    pieces: Vec<(u64, u32)>,
    /// Page frame numbers in the buffer; each has a bit.
    numbers: usize,
    /// Whether all pages so far read as zeros.
    is_initialized: bool,
}

impl InitBitmap {
    /// Adds the result of a part of the buffer's pages.
    pub(crate) fn add(&mut self, is_initialized: bool) {
        self.is_initialized &= is_initialized;
    }

    /// Whether the device would write the bitmap into one of these pages.
    pub(crate) fn is_in(&self, ranges: &[PageRange]) -> bool {
        self.pieces.iter().any(|(address, length)| {
            let first = Pfn::containing(*address);
            let end = (address + u64::from(*length)).div_ceil(PAGE_SIZE_BYTES);
            let place = PageRange::new(first, end - first.0);
            ranges.iter().any(|range| !range.intersection(place).is_empty())
        })
    }

    /// Bytes of the pages whose bits are set in the first `written_bytes` bytes.
    pub(crate) fn initialized_bytes(&self, written_bytes: u32) -> u64 {
        let bits = self.numbers.min(written_bytes as usize * 8);
        u64::from(self.is_initialized) * bits as u64 * PAGE_SIZE_BYTES
    }

    /// Writes the bitmap; returns the number of bytes written. A place that is too short gets the
    /// bits that fit.
    pub(crate) fn write(&self, memory: &GuestMemory) -> u32 {
        let mut bits = vec![if self.is_initialized { 0xff } else { 0 }; self.numbers.div_ceil(8)];
        let unused = bits.len() * 8 - self.numbers;
        if let Some(last) = bits.last_mut() {
            *last &= 0xff >> unused;
        }
        let (mut rest, mut written) = (&bits[..], 0);
        for (address, length) in &self.pieces {
            let (part, after) = rest.split_at(rest.len().min(*length as usize));
            if memory.write_slice(part, GuestAddress(*address)).is_err() {
                break;
            }
            written += part.len() as u32;
            rest = after;
        }
        written
    }
}

impl Balloon {
    /// The used length of a report whose pages have been `discarded`, `named_bytes` in all.
    ///
    /// `mistakes` is the number of the driver's mistakes before the report was read.
    pub(crate) fn reported_length(
        &mut self,
        negotiated: Features,
        discarded: bool,
        named_bytes: u64,
        mistakes: u64,
    ) -> u32 {
        let is_initialized = negotiated.contains(Feature::DeviceInitReported)
            && discarded
            && self.faults.counts().total() == mistakes;
        let length = if is_initialized { u32::try_from(named_bytes).unwrap_or(0) } else { 0 };
        self.counters.initialized_bytes += u64::from(length);
        length
    }

    /// Finds the place for the bitmap of a buffer with this many page frame numbers.
    pub(crate) fn read_bitmap_place(
        &mut self,
        chain: Chain<'_>,
        numbers: usize,
        budget: &mut Budget,
    ) -> InitBitmap {
        let mut reader =
            ChainReader { memory: self.ram.memory(), budget, faults: &mut self.faults };
        let length = numbers.div_ceil(8) as u32;
        let pieces = reader.read_space(chain, length, MAX_PIECES, Directions::Both);
        InitBitmap { pieces, numbers, is_initialized: true }
    }
}
