//! The connections between the guest and the host's sockets.
//!
//! The muxer knows packets, sockets and time, but no queues: the device gives it the guest's
//! packets and takes those for the guest. It never waits. All its descriptors are in one epoll
//! descriptor; those of connections are edge-triggered, so that a guest without buffers or credit
//! does not keep the thread awake.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::Timespec;
use rustix::event::epoll::{self, EventData, EventFlags};

use super::clients::{Clients, Progress};
use super::connection::{Connection, Fate, Phase, Ports};
use super::connector::Connector;
use super::counters::VsockCounters;
use super::packet::{HOST_CID, Header, Op, TYPE_STREAM};

mod packets;

/// First port of the host for connections of its clients; those of servers are below.
const FIRST_CLIENT_PORT: u32 = 1 << 30;
/// Most resets for packets without a connection that wait for the guest's buffers.
const MOST_RESETS: usize = 1024;
/// Largest and smallest buffer of a connection for the guest's data, in bytes.
const MOST_BUFFER_BYTES: u32 = 256 << 10;
const LEAST_BUFFER_BYTES: u32 = 4 << 10;
/// What all of them share beyond the smallest, in bytes: each takes a part of what is left.
const SHARED_BUFFER_BYTES: u32 = 16 << 20;
const SHARE: u32 = 64;
/// How long the guest may take to answer a connection request. Linux needs no time, but may be
/// busy.
const ANSWER_LIMIT: Duration = Duration::from_secs(10);
/// How long a connection that the host has ended may wait for the guest, which may still have data
/// to read; Linux waits as long (`VSOCK_CLOSE_TIMEOUT`).
const CLOSE_LIMIT: Duration = Duration::from_secs(8);
/// How long no client is accepted after an error, for example without a free descriptor: the
/// listener would wake the thread again and again.
const ACCEPT_RETRY: Duration = Duration::from_millis(100);
/// Most events handled in a call.
const EVENTS_A_CALL: usize = 64;

/// Tokens in the epoll descriptor besides ports of connections: no port of the host is the largest
/// number, which means any port (`VMADDR_PORT_ANY`).
const ANY_PORT: u32 = u32::MAX;
const LISTENER: u32 = u32::MAX;
const CONNECTOR: u32 = u32::MAX - 1;

/// What time limits are for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Limited {
    Client(u32),
    Connection(Ports),
}

/// All connections of a device.
#[derive(Debug)]
pub(super) struct Muxer {
    guest_cid: u64,
    epoll: Arc<OwnedFd>,
    listener: OwnedFd,
    /// Whether the listener is in the epoll descriptor.
    is_listening: bool,
    /// When clients are accepted again after an error.
    accept_at: Option<Instant>,
    connector: Connector,
    clients: Clients,
    connections: HashMap<Ports, Connection>,
    most_connections: usize,
    /// Connections that may have a packet for the guest; they take turns.
    line: VecDeque<Ports>,
    /// Resets for packets without a connection.
    resets: VecDeque<Header>,
    deadlines: BTreeSet<(Instant, Limited)>,
    /// Bytes of buffers beyond the smallest that are not in use.
    buffer_bytes: u32,
    next_serial: u64,
    next_port: u32,
    pub counters: VsockCounters,
}

impl Muxer {
    /// A muxer for a guest with this CID. Clients of the host connect to `listener`.
    pub(super) fn new(
        guest_cid: u64,
        listener: OwnedFd,
        connector: Connector,
        most_connections: usize,
    ) -> io::Result<Self> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        if let Some(link) = connector.as_fd() {
            epoll::add(&epoll, link, special(CONNECTOR), EventFlags::IN)?;
        }
        epoll::add(&epoll, &listener, special(LISTENER), EventFlags::IN)?;
        Ok(Self {
            guest_cid,
            epoll: Arc::new(epoll),
            listener,
            is_listening: true,
            accept_at: None,
            connector,
            clients: Clients::default(),
            connections: HashMap::new(),
            most_connections,
            line: VecDeque::new(),
            resets: VecDeque::new(),
            deadlines: BTreeSet::new(),
            buffer_bytes: SHARED_BUFFER_BYTES,
            next_serial: 0,
            next_port: FIRST_CLIENT_PORT,
            counters: VsockCounters::default(),
        })
    }

    /// The descriptor to wait for.
    pub(super) fn epoll(&self) -> &Arc<OwnedFd> {
        &self.epoll
    }

    /// Number of connections, also of those that are about to begin or to end.
    pub(super) fn len(&self) -> usize {
        self.connections.len()
    }

    /// When [`on_timer`](Self::on_timer) has something to do.
    pub(super) fn deadline(&self) -> Option<Instant> {
        let first = self.deadlines.first().map(|(at, _)| *at);
        first.into_iter().chain(self.connector.resume_at).chain(self.accept_at).min()
    }

    /// Ends all connections without a word to the guest, whose driver has ended.
    pub(super) fn clear(&mut self) {
        let all: Vec<Ports> = self.connections.keys().copied().collect();
        for ports in all {
            self.remove(ports);
        }
        self.line.clear();
        self.resets.clear();
        self.connector.clear();
    }

    /// Handles what has happened to descriptors; returns whether there may be more.
    pub(super) fn on_events(&mut self, now: Instant) -> bool {
        let mut events = [MaybeUninit::uninit(); EVENTS_A_CALL];
        let zero = Timespec { tv_sec: 0, tv_nsec: 0 };
        let Ok((events, _)) = epoll::wait(&*self.epoll, &mut events, Some(&zero)) else {
            return false;
        };
        let count = events.len();
        for event in events {
            let (token, flags) = (event.data.u64(), event.flags);
            match ((token >> 32) as u32, token as u32) {
                (ANY_PORT, LISTENER) => self.accept(now),
                (ANY_PORT, CONNECTOR) => self.on_answers(now),
                (ANY_PORT, client) => self.on_client(client, now),
                (host, guest) => self.on_stream(Ports { host, guest }, flags, now),
            }
        }
        self.update_listening();
        count == EVENTS_A_CALL
    }

    fn accept(&mut self, now: Instant) {
        for _ in 0..EVENTS_A_CALL {
            if !self.has_room_for_clients() {
                return;
            }
            match self.clients.accept(&self.listener, &self.epoll, now) {
                Ok(Some((client, deadline))) => {
                    self.deadlines.insert((deadline, Limited::Client(client)));
                    // Most have sent their line by now.
                    self.on_client(client, now);
                }
                Ok(None) => return,
                Err(errno) => {
                    crate::devices::guest_log!("vsock: no client can be accepted: {errno}");
                    self.accept_at = Some(now + ACCEPT_RETRY);
                    return;
                }
            }
        }
    }

    fn has_room_for_clients(&self) -> bool {
        self.accept_at.is_none()
            && self.clients.has_room()
            && self.connections.len() + self.clients.len() < self.most_connections
    }

    /// Watches the listener only while a client can be accepted; others wait in its queue.
    fn update_listening(&mut self) {
        let wanted = self.has_room_for_clients();
        if wanted == self.is_listening {
            return;
        }
        let changed = if wanted {
            epoll::add(&*self.epoll, &self.listener, special(LISTENER), EventFlags::IN)
        } else {
            epoll::delete(&*self.epoll, &self.listener)
        };
        if changed.is_ok() {
            self.is_listening = wanted;
        }
    }

    /// A client whose first line is not complete has sent something.
    fn on_client(&mut self, id: u32, now: Instant) {
        let Some(progress) = self.clients.read(id) else { return };
        let guest_port = match progress {
            Progress::Waits => return,
            Progress::Fails => None,
            Progress::Connects(port) => Some(port),
        };
        let Some(client) = self.clients.remove(id) else { return };
        self.deadlines.remove(&(client.deadline, Limited::Client(id)));
        let ports = guest_port.and_then(|guest| self.client_ports(guest));
        let Some(ports) = ports else {
            let _ = epoll::delete(&*self.epoll, &client.stream);
            self.counters.refused_from_host += 1;
            return;
        };
        let flags = EventFlags::IN | EventFlags::OUT | EventFlags::RDHUP | EventFlags::ET;
        if epoll::modify(&*self.epoll, &client.stream, token(ports), flags).is_err() {
            self.counters.refused_from_host += 1;
            return;
        }
        let (serial, buffer) = (self.serial(), self.take_buffer());
        self.insert(ports, Connection::of_client(serial, buffer, client.stream));
        self.limit(ports, Some(now + ANSWER_LIMIT));
        self.enqueue(ports);
    }

    /// Ports of a new connection to this port of the guest; `None` if there is no room.
    fn client_ports(&mut self, guest: u32) -> Option<Ports> {
        if guest == ANY_PORT || self.connections.len() >= self.most_connections {
            return None;
        }
        loop {
            let host = self.next_port;
            let next = self.next_port.wrapping_add(1);
            self.next_port = if next < 2 * FIRST_CLIENT_PORT { next } else { FIRST_CLIENT_PORT };
            let ports = Ports { host, guest };
            // There are far more ports than connections.
            if !self.connections.contains_key(&ports) {
                return Some(ports);
            }
        }
    }

    fn on_answers(&mut self, now: Instant) {
        while let Some(((ports, serial), stream)) = self.connector.answer() {
            let is_waiting = |connection: &&mut Connection| {
                connection.serial == serial && connection.phase == Phase::Connecting
            };
            // The guest may have given up.
            let Some(connection) = self.connections.get_mut(&ports).filter(is_waiting) else {
                continue;
            };
            let flags = EventFlags::IN | EventFlags::OUT | EventFlags::RDHUP | EventFlags::ET;
            let is_watched =
                |stream: &OwnedFd| epoll::add(&*self.epoll, stream, token(ports), flags).is_ok();
            if let Some(stream) = stream.filter(is_watched) {
                connection.connected(stream);
                self.counters.accepted_from_guest += 1;
                self.enqueue(ports);
            } else {
                self.counters.refused_from_guest += 1;
                self.end(ports, Fate::Reset);
            }
        }
        self.ask(now);
    }

    fn ask(&mut self, now: Instant) {
        let connections = &self.connections;
        self.connector.send(now, |(ports, serial)| {
            connections.get(&ports).is_some_and(|connection| connection.serial == serial)
        });
    }

    /// Something has happened to a connection's socket.
    fn on_stream(&mut self, ports: Ports, flags: EventFlags, _now: Instant) {
        let Some(connection) = self.connections.get_mut(&ports) else { return };
        if connection.phase == Phase::Requested {
            // What the client sends is read when the guest has accepted it.
            if flags.intersects(EventFlags::HUP | EventFlags::ERR) {
                self.counters.refused_from_host += 1;
                let fate = if connection.opening().is_some() { Fate::Remove } else { Fate::Reset };
                self.end(ports, fate);
            }
            return;
        }
        if flags.intersects(EventFlags::IN | EventFlags::RDHUP) {
            connection.on_readable();
        }
        if flags.contains(EventFlags::OUT) {
            self.counters.bytes_from_guest += connection.on_writable() as u64;
        }
        if flags.intersects(EventFlags::HUP | EventFlags::ERR) {
            connection.on_hangup();
        }
        let fate = connection.settle();
        self.end(ports, fate);
        self.enqueue(ports);
    }

    /// Ends what has taken too long.
    pub(super) fn on_timer(&mut self, now: Instant) {
        while let Some((_, limited)) = self.deadlines.first().copied().filter(|(at, _)| *at <= now)
        {
            self.deadlines.pop_first();
            match limited {
                Limited::Client(id) => {
                    if let Some(client) = self.clients.remove(id) {
                        let _ = epoll::delete(&*self.epoll, &client.stream);
                    }
                    self.counters.refused_from_host += 1;
                }
                Limited::Connection(ports) => {
                    if let Some(connection) = self.connections.get_mut(&ports) {
                        connection.deadline = None;
                        if connection.phase == Phase::Requested {
                            self.counters.refused_from_host += 1;
                        } else {
                            self.counters.resets += 1;
                        }
                    }
                    self.end(ports, Fate::Reset);
                }
            }
        }
        self.accept_at = self.accept_at.filter(|at| *at > now);
        self.ask(now);
        self.refuse_without_companion(now);
        self.update_listening();
    }

    fn refuse_without_companion(&mut self, now: Instant) {
        if self.connector.is_closed() {
            self.on_answers(now);
        }
    }

    fn serial(&mut self) -> u64 {
        self.next_serial += 1;
        self.next_serial
    }

    /// The size of a new connection's buffer: a part of what is left, so that many connections
    /// have small ones.
    fn take_buffer(&mut self) -> u32 {
        let more = (self.buffer_bytes / SHARE).min(MOST_BUFFER_BYTES - LEAST_BUFFER_BYTES);
        self.buffer_bytes -= more;
        LEAST_BUFFER_BYTES + more
    }

    fn insert(&mut self, ports: Ports, connection: Connection) {
        self.connections.insert(ports, connection);
    }

    /// Sets or removes the time limit of a connection.
    fn limit(&mut self, ports: Ports, deadline: Option<Instant>) {
        let Some(connection) = self.connections.get_mut(&ports) else { return };
        let limited = Limited::Connection(ports);
        if let Some(before) = std::mem::replace(&mut connection.deadline, deadline) {
            self.deadlines.remove(&(before, limited));
        }
        self.deadlines.extend(deadline.map(|at| (at, limited)));
    }

    /// Puts a connection that may have a packet for the guest into the line.
    fn enqueue(&mut self, ports: Ports) {
        if let Some(connection) = self.connections.get_mut(&ports)
            && !connection.is_queued
            && connection.has_packet()
        {
            connection.is_queued = true;
            self.line.push_back(ports);
        }
    }

    /// Ends a connection, if that is its fate.
    fn end(&mut self, ports: Ports, fate: Fate) {
        match fate {
            Fate::Keep => return,
            Fate::Remove => {}
            Fate::Reset => self.send_reset(Header {
                src_cid: HOST_CID,
                dst_cid: self.guest_cid,
                src_port: ports.host,
                dst_port: ports.guest,
                kind: TYPE_STREAM,
                op: Op::Reset as u16,
                ..Header::default()
            }),
        }
        self.remove(ports);
    }

    fn remove(&mut self, ports: Ports) {
        self.limit(ports, None);
        let Some(mut connection) = self.connections.remove(&ports) else { return };
        self.buffer_bytes += connection.buf_alloc() - LEAST_BUFFER_BYTES;
        self.close_stream(connection.close());
    }

    fn close_stream(&self, stream: Option<OwnedFd>) {
        if let Some(stream) = stream {
            // The companion's copy may still be open, which would keep it there.
            let _ = epoll::delete(&*self.epoll, stream.as_fd());
        }
    }
}

#[cfg(any(test, feature = "testing"))]
impl Muxer {
    /// Panics if anything that is kept has no bound or does not fit together.
    pub(super) fn check(&self) {
        let count = self.connections.len();
        assert!(count <= self.most_connections && self.resets.len() <= MOST_RESETS);
        assert!(self.deadlines.len() <= count + self.clients.len(), "time limits of nothing");
        // Those that have ended are taken out when it is their turn.
        assert!(self.connector.backlog() <= 2 * self.most_connections);
        let queued = self.connections.values().filter(|connection| connection.is_queued).count();
        assert!(queued <= self.line.len(), "a connection is not in the line");
        let extra: u32 =
            self.connections.values().map(|c| c.buf_alloc() - LEAST_BUFFER_BYTES).sum();
        assert_eq!(extra + self.buffer_bytes, SHARED_BUFFER_BYTES, "buffers are lost");
        for connection in self.connections.values() {
            connection.check();
        }
    }
}

fn special(token: u32) -> EventData {
    EventData::new_u64(u64::from(ANY_PORT) << 32 | u64::from(token))
}

fn token(ports: Ports) -> EventData {
    EventData::new_u64(u64::from(ports.host) << 32 | u64::from(ports.guest))
}

/// The token of a client before it has ports.
pub(super) fn client_token(id: u32) -> EventData {
    special(id)
}
