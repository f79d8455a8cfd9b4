//! Entropy device (virtio 1.3 section 5.4): fills the driver's buffers from the host's random
//! number generator.

use std::sync::Arc;
use std::time::Instant;

use ebb_guest_ram::GuestMemory;
use virtio_queue::desc::split::Descriptor;
use virtio_queue::{Queue, QueueOwnedT, QueueState, QueueT};
use vm_memory::Bytes;

use super::{VirtioDevice, Work, is_refused};
use crate::config::RateLimits;
use crate::devices::throttle::{Admission, Throttle};

const DEVICE_ID: u32 = 4;
const QUEUE_SIZE: u16 = 64;
/// Most buffers filled in one call, and bytes in each: a guest must not keep the thread busy with
/// one notification.
const BUFFERS_A_CALL: usize = 16;
const BYTES_A_BUFFER: usize = 4096;

/// The device.
pub struct Rng {
    memory: GuestMemory,
    queue: Option<Queue>,
    throttle: Arc<Throttle>,
}

impl Rng {
    /// Creates a device whose buffers are in `memory`.
    pub fn new(memory: GuestMemory, limits: RateLimits) -> Self {
        #[cfg(feature = "planted-bug")]
        super::planted_bug::plant();
        let throttle = Arc::new(Throttle::new(limits, Instant::now()));
        Self { memory, queue: None, throttle }
    }
}

impl VirtioDevice for Rng {
    fn device_id(&self) -> u32 {
        DEVICE_ID
    }

    fn features(&self) -> u64 {
        0
    }

    fn queue_sizes(&self) -> Vec<u16> {
        vec![QUEUE_SIZE]
    }

    fn throttle(&self) -> Option<&Arc<Throttle>> {
        Some(&self.throttle)
    }

    fn read_config(&self, _offset: u64, _data: &mut [u8]) {}

    fn write_config(&mut self, _offset: u64, _data: &[u8]) {}

    fn activate(&mut self, _features: u64, queues: Vec<Queue>) -> Result<(), String> {
        self.queue = queues.into_iter().next().filter(Queue::ready);
        self.queue.as_ref().map(|_| ()).ok_or_else(|| "the request queue is not ready".to_owned())
    }

    fn process_queue(&mut self, _index: usize) -> Work {
        let Some(queue) = &mut self.queue else { return Work::default() };
        let mut work = Work::default();
        for _ in 0..BUFFERS_A_CALL {
            let Some(chain) = queue.pop_descriptor_chain(&self.memory) else { return work };
            let head = chain.head_index();
            #[cfg(feature = "planted-bug")]
            if let Some(written) = super::planted_bug::execute(&self.memory, &chain) {
                let _ = queue.add_used(&self.memory, head, written);
                work.interrupt = true;
                continue;
            }
            // The guest could change them between the limit and the write.
            let buffers: Vec<Descriptor> = if is_refused(queue, &self.memory, head) {
                Vec::new()
            } else {
                chain.writable().collect()
            };
            let requested = buffers.iter().map(|buffer| u64::from(buffer.len())).sum::<u64>();
            let bytes = requested.min(BYTES_A_BUFFER as u64);
            if self.throttle.admit(bytes, Instant::now()) == Admission::Later {
                queue.go_to_previous_position();
                return work;
            }
            let mut written = 0;
            for descriptor in buffers {
                let length = (descriptor.len() as usize).min(BYTES_A_BUFFER - written);
                let mut bytes = [0; BYTES_A_BUFFER];
                let random = &mut bytes[..length];
                if length == 0
                    || rustix::rand::getrandom(&mut *random, rustix::rand::GetRandomFlags::empty())
                        != Ok(length)
                    || self.memory.write_slice(random, descriptor.addr()).is_err()
                {
                    break;
                }
                written += length;
            }
            if queue.add_used(&self.memory, head, written as u32).is_err() {
                crate::devices::guest_log!("virtio-rng: the used ring cannot be written");
                return work;
            }
            work.interrupt = true;
        }
        work.more = true;
        work
    }

    fn reset(&mut self) {
        self.queue = None;
    }

    fn queue_states(&self) -> Vec<QueueState> {
        self.queue.iter().map(Queue::state).collect()
    }
}
