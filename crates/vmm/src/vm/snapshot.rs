//! Writing a machine to a snapshot, and taking one's state.

use std::path::Path;
use std::sync::Arc;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use super::{Vm, VmError, interrupts, lock};
use crate::api::control::{SnapshotReport, VmState};
use crate::clock::{self, GuestClockError};
use crate::cpu::state::VcpuState;
use crate::snapshot::file::{NewSnapshot, RAM_OFFSET_BYTES};
use crate::snapshot::processor::Processor;
use crate::snapshot::{MachineConfig, MachineState, SnapshotError};

impl Vm {
    /// Writes a snapshot to `path`. `state` is the machine's state: one that runs is stopped while its memory is copied.
    pub(super) fn write_snapshot(&self, path: &Path, state: VmState) -> Result<SnapshotReport, VmError> {
        let started = Instant::now();
        let new = NewSnapshot::create(path)?;
        let running = state == VmState::Running;
        if running {
            self.freeze()?;
        }
        let stopped = Instant::now();
        let captured = self.capture(&new);
        let thawed = if running { self.thaw() } else { Ok(()) };
        let paused = if running { stopped.elapsed() } else { std::time::Duration::ZERO };
        let (captured, ()) = (captured?, thawed?);
        let ram_bytes = captured.ram.data_bytes();
        let written = new.finish(&captured, self.ram.size_bytes())?;
        let ms = |duration: std::time::Duration| u64::try_from(duration.as_millis()).unwrap_or(u64::MAX);
        Ok(SnapshotReport {
            path: path.to_string_lossy().into_owned(),
            file_bytes: written.file_bytes,
            stored_bytes: written.stored_bytes,
            ram_bytes,
            elapsed_ms: ms(started.elapsed()),
            paused_ms: ms(paused),
        })
    }

    /// Everything of a machine that stands still; its RAM goes into the file. RAM comes last: reading the devices' state makes
    /// them finish what they have begun.
    fn capture(&self, new: &NewSnapshot) -> Result<MachineState, VmError> {
        let msrs = self.msrs.clone();
        let vcpus = self.vcpus.collect(move |vcpu| VcpuState::capture(&vcpu.fd, &msrs))?;
        let interrupts = interrupts::capture(&self.kvm)?;
        let clock = lock(&self.frozen).clone().ok_or(GuestClockError::NoFrequency)?;
        let devices = self.devices.iter().map(|device| lock(device).save()).collect();
        let created = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Ok(MachineState {
            monitor: env!("CARGO_PKG_VERSION").to_owned(),
            created_unix_ms: u64::try_from(created.as_millis()).unwrap_or(u64::MAX),
            machine: MachineConfig::of(&self.config),
            processor: Processor::of(&self.cpuid),
            vcpus,
            clock,
            interrupts,
            serial: lock(&self.serial).save(),
            acpi_events: lock(&self.acpi).pending_events(),
            devices,
            ram: self.ram.save(new.file(), RAM_OFFSET_BYTES, &mut |_| {})?,
        })
    }

    /// Takes a saved state, before anything has run. The serial line has its state already, and RAM its content. Devices stand
    /// still afterwards, until the machine is started.
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
        let vcpus: Arc<[VcpuState]> = saved.vcpus.into();
        let states = vcpus.clone();
        self.vcpus.on_each(move |vcpu| states[usize::from(vcpu.index)].apply(&vcpu.fd))?;
        interrupts::apply(&saved.interrupts, &self.kvm)?;

        let tsc = self.tsc.ok_or(GuestClockError::NoFrequency)?;
        clock::prime(&self.kvm)?;
        let plan = clock::plan(&saved.clock, self.config.clock, &self.kvm, &self.vcpus, tsc)?;
        clock::set_counters(&self.vcpus, &plan)?;
        let states = vcpus.clone();
        self.vcpus.on_each(move |vcpu| states[usize::from(vcpu.index)].apply_deadline(&vcpu.fd))?;
        clock::set(&self.kvm, &plan)?;
        self.vcpus.on_each(move |vcpu| vcpus[usize::from(vcpu.index)].apply_clocks(&vcpu.fd))?;
        *lock(&self.frozen) = Some(saved.clock);

        for device in &self.devices {
            lock(device).interrupt_again();
        }
        lock(&self.serial).interrupt_again();
        lock(&self.acpi)
            .restore(saved.acpi_events)
            .map_err(VmError::host("interrupt the guest for its power button"))
    }
}
