//! What can be asked of a migration.

use std::time::Duration;

use ebb_abi::HUGE_PAGE_SIZE_PAGES;
use serde::{Deserialize, Serialize};

/// How to move a guest's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Config {
    /// The guest is stopped for the last round when what is left takes no longer than this.
    pub downtime_limit: Duration,
    /// Bytes a second on all streams together, at most.
    pub bandwidth_limit: Option<u64>,
    /// When to stop trying.
    pub time_limit: Option<TimeLimit>,
    /// What to do with a guest that writes faster than its memory can be sent.
    pub auto_converge: AutoConverge,
    /// What to do with pages that are all zero.
    pub zero_pages: ZeroPages,
    /// What to do with pages that the host does not hold.
    pub holes: Holes,
    /// When the guest is asked for free pages.
    pub hint_rounds: HintRounds,
    /// How long a round waits for hints, at most, before it sends what was not named. Pages that
    /// are sent before they are named are sent in vain.
    pub hint_wait: Duration,
    /// Pages that are sent before the guest is asked for free ones, to find out how fast the link
    /// is: the wait for hints goes on as long as they come at half of that or faster. A guest with
    /// less than four times as many is asked at once.
    pub probe_pages: u64,
    /// Bytes a second that the guest must name for the wait to go on where the link's speed is not
    /// known.
    pub hint_rate: u64,
    /// Pages that a stream takes at a time.
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

/// When to stop trying, and what then.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TimeLimit {
    /// Time from the beginning.
    pub after: Duration,
    /// What to do then.
    pub then: AtTimeLimit,
}

/// What to do at the time limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AtTimeLimit {
    /// Give up; the guest runs on at the source.
    Cancel,
    /// Stop the guest and send what is left, however long that takes.
    Force,
}

/// What to do with a guest that writes faster than its memory can be sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AutoConverge {
    /// Let it run, up to the time limit.
    Off,
    /// Slow its vCPUs down in steps until there is progress.
    On,
}

/// What to do with pages that are all zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ZeroPages {
    /// Look for them and send that they are zero.
    Detect,
    /// Send them as all others.
    Send,
}

/// What to do with pages that the host does not hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Holes {
    /// Ask the host which these are, do not read them, and send that there is nothing.
    Skip,
    /// Do not ask; read all pages.
    Read,
}

/// When the guest is asked for free pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HintRounds {
    /// In the round in which all pages are sent.
    First,
    /// In each round but the last.
    Every,
}
