//! The device's state apart from its queues, for snapshots.

use std::ops::RangeInclusive;

use ebb_abi::balloon::{Config, Features};
use serde::{Deserialize, Serialize};

use crate::host_request::RequestBuffer;

/// Version of [`BalloonState`]. Version 1 had no requests of the host.
pub const STATE_VERSION: u16 = 2;

/// Versions that can be restored.
pub(crate) const READABLE_VERSIONS: RangeInclusive<u16> = 1..=STATE_VERSION;

/// What a snapshot must keep of the device. The rings' positions are the transport's to save, after
/// this was taken.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BalloonState {
    /// [`STATE_VERSION`] of the device that wrote it.
    pub version: u16,
    /// Features offered, as the driver knows them.
    pub offered: u64,
    /// Features negotiated; `None` if no driver was active.
    pub negotiated: Option<u64>,
    /// The configuration space.
    pub config: [u8; Config::SIZE_BYTES],
    /// Number of the latest hinting command.
    pub last_hint_id: u32,
    /// Number of a hinting command that the driver has not stopped.
    pub unstopped_hint_id: Option<u32>,
    /// Number of the latest request of the host; it is never used again.
    #[serde(default)]
    pub last_request_id: u64,
    /// The buffer for requests that the device holds. Without it, nothing could ever be asked
    /// again.
    #[serde(default)]
    pub request_buffer: Option<RequestBuffer>,
    /// Head of the statistics buffer that the device holds. Without it, no statistics would ever
    /// come again.
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
