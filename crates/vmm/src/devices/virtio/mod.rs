//! virtio devices over memory-mapped registers (virtio 1.3 section 4.2).

pub mod balloon;
pub mod block;
pub mod mmio;
pub mod net;
#[cfg(feature = "planted-bug")]
pub mod planted_bug;
mod ring;
pub mod rng;
pub mod state;
pub mod vsock;
pub mod worker;

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Instant;

use ebb_guest_ram::GuestMemory;
use rustix::event::PollFlags;
use virtio_queue::{Queue, QueueState};

use crate::devices::throttle::Throttle;
use crate::seccomp::ThreadKind;
use state::DeviceState;

/// Result of a notification or timer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Work {
    /// Buffers were used: interrupt the driver.
    pub interrupt: bool,
    /// The limit of one call was reached: call again.
    pub more: bool,
    /// Run the [deferred work](VirtioDevice::deferred_work).
    pub deferred: bool,
    /// The configuration space has changed: notify the driver.
    pub config_changed: bool,
    /// There was something to do, even if the driver need not know.
    pub served: bool,
}

impl Work {
    /// Adds what another call has left to do.
    fn add(&mut self, other: Self) {
        self.interrupt |= other.interrupt;
        self.more |= other.more;
        self.deferred |= other.deferred;
        self.config_changed |= other.config_changed;
        self.served |= other.served;
    }
}

/// A descriptor of the host for which a device waits besides its queues. One that waits for several
/// names an epoll descriptor.
#[derive(Debug, Clone)]
pub struct HostEvents {
    /// The descriptor.
    pub fd: Arc<OwnedFd>,
    /// What to wait for; POLLERR and POLLHUP always wake the device (poll(2)).
    pub wanted: PollFlags,
}

/// Whether the device must return the chain at `head` without reading it, because it names an
/// indirect table; the balloon's core does the same.
fn is_refused(queue: &Queue, memory: &GuestMemory, head: u16) -> bool {
    let refused = ebb_balloon::names_indirect_table(queue, memory, head);
    if refused {
        super::guest_log!("a chain names an indirect table, which was not negotiated");
    }
    refused
}

/// Long-running work that does not need the transport's lock.
pub type DeferredWork = Box<dyn Fn() + Send>;

/// A virtio device without its transport.
///
/// All methods are called under the transport's lock: by vCPU threads (registers), by the device's
/// worker thread (queues and timers), by the API thread. Each call must be short; a device limits
/// the work of one call and requests another.
pub trait VirtioDevice: Send {
    /// Device id (virtio 1.3 section 5).
    fn device_id(&self) -> u32;

    /// Device features; the transport adds VIRTIO_F_VERSION_1.
    fn features(&self) -> u64;

    /// Largest size of each queue.
    fn queue_sizes(&self) -> Vec<u16>;

    /// Size of the image in bytes, for a disk.
    fn disk_bytes(&self) -> Option<u64> {
        None
    }

    /// The limits of its requests, for a device that asks them before each one.
    fn throttle(&self) -> Option<&Arc<Throttle>> {
        None
    }

    /// The limits of its requests by name, to be shown and changed; a device with several asks them
    /// itself.
    fn throttles(&self) -> Vec<(&'static str, Arc<Throttle>)> {
        self.throttle().map(|throttle| ("", throttle.clone())).into_iter().collect()
    }

    /// Reads the configuration space.
    fn read_config(&self, offset: u64, data: &mut [u8]);

    /// Writes the configuration space.
    fn write_config(&mut self, offset: u64, data: &[u8]);

    /// Receives the queues when the driver is ready. After an error the device needs a reset.
    fn activate(&mut self, features: u64, queues: Vec<Queue>) -> Result<(), String>;

    /// Processes a queue after a notification by the driver.
    fn process_queue(&mut self, index: usize) -> Work;

    /// The work for [`Work::deferred`], which the worker thread does without the transport's lock.
    fn deferred_work(&self) -> Option<DeferredWork> {
        None
    }

    /// Time of the next [`on_timer`](Self::on_timer); read after each call.
    fn deadline(&self) -> Option<Instant> {
        None
    }

    /// Runs due timers.
    fn on_timer(&mut self, _now: Instant) -> Work {
        Work::default()
    }

    /// The host's descriptor to wait for; read before each wait. `None` as long as nothing can be
    /// done about its events: they are level-triggered, and would wake the thread again and again.
    fn host_events(&self) -> Option<HostEvents> {
        None
    }

    /// Handles events of that descriptor.
    fn on_host_events(&mut self, _ready: PollFlags) -> Work {
        Work::default()
    }

    /// The kind of its thread, which has the system calls that it needs.
    fn thread_kind(&self) -> ThreadKind {
        ThreadKind::Device
    }

    /// Completes work that waits for a timer, before the virtual machine is paused.
    fn quiesce(&mut self) {}

    /// Waits for requests that other threads execute, and completes them, before the virtual
    /// machine is paused: neither a snapshot nor another monitor knows of them.
    fn finish_requests(&mut self) -> Work {
        Work::default()
    }

    /// Returns to the state before activation, at the driver's request.
    fn reset(&mut self);

    /// Current state of the queues, in order; empty before activation.
    fn queue_states(&self) -> Vec<QueueState>;

    /// State for a snapshot besides the queues. Called while the worker is paused.
    fn save(&mut self) -> DeviceState {
        DeviceState::Queues
    }

    /// A descriptor of the file that [`release_exclusive`](Self::release_exclusive) must write
    /// back, so that this can be done before while the device works. Errors reported there are
    /// reported to the device as well.
    fn written_file(&self) -> io::Result<Option<File>> {
        Ok(None)
    }

    /// Releases what only one monitor may hold, because another one continues the machine. Called
    /// while the worker is paused. An error names what cannot be released.
    fn release_exclusive(&mut self) -> Result<(), String> {
        Ok(())
    }

    /// Acquires what only one monitor may hold, before the machine continues here. An error names
    /// what another process holds.
    fn acquire_exclusive(&mut self) -> Result<(), String> {
        Ok(())
    }

    /// Restores a saved state, with the arguments of `activate` if a driver was active. Called on a
    /// new device. An error describes the mismatch.
    fn restore(
        &mut self,
        state: &DeviceState,
        driver: Option<(u64, Vec<Queue>)>,
    ) -> Result<(), String> {
        if *state != DeviceState::Queues {
            return Err("its state belongs to another device".to_owned());
        }
        driver.map_or(Ok(()), |(features, queues)| self.activate(features, queues))
    }
}

#[cfg(test)]
mod tests;
