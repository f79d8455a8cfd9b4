//! The register window of a virtio device (virtio 1.3 section 4.2.2).
//!
//! Operations of a driver in the wrong order are either ignored or answered with
//! DEVICE_NEEDS_RESET; nothing here trusts the guest.

mod registers;
mod window;

use std::fs::File;
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use ebb_guest_ram::GuestMemory;
use rustix::event::PollFlags;
use virtio_bindings::virtio_config::{
    VIRTIO_CONFIG_S_DRIVER_OK, VIRTIO_CONFIG_S_FAILED, VIRTIO_CONFIG_S_FEATURES_OK,
    VIRTIO_CONFIG_S_NEEDS_RESET, VIRTIO_F_VERSION_1,
};
use virtio_bindings::virtio_mmio as reg;
use virtio_queue::{Queue, QueueT};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use registers::REGISTER_BYTES;
pub use registers::RegisterPage;
pub use window::MmioWindow;

use super::state::{DeviceDescription, SavedQueue, TransportState};
use super::{HostEvents, VirtioDevice, Work};
use crate::devices::bus::ExclusiveDevice;
use crate::devices::interrupt::InterruptLine;
use crate::devices::throttle::Throttle;

const MAGIC: u32 = u32::from_le_bytes(*b"virt");
/// Version 2 is the layout of virtio 1.0 and later.
const VERSION: u32 = 2;
const VENDOR: u32 = u32::from_le_bytes(*b"EBB ");
/// Bit of the interrupt registers: a used buffer.
pub const INTERRUPT_USED: u32 = reg::VIRTIO_MMIO_INT_VRING;
const INTERRUPT_CONFIG: u32 = reg::VIRTIO_MMIO_INT_CONFIG;
/// Offset of the device's own configuration space.
const CONFIG_SPACE: u64 = REGISTER_BYTES as u64;

/// Most queues of any device here: the balloon has six, the rest is reserve.
const MAX_QUEUES: usize = 16;

/// What connects a device with KVM and its worker thread.
pub struct Wires {
    /// The device's interrupt line.
    pub interrupt: InterruptLine,
    /// One for each queue, signalled by the driver's notification (ioeventfd).
    pub kicks: Vec<Arc<EventFd>>,
    /// Signalled by the transport when all queues must be checked or timers read again.
    pub wake: Arc<EventFd>,
}

impl Wires {
    /// Creates eventfds for a device with `queues` queues and this interrupt line.
    pub fn new(queues: usize, interrupt: InterruptLine) -> io::Result<Self> {
        let kicks = (0..queues.min(MAX_QUEUES))
            .map(|_| EventFd::new(EFD_NONBLOCK).map(Arc::new))
            .collect::<Result<_, _>>()?;
        Ok(Self { interrupt, kicks, wake: Arc::new(EventFd::new(EFD_NONBLOCK)?) })
    }
}

/// A device behind its register window.
pub struct MmioTransport<D> {
    device: D,
    memory: GuestMemory,
    wires: Wires,
    /// The queues until the device has them.
    queues: Vec<Queue>,
    /// Register `QueueReady` of each queue of an active device.
    ready: Vec<bool>,
    features_page: u32,
    driver_features_page: u32,
    driver_features: u64,
    queue_select: u32,
    status: u32,
    config_generation: u32,
    active: bool,
    /// What the guest reads: up to date whenever the transport's lock is free.
    registers: Arc<RegisterPage>,
}

impl<D: VirtioDevice> MmioTransport<D> {
    /// Puts `device` behind a register window. Rings are read from `memory`.
    pub fn new(device: D, memory: GuestMemory, wires: Wires) -> Self {
        let queues = new_queues(&device);
        let new = Self {
            device,
            memory,
            wires,
            queues,
            ready: Vec::new(),
            features_page: 0,
            driver_features_page: 0,
            driver_features: 0,
            queue_select: 0,
            status: 0,
            config_generation: 0,
            active: false,
            registers: Arc::default(),
        };
        new.publish();
        new
    }

    /// The eventfds.
    pub fn wires(&self) -> &Wires {
        &self.wires
    }

    /// The device.
    pub fn device(&self) -> &D {
        &self.device
    }

    /// The device, for changes by the monitor. Follow it with
    /// [`config_changed`](Self::config_changed) or [`wake`](Self::wake) if the driver or the worker
    /// must notice, before the transport's lock is released.
    pub fn device_mut(&mut self) -> &mut D {
        &mut self.device
    }

    /// Whether a driver runs the device.
    pub fn is_active(&self) -> bool {
        self.active
    }

    /// Notifies the driver of used buffers, outside of a queue's processing.
    pub fn interrupt_used(&mut self) {
        self.interrupt(INTERRUPT_USED);
    }

    /// Notifies the driver of a change of the configuration space.
    pub fn config_changed(&mut self) {
        self.config_generation = self.config_generation.wrapping_add(1);
        self.publish();
        if self.active {
            self.interrupt(INTERRUPT_CONFIG);
        }
    }

    /// Wakes the worker thread.
    pub fn wake(&self) {
        let _ = self.wires.wake.write(1);
    }

    /// Processes a queue; called by the worker thread.
    pub fn process_queue(&mut self, index: usize) -> Work {
        let waits = |throttle: &Arc<Throttle>| throttle.resume_at().is_some();
        if !self.active || self.device.throttle().is_some_and(waits) {
            return Work::default();
        }
        let work = self.device.process_queue(index);
        self.notify_driver(work);
        work
    }

    /// The host's descriptor for which the device waits.
    pub fn host_events(&self) -> Option<HostEvents> {
        if self.active { self.device.host_events() } else { None }
    }

    /// Handles events of that descriptor; called by the worker thread.
    pub fn on_host_events(&mut self, ready: PollFlags) -> Work {
        if !self.active {
            return Work::default();
        }
        let work = self.device.on_host_events(ready);
        self.notify_driver(work);
        work
    }

    /// Finishes what the device has begun, before the virtual machine is paused.
    pub fn quiesce(&mut self) {
        self.device.quiesce();
        if self.active {
            let work = self.device.finish_requests();
            self.notify_driver(work);
        }
    }

    /// Time of the next [`on_timer`](Self::on_timer).
    pub fn deadline(&self) -> Option<Instant> {
        let throttled = self.device.throttle().and_then(|throttle| throttle.resume_at());
        self.device.deadline().into_iter().chain(throttled).min().filter(|_| self.active)
    }

    /// Runs the device's due timers; called by the worker thread.
    pub fn on_timer(&mut self, now: Instant) -> Work {
        if !self.active {
            return Work::default();
        }
        let mut work = self.device.on_timer(now);
        work.more |= self.device.throttle().is_some_and(|throttle| throttle.resume(now));
        self.notify_driver(work);
        work
    }

    /// Restores the state after power-on.
    pub fn reset(&mut self) {
        if self.active {
            self.active = false;
            self.device.reset();
        }
        self.queues = new_queues(&self.device);
        self.features_page = 0;
        self.driver_features_page = 0;
        self.driver_features = 0;
        self.queue_select = 0;
        self.status = 0;
        self.registers.interrupt_status().store(0, Ordering::Release);
        self.publish();
    }

    fn notify_driver(&mut self, work: Work) {
        if work.interrupt {
            self.interrupt(INTERRUPT_USED);
        }
        if work.config_changed {
            self.config_changed();
        }
    }

    fn interrupt(&mut self, cause: u32) {
        self.registers.interrupt_status().fetch_or(cause, Ordering::AcqRel);
        self.wires.interrupt.pulse();
    }

    fn offered_features(&self) -> u64 {
        self.device.features() | 1 << VIRTIO_F_VERSION_1
    }

    fn publish(&self) {
        self.registers.set(|offset| self.read_register(offset));
    }

    fn read_register(&self, offset: u32) -> u32 {
        match offset {
            reg::VIRTIO_MMIO_MAGIC_VALUE => MAGIC,
            reg::VIRTIO_MMIO_VERSION => VERSION,
            reg::VIRTIO_MMIO_DEVICE_ID => self.device.device_id(),
            reg::VIRTIO_MMIO_VENDOR_ID => VENDOR,
            reg::VIRTIO_MMIO_DEVICE_FEATURES => match self.features_page {
                0 => self.offered_features() as u32,
                1 => (self.offered_features() >> 32) as u32,
                _ => 0,
            },
            reg::VIRTIO_MMIO_QUEUE_NUM_MAX => {
                let sizes = self.device.queue_sizes();
                let size = sizes.iter().take(MAX_QUEUES).nth(self.queue_select as usize);
                size.map_or(0, |size| u32::from(*size))
            }
            reg::VIRTIO_MMIO_QUEUE_READY => {
                let index = self.queue_select as usize;
                let ready = if self.active {
                    self.ready.get(index).copied()
                } else {
                    self.queues.get(index).map(Queue::ready)
                };
                u32::from(ready.unwrap_or(false))
            }
            reg::VIRTIO_MMIO_STATUS => self.status,
            reg::VIRTIO_MMIO_CONFIG_GENERATION => self.config_generation,
            // Shared memory regions: none (length of all ones, section 4.2.2.1).
            reg::VIRTIO_MMIO_SHM_LEN_LOW | reg::VIRTIO_MMIO_SHM_LEN_HIGH => u32::MAX,
            _ => 0,
        }
    }

    fn write_register(&mut self, offset: u64, value: u32) {
        let Ok(offset) = u32::try_from(offset) else { return };
        match offset {
            reg::VIRTIO_MMIO_DEVICE_FEATURES_SEL => self.features_page = value,
            reg::VIRTIO_MMIO_DRIVER_FEATURES_SEL => self.driver_features_page = value,
            reg::VIRTIO_MMIO_DRIVER_FEATURES if self.status & VIRTIO_CONFIG_S_FEATURES_OK == 0 => {
                let (shift, keep) = match self.driver_features_page {
                    0 => (0, !0xffff_ffffu64),
                    1 => (32, 0xffff_ffff),
                    _ => return,
                };
                self.driver_features = (self.driver_features & keep) | u64::from(value) << shift;
            }
            reg::VIRTIO_MMIO_QUEUE_SEL => self.queue_select = value,
            reg::VIRTIO_MMIO_QUEUE_NUM => {
                // An invalid size leaves the old one, which the driver reads back unchanged.
                self.with_selected(|queue| queue.set_size(u16::try_from(value).unwrap_or(0)));
            }
            reg::VIRTIO_MMIO_QUEUE_READY => self.with_selected(|queue| queue.set_ready(value == 1)),
            reg::VIRTIO_MMIO_QUEUE_DESC_LOW => {
                self.with_selected(|queue| queue.set_desc_table_address(Some(value), None));
            }
            reg::VIRTIO_MMIO_QUEUE_DESC_HIGH => {
                self.with_selected(|queue| queue.set_desc_table_address(None, Some(value)));
            }
            reg::VIRTIO_MMIO_QUEUE_AVAIL_LOW => {
                self.with_selected(|queue| queue.set_avail_ring_address(Some(value), None));
            }
            reg::VIRTIO_MMIO_QUEUE_AVAIL_HIGH => {
                self.with_selected(|queue| queue.set_avail_ring_address(None, Some(value)));
            }
            reg::VIRTIO_MMIO_QUEUE_USED_LOW => {
                self.with_selected(|queue| queue.set_used_ring_address(Some(value), None));
            }
            reg::VIRTIO_MMIO_QUEUE_USED_HIGH => {
                self.with_selected(|queue| queue.set_used_ring_address(None, Some(value)));
            }
            // With ioeventfd KVM handles this itself; it arrives here only for a queue that does
            // not exist.
            reg::VIRTIO_MMIO_QUEUE_NOTIFY => {
                if let Some(kick) = self.wires.kicks.get(value as usize) {
                    let _ = kick.write(1);
                }
            }
            reg::VIRTIO_MMIO_STATUS => self.write_status(value),
            _ => {}
        }
    }

    /// Changes the selected queue, as long as the driver has not finished (section 4.2.2.2).
    fn with_selected(&mut self, change: impl FnOnce(&mut Queue)) {
        if self.active {
            return;
        }
        if let Some(queue) = self.queues.get_mut(self.queue_select as usize) {
            change(queue);
        }
    }

    fn write_status(&mut self, value: u32) {
        if value == 0 {
            self.reset();
            return;
        }
        // Bits are only ever added until a reset (section 2.1.1).
        let added = value & !self.status & 0xff;
        if self.status & VIRTIO_CONFIG_S_FAILED != 0 {
            return;
        }
        if added & VIRTIO_CONFIG_S_FEATURES_OK != 0 && !self.accept_features() {
            // The driver reads back that the bit is clear.
            self.status |= added & !VIRTIO_CONFIG_S_FEATURES_OK;
            return;
        }
        self.status |= added & !VIRTIO_CONFIG_S_NEEDS_RESET;
        if added & VIRTIO_CONFIG_S_DRIVER_OK != 0 && !self.active {
            self.activate();
        }
    }

    fn accept_features(&self) -> bool {
        let version_1 = 1 << VIRTIO_F_VERSION_1;
        self.driver_features & !self.offered_features() == 0
            && self.driver_features & version_1 != 0
    }

    fn activate(&mut self) {
        let ready = self.status & VIRTIO_CONFIG_S_FEATURES_OK != 0
            && self.queues.iter().all(|queue| !queue.ready() || queue.is_valid(&self.memory));
        self.ready = self.queues.iter().map(Queue::ready).collect();
        let result = if ready {
            self.device.activate(self.driver_features, std::mem::take(&mut self.queues))
        } else {
            Err("the driver did not negotiate features or set up an invalid queue".to_owned())
        };
        match result {
            Ok(()) => {
                self.active = true;
                self.wake();
            }
            Err(problem) => {
                crate::devices::guest_log!(
                    "virtio device {}: not started: {problem}",
                    self.device.device_id()
                );
                self.queues = new_queues(&self.device);
                self.status |= VIRTIO_CONFIG_S_NEEDS_RESET;
                // Another vCPU may read it as soon as it has the interrupt.
                self.publish();
                self.interrupt(INTERRUPT_CONFIG);
            }
        }
    }
}

/// A device as its machine handles it, whatever its type.
pub trait ManagedDevice: Send {
    /// Restores the state after power-on.
    fn reset(&mut self);

    /// Returns the state for a snapshot. The worker must be paused.
    fn save(&mut self) -> TransportState;

    /// Restores a saved state. The device must be new and not running. An error describes the
    /// mismatch.
    fn restore(&mut self, state: &TransportState) -> Result<(), String>;

    /// Describes the device for the destination of a migration.
    fn describe(&self) -> DeviceDescription;

    /// Like [`VirtioDevice::written_file`].
    fn written_file(&self) -> io::Result<Option<File>>;

    /// Like [`VirtioDevice::release_exclusive`].
    fn release_exclusive(&mut self) -> Result<(), String>;

    /// Like [`VirtioDevice::acquire_exclusive`].
    fn acquire_exclusive(&mut self) -> Result<(), String>;

    /// Raises the interrupt if there was a cause since the reset. An interrupt may be in flight
    /// when the interrupt controller is saved, and would be lost; a spurious one is harmless.
    fn interrupt_again(&self);
}

impl<D: VirtioDevice> ManagedDevice for MmioTransport<D> {
    fn reset(&mut self) {
        Self::reset(self);
    }

    fn save(&mut self) -> TransportState {
        // The device finishes what it has begun before its queues are read.
        let device = self.device.save();
        let queues = if self.active {
            self.device.queue_states()
        } else {
            self.queues.iter().map(Queue::state).collect()
        };
        TransportState {
            device_id: self.device.device_id(),
            features_page: self.features_page,
            driver_features_page: self.driver_features_page,
            driver_features: self.driver_features,
            queue_select: self.queue_select,
            status: self.status,
            interrupt_status: self.registers.interrupt_status().load(Ordering::Acquire),
            config_generation: self.config_generation,
            active: self.active,
            ready: if self.active { self.ready.clone() } else { Vec::new() },
            queues: queues.into_iter().map(SavedQueue::from).collect(),
            device,
        }
    }

    fn restore(&mut self, state: &TransportState) -> Result<(), String> {
        if state.device_id != self.device.device_id() {
            return Err(format!(
                "it is device {}, not {}",
                self.device.device_id(),
                state.device_id
            ));
        }
        // Before negotiation a driver may have written anything.
        let agreed = state.active || state.status & VIRTIO_CONFIG_S_FEATURES_OK != 0;
        if agreed && state.driver_features & !self.offered_features() != 0 {
            return Err(format!(
                "the guest uses features {:#x} that this device does not have",
                state.driver_features & !self.offered_features()
            ));
        }
        let limits: Vec<u16> = new_queues(&self.device).iter().map(QueueT::max_size).collect();
        let saved = &state.queues;
        if saved.len() > limits.len()
            || saved.iter().zip(&limits).any(|(queue, &limit)| queue.max_size != limit)
            || (!state.active && saved.len() != limits.len())
        {
            return Err("its queues are not those of this device".to_owned());
        }
        let queues = saved
            .iter()
            .map(|&queue| Queue::try_from(queue).map_err(|error| format!("invalid queue: {error}")))
            .collect::<Result<Vec<_>, _>>()?;
        if queues.iter().any(|queue| state.active && queue.ready() && !queue.is_valid(&self.memory))
        {
            return Err("a queue lies outside of guest memory".to_owned());
        }
        if state.ready.len() > limits.len() {
            return Err("it has more queues than this device".to_owned());
        }
        self.ready.clone_from(&state.ready);
        if state.active {
            self.device.restore(&state.device, Some((state.driver_features, queues)))?;
            self.queues.clear();
        } else {
            self.device.restore(&state.device, None)?;
            self.queues = queues;
        }
        self.active = state.active;
        self.features_page = state.features_page;
        self.driver_features_page = state.driver_features_page;
        self.driver_features = state.driver_features;
        self.queue_select = state.queue_select;
        self.status = state.status;
        self.config_generation = state.config_generation;
        self.registers.interrupt_status().store(state.interrupt_status, Ordering::Release);
        self.publish();
        Ok(())
    }

    fn describe(&self) -> DeviceDescription {
        DeviceDescription {
            device_id: self.device.device_id(),
            features: self.offered_features(),
            queue_sizes: self.device.queue_sizes(),
            disk_bytes: self.device.disk_bytes(),
        }
    }

    fn written_file(&self) -> io::Result<Option<File>> {
        self.device.written_file()
    }

    fn release_exclusive(&mut self) -> Result<(), String> {
        self.device.release_exclusive()
    }

    fn acquire_exclusive(&mut self) -> Result<(), String> {
        self.device.acquire_exclusive()
    }

    fn interrupt_again(&self) {
        if self.registers.interrupt_status().load(Ordering::Acquire) != 0 {
            self.wires.interrupt.pulse();
        }
    }
}

fn new_queues(device: &impl VirtioDevice) -> Vec<Queue> {
    device
        .queue_sizes()
        .into_iter()
        .take(MAX_QUEUES)
        .filter_map(|size| Queue::new(size).ok())
        .collect()
}

impl<D: VirtioDevice> ExclusiveDevice for MmioTransport<D> {
    fn read(&mut self, offset: u64, data: &mut [u8]) {
        data.fill(0);
        if let Some(offset) = offset.checked_sub(CONFIG_SPACE) {
            self.device.read_config(offset, data);
        } else if let (Some(value), [_, _, _, _]) = (self.registers.get(offset), &mut *data) {
            data.copy_from_slice(&value.to_le_bytes());
        }
    }

    fn write(&mut self, offset: u64, data: &[u8]) {
        if let Some(offset) = offset.checked_sub(CONFIG_SPACE) {
            self.device.write_config(offset, data);
            self.wake();
        } else if offset.is_multiple_of(4)
            && let Ok(bytes) = data.try_into()
        {
            self.write_register(offset, u32::from_le_bytes(bytes));
            self.publish();
        }
    }
}

#[cfg(test)]
mod tests;
