//! Bitmaps of blocks: bit i is bit `i % 8` of byte `i / 8`.

use core::ops::Range;

use super::{MAX_BITMAP_BITS, MAX_PAGE_SHIFT};
use crate::{PAGE_SHIFT, PageRange, Pfn};

/// A run of consecutive set bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BitRun {
    /// Number of the first bit.
    pub first: u32,
    /// Number of bits, at least 1.
    pub bits: u32,
}

/// A bitmap for reading.
#[derive(Clone, Copy, Debug)]
pub struct Bitmap<'a> {
    bytes: &'a [u8],
    bits: u32,
}

impl<'a> Bitmap<'a> {
    /// The first `bits` bits of `bytes`; further bits in the last byte are ignored. `None` if
    /// `bytes` is too short.
    pub fn new(bytes: &'a [u8], bits: u32) -> Option<Self> {
        (bits.div_ceil(8) as usize <= bytes.len()).then_some(Self { bytes, bits })
    }

    /// The runs of set bits within `window`, in ascending order; a run that crosses the end of the
    /// window is cut there. Bits of the window beyond the bitmap count as clear.
    pub fn runs(self, window: Range<u32>) -> BitRuns<'a> {
        BitRuns { bitmap: self, next: window.start, end: window.end.min(self.bits) }
    }

    /// The 64 bits from bit `64 * index` on; bits beyond the bytes are 0.
    fn word(&self, index: usize) -> u64 {
        let rest = self.bytes.get(index * 8..).unwrap_or_default();
        match rest.first_chunk() {
            Some(bytes) => u64::from_le_bytes(*bytes),
            None => rest.iter().rev().fold(0, |word, byte| word << 8 | u64::from(*byte)),
        }
    }

    /// The first bit in `from..end` that is set after its word was XORed with `invert`; `end` if
    /// no bit is.
    fn find(&self, from: u32, end: u32, invert: u64) -> u32 {
        let mut index = from as usize / 64;
        let mut mask = u64::MAX << (from % 64);
        while index * 64 < end as usize {
            let word = (self.word(index) ^ invert) & mask;
            if word != 0 {
                return (index as u32 * 64 + word.trailing_zeros()).min(end);
            }
            index += 1;
            mask = u64::MAX;
        }
        end
    }
}

/// Iterator over the runs of a bitmap, see [`Bitmap::runs`].
#[derive(Clone, Debug)]
pub struct BitRuns<'a> {
    bitmap: Bitmap<'a>,
    next: u32,
    end: u32,
}

impl Iterator for BitRuns<'_> {
    type Item = BitRun;

    fn next(&mut self) -> Option<BitRun> {
        if self.next >= self.end {
            return None;
        }
        let first = self.bitmap.find(self.next, self.end, 0);
        let after = self.bitmap.find(first, self.end, u64::MAX);
        self.next = after;
        (first < after).then_some(BitRun { first, bits: after - first })
    }
}

/// A bitmap for writing.
#[derive(Debug)]
pub struct BitmapWriter<'a> {
    bytes: &'a mut [u8],
    start: Pfn,
    page_shift: u32,
    bits: u32,
}

impl<'a> BitmapWriter<'a> {
    /// An empty bitmap of `bits` bits at the start of `bytes`. Each bit stands for a block of
    /// `2^page_shift` bytes, the first one at `start`. `None` if `bytes` is too short or the
    /// bitmap is not valid in a message.
    pub fn new(bytes: &'a mut [u8], start: Pfn, page_shift: u32, bits: u32) -> Option<Self> {
        let order = page_shift.checked_sub(PAGE_SHIFT).filter(|_| page_shift <= MAX_PAGE_SHIFT)?;
        if bits > MAX_BITMAP_BITS || !start.0.is_multiple_of(1 << order) {
            return None;
        }
        let bytes = bytes.get_mut(..bits.div_ceil(8) as usize)?;
        bytes.fill(0);
        Some(Self { bytes, start, page_shift, bits })
    }

    /// Sets the bits of the whole blocks in `range` and returns their pages: an empty range if
    /// `range` contains no whole block of the bitmap's window.
    pub fn set(&mut self, range: PageRange) -> PageRange {
        let order = self.page_shift - PAGE_SHIFT;
        let window = PageRange::new(self.start, u64::from(self.bits) << order);
        let inside = range.intersection(window);
        if inside.is_empty() {
            return PageRange::new(range.start, 0);
        }
        let first = (inside.start.0 - self.start.0).div_ceil(1 << order) as usize;
        let end = ((inside.end().0 - self.start.0) >> order) as usize;
        if first >= end {
            return PageRange::new(range.start, 0);
        }
        let (first_byte, last_byte) = (first / 8, (end - 1) / 8);
        let first_mask = u8::MAX << (first % 8);
        let last_mask = u8::MAX >> (7 - (end - 1) % 8);
        if first_byte == last_byte {
            self.bytes[first_byte] |= first_mask & last_mask;
        } else {
            self.bytes[first_byte] |= first_mask;
            self.bytes[first_byte + 1..last_byte].fill(u8::MAX);
            self.bytes[last_byte] |= last_mask;
        }
        PageRange::new(
            Pfn(self.start.0 + ((first as u64) << order)),
            ((end - first) as u64) << order,
        )
    }
}
