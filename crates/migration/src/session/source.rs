//! The source's side of a session, one type for each step.

use std::io::{Read, Write};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::time::Instant;

use serde::Serialize;

use crate::{BoxError, RoundSync};

use super::address::Address;
use super::cancel::CancelHandle;
use super::connection::{Connection, Limit};
use super::control::Control;
use super::descriptors;
use super::error::SessionError;
use super::limits::TimeLimits;
use super::message::{Acceptance, Greeting, MOST_DESCRIPTORS, Message, SetupBody};
use super::preamble::{MOST_STREAMS, PREAMBLE_BYTES, PreambleError, Role};
use super::protocol::{End, Side, Stage};
use super::reason::Reason;
use super::security::Security;
use super::tls::TlsClient;
use super::wire::Wire;

const GREETING: &str = "while waiting for its hello";
const ANSWER: &str = "while waiting for its answer to the setup";
const ROUND: &str = "while waiting for the end of a round";
const RESTORING: &str = "while it restored the machine";
const DECISION: &str = "after this side had decided to move the guest";

/// Parameters of every connection of a session.
#[derive(Debug)]
struct Connector {
    address: Address,
    tls: Option<TlsClient>,
    limits: TimeLimits,
    cancel: CancelHandle,
}

/// The side that runs the guest after the source's decision.
#[derive(Debug)]
#[must_use = "the guest runs on exactly one side, and this says on which"]
pub enum Outcome {
    /// The destination. The source must never run it again.
    Moved,
    /// The source: the destination has ended and will never run it.
    RunsOn(SessionError),
    /// Possibly the destination. The source keeps the guest paused; only an operator who has
    /// verified that it does not run there may resume it here.
    Unknown(SessionError),
}

/// Session with a destination that has sent its hello.
#[derive(Debug)]
pub struct SourceSession {
    control: Control,
    connector: Connector,
    /// Connected, for data streams.
    sockets: Vec<OwnedFd>,
    destination: Greeting,
}

/// Session with a destination that has accepted the machine.
#[derive(Debug)]
pub struct SourceAccepted {
    control: Control,
    connector: Connector,
    /// Connected, one for each data stream.
    sockets: Vec<OwnedFd>,
    acceptance: Acceptance,
}

/// Data streams are open; memory is transferred.
#[derive(Debug)]
pub struct SourceStreaming {
    control: Control,
}

/// The destination can start the guest; the source has to decide.
#[derive(Debug)]
pub struct SourcePrepared {
    control: Control,
}

/// Exchanges hellos with a destination over `sockets`, which [`dial`](super::dial) has connected to
/// it: the control connection, then one for each data stream. They need not be non-blocking.
///
/// `address` names the destination in messages and, with TLS, in its certificate; only a `unix:`
/// address allows [`SourceAccepted::send_descriptors`].
///
/// System calls, with those of all later steps: `ppoll`, `recvmsg`, `sendmsg`, `shutdown`, `close`;
/// for TLS `fstat` and `pread64` (the files), `getrandom`.
pub fn connect(
    mut sockets: Vec<OwnedFd>,
    address: &Address,
    security: &Security,
    greeting: &Greeting,
    limits: &TimeLimits,
    cancel: &CancelHandle,
) -> Result<SourceSession, SessionError> {
    let tls = security.client(address)?;
    if sockets.len() < 2 {
        return Err(SessionError::TooFewSockets);
    }
    let control = sockets.remove(0);
    let connector =
        Connector { address: address.clone(), tls, limits: *limits, cancel: cancel.clone() };
    greet(connector, control, sockets, greeting)
}

fn greet(
    connector: Connector,
    socket: OwnedFd,
    sockets: Vec<OwnedFd>,
    greeting: &Greeting,
) -> Result<SourceSession, SessionError> {
    let connection = connector.connection(socket)?;
    let mut control =
        Control::new(connection, Side::Source, connector.limits, connector.cancel.clone());
    let hello = Message::Hello(greeting.clone());
    let send_preamble = control.connection.write_all(&Role::Control.preamble());
    send_preamble.map_err(|error| control.connection.explain(&error, GREETING))?;
    // Another program may close the connection when it reads the preamble; the bytes it has sent
    // explain more than that.
    let sent = control.send(&hello, GREETING);
    control.connection.set_limit(Limit::from_now(connector.limits.greeting));
    read_answer(&mut control.connection, Role::Control)?;
    sent?;
    match control.receive(connector.limits.greeting, GREETING) {
        Ok(Message::Hello(destination)) => {
            Ok(SourceSession { control, connector, sockets, destination })
        }
        Ok(other) => {
            let error = control.unexpected(other.kind(), GREETING);
            Err(control.end(error))
        }
        Err(error) => Err(control.end(error)),
    }
}

/// Reads the destination's preamble. Anything else is refused at the first byte that differs.
fn read_answer(connection: &mut Connection, expected: Role) -> Result<(), SessionError> {
    let mut bytes = [0; PREAMBLE_BYTES];
    let mut filled = 0;
    loop {
        let count = connection
            .read(&mut bytes[filled..])
            .map_err(|error| connection.explain(&error, GREETING))?;
        let peer = || connection.peer().to_owned();
        if count == 0 {
            let problem =
                "the peer closed it without an answer; its log may give the reason".to_owned();
            return Err(SessionError::Cut { peer: peer(), doing: GREETING, problem });
        }
        filled += count;
        match Role::parse(&bytes[..filled]) {
            Ok(None) => {}
            Ok(Some(role)) if role == expected => return Ok(()),
            Ok(Some(_)) => {
                let problem =
                    "the data stream was refused; the peer's log gives the reason".to_owned();
                return Err(SessionError::Cut { peer: peer(), doing: GREETING, problem });
            }
            Err(PreambleError::Foreign(found)) => {
                return Err(SessionError::NotEbb { peer: peer(), found });
            }
            Err(PreambleError::Version(theirs)) => {
                let ours = super::preamble::PROTOCOL_VERSION;
                return Err(SessionError::Version { peer: peer(), theirs, ours });
            }
        }
    }
}

impl Connector {
    fn peer(&self) -> String {
        format!("the destination {}", self.address)
    }

    /// Creates a connection over a connected socket and completes its TLS handshake.
    fn connection(&self, socket: OwnedFd) -> Result<Connection, SessionError> {
        let tls = self.tls.as_ref().map(TlsClient::connection).transpose()?;
        let limit = Limit::from_now(self.limits.greeting);
        let mut connection =
            Connection::new(Wire::new(socket, tls), self.peer(), limit, self.cancel.clone());
        connection
            .handshake()
            .map_err(|error| connection.explain(&error, "while exchanging certificates"))?;
        Ok(connection)
    }
}

impl SourceSession {
    /// The destination's greeting.
    pub const fn destination(&self) -> &Greeting {
        &self.destination
    }

    /// Describes the machine, in the monitor's own format, and waits for the destination's answer.
    /// Requests up to `streams` data streams, but no more than there are sockets; those that are
    /// not needed are closed. A refusal is [`SessionError::Refused`].
    pub fn setup<T: Serialize>(
        mut self,
        machine: &T,
        streams: u16,
    ) -> Result<SourceAccepted, SessionError> {
        match self.negotiate(machine, streams) {
            Ok(acceptance) => {
                let Self { control, connector, mut sockets, .. } = self;
                sockets.truncate(usize::from(acceptance.streams));
                Ok(SourceAccepted { control, connector, sockets, acceptance })
            }
            Err(error) => Err(self.control.end(error)),
        }
    }

    fn negotiate<T: Serialize>(
        &mut self,
        machine: &T,
        streams: u16,
    ) -> Result<Acceptance, SessionError> {
        if !(1..=MOST_STREAMS).contains(&streams) {
            return Err(SessionError::Streams { asked: streams, most: MOST_STREAMS });
        }
        let streams = u16::try_from(self.sockets.len()).map_or(streams, |most| streams.min(most));
        let body = serde_json::to_vec(&SetupBody { streams, machine }).map_err(|error| {
            SessionError::Malformed { peer: "this side".to_owned(), problem: error.to_string() }
        })?;
        self.control
            .send(&Message::Setup(body), "while sending it the description of the machine")?;
        match self.control.receive(self.control.limits.answer, ANSWER)? {
            Message::Accept(acceptance) if (1..=streams).contains(&acceptance.streams) => {
                Ok(acceptance)
            }
            Message::Accept(acceptance) => {
                let problem = format!(
                    "it accepts {} data streams where {streams} were requested",
                    acceptance.streams
                );
                Err(self.control.malformed(problem))
            }
            other => Err(self.control.unexpected(other.kind(), ANSWER)),
        }
    }

    /// Ends the session. Returns the reason that the destination sent before, if any.
    pub fn abort(self, reason: impl Into<Reason>) -> Option<SessionError> {
        self.control.abort(reason.into())
    }
}

impl SourceAccepted {
    /// Number of data streams of the session.
    pub const fn streams(&self) -> u16 {
        self.acceptance.streams
    }

    /// Sends file descriptors to a destination on the same host. The setup must have announced
    /// them.
    pub fn send_descriptors(&mut self, descriptors: &[BorrowedFd<'_>]) -> Result<(), SessionError> {
        const DOING: &str = "while sending it file descriptors";
        if !matches!(self.connector.address, Address::Unix { .. }) {
            return Err(SessionError::NoDescriptors { peer: self.connector.peer() });
        }
        let count =
            u16::try_from(descriptors.len()).ok().filter(|&count| count <= MOST_DESCRIPTORS);
        let count = count.ok_or_else(|| SessionError::System {
            what: "send file descriptors",
            source: std::io::Error::other(format!(
                "{} descriptors, but at most {MOST_DESCRIPTORS} are allowed",
                descriptors.len()
            )),
        })?;
        self.control.send(&Message::Descriptors(count), DOING)?;
        let limit = self.control.limits.progress;
        let deadline = (Instant::now() + limit, limit);
        let connection = &self.control.connection;
        descriptors
            .iter()
            .try_for_each(|&descriptor| {
                descriptors::send(connection, descriptor, &self.control.cancel, deadline)
            })
            .map_err(|error| connection.explain(&error, DOING))
    }

    /// Opens the data streams, each on a connection of its own, in order of their numbers.
    pub fn open_streams(mut self) -> Result<(SourceStreaming, Vec<Connection>), SessionError> {
        match self.open() {
            Ok(streams) => Ok((SourceStreaming { control: self.control }, streams)),
            Err(error) => Err(self.control.end(error)),
        }
    }

    fn open(&mut self) -> Result<Vec<Connection>, SessionError> {
        let session = self.acceptance.session;
        let mut streams: Vec<Connection> = Vec::new();
        for (stream, socket) in (0..).zip(std::mem::take(&mut self.sockets)) {
            let mut connection = self.connector.connection(socket)?;
            let preamble = Role::Data { session, stream }.preamble();
            connection
                .write_all(&preamble)
                .map_err(|error| connection.explain(&error, GREETING))?;
            streams.push(connection);
        }
        for (number, connection) in (0..).zip(&mut streams) {
            connection.set_limit(Limit::from_now(self.control.limits.streams));
            read_answer(connection, Role::Data { session, stream: number })?;
            connection.set_progress_limit(self.control.limits.progress);
        }
        Ok(streams)
    }

    /// Ends the session. Returns the reason that the destination sent before, if any.
    pub fn abort(self, reason: impl Into<Reason>) -> Option<SessionError> {
        self.control.abort(reason.into())
    }
}

impl SourceStreaming {
    /// Waits until the destination confirms `round`, the next one not yet acknowledged.
    pub fn wait_round_done(&mut self, round: u32) -> Result<(), SessionError> {
        match self.control.receive(self.control.limits.progress, ROUND)? {
            Message::RoundDone(done) if done == round => Ok(()),
            Message::RoundDone(done) => Err(self
                .control
                .malformed(format!("round {done} was confirmed instead of {round}"))),
            other => Err(self.control.unexpected(other.kind(), ROUND)),
        }
    }

    /// Sends the state other than memory, once all rounds are acknowledged and the guest is paused,
    /// and waits until the destination is ready to start the guest.
    pub fn send_state(mut self, state: Vec<u8>) -> Result<SourcePrepared, SessionError> {
        let answer = self
            .control
            .send(&Message::State(state), "while sending it the state")
            .and_then(|()| self.control.receive(self.control.limits.restore, RESTORING));
        match answer {
            Ok(Message::Ready) => Ok(SourcePrepared { control: self.control }),
            Ok(other) => {
                let error = self.control.unexpected(other.kind(), RESTORING);
                Err(self.control.end(error))
            }
            Err(error) => Err(self.control.end(error)),
        }
    }

    /// Ends the session. Returns the reason that the destination sent before, if any: it explains a
    /// failed data stream better.
    pub fn abort(self, reason: impl Into<Reason>) -> Option<SessionError> {
        self.control.abort(reason.into())
    }
}

impl SourcePrepared {
    /// Decides to move the guest. From here on the session cannot be cancelled, and the source must
    /// not resume the guest unless the outcome allows it.
    pub fn commit(mut self) -> Outcome {
        if !self.control.cancel.decide() {
            return Outcome::RunsOn(self.control.end(SessionError::Cancelled));
        }
        self.control.connection.ignore_cancel();
        let error = match self.control.send(&Message::Commit, DECISION) {
            Ok(()) => match self.control.receive(self.control.limits.running, DECISION) {
                // No message is left in either direction, so the connection needs no orderly end.
                Ok(Message::Running) => return Outcome::Moved,
                Ok(other) => self.control.unexpected(other.kind(), DECISION),
                Err(error) => error,
            },
            Err(error) => error,
        };
        self.control.protocol.lost();
        match self.control.protocol.stage() {
            Stage::Over(End::Stays) => Outcome::RunsOn(self.control.end(error)),
            _ => Outcome::Unknown(error),
        }
    }

    /// Ends the session. Returns the reason that the destination sent before, if any.
    pub fn abort(self, reason: impl Into<Reason>) -> Option<SessionError> {
        self.control.abort(reason.into())
    }
}

impl RoundSync for SourceStreaming {
    fn wait_round_done(&mut self, round: u32) -> Result<(), BoxError> {
        Self::wait_round_done(self, round).map_err(Into::into)
    }
}
