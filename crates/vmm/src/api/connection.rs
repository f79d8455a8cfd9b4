//! One client's connection: reading, waiting for the guest, writing, all without blocking.

use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use rustix::event::PollFlags;
use rustix::io::Errno;
use rustix::net::{SendFlags, Shutdown};

use super::descriptors::{self, Completeness, MAX_DESCRIPTORS};
use super::door::{Door, Pending, Served};
use super::http::{self, Parsed};
use super::reply::{BodyMode, Persistence, Problem, Reply, Status};

/// How long the rest of a refused request is read and discarded, so that its sender gets to read
/// the refusal.
const LINGER_TIME_LIMIT: Duration = Duration::from_millis(500);

/// Bytes read in one call.
const CHUNK_BYTES: usize = 4096;

/// Limits for clients, so that a slow or hostile one costs little and blocks no other.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Most connections at a time. When all are in use, a new one replaces an idle one.
    pub connections: usize,
    /// Time limit from the first byte of a request to its last.
    pub request: Duration,
    /// Time limit from the first byte of a reply to its last.
    pub reply: Duration,
    /// Time limit between two requests.
    pub idle: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            connections: 16,
            request: Duration::from_secs(5),
            reply: Duration::from_secs(5),
            idle: Duration::from_secs(60),
        }
    }
}

/// A client's connection.
pub(super) struct Connection {
    socket: OwnedFd,
    /// Received and not yet processed: at most one incomplete request and a chunk.
    input: Vec<u8>,
    /// Received for the request that completes next.
    descriptors: Vec<OwnedFd>,
    /// Bytes to send; empty when all were sent.
    output: Vec<u8>,
    sent_bytes: usize,
    phase: Phase,
    input_end: InputEnd,
    limits: Limits,
    /// When the current phase times out.
    deadline: Instant,
}

/// State of a connection.
enum Phase {
    /// Between requests or receiving one.
    Reading(Leave),
    /// Waiting for the guest.
    Awaiting(Pending, Persistence, BodyMode),
    /// Sending a reply.
    Writing(AfterReply),
    /// Discarding the rest of a refused request.
    Lingering,
}

/// Whether `100 Continue` was sent.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Leave {
    NotGiven,
    Given,
}

/// The action after a reply is sent.
#[derive(Clone, Copy)]
enum AfterReply {
    NextRequest,
    Close,
    Linger,
}

/// Whether the client may still send.
#[derive(Clone, Copy, PartialEq, Eq)]
enum InputEnd {
    Open,
    Reached,
}

/// Whether a connection remains open.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fate {
    /// It remains open.
    Keep,
    /// It must be dropped.
    Close,
}

impl Connection {
    pub(super) fn new(socket: OwnedFd, limits: Limits, now: Instant) -> Self {
        Self {
            socket,
            input: Vec::new(),
            descriptors: Vec::new(),
            output: Vec::new(),
            sent_bytes: 0,
            phase: Phase::Reading(Leave::NotGiven),
            input_end: InputEnd::Open,
            limits,
            deadline: now + limits.idle,
        }
    }

    pub(super) fn socket(&self) -> &OwnedFd {
        &self.socket
    }

    /// The events to poll for. A hang-up is always reported.
    pub(super) fn interest(&self) -> PollFlags {
        match self.phase {
            Phase::Reading(_) | Phase::Lingering => PollFlags::IN,
            Phase::Awaiting(..) => PollFlags::empty(),
            Phase::Writing(_) => PollFlags::OUT,
        }
    }

    /// When to call [`on_time`](Self::on_time) at the latest.
    pub(super) fn deadline(&self) -> Instant {
        self.deadline
    }

    /// Whether to check for the guest's answer.
    pub(super) fn awaits_guest(&self) -> bool {
        matches!(self.phase, Phase::Awaiting(..))
    }

    /// Whether the connection is between two requests.
    pub(super) fn is_idle(&self) -> bool {
        matches!(self.phase, Phase::Reading(_)) && self.input.is_empty()
    }

    /// Handles what poll has reported.
    pub(super) fn on_ready(&mut self, ready: PollFlags, door: &dyn Door, now: Instant) -> Fate {
        if ready.is_empty() {
            return Fate::Keep;
        }
        match self.phase {
            Phase::Reading(_) => self.receive(door, now),
            // Only a hang-up or an error is reported then: no client is left to answer.
            Phase::Awaiting(..) => Fate::Close,
            Phase::Writing(_) => self.send(door, now),
            Phase::Lingering => self.throw_away(),
        }
    }

    /// Handles timeouts.
    pub(super) fn on_time(&mut self, door: &dyn Door, now: Instant) -> Fate {
        if let Phase::Awaiting(pending, persistence, body) = &mut self.phase {
            let (persistence, body) = (*persistence, *body);
            return match pending.poll() {
                Some(reply) => {
                    self.answer(&reply, persistence, body, now);
                    self.send(door, now)
                }
                None => Fate::Keep,
            };
        }
        if now < self.deadline {
            return Fate::Keep;
        }
        if matches!(self.phase, Phase::Reading(_)) && !self.input.is_empty() {
            let message = format!(
                "the request did not arrive completely within {} ms",
                self.limits.request.as_millis()
            );
            self.refuse(door, Problem::new(Status::RequestTimeout, message), now);
            return self.send(door, now);
        }
        Fate::Close
    }

    /// Answers a client that waits for the guest, because the monitor ends. Returns whether
    /// anything remains to be sent.
    pub(super) fn end(&mut self, door: &dyn Door, now: Instant) -> bool {
        if let Phase::Awaiting(pending, _, body) = &mut self.phase {
            let body = *body;
            let ended = || Problem::new(Status::ServiceUnavailable, "the machine has ended");
            let reply = pending.poll().unwrap_or_else(|| door.refuse(ended()));
            self.answer(&reply, Persistence::Close, body, now);
        }
        matches!(self.phase, Phase::Writing(_))
    }

    fn receive(&mut self, door: &dyn Door, now: Instant) -> Fate {
        let mut chunk = [0; CHUNK_BYTES];
        let received = match descriptors::receive(&self.socket, &mut chunk, &mut self.descriptors) {
            Ok(received) => received,
            Err(Errno::AGAIN | Errno::INTR) => return Fate::Keep,
            Err(_) => return Fate::Close,
        };
        if received.bytes == 0 {
            self.input_end = InputEnd::Reached;
        } else if self.input.is_empty() {
            self.deadline = now + self.limits.request;
        }
        self.input.extend_from_slice(&chunk[..received.bytes]);
        if self.descriptors.len() > MAX_DESCRIPTORS
            || received.descriptors == Completeness::Truncated
        {
            let message = format!(
                "the request came with more file descriptors than can be received: at most \
                 {MAX_DESCRIPTORS}, fewer if the monitor has too many open files"
            );
            self.refuse(door, Problem::new(Status::BadRequest, message), now);
            return self.send(door, now);
        }
        self.serve(door, now)
    }

    /// Executes the requests that have arrived, until one must wait or its reply cannot be sent at
    /// once.
    fn serve(&mut self, door: &dyn Door, now: Instant) -> Fate {
        while let Phase::Reading(leave) = self.phase {
            match http::parse_within(&self.input, door.max_body_bytes()) {
                Ok(Parsed::Complete { request, consumed_bytes }) => {
                    let (persistence, body) = (request.persistence, request.reply_body());
                    tracing::debug!(method = request.method, path = request.path, "API request");
                    let descriptors = std::mem::take(&mut self.descriptors);
                    let served = door.serve(&request, descriptors);
                    self.input.drain(..consumed_bytes);
                    match served {
                        Served::Done(reply) => self.answer(&reply, persistence, body, now),
                        Served::Await(pending) => {
                            self.phase = Phase::Awaiting(pending, persistence, body);
                        }
                    }
                }
                Ok(Parsed::Incomplete { .. }) if self.input_end == InputEnd::Reached => {
                    return Fate::Close;
                }
                Ok(Parsed::Incomplete { wants_continue: true }) if leave == Leave::NotGiven => {
                    self.phase = Phase::Reading(Leave::Given);
                    // These few bytes fit into any socket buffer that is not full of unread
                    // replies. A client that does not get them sends the body anyway (RFC 9110
                    // section 10.1.1).
                    let leave = b"HTTP/1.1 100 Continue\r\n\r\n";
                    let _ = descriptors::send(&self.socket, leave, &[], SendFlags::DONTWAIT);
                    return Fate::Keep;
                }
                Ok(Parsed::Incomplete { .. }) => return Fate::Keep,
                Err(problem) => self.refuse(door, problem, now),
            }
            if let Phase::Writing(_) = self.phase
                && self.send_some(now) == Fate::Close
            {
                return Fate::Close;
            }
        }
        Fate::Keep
    }

    fn refuse(&mut self, door: &dyn Door, problem: Problem, now: Instant) {
        self.input = Vec::new();
        self.descriptors = Vec::new();
        self.answer(&door.refuse(problem), Persistence::Close, BodyMode::Full, now);
        self.phase = Phase::Writing(AfterReply::Linger);
    }

    fn answer(&mut self, reply: &Reply, persistence: Persistence, body: BodyMode, now: Instant) {
        self.output = reply.encode(persistence, body);
        self.sent_bytes = 0;
        self.deadline = now + self.limits.reply;
        self.phase = Phase::Writing(match persistence {
            Persistence::KeepAlive => AfterReply::NextRequest,
            Persistence::Close => AfterReply::Close,
        });
    }

    /// Sends, then continues with the input that arrived meanwhile.
    fn send(&mut self, door: &dyn Door, now: Instant) -> Fate {
        match self.send_some(now) {
            Fate::Keep => self.serve(door, now),
            Fate::Close => Fate::Close,
        }
    }

    /// Sends as much as the socket accepts, and leaves [`Phase::Writing`] when everything was sent.
    pub(super) fn send_some(&mut self, now: Instant) -> Fate {
        let Phase::Writing(after) = self.phase else {
            return Fate::Keep;
        };
        while self.sent_bytes < self.output.len() {
            let rest = &self.output[self.sent_bytes..];
            match descriptors::send(&self.socket, rest, &[], SendFlags::DONTWAIT) {
                Ok(length) => self.sent_bytes += length,
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return Fate::Keep,
                Err(_) => return Fate::Close,
            }
        }
        self.output = Vec::new();
        match after {
            AfterReply::NextRequest => {
                self.phase = Phase::Reading(Leave::NotGiven);
                let limit =
                    if self.input.is_empty() { self.limits.idle } else { self.limits.request };
                self.deadline = now + limit;
                Fate::Keep
            }
            AfterReply::Close => Fate::Close,
            AfterReply::Linger => {
                self.phase = Phase::Lingering;
                self.deadline = now + LINGER_TIME_LIMIT;
                match rustix::net::shutdown(&self.socket, Shutdown::Write) {
                    Ok(()) => Fate::Keep,
                    Err(_) => Fate::Close,
                }
            }
        }
    }

    fn throw_away(&mut self) -> Fate {
        let mut chunk = [0; CHUNK_BYTES];
        match descriptors::receive_bytes(&self.socket, &mut chunk) {
            Ok(0) => Fate::Close,
            Ok(_) | Err(Errno::AGAIN | Errno::INTR) => Fate::Keep,
            Err(_) => Fate::Close,
        }
    }
}
