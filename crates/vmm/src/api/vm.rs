//! The machine as a whole: documents.

use std::path::PathBuf;

use ebb_guest_ram::Backing;
use ebb_kvm_clock::ClockPolicy;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::balloon::BalloonSummary;
use crate::isolation::IsolationInfo;
use crate::words::one_of;

/// State of a virtual machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum VmState {
    /// Being set up; no vCPU has run yet.
    Starting,
    /// Waiting for another monitor to send the machine, or receiving it.
    Receiving,
    /// vCPUs are running.
    Running,
    /// vCPUs are paused.
    Paused,
    /// vCPUs are paused for a snapshot: while their state is read, and while memory is copied if
    /// the guest cannot run meanwhile.
    Saving,
    /// vCPUs are paused while the rest of the machine is sent to another monitor.
    Migrating,
    /// The guest has ended or is being ended; the monitor is about to exit.
    Stopping,
}

/// Behaviour of the guest's clocks across pauses, and their values at the last pause.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[schemars(rename = "Clock")]
pub struct ClockInfo {
    /// Whether they pause too or catch up with real time.
    #[schemars(schema_with = "one_of::<ClockPolicy>")]
    pub policy: ClockPolicy,
    /// When the machine was last paused; for a restored machine that has not been paused since,
    /// when the snapshot was taken. Null if it never was.
    pub stopped: Option<ClockInstant>,
    /// When the machine was last continued. Null if it never was.
    pub started: Option<ClockInstant>,
}

/// One instant on two clocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ClockInstant {
    /// KVM's clock, which the guest's monotonic clock follows, in nanoseconds.
    pub clock_ns: u64,
    /// The host's real time, in nanoseconds since 1970.
    pub realtime_ns: u64,
}

/// `GET /vm`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[schemars(rename = "Vm")]
pub struct VmInfo {
    /// State of the machine.
    pub state: VmState,
    /// Number of vCPUs; 0 while a machine to be received is not yet known.
    pub cpus: u32,
    /// Guest memory, including pages in the balloon.
    pub memory_bytes: u64,
    /// Backing of guest memory: private anonymous memory, a shared memfd, or 2 MiB pages of the
    /// host's hugetlb pool.
    #[schemars(schema_with = "one_of::<Backing>")]
    pub backing: Backing,
    /// Resident guest memory.
    pub resident_bytes: u64,
    /// Memory that shares pages with other memory, as far as it is not known to have been written
    /// to since; not part of resident_bytes. Null without merging.
    pub merged_bytes: Option<u64>,
    /// Memory that a restored machine reads from its snapshot and has not written: in the host's
    /// page cache once for all machines that read it. Null for a machine that was not restored.
    pub snapshot_bytes: Option<u64>,
    /// Time since the vCPUs were started; 0 before.
    pub uptime_ms: u64,
    /// Time after which a paused machine is resumed, unless the pause is renewed. Null without a
    /// lease.
    pub pause_lease_ms: Option<u64>,
    /// The guest's clocks across pauses.
    pub clock: ClockInfo,
    /// Path of the kernel image; empty for a machine that was restored or received without one.
    pub kernel: String,
    /// Process id of the monitor.
    #[schemars(range(min = 1))]
    pub pid: u32,
    /// What the monitor has given up, for the case that the guest takes it over.
    pub isolation: IsolationInfo,
    /// Version of the monitor.
    pub version: String,
    /// Summary of the balloon; null if the machine has none.
    pub balloon: Option<BalloonSummary>,
    /// The socket device; null if the machine has none.
    pub vsock: Option<VsockInfo>,
}

/// The socket device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[schemars(rename = "Vsock")]
pub struct VsockInfo {
    /// CID of the guest.
    #[schemars(range(min = 3))]
    pub cid: u32,
    /// The socket that clients of the host connect to.
    pub path: String,
    /// Whether the guest has a driver for it, without which it answers no connection.
    pub driver: bool,
    /// Connections, also those that are about to begin or to end.
    pub connections: u64,
}

/// `PUT /console`: the serial line is connected.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[schemars(rename = "Console")]
pub struct ConsoleInfo {
    /// Earlier output that the socket receives first.
    pub recent_bytes: u64,
}

/// `PUT /vm/trim`: the result.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct TrimReport {
    /// Resident guest memory that was scanned.
    pub scanned_bytes: u64,
    /// Scanned memory that was zero and was discarded.
    pub returned_bytes: u64,
    /// How often the machine was paused.
    pub pauses: u64,
    /// The longest pause, in microseconds.
    pub longest_pause_us: u64,
    /// Whether all of guest memory has been scanned.
    pub complete: bool,
}

impl TrimReport {
    /// Adds the result of another call.
    pub fn add(&mut self, part: &Self) {
        self.scanned_bytes += part.scanned_bytes;
        self.returned_bytes += part.returned_bytes;
        self.pauses += part.pauses;
        self.longest_pause_us = self.longest_pause_us.max(part.longest_pause_us);
        self.complete = part.complete;
    }
}

/// `PUT /vm/checkpoint`: what comes with the request. Its first file descriptor (`SCM_RIGHTS`, with
/// the first bytes) is a unix socket that the checkpoint's process serves: a listening stream
/// socket, or a connected packet socket, with whose end the checkpoint ends. Then there may be an
/// empty file for each disk that is written to, which is filled with its image while the guest
/// stands still. `ebb ctl` and `ebb fork` send all of it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct CheckpointTarget {
    /// Name of the checkpoint, which it reports to its clients: at most 64 letters, digits, `.`,
    /// `_` and `-`.
    pub name: String,
}

/// `PUT /vm/checkpoint`: the result.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct CheckpointReport {
    /// Its name.
    pub name: String,
    /// Its process.
    pub pid: u32,
    /// How long the machine stood still for it, in microseconds; 0 if it was paused.
    pub paused_us: u64,
    /// The part of that for which memory was made copy-on-write (fork(2)).
    pub forked_us: u64,
}

/// `PUT /vm/snapshot`: the destination.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct SnapshotTarget {
    /// Absolute path of the file, for messages and the report. The monitor does not open it: an
    /// empty file that is open for reading and writing comes with the request, as its only file
    /// descriptor (`SCM_RIGHTS`, with the first bytes), and its sender gives it the name. `ebb ctl`
    /// does both.
    #[schemars(regex(pattern = "^/"))]
    pub path: PathBuf,
}

/// `PUT /vm/snapshot`: the result.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct SnapshotReport {
    /// The file.
    pub path: String,
    /// Size of the file, holes included.
    pub file_bytes: u64,
    /// Size on disk.
    pub stored_bytes: u64,
    /// Guest memory in it: pages that are not all zero.
    pub ram_bytes: u64,
    /// Duration, in milliseconds.
    pub elapsed_ms: u64,
    /// How long a running machine was paused for it, in milliseconds.
    pub paused_ms: u64,
    /// Whether the guest ran while memory was copied to the file.
    pub copied: CopiedWhile,
}

/// Whether a guest runs while its memory is copied.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum CopiedWhile {
    /// Pages were write-protected in a pause, and a page that the guest wanted to write to was
    /// copied first.
    Running,
    /// The machine was paused already, or it was paused for the whole copy: because of its memory's
    /// backing, because it was restored, because its pages may be merged, or because the host does
    /// not allow userfaultfd.
    Stopped,
}
