//! A virtqueue of the device: takes chains and returns them, whatever the driver does to its rings.

use ebb_abi::balloon::QueueMap;
use ebb_guest_ram::GuestMemory;
use virtio_queue::{Queue, QueueOwnedT, QueueT};

use crate::budget::Budget;
use crate::chain::Chain;
use crate::counters::{Faults, GuestError};
use crate::indirect::names_indirect_table;
use crate::message::Message;

/// Result of a call, and the caller's duties.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[must_use = "the driver may wait for an interrupt"]
pub struct Progress {
    /// Raise the queue's interrupt.
    pub interrupt: bool,
    /// Call [`Balloon::process_queue`](crate::Balloon::process_queue) with this queue again, after
    /// the interrupt.
    pub more: bool,
    /// Whole huge pages wait to be discarded: call
    /// [`Discarder::discard_due`](crate::Discarder::discard_due), best without the device's lock.
    pub due: bool,
    /// Pages of the balloon wait to be discarded: call
    /// [`Discarder::flush`](crate::Discarder::flush) after some milliseconds without activity.
    pub pending: bool,
}

/// A queue and its health.
#[derive(Debug)]
pub(crate) struct DeviceQueue {
    queue: Queue,
    health: Health,
    /// Whether a chain has been returned since the last [`finish_round`](Self::finish_round).
    completed: bool,
    /// The message in progress: its chain is the latest one taken.
    message: Option<Message>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Health {
    Good,
    /// The last round found no chain although the ring announces one.
    Suspicious,
    /// Ignored until reset.
    Broken,
}

impl DeviceQueue {
    pub(crate) fn new(queue: Queue) -> Self {
        Self { queue, health: Health::Good, completed: false, message: None }
    }

    /// The device's position in the rings. A message in progress counts as not taken yet: it is
    /// read again from its beginning, which is harmless because the driver has not received it
    /// back.
    pub(crate) fn state(&self) -> virtio_queue::QueueState {
        let mut state = self.queue.state();
        state.next_avail = state.next_avail.wrapping_sub(u16::from(self.message.is_some()));
        state
    }

    /// Keeps a message for the next call.
    pub(crate) fn keep(&mut self, message: Message) {
        self.message = Some(message);
    }

    /// The message in progress.
    pub(crate) fn take_message(&mut self) -> Option<Message> {
        self.message.take()
    }

    /// Entries in the queue's rings.
    pub(crate) fn size(&self) -> u16 {
        self.queue.size()
    }

    /// The next chain that the driver made available, unless the budget is used up. Chains with
    /// indirect tables are returned.
    pub(crate) fn next_chain<'a>(
        &mut self,
        memory: &'a GuestMemory,
        budget: &mut Budget,
        faults: &mut Faults,
    ) -> Option<Chain<'a>> {
        while self.health != Health::Broken && !budget.is_exhausted() {
            let chain = match self.queue.iter(memory) {
                Ok(mut available) => available.next()?,
                Err(error) => {
                    self.break_down(faults, &error);
                    return None;
                }
            };
            budget.spend_chain();
            let head = chain.head_index();
            if !names_indirect_table(&self.queue, memory, head) {
                return Some(chain);
            }
            faults.count(GuestError::IndirectTable, format_args!("descriptor {head}"));
            self.complete(memory, head, faults);
        }
        None
    }

    /// Returns a chain in which the device has written nothing to the driver.
    pub(crate) fn complete(&mut self, memory: &GuestMemory, head: u16, faults: &mut Faults) {
        self.complete_written(memory, head, 0, faults);
    }

    /// Returns a chain to the driver after the device has written its first `written_bytes` bytes.
    pub(crate) fn complete_written(
        &mut self,
        memory: &GuestMemory,
        head: u16,
        written_bytes: u32,
        faults: &mut Faults,
    ) {
        if head >= self.queue.size() {
            faults.count(GuestError::BadHead, format_args!("descriptor {head} does not exist"));
            return;
        }
        match self.queue.add_used(memory, head, written_bytes) {
            Ok(()) => self.completed = true,
            Err(error) => self.break_down(faults, &error),
        }
    }

    /// Ends a call's work on the queue: enables notifications and returns whether more work is
    /// left.
    pub(crate) fn finish_round(
        &mut self,
        memory: &GuestMemory,
        budget: &Budget,
        faults: &mut Faults,
    ) -> Progress {
        if self.health == Health::Broken {
            return Progress {
                interrupt: std::mem::take(&mut self.completed),
                ..Progress::default()
            };
        }
        let more = budget.is_exhausted()
            || match self.queue.enable_notification(memory) {
                Ok(waiting) => self.believe(waiting, budget, faults),
                Err(error) => {
                    self.break_down(faults, &error);
                    false
                }
            };
        Progress { interrupt: self.wants_interrupt(memory), more, ..Progress::default() }
    }

    /// Whether to retry for chains that the ring announces. An announcement that leads to no chain
    /// twice in a row would keep the device spinning.
    fn believe(&mut self, waiting: bool, budget: &Budget, faults: &mut Faults) -> bool {
        if !waiting || budget.is_touched() {
            self.health = Health::Good;
        } else if self.health == Health::Suspicious {
            self.break_down(faults, &"the available ring announces chains that cannot be read");
        } else {
            self.health = Health::Suspicious;
        }
        waiting && self.health != Health::Broken
    }

    /// Whether the driver wants an interrupt for the chains returned since the last call.
    pub(crate) fn wants_interrupt(&mut self, memory: &GuestMemory) -> bool {
        // A spurious interrupt is harmless.
        std::mem::take(&mut self.completed) && self.queue.needs_notification(memory).unwrap_or(true)
    }

    fn break_down(&mut self, faults: &mut Faults, reason: &dyn std::fmt::Display) {
        self.health = Health::Broken;
        faults.count(GuestError::BrokenQueue, reason);
    }
}

/// The queues of an active device by transport index.
#[derive(Debug)]
pub(crate) struct DeviceQueues {
    pub(crate) map: QueueMap,
    pub(crate) queues: Vec<DeviceQueue>,
}
