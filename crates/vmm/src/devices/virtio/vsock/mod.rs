//! Socket device (virtio 1.3 section 5.10): streams between the guest and unix sockets of the host,
//! in the form that Firecracker introduced.
//!
//! A client of the host connects to the device's socket, writes `CONNECT port` and a line feed, and
//! reads `OK port` and a line feed when the guest has accepted. A connection of the guest to a port
//! of the host arrives at the socket with `_port` appended to the path of the device's.

mod clients;
mod connection;
mod connector;
mod counters;
#[cfg(any(test, feature = "testing"))]
mod fuzzing;
mod muxer;
mod packet;
#[cfg(any(test, feature = "testing"))]
mod testing;
#[cfg(test)]
mod tests;

use std::io::{self, Write as _};
use std::num::Wrapping;
use std::os::fd::OwnedFd;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use ebb_guest_ram::GuestMemory;
use rustix::event::PollFlags;
use virtio_queue::{Queue, QueueOwnedT, QueueState, QueueT};

use super::state::DeviceState;
use super::{HostEvents, VirtioDevice, Work, is_refused};
use crate::isolation::ConnectLink;
use crate::seccomp::ThreadKind;

pub use counters::{InvalidPackets, VsockCounters};
#[cfg(any(test, feature = "testing"))]
pub use fuzzing::{fuzz_chains, hostile_chains};

use connector::Connector;
use muxer::Muxer;
use packet::{HEADER_BYTES, Header};

/// Device id.
pub const DEVICE_ID: u32 = 19;
/// The largest packet of the guest that is accepted, in bytes of data: that of Linux
/// (`VIRTIO_VSOCK_MAX_PKT_BUF_SIZE`).
const MOST_DATA_BYTES: usize = 64 << 10;
/// Sizes of the queues rx, tx and event (section 5.10.2).
const QUEUE_SIZES: [u16; 3] = [256, 256, 16];
const RX: usize = 0;
const TX: usize = 1;
const EVENT: usize = 2;
/// Most packets handled in a call, in either direction, and bytes after which it ends.
const PACKETS_A_CALL: usize = 64;
const BYTES_A_CALL: usize = 1 << 20;
/// `VIRTIO_VSOCK_EVENT_TRANSPORT_RESET` (section 5.10.6.7).
const TRANSPORT_RESET: u32 = 0;

/// How long a guest may take to end its connections before it gets packets of new ones, which it
/// might end, too: half of the time that it has to answer them.
const RESET_PATIENCE: Duration = Duration::from_secs(5);

/// Most connections.
const MOST_CONNECTIONS: u64 = 4096;
/// Descriptors that the rest of the monitor needs.
const OTHER_DESCRIPTORS: u64 = 512;

/// Most connections with this limit of open files.
pub fn most_connections(open_files: Option<u64>) -> usize {
    let left = open_files.unwrap_or(u64::MAX).saturating_sub(OTHER_DESCRIPTORS);
    left.clamp(16, MOST_CONNECTIONS) as usize
}

/// The device.
pub struct Vsock {
    cid: u64,
    memory: GuestMemory,
    /// The queues in order; empty before activation.
    queues: Vec<Queue>,
    muxer: Muxer,
    reset: Reset,
    /// Data on its way.
    buffer: Vec<u8>,
}

/// Whether the guest knows that its connections have ended.
#[derive(Clone, Copy)]
enum Reset {
    /// It does, or had none.
    Known,
    /// It must be informed.
    Owed,
    /// It was. It would end new connections, too, until it has handled the event: then it gives the
    /// buffer back, as Linux does (net/vmw_vsock/virtio_transport.c,
    /// `virtio_transport_event_work`).
    Told {
        /// Index of the next event buffer that it gives.
        next: Wrapping<u16>,
        /// It has handled the event by then.
        until: Instant,
    },
}

impl Vsock {
    /// Creates a device of the guest `cid`, whose buffers are in `memory`. Clients of the host
    /// connect to `listener`, a non-blocking socket.
    ///
    /// # Errors
    /// No more descriptors.
    pub fn new(
        cid: u32,
        memory: GuestMemory,
        listener: OwnedFd,
        link: ConnectLink,
        most_connections: usize,
    ) -> io::Result<Self> {
        let connector = Connector::new(link, Instant::now());
        let muxer = Muxer::new(u64::from(cid), listener, connector, most_connections)?;
        Ok(Self {
            cid: u64::from(cid),
            memory,
            queues: Vec::new(),
            muxer,
            reset: Reset::Known,
            buffer: vec![0; MOST_DATA_BYTES],
        })
    }

    /// Connections, also those that are about to begin or to end.
    pub fn connections(&self) -> usize {
        self.muxer.len()
    }

    /// Whether the guest's driver has started the device.
    pub fn has_driver(&self) -> bool {
        !self.queues.is_empty()
    }

    /// Counters.
    pub fn counters(&self) -> VsockCounters {
        self.muxer.counters
    }

    /// Takes packets of the guest.
    fn take_packets(&mut self, now: Instant) -> Work {
        let mut work = Work::default();
        let mut bytes = 0;
        let Some(queue) = self.queues.get_mut(TX).filter(|queue| queue.ready()) else {
            return work;
        };
        for _ in 0..PACKETS_A_CALL {
            let Some(chain) = queue.pop_descriptor_chain(&self.memory) else { return work };
            let head = chain.head_index();
            let reader = if is_refused(queue, &self.memory, head) {
                None
            } else {
                chain.reader(&self.memory).ok()
            };
            match reader.and_then(|mut reader| {
                let mut header = [0; HEADER_BYTES];
                io::Read::read_exact(&mut reader, &mut header).ok()?;
                Some((Header::from_bytes(&header), reader))
            }) {
                None => self.muxer.counters.invalid.chain += 1,
                Some((header, mut reader)) => {
                    let length = header.len as usize;
                    let data = self.buffer.get_mut(..length);
                    match data.filter(|_| length <= reader.available_bytes()) {
                        None => self.muxer.counters.invalid.length += 1,
                        Some(data) => match io::Read::read_exact(&mut reader, data) {
                            Ok(()) => {
                                self.muxer.accept_packet(&header, data, now);
                                bytes += length;
                            }
                            Err(_) => self.muxer.counters.invalid.chain += 1,
                        },
                    }
                }
            }
            if !give_back(queue, &self.memory, head, 0, &mut work) {
                return work;
            }
            if bytes >= BYTES_A_CALL {
                break;
            }
        }
        work.more = true;
        work
    }

    /// Gives packets to the guest, as far as it has buffers.
    fn give_packets(&mut self, now: Instant) -> Work {
        let mut work = Work::default();
        if self.must_wait(now) {
            return work;
        }
        let mut bytes = 0;
        let Some(queue) = self.queues.get_mut(RX).filter(|queue| queue.ready()) else {
            return work;
        };
        for _ in 0..PACKETS_A_CALL {
            if !self.muxer.has_packets() {
                return work;
            }
            let Some(chain) = queue.pop_descriptor_chain(&self.memory) else { return work };
            let head = chain.head_index();
            let writer = if is_refused(queue, &self.memory, head) {
                None
            } else {
                chain.writer(&self.memory).ok()
            };
            let mut used = 0;
            match writer.filter(|writer| writer.available_bytes() > HEADER_BYTES) {
                None => self.muxer.counters.invalid.chain += 1,
                Some(mut writer) => {
                    let room = (writer.available_bytes() - HEADER_BYTES).min(self.buffer.len());
                    let Some(header) = self.muxer.next_packet(&mut self.buffer[..room], now) else {
                        queue.go_to_previous_position();
                        return work;
                    };
                    let data = &self.buffer[..header.len as usize];
                    bytes += data.len();
                    let written =
                        writer.write_all(&header.to_bytes()).and_then(|()| writer.write_all(data));
                    if written.is_ok() {
                        used = (HEADER_BYTES + data.len()) as u32;
                    } else {
                        self.muxer.counters.invalid.chain += 1;
                    }
                }
            }
            if !give_back(queue, &self.memory, head, used, &mut work) {
                return work;
            }
            if bytes >= BYTES_A_CALL {
                break;
            }
        }
        work.more = true;
        work
    }

    /// Informs the guest that its connections have ended, when it has a buffer for that.
    fn give_event(&mut self, now: Instant) -> Work {
        let mut work = Work::default();
        let Some(queue) = self.queues.get_mut(EVENT).filter(|queue| queue.ready()) else {
            return work;
        };
        if !matches!(self.reset, Reset::Owed) {
            return work;
        }
        let Some(chain) = queue.pop_descriptor_chain(&self.memory) else { return work };
        let head = chain.head_index();
        let refused = is_refused(queue, &self.memory, head);
        let event = TRANSPORT_RESET.to_le_bytes();
        let writer = (!refused).then(|| chain.writer(&self.memory).ok()).flatten();
        let is_written = writer.is_some_and(|mut writer| writer.write_all(&event).is_ok());
        let used = if is_written { event.len() as u32 } else { 0 };
        if is_written {
            let next = queue.avail_idx(&self.memory, Ordering::Acquire);
            let told = |next| Reset::Told { next, until: now + RESET_PATIENCE };
            self.reset = next.map_or(Reset::Known, told);
        }
        work.interrupt = queue.add_used(&self.memory, head, used).is_ok();
        // An unsuitable buffer: perhaps the next one.
        work.more = work.interrupt && !is_written;
        work
    }

    /// Whether the guest would end what it gets now.
    fn must_wait(&mut self, now: Instant) -> bool {
        if let Reset::Told { next, until } = self.reset {
            let event = self.queues.get(EVENT).map(|queue| {
                queue.avail_idx(&self.memory, Ordering::Acquire).is_ok_and(|now| now == next)
            });
            if now < until && event == Some(true) {
                return true;
            }
            self.reset = Reset::Known;
        }
        false
    }

    fn with_packets(&mut self, mut work: Work, now: Instant) -> Work {
        let given = self.give_packets(now);
        work.interrupt |= given.interrupt;
        work.more |= given.more;
        work
    }
}

/// Returns a buffer of which `used` bytes were written; false if the guest's ring is unusable.
fn give_back(
    queue: &mut Queue,
    memory: &GuestMemory,
    head: u16,
    used: u32,
    work: &mut Work,
) -> bool {
    let given = queue.add_used(memory, head, used).is_ok();
    if given {
        work.interrupt = true;
    } else {
        crate::devices::guest_log!("virtio-vsock: the used ring cannot be written");
    }
    given
}

impl VirtioDevice for Vsock {
    fn device_id(&self) -> u32 {
        DEVICE_ID
    }

    /// None: streams are implied (section 5.10.3).
    fn features(&self) -> u64 {
        0
    }

    fn queue_sizes(&self) -> Vec<u16> {
        QUEUE_SIZES.to_vec()
    }

    fn read_config(&self, offset: u64, data: &mut [u8]) {
        let config = self.cid.to_le_bytes();
        for (index, byte) in data.iter_mut().enumerate() {
            let position =
                usize::try_from(offset).ok().and_then(|offset| offset.checked_add(index));
            *byte = position.and_then(|position| config.get(position)).copied().unwrap_or(0);
        }
    }

    fn write_config(&mut self, _offset: u64, _data: &[u8]) {}

    fn activate(&mut self, _features: u64, queues: Vec<Queue>) -> Result<(), String> {
        if queues.len() != QUEUE_SIZES.len() || queues[..EVENT].iter().any(|queue| !queue.ready()) {
            return Err("the receive or the transmit queue is not ready".to_owned());
        }
        self.queues = queues;
        Ok(())
    }

    fn process_queue(&mut self, index: usize) -> Work {
        let now = Instant::now();
        match index {
            RX => self.with_packets(Work::default(), now),
            TX => {
                let work = self.take_packets(now);
                self.with_packets(work, now)
            }
            _ => {
                let work = self.give_event(now);
                self.with_packets(work, now)
            }
        }
    }

    fn deadline(&self) -> Option<Instant> {
        let until = match self.reset {
            Reset::Told { until, .. } => Some(until),
            _ => None,
        };
        self.muxer.deadline().into_iter().chain(until).min()
    }

    fn on_timer(&mut self, now: Instant) -> Work {
        self.muxer.on_timer(now);
        self.with_packets(Work::default(), now)
    }

    fn host_events(&self) -> Option<HostEvents> {
        Some(HostEvents { fd: self.muxer.epoll().clone(), wanted: PollFlags::IN })
    }

    fn on_host_events(&mut self, _ready: PollFlags) -> Work {
        let now = Instant::now();
        self.muxer.on_events(now);
        self.with_packets(Work::default(), now)
    }

    fn thread_kind(&self) -> ThreadKind {
        ThreadKind::Vsock
    }

    fn reset(&mut self) {
        self.queues.clear();
        self.muxer.clear();
        self.reset = Reset::Known;
    }

    fn queue_states(&self) -> Vec<QueueState> {
        self.queues.iter().map(Queue::state).collect()
    }

    fn save(&mut self) -> DeviceState {
        DeviceState::Vsock { cid: self.cid as u32 }
    }

    /// The connections belong to sockets that are not here: the guest is informed that they have
    /// ended, and reads its CID anew, which may be another one here (section 5.10.6.7).
    fn restore(
        &mut self,
        state: &DeviceState,
        driver: Option<(u64, Vec<Queue>)>,
    ) -> Result<(), String> {
        let DeviceState::Vsock { .. } = state else {
            return Err("its state belongs to another device".to_owned());
        };
        let Some((features, queues)) = driver else { return Ok(()) };
        self.activate(features, queues)?;
        self.reset = Reset::Owed;
        Ok(())
    }
}
