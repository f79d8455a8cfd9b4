//! Replaces merged pages that were written to by anonymous memory, so that they can be merged
//! again.
//!
//! The write has made a private copy of such a page, in front of the stable page, within a mapping
//! of the stable file. The kernel moves no pages of such mappings (Linux mm/userfaultfd.c,
//! `validate_move_areas`), so it cannot be frozen and compared there. It is copied once more, into
//! anonymous memory, which replaces it: from then on it is an ordinary page.
//!
//! Writes between copy and replacement must not be lost:
//!
//! - Processors, of the guest and of the monitor, block: meanwhile the place is write-protected by
//!   a userfaultfd whose protection is not resolved by the kernel, as when pages are
//!   [unmerged](super::unmerge). The replacement itself is one system call, and a write that was
//!   blocked before it finds the new page after it.
//! - The kernel's own writes for the guest go through the same page tables, or are notified of
//!   the change (MMU notifiers).
//! - A device that has pinned a page is affected by neither, and the kernel does not report which
//!   pages are pinned. A monitor that lets a device pin memory must [inhibit
//!   discards](crate::GuestRam::inhibit_discard), which would remove pages under the device in the
//!   same way. So nothing is reanonymized while discards are inhibited, and a new inhibitor waits
//!   for the end of a replacement in progress.
//! - Discards wait: they need the lock that is held here.

use std::io;
use std::ptr;

use ebb_abi::Pfn;

use super::schedule::Found;
#[cfg(feature = "testing")]
use super::schedule::Protection;
use super::session::{MergeSession, PageLook};
use crate::GuestRange;
use crate::discard::Piece;
use crate::overlay::FileExtents;
use crate::uffd::{Watch, must_succeed};

impl MergeSession {
    /// Records the result of scanning `block`, and reanonymizes copies that have waited for long
    /// enough.
    pub(super) fn tend_copies(&mut self, block: GuestRange, looks: &[PageLook]) {
        let number = block.start.huge_block();
        let is_new = |look: &PageLook| matches!(look, PageLook::Broken(_));
        let found = if looks.iter().any(is_new) {
            Found::New
        } else if looks.contains(&PageLook::Copied) {
            Found::Known
        } else {
            return self.copies.forget(number);
        };
        if !self.copies.is_due(number, found) {
            return;
        }
        let is_copy = |look: &PageLook| is_new(look) || *look == PageLook::Copied;
        let pages = (block.start.0..)
            .zip(looks)
            .filter(|(_, look)| is_copy(look))
            .map(|(page, _)| Pfn(page));
        if self.reanonymize(&pages.collect::<Vec<_>>()) {
            self.copies.forget(number);
        } else {
            self.copies.try_later(number);
        }
    }

    /// Reanonymizes those of `pages` (ascending, and of one region) that still have copies in front
    /// of stable pages. Returns true if none is left.
    fn reanonymize(&self, pages: &[Pfn]) -> bool {
        // Before the lock, as for a discard.
        let Some(_permission) = self.ram.discard_permission() else { return false };
        let Some(mut overlaid) = self.ram.lock_overlay() else { return true };
        let is_copy =
            |page: &&Pfn| overlaid.is_stable_mapped(**page) && overlaid.share_of(**page).is_none();
        let copies: Vec<Pfn> = pages.iter().filter(is_copy).copied().collect();
        let mut is_all = true;
        for run in copies.chunk_by(|left, right| left.0 + 1 == right.0) {
            let range = GuestRange::new(run[0], run.len() as u64);
            let may = |overlaid: &FileExtents| overlaid.may_reanonymize(range);
            if !self.merging().may(self.ram.regions(), &mut overlaid, may) {
                is_all = false;
                continue;
            }
            if let Err(error) = self.reanonymize_run(&mut overlaid, range) {
                tracing::debug!("{range} cannot be reanonymized: {error}");
                return false;
            }
        }
        is_all
    }

    fn reanonymize_run(&self, overlaid: &mut FileExtents, range: GuestRange) -> io::Result<()> {
        let Some(piece) = self.ram.piece(range) else { return Ok(()) };
        #[cfg(feature = "testing")]
        if self.protection == Protection::No {
            // SAFETY: not upheld: this is the control of a test, which counts the writes that are
            // lost in its own memory.
            unsafe { self.put_copy(&piece) }?;
            overlaid.note_reanonymized(range);
            return Ok(());
        }
        let (address, size_bytes) = (piece.address, range.size_bytes() as usize);
        let waiting = &self.merging().waiting;
        // SAFETY: blocked threads are woken below, whatever happens in between.
        let result = unsafe { waiting.watch(address, size_bytes, Watch::Writes) }
            .and_then(|()| waiting.protect(address, size_bytes))
            .and_then(|()| {
                // SAFETY: the piece is guest memory that no processor writes to now, and that no
                // device has pinned; otherwise discards would be inhibited.
                unsafe { self.put_copy(&piece) }
            })
            .inspect(|()| overlaid.note_reanonymized(range));
        must_succeed("pages being reanonymized cannot be released", || {
            waiting.forget(address, size_bytes)
        });
        must_succeed("threads that wait for a guest page cannot be woken", || {
            waiting.wake(address, size_bytes)
        });
        result
    }

    /// Replaces `piece` by anonymous memory with the same content.
    ///
    /// # Errors
    /// The kernel's error; nothing has been replaced then.
    ///
    /// # Safety
    /// The piece must lie within the region that it names, its content must not change until this
    /// returns, and a device must not write to pinned pages of it any more.
    unsafe fn put_copy(&self, piece: &Piece<'_>) -> io::Result<()> {
        let fill = |copy: *mut u8| {
            // SAFETY: both are memory of as many bytes, read and written through pointers only; the
            // scratch area is not guest memory.
            unsafe {
                ptr::copy_nonoverlapping(
                    piece.address as *const u8,
                    copy,
                    piece.range.size_bytes() as usize,
                );
            };
            Ok(())
        };
        // SAFETY: the copy is the piece's content, as the caller guarantees.
        unsafe { self.merging().scratch.put_copy(piece, fill) }
    }
}
