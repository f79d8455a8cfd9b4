//! The muxer as a guest and its host see it, without queues, and the device with them.

use std::io::{ErrorKind, Read as _, Write as _};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use virtio_queue::{Queue, QueueT as _};
use virtio_vsock::packet::VsockPacket;
use vm_memory::{Bytes as _, GuestAddress, GuestMemoryMmap};

use super::connector::Connector;
use super::muxer::Muxer;
use super::packet::{
    HEADER_BYTES, HOST_CID, Header, Op, SHUTDOWN_BOTH, SHUTDOWN_RECEIVE, SHUTDOWN_SEND, TYPE_STREAM,
};
use super::testing::Host;

mod streams;

const CID: u64 = 7;
const MOST: usize = 8;

/// A muxer with its guest and its host.
struct Bench {
    muxer: Muxer,
    host: Host,
    now: Instant,
}

impl Bench {
    fn new() -> Self {
        let (host, listener, link) = Host::new().unwrap();
        let now = Instant::now();
        let muxer = Muxer::new(CID, listener, Connector::new(link, now), MOST).unwrap();
        Self { muxer, host, now }
    }

    fn events(&mut self) {
        // A client is accepted, read, and gone.
        for _ in 0..4 {
            while self.muxer.on_events(self.now) {}
        }
    }

    fn pass(&mut self, time: Duration) {
        self.now += time;
        if self.muxer.deadline().is_some_and(|deadline| deadline <= self.now) {
            self.muxer.on_timer(self.now);
        }
    }

    /// The guest sends a packet.
    fn send(&mut self, host_port: u32, guest_port: u32, op: Op, data: &[u8]) {
        self.send_with(Header { op: op as u16, ..header(host_port, guest_port) }, data);
    }

    fn send_with(&mut self, header: Header, data: &[u8]) {
        let header = Header { len: data.len() as u32, ..header };
        self.muxer.accept_packet(&header, data, self.now);
    }

    /// The guest receives a packet.
    fn receive(&mut self) -> Option<(Header, Vec<u8>)> {
        let mut buffer = [0; 4096];
        let header = self.muxer.next_packet(&mut buffer, self.now)?;
        Some((header, buffer[..header.len as usize].to_vec()))
    }

    fn receive_op(&mut self) -> Option<Op> {
        self.receive().map(|(header, _)| Op::of(header.op).unwrap())
    }

    /// A connection of a client, which the guest has accepted: its port at the host and the client.
    fn accepted(&mut self, guest_port: u32) -> (u32, UnixStream) {
        let mut client = self.host.client(format!("CONNECT {guest_port}\n").as_bytes()).unwrap();
        self.events();
        let (request, _) = self.receive().unwrap();
        assert_eq!((request.op, request.dst_port), (Op::Request as u16, guest_port));
        assert_eq!((request.src_cid, request.dst_cid, request.kind), (HOST_CID, CID, TYPE_STREAM));
        assert!(request.buf_alloc > 0 && request.fwd_cnt == 0);
        self.send(request.src_port, guest_port, Op::Response, &[]);
        let mut answer = [0; 32];
        let count = client.read(&mut answer).unwrap();
        assert_eq!(answer[..count], *format!("OK {}\n", request.src_port).as_bytes());
        (request.src_port, client)
    }

    /// A connection of the guest, which a socket of the host has accepted.
    fn connected(&mut self, host_port: u32, guest_port: u32) -> UnixStream {
        self.send(host_port, guest_port, Op::Request, &[]);
        let (port, server) = self.host.serve().unwrap();
        assert_eq!(port, host_port);
        self.events();
        assert_eq!(self.receive_op(), Some(Op::Response));
        server
    }
}

fn header(host_port: u32, guest_port: u32) -> Header {
    Header {
        src_cid: CID,
        dst_cid: HOST_CID,
        src_port: guest_port,
        dst_port: host_port,
        kind: TYPE_STREAM,
        buf_alloc: 1 << 20,
        ..Header::default()
    }
}

fn is_closed(mut stream: &UnixStream) -> bool {
    matches!(stream.read(&mut [0; 8]), Ok(0))
}

#[test]
fn headers_are_those_of_the_crate() {
    let ours = Header {
        src_cid: 0x0102_0304_0506_0708,
        dst_cid: 2,
        src_port: 0x1112_1314,
        dst_port: 0x2122_2324,
        len: 3,
        kind: 1,
        op: 5,
        flags: 0x3132_3334,
        buf_alloc: 0x4142_4344,
        fwd_cnt: 0x5152_5354,
    };
    assert_eq!(Header::from_bytes(&ours.to_bytes()), ours);
    let memory = GuestMemoryMmap::<()>::from_ranges(&[(GuestAddress(0), 0x10000)]).unwrap();
    // Descriptor table, available ring with one chain, used ring.
    let mut queue = Queue::new(16).unwrap();
    queue.set_desc_table_address(Some(0x1000), None);
    queue.set_avail_ring_address(Some(0x2000), None);
    queue.set_used_ring_address(Some(0x3000), None);
    queue.set_ready(true);
    memory.write_obj(0x8000_u64, GuestAddress(0x1000)).unwrap();
    memory.write_obj((HEADER_BYTES + 3) as u32, GuestAddress(0x1008)).unwrap();
    memory.write_obj(1_u16, GuestAddress(0x2002)).unwrap();
    memory.write_slice(&ours.to_bytes(), GuestAddress(0x8000)).unwrap();
    let mut chain = queue.pop_descriptor_chain(&memory).unwrap();
    let theirs = VsockPacket::from_tx_virtq_chain(&memory, &mut chain, 64 << 10).unwrap();
    assert_eq!((theirs.src_cid(), theirs.dst_cid()), (ours.src_cid, ours.dst_cid));
    assert_eq!((theirs.src_port(), theirs.dst_port()), (ours.src_port, ours.dst_port));
    assert_eq!((theirs.len(), theirs.type_(), theirs.op()), (ours.len, ours.kind, ours.op));
    assert_eq!(theirs.flags(), ours.flags);
    assert_eq!((theirs.buf_alloc(), theirs.fwd_cnt()), (ours.buf_alloc, ours.fwd_cnt));
}

#[test]
fn a_client_is_accepted_refused_or_given_up() {
    let mut bench = Bench::new();
    let (port, mut client) = bench.accepted(52);
    client.write_all(b"hello").unwrap();
    bench.events();
    let (packet, data) = bench.receive().unwrap();
    assert_eq!((packet.op, packet.src_port, &data[..]), (Op::Data as u16, port, &b"hello"[..]));
    bench.send(port, 52, Op::Data, b"world");
    let mut answer = [0; 8];
    assert_eq!(client.read(&mut answer).unwrap(), 5);
    assert!(bench.receive().is_none());

    // The guest has no server.
    let refused = bench.host.client(b"CONNECT 99\n").unwrap();
    bench.events();
    let (request, _) = bench.receive().unwrap();
    bench.send(request.src_port, 99, Op::Reset, &[]);
    assert!(is_closed(&refused) && bench.receive().is_none());
    // It does not answer.
    let ignored = bench.host.client(b"CONNECT 98\n").unwrap();
    bench.events();
    assert_eq!(bench.receive_op(), Some(Op::Request));
    bench.pass(Duration::from_secs(9));
    assert!(!is_closed(&ignored));
    bench.pass(Duration::from_secs(2));
    assert!(is_closed(&ignored));
    assert_eq!(bench.receive_op(), Some(Op::Reset));
    // The client goes before the answer, once the guest knows of it or not.
    drop(bench.host.client(b"CONNECT 97\n").unwrap());
    bench.events();
    bench.events();
    assert_eq!(bench.receive_op(), None);
    let client = bench.host.client(b"CONNECT 97\n").unwrap();
    bench.events();
    assert_eq!(bench.receive_op(), Some(Op::Request));
    drop(client);
    bench.events();
    assert_eq!(bench.receive_op(), Some(Op::Reset));
    assert_eq!(bench.muxer.len(), 1);
    assert_eq!(bench.muxer.counters.accepted_from_host, 1);
    assert_eq!(bench.muxer.counters.refused_from_host, 4);
}

#[test]
fn wrong_lines_and_silent_clients() {
    let mut bench = Bench::new();
    let long = [b'C'; 64];
    for line in [&b"GET / HTTP/1.1\r\n"[..], b"CONNECT x\n", b"\n", b"CONNECT 4294967295\n", &long]
    {
        let client = bench.host.client(line).unwrap();
        bench.events();
        // Reset if it has written more than was read.
        let end = (&client).read(&mut [0; 8]);
        let closed = end.map_or_else(|e| e.kind() == ErrorKind::ConnectionReset, |n| n == 0);
        assert!(closed, "{}", String::from_utf8_lossy(line));
    }
    // More clients than may wait: the others stay in the listener's queue.
    let silent: Vec<_> = (0..2 * MOST).map(|_| bench.host.client(b"CONN").unwrap()).collect();
    bench.events();
    assert!(silent.iter().all(|client| !is_closed(client)));
    bench.pass(Duration::from_secs(6));
    assert_eq!(silent.iter().filter(|client| is_closed(client)).count(), MOST);
    bench.events();
    bench.pass(Duration::from_secs(6));
    assert!(silent.iter().all(is_closed));
    // In two pieces.
    let mut client = bench.host.client(b"CONNECT 5").unwrap();
    bench.events();
    assert!(bench.receive().is_none());
    client.write_all(b"2\nearly").unwrap();
    bench.events();
    let (request, _) = bench.receive().unwrap();
    assert_eq!(request.dst_port, 52);
    bench.send(request.src_port, 52, Op::Response, &[]);
    assert_eq!(bench.receive().unwrap().1, b"early");
    assert_eq!(bench.muxer.deadline(), None);
}

#[test]
fn the_guests_connections() {
    let mut bench = Bench::new();
    let mut server = bench.connected(80, 1000);
    bench.send(80, 1000, Op::Data, b"request");
    let mut data = [0; 16];
    assert_eq!(server.read(&mut data).unwrap(), 7);
    server.write_all(b"answer").unwrap();
    bench.events();
    assert_eq!(bench.receive().unwrap().1, b"answer");
    // No socket has this port.
    bench.send(81, 1000, Op::Request, &[]);
    assert_eq!(bench.host.companion.request(), Some(81));
    bench.host.companion.answer(None);
    bench.events();
    assert_eq!(bench.receive_op(), Some(Op::Reset));
    // The guest gives up before the answer, and tries again with the same ports.
    bench.send(82, 1000, Op::Request, &[]);
    bench.send(82, 1000, Op::Reset, &[]);
    bench.send(82, 1000, Op::Request, &[]);
    let (_, first) = bench.host.serve().unwrap();
    bench.events();
    assert!(is_closed(&first) && bench.receive().is_none());
    let (_, second) = bench.host.serve().unwrap();
    bench.events();
    assert_eq!(bench.receive_op(), Some(Op::Response));
    assert!(!is_closed(&second));
    // As many as there may be.
    for port in 0..MOST as u32 {
        bench.send(90, port, Op::Request, &[]);
    }
    assert_eq!(bench.muxer.len(), MOST);
    assert_eq!(bench.receive_op(), Some(Op::Reset));
    // The same ports once more.
    bench.send(80, 1000, Op::Request, &[]);
    assert!(is_closed(&server));
    // Without companion all are refused.
    let Bench { mut muxer, host, now } = bench;
    drop(host);
    while muxer.on_events(now) {}
    muxer.on_timer(now);
    assert_eq!(muxer.len(), 1);
}

#[test]
fn ends() {
    let mut bench = Bench::new();
    // The host ends sending: the guest still sends.
    let server = bench.connected(80, 1);
    server.shutdown(Shutdown::Write).unwrap();
    bench.events();
    let (packet, _) = bench.receive().unwrap();
    assert_eq!((packet.op, packet.flags), (Op::Shutdown as u16, SHUTDOWN_SEND));
    bench.send(80, 1, Op::Data, b"more");
    assert_eq!((&server).read(&mut [0; 8]).unwrap(), 4);
    // Then the guest ends: the host sees it, and the guest a reset as the answer.
    let shutdown = Header { op: Op::Shutdown as u16, flags: SHUTDOWN_BOTH, ..header(80, 1) };
    bench.send_with(shutdown, &[]);
    assert!(is_closed(&server));
    assert_eq!(bench.receive_op(), Some(Op::Reset));

    // The guest ends sending only.
    let mut server = bench.connected(80, 2);
    bench.send(80, 2, Op::Data, b"last");
    let half = |flags| Header { op: Op::Shutdown as u16, flags, ..header(80, 2) };
    bench.send_with(half(SHUTDOWN_SEND), &[]);
    assert_eq!(server.read(&mut [0; 8]).unwrap(), 4);
    assert!(is_closed(&server));
    server.write_all(b"answer").unwrap();
    bench.events();
    assert_eq!(bench.receive().unwrap().1, b"answer");
    bench.send_with(half(SHUTDOWN_RECEIVE), &[]);
    assert_eq!(bench.receive_op(), Some(Op::Reset));

    // The host closes: the guest is informed, and forgotten when it does not answer.
    let server = bench.connected(80, 3);
    drop(server);
    bench.events();
    let (packet, _) = bench.receive().unwrap();
    assert_eq!((packet.op, packet.flags), (Op::Shutdown as u16, SHUTDOWN_BOTH));
    assert_eq!((bench.muxer.len(), bench.receive()), (1, None));
    bench.send(80, 3, Op::Data, b"late");
    bench.pass(Duration::from_secs(9));
    assert_eq!(bench.muxer.len(), 0);
    assert_eq!(bench.receive_op(), Some(Op::Reset));

    // A host that does not read gets all of the data of a guest that has ended.
    let mut server = bench.connected(80, 4);
    let mut sent = 0;
    while bench.muxer.counters.bytes_from_guest as usize >= sent {
        bench.send(80, 4, Op::Data, &[4; 4096]);
        sent = sent.max(15) + 4096;
    }
    bench.send_with(Header { op: Op::Shutdown as u16, flags: 3, ..header(80, 4) }, &[]);
    bench.send(80, 4, Op::Reset, &[]);
    let mut received = 0;
    loop {
        match server.read(&mut [0; 4096]) {
            Ok(0) => break,
            Ok(count) => received += count,
            Err(_) => bench.events(),
        }
    }
    assert_eq!(received % 4096, 0);
    assert_eq!(bench.muxer.len(), 0);
}

#[test]
fn wrong_packets() {
    let mut bench = Bench::new();
    let _server = bench.connected(80, 1);
    let good = Header { op: Op::Data as u16, ..header(80, 2) };
    // No answer, since there is no address for it.
    bench.send_with(Header { src_cid: 8, ..good }, &[]);
    bench.send_with(Header { dst_cid: 7, ..good }, &[]);
    assert_eq!(bench.receive(), None);
    // Without a connection, of another type, or with an unknown operation.
    for wrong in [good, Header { kind: 2, ..good }, Header { op: 99, ..good }] {
        bench.send_with(wrong, &[]);
        let (answer, _) = bench.receive().unwrap();
        assert_eq!((answer.op, answer.kind), (Op::Reset as u16, wrong.kind));
        assert_eq!((answer.src_port, answer.dst_port), (80, 2));
    }
    // No reset answers a reset.
    bench.send(80, 2, Op::Reset, &[]);
    assert_eq!(bench.receive(), None);
    // A port that means any.
    bench.send(u32::MAX, 2, Op::Request, &[]);
    assert_eq!(bench.receive_op(), Some(Op::Reset));
    // More than the credit.
    let mut count = 0;
    while bench.muxer.len() == 1 {
        bench.send(80, 1, Op::Data, &vec![0; 65536]);
        count += 1;
    }
    assert!(count < 64, "{count} packets of 64 KiB were taken without a reader");
    let invalid = bench.muxer.counters.invalid;
    assert_eq!((invalid.address, invalid.socket_type, invalid.credit), (2, 1, 1));
    // Floods of answers that the guest does not take are bounded.
    for port in 0..5000 {
        bench.send(80, port, Op::Data, &[]);
    }
    assert!(bench.muxer.counters.invalid.unanswered > 3000);
}

#[test]
fn a_reader_that_does_not_read_stops_only_its_own_connection() {
    let mut bench = Bench::new();
    let mut server = bench.connected(80, 2);
    let _stuck = bench.connected(80, 1);
    // All of its credit, unless the socket takes more.
    for _ in 0..200 {
        bench.send(80, 1, Op::Data, &[1; 1024]);
    }
    while bench.receive().is_some() {}
    for _ in 0..200 {
        bench.send(80, 2, Op::Data, &[2; 1024]);
        assert_eq!(server.read(&mut [0; 4096]).unwrap(), 1024);
    }
    while bench.receive().is_some() {}
    // The other direction: a guest without credit for one of two.
    let mut first = bench.connected(80, 3);
    let mut second = bench.connected(80, 4);
    let none = Header { op: Op::CreditUpdate as u16, buf_alloc: 0, ..header(80, 3) };
    bench.send_with(none, &[]);
    first.write_all(&[3; 1000]).unwrap();
    second.write_all(&[4; 1000]).unwrap();
    bench.events();
    let mut seen = Vec::new();
    while let Some((header, data)) = bench.receive() {
        seen.push((header.dst_port, Op::of(header.op).unwrap(), data.len()));
    }
    assert!(seen.contains(&(4, Op::Data, 1000)), "{seen:?}");
    assert_eq!(seen.iter().filter(|packet| **packet == (3, Op::CreditRequest, 0)).count(), 1);
    assert!(!seen.iter().any(|(port, op, _)| (*port, *op) == (3, Op::Data)));
    bench.send(80, 3, Op::CreditUpdate, &[]);
    assert_eq!(bench.receive().unwrap().1.len(), 1000);
}

#[test]
fn connections_take_turns() {
    let mut bench = Bench::new();
    let mut servers: Vec<_> = (0..4).map(|port| bench.connected(80, port)).collect();
    for server in &mut servers {
        server.write_all(&[0; 3 * 4096]).unwrap();
    }
    bench.events();
    let order: Vec<u32> = (0..8).map(|_| bench.receive().unwrap().0.dst_port).collect();
    let (first, second) = order.split_at(4);
    assert_eq!(first, second);
    let mut all = first.to_vec();
    all.sort_unstable();
    assert_eq!(all, [0, 1, 2, 3]);
}
