//! The state of a machine for a snapshot: captured, and restored.

use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use kvm_bindings::{
    KVM_IRQCHIP_IOAPIC, KVM_IRQCHIP_PIC_MASTER, KVM_IRQCHIP_PIC_SLAVE, kvm_irqchip,
};
use kvm_ioctls::VmFd;

use super::{Vm, VmError, lock, saved_instant};
use crate::clock::{self, GuestClockError};
use crate::cpu::state::VcpuState;
use crate::snapshot::processor::Processor;
use crate::snapshot::state::InterruptControllers;
use crate::snapshot::{MachineState, SnapshotError};

impl Vm {
    /// State of a paused machine, except its RAM, which the devices may write to meanwhile.
    pub(super) fn capture(&self) -> Result<MachineState, VmError> {
        let vcpus = self.vcpus.collect(|vcpu| vcpu.capture())?;
        let interrupts = capture_interrupts(&self.kvm)?;
        let clock = lock(&self.frozen).clone().ok_or(GuestClockError::NoFrequency)?;
        let devices = self.devices.iter().map(|device| lock(device).save()).collect();
        let created = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Ok(MachineState {
            monitor: env!("CARGO_PKG_VERSION").to_owned(),
            created_unix_ms: u64::try_from(created.as_millis()).unwrap_or(u64::MAX),
            machine: self.described(),
            processor: Processor::of(&self.cpuid),
            vcpus,
            clock,
            interrupts,
            serial: lock(&self.serial).save(),
            acpi_events: lock(&self.acpi).pending_events(),
            generation_id: self.generation.is_known(),
            paused: false,
            devices,
            ram: None,
        })
    }

    /// Restores a saved state before anything has run; RAM has its content already. Devices remain
    /// paused until the machine is started.
    pub(super) fn restore(&self, saved: MachineState) -> Result<(), VmError> {
        for worker in &self.workers {
            worker.pause();
        }
        if saved.devices.len() != self.devices.len() {
            return Err(SnapshotError::Device {
                device: "list".to_owned(),
                problem: format!(
                    "{} devices in the snapshot, {} here",
                    saved.devices.len(),
                    self.devices.len()
                ),
            }
            .into());
        }
        for (index, (device, state)) in self.devices.iter().zip(&saved.devices).enumerate() {
            lock(device).restore(state).map_err(|problem| SnapshotError::Device {
                device: format!("{index} (virtio id {})", state.device_id),
                problem,
            })?;
        }
        lock(&self.serial).restore(&saved.serial).map_err(|problem| SnapshotError::Device {
            device: "serial line".to_owned(),
            problem,
        })?;
        let vcpus: Arc<[VcpuState]> = saved.vcpus.into();
        let states = vcpus.clone();
        self.vcpus.on_each(move |vcpu| states[usize::from(vcpu.index)].apply(&vcpu.fd))?;
        apply_interrupts(&saved.interrupts, &self.kvm)?;

        let tsc = self.tsc.ok_or(GuestClockError::NoFrequency)?;
        clock::prime(&self.kvm)?;
        let plan = clock::plan(&saved.clock, self.config.clock, &self.kvm, &self.vcpus, tsc)?;
        clock::set_counters(&self.vcpus, &plan)?;
        let states = vcpus.clone();
        self.vcpus.on_each(move |vcpu| states[usize::from(vcpu.index)].apply_deadline(&vcpu.fd))?;
        clock::set(&self.kvm, &plan)?;
        self.vcpus.on_each(move |vcpu| vcpus[usize::from(vcpu.index)].apply_clock(&vcpu.fd))?;
        lock(&self.clock_info).stopped = saved_instant(&saved.clock);
        *lock(&self.frozen) = Some(saved.clock);

        for device in &self.devices {
            lock(device).interrupt_again();
        }
        lock(&self.serial).interrupt_again();
        self.generation.arrive(saved.generation_id);
        lock(&self.acpi).restore(saved.acpi_events);
        Ok(())
    }

    /// Gives a restored machine another generation id than its siblings, and notifies its guest.
    pub(super) fn renew_generation(&self) -> Result<(), VmError> {
        if !self.generation.is_known() {
            return Ok(());
        }
        self.generation.write(self.ram.memory())?;
        lock(&self.acpi).notify(crate::acpi::EVENT_GENERATION);
        Ok(())
    }
}

/// Reads the state of KVM's interrupt controllers and timer.
pub(super) fn capture_interrupts(vm: &VmFd) -> Result<InterruptControllers, VmError> {
    let chips = [KVM_IRQCHIP_PIC_MASTER, KVM_IRQCHIP_PIC_SLAVE, KVM_IRQCHIP_IOAPIC]
        .into_iter()
        .map(|chip_id| {
            let mut chip = kvm_irqchip { chip_id, ..Default::default() };
            vm.get_irqchip(&mut chip).map(|()| chip)
        })
        .collect::<Result<_, _>>()
        .map_err(VmError::kvm("read its interrupt controllers"))?;
    Ok(InterruptControllers {
        chips,
        timer: vm.get_pit2().map_err(VmError::kvm("read its timer"))?,
    })
}

/// Sets that state. Interrupts pending in the I/O APIC go to the local APICs at once, so those must
/// have their state already.
pub(super) fn apply_interrupts(state: &InterruptControllers, vm: &VmFd) -> Result<(), VmError> {
    for chip in &state.chips {
        vm.set_irqchip(chip).map_err(VmError::kvm("set its interrupt controllers"))?;
    }
    vm.set_pit2(&state.timer).map_err(VmError::kvm("set its timer"))
}
