//! What can go wrong with KSM.

use std::io;
use std::path::PathBuf;

use super::knobs::Knob;

/// Why KSM cannot be used or changed.
#[derive(Debug, thiserror::Error)]
pub enum KsmError {
    /// The kernel has none.
    #[error("this kernel cannot merge pages: there is no {path}; use one with CONFIG_KSM, or merge=owner", path = path.display())]
    Missing {
        /// Where it should be.
        path: PathBuf,
    },
    /// A file could not be read.
    #[error("cannot read {path}: {source}", path = path.display())]
    Read {
        /// Which one.
        path: PathBuf,
        /// The system's answer.
        source: io::Error,
    },
    /// A file holds something that it never should.
    #[error("{path} holds '{text}', which is not a setting of KSM; merge=kernel cannot be used with this kernel", path = path.display())]
    Strange {
        /// Which one.
        path: PathBuf,
        /// What it holds.
        text: String,
    },
    /// The settings belong to somebody else.
    #[error("{path} cannot be written to ({source}); run as root, who may change KSM's settings", path = path.display())]
    Permission {
        /// The file.
        path: PathBuf,
        /// The system's answer.
        source: io::Error,
    },
    /// A setting that came with a later kernel.
    #[error("this kernel's KSM has no setting '{knob}', which came with Linux {since}; leave it as it is, or use a newer kernel", knob = knob.name(), since = knob.since())]
    NoKnob {
        /// Which one.
        knob: Knob,
    },
    /// A setting that can only change while nothing is merged, and something is.
    #[error(
        "'{knob}' can only be changed while KSM shares no page, and it shares {pages_shared}; unmerge first (run=unmerge) and let no \
         other process merge pages meanwhile", knob = knob.name()
    )]
    Busy {
        /// Which one.
        knob: Knob,
        /// What is shared still, as far as that is known.
        pages_shared: u64,
    },
    /// Unmerging has not come to its end.
    #[error(
        "KSM still shares {pages_shared} pages after it was told to unmerge all; free some memory and try again"
    )]
    StillShared {
        /// How many.
        pages_shared: u64,
    },
    /// The kernel refused a value.
    #[error("the kernel does not take {value} for KSM's '{knob}': {source}", knob = knob.name(), value = knob.text(*value))]
    Refused {
        /// Which setting.
        knob: Knob,
        /// Which value.
        value: u64,
        /// The system's answer.
        source: io::Error,
    },
    /// Virtual machines of another trust domain are merged by the kernel.
    #[error(
        "the kernel merges pages of the trust domain '{present}' on this host (process {pid}), and it cannot keep them apart from \
         those of '{wanted}'; use merge=owner, which can, or the same merge_domain"
    )]
    OtherDomain {
        /// Whose they are.
        present: String,
        /// The process that has named it.
        pid: u32,
        /// The domain that was to join.
        wanted: String,
    },
    /// The file that names the domain.
    #[error("cannot {action} {path}, which names the trust domain that the kernel merges for: {source}", path = path.display())]
    Domain {
        /// What was tried.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// The system's answer.
        source: io::Error,
    },
}
