//! The machine as a whole: documents.

use std::path::PathBuf;

use ebb_guest_ram::Backing;
use ebb_kvm_clock::ClockPolicy;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::balloon::BalloonSummary;
use crate::words::one_of;

/// What a virtual machine is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum VmState {
    /// Being set up; no vCPU has run yet.
    Starting,
    /// Waiting for another monitor to send the machine, or receiving it.
    Receiving,
    /// vCPUs run.
    Running,
    /// vCPUs are stopped until resumed.
    Paused,
    /// vCPUs are stopped while the rest of the machine goes to another monitor.
    Migrating,
    /// The guest has ended or is being ended; the monitor is about to exit.
    Stopping,
}

/// What the guest's clocks do while it stands still, and what they said when it last did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[schemars(rename = "Clock")]
pub struct ClockInfo {
    /// Whether they stand still or catch up with real time.
    #[schemars(schema_with = "one_of::<ClockPolicy>")]
    pub policy: ClockPolicy,
    /// When the machine was last stopped; for a restored machine that has not been stopped since,
    /// when the snapshot was taken. Null if it never was.
    pub stopped: Option<ClockInstant>,
    /// When it last went on. Null if it never did.
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
    /// What the machine is doing.
    pub state: VmState,
    /// Number of vCPUs; 0 while nothing is known of a machine that is to be received.
    pub cpus: u32,
    /// Guest memory, without regard to the balloon.
    pub memory_bytes: u64,
    /// What guest memory is made of: private anonymous memory, a shared memfd, or 2 MiB pages of
    /// the host's hugetlb pool.
    #[schemars(schema_with = "one_of::<Backing>")]
    pub backing: Backing,
    /// Guest memory that the host holds at present.
    pub resident_bytes: u64,
    /// Memory that shares pages with other memory, as far as it is known that it was not written to
    /// since; not part of resident_bytes. Null where nobody merges.
    pub merged_bytes: Option<u64>,
    /// Memory that a restored machine reads from its snapshot and has not written: in the host's
    /// page cache once for all machines that read it. Null for a machine that was not restored.
    pub snapshot_bytes: Option<u64>,
    /// Time since the vCPUs were started; 0 before.
    pub uptime_ms: u64,
    /// The guest's clocks over pauses.
    pub clock: ClockInfo,
    /// Path of the kernel image; empty for a machine that was restored or received without one.
    pub kernel: String,
    /// Process id of the monitor.
    #[schemars(range(min = 1))]
    pub pid: u32,
    /// Version of the monitor.
    pub version: String,
    /// The balloon in short; null if the machine has none.
    pub balloon: Option<BalloonSummary>,
}

/// What `PUT /vm/trim` did.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct TrimReport {
    /// Guest memory that the host held and that was looked at.
    pub scanned_bytes: u64,
    /// Memory of it that was zero and was given back.
    pub returned_bytes: u64,
    /// How often the machine was stopped.
    pub pauses: u64,
    /// The longest time it was stopped, in microseconds.
    pub longest_pause_us: u64,
    /// Whether all of guest memory has been looked at.
    pub complete: bool,
}

impl TrimReport {
    /// Adds what a further call did.
    pub fn add(&mut self, part: &Self) {
        self.scanned_bytes += part.scanned_bytes;
        self.returned_bytes += part.returned_bytes;
        self.pauses += part.pauses;
        self.longest_pause_us = self.longest_pause_us.max(part.longest_pause_us);
        self.complete = part.complete;
    }
}

/// `PUT /vm/snapshot`: where to.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct SnapshotTarget {
    /// The file, on the monitor's machine, as an absolute path.
    #[schemars(regex(pattern = "^/"))]
    pub path: PathBuf,
}

/// `PUT /vm/snapshot`: what was written.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct SnapshotReport {
    /// The file.
    pub path: String,
    /// Size of the file, holes included.
    pub file_bytes: u64,
    /// What it takes of its disk.
    pub stored_bytes: u64,
    /// Guest memory in it: pages that are not all zero.
    pub ram_bytes: u64,
    /// How long it took, in milliseconds.
    pub elapsed_ms: u64,
    /// How long a running machine stood still for it, in milliseconds.
    pub paused_ms: u64,
}
