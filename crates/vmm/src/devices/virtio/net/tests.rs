//! The device as a driver uses it, over sockets in place of a tap interface and of passt.

use std::io::{Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use ebb_abi::Pfn;
use ebb_guest_ram::{Backing, GuestRam, HugePages, PageBitmap, Populate, RegionSpec};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use std::os::fd::OwnedFd;
use virtio_bindings::virtio_config::VIRTIO_F_VERSION_1;
use vm_memory::{Bytes, GuestAddress};

use super::backend::OpenNet;
use super::parts::Port;
use super::stream::MAX_FRAME_BYTES;
use super::tap::{HEADER_BYTES, Tap};
use super::*;

mod metadata;

const SIZE: u16 = 64;
const BASES: [u64; 3] = [0x1000, 0x5000, 0x9000];
const AVAILABLE: u64 = 0x1000;
const USED: u64 = 0x2000;
const DATA: u64 = 0x10000;
const MEMORY_BYTES: u64 = 4 << 20;
const MERGEABLE: u64 = 1 << net::VIRTIO_NET_F_MRG_RXBUF;
const LARGE: u64 = 1 << net::VIRTIO_NET_F_GUEST_TSO4;

/// A device and its driver.
struct Pair {
    net: Net,
    ram: GuestRam,
    available: [u16; 3],
}

/// A pair over a stand-in for a tap interface, and the host's end of it.
fn tap(features: u64) -> (Pair, OwnedFd) {
    let (ours, theirs) =
        socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::NONBLOCK, None)
            .unwrap();
    (pair("fd=9", OpenNet::tap(Port::Open(ours.into())), features), theirs)
}

/// A pair over a stream, and the other end of it.
fn stream(features: u64) -> (Pair, UnixStream) {
    let (ours, theirs) = UnixStream::pair().unwrap();
    ours.set_nonblocking(true).unwrap();
    let port = Port::Open(OwnedFd::from(ours).into());
    (pair("fd=9", OpenNet::stream(port), features), theirs)
}

fn pair(config: &str, opened: OpenNet, features: u64) -> Pair {
    pair_with(&config.parse().unwrap(), opened, features)
}

fn pair_with(config: &NetConfig, opened: OpenNet, features: u64) -> Pair {
    let spec = RegionSpec { start: GuestAddress(0), size_bytes: MEMORY_BYTES, host_node: None };
    let ram = GuestRam::new(&[spec], Backing::Anonymous, HugePages::Off, Populate::Lazy).unwrap();
    let mac = "02:00:00:00:00:07".parse().unwrap();
    let mut net = Net::new("net0", config, mac, opened, ram.memory().clone());
    net.activate(features | 1 << VIRTIO_F_VERSION_1, BASES.map(queue).into()).unwrap();
    Pair { net, ram, available: [0; 3] }
}

fn queue(base: u64) -> Queue {
    let mut queue = Queue::new(QUEUE_SIZE).unwrap();
    queue.set_size(SIZE);
    queue.set_desc_table_address(Some(base as u32), None);
    queue.set_avail_ring_address(Some((base + AVAILABLE) as u32), None);
    queue.set_used_ring_address(Some((base + USED) as u32), None);
    queue.set_ready(true);
    queue
}

impl Pair {
    /// Makes a buffer of one descriptor available.
    fn add(&mut self, which: usize, address: u64, length: usize) {
        let (base, index) = (BASES[which], self.available[which] % SIZE);
        let write = if which == RECEIVE { 2_u16 } else { 0 };
        let memory = self.ram.memory();
        let at = base + 16 * u64::from(index);
        memory.write_obj(address, GuestAddress(at)).unwrap();
        memory.write_obj(length as u32, GuestAddress(at + 8)).unwrap();
        memory.write_obj(write, GuestAddress(at + 12)).unwrap();
        memory.write_obj(index, GuestAddress(base + AVAILABLE + 4 + 2 * u64::from(index))).unwrap();
        self.available[which] = self.available[which].wrapping_add(1);
        let ring = GuestAddress(base + AVAILABLE + 2);
        memory.write_obj(self.available[which], ring).unwrap();
    }

    /// Makes a frame to be sent available, in memory that it has for itself.
    fn send(&mut self, frame: &[u8]) {
        let address = DATA + u64::from(self.available[TRANSMIT] % SIZE) * 0xc000;
        let bytes = [&[0; HEADER_BYTES], frame].concat();
        self.ram.memory().write_slice(&bytes, GuestAddress(address)).unwrap();
        self.add(TRANSMIT, address, bytes.len());
    }

    fn used(&self, which: usize) -> u16 {
        self.ram.memory().read_obj(GuestAddress(BASES[which] + USED + 2)).unwrap()
    }

    /// Head and length of a used buffer.
    fn used_element(&self, which: usize, index: u16) -> (u32, u32) {
        let at = BASES[which] + USED + 4 + 8 * u64::from(index % SIZE);
        let read = |offset| self.ram.memory().read_obj(GuestAddress(at + offset)).unwrap();
        (read(0), read(4))
    }

    fn bytes(&self, address: u64, length: usize) -> Vec<u8> {
        let mut bytes = vec![0; length];
        self.ram.memory().read_slice(&mut bytes, GuestAddress(address)).unwrap();
        bytes
    }

    fn wanted(&self) -> Option<PollFlags> {
        self.net.host_events().map(|events| events.wanted)
    }

    fn count(&self, counter: impl Fn(&NetCounters) -> &AtomicU64) -> u64 {
        counter(self.net.counters()).load(Ordering::Relaxed)
    }
}

fn frame(length: usize, seed: usize) -> Vec<u8> {
    (0..length).map(|index| (index * 7 + seed) as u8).collect()
}

fn with_header(frame: &[u8]) -> Vec<u8> {
    [&[0; HEADER_BYTES], frame].concat()
}

#[test]
fn frames_are_sent_from_the_guests_memory() {
    let (mut pair, host) = tap(0);
    for seed in 0..3 {
        pair.send(&frame(100 + seed, seed));
    }
    // Too short for Ethernet, longer than any frame, and not in memory.
    pair.add(TRANSMIT, DATA, HEADER_BYTES + 13);
    pair.add(TRANSMIT, DATA, receive::MAX_BYTES + 1);
    pair.add(TRANSMIT, MEMORY_BYTES - 10, 100);
    let work = pair.net.process_queue(TRANSMIT);
    assert!(work.interrupt && work.served && !work.more);
    assert_eq!(pair.used(TRANSMIT), 6);
    let mut buffer = vec![0; 1000];
    for seed in 0..3 {
        let length = rustix::io::read(&host, &mut buffer).unwrap();
        assert!(buffer[..length] == with_header(&frame(100 + seed, seed)));
    }
    rustix::io::read(&host, &mut buffer).unwrap_err();
    assert_eq!((pair.count(|c| &c.sent), pair.count(|c| &c.sent_bytes)), (3, 303));
    assert_eq!(pair.count(|c| &c.sent_dropped), 3);
}

/// A large frame takes several buffers, which become used together, and its pages are logged.
#[test]
fn frames_are_received_into_the_guests_memory() {
    let (mut pair, host) = tap(MERGEABLE | LARGE);
    assert_eq!(pair.wanted(), None);
    for index in 0..40 {
        pair.add(RECEIVE, DATA + index * 0x1000, 2048);
    }
    assert!(!pair.net.process_queue(RECEIVE).interrupt);
    assert_eq!(pair.wanted(), Some(PollFlags::IN));
    // It keeps what the largest frame needs, and a snapshot has none of that.
    assert!(pair.net.receive.posted() >= 32);
    assert_eq!(pair.net.queue_states()[RECEIVE].next_avail, 0);

    pair.ram.start_write_log().unwrap();
    let large = frame(5000, 3);
    rustix::io::write(&host, &with_header(&large)).unwrap();
    rustix::io::write(&host, &with_header(&frame(60, 4))).unwrap();
    let work = pair.net.on_host_events(PollFlags::IN);
    assert!(work.interrupt && work.served);
    assert_eq!(pair.used(RECEIVE), 4);
    let elements: Vec<_> = (0..4).map(|index| pair.used_element(RECEIVE, index)).collect();
    assert_eq!(elements, [(0, 2048), (1, 2048), (2, 5012 - 4096), (3, 72)]);
    assert_eq!(pair.bytes(DATA, 12)[10..], [3, 0]);
    let received = [
        pair.bytes(DATA, 2048),
        pair.bytes(DATA + 0x1000, 2048),
        pair.bytes(DATA + 0x2000, 5012 - 4096),
    ]
    .concat();
    assert!(received[12..] == large);
    assert_eq!(pair.bytes(DATA + 0x3000, 12)[10..], [1, 0]);
    let mut written = PageBitmap::new(&pair.ram.page_ranges());
    pair.ram.take_write_log(&mut written);
    for page in 0..6 {
        assert_eq!(written.contains(Pfn::containing(DATA + (page << 12))), page < 4, "page {page}");
    }
    assert_eq!((pair.count(|c| &c.received), pair.count(|c| &c.received_bytes)), (2, 5060));
    assert_eq!(pair.net.queue_states()[RECEIVE].next_avail, 4);
}

/// A frame that does not fit into the buffers that are there waits for further ones.
#[test]
fn a_frame_waits_for_buffers() {
    let (mut pair, host) = tap(MERGEABLE | LARGE);
    let large = frame(60_000, 5);
    rustix::io::write(&host, &with_header(&large)).unwrap();
    pair.net.process_queue(RECEIVE);
    assert_eq!(pair.wanted(), None, "without buffers nothing is read");
    pair.add(RECEIVE, DATA, 20_000);
    assert!(!pair.net.process_queue(RECEIVE).interrupt);
    assert_eq!((pair.wanted(), pair.used(RECEIVE)), (None, 0));
    pair.add(RECEIVE, DATA + 20_000, 30_000);
    pair.net.process_queue(RECEIVE);
    assert_eq!(pair.used(RECEIVE), 0);
    pair.add(RECEIVE, DATA + 50_000, 30_000);
    assert!(pair.net.process_queue(RECEIVE).interrupt);
    assert_eq!(pair.used(RECEIVE), 3);
    assert!(pair.bytes(DATA + 12, 60_000) == large);
    assert_eq!(pair.bytes(DATA, 12)[10..], [3, 0]);
}

#[test]
fn frames_that_never_fit_are_dropped() {
    // One buffer for each frame.
    let (mut pair, host) = tap(0);
    pair.add(RECEIVE, DATA, 1526);
    rustix::io::write(&host, &with_header(&frame(1515, 0))).unwrap();
    rustix::io::write(&host, &with_header(&frame(1514, 1))).unwrap();
    pair.net.process_queue(RECEIVE);
    assert_eq!((pair.used(RECEIVE), pair.used_element(RECEIVE, 0)), (1, (0, 1526)));
    assert!(pair.bytes(DATA + 12, 1514) == frame(1514, 1));
    assert_eq!(pair.count(|c| &c.received_dropped), 1);
    // A whole ring of small buffers.
    let (mut pair, host) = tap(MERGEABLE | LARGE);
    for _ in 0..SIZE {
        pair.add(RECEIVE, DATA, 100);
    }
    rustix::io::write(&host, &with_header(&frame(6400, 0))).unwrap();
    rustix::io::write(&host, &with_header(&frame(6300, 1))).unwrap();
    pair.net.process_queue(RECEIVE);
    assert_eq!((pair.used(RECEIVE), pair.count(|c| &c.received_dropped)), (64, 1));
}

#[test]
fn a_stream_has_frames_with_their_lengths() {
    let (mut pair, mut peer) = stream(MERGEABLE);
    for index in 0..8 {
        pair.add(RECEIVE, DATA + index * 0x1000, 2048);
    }
    let frames = [frame(60, 1), frame(3000, 2), frame(1514, 3)];
    for frame in &frames {
        peer.write_all(&(frame.len() as u32).to_be_bytes()).unwrap();
        peer.write_all(frame).unwrap();
    }
    pair.net.process_queue(RECEIVE);
    assert_eq!(pair.used(RECEIVE), 4);
    assert!(pair.bytes(DATA, 72) == [&[0; 10][..], &[1, 0], &frames[0]].concat());
    let second = [pair.bytes(DATA + 0x1000, 2048), pair.bytes(DATA + 0x2000, 964)].concat();
    assert!(second == [&[0; 10][..], &[2, 0], &frames[1]].concat());

    for frame in &frames {
        pair.send(frame);
    }
    pair.add(TRANSMIT, DATA, HEADER_BYTES + 13);
    assert!(pair.net.process_queue(TRANSMIT).interrupt);
    assert_eq!(pair.used(TRANSMIT), 4);
    for frame in &frames {
        let mut bytes = vec![0; 4 + frame.len()];
        peer.read_exact(&mut bytes).unwrap();
        assert!(bytes == [&(frame.len() as u32).to_be_bytes()[..], frame].concat());
    }
}

/// Frames for a peer that does not read stay in the driver's queue.
#[test]
fn a_peer_that_stops_reading_delays_the_driver() {
    let (mut pair, mut peer) = stream(0);
    let mut expected = Vec::new();
    for seed in 0..40 {
        let frame = frame(40_000, seed);
        pair.send(&frame);
        expected.extend((frame.len() as u32).to_be_bytes());
        expected.extend(frame);
    }
    pair.net.process_queue(TRANSMIT);
    let sent = pair.used(TRANSMIT);
    assert!(sent > 0 && sent < 40, "{sent}");
    assert_eq!(pair.wanted(), Some(PollFlags::OUT));
    // Nothing more is taken, however often the driver asks.
    for _ in 0..10 {
        assert!(!pair.net.process_queue(TRANSMIT).more);
    }
    assert_eq!(pair.used(TRANSMIT), sent);
    let mut received = vec![0; expected.len()];
    let reader = std::thread::spawn(move || {
        peer.read_exact(&mut received).unwrap();
        (received, peer)
    });
    while pair.used(TRANSMIT) < 40 || pair.wanted().is_some() {
        pair.net.on_host_events(PollFlags::OUT);
    }
    assert!(reader.join().unwrap().0 == expected);
    assert_eq!(pair.count(|c| &c.sent), 40);
}

/// The link goes down, and the machine continues.
#[test]
fn a_backend_that_fails_takes_the_link_down() {
    let wrong = (MAX_FRAME_BYTES as u32 + 1).to_be_bytes();
    for said in [&wrong[..], &[]] {
        let (mut pair, mut peer) = stream(MERGEABLE);
        pair.add(RECEIVE, DATA, 2048);
        pair.net.process_queue(RECEIVE);
        peer.write_all(said).unwrap();
        if said.is_empty() {
            drop(peer);
        }
        let work = pair.net.on_host_events(PollFlags::IN | PollFlags::HUP);
        assert!(work.config_changed);
        assert_eq!((pair.net.link(), pair.wanted()), (LinkState::Down, None));
        assert_eq!(pair.net.status(), 0);
        // The driver's frames are dropped.
        for _ in 0..SIZE {
            pair.send(&frame(60, 0));
        }
        while pair.net.process_queue(TRANSMIT).more {}
        assert_eq!((pair.used(TRANSMIT), pair.count(|c| &c.sent_dropped)), (SIZE, SIZE.into()));
        assert!(!pair.net.set_link(LinkState::Down) && !pair.net.set_link(LinkState::Up));
    }
    // Found out when sending.
    let (mut pair, peer) = stream(0);
    drop(peer);
    pair.send(&frame(60, 0));
    let work = pair.net.process_queue(TRANSMIT);
    assert!(work.config_changed && work.more);
    pair.net.process_queue(TRANSMIT);
    assert_eq!(pair.used(TRANSMIT), 1);
}

#[test]
fn without_a_link_frames_are_dropped() {
    let (mut pair, host) = tap(MERGEABLE);
    pair.add(RECEIVE, DATA, 2048);
    pair.net.process_queue(RECEIVE);
    assert!(pair.net.set_link(LinkState::Down));
    rustix::io::write(&host, &with_header(&frame(60, 0))).unwrap();
    pair.send(&frame(60, 1));
    assert_eq!(pair.wanted(), Some(PollFlags::IN));
    pair.net.on_host_events(PollFlags::IN);
    pair.net.process_queue(TRANSMIT);
    assert_eq!((pair.used(RECEIVE), pair.used(TRANSMIT)), (0, 1));
    let state = pair.net.save();
    assert!(matches!(state, DeviceState::Net { link_down: true, mtu: None, .. }));
    assert!(pair.net.set_link(LinkState::Up));
    rustix::io::write(&host, &with_header(&frame(60, 2))).unwrap();
    pair.net.on_host_events(PollFlags::IN);
    assert!(pair.used(RECEIVE) == 1 && pair.bytes(DATA + 12, 60) == frame(60, 2));
}

/// Limits of one direction do not concern the other one.
#[test]
fn each_direction_has_its_limits() {
    let (ours, host) =
        socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::NONBLOCK, None)
            .unwrap();
    let limits = "fd=9,rx_ops=1,tx_bandwidth=100,tx_bandwidth_burst=200";
    let mut pair = pair(limits, OpenNet::tap(Port::Open(ours.into())), MERGEABLE);
    for index in 0..4 {
        pair.add(RECEIVE, DATA + index * 0x1000, 2048);
        pair.send(&frame(100, 0));
        rustix::io::write(&host, &with_header(&frame(60, 0))).unwrap();
    }
    pair.net.process_queue(RECEIVE);
    pair.net.process_queue(TRANSMIT);
    assert_eq!((pair.used(RECEIVE), pair.used(TRANSMIT)), (1, 2));
    assert_eq!(pair.wanted(), None);
    assert_eq!(pair.net.queue_states()[TRANSMIT].next_avail, 2);
    let deadline = pair.net.deadline().unwrap();
    assert!(pair.net.on_timer(deadline + Duration::from_secs(1)).more);
    assert!(pair.net.receive_throttle.resume_at().is_none());
    assert_eq!(pair.wanted(), Some(PollFlags::IN));
    let names: Vec<_> = pair.net.throttles().into_iter().map(|(name, _)| name).collect();
    assert_eq!(names, ["_rx", "_tx"]);
}

/// At a new place, a driver that can is asked to announce itself; for another one, the device does.
#[test]
fn a_restored_device_is_announced() {
    let announces = 1 << net::VIRTIO_NET_F_GUEST_ANNOUNCE | 1 << net::VIRTIO_NET_F_CTRL_VQ;
    for features in [announces, 0] {
        let (mut old, _host) = tap(features);
        let (state, queues) = (old.net.save(), old.net.queue_states());
        let (mut pair, host) = tap(features);
        let queues = queues.into_iter().map(|queue| Queue::try_from(queue).unwrap()).collect();
        pair.net.restore(&state, Some((features, queues))).unwrap();
        let mut frames = 0;
        let mut work = Work::default();
        while let Some(deadline) = pair.net.deadline() {
            let done = pair.net.on_timer(deadline);
            work.config_changed |= done.config_changed;
            let mut buffer = [0; 100];
            while let Ok(length) = rustix::io::read(&host, &mut buffer) {
                assert_eq!(buffer[HEADER_BYTES + 12..][..2], [0x80, 0x35]);
                assert_eq!(length, HEADER_BYTES + 60);
                frames += 1;
            }
        }
        let asked = features != 0;
        assert_eq!((work.config_changed, frames), (asked, if asked { 0 } else { 5 }));
        assert_eq!(pair.net.status(), if asked { 3 } else { 1 });
        // The driver's acknowledgement.
        let memory = pair.ram.memory().clone();
        memory.write_slice(&[3, 0], GuestAddress(DATA)).unwrap();
        memory.write_obj(DATA + 16, GuestAddress(BASES[CONTROL] + 16)).unwrap();
        memory.write_obj(1_u32, GuestAddress(BASES[CONTROL] + 24)).unwrap();
        memory.write_obj(2_u16, GuestAddress(BASES[CONTROL] + 28)).unwrap();
        pair.add(CONTROL, DATA, 2);
        memory.write_obj(1_u16, GuestAddress(BASES[CONTROL] + 12)).unwrap();
        memory.write_obj(1_u16, GuestAddress(BASES[CONTROL] + 14)).unwrap();
        memory.write_obj(9_u8, GuestAddress(DATA + 16)).unwrap();
        assert!(pair.net.process_queue(CONTROL).interrupt);
        assert_eq!((pair.bytes(DATA + 16, 1), pair.net.status()), (vec![0], 1));
    }
}

#[test]
fn a_state_of_another_device_or_mtu_is_refused() {
    let (mut pair, _host) = tap(0);
    let mac = pair.net.mac();
    pair.net.restore(&DeviceState::Queues, None).unwrap_err();
    let other = DeviceState::Net { mac, mtu: Some(1400), link_down: false };
    assert!(pair.net.restore(&other, None).unwrap_err().contains("MTU"));
    let mut config = [0xff; 16];
    pair.net.read_config(0, &mut config);
    assert_eq!(config, [2, 0, 0, 0, 0, 7, 1, 0, 1, 0, 0, 0, 0, 0, 0, 0]);
    pair.net.read_config(u64::MAX, &mut config);
    assert_eq!(config, [0; 16]);
}

/// Counts hostile chains: `EBB_NET_CHAINS=100000000 cargo test -p ebb-vmm --release
/// hostile_chains_by_number -- --ignored --nocapture`.
#[test]
#[ignore = "takes as long as the number of chains asks for"]
fn hostile_chains_by_number() {
    let wanted = std::env::var("EBB_NET_CHAINS").map_or(1_000_000, |text| text.parse().unwrap());
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut data = vec![0; 8192];
    let begin = Instant::now();
    while fuzzed_chains() < wanted {
        for chunk in data.chunks_exact_mut(8) {
            // xorshift64
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            chunk.copy_from_slice(&state.to_le_bytes());
        }
        fuzz_net(&data);
    }
    println!("{} chains in {:?}", fuzzed_chains(), begin.elapsed());
}

/// The real program, from Debian's package: it understands the device's frames, and the other way
/// round.
#[test]
fn passt_answers_a_frame_of_the_driver() {
    let mac: MacAddress = "02:00:00:00:00:07".parse().unwrap();
    let mut opened = open_all(&["user".parse().unwrap()]).unwrap().remove(0);
    opened.wait_ready("net0", mac, || {}).unwrap();
    let mut pair = pair("fd=9", opened, MERGEABLE);
    pair.add(RECEIVE, DATA, 2048);
    pair.net.process_queue(RECEIVE);
    pair.add(TRANSMIT, DATA + 0x1000, 72);
    let question = with_header(&announce::probe(mac));
    pair.ram.memory().write_slice(&question, GuestAddress(DATA + 0x1000)).unwrap();
    assert!(pair.net.process_queue(TRANSMIT).interrupt);
    while pair.used(RECEIVE) == 0 {
        let events = pair.net.host_events().expect("passt runs");
        let mut fds = [rustix::event::PollFd::new(&events.fd, events.wanted)];
        assert_eq!(rustix::event::poll(&mut fds, Some(&crate::fuzzing::PATIENCE)), Ok(1));
        let ready = fds[0].revents();
        pair.net.on_host_events(ready);
    }
    // An answer (2) to the driver's address (RFC 826).
    let answer = pair.bytes(DATA + HEADER_BYTES as u64, 42);
    assert_eq!((&answer[..6], &answer[12..14]), (&mac.bytes()[..], &[8, 6][..]));
    assert_eq!(answer[20..22], [0, 2]);
}
