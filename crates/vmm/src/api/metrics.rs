//! Counters for monitoring.

use std::borrow::Cow;

pub use ebb_balloon::{Counters, DiscardCounters, QueueCounters};

use super::merge::MergeStatistics;

/// Counters for `GET /metrics`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Metrics {
    /// Guest memory in bytes, without regard to the balloon.
    pub memory_bytes: u64,
    /// Guest memory that the host holds at present.
    pub guest_resident_bytes: u64,
    /// Shared pages that are mapped for guest memory at present, each as often as it is mapped.
    pub guest_shared_bytes: u64,
    /// Resident memory of the whole monitor process.
    pub process_resident_bytes: u64,
    /// Milliseconds since the vCPUs were started.
    pub uptime_ms: u64,
    /// The balloon's counters; `None` without a balloon.
    pub balloon: Option<BalloonMetrics>,
    /// What same-page merging has counted; `None` where nobody merges.
    pub merge: Option<MergeStatistics>,
    /// vCPU exits by kind, all vCPUs together; empty when they are not counted.
    pub vcpu_exits: Vec<KindCount>,
}

/// The balloon's sizes, and its counters since the monitor started.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BalloonMetrics {
    /// The size asked for.
    pub target_bytes: u64,
    /// The size the guest says it has got to.
    pub actual_bytes: u64,
    /// What the device has counted.
    pub counters: Counters,
}

/// A counter with a label.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KindCount {
    /// The label's value, in snake_case.
    pub kind: Cow<'static, str>,
    /// How often.
    pub count: u64,
}

impl KindCount {
    /// A counter for `kind`.
    pub fn new(kind: impl Into<Cow<'static, str>>, count: u64) -> Self {
        Self { kind: kind.into(), count }
    }
}
