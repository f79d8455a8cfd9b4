//! A scratch area for memory that replaces guest memory with the same content.

use std::io;

use ebb_abi::HUGE_PAGE_SIZE_BYTES;
use vm_memory::GuestAddress;

use crate::discard::Piece;
use crate::mapping::Mapping;
use crate::overlay::fresh_anon::FreshAnon;
use crate::{Backing, HugePages, RamError, RegionSpec};

/// A scratch area as large as a huge page.
#[derive(Debug)]
pub(crate) struct Scratch {
    area: Mapping,
    fresh: FreshAnon,
}

impl Scratch {
    /// Creates an area for pieces of these regions.
    ///
    /// # Errors
    /// As for [`GuestRam::new`](crate::GuestRam::new).
    pub(crate) fn new(regions: &[RegionSpec], huge_pages: HugePages) -> Result<Self, RamError> {
        let spec = RegionSpec {
            start: GuestAddress(0),
            size_bytes: HUGE_PAGE_SIZE_BYTES,
            host_node: None,
        };
        let area = Mapping::new(&spec, Backing::Anonymous, huge_pages)?;
        Ok(Self { area, fresh: FreshAnon::new(regions, huge_pages)? })
    }

    /// Empties the area and gives it the policies of `piece`'s region; returns its address.
    ///
    /// # Errors
    /// The kernel's error.
    pub(crate) fn empty_for(&self, piece: &Piece<'_>) -> io::Result<usize> {
        let template = &self.fresh.templates()[piece.region];
        // SAFETY: the area belongs to this value, and nothing relies on its content.
        unsafe { template.copy_over(self.area.address(), piece.range.size_bytes() as usize) }?;
        Ok(self.area.address())
    }

    /// Moves the pages of the area to the place of `piece`, which has at most as many pages as a
    /// huge page, as one mapping.
    ///
    /// # Errors
    /// The kernel's; nothing has been replaced then.
    ///
    /// # Safety
    /// The piece must lie within the region that it names, [`empty_for`](Self::empty_for) must have
    /// been called for it, and the area must contain its content, which must not change until this
    /// returns.
    pub(crate) unsafe fn put(&self, piece: &Piece<'_>) -> io::Result<()> {
        // SAFETY: the replacement has the same content, as the caller guarantees.
        unsafe { self.area.copy_over(piece.address, piece.range.size_bytes() as usize) }
    }

    /// Replaces `piece`, of at most a huge page's size, by memory that `fill` writes to before.
    ///
    /// # Errors
    /// The error of `fill` or of the kernel; nothing has been replaced then.
    ///
    /// # Safety
    /// The piece must lie within the region that it names, and `fill` must write its content, until
    /// this returns.
    pub(crate) unsafe fn put_copy(
        &self,
        piece: &Piece<'_>,
        fill: impl FnOnce(*mut u8) -> io::Result<()>,
    ) -> io::Result<()> {
        fill(self.empty_for(piece)? as *mut u8)?;
        // SAFETY: the area contains the data written by `fill`, as the caller guarantees.
        unsafe { self.put(piece) }
    }
}
