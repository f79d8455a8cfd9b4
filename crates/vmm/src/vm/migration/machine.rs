//! The migrated machine: its description, and the resources that change owners with it.

use std::sync::atomic::Ordering;

use super::description::{Description, Here, MemoryRegion};
use crate::api::vm::VmState;
use crate::clock::GuestClockError;
use crate::snapshot::processor::Processor;
use crate::vm::{Vm, VmError, lock};

impl Vm {
    /// Describes the machine for its destination.
    pub(super) fn describe(&self) -> Result<Description, VmError> {
        let tsc = self.tsc.ok_or(GuestClockError::NoFrequency)?;
        let machine = self.described();
        let here = self.here();
        Ok(Description {
            machine,
            processor: Processor::of(&self.cpuid),
            tsc_khz: tsc.guest,
            msrs: here.msrs,
            capabilities: here.capabilities,
            regions: here.regions,
            devices: here.devices,
            // Pages that are shared here need memory of their own there.
            held_bytes: self.ram.resident_bytes()? + self.merged_bytes().unwrap_or(0),
            shared: None,
        })
    }

    /// The machine as built by this monitor, for comparison with another's description.
    pub(in crate::vm) fn here(&self) -> Here {
        let region = |region: &ebb_guest_ram::Region| MemoryRegion {
            start: region.start.0,
            size_bytes: region.size_bytes,
        };
        Here {
            msrs: self.msrs.numbers().to_vec(),
            capabilities: self.capabilities.clone(),
            regions: self.ram.regions().iter().map(region).collect(),
            devices: self.devices.iter().map(|device| lock(device).describe()).collect(),
        }
    }

    /// Makes the devices release what only one monitor may hold.
    pub(in crate::vm) fn release_exclusive(&self) -> Result<(), String> {
        self.released_exclusive.store(true, Ordering::Relaxed);
        self.devices.iter().try_for_each(|device| lock(device).release_exclusive())
    }

    /// Acquires what only one monitor may hold, if the devices have released it.
    pub(in crate::vm) fn reacquire_exclusive(&self) -> Result<(), String> {
        if self.released_exclusive.load(Ordering::Relaxed) {
            self.acquire_exclusive()?;
            self.released_exclusive.store(false, Ordering::Relaxed);
        }
        Ok(())
    }

    /// Acquires what only one monitor may hold, for a machine that another monitor has released.
    pub(in crate::vm) fn acquire_exclusive(&self) -> Result<(), String> {
        self.devices.iter().try_for_each(|device| lock(device).acquire_exclusive())
    }

    /// Ends an attempt to stop the machine for a migration. A machine that `freeze` has stopped
    /// continues.
    pub(super) fn not_stopped(&self, frozen: Result<(), VmError>) -> Result<(), VmError> {
        let mut state = lock(&self.state);
        if *state != VmState::Migrating {
            return frozen;
        }
        let continued = frozen.is_ok().then(|| self.thaw()).transpose();
        *state = if continued.is_ok() { VmState::Running } else { VmState::Paused };
        frozen.and(continued.map(drop))
    }

    /// Continues a machine here that was stopped for a migration.
    pub(super) fn take_back(&self, was_paused: bool) -> Result<(), VmError> {
        let mut state = lock(&self.state);
        if *state != VmState::Migrating {
            return Ok(());
        }
        *state = VmState::Paused;
        self.reacquire_exclusive().map_err(VmError::Device)?;
        if !was_paused {
            self.thaw()?;
            *state = VmState::Running;
        }
        Ok(())
    }
}
