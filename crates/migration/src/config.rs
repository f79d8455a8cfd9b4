//! Settings of a migration.

use std::time::Duration;

use ebb_abi::HUGE_PAGE_SIZE_PAGES;
use serde::{Deserialize, Serialize};

/// How to move a guest's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Config {
    /// The guest is paused for the last round once the remaining memory can be sent within this
    /// time.
    pub downtime_limit: Duration,
    /// Most bytes per second, over all streams.
    pub bandwidth_limit: Option<u64>,
    /// Time limit of the whole migration.
    pub time_limit: Option<TimeLimit>,
    /// How to handle a guest that writes faster than its memory can be sent.
    pub auto_converge: AutoConverge,
    /// How to handle pages that are all zero.
    pub zero_pages: ZeroPages,
    /// How to handle pages that are not populated on the host.
    pub holes: Holes,
    /// Rounds in which the guest is asked for free page hints.
    pub hint_rounds: HintRounds,
    /// Longest time a round waits for hints before it sends the pages that were not hinted. A page
    /// that is sent before it is hinted is sent in vain.
    pub hint_wait: Duration,
    /// Number of pages sent before the guest is asked for hints, to measure the link's bandwidth:
    /// the wait for hints continues as long as they arrive at half of it or faster. A guest with
    /// less than four times as many pages is asked at once.
    pub probe_pages: u64,
    /// Bytes per second that the guest must hint for the wait to continue while the link's
    /// bandwidth is unknown.
    pub hint_rate: u64,
    /// Number of pages that a stream takes at a time.
    pub chunk_pages: u64,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            downtime_limit: Duration::from_millis(300),
            bandwidth_limit: None,
            time_limit: None,
            auto_converge: AutoConverge::Off,
            zero_pages: ZeroPages::Detect,
            holes: Holes::Skip,
            hint_rounds: HintRounds::First,
            hint_wait: Duration::from_secs(20),
            probe_pages: 2048,
            hint_rate: 32 << 20,
            chunk_pages: HUGE_PAGE_SIZE_PAGES,
        }
    }
}

/// Time limit of a migration and the action to take when it expires.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TimeLimit {
    /// Time since the start of the migration.
    pub after: Duration,
    /// Action at the time limit.
    pub then: AtTimeLimit,
}

/// Action at the time limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AtTimeLimit {
    /// Fail; the guest continues at the source.
    Cancel,
    /// Pause the guest and send the rest, however long that takes.
    Force,
}

/// How to handle a guest that writes faster than its memory can be sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AutoConverge {
    /// Do not throttle it; keep sending up to the time limit.
    Off,
    /// Throttle its vCPUs in steps until there is progress.
    On,
}

/// How to handle pages that are all zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ZeroPages {
    /// Scan for them and send a record without content.
    Detect,
    /// Send their content like that of other pages.
    Send,
}

/// How to handle pages that are not populated on the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Holes {
    /// Query them on the host and send a discard record without reading them.
    Skip,
    /// Read all pages without a query.
    Read,
}

/// Rounds in which the guest is asked for free page hints.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HintRounds {
    /// Only in the round that sends all pages.
    First,
    /// In each round except the last.
    Every,
}
