//! Disks, for the API.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::{Arc, Mutex};

use super::{Vm, lock};
use crate::api::control::ControlError;
use crate::api::disks::{DiskInfo, DiskResize, DisksInfo};
use crate::devices::virtio::block::{Block, ReplaceError, ResizeError};
use crate::devices::virtio::mmio::MmioTransport;
use crate::isolation::NO_DIRECTORY;
use crate::snapshot::MachineConfig;

/// A disk by its name.
pub(super) struct NamedDisk {
    pub device: String,
    pub transport: Arc<Mutex<MmioTransport<Block>>>,
}

impl NamedDisk {
    /// Whether the guest's writes are refused.
    pub(super) fn is_readonly(&self) -> bool {
        lock(&self.transport).device().readonly().is_on()
    }
}

impl Vm {
    pub(super) fn disks(&self) -> DisksInfo {
        let info = |disk: &NamedDisk| {
            let info = lock(&disk.transport).device().info();
            DiskInfo { device: disk.device.clone(), ..info }
        };
        DisksInfo { disks: self.disks.iter().map(info).collect() }
    }

    /// Describes the machine, with the images that its disks have now.
    pub(super) fn described(&self) -> MachineConfig {
        let mut machine = MachineConfig::of(&self.config);
        for (described, disk) in machine.disks.iter_mut().zip(&self.disks) {
            lock(&disk.transport).device().base_path().clone_into(&mut described.path);
        }
        machine
    }

    /// Gives a disk the size of its image or another image, and notifies the guest.
    pub(super) fn change_disk(
        &self,
        change: &DiskResize,
        descriptors: Vec<OwnedFd>,
    ) -> Result<(), ControlError> {
        let _state = self.not_given_away()?;
        match &change.path {
            Some(path) if change.size_bytes.is_none() => {
                self.replace_disk(self.find_disk(&change.device)?, path, descriptors)
            }
            Some(_) => Err(ControlError::Invalid {
                field: "size_bytes",
                message: "another image has its own size".to_owned(),
                remedy: Some("omit the size".to_owned()),
            }),
            None if descriptors.is_empty() => resize_disk(self.find_disk(&change.device)?, change),
            None => Err(ControlError::Invalid {
                field: "path",
                message: "file descriptors came with the request, which names no image".to_owned(),
                remedy: Some("name the image that they belong to".to_owned()),
            }),
        }
    }

    /// Gives a disk another image: that of `descriptors`, or the one that the companion opens.
    fn replace_disk(
        &self,
        disk: &NamedDisk,
        path: &Path,
        descriptors: Vec<OwnedFd>,
    ) -> Result<(), ControlError> {
        let invalid = |message: String| ControlError::Invalid {
            field: "path",
            message,
            remedy: Some("`ebb ctl SOCKET disks replace` opens the image itself".to_owned()),
        };
        let files = if descriptors.is_empty() {
            let companion = self.companion.as_ref();
            let companion = companion.ok_or_else(|| invalid(NO_DIRECTORY.to_owned()))?;
            let readonly = lock(&disk.transport).device().readonly();
            companion.open_image(path, readonly).map_err(|error| invalid(error.to_string()))?
        } else {
            descriptors
        };
        let files = files.into_iter().map(File::from).collect();
        let mut transport = lock(&disk.transport);
        transport.quiesce();
        transport.device_mut().replace(path, files).map_err(|error| match error {
            ReplaceError::Tables(_) => ControlError::failed(error),
            error => invalid(error.to_string()),
        })?;
        transport.config_changed();
        // Requests that came meanwhile.
        transport.wake();
        Ok(())
    }

    fn find_disk(&self, device: &str) -> Result<&NamedDisk, ControlError> {
        self.disks.iter().find(|disk| disk.device == device).ok_or_else(|| {
            let names: Vec<_> = self.disks.iter().map(|disk| disk.device.as_str()).collect();
            ControlError::Invalid {
                field: "device",
                message: "this virtual machine has no such disk".to_owned(),
                remedy: (!names.is_empty()).then(|| format!("name one of: {}", names.join(", "))),
            }
        })
    }
}

fn resize_disk(disk: &NamedDisk, change: &DiskResize) -> Result<(), ControlError> {
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
