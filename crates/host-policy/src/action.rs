//! What can be done to a machine.

use serde::{Deserialize, Serialize};

/// Something to do to one machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Action {
    /// Its balloon gets this target.
    Balloon {
        /// Size of the balloon, not of the rest.
        target_bytes: u64,
    },
    /// Its guest reports all of its free pages at once.
    Reclaim,
    /// Its memory that is all zero is discarded.
    Trim,
    /// Its guest evicts cold caches, and reports what is free then.
    Park,
    /// Its processors stand still, and run again after this time if nothing else is decided before.
    Pause {
        /// The lease, in milliseconds.
        for_ms: u64,
    },
    /// Its processors run again.
    Resume,
    /// It is saved to a file and stopped.
    Stop,
}

/// An action and its machine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Order {
    /// The machine's name.
    pub machine: String,
    /// What is to be done.
    pub action: Action,
}
