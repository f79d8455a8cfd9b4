//! Changing a guest's balloon through its monitor: Ebb's API, or QEMU's machine protocol.

use std::path::{Path, PathBuf};
use std::time::Duration;

use ebb_vmm::api::{
    BalloonInfo, Client, ClientError, FreePagesReport, MergeChange, MergeInfo, ParkReport,
    ReclaimReport, TrimReport,
};
use serde_json::{Value, json};

use crate::LabError;
use crate::harness::counters::Counters;
use crate::harness::monitor::MonitorKind;
use crate::harness::qmp::{Qmp, QmpError};

/// Time limit for a monitor's answer.
const ANSWER_LIMIT: Duration = Duration::from_secs(30);
/// Time limit for a guest's report of its free pages.
const FREE_PAGES_LIMIT_MS: u64 = 20_000;
const MIB: u64 = 1 << 20;

/// Why a balloon could not be changed or read.
#[derive(Debug, thiserror::Error)]
pub enum BalloonError {
    /// Ebb's API.
    #[error("{0}")]
    Api(ClientError),
    /// QEMU's machine protocol.
    #[error(transparent)]
    Qemu(#[from] QmpError),
    /// The monitor does not support the operation.
    #[error("only Ebb supports this: {0}")]
    OnlyEbb(&'static str),
}

/// Connection to a guest's balloon.
#[derive(Debug)]
pub enum Balloon {
    /// Through Ebb's API.
    Ebb(Client),
    /// Through QEMU's machine protocol, for a guest of this size in MiB.
    Qemu(Box<Qmp>, u64),
}

/// Path for a monitor's control socket, in a separate directory.
#[derive(Debug)]
pub struct ControlSocket(tempfile::TempDir);

impl ControlSocket {
    /// Creates the directory.
    ///
    /// # Errors
    /// [`LabError::SystemFile`].
    pub fn new() -> Result<Self, LabError> {
        tempfile::tempdir().map(Self).map_err(LabError::of_file(std::env::temp_dir()))
    }

    /// Path for the monitor to listen at.
    pub fn path(&self) -> PathBuf {
        self.0.path().join("control")
    }
}

/// Connection to a guest's monitor.
#[derive(Debug)]
pub struct Control {
    /// Number of the guest.
    pub guest: u32,
    /// Its balloon.
    pub balloon: Balloon,
    /// Removed with the connection.
    _socket: ControlSocket,
}

impl Control {
    /// Opens it for a guest of `guest_mib`, whose monitor listens at `socket`.
    ///
    /// # Errors
    /// [`BalloonError`].
    pub fn open(
        guest: u32,
        monitor: MonitorKind,
        socket: ControlSocket,
        guest_mib: u64,
    ) -> Result<Self, BalloonError> {
        Ok(Self {
            guest,
            balloon: Balloon::open(monitor, &socket.path(), guest_mib)?,
            _socket: socket,
        })
    }
}

impl Balloon {
    /// Connects to the monitor at `socket`, for a guest of `guest_mib`.
    ///
    /// # Errors
    /// [`BalloonError`].
    pub fn open(monitor: MonitorKind, socket: &Path, guest_mib: u64) -> Result<Self, BalloonError> {
        Ok(match monitor {
            MonitorKind::Ebb => Self::Ebb(Client::new(socket, ANSWER_LIMIT)),
            MonitorKind::Qemu => Self::Qemu(Box::new(Qmp::connect(socket)?), guest_mib),
        })
    }

    /// Sets the balloon's target; the guest follows at its own pace.
    ///
    /// # Errors
    /// [`BalloonError`].
    pub fn set_target_mib(&mut self, target_mib: u64) -> Result<(), BalloonError> {
        match self {
            Self::Ebb(client) => {
                let body = json!({ "target_bytes": target_mib * MIB });
                client.put_json::<Value>("/balloon", &body).map(drop).map_err(BalloonError::Api)
            }
            Self::Qemu(qmp, guest_mib) => {
                // QEMU's value is the memory left to the guest.
                let left = guest_mib.saturating_sub(target_mib) * MIB;
                Ok(qmp.call("balloon", &json!({ "value": left })).map(drop)?)
            }
        }
    }

    /// Ebb's API, for operations that QEMU does not support.
    ///
    /// # Errors
    /// [`BalloonError::OnlyEbb`].
    pub fn api(&self, what: &'static str) -> Result<&Client, BalloonError> {
        match self {
            Self::Ebb(client) => Ok(client),
            Self::Qemu(..) => Err(BalloonError::OnlyEbb(what)),
        }
    }

    /// Trims all zero pages of the guest.
    ///
    /// # Errors
    /// [`BalloonError`]; QEMU has no such thing.
    pub fn trim(&mut self) -> Result<TrimReport, BalloonError> {
        let client = self.api("trim")?;
        let mut total = TrimReport::default();
        while !total.complete {
            let part: TrimReport = client.put("/vm/trim").map_err(BalloonError::Api)?;
            total.add(&part);
        }
        Ok(total)
    }

    /// Parks the guest.
    ///
    /// # Errors
    /// [`BalloonError`]; QEMU has no such thing.
    pub fn park(&mut self, keep_mib: u64) -> Result<ParkReport, BalloonError> {
        park(self.api("park")?, keep_mib).map_err(BalloonError::Api)
    }

    /// The monitor's counters; QEMU has none.
    ///
    /// # Errors
    /// [`BalloonError`].
    pub fn counters(&mut self) -> Result<Option<Counters>, BalloonError> {
        match self {
            Self::Ebb(client) => {
                let reply = client.request("GET", "/metrics", "").map_err(BalloonError::Api)?;
                Ok(Some(Counters::of_monitor(&reply.body)))
            }
            Self::Qemu(..) => Ok(None),
        }
    }

    /// Requests the guest's free blocks of at least this order.
    ///
    /// # Errors
    /// [`BalloonError`]; QEMU has no such thing.
    pub fn free_pages(&mut self, min_order: u8) -> Result<FreePagesReport, BalloonError> {
        let client = self.api("free pages")?;
        let body = json!({ "min_order": min_order, "timeout_ms": FREE_PAGES_LIMIT_MS });
        client.put_json("/balloon/free-pages", &body).map_err(BalloonError::Api)
    }

    /// Has the guest report its free memory at once.
    ///
    /// # Errors
    /// [`BalloonError`]; QEMU has no such thing.
    pub fn reclaim(&mut self) -> Result<ReclaimReport, BalloonError> {
        let client = self.api("reclaiming")?;
        let body = json!({ "timeout_ms": FREE_PAGES_LIMIT_MS });
        client.put_json("/balloon/reclaim", &body).map_err(BalloonError::Api)
    }

    /// The monitor's report on the merging of the guest's pages.
    ///
    /// # Errors
    /// [`BalloonError`]; QEMU has no such thing.
    pub fn merge_info(&mut self) -> Result<MergeInfo, BalloonError> {
        let client = self.api("merging")?;
        client.get("/merge").map_err(BalloonError::Api)
    }

    /// Changes how the guest's pages are merged.
    ///
    /// # Errors
    /// [`BalloonError`]; QEMU has no such thing.
    pub fn change_merging(&mut self, change: &MergeChange) -> Result<MergeInfo, BalloonError> {
        let client = self.api("merging")?;
        client.put_json("/merge", change).map_err(BalloonError::Api)
    }

    /// Size of the balloon according to the guest, MiB.
    ///
    /// # Errors
    /// [`BalloonError`].
    pub fn actual_mib(&mut self) -> Result<u64, BalloonError> {
        match self {
            Self::Ebb(client) => {
                let info: BalloonInfo = client.get("/balloon").map_err(BalloonError::Api)?;
                Ok(info.actual_bytes / MIB)
            }
            Self::Qemu(qmp, guest_mib) => {
                const COMMAND: &str = "query-balloon";
                let answer = qmp.call(COMMAND, &json!({}))?;
                let left = answer["actual"].as_u64().ok_or_else(|| QmpError::Refused {
                    command: COMMAND,
                    answer: answer.to_string(),
                })?;
                Ok(guest_mib.saturating_sub(left / MIB))
            }
        }
    }
}

/// Parks a guest of Ebb, which keeps `keep_mib` of memory available.
///
/// # Errors
/// The monitor's.
pub fn park(client: &Client, keep_mib: u64) -> Result<ParkReport, ClientError> {
    client.put_json("/vm/park", &json!({ "keep_bytes": keep_mib << 20 }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::harness::qmp::tests::peer;

    #[test]
    fn qemu_takes_and_reports_the_memory_left_to_the_guest() {
        let directory = tempfile::tempdir().unwrap();
        let socket = directory.path().join("qmp");
        let peer = peer(
            &socket,
            vec![
                "{\"return\": {}}\n",
                "{\"event\": \"BALLOON_CHANGE\", \"data\": {\"actual\": 1}}\n{\"return\": {}}\n",
                "{\"return\": {\"actual\": 268435456}}\n",
            ],
        );
        let mut balloon = Balloon::open(MonitorKind::Qemu, &socket, 1024).unwrap();
        balloon.set_target_mib(768).unwrap();
        assert_eq!(balloon.actual_mib().unwrap(), 768);
        let sent = peer.join().unwrap();
        assert_eq!(sent[1], json!({ "execute": "balloon", "arguments": { "value": 268_435_456 } }));
    }

    #[test]
    fn a_missing_socket_is_named() {
        let error = Balloon::open(MonitorKind::Qemu, Path::new("/no/such/socket"), 1).unwrap_err();
        assert!(error.to_string().contains("/no/such/socket"));
        let mut ebb = Balloon::open(MonitorKind::Ebb, Path::new("/no/such/socket"), 1).unwrap();
        assert!(ebb.actual_mib().unwrap_err().to_string().contains("/no/such/socket"));
    }
}
