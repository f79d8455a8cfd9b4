//! Giving merged pages memory of their own again.
//!
//! A page that still shares its stable page is to have anonymous memory with the same content, so
//! that it is like all other memory, and can be merged again. A copy is made elsewhere, and takes
//! the page's place in one step. What the guest writes between copy and step must not get lost, so
//! writes block meanwhile: for that while the stable mapping is registered with another
//! userfaultfd, whose write protection is not resolved by the kernel. The faults are not handled;
//! the threads that block are woken at the end.
//!
//! Devices that have pinned a page do not notice write protection. But a page that was pinned
//! for writing was given a copy by the kernel before, and pages with copies stay where they are.

use std::io;

use ebb_abi::{PAGE_SIZE_BYTES, Pfn};
use rustix::io::Errno;
use rustix::mm::{Advice, madvise};

use super::StableSlot;
use super::session::{MergeError, MergeSession, kernel};
use super::uffd::{Watch, must_succeed};
use crate::GuestRange;
use crate::overlay::FileExtents;
use crate::pagemap::PageState;

/// How often pages are brought into memory to look at them.
const LOOKS: u32 = 8;

impl MergeSession {
    /// Gives all pages of `block`, of no more pages than a huge page, anonymous memory again that
    /// hold shares. Those that were written to and have a copy keep it where it is.
    pub(super) fn unmerge_block(
        &self,
        overlaid: &mut FileExtents,
        block: GuestRange,
        released: &mut Vec<StableSlot>,
    ) -> Result<(), MergeError> {
        let parts: Vec<_> = overlaid.shares(block).map(|(part, _)| part).collect();
        for part in parts {
            let result = self.unmerge_part(overlaid, part, released);
            result.map_err(|error| kernel("give merged pages memory of their own", part, error))?;
        }
        Ok(())
    }

    fn unmerge_part(
        &self,
        overlaid: &mut FileExtents,
        part: GuestRange,
        released: &mut Vec<StableSlot>,
    ) -> io::Result<()> {
        let Some(piece) = self.ram.piece(part) else { return Ok(()) };
        let (address, size_bytes) = (piece.address, part.size_bytes() as usize);
        let waiting = &self.merging().waiting;
        // SAFETY: blocked threads are woken below, whatever happens in between.
        unsafe { waiting.watch(address, size_bytes, Watch::Writes) }?;
        let result = waiting
            .protect(address, size_bytes)
            .and_then(|()| self.replace_shares(overlaid, part, released));
        must_succeed("a mapping of stable pages cannot be released", || {
            waiting.forget(address, size_bytes)
        });
        must_succeed("who waits for a page of the guest cannot be woken", || {
            waiting.wake(address, size_bytes)
        });
        result
    }

    /// Replaces what still shares stable pages, while writes block.
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
                // SAFETY: private memory of as many pages as the share has, which nobody else
                // knows. It was just mapped: zeros.
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
            // SAFETY: the piece is guest memory that nobody writes to, and what replaces it has the
            // same content.
            unsafe { self.merging().scratch.put_copy(&piece, fill) }?;
            overlaid.note_moved_here(share, released);
        }
        Ok(())
    }

    /// States of the pages of `part`, all of which are in memory.
    fn states(&self, part: GuestRange) -> io::Result<Vec<PageState>> {
        let (Some(pagemap), Some(piece)) = (&self.ram.pagemap, self.ram.piece(part)) else {
            return Err(io::ErrorKind::Unsupported.into());
        };
        for _ in 0..LOOKS {
            // Where nothing is mapped, the protection leaves a marker that looks like a copy in
            // swap space. SAFETY: the part is guest memory; populating it for reading changes no
            // content. Reads do not wait.
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
            "the host takes pages away faster than they are looked at",
        ))
    }
}
