//! Errors of KSM.

use std::io;
use std::path::PathBuf;

use super::knobs::Knob;

/// Reason why KSM cannot be used or changed.
#[derive(Debug, thiserror::Error)]
pub enum KsmError {
    /// The kernel lacks KSM.
    #[error(
        "this kernel cannot merge pages: {path} does not exist; use a kernel with CONFIG_KSM, or \
         merge=owner",
        path = path.display()
    )]
    Missing {
        /// The expected directory.
        path: PathBuf,
    },
    /// A file could not be read.
    #[error("cannot read {path}: {source}", path = path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The system error.
        source: io::Error,
    },
    /// A file has an invalid content.
    #[error(
        "{path} contains '{text}', which is not a valid value; merge=kernel cannot be used with \
         this kernel",
        path = path.display()
    )]
    Strange {
        /// The file.
        path: PathBuf,
        /// Its content.
        text: String,
    },
    /// The user may not change the settings.
    #[error(
        "cannot write to {path}: {source}; run as root to change KSM's settings",
        path = path.display()
    )]
    Permission {
        /// The file.
        path: PathBuf,
        /// The system error.
        source: io::Error,
    },
    /// A setting of later kernels.
    #[error(
        "this kernel's KSM has no setting '{knob}', which requires Linux {since}; leave it \
         unchanged, or use a newer kernel",
        knob = knob.name(),
        since = knob.since()
    )]
    NoKnob {
        /// The setting.
        knob: Knob,
    },
    /// A setting that can only be changed while no page is merged.
    #[error(
        "'{knob}' can only be changed while KSM shares no page, and it shares {pages_shared}; \
         unmerge first (run=unmerge) and let no other process merge pages meanwhile",
        knob = knob.name()
    )]
    Busy {
        /// The setting.
        knob: Knob,
        /// Number of pages that are still shared, as far as known.
        pages_shared: u64,
    },
    /// Unmerging is not complete.
    #[error(
        "KSM still shares {pages_shared} pages after unmerging; free some memory and try again"
    )]
    StillShared {
        /// Number of shared pages.
        pages_shared: u64,
    },
    /// The kernel refused a value.
    #[error(
        "the kernel rejected {value} for KSM's '{knob}': {source}",
        knob = knob.name(),
        value = knob.text(*value)
    )]
    Refused {
        /// The setting.
        knob: Knob,
        /// The value.
        value: u64,
        /// The system error.
        source: io::Error,
    },
    /// Virtual machines of another trust domain are merged by the kernel.
    #[error(
        "the kernel merges pages of the trust domain '{present}' on this host (process {pid}), and \
         it cannot keep them apart from those of '{wanted}'; use merge=owner, which can, or the \
         same merge_domain"
    )]
    OtherDomain {
        /// The present domain.
        present: String,
        /// The process that wrote it.
        pid: u32,
        /// The domain to be joined.
        wanted: String,
    },
    /// The file with the domain cannot be used.
    #[error(
        "cannot {action} {path}, which names the trust domain that the kernel merges for: {source}",
        path = path.display()
    )]
    Domain {
        /// The failed action.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// The system error.
        source: io::Error,
    },
}
