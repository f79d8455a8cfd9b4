//! Leases: changes that undo themselves unless their client renews them.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The shortest lease: a client that renews it needs some time to do so.
pub const MIN_LEASE_MS: u64 = 100;
/// The longest lease: ten minutes.
pub const MAX_LEASE_MS: u64 = 600 * 1000;

/// `PUT /vm/pause`: how long, at most.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct PauseRequest {
    /// The machine is resumed after this time, unless it is paused again before: the pause of a
    /// client that has died ends. Without it, it stays paused until it is resumed. A machine that
    /// is paused without a lease stays so.
    #[schemars(range(min = MIN_LEASE_MS, max = MAX_LEASE_MS), extend("x-unit" = "milliseconds"))]
    pub lease_ms: Option<u64>,
}
