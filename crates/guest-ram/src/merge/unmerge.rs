//! Unmerges pages.
//!
//! A page that still shares its stable page is given anonymous memory with the same content, so
//! that it is ordinary memory, and can be merged again. A copy is made elsewhere, and replaces the
//! page in one step. The guest's writes between copy and replacement must not be lost, so they
//! block: meanwhile the stable mapping is registered with another userfaultfd, whose write
//! protection is not resolved by the kernel. The faults are not handled; blocked threads are woken
//! at the end.
//!
//! Devices that have pinned a page are not affected by write protection. But the kernel made a
//! private copy of a page that was pinned for writing before, and pages with copies stay in place.

use std::io;

use ebb_abi::{PAGE_SIZE_BYTES, Pfn};
use rustix::io::Errno;
use rustix::mm::{Advice, madvise};

use super::StableSlot;
use super::session::{MergeError, MergeSession, kernel};
use crate::GuestRange;
use crate::overlay::FileExtents;
use crate::pagemap::PageState;
use crate::uffd::{Watch, must_succeed};

/// Number of attempts to bring pages into memory to examine them.
const LOOKS: u32 = 8;

impl MergeSession {
    /// Gives anonymous memory to all pages of `block`, of at most a huge page's size, that hold
    /// shares. Pages that were written to keep their copy in place.
    pub(super) fn unmerge_block(
        &self,
        overlaid: &mut FileExtents,
        block: GuestRange,
        released: &mut Vec<StableSlot>,
    ) -> Result<(), MergeError> {
        let parts: Vec<_> = overlaid.shares(block).map(|(part, _)| part).collect();
        for part in parts {
            let result = self.unmerge_part(overlaid, part, released);
            result.map_err(|error| kernel("unmerge pages", part, error))?;
        }
        Ok(())
    }

    fn unmerge_part(
        &self,
        overlaid: &mut FileExtents,
        part: GuestRange,
        released: &mut Vec<StableSlot>,
    ) -> io::Result<()> {
        self.while_writes_block(part, || self.replace_shares(overlaid, part, released))
    }

    /// Executes `act` while writes to `part`, for which stable files are mapped, block. `act` may
    /// replace the mappings.
    pub(super) fn while_writes_block(
        &self,
        part: GuestRange,
        act: impl FnOnce() -> io::Result<()>,
    ) -> io::Result<()> {
        let piece = self.ram.piece(part).ok_or(io::ErrorKind::NotFound)?;
        let (address, size_bytes) = (piece.address, part.size_bytes() as usize);
        let waiting = &self.merging().waiting;
        // SAFETY: blocked threads are woken below, whatever happens in between.
        unsafe { waiting.watch(address, size_bytes, Watch::Writes) }?;
        let result = waiting.protect(address, size_bytes).and_then(|()| act());
        must_succeed("a mapping of stable pages cannot be released", || {
            waiting.forget(address, size_bytes)
        });
        must_succeed("threads that wait for a guest page cannot be woken", || {
            waiting.wake(address, size_bytes)
        });
        result
    }

    /// Replaces pages that still share stable pages, while writes block.
    fn replace_shares(
        &self,
        overlaid: &mut FileExtents,
        part: GuestRange,
        released: &mut Vec<StableSlot>,
    ) -> io::Result<()> {
        for (page, state) in (part.start.0..).zip(self.states(part)?) {
            if state.is_private() {
                released.extend(overlaid.note_broken(Pfn(page)));
            }
        }
        let shares: Vec<_> = overlaid.shares(part).collect();
        for (share, first) in shares {
            let Some(piece) = self.ram.piece(share) else { continue };
            let fill = |content: *mut u8| {
                // SAFETY: private memory of as many pages as the share has, which no other code
                // uses. It was just mapped: zeros.
                let content =
                    unsafe { std::slice::from_raw_parts_mut(content, share.size_bytes() as usize) };
                for (index, page) in (0..).zip(content.chunks_mut(PAGE_SIZE_BYTES as usize)) {
                    self.merging()
                        .segments
                        .read(first.offset(index), page)
                        .map_err(io::Error::other)?;
                }
                Ok(())
            };
            // SAFETY: the piece is guest memory that is not written to, and its replacement has the
            // same content.
            unsafe { self.merging().scratch.put_copy(&piece, fill) }?;
            overlaid.note_moved_here(share, released);
        }
        Ok(())
    }

    /// States of the pages of `part`, all of which are in memory.
    pub(super) fn states(&self, part: GuestRange) -> io::Result<Vec<PageState>> {
        let (Some(pagemap), Some(piece)) = (&self.ram.pagemap, self.ram.piece(part)) else {
            return Err(io::ErrorKind::Unsupported.into());
        };
        for _ in 0..LOOKS {
            // Where nothing is mapped, the protection leaves a marker that looks like a copy in
            // swap space. SAFETY: the part is guest memory; populating it for reading changes no
            // content. Reads do not block.
            let result = unsafe {
                madvise(
                    piece.address as *mut _,
                    part.size_bytes() as usize,
                    Advice::LinuxPopulateRead,
                )
            };
            match result {
                Ok(()) | Err(Errno::INTR | Errno::AGAIN) => {}
                Err(error) => return Err(error.into()),
            }
            let states = pagemap.read(piece.address, part.pages as usize)?;
            if states.iter().all(|state| state.is_in_memory()) {
                return Ok(states);
            }
        }
        Err(io::Error::new(
            io::ErrorKind::WouldBlock,
            "the host reclaims pages faster than they can be examined",
        ))
    }
}
