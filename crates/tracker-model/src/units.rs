//! Page frame numbers, orders, blocks.

/// Number of a page frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Pfn(pub u32);

/// Base-2 logarithm of a block's number of pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Order(pub u8);

impl Order {
    /// Order of the largest blocks that the allocator has (x86: 4 MiB).
    pub const LARGEST: Self = Self(10);
    /// Order of the blocks that bitmaps and reporting deal in (x86: 2 MiB).
    pub const BLOCK: Self = Self(9);
    /// Largest order of the small blocks that are kept in a per-CPU list when freed
    /// (`PAGE_ALLOC_COSTLY_ORDER`).
    pub const COSTLY: Self = Self(3);

    /// Pages in a block.
    pub const fn pages(self) -> u32 {
        1 << self.0
    }

    /// All orders from this one to the largest.
    pub fn and_above(self) -> impl DoubleEndedIterator<Item = Self> {
        (self.0..=Self::LARGEST.0).map(Self)
    }

    /// Whether freed blocks go to a per-CPU list first.
    pub fn has_cpu_list(self) -> bool {
        self <= Self::COSTLY || self == Self::BLOCK
    }
}

/// A naturally aligned block of pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Block {
    /// Its first page.
    pub first: Pfn,
    /// Its size.
    pub order: Order,
}

impl Block {
    /// The block of an order that a page is in.
    #[must_use]
    pub const fn containing(page: Pfn, order: Order) -> Self {
        Self { first: Pfn(page.0 & !(order.pages() - 1)), order }
    }

    /// The other half of the next larger block.
    #[must_use]
    pub const fn buddy(self) -> Self {
        Self { first: Pfn(self.first.0 ^ self.order.pages()), order: self.order }
    }

    /// The next larger block that this one is a half of.
    #[must_use]
    pub const fn parent(self) -> Self {
        Self::containing(self.first, Order(self.order.0 + 1))
    }

    /// The first half.
    #[must_use]
    pub const fn first_half(self) -> Self {
        Self { first: self.first, order: Order(self.order.0 - 1) }
    }

    /// Its pages.
    pub fn pages(self) -> impl Iterator<Item = Pfn> {
        (self.first.0..self.first.0 + self.order.pages()).map(Pfn)
    }

    /// Its parts of an order that is not larger than its own.
    pub fn parts(self, order: Order) -> impl Iterator<Item = Self> {
        (self.first.0..self.first.0 + self.order.pages())
            .step_by(order.pages() as usize)
            .map(move |first| Self { first: Pfn(first), order })
    }
}
