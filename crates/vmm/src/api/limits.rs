//! Limits of devices' requests: documents.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

pub use crate::config::RateLimits;

/// `GET /limits`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[schemars(rename = "Limits")]
pub struct LimitsInfo {
    /// The devices whose requests can be limited: disks, the entropy device, each direction
    /// of network devices, and the serial line unless its output is discarded.
    pub devices: Vec<DeviceLimits>,
}

/// A device's limits.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct DeviceLimits {
    /// Name of the device: disk0 and further, rng, net0_rx (frames to the guest), net0_tx (frames
    /// from it) and further, serial.
    pub device: String,
    /// Its limits; null where there is none.
    #[serde(flatten)]
    pub limits: RateLimits,
    /// Number of requests that had to wait.
    pub delayed_requests: u64,
}

/// `PUT /limits`: new limits of a device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct LimitsChange {
    /// Name of the device, as in `GET /limits`.
    #[schemars(extend("x-form" = "the name of a device, such as disk0, rng or serial"))]
    pub device: String,
    /// What changes.
    #[serde(flatten)]
    pub limits: RateLimits,
}
