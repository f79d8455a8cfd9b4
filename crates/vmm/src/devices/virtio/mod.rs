//! virtio devices over memory-mapped registers (virtio 1.3 section 4.2).

pub mod balloon;
pub mod block;
pub mod mmio;
pub mod rng;
pub mod state;
pub mod worker;

use std::time::Instant;

use virtio_queue::{Queue, QueueState};

use state::DeviceState;

/// What a device did with a notification.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Work {
    /// Buffers were used: interrupt the driver.
    pub interrupt: bool,
    /// The bound of one call was reached: call again.
    pub more: bool,
    /// Do the [deferred work](VirtioDevice::deferred_work).
    pub deferred: bool,
}

/// Work that takes long and does not need the transport's lock.
pub type DeferredWork = Box<dyn Fn() + Send>;

/// A virtio device without its transport.
///
/// All methods are called under the transport's lock: by vCPU threads (registers), by the device's
/// worker thread (queues and timers), by the API thread. Each call must be short; a device bounds
/// the work of one call and asks to be called again.
pub trait VirtioDevice: Send {
    /// Device id (virtio 1.3 section 5).
    fn device_id(&self) -> u32;

    /// Device features; the transport adds VIRTIO_F_VERSION_1.
    fn features(&self) -> u64;

    /// Largest size of each queue.
    fn queue_sizes(&self) -> Vec<u16>;

    /// Size of its image, for a disk.
    fn disk_bytes(&self) -> Option<u64> {
        None
    }

    /// Reads the configuration space.
    fn read_config(&self, offset: u64, data: &mut [u8]);

    /// Writes the configuration space.
    fn write_config(&mut self, offset: u64, data: &[u8]);

    /// Takes the queues when the driver is ready. An error makes the device ask for a reset.
    fn activate(&mut self, features: u64, queues: Vec<Queue>) -> Result<(), String>;

    /// Works on a queue after the driver notified it.
    fn process_queue(&mut self, index: usize) -> Work;

    /// What the worker thread does after [`Work::deferred`], without the transport's lock.
    fn deferred_work(&self) -> Option<DeferredWork> {
        None
    }

    /// When the device wants [`on_timer`](Self::on_timer); asked after each call.
    fn deadline(&self) -> Option<Instant> {
        None
    }

    /// Work that is due by time.
    fn on_timer(&mut self, _now: Instant) -> Work {
        Work::default()
    }

    /// Finishes what waits for a timer, before the virtual machine is paused.
    fn quiesce(&mut self) {}

    /// Goes back to the state before activation, at the driver's request.
    fn reset(&mut self);

    /// The queues as they stand, in order; empty before activation.
    fn queue_states(&self) -> Vec<QueueState>;

    /// What a snapshot must keep besides the queues. Called while the worker is paused.
    fn save(&mut self) -> DeviceState {
        DeviceState::Queues
    }

    /// Lets go of what only one monitor may have at a time, because another one goes on with the
    /// machine. Called while the worker is paused. An error says what cannot be let go.
    fn release_exclusive(&mut self) -> Result<(), String> {
        Ok(())
    }

    /// Takes what only one monitor may have, before the machine goes on here. An error says what
    /// somebody else has.
    fn acquire_exclusive(&mut self) -> Result<(), String> {
        Ok(())
    }

    /// Takes a saved state, with what `activate` got if a driver was active. Called on a new
    /// device. An error says what does not fit.
    fn restore(
        &mut self,
        state: &DeviceState,
        driver: Option<(u64, Vec<Queue>)>,
    ) -> Result<(), String> {
        if *state != DeviceState::Queues {
            return Err("its state is that of another device".to_owned());
        }
        driver.map_or(Ok(()), |(features, queues)| self.activate(features, queues))
    }
}

#[cfg(test)]
mod tests;
