//! Reasons why memory cannot be saved while it is in use.

use std::io;

use crate::{Backing, UffdUnavailable};

/// Reason why memory must not be written to while it is saved. The memory itself is not affected.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BackgroundUnavailable {
    /// The memory is of a kind that is not protected.
    #[error("{backing} is not protected against writes, only anonymous memory is")]
    Backing {
        /// Backing of the memory.
        backing: Backing,
    },

    /// Pages of a file's private mapping cannot be protected, and pages that are merged would be
    /// replaced meanwhile.
    #[error("parts of the memory are, or may become, private mappings of a file")]
    Overlay,

    /// The kernel may merge all pages of the process, which removes their protection.
    #[error("the kernel merges pages of this process (prctl(2), PR_SET_MEMORY_MERGE)")]
    KernelMerging,

    /// Which pages are protected is read there.
    #[error("/proc/self/pagemap cannot be read")]
    NoPagemap,

    /// The kernel does not report which pages are protected.
    #[error("this kernel does not report protected pages in /proc/self/pagemap (Linux 5.14 does)")]
    NotReported,

    /// No userfaultfd.
    #[error(transparent)]
    Userfaultfd(#[from] UffdUnavailable),

    /// It was not [enabled](crate::GuestRam::enable_background_saves).
    #[error("it was not enabled for this memory")]
    NotEnabled,

    /// It was enabled in the process that this one was forked from, and a userfaultfd belongs to the
    /// memory of one process.
    #[error("it was enabled before this process was forked, and not in it")]
    Forked,

    /// Another save of this memory is in progress.
    #[error("another save of this memory is in progress")]
    InUse,

    /// The memory could not be registered.
    #[error("cannot watch guest memory for writes: {source}")]
    Watch {
        /// The system error.
        source: io::Error,
    },
}
