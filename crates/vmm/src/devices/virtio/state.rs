//! The state of virtio devices in snapshots.

use ebb_balloon::BalloonState;
use serde::{Deserialize, Serialize};
use virtio_queue::{Queue, QueueState};

use crate::config::MacAddress;

/// A device behind its register window.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TransportState {
    /// Device id (virtio 1.3 section 5), so that a state cannot be given to another device.
    pub device_id: u32,
    /// Register `DeviceFeaturesSel`.
    pub features_page: u32,
    /// Register `DriverFeaturesSel`.
    pub driver_features_page: u32,
    /// Features that the driver has accepted so far.
    pub driver_features: u64,
    /// Register `QueueSel`.
    pub queue_select: u32,
    /// Register `Status`.
    pub status: u32,
    /// Register `InterruptStatus`.
    pub interrupt_status: u32,
    /// Register `ConfigGeneration`.
    pub config_generation: u32,
    /// Whether a driver runs the device.
    pub active: bool,
    /// Register `QueueReady` of each queue of an active device. Missing in older snapshots, whose
    /// drivers then read 0.
    #[serde(default)]
    pub ready: Vec<bool>,
    /// The queues in order.
    pub queues: Vec<SavedQueue>,
    /// State of the device itself.
    pub device: DeviceState,
}

/// A virtqueue: its addresses and the device's position in it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct SavedQueue {
    /// Largest possible number of entries.
    pub max_size: u16,
    /// Number of entries.
    pub size: u16,
    /// Whether the driver has made it ready.
    pub ready: bool,
    /// Index of the next entry of the available ring that the device takes.
    pub next_avail: u16,
    /// Index of the next entry of the used ring that it fills.
    pub next_used: u16,
    /// Whether VIRTIO_F_EVENT_IDX was negotiated.
    pub event_idx: bool,
    /// Guest-physical address of the descriptor table.
    pub desc_table: u64,
    /// Guest-physical address of the available ring.
    pub avail_ring: u64,
    /// Guest-physical address of the used ring.
    pub used_ring: u64,
}

impl From<QueueState> for SavedQueue {
    fn from(state: QueueState) -> Self {
        Self {
            max_size: state.max_size,
            size: state.size,
            ready: state.ready,
            next_avail: state.next_avail,
            next_used: state.next_used,
            event_idx: state.event_idx_enabled,
            desc_table: state.desc_table,
            avail_ring: state.avail_ring,
            used_ring: state.used_ring,
        }
    }
}

impl TryFrom<SavedQueue> for Queue {
    type Error = virtio_queue::Error;

    fn try_from(saved: SavedQueue) -> Result<Self, Self::Error> {
        QueueState {
            max_size: saved.max_size,
            next_avail: saved.next_avail,
            next_used: saved.next_used,
            event_idx_enabled: saved.event_idx,
            size: saved.size,
            ready: saved.ready,
            desc_table: saved.desc_table,
            avail_ring: saved.avail_ring,
            used_ring: saved.used_ring,
        }
        .try_into()
    }
}

/// State of a device besides its queues.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DeviceState {
    /// No state.
    Queues,
    /// The balloon device.
    Balloon(BalloonState),
    /// A disk.
    Disk {
        /// Its size, in sectors of 512 bytes.
        sectors: u64,
        /// Time of the last write to its image, in nanoseconds since 1970; `None` for a block
        /// device, and in older snapshots.
        #[serde(default)]
        modified_unix_ns: Option<u64>,
    },
    /// A network device.
    Net {
        /// Its address.
        mac: MacAddress,
        /// The MTU that it announces.
        mtu: Option<u16>,
        /// Whether the operator has taken its link down.
        link_down: bool,
    },
    /// A socket device. Its connections end where it is restored.
    Vsock {
        /// CID of the guest.
        cid: u32,
    },
}

/// A virtio device as seen by its driver.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceDescription {
    /// Device id (virtio 1.3 section 5).
    pub device_id: u32,
    /// Offered features.
    pub features: u64,
    /// Largest size of each queue.
    pub queue_sizes: Vec<u16>,
    /// Size of a disk in bytes.
    pub disk_bytes: Option<u64>,
}

impl DeviceDescription {
    /// Name of the device for messages.
    pub fn name(&self) -> String {
        match self.device_id {
            1 => "network device".to_owned(),
            2 => "disk".to_owned(),
            4 => "entropy device".to_owned(),
            5 => "balloon".to_owned(),
            19 => "socket device".to_owned(),
            other => format!("device with the virtio id {other}"),
        }
    }
}
