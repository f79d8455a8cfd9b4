//! A machine as its destination has to know it before anything of it is sent.

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

/// A machine that is to be moved.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Description {
    /// What it is made of. Paths are absolute.
    pub machine: MachineConfig,
    /// The processor that the guest knows.
    pub processor: Processor,
    /// Frequency of the guest's time stamp counters.
    pub tsc_khz: Kilohertz,
    /// Model specific registers in the state of its vCPUs.
    pub msrs: Vec<u32>,
    /// KVM's capabilities that the machine was built with, of those in [`KVM_CAPABILITIES`].
    pub capabilities: Vec<String>,
    /// Where its memory is.
    pub regions: Vec<MemoryRegion>,
    /// Its virtio devices in the order of their places.
    pub devices: Vec<DeviceDescription>,
    /// Memory that its host holds, in bytes: what it needs at least.
    pub held_bytes: u64,
    /// Whether it is paused, and stays so.
    pub paused: bool,
    /// Its memory's files, if they are handed over instead of what is in them.
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

/// KVM's capabilities without which a part of a machine's state could not be set, or without which
/// the guest would miss something, with their names (Linux Documentation/virt/kvm/api.rst).
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

/// Names of those of [`KVM_CAPABILITIES`] that this KVM has.
pub fn capabilities(kvm: &Kvm) -> Vec<String> {
    KVM_CAPABILITIES
        .into_iter()
        .filter(|(capability, _)| kvm.check_extension(*capability))
        .map(|(_, name)| name.to_owned())
        .collect()
}

/// What a destination has built for a machine.
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

/// Why a destination cannot take a machine.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum Incompatible {
    /// A KVM that is too old, or for another processor.
    #[error(
        "KVM on this host lacks {0}, which the machine was started with; use a kernel as on the source's host"
    )]
    Capabilities(Names),
    /// Registers that vCPUs do not have here.
    #[error(
        "vCPUs on this host lack the model specific registers {0}; use a processor and a kernel like those of the source's host"
    )]
    Registers(Names),
    /// The memory is elsewhere.
    #[error(
        "guest memory is laid out in another way here ({here} instead of {there}); use the same release of Ebb"
    )]
    Layout {
        /// Regions here.
        here: String,
        /// Regions at the source.
        there: String,
    },
    /// Another number of devices.
    #[error(
        "the machine has {there} virtio devices and would have {here} here; use the same release of Ebb"
    )]
    DeviceCount {
        /// Here.
        here: usize,
        /// At the source.
        there: usize,
    },
    /// Another device.
    #[error("the {device} in place {place} would be another one here: {problem}")]
    Device {
        /// What it is at the source.
        device: String,
        /// Its place, from 0.
        place: usize,
        /// What is different, and what to do.
        problem: String,
    },
    /// Too little memory.
    #[error(
        "this host has {available} of memory available, and the machine holds {needed} on its own; free some, or use another host"
    )]
    Memory {
        /// `MemAvailable` of this host.
        available: ByteSize,
        /// What the machine needs at least.
        needed: ByteSize,
    },
}

/// A list of names for people.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Names(Vec<String>);

impl fmt::Display for Names {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&shown(&self.0, ", "))
    }
}

impl Description {
    /// Whether what was built for this machine can be this machine.
    ///
    /// # Errors
    /// The first thing that cannot.
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

    /// Whether a host with `available_bytes` of memory can hold what the guest has in memory.
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

/// The first of what may be very many, for a message.
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

/// What a driver would notice.
fn difference(there: &DeviceDescription, here: &DeviceDescription) -> Option<String> {
    if there.device_id != here.device_id {
        return Some(format!("it is the {} there; use the same release of Ebb", here.name()));
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
            "its image has {here} bytes here and {there} at the source; both must use the same image, or give its path here with --disk"
        )),
        _ => None,
    }
}

#[cfg(test)]
mod tests;
