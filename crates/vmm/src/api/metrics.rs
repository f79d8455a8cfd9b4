//! Counters for monitoring.

use std::borrow::Cow;

pub use ebb_balloon::{Counters, DiscardCounters, QueueCounters};

pub use crate::devices::virtio::vsock::VsockCounters;

use super::merge::MergeStatistics;

/// Counters for `GET /metrics`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Metrics {
    /// Guest memory in bytes, including pages in the balloon.
    pub memory_bytes: u64,
    /// Resident guest memory in bytes.
    pub guest_resident_bytes: u64,
    /// Mappings of shared pages in guest memory, in bytes, counted once per mapping.
    pub guest_shared_bytes: u64,
    /// Resident memory of the whole monitor process, in bytes, as `ps` shows it: up to some MiB
    /// more or less.
    pub process_resident_bytes: u64,
    /// Resident memory of the monitor process without guest memory, in bytes.
    pub overhead_resident_bytes: u64,
    /// Milliseconds since the vCPUs were started.
    pub uptime_ms: u64,
    /// The balloon's counters; `None` without a balloon.
    pub balloon: Option<BalloonMetrics>,
    /// The socket device's counters; `None` without one.
    pub vsock: Option<VsockMetrics>,
    /// Counters of same-page merging; `None` without merging.
    pub merge: Option<MergeStatistics>,
    /// Requests that had to wait for a limit, by device.
    pub delayed_requests: Vec<KindCount>,
    /// Frames of network devices, by device and direction: `net0_rx` to the guest, `net0_tx` from
    /// it.
    pub net_frames: Vec<KindCount>,
    /// Their bytes.
    pub net_bytes: Vec<KindCount>,
    /// Frames that were dropped.
    pub net_dropped: Vec<KindCount>,
    /// vCPU exits by kind, all vCPUs together; empty if they are not counted.
    pub vcpu_exits: Vec<KindCount>,
    /// Microseconds that each part of the monitor's start took, until the vCPUs were started.
    pub start_us: Vec<KindCount>,
}

/// The balloon's sizes, and its counters since the monitor started.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BalloonMetrics {
    /// Target size.
    pub target_bytes: u64,
    /// Size last reported by the guest.
    pub actual_bytes: u64,
    /// Counters of the device.
    pub counters: Counters,
}

/// The socket device's connections, and its counters since the monitor started.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct VsockMetrics {
    /// Connections, also those that are about to begin or to end.
    pub connections: u64,
    /// Counters of the device.
    pub counters: VsockCounters,
}

/// A counter with a label.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KindCount {
    /// The label's value, in snake_case.
    pub kind: Cow<'static, str>,
    /// Value of the counter.
    pub count: u64,
}

impl KindCount {
    /// A counter for `kind`.
    pub fn new(kind: impl Into<Cow<'static, str>>, count: u64) -> Self {
        Self { kind: kind.into(), count }
    }
}
