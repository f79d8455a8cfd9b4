//! Parking an idle guest: documents.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Default of the memory that a guest keeps: enough for its services to run.
const KEEP_BYTES: u64 = 24 << 20;
/// Default time limit.
pub const PARK_TIME_LIMIT_MS: u64 = 30 * 1000;
/// The longest time limit: ten minutes.
pub const MAX_PARK_TIME_LIMIT_MS: u64 = 600 * 1000;

/// `PUT /vm/park`: how far to go.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct ParkRequest {
    /// Memory that stays available to the guest's programs throughout, file caches included.
    #[schemars(extend("x-unit" = "bytes"))]
    pub keep_bytes: u64,
    /// Whether the guest's balloon evicts caches. Without that only what is free and what is zero
    /// is taken: for a client that has had the guest evict them in another way.
    pub evict: bool,
    /// Time limit for all stages.
    #[schemars(range(min = 100, max = MAX_PARK_TIME_LIMIT_MS), extend("x-unit" = "milliseconds"))]
    pub timeout_ms: u64,
}

impl Default for ParkRequest {
    fn default() -> Self {
        Self { keep_bytes: KEEP_BYTES, evict: true, timeout_ms: PARK_TIME_LIMIT_MS }
    }
}

/// `PUT /vm/park`: what the host has got.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[schemars(rename = "Park")]
pub struct ParkReport {
    /// The stages in order.
    pub stages: Vec<ParkStage>,
    /// Resident guest memory before the first stage.
    pub resident_before_bytes: u64,
    /// The same after the last one.
    pub resident_bytes: u64,
    /// Duration, in microseconds.
    pub elapsed_us: u64,
}

/// One stage of parking.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ParkStage {
    /// evict: the balloon takes all but `keep_bytes` of what is available to programs, so that the
    /// guest evicts its cold caches, and gives the memory back to the guest. report: the guest
    /// reports all of its free memory at once (docs/extension.md); where its driver cannot, and
    /// nothing was evicted, it is waited for until it has reported by itself. trim: memory that is
    /// all zero is discarded, and huge pages of which parts were discarded are split.
    pub stage: ParkStageName,
    /// done: it did all that it can. stopped: it ended before, because the guest needs its memory or
    /// has changed. timeout: it ended at the time limit. skipped: it is not possible here.
    pub end: ParkStageEnd,
    /// Why the stage was skipped or ended early.
    pub reason: Option<String>,
    /// Decrease of the guest's resident memory.
    pub returned_bytes: u64,
    /// Duration, in microseconds.
    pub elapsed_us: u64,
}

/// Names of the stages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum ParkStageName {
    /// The guest evicts its cold caches.
    Evict,
    /// The guest reports its free memory.
    Report,
    /// Memory that is all zero is discarded.
    Trim,
}

/// How a stage ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum ParkStageEnd {
    /// It is complete.
    Done,
    /// It ended early.
    Stopped,
    /// It ended at the time limit.
    Timeout,
    /// It is not possible.
    Skipped,
}

/// `GET /vm/park`: the last parking, and what has happened since.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ParkStatus {
    /// The last parking; null if there was none since the start of this monitor.
    pub last: Option<ParkReport>,
    /// What has happened since its end; null if there was none.
    pub since: Option<ParkSince>,
}

/// What has happened since a parking ended. Figures of the guest are null if it has not reported
/// them, or does not answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ParkSince {
    /// Time since then, in milliseconds.
    pub elapsed_ms: u64,
    /// Resident guest memory now.
    pub resident_bytes: u64,
    /// Page faults of the guest that needed I/O: parts of programs that were read again.
    pub major_faults: Option<u64>,
    /// Growth of the guest's file caches.
    pub caches_grown_bytes: Option<u64>,
    /// Memory that the guest has swapped in.
    pub swapped_in_bytes: Option<u64>,
}
