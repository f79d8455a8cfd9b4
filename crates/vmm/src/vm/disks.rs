//! Disks, for the API.

use std::sync::{Arc, Mutex};

use super::{Vm, lock};
use crate::api::control::ControlError;
use crate::api::disks::{DiskInfo, DiskResize, DisksInfo};
use crate::devices::virtio::block::{Block, ResizeError};
use crate::devices::virtio::mmio::MmioTransport;

/// A disk by its name.
pub(super) struct NamedDisk {
    pub device: String,
    pub transport: Arc<Mutex<MmioTransport<Block>>>,
}

impl Vm {
    pub(super) fn disks(&self) -> DisksInfo {
        let info = |disk: &NamedDisk| {
            let info = lock(&disk.transport).device().info();
            DiskInfo { device: disk.device.clone(), ..info }
        };
        DisksInfo { disks: self.disks.iter().map(info).collect() }
    }

    /// Gives a disk the size of its image, and notifies the guest.
    pub(super) fn resize_disk(&self, change: &DiskResize) -> Result<(), ControlError> {
        let _state = self.not_given_away()?;
        let disk = self.disks.iter().find(|disk| disk.device == change.device);
        let disk = disk.ok_or_else(|| {
            let names: Vec<_> = self.disks.iter().map(|disk| disk.device.as_str()).collect();
            ControlError::Invalid {
                field: "device",
                message: "this virtual machine has no such disk".to_owned(),
                remedy: (!names.is_empty()).then(|| format!("name one of: {}", names.join(", "))),
            }
        })?;
        let mut transport = lock(&disk.transport);
        let before = transport.device().info().size_bytes;
        let after = transport.device_mut().resize(change.size_bytes).map_err(|error| {
            let message = format!("{}: {error}", disk.device);
            match error {
                ResizeError::Shrinks { known_bytes, .. } => ControlError::WrongState {
                    message,
                    remedy: Some(format!("enlarge the image to {known_bytes} bytes or more")),
                },
                ResizeError::OddSize { block_bytes, .. } => ControlError::WrongState {
                    message,
                    remedy: Some(format!("enlarge it to a multiple of {block_bytes}")),
                },
                ResizeError::TooLarge { .. } => ControlError::WrongState {
                    message,
                    remedy: Some("start the machine anew with the larger image".to_owned()),
                },
                ResizeError::SizeOfRaw => ControlError::Invalid {
                    field: "size_bytes",
                    message,
                    remedy: Some("enlarge the file or device, and omit the size".to_owned()),
                },
                ResizeError::NoSize => ControlError::Invalid {
                    field: "size_bytes",
                    message,
                    remedy: Some("send the new size".to_owned()),
                },
                ResizeError::Image(_) => ControlError::Failed { message },
            }
        })?;
        if after != before {
            transport.config_changed();
        }
        Ok(())
    }
}
