//! Why memory cannot be merged here.

use std::io;

use crate::{Backing, RamError};

/// Why the pages of a memory cannot be merged by the process that owns it. The memory itself is not
/// affected.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MergeUnavailable {
    /// The memory is of a kind that cannot be merged.
    #[error(
        "{backing} cannot be merged: memory is shared with other processes, whose view a merge would not change, or comes \
         from a pool of huge pages; use anonymous memory"
    )]
    Backing {
        /// What backs the memory.
        backing: Backing,
    },

    /// The process may not use userfaultfd for accesses by the kernel, which KVM's are.
    #[error(
        "no permission for userfaultfd: /dev/userfaultfd: {device}; userfaultfd(2): {call}. Give the process access to \
         /dev/userfaultfd or the capability CAP_SYS_PTRACE, or set vm.unprivileged_userfaultfd to 1"
    )]
    NoPermission {
        /// What opening the device answered.
        device: io::Error,
        /// What the system call answered.
        call: io::Error,
    },

    /// The kernel lacks userfaultfd, or what is needed of it.
    #[error(
        "this kernel has no {feature}; merging in the process that owns the memory needs Linux {since} or later"
    )]
    OldKernel {
        /// What is missing.
        feature: &'static str,
        /// Since when Linux has it.
        since: &'static str,
    },

    /// The memory is locked.
    #[error(
        "guest memory is locked (mlock): pages that must stay in memory cannot be merged; do not lock it"
    )]
    Locked,

    /// The process may have too few mappings.
    #[error(
        "vm.max_map_count is {found}, and merging needs at least {needed}, since each run of merged pages is a mapping; \
         raise it with sysctl"
    )]
    TooFewMappings {
        /// What it is.
        found: u64,
        /// What it must be.
        needed: u64,
    },

    /// A file in /proc could not be read.
    #[error("cannot open {path}: {source}; merging needs it to learn which pages were written to")]
    Proc {
        /// The file.
        path: &'static str,
        /// The system error.
        source: io::Error,
    },

    /// Something else was refused.
    #[error("cannot {action}: {source}")]
    Refused {
        /// What was tried.
        action: &'static str,
        /// The system error.
        source: io::Error,
    },

    /// The memory's own preparation for it failed.
    #[error(transparent)]
    Ram(#[from] RamError),

    /// It was enabled before.
    #[error("merging is enabled for this memory already")]
    Enabled,

    /// It was not enabled.
    #[error("merging was not enabled for this memory")]
    NotEnabled,

    /// Somebody merges already.
    #[error("this memory is being merged by somebody else already")]
    InUse,
}
