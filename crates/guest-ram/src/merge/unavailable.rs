//! Reasons why memory cannot be merged.

use std::io;

use crate::{Backing, RamError, UffdUnavailable};

/// Reason why the pages of a memory cannot be merged by the process that owns it. The memory itself
/// is not affected.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MergeUnavailable {
    /// The memory is of a kind that cannot be merged.
    #[error(
        "{backing} cannot be merged: memory is shared with other processes, whose view a merge \
         would not change, or comes from a pool of huge pages; use anonymous memory"
    )]
    Backing {
        /// Backing of the memory.
        backing: Backing,
    },

    /// The process may not use userfaultfd for accesses by the kernel, which KVM's are.
    #[error(
        "no permission for userfaultfd: /dev/userfaultfd: {device}; userfaultfd(2): {call}. Give \
         the process access to /dev/userfaultfd or the capability CAP_SYS_PTRACE, or set \
         vm.unprivileged_userfaultfd to 1"
    )]
    NoPermission {
        /// The error of opening the device.
        device: io::Error,
        /// The error of the system call.
        call: io::Error,
    },

    /// The kernel lacks userfaultfd, or a required feature of it.
    #[error(
        "this kernel has no {feature}; merging in the process that owns the memory needs Linux \
         {since} or later"
    )]
    OldKernel {
        /// The missing feature.
        feature: &'static str,
        /// The first version of Linux with it.
        since: &'static str,
    },

    /// There is swap, and the kernel has an error that concerns it.
    #[error(
        "this host has swap, and its kernel ({release}) may crash when merging moves pages that \
         are being swapped (CVE-2025-38242; mended in Linux 6.12.37, 6.15.5 and 6.16): use a newer \
         kernel, or switch swap off (swapoff -a)"
    )]
    Swap {
        /// The kernel's release.
        release: String,
    },

    /// The memory is locked.
    #[error(
        "guest memory is locked (mlock): pages that must stay in memory cannot be merged; do not \
         lock it"
    )]
    Locked,

    /// The process may have too few mappings.
    #[error(
        "vm.max_map_count is {found}, and merging needs at least {needed}, since each run of \
         merged pages is a mapping; raise it with sysctl"
    )]
    TooFewMappings {
        /// The actual value.
        found: u64,
        /// The required value.
        needed: u64,
    },

    /// A file in /proc could not be read.
    #[error("cannot open {path}: {source}; merging needs it to track writes to pages")]
    Proc {
        /// The file.
        path: &'static str,
        /// The system error.
        source: io::Error,
    },

    /// Another action was refused.
    #[error("cannot {action}: {source}")]
    Refused {
        /// The failed action.
        action: &'static str,
        /// The system error.
        source: io::Error,
    },

    /// The preparation of the memory failed.
    #[error(transparent)]
    Ram(#[from] RamError),

    /// Merging was enabled before.
    #[error("merging is already enabled for this memory")]
    Enabled,

    /// Merging was not enabled.
    #[error("merging was not enabled for this memory")]
    NotEnabled,

    /// Another session merges this memory.
    #[error("another session already merges this memory")]
    InUse,
}

impl From<UffdUnavailable> for MergeUnavailable {
    fn from(unavailable: UffdUnavailable) -> Self {
        match unavailable {
            UffdUnavailable::NoPermission { device, call } => Self::NoPermission { device, call },
            // Merging needs more of userfaultfd than its oldest version has.
            UffdUnavailable::OldKernel { feature, .. } => Self::OldKernel { feature, since: "6.8" },
            UffdUnavailable::Refused { action, source } => Self::Refused { action, source },
        }
    }
}
