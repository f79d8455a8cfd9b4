//! Documents of a daemon that carries decisions out, and of its clients.

use serde::{Deserialize, Serialize};

use crate::explain::Explanation;
use crate::history::Fit;
use crate::level::{Cause, Level};
use crate::snapshot::{Host, Machine};

/// A host and all of its machines.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Status {
    /// Version of the daemon.
    pub version: String,
    /// When the last decision was made, in milliseconds since the host's start.
    pub at_ms: u64,
    /// The host's level.
    pub level: Level,
    /// Why it has it.
    pub cause: Cause,
    /// Since when, on the same clock.
    pub since_ms: u64,
    /// Its memory.
    pub host: Host,
    /// Its machines, by name.
    pub machines: Vec<MachineStatus>,
    /// What is wrong with the daemon itself, such as a state that cannot be saved; empty if nothing
    /// is.
    pub problems: Vec<String>,
}

/// One machine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MachineStatus {
    /// Its name.
    pub name: String,
    /// What is known of it; `None` while it is not part of decisions.
    pub machine: Option<Machine>,
    /// The kind of its monitor; `None` before it has answered.
    pub monitor: Option<String>,
    /// The socket.
    pub socket: String,
    /// Its process; `None` before it has answered.
    pub pid: Option<u32>,
    /// Its profile.
    pub profile: String,
    /// Whether an operator holds it.
    pub is_held: bool,
    /// Why it is left alone or its monitor cannot be used, or which order its monitor has refused.
    pub trouble: Option<String>,
    /// The last decision about it; `None` before the first one.
    pub explanation: Option<Explanation>,
}

/// The name of a machine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Named {
    /// The machine.
    pub machine: String,
}

/// A machine that is about to start.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Arrival {
    /// Its name: with it, it will be found among the host's machines. Its profile follows from it.
    pub machine: String,
    /// Its size.
    pub memory_bytes: u64,
    /// How long to wait for room, in milliseconds: machines are admitted in the order in which they
    /// were announced.
    #[serde(default)]
    pub wait_ms: u64,
}

/// Whether a machine may start.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Admission {
    /// Whether there is room, which is kept for it for a while.
    pub is_admitted: bool,
    /// How long room is kept, in milliseconds; 0 if there is none.
    pub kept_ms: u64,
    /// Machines that wait before it.
    pub before: u64,
    /// The numbers behind it: whether one more fits, with those that were admitted.
    pub fit: Fit,
}

/// What is asked about room for machines.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Room {
    /// Size of one machine.
    pub memory_bytes: u64,
    /// Its profile.
    #[serde(default = "default_profile")]
    pub profile: String,
}

fn default_profile() -> String {
    "default".to_owned()
}
