//! The three encodings of page sets, and the choice of the shortest.

use super::{HEADER_BYTES, MAX_BITMAP_BITS, MAX_PAGE_SHIFT, MAX_PFNS, MAX_RANGES, RANGE_BYTES};
use crate::balloon::{Feature, Features, PFN_BYTES};
use crate::{PAGE_SHIFT, PageRange};

/// How a message's payload names pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u16)]
pub enum Encoding {
    /// 32-bit page frame numbers, as on the standard's queues.
    Pfns = 1,
    /// A bit for each block of a window.
    Bitmap = 2,
    /// First page and number of pages.
    Ranges = 3,
}

impl Encoding {
    /// All encodings in the order of their numbers.
    pub const ALL: [Self; 3] = [Self::Pfns, Self::Bitmap, Self::Ranges];

    /// The encoding with this number.
    pub fn from_number(number: u16) -> Option<Self> {
        Self::ALL.into_iter().find(|encoding| *encoding as u16 == number)
    }

    /// Name in messages and metrics.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Pfns => "pfns",
            Self::Bitmap => "bitmap",
            Self::Ranges => "ranges",
        }
    }

    /// Whether messages may use the encoding with the features `negotiated`.
    pub const fn is_allowed(self, negotiated: Features) -> bool {
        match self {
            Self::Pfns => true,
            Self::Bitmap => negotiated.contains(Feature::PageBitmap),
            Self::Ranges => negotiated.contains(Feature::PageRanges),
        }
    }
}

/// The properties of a set of blocks that determine its message length in each encoding. A driver
/// updates them while it allocates, at a cost of a few instructions a block.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Shape {
    /// Pages in all blocks.
    pub pages: u64,
    /// Number of blocks; merged neighbours count once.
    pub ranges: u64,
    /// First page and the one after the last page.
    bounds: Option<(u64, u64)>,
    /// Bitwise or of all blocks' starts and ends: the lowest set bit is the alignment.
    alignment: u64,
}

impl Shape {
    /// Adds a block, which must not be in the set yet.
    pub fn add(&mut self, block: PageRange) {
        if block.is_empty() {
            return;
        }
        let (start, end) = (block.start.0, block.end().0);
        self.pages = self.pages.saturating_add(block.pages);
        self.ranges += 1;
        self.alignment |= start | end;
        self.bounds = Some(
            self.bounds.map_or((start, end), |(first, last)| (first.min(start), last.max(end))),
        );
    }

    /// The shape of a set of blocks.
    pub fn of(blocks: impl IntoIterator<Item = PageRange>) -> Self {
        let mut shape = Self::default();
        blocks.into_iter().for_each(|block| shape.add(block));
        shape
    }

    /// The largest page shift with which a bitmap can represent exactly these pages.
    pub fn page_shift(&self) -> u32 {
        (PAGE_SHIFT + self.alignment.trailing_zeros()).min(MAX_PAGE_SHIFT)
    }

    /// First page of the smallest window that contains all blocks.
    pub fn first_page(&self) -> u64 {
        self.bounds.map_or(0, |(first, _)| first)
    }

    /// Number of bits of a bitmap that starts at [`first_page`](Self::first_page) and has
    /// [`page_shift`](Self::page_shift).
    pub fn bits(&self) -> u64 {
        self.bounds.map_or(0, |(first, end)| (end - first) >> (self.page_shift() - PAGE_SHIFT))
    }

    /// Size in bytes of the message in an encoding, header included; `None` if the set does not
    /// fit into one message.
    pub fn message_bytes(&self, encoding: Encoding) -> Option<usize> {
        let (count, limit, bits_each) = match encoding {
            Encoding::Pfns => {
                let narrow = self.bounds.is_none_or(|(_, end)| end <= 1 << 32);
                (self.pages, if narrow { MAX_PFNS } else { 0 }, PFN_BYTES * 8)
            }
            Encoding::Bitmap => (self.bits(), MAX_BITMAP_BITS, 1),
            Encoding::Ranges => (self.ranges, MAX_RANGES, RANGE_BYTES * 8),
        };
        let count = u32::try_from(count).ok().filter(|count| (1..=limit).contains(count))?;
        Some(HEADER_BYTES + (count as usize * bits_each).div_ceil(8))
    }

    /// The allowed encoding with the shortest message; of equally short ones, the one that is
    /// cheapest to decode. `None` if the set is empty or does not fit into one message.
    pub fn shortest(&self, negotiated: Features) -> Option<Encoding> {
        [Encoding::Ranges, Encoding::Bitmap, Encoding::Pfns]
            .into_iter()
            .filter(|encoding| encoding.is_allowed(negotiated))
            .filter_map(|encoding| Some((self.message_bytes(encoding)?, encoding)))
            .min_by_key(|(bytes, _)| *bytes)
            .map(|(_, encoding)| encoding)
    }
}
