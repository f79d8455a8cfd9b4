//! What a key can have done to a machine.

use std::path::PathBuf;
use std::time::Duration;

use ebb_vmm::api::{
    Client, FREE_PAGES_TIME_LIMIT_MS, PARK_TIME_LIMIT_MS, ParkReport, ParkRequest, ReclaimReport,
    ReclaimRequest,
};

use super::documents::line;
use crate::ctl::bytes;
use crate::host;

/// Time for an answer beyond the guest's own.
const MARGIN: Duration = Duration::from_secs(5);

/// Something to be done to a machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Act {
    /// The daemon is to do nothing to the machine of this name.
    Hold(String),
    /// The end of a hold.
    Release(String),
    /// The machine behind this socket is parked.
    Park(PathBuf),
    /// The guest of the machine behind this socket is asked for its free pages.
    Reclaim(PathBuf),
}

impl Act {
    /// Does it, and returns what there is to say. Takes up to half a minute.
    ///
    /// # Errors
    /// Why it was not done.
    pub(super) fn perform(&self, daemon: &Client) -> Result<String, String> {
        let with_limit = |socket: &PathBuf, limit_ms| {
            Client::new(socket, Duration::from_millis(limit_ms) + MARGIN)
        };
        let freed =
            |before: u64, after| format!("resident {}, now {}", bytes(before), bytes(after));
        let done = match self {
            Self::Hold(name) => {
                let status = host::hold(daemon, "/hold", name.clone());
                return status.map(|it| host::hold_text(&it)).map_err(of_the_daemon);
            }
            Self::Release(name) => {
                let status = host::hold(daemon, "/release", name.clone());
                return status.map(|it| host::hold_text(&it)).map_err(of_the_daemon);
            }
            Self::Park(socket) => with_limit(socket, PARK_TIME_LIMIT_MS)
                .put_json("/vm/park", &ParkRequest::default())
                .map(|it: ParkReport| freed(it.resident_before_bytes, it.resident_bytes)),
            Self::Reclaim(socket) => with_limit(socket, FREE_PAGES_TIME_LIMIT_MS)
                .put_json("/balloon/reclaim", &ReclaimRequest::default())
                .map(|it: ReclaimReport| freed(it.resident_before_bytes, it.resident_bytes)),
        };
        done.map(|text| format!("{self}: {text}")).map_err(|error| format!("{self}: {error}"))
    }
}

fn of_the_daemon(error: ebb_vmm::api::ClientError) -> String {
    host::of_the_daemon(error).to_string()
}

impl std::fmt::Display for Act {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Hold(name) => write!(f, "hold {}", line(name)),
            Self::Release(name) => write!(f, "release {}", line(name)),
            Self::Park(socket) => write!(f, "park {}", line(&socket.display().to_string())),
            Self::Reclaim(socket) => {
                write!(f, "reclaim from {}", line(&socket.display().to_string()))
            }
        }
    }
}
