//! Fresh anonymous memory that replaces other memory.
//!
//! A *template* is a mapping that is never touched and has the policies of a region. `mremap` with
//! `MREMAP_DONTUNMAP` (Linux 5.7) puts a piece of it in place in one step, so no page is ever
//! allocated without the policies, and threads that may not set them (`mbind`) can discard.

use ebb_abi::{PAGE_SIZE_BYTES, Pfn};
use vm_memory::GuestAddress;

use crate::discard::Piece;
use crate::mapping::Mapping;
use crate::{Backing, GuestRange, HugePages, RamError, RegionSpec};

/// Size of a template in bytes: the maximum that one system call can replace.
const TEMPLATE_BYTES: u64 = 1 << 30;

/// A template for each region.
#[derive(Debug)]
pub(crate) struct FreshAnon(Vec<Mapping>);

impl FreshAnon {
    /// Templates with the policies of anonymous memory in these regions.
    pub(crate) fn new(regions: &[RegionSpec], huge_pages: HugePages) -> Result<Self, RamError> {
        let template = |spec: &RegionSpec| {
            let spec = RegionSpec {
                start: GuestAddress(0),
                size_bytes: spec.size_bytes.min(TEMPLATE_BYTES),
                host_node: spec.host_node,
            };
            Mapping::new(&spec, Backing::Anonymous, huge_pages)
        };
        Ok(Self(regions.iter().map(template).collect::<Result<_, _>>()?))
    }

    /// The templates.
    pub(crate) fn templates(&self) -> &[Mapping] {
        &self.0
    }

    /// Replaces `piece` by fresh memory, in parts of at most a template's size. Calls `done` after
    /// each part, since an error in a later one must not leave the earlier ones unrecorded.
    ///
    /// # Errors
    /// [`RamError::Discard`] if the kernel refuses.
    ///
    /// # Safety
    /// The piece must lie within guest memory of the region that it names, and nothing may rely on
    /// its content.
    pub(crate) unsafe fn put_over(
        &self,
        piece: &Piece<'_>,
        mut done: impl FnMut(GuestRange),
    ) -> Result<(), RamError> {
        let template = &self.0[piece.region];
        let step_pages = template.size_bytes() as u64 / PAGE_SIZE_BYTES;
        for first in (0..piece.range.pages).step_by(step_pages as usize) {
            let part = GuestRange::new(
                Pfn(piece.range.start.0 + first),
                step_pages.min(piece.range.pages - first),
            );
            let address = piece.address + (first * PAGE_SIZE_BYTES) as usize;
            // SAFETY: the part is guest memory on whose content nothing relies, as the caller
            // guarantees, and the template is a separate mapping.
            unsafe { template.copy_over(address, part.size_bytes() as usize) }.map_err(
                |source| RamError::Discard {
                    range: part,
                    call: "mremap(MREMAP_DONTUNMAP)",
                    source,
                },
            )?;
            done(part);
        }
        Ok(())
    }
}
