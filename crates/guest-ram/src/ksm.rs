//! Merging by the host kernel (KSM) instead of the monitor.

use std::io;

use rustix::io::Errno;
use rustix::mm::{Advice, madvise};

use crate::mapping::Mapping;
use crate::overlay::Overlay;
use crate::{Backing, GuestRam, RamError};

/// Whether the kernel may merge guest memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KernelMerging {
    /// Its pages may be merged with pages of all other memory of the host with this advice,
    /// whatever its owner (`MADV_MERGEABLE`).
    Allow,
    /// Merged pages are unmerged now, and no page is merged any more (`MADV_UNMERGEABLE`).
    Forbid,
}

impl GuestRam {
    /// Advises the kernel whether it may merge this memory (Linux mm/ksm.c). This has no effect
    /// before its thread is started (/sys/kernel/mm/ksm/run).
    ///
    /// In [restored](Self::restore) memory, pages of the file are not merged, only those that the
    /// guest has written to. System call: `madvise`.
    ///
    /// # Errors
    /// [`RamError::NotMergeable`] if the memory belongs to files; [`RamError::NoKernelMerging`] if
    /// the kernel was built without it; [`RamError::Advise`] for other refusals, for example
    /// without memory for unmerging: some pages may still be merged then, and the call can be
    /// repeated.
    pub fn advise_mergeable(&self, merging: KernelMerging) -> Result<(), RamError> {
        if self.backing() != Backing::Anonymous {
            return Err(RamError::NotMergeable { backing: self.backing() });
        }
        // The memory that replaces restored pages needs the same advice as the rest, or would not
        // become one mapping with it.
        let templates = self.overlay.get().map_or(&[][..], Overlay::templates);
        self.mappings.iter().chain(templates).try_for_each(|mapping| advise(mapping, merging))?;
        if merging == KernelMerging::Allow {
            self.count_kernel_merged();
        }
        Ok(())
    }
}

fn advise(mapping: &Mapping, merging: KernelMerging) -> Result<(), RamError> {
    let (advice, name) = match merging {
        KernelMerging::Allow => (Advice::LinuxMergeable, "MADV_MERGEABLE"),
        KernelMerging::Forbid => (Advice::LinuxUnmergeable, "MADV_UNMERGEABLE"),
    };
    loop {
        // SAFETY: the range is the mapping's own; neither advice changes what it contains.
        match unsafe { madvise(mapping.address() as *mut _, mapping.size_bytes(), advice) } {
            Ok(()) => return Ok(()),
            Err(Errno::INTR) => {}
            Err(Errno::INVAL) => return Err(RamError::NoKernelMerging),
            Err(error) => {
                return Err(RamError::Advise { advice: name, source: io::Error::from(error) });
            }
        }
    }
}

#[cfg(test)]
mod tests;
