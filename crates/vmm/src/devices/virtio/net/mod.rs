//! Network device (virtio 1.3 section 5.1): one queue for each direction, over a tap interface or a
//! stream of frames (passt).
//!
//! Frames of a tap interface are read and written where the driver has them, each in one system
//! call, with the virtio header, which the kernel understands. Frames of a stream pass through a
//! buffer on their way to the guest, many in one system call.

mod announce;
mod backend;
mod chain;
mod control;
mod error;
#[cfg(any(test, feature = "testing"))]
mod fuzzing;
mod parts;
mod passt;
mod receive;
mod stream;
mod tap;
mod transmit;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use ebb_guest_ram::GuestMemory;
use rustix::event::PollFlags;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use virtio_bindings::virtio_net as net;
use virtio_bindings::virtio_ring::{VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC};
use virtio_queue::{Queue, QueueState, QueueT};

use super::state::DeviceState;
use super::{HostEvents, VirtioDevice, Work, ring};
use crate::config::{MacAddress, NetConfig};
use crate::devices::throttle::{Admission, Throttle};
use crate::mmds::Stack;
use crate::seccomp::ThreadKind;

use announce::Schedule;
use backend::Backend;
use receive::{Failure, Receive, Received};
use transmit::{Sent, Transmit};

pub use backend::{OpenNet, open_all};
pub use error::NetError;
#[cfg(any(test, feature = "testing"))]
pub use fuzzing::{fuzz_net, fuzzed_chains};
pub(crate) use tap::{TUNGETIFF, TUNSETOFFLOAD, TUNSETVNETHDRSZ};

const DEVICE_ID: u32 = 1;
const QUEUE_SIZE: u16 = 256;
const CONTROL_QUEUE_SIZE: u16 = 64;
const RECEIVE: usize = 0;
const TRANSMIT: usize = 1;
const CONTROL: usize = 2;
/// Most frames in one call, which holds the transport's lock.
const FRAMES_A_CALL: usize = 64;

/// Whether a network device has a link.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum LinkState {
    /// It has.
    Up,
    /// It has none: frames are dropped.
    Down,
}

/// Counters of a device since the monitor started, readable by other threads.
#[derive(Debug, Default)]
pub struct NetCounters {
    /// Frames to the guest.
    pub received: AtomicU64,
    /// Their bytes, without the virtio header.
    pub received_bytes: AtomicU64,
    /// Frames for which the driver had no fitting buffers, or no link.
    pub received_dropped: AtomicU64,
    /// Frames from the guest.
    pub sent: AtomicU64,
    /// Their bytes.
    pub sent_bytes: AtomicU64,
    /// Frames that were invalid, that the backend has refused, or for which there was no link.
    pub sent_dropped: AtomicU64,
}

/// The queues of an active device.
struct Queues {
    receive: Queue,
    transmit: Queue,
    control: Queue,
}

/// The device.
pub struct Net {
    name: String,
    memory: GuestMemory,
    mac: MacAddress,
    mtu: Option<u16>,
    offered: u64,
    negotiated: u64,
    /// The driver's features are still to be passed on to the backend, by the device's thread.
    is_new_driver: bool,
    backend: Backend,
    /// The metadata service, which gets the frames to its address in place of the backend.
    metadata: Option<Stack>,
    /// The backend has failed, for good.
    is_gone: bool,
    /// What the operator wishes.
    link: LinkState,
    /// Asks the driver to announce its addresses (section 5.1.4, VIRTIO_NET_S_ANNOUNCE).
    asks_to_announce: bool,
    /// The machine continues here: neighbours must learn where it is.
    has_moved: Option<Instant>,
    schedule: Schedule,
    queues: Option<Queues>,
    receive: Receive,
    transmit: Transmit,
    receive_throttle: Arc<Throttle>,
    transmit_throttle: Arc<Throttle>,
    counters: Arc<NetCounters>,
}

fn add(counter: &AtomicU64, number: u64) {
    if number > 0 {
        // One thread writes.
        counter.store(counter.load(Ordering::Relaxed).wrapping_add(number), Ordering::Relaxed);
    }
}

impl Net {
    /// A device over an open backend. `mac` is its address.
    pub fn new(
        name: &str,
        config: &NetConfig,
        mac: MacAddress,
        opened: OpenNet,
        memory: GuestMemory,
    ) -> Self {
        let backend = opened.into_backend();
        let bit = |feature: u32| 1_u64 << feature;
        let mut offered = bit(net::VIRTIO_NET_F_MAC)
            | bit(net::VIRTIO_NET_F_STATUS)
            | bit(net::VIRTIO_NET_F_MRG_RXBUF)
            | bit(net::VIRTIO_NET_F_CTRL_VQ)
            | bit(net::VIRTIO_NET_F_GUEST_ANNOUNCE)
            | bit(VIRTIO_RING_F_EVENT_IDX)
            | bit(VIRTIO_RING_F_INDIRECT_DESC);
        if config.mtu.is_some() {
            offered |= bit(net::VIRTIO_NET_F_MTU);
        }
        if let Backend::Tap(tap) = &backend {
            offered |= tap.features();
        }
        let now = Instant::now();
        Self {
            name: name.to_owned(),
            mac,
            mtu: config.mtu,
            offered,
            negotiated: 0,
            is_new_driver: false,
            backend,
            metadata: config.metadata.clone().map(|served| Stack::new(served, config.mtu, now)),
            is_gone: false,
            link: LinkState::Up,
            asks_to_announce: false,
            has_moved: None,
            schedule: Schedule::default(),
            queues: None,
            receive: Receive::new(memory.clone()),
            transmit: Transmit::new(memory.clone()),
            receive_throttle: Arc::new(Throttle::new(config.receive_limits, now)),
            transmit_throttle: Arc::new(Throttle::new(config.transmit_limits, now)),
            counters: Arc::default(),
            memory,
        }
    }

    /// Its address.
    pub fn mac(&self) -> MacAddress {
        self.mac
    }

    /// The MTU that it announces.
    pub fn mtu(&self) -> Option<u16> {
        self.mtu
    }

    /// What the operator wishes.
    pub fn wanted_link(&self) -> LinkState {
        self.link
    }

    /// The link as the guest sees it: down also if the backend has failed.
    pub fn link(&self) -> LinkState {
        if self.is_gone { LinkState::Down } else { self.link }
    }

    /// Takes the link up or down. Returns whether the guest must learn of it.
    pub fn set_link(&mut self, link: LinkState) -> bool {
        let before = self.link();
        self.link = link;
        self.link() != before
    }

    /// Its counters.
    pub fn counters(&self) -> &Arc<NetCounters> {
        &self.counters
    }

    fn status(&self) -> u16 {
        let up = if self.link() == LinkState::Up { net::VIRTIO_NET_S_LINK_UP } else { 0 };
        let announce = if self.asks_to_announce { net::VIRTIO_NET_S_ANNOUNCE } else { 0 };
        (up | announce) as u16
    }

    /// The backend has failed: the link is down from now on, and the machine continues.
    fn fail(&mut self, problem: &str, work: &mut Work) {
        self.is_gone = true;
        self.schedule.end();
        work.config_changed = true;
        let (name, kind) = (&self.name, self.backend.kind());
        tracing::warn!("{name}: the link is down, because its {kind} failed: {problem}");
    }

    fn stop(&mut self, failure: Failure, work: &mut Work) {
        match failure {
            Failure::Backend(problem) => self.fail(&problem, work),
            Failure::Ring => {
                crate::devices::guest_log!("{}: a used ring cannot be written", self.name);
                self.queues = None;
            }
        }
    }

    /// Passes the driver's features on to the backend.
    fn apply_features(&mut self) {
        self.is_new_driver = false;
        if let Backend::Tap(tap) = &mut self.backend
            && let Err(error) = tap.set_features(self.negotiated)
        {
            crate::devices::guest_log!("{}: offloads cannot be set: {error}", self.name);
        }
    }

    /// Moves frames to the guest.
    fn receive(&mut self) -> Work {
        let mut work = Work::default();
        let Some(mut queues) = self.queues.take() else { return work };
        let before = queues.receive.next_used();
        let now = Instant::now();
        let mut failure = None;
        for _ in 0..FRAMES_A_CALL {
            if self.is_gone || self.receive_throttle.ready(now) == Admission::Later {
                break;
            }
            match self.receive_one(&mut queues.receive) {
                Ok(Received::Frame(bytes)) => {
                    self.receive_throttle.charge(bytes as u64, now);
                    add(&self.counters.received, 1);
                    add(&self.counters.received_bytes, bytes as u64);
                }
                Ok(Received::Dropped) => add(&self.counters.received_dropped, 1),
                Ok(Received::NoFrame | Received::NoBuffers) => break,
                Err(problem) => {
                    failure = Some(problem);
                    break;
                }
            }
            work.served = true;
        }
        self.receive.prepare(&mut queues.receive);
        work.interrupt = ring::wants_interrupt(&queues.receive, &self.memory, before);
        // The socket does not wake the thread for what was received already.
        work.more = self.receive.is_ready()
            && self.receive_throttle.resume_at().is_none()
            && matches!(&self.backend, Backend::Stream(stream) if stream.has_frame());
        self.queues = Some(queues);
        if let Some(failure) = failure {
            work.more = false;
            self.stop(failure, &mut work);
        }
        work
    }

    fn receive_one(&mut self, queue: &mut Queue) -> Result<Received, Failure> {
        let is_up = self.link == LinkState::Up;
        if let Some(stack) = self.metadata.as_mut().filter(|_| is_up && !self.receive.has_begun())
            && let Some(frame) = stack.frame()
        {
            let received = self.receive.deliver(queue, frame)?;
            if received != Received::NoBuffers {
                stack.skip();
            }
            return Ok(received);
        }
        match &mut self.backend {
            Backend::Tap(tap) if is_up => self.receive.read_tap(queue, tap),
            Backend::Tap(tap) => self.receive.discard(tap),
            Backend::Stream(stream) => loop {
                if let Some(frame) = stream.frame().map_err(Failure::Backend)? {
                    let length = frame.len();
                    let received =
                        if is_up { self.receive.deliver(queue, frame)? } else { Received::Dropped };
                    if received != Received::NoBuffers {
                        stream.skip(length);
                    }
                    return Ok(received);
                }
                if stream.receive().map_err(Failure::Backend)? == stream::Progress::None {
                    return Ok(Received::NoFrame);
                }
            },
        }
    }

    /// Moves frames from the guest.
    fn transmit(&mut self) -> Work {
        let mut work = Work::default();
        let Some(mut queues) = self.queues.take() else { return work };
        let before = queues.transmit.next_used();
        let queue = &mut queues.transmit;
        let throttle = &self.transmit_throttle;
        let sent = if self.link() == LinkState::Down {
            self.transmit.discard(queue, FRAMES_A_CALL)
        } else if throttle.resume_at().is_some() {
            Ok(Sent::default())
        } else {
            match &mut self.backend {
                Backend::Tap(tap) => {
                    let metadata = self.metadata.as_mut();
                    self.transmit.send_to_tap(queue, tap, throttle, FRAMES_A_CALL, metadata)
                }
                Backend::Stream(stream) => {
                    let metadata = self.metadata.as_mut();
                    self.transmit.send_to_stream(queue, stream, throttle, FRAMES_A_CALL, metadata)
                }
            }
        };
        work.interrupt = ring::wants_interrupt(queue, &self.memory, before);
        self.queues = Some(queues);
        match sent {
            Ok(sent) => {
                add(&self.counters.sent, sent.frames);
                add(&self.counters.sent_bytes, sent.bytes);
                add(&self.counters.sent_dropped, sent.dropped);
                work.more = sent.more;
                work.served = sent.frames + sent.dropped > 0;
                self.receive_metadata(&mut work);
            }
            Err(failure) => {
                // What is left is dropped.
                work.more = true;
                self.stop(failure, &mut work);
            }
        }
        work
    }

    /// Moves answers of the metadata service to the guest.
    fn receive_metadata(&mut self, work: &mut Work) {
        if self.metadata.as_ref().is_some_and(|stack| stack.frame().is_some()) {
            work.add(self.receive());
        }
    }

    fn control(&mut self) -> Work {
        let Some(queues) = &mut self.queues else { return Work::default() };
        let answered = control::answer(&mut queues.control, &self.memory);
        let Ok(answered) = answered else {
            let mut work = Work::default();
            self.stop(Failure::Ring, &mut work);
            return work;
        };
        if answered.announced {
            self.asks_to_announce = false;
        }
        let served = answered.requests > 0;
        Work { interrupt: served, more: answered.more, served, ..Work::default() }
    }

    /// Announces the guest's address in its place. A lost announcement is followed by others.
    fn announce(&mut self) {
        let frame = announce::announcement(self.mac);
        match &mut self.backend {
            Backend::Tap(tap) => {
                if let Some(fd) = tap.port.fd() {
                    let header = [0; tap::HEADER_BYTES];
                    let _ = rustix::io::write(fd, &[&header[..], &frame].concat());
                }
            }
            Backend::Stream(stream) => {
                if !stream.is_waiting() {
                    stream.keep([&(frame.len() as u32).to_be_bytes()[..], &frame].concat());
                    // What the socket does not take now is sent before the next frame.
                    let _ = stream.flush();
                }
            }
        }
    }
}

impl VirtioDevice for Net {
    fn device_id(&self) -> u32 {
        DEVICE_ID
    }

    fn features(&self) -> u64 {
        self.offered
    }

    fn queue_sizes(&self) -> Vec<u16> {
        vec![QUEUE_SIZE, QUEUE_SIZE, CONTROL_QUEUE_SIZE]
    }

    fn throttles(&self) -> Vec<(&'static str, Arc<Throttle>)> {
        vec![("_rx", self.receive_throttle.clone()), ("_tx", self.transmit_throttle.clone())]
    }

    fn read_config(&self, offset: u64, data: &mut [u8]) {
        // mac, status, max_virtqueue_pairs, mtu (section 5.1.4).
        let mut config = [0u8; 12];
        config[..6].copy_from_slice(&self.mac.bytes());
        config[6..8].copy_from_slice(&self.status().to_le_bytes());
        config[8..10].copy_from_slice(&1_u16.to_le_bytes());
        config[10..].copy_from_slice(&self.mtu.unwrap_or(0).to_le_bytes());
        for (index, byte) in data.iter_mut().enumerate() {
            let position =
                usize::try_from(offset).ok().and_then(|offset| offset.checked_add(index));
            *byte = position.and_then(|position| config.get(position)).copied().unwrap_or(0);
        }
    }

    fn write_config(&mut self, _offset: u64, _data: &[u8]) {}

    fn activate(&mut self, features: u64, queues: Vec<Queue>) -> Result<(), String> {
        let Ok([receive, transmit, control]) = <[Queue; 3]>::try_from(queues) else {
            return Err("it has three queues".to_owned());
        };
        if !receive.ready() || !transmit.ready() {
            return Err("the queues for frames are not ready".to_owned());
        }
        let mut queues = Queues { receive, transmit, control };
        let has_event_index = features & 1 << VIRTIO_RING_F_EVENT_IDX != 0;
        for queue in [&mut queues.receive, &mut queues.transmit, &mut queues.control] {
            queue.set_event_idx(has_event_index);
        }
        self.negotiated = features;
        self.is_new_driver = true;
        self.receive.start(features, self.mtu);
        self.transmit.reset();
        self.queues = Some(queues);
        Ok(())
    }

    fn process_queue(&mut self, index: usize) -> Work {
        if self.is_new_driver {
            self.apply_features();
        }
        match index {
            RECEIVE => self.receive(),
            TRANSMIT => self.transmit(),
            CONTROL => self.control(),
            _ => Work::default(),
        }
    }

    fn deadline(&self) -> Option<Instant> {
        let waits = [self.receive_throttle.resume_at(), self.transmit_throttle.resume_at()];
        let metadata = self.metadata.as_ref().filter(|_| self.queues.is_some());
        let metadata = metadata.and_then(Stack::deadline);
        let times = waits.into_iter().chain([self.has_moved, self.schedule.next(), metadata]);
        times.flatten().min()
    }

    fn on_timer(&mut self, now: Instant) -> Work {
        let resumed = [&self.receive_throttle, &self.transmit_throttle]
            .map(|throttle| throttle.resume(now))
            .contains(&true);
        let mut work = Work { more: resumed, ..Work::default() };
        if let Some(stack) = &mut self.metadata {
            stack.run(now);
        }
        self.receive_metadata(&mut work);
        if self.has_moved.take().is_some() {
            if self.negotiated & 1 << net::VIRTIO_NET_F_GUEST_ANNOUNCE != 0 {
                self.asks_to_announce = true;
                work.config_changed = true;
            } else {
                self.schedule.start(now);
            }
        }
        if self.schedule.take_due(now) && self.link() == LinkState::Up {
            self.announce();
        }
        work
    }

    fn host_events(&self) -> Option<HostEvents> {
        self.queues.as_ref().filter(|_| !self.is_gone)?;
        let (Backend::Tap(tap::Tap { port, .. }) | Backend::Stream(stream::Stream { port, .. })) =
            &self.backend;
        let fd = port.fd()?;
        let mut wanted = PollFlags::empty();
        let may_receive = self.link == LinkState::Down || self.receive.is_ready();
        if may_receive && self.receive_throttle.resume_at().is_none() {
            wanted |= PollFlags::IN;
        }
        if self.transmit.is_blocked() {
            wanted |= PollFlags::OUT;
        }
        (!wanted.is_empty()).then(|| HostEvents { fd: fd.clone(), wanted })
    }

    fn on_host_events(&mut self, ready: PollFlags) -> Work {
        let mut work = Work::default();
        if ready.intersects(PollFlags::IN | PollFlags::HUP | PollFlags::ERR) {
            work = self.receive();
        }
        if ready.intersects(PollFlags::OUT | PollFlags::HUP | PollFlags::ERR)
            && self.transmit.is_blocked()
        {
            work.add(self.transmit());
        }
        work
    }

    fn thread_kind(&self) -> ThreadKind {
        ThreadKind::Net
    }

    fn reset(&mut self) {
        self.queues = None;
        self.negotiated = 0;
        self.receive.reset();
        self.transmit.reset();
        self.asks_to_announce = false;
        (self.has_moved, self.is_new_driver) = (None, false);
        self.schedule.end();
        if let Some(stack) = &mut self.metadata {
            stack.reset();
        }
    }

    fn queue_states(&self) -> Vec<QueueState> {
        let Some(Queues { receive, transmit, control }) = &self.queues else { return Vec::new() };
        let mut states = [receive, transmit, control].map(Queue::state);
        // Buffers that hold no frame yet are taken again after a restore.
        let posted = self.receive.posted() as u16;
        states[RECEIVE].next_avail = states[RECEIVE].next_avail.wrapping_sub(posted);
        states.to_vec()
    }

    fn save(&mut self) -> DeviceState {
        let link_down = self.link == LinkState::Down;
        DeviceState::Net { mac: self.mac, mtu: self.mtu, link_down }
    }

    fn restore(
        &mut self,
        state: &DeviceState,
        driver: Option<(u64, Vec<Queue>)>,
    ) -> Result<(), String> {
        let DeviceState::Net { mac: _, mtu, link_down } = state else {
            return Err("its state belongs to another device".to_owned());
        };
        if *mtu != self.mtu {
            return Err("it announces another MTU than before".to_owned());
        }
        self.link = if *link_down { LinkState::Down } else { LinkState::Up };
        let Some((features, queues)) = driver else { return Ok(()) };
        self.has_moved = Some(Instant::now());
        self.activate(features, queues)
    }
}

#[cfg(test)]
mod tests;
