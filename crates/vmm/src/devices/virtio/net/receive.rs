//! Frames to the guest (virtio 1.3 section 5.1.6.3).

use std::collections::VecDeque;
use std::io;

use ebb_guest_ram::GuestMemory;
use virtio_bindings::virtio_net as net;
use virtio_queue::{Queue, QueueT};

use super::chain::{Direction, Unusable, push};
use super::parts::{MAX_PARTS, Parts};
use super::stream::MAX_FRAME_BYTES;
use super::tap::{HEADER_BYTES, Tap};
use crate::devices::virtio::ring::{Unwritable, Used, pop, publish, unpop};

/// Largest frame with its header, in bytes.
pub(super) const MAX_BYTES: usize = HEADER_BYTES + MAX_FRAME_BYTES;
/// Offset of `num_buffers` in the header.
const BUFFERS_OFFSET: usize = 10;
/// Features with which a frame may have the largest size.
const LARGE: u64 = 1 << net::VIRTIO_NET_F_GUEST_TSO4
    | 1 << net::VIRTIO_NET_F_GUEST_TSO6
    | 1 << net::VIRTIO_NET_F_GUEST_UFO
    | 1 << net::VIRTIO_NET_F_GUEST_USO4
    | 1 << net::VIRTIO_NET_F_GUEST_USO6;

/// A buffer of the driver that was taken from the queue.
struct Posted {
    head: u16,
    parts: usize,
    bytes: usize,
}

/// Buffers of the driver that wait for frames.
pub(super) struct Receive {
    memory: GuestMemory,
    parts: Parts,
    posted: VecDeque<Posted>,
    mergeable: bool,
    /// Bytes of buffers that are kept ready.
    ready_bytes: usize,
    /// What of a frame did not fit into the buffers that were there.
    spill: Vec<u8>,
    /// Length of the frame that waits for further buffers, with its header: its beginning is in the
    /// buffers, its end in `spill`.
    waiting: Option<usize>,
    used: Vec<Used>,
}

/// Result of an attempt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Received {
    /// A frame of this length, without its header.
    Frame(usize),
    /// A frame that does not fit into the driver's buffers.
    Dropped,
    /// The backend has no frame.
    NoFrame,
    /// The driver must provide buffers first.
    NoBuffers,
}

/// Why receiving cannot go on.
pub(super) enum Failure {
    /// The driver's ring is unusable.
    Ring,
    /// The backend is gone.
    Backend(String),
}

impl From<Unwritable> for Failure {
    fn from(_: Unwritable) -> Self {
        Self::Ring
    }
}

impl Receive {
    pub(super) fn new(memory: GuestMemory) -> Self {
        Self {
            parts: Parts::new(memory.clone()),
            memory,
            posted: VecDeque::new(),
            mergeable: false,
            ready_bytes: 1,
            spill: Vec::new(),
            waiting: None,
            used: Vec::new(),
        }
    }

    /// Forgets all buffers. A frame that waits is lost, as on a network.
    pub(super) fn reset(&mut self) {
        self.parts.clear();
        self.posted.clear();
        self.waiting = None;
    }

    /// Starts with a driver.
    pub(super) fn start(&mut self, features: u64, mtu: Option<u16>) {
        self.reset();
        self.mergeable = features & 1 << net::VIRTIO_NET_F_MRG_RXBUF != 0;
        // Besides the packet a tag for a virtual network.
        let usual = HEADER_BYTES + 18 + usize::from(mtu.unwrap_or(1500));
        self.ready_bytes = match (self.mergeable, features & LARGE != 0) {
            (true, true) => MAX_BYTES,
            (true, false) => usual,
            (false, _) => 1,
        };
    }

    /// Keeps buffers ready for the next frame. Without any, the driver notifies the device when it
    /// has provided some.
    pub(super) fn prepare(&mut self, queue: &mut Queue) {
        if self.waiting.is_none() {
            self.refill(queue, self.ready_bytes);
        }
    }

    /// Whether a frame has begun that waits for further buffers.
    pub(super) fn has_begun(&self) -> bool {
        self.waiting.is_some()
    }

    /// Number of buffers taken from the queue.
    pub(super) fn posted(&self) -> usize {
        self.posted.len()
    }

    /// Whether a frame could be received now.
    pub(super) fn is_ready(&self) -> bool {
        self.waiting.is_none() && !self.posted.is_empty()
    }

    /// Takes buffers from the queue until there are `bytes` of them.
    fn refill(&mut self, queue: &mut Queue, bytes: usize) {
        while self.parts.bytes() < bytes && self.posted.len() < usize::from(queue.size()) {
            let Some(chain) = pop(queue, &self.memory) else { return };
            let (before, count) = (self.parts.bytes(), self.parts.count());
            let head = chain.head_index();
            match push(&mut self.parts, chain, Direction::ToGuest, 0) {
                Ok(()) => {}
                Err(Unusable::TooManyParts) if count > 0 => {
                    self.parts.truncate(count);
                    unpop(queue, 1);
                    return;
                }
                // Returned with the next frame, empty.
                Err(_) => {
                    crate::devices::guest_log!("virtio-net: a receive buffer is unusable");
                    self.parts.truncate(count);
                }
            }
            let (parts, bytes) = (self.parts.count() - count, self.parts.bytes() - before);
            self.posted.push_back(Posted { head, parts, bytes });
        }
    }

    /// Bytes and parts that the next frame may take.
    fn room(&self) -> (usize, usize) {
        match self.posted.front() {
            Some(first) if !self.mergeable => (first.bytes, first.parts),
            _ => (self.parts.bytes(), self.parts.count()),
        }
    }

    /// Whether the driver cannot provide further buffers for a frame before some are used.
    fn is_full(&self, queue: &Queue) -> bool {
        !self.mergeable
            || self.posted.len() >= usize::from(queue.size())
            || self.parts.count() >= MAX_PARTS
    }

    /// Receives a frame from a tap interface, directly into the driver's buffers.
    pub(super) fn read_tap(
        &mut self,
        queue: &mut Queue,
        tap: &mut Tap,
    ) -> Result<Received, Failure> {
        if let Some(bytes) = self.waiting {
            return self.finish(queue, bytes);
        }
        self.refill(queue, self.ready_bytes);
        if self.posted.is_empty() {
            return Ok(Received::NoBuffers);
        }
        let (room, parts) = self.room();
        let spill = MAX_BYTES.saturating_sub(room);
        if self.spill.len() < spill {
            self.spill.resize(MAX_BYTES, 0);
        }
        let bytes = match self.parts.read(&mut tap.port, parts, &mut self.spill[..spill]) {
            Ok(0) => return Err(Failure::Backend("it has ended".to_owned())),
            Ok(bytes) => bytes,
            Err(error) => return read_error(&error),
        };
        if bytes <= HEADER_BYTES {
            return Ok(Received::Dropped);
        }
        if bytes <= room {
            return self.complete(queue, bytes);
        }
        self.spill.truncate(bytes - room);
        self.waiting = Some(bytes);
        self.finish(queue, bytes)
    }

    /// Completes a frame of `bytes` that did not fit, if there are further buffers now.
    fn finish(&mut self, queue: &mut Queue, bytes: usize) -> Result<Received, Failure> {
        self.refill(queue, if self.mergeable { bytes } else { 1 });
        let (room, _) = self.room();
        if room >= bytes && self.spill.len() <= bytes {
            self.parts.copy_in(bytes - self.spill.len(), &self.spill);
            self.waiting = None;
            return self.complete(queue, bytes);
        }
        if self.is_full(queue) {
            self.waiting = None;
            return Ok(Received::Dropped);
        }
        Ok(Received::NoBuffers)
    }

    /// Delivers a frame that is in the monitor's memory.
    pub(super) fn deliver(&mut self, queue: &mut Queue, frame: &[u8]) -> Result<Received, Failure> {
        let bytes = HEADER_BYTES + frame.len();
        self.refill(queue, if self.mergeable { bytes } else { 1 });
        if self.posted.is_empty() {
            return Ok(Received::NoBuffers);
        }
        let (room, _) = self.room();
        if room < bytes {
            let full = self.is_full(queue);
            return Ok(if full { Received::Dropped } else { Received::NoBuffers });
        }
        self.parts.copy_in(0, &[0; HEADER_BYTES]);
        self.parts.copy_in(HEADER_BYTES, frame);
        self.complete(queue, bytes)
    }

    /// Reads a frame of a tap interface and drops it.
    pub(super) fn discard(&mut self, tap: &mut Tap) -> Result<Received, Failure> {
        self.spill.resize(MAX_BYTES, 0);
        match self.parts.read(&mut tap.port, 0, &mut self.spill) {
            Ok(0) => Err(Failure::Backend("it has ended".to_owned())),
            Ok(_) => Ok(Received::Dropped),
            Err(error) => read_error(&error),
        }
    }

    /// Returns the first buffers, which hold a frame of `bytes`, together.
    fn complete(&mut self, queue: &mut Queue, bytes: usize) -> Result<Received, Failure> {
        self.used.clear();
        let (mut left, mut parts) = (bytes, 0);
        while left > 0 {
            let Some(buffer) = self.posted.pop_front() else { break };
            let filled = buffer.bytes.min(left);
            self.used.push((buffer.head, filled as u32));
            left -= filled;
            parts += buffer.parts;
        }
        let buffers = self.used.len() as u16;
        self.parts.copy_in(BUFFERS_OFFSET, &buffers.to_le_bytes());
        self.parts.consume(parts);
        publish(queue, &self.memory, &self.used)?;
        Ok(Received::Frame(bytes - HEADER_BYTES))
    }
}

fn read_error(error: &io::Error) -> Result<Received, Failure> {
    match error.raw_os_error() {
        Some(libc::EAGAIN | libc::EINTR) => Ok(Received::NoFrame),
        // The guest's memory is a file that has been cut, for example.
        Some(libc::EFAULT) => Ok(Received::Dropped),
        _ if error.kind() == io::ErrorKind::WouldBlock => Ok(Received::NoFrame),
        _ => Err(Failure::Backend(format!("it cannot be read from: {error}"))),
    }
}
