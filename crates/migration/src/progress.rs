//! Progress and report of a migration.

use std::time::Duration;

use serde::{Deserialize, Serialize};

/// Phase of a migration.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Phase {
    /// The dirty log is being enabled.
    Arming,
    /// Hints were requested from the guest.
    Hints,
    /// Memory is sent while the guest runs.
    Sending,
    /// A round was sent and is not confirmed yet.
    Acknowledging,
    /// The guest is paused and the rest is sent.
    Final,
    /// All memory is at the destination; the guest is paused.
    Sent,
}

/// Progress of a migration; a snapshot.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Progress {
    /// Current phase.
    pub phase: Phase,
    /// Number of the round, from 0.
    pub round: u32,
    /// Bytes left in the round, if none of its pages is zero.
    pub remaining_bytes: u64,
    /// Bytes sent so far, in all rounds.
    pub sent_bytes: u64,
    /// Most recent bandwidth, in bytes per second; `None` before the first round with a measurable
    /// amount.
    pub bandwidth_bytes_per_s: Option<u64>,
    /// Downtime if the guest were paused now.
    pub expected_downtime: Option<Duration>,
    /// Current throttling of the vCPUs, in percent of their time.
    pub throttle_percent: u8,
    /// Time since the start.
    pub elapsed: Duration,
    /// Number of pages so far.
    pub pages: PageCounters,
}

/// Numbers of pages by outcome.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PageCounters {
    /// Sent with their content.
    pub data: u64,
    /// Sent as zero, after a scan.
    pub zero: u64,
    /// Not populated on the host.
    pub discarded: u64,
    /// Not sent because the guest hinted them as free.
    pub skipped: u64,
}

impl std::ops::AddAssign for PageCounters {
    fn add_assign(&mut self, other: Self) {
        self.data += other.data;
        self.zero += other.zero;
        self.discarded += other.discarded;
        self.skipped += other.skipped;
    }
}

/// One round.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RoundReport {
    /// Its number, from 0.
    pub round: u32,
    /// Pages to send at its start.
    pub pages_to_send: u64,
    /// Pages by outcome.
    pub pages: PageCounters,
    /// Bytes on the wire.
    pub bytes_sent: u64,
    /// Time from its start until the destination confirmed it, in milliseconds, including
    /// `hint_wait_ms`.
    pub total_ms: u64,
    /// Time spent waiting for hints without sending, in milliseconds.
    pub hint_wait_ms: u64,
    /// Pages that the guest wrote during the round.
    pub pages_written: u64,
    /// Throttling of the vCPUs, in percent of their time.
    pub throttle_percent: u8,
}

/// Report of a migration, up to its end or failure.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Report {
    /// Time from the start until all memory was at the destination, in milliseconds.
    pub total_ms: u64,
    /// Part of it during which the guest was paused, in milliseconds. The monitor's own part
    /// (state, start at the destination) comes on top.
    pub downtime_ms: u64,
    /// Part of it spent enabling the dirty log, in milliseconds.
    pub setup_ms: u64,
    /// Bytes on the data streams.
    pub bytes_sent: u64,
    /// Number of rounds, including the last one.
    pub rounds: u32,
    /// Pages of all rounds by outcome.
    pub pages: PageCounters,
    /// Size of guest memory in bytes.
    pub memory_bytes: u64,
    /// Most recent bandwidth, in bytes per second.
    pub bandwidth_bytes_per_s: Option<u64>,
    /// Error of the request for hints, if it failed.
    pub hints_error: Option<String>,
    /// Each round.
    pub rounds_detail: Vec<RoundReport>,
}
