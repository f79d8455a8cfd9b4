//! Making memory huge again that merging has split.
//!
//! The kernel itself does not: khugepaged leaves a block alone of which a page is write-protected
//! (Linux mm/khugepaged.c, `hpage_collapse_scan_pmd`), as all small pages are that are tracked, and
//! one that lies in several mappings.

use std::io;
use std::sync::Arc;

use ebb_abi::HUGE_PAGE_SIZE_BYTES;
use rustix::io::Errno;

use super::session::{MergeError, MergeSession, is_huge_block, kernel};
use crate::collapse::advise_collapse;
use crate::{GuestRange, HugePages};

impl MergeSession {
    /// Makes one huge page of a block of 512 pages, all of which are present and none of which is
    /// merged. Returns true if it is one afterwards, and false if it is to stay as it is: the host
    /// or the configuration wants no huge pages, a page is in use or merged, or there is no memory.
    ///
    /// # Errors
    /// [`MergeError`]
    pub fn collapse(&mut self, block: GuestRange) -> Result<bool, MergeError> {
        let address = self.address(block)?;
        if !is_huge_block(block)
            || self.ram.huge_pages() == HugePages::Off
            || !self.ram.huge_allowed
        {
            return Ok(false);
        }
        let ram = Arc::clone(&self.ram);
        // As for a discard: the pages are replaced by another one.
        let Some(_permission) = ram.discard_permission() else { return Ok(false) };
        let (Some(merging), Some(mut overlaid)) = (ram.merging(), ram.lock_overlay()) else {
            return Ok(false);
        };
        if overlaid.mapped(block).next().is_some() {
            return Ok(false);
        }
        let parts = overlaid.vmas.parts(block);
        if parts.len() > 1 {
            let Some(piece) = ram.piece(block) else { return Ok(false) };
            if !self.join(merging, &mut overlaid, &piece, &parts) {
                return Ok(false);
            }
        }
        let size_bytes = HUGE_PAGE_SIZE_BYTES as usize;
        match merging.uffd.unprotect(address, size_bytes) {
            Ok(()) => {}
            // Not watched yet, because it has just become one mapping.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(kernel("stop tracking writes", block, error)),
        }
        match advise_collapse(address, size_bytes) {
            Ok(()) => Ok(true),
            Err(error @ (Errno::NOMEM | Errno::AGAIN | Errno::BUSY | Errno::INVAL)) => {
                tracing::debug!("{block} does not become a huge page: {error}");
                Ok(false)
            }
            Err(error) => Err(kernel("make a huge page", block, error.into())),
        }
    }
}
