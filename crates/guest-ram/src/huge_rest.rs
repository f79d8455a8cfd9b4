//! The discarded parts of transparent huge pages.
//!
//! A huge page of which some pages were discarded no longer counts as resident in these parts, but
//! the host has their memory only when it splits the huge page, and it does that when it is already
//! short of memory (Linux mm/huge_memory.c, `deferred_split_folio`). Until then neither
//! `MemAvailable` nor another process has it.

use rustix::mm::{Advice, madvise};

use crate::{Backing, GuestRam};

impl GuestRam {
    /// Has the host split all huge pages of which parts were discarded, so that the memory of these
    /// parts is free now. Whole huge pages stay whole.
    ///
    /// There is no call for just this: `MADV_COLD` does it on the way (mm/madvise.c,
    /// `madvise_cold_or_pageout_pte_range`). What is resident becomes the first to be swapped out,
    /// so this is for guests that are idle. No content changes, and memory may be in use meanwhile.
    ///
    /// Only for anonymous memory; without effect on others, and where the host refuses, for example
    /// because the memory is locked.
    pub fn free_rest_of_huge_pages(&self) {
        if self.backing() != Backing::Anonymous {
            return;
        }
        for mapping in &self.mappings {
            // SAFETY: the range is the mapping's own; the advice does not change its content.
            let advised = unsafe {
                madvise(mapping.address() as *mut _, mapping.size_bytes(), Advice::LinuxCold)
            };
            if let Err(error) = advised {
                tracing::debug!("the host does not split huge pages: {error}");
            }
        }
    }
}
