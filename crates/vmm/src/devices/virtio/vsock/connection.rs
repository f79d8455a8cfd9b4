//! One connection: a stream socket of the host, credit in both directions, and what is left to
//! send (virtio 1.3 section 5.10.6).

use std::collections::VecDeque;
use std::num::Wrapping;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::time::Instant;

use rustix::io::Errno;
use rustix::net::Shutdown;

use super::packet::{Header, Op, SHUTDOWN_BOTH, SHUTDOWN_RECEIVE, SHUTDOWN_SEND};

/// The two ports of a connection; there is only one pair of CIDs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct Ports {
    /// At the host.
    pub host: u32,
    /// In the guest.
    pub guest: u32,
}

/// How far a connection is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Phase {
    /// The guest waits for a socket of the host.
    Connecting,
    /// A client of the host waits for the guest.
    Requested,
    /// Data flows.
    Open,
}

/// What remains of a connection after a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use]
pub(super) enum Fate {
    /// It goes on.
    Keep,
    /// It has ended: the guest is answered with a reset.
    Reset,
    /// It has ended, and the guest knows.
    Remove,
}

/// A packet for the guest, apart from its addresses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Outgoing {
    pub op: Op,
    pub flags: u32,
    /// Bytes of data, which are in the caller's buffer.
    pub len: usize,
}

impl Outgoing {
    fn plain(op: Op) -> Self {
        Self { op, flags: 0, len: 0 }
    }
}

/// A connection.
#[derive(Debug)]
pub(super) struct Connection {
    /// Distinguishes it from earlier ones with the same ports.
    pub serial: u64,
    pub phase: Phase,
    /// When it is given up unless something happens.
    pub deadline: Option<Instant>,
    /// Whether it is in the line of those with packets for the guest.
    pub is_queued: bool,
    stream: Option<OwnedFd>,
    /// Size of our buffer, as announced to the guest.
    buf_alloc: u32,
    /// Bytes from the guest that have left our buffer.
    forwarded: Wrapping<u32>,
    /// The last value of `forwarded` that the guest has been sent.
    announced: Wrapping<u32>,
    /// Bytes from the guest that the host's socket does not take yet.
    unsent: VecDeque<u8>,
    /// Size of the guest's buffer.
    peer_buf_alloc: u32,
    /// Bytes that have left the guest's buffer.
    peer_forwarded: Wrapping<u32>,
    /// Bytes sent to the guest.
    sent: Wrapping<u32>,
    /// Whether the guest has been asked for credit since it last gave some.
    has_asked: bool,
    /// A REQUEST or RESPONSE, a credit update or a credit request to send.
    opening: Option<Op>,
    owes_update: bool,
    owes_request: bool,
    /// Reading or writing may succeed; cleared by EAGAIN, set by events.
    readable: bool,
    writable: bool,
    /// The host sends no more, and takes no more.
    host_shutdown: u32,
    /// The part of it that the guest knows.
    told_shutdown: u32,
    /// Flags of the guest's SHUTDOWN packets.
    guest_shutdown: u32,
    /// The guest has given up the connection; the rest of its data is still written.
    guest_is_gone: bool,
}

impl Connection {
    fn new(serial: u64, phase: Phase, buf_alloc: u32, stream: Option<OwnedFd>) -> Self {
        Self {
            serial,
            phase,
            deadline: None,
            is_queued: false,
            stream,
            buf_alloc,
            forwarded: Wrapping(0),
            announced: Wrapping(0),
            unsent: VecDeque::new(),
            peer_buf_alloc: 0,
            peer_forwarded: Wrapping(0),
            sent: Wrapping(0),
            has_asked: false,
            opening: None,
            owes_update: false,
            owes_request: false,
            readable: false,
            writable: true,
            host_shutdown: 0,
            told_shutdown: 0,
            guest_shutdown: 0,
            guest_is_gone: false,
        }
    }

    /// A connection that the guest has asked for with `header`.
    pub(super) fn of_guest(serial: u64, buf_alloc: u32, header: &Header) -> Self {
        let mut connection = Self::new(serial, Phase::Connecting, buf_alloc, None);
        connection.take_credit(header);
        connection
    }

    /// A connection that a client of the host wants.
    pub(super) fn of_client(serial: u64, buf_alloc: u32, stream: OwnedFd) -> Self {
        let mut connection = Self::new(serial, Phase::Requested, buf_alloc, Some(stream));
        connection.opening = Some(Op::Request);
        connection
    }

    /// The host's socket, until it has been closed.
    pub(super) fn stream(&self) -> Option<BorrowedFd<'_>> {
        self.stream.as_ref().map(|stream| stream.as_fd())
    }

    /// Gives up the socket.
    pub(super) fn close(&mut self) -> Option<OwnedFd> {
        self.stream.take()
    }

    /// The packet that begins the connection, if the guest does not have it yet.
    pub(super) fn opening(&self) -> Option<Op> {
        self.opening
    }

    /// Size of the buffer that was announced to the guest.
    pub(super) fn buf_alloc(&self) -> u32 {
        self.buf_alloc
    }

    /// What a header for the guest says about this side's buffer.
    pub(super) fn credit(&self) -> (u32, u32) {
        (self.buf_alloc, self.forwarded.0)
    }

    /// The socket that the guest's connection leads to.
    pub(super) fn connected(&mut self, stream: OwnedFd) {
        self.stream = Some(stream);
        self.phase = Phase::Open;
        self.opening = Some(Op::Response);
    }

    /// The guest has accepted a client's connection; an error is that of the client's socket.
    pub(super) fn accepted(&mut self, host_port: u32) -> Fate {
        self.phase = Phase::Open;
        self.readable = true;
        let answer = format!("OK {host_port}\n");
        match self.stream.as_ref().map(|stream| rustix::io::write(stream, answer.as_bytes())) {
            Some(Ok(written)) if written == answer.len() => Fate::Keep,
            _ => Fate::Reset,
        }
    }

    /// Records what a packet of the guest says about its buffer.
    pub(super) fn take_credit(&mut self, header: &Header) {
        self.peer_buf_alloc = header.buf_alloc;
        self.peer_forwarded = Wrapping(header.fwd_cnt);
        if self.peer_credit() > 0 {
            self.has_asked = false;
        }
    }

    /// Bytes that the guest has room for (section 5.10.6.3). Nonsense counts as no room.
    fn peer_credit(&self) -> u32 {
        self.peer_buf_alloc.saturating_sub((self.sent - self.peer_forwarded).0)
    }

    /// Whether the guest keeps to its credit with `bytes` more.
    pub(super) fn has_room(&self, bytes: usize) -> bool {
        self.unsent.len() + bytes <= self.buf_alloc as usize
    }

    /// The guest asks for an update.
    pub(super) fn credit_requested(&mut self) {
        self.owes_update = true;
    }

    /// Whether the guest has declared that it sends no more.
    pub(super) fn guest_has_finished(&self) -> bool {
        self.guest_shutdown & SHUTDOWN_SEND != 0
    }

    /// Takes data of the guest, for which there is [room](Self::has_room). Returns the bytes that
    /// the host's socket has taken.
    pub(super) fn take_data(&mut self, data: &[u8]) -> usize {
        let mut written = 0;
        if self.host_shutdown & SHUTDOWN_RECEIVE == 0 && self.unsent.is_empty() {
            written = self.write(data);
        }
        if self.host_shutdown & SHUTDOWN_RECEIVE == 0 {
            self.unsent.extend(&data[written..]);
            self.forward(written);
        } else {
            self.drop_unsent();
            self.forward(data.len());
        }
        written
    }

    fn forward(&mut self, bytes: usize) {
        self.forwarded += Wrapping(bytes as u32);
        // A quarter of the buffer: enough that the guest never waits for an update of a buffer
        // that is empty, and few of them.
        if (self.forwarded - self.announced).0 >= self.buf_alloc / 4 {
            self.owes_update = true;
        }
    }

    /// The host takes no more: the guest's data is dropped, and leaves the buffer.
    fn drop_unsent(&mut self) {
        let dropped = self.unsent.len();
        self.unsent = VecDeque::new();
        self.forward(dropped);
    }

    /// Writes to the socket; returns the bytes that it has taken.
    fn write(&mut self, data: &[u8]) -> usize {
        let mut written = 0;
        while let Some(stream) = self.stream.as_ref().filter(|_| self.writable) {
            match rustix::io::write(stream, &data[written..]) {
                Ok(count) => written += count,
                Err(Errno::INTR) => continue,
                Err(Errno::AGAIN) => self.writable = false,
                // The host does not read any more.
                Err(_) => {
                    self.host_shutdown |= SHUTDOWN_RECEIVE;
                    break;
                }
            }
            if written == data.len() {
                break;
            }
        }
        written
    }

    /// The socket takes data again.
    pub(super) fn on_writable(&mut self) -> usize {
        self.writable = true;
        let mut total = 0;
        while self.writable && self.host_shutdown & SHUTDOWN_RECEIVE == 0 {
            let unsent = std::mem::take(&mut self.unsent);
            let written = self.write(unsent.as_slices().0);
            self.unsent = unsent;
            self.unsent.drain(..written);
            total += written;
            if self.unsent.is_empty() || written == 0 {
                break;
            }
        }
        self.forward(total);
        if self.host_shutdown & SHUTDOWN_RECEIVE != 0 {
            self.drop_unsent();
        }
        if self.unsent.is_empty() {
            // Not kept for a connection that was busy once.
            self.unsent = VecDeque::new();
        }
        total
    }

    /// The socket has data or has ended.
    pub(super) fn on_readable(&mut self) {
        self.readable = true;
    }

    /// The host has closed its end: it neither sends nor receives after what it has sent.
    pub(super) fn on_hangup(&mut self) {
        self.readable = true;
        self.host_shutdown |= SHUTDOWN_RECEIVE;
        self.drop_unsent();
        if self.guest_shutdown & SHUTDOWN_RECEIVE != 0 {
            self.host_shutdown |= SHUTDOWN_SEND;
        }
    }

    /// The guest has sent SHUTDOWN.
    pub(super) fn take_shutdown(&mut self, flags: u32) {
        let new = flags & SHUTDOWN_BOTH & !self.guest_shutdown;
        self.guest_shutdown |= new;
        if let Some(stream) = self.stream.as_ref().filter(|_| new & SHUTDOWN_RECEIVE != 0) {
            let _ = rustix::net::shutdown(stream, Shutdown::Read);
        }
    }

    /// The guest has sent RST. If it had finished, its data still arrives.
    pub(super) fn take_reset(&mut self) -> Fate {
        if self.phase != Phase::Open || !self.guest_has_finished() || self.unsent.is_empty() {
            return Fate::Remove;
        }
        self.guest_shutdown = SHUTDOWN_BOTH;
        self.guest_is_gone = true;
        Fate::Keep
    }

    /// Does what follows when all of the guest's data is written.
    pub(super) fn settle(&mut self) -> Fate {
        if self.phase != Phase::Open || !self.unsent.is_empty() {
            return Fate::Keep;
        }
        if self.guest_shutdown == SHUTDOWN_BOTH || self.guest_is_gone {
            return if self.guest_is_gone { Fate::Remove } else { Fate::Reset };
        }
        if let Some(stream) = self.stream.as_ref().filter(|_| self.guest_has_finished()) {
            // Again without effect.
            let _ = rustix::net::shutdown(stream, Shutdown::Write);
        }
        Fate::Keep
    }

    /// Whether both sides know that the host has ended the connection.
    pub(super) fn has_told_end(&self) -> bool {
        self.told_shutdown == SHUTDOWN_BOTH
    }

    /// Panics if more is kept than was announced.
    #[cfg(any(test, feature = "testing"))]
    pub(super) fn check(&self) {
        assert!(self.unsent.len() <= self.buf_alloc as usize);
        assert!(self.unsent.capacity() <= 2 * self.buf_alloc as usize + 64);
    }

    fn may_read(&self) -> bool {
        self.phase == Phase::Open
            && self.readable
            && self.host_shutdown & SHUTDOWN_SEND == 0
            && self.guest_shutdown & SHUTDOWN_RECEIVE == 0
    }

    /// Whether there is, or may be, a packet for the guest.
    pub(super) fn has_packet(&self) -> bool {
        if self.guest_is_gone || self.phase == Phase::Connecting {
            return false;
        }
        self.opening.is_some()
            || self.phase == Phase::Open
                && (self.owes_update
                    || self.owes_request
                    || self.told_shutdown != self.host_shutdown
                    || self.may_read() && (self.peer_credit() > 0 || !self.has_asked))
    }

    /// The next packet for the guest. Its data, up to the length of `buffer`, is read from the
    /// socket. An error ends the connection.
    pub(super) fn next_packet(&mut self, buffer: &mut [u8]) -> Result<Option<Outgoing>, Errno> {
        let packet = self.choose_packet(buffer)?;
        if packet.is_some() {
            self.announced = self.forwarded;
            self.owes_update = false;
        }
        Ok(packet)
    }

    fn choose_packet(&mut self, buffer: &mut [u8]) -> Result<Option<Outgoing>, Errno> {
        if !self.has_packet() {
            return Ok(None);
        }
        if let Some(op) = self.opening.take() {
            if op == Op::Response {
                self.readable = true;
            }
            return Ok(Some(Outgoing::plain(op)));
        }
        if self.may_read() {
            let credit = self.peer_credit() as usize;
            if credit == 0 {
                self.owes_request = !self.has_asked;
            } else if let Some(len) = self.read(&mut buffer[..], credit)? {
                self.sent += Wrapping(len as u32);
                return Ok(Some(Outgoing { op: Op::Data, flags: 0, len }));
            }
        }
        // After all data: a guest drops what comes after.
        if self.told_shutdown != self.host_shutdown {
            self.told_shutdown = self.host_shutdown;
            let flags = self.host_shutdown;
            return Ok(Some(Outgoing { op: Op::Shutdown, flags, len: 0 }));
        }
        if std::mem::take(&mut self.owes_request) {
            self.has_asked = true;
            return Ok(Some(Outgoing::plain(Op::CreditRequest)));
        }
        Ok(self.owes_update.then(|| Outgoing::plain(Op::CreditUpdate)))
    }

    /// Reads from the socket; `None` if there is nothing now or at its end.
    fn read(&mut self, buffer: &mut [u8], most: usize) -> Result<Option<usize>, Errno> {
        let most = most.min(buffer.len());
        let Some(stream) = &self.stream else { return Ok(None) };
        loop {
            match rustix::io::read(stream, &mut buffer[..most]) {
                Ok(0) => {
                    self.host_shutdown |= SHUTDOWN_SEND;
                    return Ok(None);
                }
                Ok(count) => return Ok(Some(count)),
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => {
                    self.readable = false;
                    return Ok(None);
                }
                Err(errno) => return Err(errno),
            }
        }
    }
}
