//! How far a migration is, and what it was.

use std::time::Duration;

use serde::{Deserialize, Serialize};

/// What a migration is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Phase {
    /// The dirty log is being switched on.
    Arming,
    /// The guest has been asked for free pages.
    Hints,
    /// Memory is sent while the guest runs.
    Sending,
    /// The destination has been sent a round and has not dealt with all of it.
    Acknowledging,
    /// The guest stands still and the rest is sent.
    Final,
    /// All memory is at the destination; the guest stands still.
    Sent,
}

/// How far a migration is; a snapshot of a moving thing.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Progress {
    /// What it is doing.
    pub phase: Phase,
    /// Number of the round, from 0.
    pub round: u32,
    /// What is left of the round, if nothing of it is zero, in bytes.
    pub remaining_bytes: u64,
    /// Bytes sent so far, in all rounds.
    pub sent_bytes: u64,
    /// Bandwidth measured last, in bytes a second; `None` before the first round with a measurable
    /// amount.
    pub bandwidth_bytes_per_s: Option<u64>,
    /// How long the guest would have to stand still if it were stopped now.
    pub expected_downtime: Option<Duration>,
    /// Part of their time that is taken from the vCPUs, in percent.
    pub throttle_percent: u8,
    /// Time since the beginning.
    pub elapsed: Duration,
    /// Pages so far.
    pub pages: PageCounters,
}

/// Pages by what became of them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PageCounters {
    /// Sent with their content.
    pub data: u64,
    /// Sent as zero, after a look at them.
    pub zero: u64,
    /// Not held by the host.
    pub discarded: u64,
    /// Not sent since the guest said that it does not use them.
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
    /// Pages to send at its beginning.
    pub pages_to_send: u64,
    /// What became of them.
    pub pages: PageCounters,
    /// Bytes on the wire.
    pub bytes_sent: u64,
    /// Time from its beginning until the destination had dealt with it, in milliseconds; of it
    /// `hint_wait_ms` for hints alone.
    pub total_ms: u64,
    /// Time in which nothing was sent since hints were coming, in milliseconds.
    pub hint_wait_ms: u64,
    /// Pages written during it.
    pub pages_written: u64,
    /// Part of their time that was taken from the vCPUs, in percent.
    pub throttle_percent: u8,
}

/// What a migration was, up to its end or its failure.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Report {
    /// Time from the beginning until all memory was at the destination, in milliseconds.
    pub total_ms: u64,
    /// Part of it in which the guest stood still, in milliseconds. The monitor's own part (state,
    /// start at the destination) comes on top.
    pub downtime_ms: u64,
    /// Part of it that switching the dirty log on took, in milliseconds.
    pub setup_ms: u64,
    /// Bytes on the data streams.
    pub bytes_sent: u64,
    /// Rounds, the last one included.
    pub rounds: u32,
    /// Pages of all rounds.
    pub pages: PageCounters,
    /// Size of the guest's memory.
    pub memory_bytes: u64,
    /// Bandwidth measured last.
    pub bandwidth_bytes_per_s: Option<u64>,
    /// Why there were no hints, if somebody had been asked for them.
    pub hints_error: Option<String>,
    /// Each round.
    pub rounds_detail: Vec<RoundReport>,
}
