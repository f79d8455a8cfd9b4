//! The service as a guest's TCP sees it: another stack of smoltcp, at the other end of the wire.

use proptest::prelude::*;
use serde_json::json;
use smoltcp::iface::SocketHandle;

use super::super::{DEFAULT_ADDRESS, Metadata};
use super::fuzzing::{numbers, segment};
use super::wire::MOST_FRAMES;
use super::*;

const GUEST_MAC: [u8; 6] = [2; 6];

/// A guest with some connections.
struct Guest {
    wire: Wire,
    interface: Interface,
    sockets: SocketSet<'static>,
    handles: Vec<SocketHandle>,
}

impl Guest {
    fn new(connections: usize) -> Self {
        let mut wire = Wire::new(GUEST_MAC, 1500);
        wire.guest = MAC;
        let config = Config::new(HardwareAddress::Ip);
        let mut interface = Interface::new(config, &mut wire, smoltcp::time::Instant::ZERO);
        interface.update_ip_addrs(|addresses| {
            addresses.push(IpCidr::new(IpAddress::v4(10, 0, 0, 2), 0)).unwrap();
        });
        let mut sockets = SocketSet::new(Vec::new());
        let handles = (0..connections).map(|index| {
            let buffer = || SocketBuffer::new(vec![0; 65_535]);
            let mut socket = Socket::new(buffer(), buffer());
            let remote = (IpAddress::Ipv4(DEFAULT_ADDRESS), PORT);
            socket.connect(interface.context(), remote, 40_000 + index as u16).unwrap();
            sockets.add(socket)
        });
        let handles = handles.collect();
        Self { wire, interface, sockets, handles }
    }

    fn socket(&mut self, index: usize) -> &mut Socket<'static> {
        self.sockets.get_mut(self.handles[index])
    }

    /// Lets both sides talk until neither has anything to say.
    fn talk(&mut self, stack: &mut Stack, now: Instant) {
        let time = stack.time(now);
        loop {
            let mut frames = 0;
            while let Some(frame) = stack.frame() {
                assert_eq!(frame[..6], GUEST_MAC);
                self.wire.input = Some(frame[ETHERNET_BYTES..].to_vec());
                stack.skip();
                self.interface.poll(time, &mut self.wire, &mut self.sockets);
                frames += 1;
            }
            self.interface.poll(time, &mut self.wire, &mut self.sockets);
            while let Some(frame) = self.wire.output.pop_front() {
                assert!(stack.takes(&frame));
                stack.receive(&frame, now);
                frames += 1;
            }
            stack.run(now);
            if frames == 0 && stack.frame().is_none() {
                return;
            }
        }
    }

    fn received(&mut self, index: usize) -> String {
        let mut text = String::new();
        let socket = self.socket(index);
        while socket.can_recv() {
            let _ = socket.recv(|bytes| {
                text.push_str(str::from_utf8(bytes).unwrap());
                (bytes.len(), ())
            });
        }
        text
    }
}

fn stack(document: serde_json::Value, now: Instant) -> Stack {
    let service = Metadata::new(100_000);
    service.lock().store.put(document).unwrap();
    Stack::new(Served { service, address: DEFAULT_ADDRESS }, None, now)
}

#[test]
fn requests_are_answered_one_after_the_other() {
    let now = Instant::now();
    let large = "x".repeat(50_000);
    let mut stack = stack(json!({ "a": "b", "large": large }), now);
    assert_eq!(stack.deadline(), None);
    let mut guest = Guest::new(1);
    guest.talk(&mut stack, now);
    // In pieces, and the second one behind the first.
    for part in ["GET /a HT", "TP/1.1\r\nHost: a\r\n", "\r\nGET /large HTTP/1.1\r\n\r\n"] {
        guest.socket(0).send_slice(part.as_bytes()).unwrap();
        guest.talk(&mut stack, now);
    }
    // The rest of the large answer waits for time: acknowledgements are delayed.
    let (mut text, mut later) = (String::new(), now);
    for _ in 0..1000 {
        text += &guest.received(0);
        later += Duration::from_millis(20);
        guest.talk(&mut stack, later);
    }
    let (first, second) =
        text.split_once("HTTP/1.1 200 ").unwrap().1.split_once("HTTP/1.1").unwrap();
    assert!(first.ends_with("\r\n\r\nb"), "{first}");
    assert!(second.starts_with(" 200 ") && second.ends_with(&large));
    // The guest closes, and its place is free again.
    guest.socket(0).close();
    guest.talk(&mut stack, later);
    guest.talk(&mut stack, later + Duration::from_secs(1));
    assert!(stack.connections.iter().all(|connection| connection.phase == Phase::Listening));
    assert_eq!((stack.answers_bytes, stack.deadline()), (0, None));
    assert_eq!(stack.served.service.lock().counts.connections, 1);
}

#[test]
fn only_so_many_connections_are_kept_and_each_only_so_long() {
    let now = Instant::now();
    let mut stack = stack(json!({ "a": "b" }), now);
    let mut guest = Guest::new(MOST_CONNECTIONS + 3);
    guest.talk(&mut stack, now);
    let states: Vec<_> = guest
        .handles
        .clone()
        .iter()
        .map(|it| guest.sockets.get::<Socket<'_>>(*it).state())
        .collect();
    let open = states.iter().filter(|state| **state == State::Established).count();
    let refused = states.iter().filter(|state| **state == State::Closed).count();
    assert_eq!((open, refused), (MOST_CONNECTIONS, 3));
    // A request that never ends, sent slowly, ends with its time.
    for second in 1..10 {
        guest.socket(0).send_slice(b"GET").unwrap();
        guest.talk(&mut stack, now + Duration::from_secs(second));
        assert_eq!(guest.socket(0).state(), State::Established);
    }
    let end = now + STEP_TIME;
    assert_eq!(stack.connections.iter().filter_map(Connection::deadline).min(), Some(end));
    guest.talk(&mut stack, end);
    guest.talk(&mut stack, end + REST);
    assert_eq!(guest.socket(0).state(), State::Closed);
    assert!(stack.connections.iter().all(|connection| connection.phase == Phase::Listening));
    // There is room again.
    let mut other = Guest::new(1);
    other.talk(&mut stack, end + REST);
    other.socket(0).send_slice(b"GET /a HTTP/1.1\r\n\r\n").unwrap();
    other.talk(&mut stack, end + REST);
    assert!(other.received(0).ends_with("\r\n\r\nb"));
}

#[test]
fn a_request_that_is_too_long_ends_its_connection() {
    let now = Instant::now();
    let mut stack = stack(json!({ "a": "b" }), now);
    let mut guest = Guest::new(1);
    guest.talk(&mut stack, now);
    guest.socket(0).send_slice(&[b'x'; REQUEST_BYTES + 1]).unwrap();
    // Acknowledgements are delayed.
    for step in 0..10 {
        guest.talk(&mut stack, now + step * Duration::from_millis(20));
    }
    assert_eq!(guest.socket(0).state(), State::Closed);
}

#[test]
fn a_guest_that_reads_nothing_holds_only_so_many_bytes() {
    let now = Instant::now();
    let mut stack = stack(json!({ "large": "x".repeat(60_000) }), now);
    let mut guest = Guest::new(MOST_CONNECTIONS);
    guest.talk(&mut stack, now);
    for index in 0..MOST_CONNECTIONS {
        let many = "GET /large HTTP/1.1\r\n\r\n".repeat(20);
        guest.socket(index).send_slice(many.as_bytes()).unwrap();
    }
    let mut later = now;
    for _ in 0..100 {
        later += Duration::from_millis(20);
        guest.talk(&mut stack, later);
        assert!(stack.answers_bytes < ANSWERS_BYTES + 61_000);
        assert!(stack.wire.output.len() <= MOST_FRAMES);
    }
    assert!(stack.answers_bytes >= ANSWERS_BYTES);
    stack.reset();
    assert_eq!((stack.answers_bytes, stack.deadline()), (0, None));
}

#[test]
fn a_flood_of_handshakes_is_bounded_and_ends() {
    let now = Instant::now();
    let mut stack = stack(json!({}), now);
    for port in 1..10_000 {
        stack.receive(&segment((port, PORT), (1, 0), 2, &[], &[]), now);
        assert!(stack.wire.output.len() <= MOST_FRAMES);
    }
    assert_eq!(stack.deadline(), Some(now + HANDSHAKE_TIME));
    while stack.frame().is_some() {
        stack.skip();
    }
    stack.run(now + HANDSHAKE_TIME);
    stack.run(now + HANDSHAKE_TIME + REST);
    assert!(stack.connections.iter().all(|connection| connection.phase == Phase::Listening));
    // To another port: a reset, and no connection.
    while stack.frame().is_some() {
        stack.skip();
    }
    stack.receive(&segment((1, 81), (7, 0), 2, &[], &[]), now + HANDSHAKE_TIME);
    assert_eq!(stack.frame().and_then(numbers), Some((0, 8, 0)));
}

#[test]
fn addresses_are_resolved() {
    let now = Instant::now();
    let mut stack = stack(json!({}), now);
    let target = DEFAULT_ADDRESS.octets();
    let arp = [
        &[0xff; 6][..],
        &GUEST_MAC,
        &[8, 6, 0, 1, 8, 0, 6, 4, 0, 1],
        &GUEST_MAC,
        &[10, 0, 0, 2],
        &[0; 6],
        &target,
        &[0; 18],
    ]
    .concat();
    assert!(stack.takes(&arp));
    stack.receive(&arp, now);
    let expected = [
        &GUEST_MAC[..],
        &MAC,
        &[8, 6, 0, 1, 8, 0, 6, 4, 0, 2],
        &MAC,
        &target,
        &GUEST_MAC,
        &[10, 0, 0, 2],
    ]
    .concat();
    assert_eq!(stack.frame(), Some(&expected[..]));
    stack.skip();
    // Neither another's address, nor what is not a request, nor a short one.
    let mut other = arp.clone();
    other[41] += 1;
    assert!(!stack.takes(&other));
    let mut reply = arp.clone();
    reply[21] = 2;
    for frame in [&reply[..], &arp[..41], &arp[..3], &[]] {
        stack.receive(frame, now);
        assert_eq!(stack.frame(), None);
    }
    assert!(!stack.takes(&arp[..40]) && !stack.takes(&[]));
}

#[test]
fn fragments_and_other_protocols_are_dropped() {
    let now = Instant::now();
    let mut stack = stack(json!({}), now);
    let syn = segment((1, PORT), (1, 0), 2, &[], &[]);
    for (at, value) in [(14, 0x65), (20, 0x20), (21, 1), (23, 1), (23, 17), (14, 0x4f)] {
        let mut changed = syn.clone();
        changed[at] = value;
        assert!(stack.takes(&changed));
        stack.receive(&changed, now);
        assert_eq!(stack.frame(), None, "byte {at}");
    }
    stack.receive(&syn, now);
    assert!(stack.frame().is_some());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]
    #[test]
    fn any_frames_leave_the_stack_within_its_bounds(
        data in proptest::collection::vec(any::<u8>(), 0..3000),
    ) {
        fuzz_frames(&data);
    }
}

/// Many runs of the fuzz target: `EBB_MMDS_RUNS=100000 cargo test -p ebb-vmm hostile_frames -- \
/// --ignored`.
#[test]
#[ignore = "takes as long as the number of runs asks for"]
fn hostile_frames_by_number() {
    let runs = std::env::var("EBB_MMDS_RUNS").map_or(1000, |text| text.parse().unwrap());
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut data = vec![0; 4096];
    for _ in 0..runs {
        for chunk in data.chunks_exact_mut(8) {
            // xorshift64
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            chunk.copy_from_slice(&state.to_le_bytes());
        }
        fuzz_frames(&data);
    }
}
