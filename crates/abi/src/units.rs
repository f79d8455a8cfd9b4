//! Units of guest memory: page frame numbers, orders and ranges of pages.

use core::fmt;

/// Binary logarithm of [`PAGE_SIZE_BYTES`], which virtio-balloon fixes for every guest page size
/// (virtio 1.3 section 5.5.6, `VIRTIO_BALLOON_PFN_SHIFT`).
pub const PAGE_SHIFT: u32 = 12;

/// Size of a page, the unit of virtio-balloon, in bytes.
pub const PAGE_SIZE_BYTES: u64 = 1 << PAGE_SHIFT;

/// Size of the huge page that x86-64 and aarch64 (with 4 KiB pages) map with one entry, in bytes.
pub const HUGE_PAGE_SIZE_BYTES: u64 = 2 << 20;

/// [`HUGE_PAGE_SIZE_BYTES`] in pages.
pub const HUGE_PAGE_SIZE_PAGES: u64 = HUGE_PAGE_SIZE_BYTES / PAGE_SIZE_BYTES;

const _: () = assert!(HUGE_PAGE_SIZE_PAGES == Order::HUGE.pages());

/// A guest page frame number: a guest-physical address divided by [`PAGE_SIZE_BYTES`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(transparent)]
pub struct Pfn(pub u64);

impl Pfn {
    /// The frame that contains the guest-physical `address`.
    pub const fn containing(address: u64) -> Self {
        Self(address >> PAGE_SHIFT)
    }

    /// Guest-physical address of the frame's first byte.
    ///
    /// Frame numbers above 2^52 have no 64-bit address; the result then wraps, as it would in
    /// hardware.
    pub const fn address(self) -> u64 {
        self.0 << PAGE_SHIFT
    }

    /// Number of the 2 MiB block that the frame belongs to.
    pub const fn huge_block(self) -> u64 {
        self.0 / HUGE_PAGE_SIZE_PAGES
    }
}

impl From<u32> for Pfn {
    /// From a 32-bit frame number of the virtio-balloon queues.
    fn from(number: u32) -> Self {
        Self(u64::from(number))
    }
}

impl fmt::Display for Pfn {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "pfn {:#x}", self.0)
    }
}

/// Binary logarithm of a block's size in pages, as in Linux's buddy allocator.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(transparent)]
pub struct Order(pub u8);

impl Order {
    /// A single page.
    pub const PAGE: Self = Self(0);
    /// A 2 MiB block.
    pub const HUGE: Self = Self(9);

    /// Pages in a block of this order.
    pub const fn pages(self) -> u64 {
        1 << self.0
    }

    /// Bytes in a block of this order.
    pub const fn bytes(self) -> u64 {
        self.pages() * PAGE_SIZE_BYTES
    }
}

/// A contiguous, possibly empty range of page frames.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PageRange {
    /// First frame.
    pub start: Pfn,
    /// Length in pages.
    pub pages: u64,
}

impl PageRange {
    /// The range of `pages` frames from `start` on. Its end must not exceed frame number 2^64.
    pub const fn new(start: Pfn, pages: u64) -> Self {
        Self { start, pages }
    }

    /// The whole pages in the `size_bytes` bytes at `address`: both ends are rounded inwards.
    /// `None` if the bytes wrap around the end of the address space.
    pub const fn inside_bytes(address: u64, size_bytes: u64) -> Option<Self> {
        let Some(end) = address.checked_add(size_bytes) else { return None };
        let first = address.div_ceil(PAGE_SIZE_BYTES);
        let last = end >> PAGE_SHIFT;
        Some(Self { start: Pfn(first), pages: last.saturating_sub(first) })
    }

    /// The frame after the last one.
    pub const fn end(self) -> Pfn {
        Pfn(self.start.0.saturating_add(self.pages))
    }

    /// Length in bytes.
    pub const fn size_bytes(self) -> u64 {
        self.pages << PAGE_SHIFT
    }

    /// Whether the range is empty.
    pub const fn is_empty(self) -> bool {
        self.pages == 0
    }

    /// Whether the range contains `pfn`.
    pub const fn contains(self, pfn: Pfn) -> bool {
        pfn.0 >= self.start.0 && pfn.0 < self.end().0
    }

    /// The frames in both ranges; possibly empty.
    #[must_use]
    pub fn intersection(self, other: Self) -> Self {
        let start = self.start.max(other.start);
        let end = self.end().min(other.end());
        Self { start, pages: end.0.saturating_sub(start.0) }
    }

    /// The largest part of the range that consists of whole 2 MiB blocks; possibly empty.
    #[must_use]
    pub const fn whole_huge_blocks(self) -> Self {
        let first = self.start.0.next_multiple_of(HUGE_PAGE_SIZE_PAGES);
        let end = self.end().0 / HUGE_PAGE_SIZE_PAGES * HUGE_PAGE_SIZE_PAGES;
        Self { start: Pfn(first), pages: end.saturating_sub(first) }
    }
}

impl fmt::Display for PageRange {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "[{:#x}, {:#x})", self.start.address(), self.end().address())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_rounded_inwards_to_whole_pages() {
        assert_eq!(PageRange::inside_bytes(0x1000, 0x2000), Some(PageRange::new(Pfn(1), 2)));
        assert_eq!(PageRange::inside_bytes(0x1001, 0x2000), Some(PageRange::new(Pfn(2), 1)));
        assert_eq!(PageRange::inside_bytes(0x1001, 0x100).map(PageRange::is_empty), Some(true));
        assert_eq!(PageRange::inside_bytes(u64::MAX, 2), None);
    }

    #[test]
    fn only_whole_blocks_count_as_huge() {
        assert_eq!(
            PageRange::new(Pfn(511), 1026).whole_huge_blocks(),
            PageRange::new(Pfn(512), 1024)
        );
        assert!(PageRange::new(Pfn(1), 1022).whole_huge_blocks().is_empty());
        assert_eq!(PageRange::new(Pfn(0), 512).whole_huge_blocks(), PageRange::new(Pfn(0), 512));
    }

    #[test]
    fn intersection_of_disjoint_ranges_is_empty() {
        let low = PageRange::new(Pfn(0), 4);
        let high = PageRange::new(Pfn(4), 4);
        assert!(low.intersection(high).is_empty());
        assert_eq!(low.intersection(PageRange::new(Pfn(3), 9)), PageRange::new(Pfn(3), 1));
    }
}
