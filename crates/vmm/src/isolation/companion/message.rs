//! What a monitor and its companion say, in [packets](crate::packet).

use std::ffi::OsString;
use std::path::PathBuf;

use ebb_page_merge::broker::DomainName;
use serde::{Deserialize, Serialize};

use crate::config::Switch;

/// What a monitor may ask for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub(super) enum Request {
    /// Remove this name from the directory that comes with the message, when the monitor ends or
    /// asks for it, if it is still the socket that comes after it. Names are numbered from 0. Only
    /// before `Begin`.
    Keep { name: OsString },
    /// Remove the cgroup of this name from the directory that comes with the message when the
    /// monitor ends. Only before `Begin`.
    KeepCgroup { name: OsString },
    /// Serve requests for files below `path`, the directory that comes with the message. Only
    /// before `Begin`.
    Allow { path: PathBuf },
    /// Serve [`Open`](Self::Open) requests for images below `path`, the directory that comes with
    /// the message. Only before `Begin`.
    AllowImages { path: PathBuf },
    /// Serve [`Connect`] requests on the socket that comes with the message, for sockets in the
    /// directory that comes before it: their names are `name`, `_` and a port. Only before `Begin`.
    Vsock { name: OsString },
    /// Serve [`Connect`] requests on the socket that comes with the message, with connections to the
    /// merge broker at `path` for a client of `domain`. Only before `Begin`.
    Broker { path: PathBuf, domain: DomainName },
    /// Go on as two processes: the new one serves another monitor on the socket that comes with the
    /// message, with the standard error that comes after it. Only before all other requests.
    Split,
    /// Give up what is not needed for other requests.
    Begin { seccomp: Switch },
    /// Remove a kept name now.
    Remove { index: u32 },
    /// Create the file of a snapshot, which comes with the answer. One at a time: until it is
    /// published or discarded, further ones are refused.
    Create { path: PathBuf },
    /// Open an image, which comes with the answer; one that is to be written comes twice, the
    /// second time for reading only, each from an open(2) of its own.
    Open { path: PathBuf, readonly: Switch },
    /// Give that file, which is complete, its name.
    Publish,
    /// Remove it.
    Discard,
}

impl Request {
    /// Whether it has an answer. Of the others, the first one that was refused fails `Begin`: the
    /// monitor does not wait while its companion starts.
    pub(super) fn is_answered(&self) -> bool {
        !matches!(
            self,
            Self::Keep { .. }
                | Self::KeepCgroup { .. }
                | Self::Allow { .. }
                | Self::AllowImages { .. }
                | Self::Vsock { .. }
                | Self::Broker { .. }
                | Self::Split
        )
    }
}

/// The only request on a socket for connections: one to the socket of this port of a vsock device,
/// or to the merge broker, which comes with the answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Connect {
    /// The port; 0 for the broker.
    pub port: u32,
}

/// The answer.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Reply {
    /// Why the request was refused.
    pub error: Option<String>,
}
