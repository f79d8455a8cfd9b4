//! Everything of a machine except the content of its RAM.

use ebb_guest_ram::RamImage;
use ebb_kvm_clock::SavedClock;
use kvm_bindings::{kvm_irqchip, kvm_pit_state2};
use rustix::fs::Stat;
use serde::{Deserialize, Serialize};

use super::processor::Processor;
use super::{MachineConfig, SnapshotError};
use crate::config::DiskConfig;
use crate::cpu::state::VcpuState;
use crate::devices::serial::SavedSerial;
use crate::devices::virtio::block::modified_unix_ns;
use crate::devices::virtio::state::{DeviceState, TransportState};

/// The state of a paused machine.
#[derive(Serialize, Deserialize)]
pub struct MachineState {
    /// Version of the monitor that wrote it, for information.
    pub monitor: String,
    /// When it was written, in milliseconds since 1970.
    pub created_unix_ms: u64,
    /// The machine's configuration.
    pub machine: MachineConfig,
    /// The processor that the guest was given.
    pub processor: Processor,
    /// vCPUs by index.
    pub vcpus: Vec<VcpuState>,
    /// KVM's clock and the time stamp counters when the vCPUs stopped.
    pub clock: SavedClock,
    /// KVM's interrupt controllers and timer.
    pub interrupts: InterruptControllers,
    /// The serial line.
    pub serial: SavedSerial,
    /// ACPI events that the guest has not read.
    pub acpi_events: u8,
    /// Whether the guest's ACPI tables have a VM generation id; older ones do not.
    #[serde(default)]
    pub generation_id: bool,
    /// Whether the machine was paused, and remains so at the destination of a migration.
    #[serde(default)]
    pub paused: bool,
    /// virtio devices in slot order.
    pub devices: Vec<TransportState>,
    /// Location of the RAM's content in the file; `None` if the RAM is transferred separately, as
    /// in a migration.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ram: Option<RamImage>,
}

/// KVM's interrupt controllers of the PC (8259 pair and I/O APIC) and its timer.
#[derive(Clone, Serialize, Deserialize)]
pub struct InterruptControllers {
    /// Master and slave 8259 and the I/O APIC.
    pub chips: Vec<kvm_irqchip>,
    /// The 8254.
    pub timer: kvm_pit_state2,
}

impl std::fmt::Debug for MachineState {
    /// Omits the registers.
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter
            .debug_struct("MachineState")
            .field("monitor", &self.monitor)
            .field("machine", &self.machine)
            .finish_non_exhaustive()
    }
}

impl MachineState {
    /// Checks the parts against each other and against the size of the RAM, without a machine.
    /// Returns the mismatch.
    pub(crate) fn validate(&self, ram_bytes: u64) -> Result<(), String> {
        if self.vcpus.len() != usize::from(self.machine.cpus)
            || self.clock.guest_tsc.len() != self.vcpus.len()
        {
            return Err(format!(
                "it has {} vCPUs and {} time stamp counters for a machine of {}",
                self.vcpus.len(),
                self.clock.guest_tsc.len(),
                self.machine.cpus
            ));
        }
        if self.machine.memory_bytes != ram_bytes {
            return Err(format!(
                "it has {ram_bytes} bytes of RAM for {}",
                self.machine.memory_bytes
            ));
        }
        Ok(())
    }

    /// Checks that the images of the disks are as they were when the snapshot was taken. An image
    /// that cannot be read is left to the device, which reports that better.
    ///
    /// # Errors
    /// [`SnapshotError::DiskChanged`].
    pub(crate) fn check_disks(&self, disks: &[DiskConfig]) -> Result<(), SnapshotError> {
        self.check_disk_files(disks, disks.iter().map(|disk| rustix::fs::stat(disk.top()).ok()))
    }

    /// As [`check_disks`](Self::check_disks), for these files.
    pub(crate) fn check_disk_files(
        &self,
        disks: &[DiskConfig],
        files: impl Iterator<Item = Option<Stat>>,
    ) -> Result<(), SnapshotError> {
        let saved = self.devices.iter().filter_map(|device| match device.device {
            DeviceState::Disk { modified_unix_ns, .. } => Some(modified_unix_ns),
            _ => None,
        });
        for ((disk, saved), file) in disks.iter().zip(saved).zip(files) {
            let Some(found) = file.and_then(|stat| modified_unix_ns(&stat)) else { continue };
            let changed = match saved {
                Some(saved) => found != saved,
                // Timestamps of files are coarser than clocks.
                None => found / 1_000_000 > self.created_unix_ms.saturating_add(2_000),
            };
            if changed {
                return Err(SnapshotError::DiskChanged { path: disk.top().to_owned() });
            }
        }
        Ok(())
    }

    /// Takes the location of the RAM's content out of the state of a snapshot, if it is valid for
    /// `ram_bytes`.
    pub(super) fn take_ram(&mut self, ram_bytes: u64) -> Result<RamImage, String> {
        let ram = self.ram.take().ok_or("the layout of its RAM is missing")?;
        if ram.ram_bytes() != ram_bytes {
            return Err(format!(
                "it describes {} bytes of RAM but has {ram_bytes}",
                ram.ram_bytes()
            ));
        }
        ram.validate().map_err(|error| error.to_string())?;
        Ok(ram)
    }
}
