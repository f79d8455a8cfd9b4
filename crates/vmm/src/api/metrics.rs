//! Counters for monitoring.

use std::borrow::Cow;

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

/// The balloon's counters since the monitor started.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BalloonMetrics {
    /// The size asked for.
    pub target_bytes: u64,
    /// The size the guest says it has got to.
    pub actual_bytes: u64,
    /// Memory the guest reported as free.
    pub reported_bytes: u64,
    /// Memory the guest put into the balloon.
    pub inflated_bytes: u64,
    /// Memory the guest took out of the balloon.
    pub deflated_bytes: u64,
    /// Memory given back to the host.
    pub discarded_bytes: u64,
    /// Ranges given back to the host, after coalescing.
    pub discarded_ranges: u64,
    /// System calls that gave memory back.
    pub discard_syscalls: u64,
    /// Time the host took for that, in nanoseconds.
    pub discard_ns: u64,
    /// Memory that was not given back although the guest gave it away, by reason.
    pub kept_bytes: Vec<KindCount>,
    /// Pages that were overwritten before they were given back, to check the guest.
    pub verified_pages: u64,
    /// Time it took to read what came on each queue and to find its ranges, in nanoseconds.
    pub translate_ns: Vec<KindCount>,
    /// Buffers that came on each queue.
    pub queue_buffers: Vec<KindCount>,
    /// Bytes of the arrays and messages that came on each queue.
    pub queue_bytes: Vec<KindCount>,
    /// Arrays and messages by the way in which they named pages.
    pub messages: Vec<KindCount>,
    /// Requests for free pages, by what became of them.
    pub requests: Vec<KindCount>,
    /// Mistakes of the guest and failures of the host, by kind.
    pub errors: Vec<KindCount>,
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
