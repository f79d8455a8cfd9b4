//! The device's state without its queues, for snapshots.

use std::ops::RangeInclusive;

use ebb_abi::balloon::{Config, Features};
use serde::{Deserialize, Serialize};

use crate::host_request::RequestBuffer;

/// Version of [`BalloonState`]. Version 1 had no host requests.
pub const STATE_VERSION: u16 = 2;

/// Versions that can be restored.
pub(crate) const READABLE_VERSIONS: RangeInclusive<u16> = 1..=STATE_VERSION;

/// The device's state in a snapshot. The transport saves the positions of the rings, after this
/// state was taken.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BalloonState {
    /// [`STATE_VERSION`] of the device that wrote it.
    pub version: u16,
    /// Features offered to the driver.
    pub offered: u64,
    /// Features negotiated; `None` if no driver was active.
    pub negotiated: Option<u64>,
    /// The configuration space.
    pub config: [u8; Config::SIZE_BYTES],
    /// Number of the latest hinting command.
    pub last_hint_id: u32,
    /// Number of a hinting command that the driver has not stopped.
    pub unstopped_hint_id: Option<u32>,
    /// Number of the latest host request; it is never used again.
    #[serde(default)]
    pub last_request_id: u64,
    /// The request buffer that the device holds. Without it, no further request could be made.
    #[serde(default)]
    pub request_buffer: Option<RequestBuffer>,
    /// Head of the statistics buffer that the device holds. Without it, no statistics would ever
    /// arrive again.
    pub statistics_head: Option<u16>,
    /// Interval between requests for statistics, in milliseconds.
    pub statistics_interval_ms: Option<u64>,
}

impl BalloonState {
    /// The offered features.
    pub fn offered_features(&self) -> Features {
        Features(self.offered)
    }
}
