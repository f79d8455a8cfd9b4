//! The network of the service: address resolution (RFC 826) and HTTP over TCP, in the thread of
//! the network device.
//!
//! Everything a guest can grow has a bound: connections, the bytes of each one's request and of
//! all answers, frames that wait for the guest, and the time for each step of a connection.

use std::net::Ipv4Addr;
use std::time::{Duration, Instant};

use smoltcp::iface::{Config, Interface, SocketHandle, SocketSet};
use smoltcp::socket::tcp::{Socket, SocketBuffer, State};
use smoltcp::wire::{HardwareAddress, IpAddress, IpCidr};

use super::{Served, http};

mod wire;

use wire::{ETHERNET_BYTES, Wire};

/// Bytes at the beginning of a frame with which [`Stack::takes`] decides: an ARP packet.
pub(crate) const HEAD_BYTES: usize = ETHERNET_BYTES + ARP_BYTES;
const ARP_BYTES: usize = 28;
/// Address of the service's side, as Firecracker has it.
const MAC: [u8; 6] = [0x06, 0x01, 0x23, 0x45, 0x67, 0x01];
const PORT: u16 = 80;
/// Most connections: Firecracker's number.
const MOST_CONNECTIONS: usize = 30;
/// Longest request, in bytes, as in Firecracker. A longer one ends its connection.
const REQUEST_BYTES: usize = 2500;
/// Bytes of an answer that a guest has not acknowledged yet.
const WINDOW_BYTES: usize = 4096;
/// Bytes of answers being sent from which on further requests wait.
const ANSWERS_BYTES: usize = 256 << 10;
/// Time for a handshake.
const HANDSHAKE_TIME: Duration = Duration::from_secs(3);
/// Time for each request, and for each progress of an answer.
const STEP_TIME: Duration = Duration::from_secs(10);
/// Most turns of sockets and service in one call.
const MOST_TURNS: usize = 8;
/// Least time to the next call that the stack asks for.
const REST: Duration = Duration::from_millis(1);
const MOST_MTU: u16 = 1500;

/// What a socket is doing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    Listening,
    Opening,
    Open,
}

struct Connection {
    socket: SocketHandle,
    phase: Phase,
    /// When its current step began.
    since: Instant,
    /// The answer being sent; empty if there is none.
    answer: Vec<u8>,
    /// Bytes of it that the socket has taken.
    taken: usize,
    /// Bytes in the socket that were not acknowledged when last looked at.
    unacknowledged: usize,
}

impl Connection {
    /// Starts a step.
    fn start(&mut self, phase: Phase, now: Instant) {
        self.phase = phase;
        self.since = now;
    }

    /// When it is ended if nothing happens.
    fn deadline(&self) -> Option<Instant> {
        match self.phase {
            Phase::Listening => None,
            Phase::Opening => Some(self.since + HANDSHAKE_TIME),
            Phase::Open => Some(self.since + STEP_TIME),
        }
    }
}

/// The service on a network device.
pub(crate) struct Stack {
    served: Served,
    mtu: u16,
    beginning: Instant,
    wire: Wire,
    interface: Interface,
    sockets: SocketSet<'static>,
    connections: Vec<Connection>,
    /// Bytes of all answers.
    answers_bytes: usize,
    /// When a socket has something to send.
    next: Option<Instant>,
}

impl Stack {
    /// A stack without connections, for a device with this MTU.
    pub(crate) fn new(served: Served, mtu: Option<u16>, now: Instant) -> Self {
        let mtu = mtu.unwrap_or(MOST_MTU).min(MOST_MTU);
        let mut wire = Wire::new(MAC, mtu);
        let mut config = Config::new(HardwareAddress::Ip);
        let mut seed = [0; 8];
        // So few bytes are never cut short, nor interrupted (getrandom(2)).
        let _ = rustix::rand::getrandom(&mut seed, rustix::rand::GetRandomFlags::empty());
        config.random_seed = u64::from_ne_bytes(seed);
        let mut interface = Interface::new(config, &mut wire, smoltcp::time::Instant::ZERO);
        let address = IpCidr::new(IpAddress::Ipv4(served.address), 32);
        interface.update_ip_addrs(|addresses| {
            // There is room for the first address.
            let _ = addresses.push(address);
        });
        let mut sockets = SocketSet::new(Vec::with_capacity(MOST_CONNECTIONS));
        let connections = (0..MOST_CONNECTIONS).map(|_| {
            let buffer = |bytes: usize| SocketBuffer::new(vec![0; bytes]);
            let mut socket = Socket::new(buffer(REQUEST_BYTES), buffer(WINDOW_BYTES));
            socket.set_nagle_enabled(false);
            Connection {
                socket: sockets.add(socket),
                phase: Phase::Listening,
                since: now,
                answer: Vec::new(),
                taken: 0,
                unacknowledged: 0,
            }
        });
        let connections = connections.collect();
        let beginning = now;
        let mut stack = Self {
            served,
            mtu,
            beginning,
            wire,
            interface,
            sockets,
            connections,
            answers_bytes: 0,
            next: None,
        };
        stack.serve_all(now);
        stack
    }

    /// Forgets the guest's connections: its driver was reset.
    pub(crate) fn reset(&mut self) {
        *self = Self::new(self.served.clone(), Some(self.mtu), Instant::now());
    }

    /// Whether a frame is for the service, by its first bytes: no such frame may leave the machine.
    pub(crate) fn takes(&self, head: &[u8]) -> bool {
        let target = match head.get(12..ETHERNET_BYTES) {
            // The target protocol address of a request (RFC 826).
            Some([0x08, 0x06]) => head.get(38..42),
            // The destination (RFC 791).
            Some([0x08, 0x00]) => head.get(30..34),
            _ => None,
        };
        target.is_some_and(|target| *target == self.served.address.octets())
    }

    /// Handles such a frame. What it makes of it waits in [`frame`](Self::frame).
    pub(crate) fn receive(&mut self, frame: &[u8], now: Instant) {
        let Some((ethernet, packet)) = frame.split_first_chunk::<ETHERNET_BYTES>() else { return };
        let mut source = [0; 6];
        source.copy_from_slice(&ethernet[6..12]);
        if ethernet[12..] == [0x08, 0x06] {
            if let Some(reply) = resolve(packet, self.served.address) {
                self.wire.guest = source;
                self.wire.put([0x08, 0x06], &reply);
            }
            return;
        }
        if !is_tcp(packet) {
            return;
        }
        self.wire.guest = source;
        self.wire.input = Some(packet.to_vec());
        let time = self.time(now);
        self.interface.poll_ingress_single(time, &mut self.wire, &mut self.sockets);
        // If no frame can be added, the packet is lost, and the guest sends it again.
        self.wire.input = None;
        self.run(now);
    }

    /// The next frame for the guest.
    pub(crate) fn frame(&self) -> Option<&[u8]> {
        self.wire.output.front().map(Vec::as_slice)
    }

    /// Removes that frame.
    pub(crate) fn skip(&mut self) {
        self.wire.output.pop_front();
    }

    /// When [`run`](Self::run) has something to do. While frames wait, they are delivered first.
    pub(crate) fn deadline(&self) -> Option<Instant> {
        let next = self.next.filter(|_| self.wire.output.is_empty());
        self.connections.iter().filter_map(Connection::deadline).chain(next).min()
    }

    /// Lets sockets send what is due, and answers requests.
    pub(crate) fn run(&mut self, now: Instant) {
        let time = self.time(now);
        for _ in 0..MOST_TURNS {
            let before = self.wire.output.len();
            self.interface.poll_egress(time, &mut self.wire, &mut self.sockets);
            let has_sent = self.wire.output.len() > before;
            if !self.serve_all(now) && !has_sent {
                break;
            }
        }
        let next = self.interface.poll_at(time, &self.sockets).map(|at| {
            let after = at.total_micros().saturating_sub(time.total_micros());
            now + Duration::from_micros(u64::try_from(after).unwrap_or(0)).max(REST)
        });
        self.next = next;
    }

    fn time(&self, now: Instant) -> smoltcp::time::Instant {
        let age = now.saturating_duration_since(self.beginning);
        smoltcp::time::Instant::from_micros(i64::try_from(age.as_micros()).unwrap_or(i64::MAX))
    }

    /// Does what each connection allows. Returns whether one has got an answer.
    fn serve_all(&mut self, now: Instant) -> bool {
        let mut has_answered = false;
        for index in 0..self.connections.len() {
            has_answered |= self.serve(index, now);
        }
        has_answered
    }

    fn serve(&mut self, index: usize, now: Instant) -> bool {
        let connection = &mut self.connections[index];
        let socket = self.sockets.get_mut::<Socket<'_>>(connection.socket);
        if connection.deadline().is_some_and(|deadline| deadline <= now) {
            socket.abort();
        }
        match socket.state() {
            State::Closed => {
                self.answers_bytes -= connection.answer.len();
                (connection.answer, connection.taken) = (Vec::new(), 0);
                // A socket that was ended still sends its reset: it listens again after that.
                if connection.phase == Phase::Listening || socket.remote_endpoint().is_none() {
                    // The port is not 0, and the socket is closed.
                    let _ = socket.listen(PORT);
                }
                connection.start(Phase::Listening, now);
                return false;
            }
            State::Listen => return false,
            State::SynReceived => {
                if connection.phase == Phase::Listening {
                    connection.start(Phase::Opening, now);
                }
                return false;
            }
            _ if connection.phase != Phase::Open => {
                self.served.service.lock().counts.connections += 1;
                connection.start(Phase::Open, now);
            }
            _ => {}
        }
        if !connection.answer.is_empty() {
            let rest = connection.answer.get(connection.taken..).unwrap_or_default();
            let taken = socket.send_slice(rest).unwrap_or(0);
            connection.taken += taken;
            if taken > 0 || socket.send_queue() < connection.unacknowledged {
                connection.since = now;
            }
            connection.unacknowledged = socket.send_queue();
            if connection.taken < connection.answer.len() || connection.unacknowledged > 0 {
                return false;
            }
            self.answers_bytes -= connection.answer.len();
            (connection.answer, connection.taken) = (Vec::new(), 0);
        }
        let mut request = [0; REQUEST_BYTES];
        let received = socket.peek_slice(&mut request).unwrap_or(0);
        let Some(end) = http::end(&request[..received]) else {
            if received == REQUEST_BYTES {
                socket.abort();
            } else if socket.state() == State::CloseWait {
                socket.close();
            }
            return false;
        };
        if self.answers_bytes >= ANSWERS_BYTES {
            return false;
        }
        let _ = socket.recv(|bytes| (end.min(bytes.len()), ()));
        // The buffer is a ring: the request may lie at both ends.
        let left = end - end.min(received - socket.recv_queue());
        if left > 0 {
            let _ = socket.recv(|bytes| (left.min(bytes.len()), ()));
        }
        let mut service = self.served.service.lock();
        connection.answer = http::answer(&mut service, &request[..end], now);
        drop(service);
        self.answers_bytes += connection.answer.len();
        connection.unacknowledged = 0;
        connection.since = now;
        true
    }
}

/// The reply to an ARP request for `address`, behind its Ethernet header.
fn resolve(packet: &[u8], address: Ipv4Addr) -> Option<[u8; ARP_BYTES]> {
    // Ethernet and IPv4, the lengths of their addresses, a request.
    let (request, _) = packet.split_first_chunk::<ARP_BYTES>()?;
    if request[..8] != [0, 1, 8, 0, 6, 4, 0, 1] || request[24..] != address.octets() {
        return None;
    }
    let mut reply = *request;
    reply[7] = 2;
    reply[8..14].copy_from_slice(&MAC);
    reply[14..18].copy_from_slice(&address.octets());
    reply[18..28].copy_from_slice(&request[8..18]);
    Some(reply)
}

/// Whether a packet is TCP in one piece (RFC 791).
fn is_tcp(packet: &[u8]) -> bool {
    packet.get(..20).is_some_and(|header| {
        let fragment = u16::from_be_bytes([header[6], header[7]]) & 0x3fff;
        header[0] >> 4 == 4 && header[9] == 6 && fragment == 0
    })
}

#[cfg(any(test, feature = "testing"))]
mod fuzzing;
#[cfg(any(test, feature = "testing"))]
pub use fuzzing::fuzz_frames;

#[cfg(test)]
mod tests;
