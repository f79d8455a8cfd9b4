//! The description of a machine that its destination needs before memory is sent.

use std::fmt;

use ebb_guest_ram::SharedLayout;
use ebb_kvm_clock::Kilohertz;
use kvm_ioctls::{Cap, Kvm};
use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::devices::virtio::state::DeviceDescription;
use crate::size::ByteSize;
use crate::snapshot::MachineConfig;
use crate::snapshot::processor::Processor;

/// A machine that will be migrated.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Description {
    /// The machine's configuration. Paths are absolute.
    pub machine: MachineConfig,
    /// The processor that the guest was given.
    pub processor: Processor,
    /// Frequency of the guest's time stamp counters.
    pub tsc_khz: Kilohertz,
    /// Model specific registers in the state of its vCPUs.
    pub msrs: Vec<u32>,
    /// KVM's capabilities that the machine was built with, of those in [`KVM_CAPABILITIES`].
    pub capabilities: Vec<String>,
    /// Regions of its memory.
    pub regions: Vec<MemoryRegion>,
    /// Its virtio devices in slot order.
    pub devices: Vec<DeviceDescription>,
    /// Resident memory in bytes: the minimum that it needs at the destination.
    pub held_bytes: u64,
    /// The files of its memory, if they are shared instead of their content being sent.
    pub shared: Option<SharedLayout>,
}

/// A region of guest memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryRegion {
    /// Guest-physical address of the first byte.
    pub start: u64,
    /// Size in bytes.
    pub size_bytes: u64,
}

/// KVM capabilities without which a part of a machine's state could not be restored, or the guest
/// would miss a feature, with their names (Linux Documentation/virt/kvm/api.rst).
pub const KVM_CAPABILITIES: [(Cap, &str); 8] = [
    (Cap::AdjustClock, "KVM_CAP_ADJUST_CLOCK"),
    (Cap::Debugregs, "KVM_CAP_DEBUGREGS"),
    (Cap::KvmclockCtrl, "KVM_CAP_KVMCLOCK_CTRL"),
    (Cap::MpState, "KVM_CAP_MP_STATE"),
    (Cap::TscDeadlineTimer, "KVM_CAP_TSC_DEADLINE_TIMER"),
    (Cap::VcpuEvents, "KVM_CAP_VCPU_EVENTS"),
    (Cap::Xcrs, "KVM_CAP_XCRS"),
    (Cap::Xsave, "KVM_CAP_XSAVE"),
];

/// Names of the [`KVM_CAPABILITIES`] that this KVM has.
pub fn capabilities(kvm: &Kvm) -> Vec<String> {
    KVM_CAPABILITIES
        .into_iter()
        .filter(|(capability, _)| kvm.check_extension(*capability))
        .map(|(_, name)| name.to_owned())
        .collect()
}

/// The machine that a destination has built.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Here {
    /// As [`Description::msrs`].
    pub msrs: Vec<u32>,
    /// As [`Description::capabilities`].
    pub capabilities: Vec<String>,
    /// As [`Description::regions`].
    pub regions: Vec<MemoryRegion>,
    /// As [`Description::devices`].
    pub devices: Vec<DeviceDescription>,
}

/// Why a destination cannot accept a machine.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum Incompatible {
    /// KVM is too old, or the processor is another.
    #[error(
        "KVM on this host lacks {0}, which the machine was started with; \
         use a kernel like that of the source's host"
    )]
    Capabilities(Names),
    /// vCPUs here lack model specific registers.
    #[error(
        "vCPUs on this host lack the model specific registers {0}; \
         use a processor and a kernel like those of the source's host"
    )]
    Registers(Names),
    /// The memory layouts differ.
    #[error(
        "guest memory has another layout here ({here} instead of {there}); \
         use the same release of Ebb"
    )]
    Layout {
        /// Regions here.
        here: String,
        /// Regions at the source.
        there: String,
    },
    /// The numbers of devices differ.
    #[error(
        "the machine has {there} virtio devices and would have {here} here; \
         use the same release of Ebb"
    )]
    DeviceCount {
        /// Here.
        here: usize,
        /// At the source.
        there: usize,
    },
    /// A device differs.
    #[error("the {device} in slot {place} differs here: {problem}")]
    Device {
        /// The device at the source.
        device: String,
        /// Its slot, from 0.
        place: usize,
        /// The difference, and what to do.
        problem: String,
    },
    /// Too little memory.
    #[error(
        "this host has {available} of memory available, but the machine needs {needed} of its own; \
         free some, or use another host"
    )]
    Memory {
        /// `MemAvailable` of this host.
        available: ByteSize,
        /// The machine's minimum.
        needed: ByteSize,
    },
}

/// A list of names for messages.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Names(Vec<String>);

impl fmt::Display for Names {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&shown(&self.0, ", "))
    }
}

impl Description {
    /// Checks that what was built for this machine can continue it.
    ///
    /// # Errors
    /// The first mismatch.
    pub fn check(&self, here: &Here) -> Result<(), Incompatible> {
        let missing: Vec<_> = self
            .capabilities
            .iter()
            .filter(|name| !here.capabilities.contains(name))
            .cloned()
            .collect();
        if !missing.is_empty() {
            return Err(Incompatible::Capabilities(Names(missing)));
        }
        let missing: Vec<_> = self
            .msrs
            .iter()
            .filter(|msr| !here.msrs.contains(msr))
            .map(|msr| format!("{msr:#x}"))
            .collect();
        if !missing.is_empty() {
            return Err(Incompatible::Registers(Names(missing)));
        }
        if self.regions != here.regions {
            let (here, there) = (layout(&here.regions), layout(&self.regions));
            return Err(Incompatible::Layout { here, there });
        }
        if self.devices.len() != here.devices.len() {
            return Err(Incompatible::DeviceCount {
                here: here.devices.len(),
                there: self.devices.len(),
            });
        }
        for (place, (there, here)) in self.devices.iter().zip(&here.devices).enumerate() {
            if let Some(problem) = difference(there, here) {
                return Err(Incompatible::Device { device: there.name(), place, problem });
            }
        }
        Ok(())
    }

    /// Checks that a host with `available_bytes` of memory can hold the guest's resident memory.
    ///
    /// # Errors
    /// [`Incompatible::Memory`].
    pub fn check_memory(&self, available_bytes: u64) -> Result<(), Incompatible> {
        if self.held_bytes <= available_bytes || self.shared.is_some() {
            return Ok(());
        }
        Err(Incompatible::Memory {
            available: ByteSize::from_bytes(available_bytes),
            needed: ByteSize::from_bytes(self.held_bytes),
        })
    }
}

/// The first elements of a possibly very long list, for a message.
fn shown(texts: &[String], separator: &str) -> String {
    const MOST: usize = 8;
    const MOST_CHARACTERS: usize = 64;
    let cut = |text: &String| text.chars().take(MOST_CHARACTERS).collect::<String>();
    let mut text = texts.iter().take(MOST).map(cut).collect::<Vec<_>>().join(separator);
    if texts.len() > MOST {
        text = format!("{text}{separator}and {} more", texts.len() - MOST);
    }
    text
}

fn layout(regions: &[MemoryRegion]) -> String {
    let parts: Vec<_> = regions
        .iter()
        .map(|region| format!("{:#x}+{:#x}", region.start, region.size_bytes))
        .collect();
    shown(&parts, " ")
}

/// The first difference that a driver would notice.
fn difference(there: &DeviceDescription, here: &DeviceDescription) -> Option<String> {
    if there.device_id != here.device_id {
        return Some(format!("it is the {} here; use the same release of Ebb", here.name()));
    }
    let missing = there.features & !here.features;
    if missing != 0 {
        return Some(format!("it lacks the features {missing:#x}; use the same release of Ebb"));
    }
    if there.queue_sizes != here.queue_sizes {
        return Some("it has other queues; use the same release of Ebb".to_owned());
    }
    match (there.disk_bytes, here.disk_bytes) {
        (Some(there), Some(here)) if there != here => Some(format!(
            "its image has {here} bytes here and {there} at the source; both must use the same \
             image, or give its path here with --disk"
        )),
        _ => None,
    }
}

#[cfg(test)]
mod tests;
