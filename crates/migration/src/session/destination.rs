//! The destination's side of a session, one type for each step.

use std::io::Write as _;
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use serde::de::DeserializeOwned;

use super::connection::Connection;
use super::control::Control;
use super::descriptors;
use super::error::SessionError;
use super::intake::Arrival;
use super::listener::{Listener, NoArrival};
use super::message::{Acceptance, Greeting, MOST_DESCRIPTORS, Message, MessageKind, SetupBody};
use super::preamble::Role;
use super::protocol::Side;
use super::reason::Reason;
use super::session_id::SessionId;
use super::wire::Wire;

const SETUP: &str = "while waiting for its setup";
const DESCRIPTORS: &str = "while waiting for its file descriptors";
const STREAMS: &str = "while waiting for its data streams";
const STATE: &str = "while waiting for the machine's state";
const DECISION: &str = "while waiting for its decision";

/// Session with a source that has sent its hello.
#[derive(Debug)]
pub struct DestinationSession {
    control: Control,
    source: Greeting,
}

/// Session with a source that has described its machine.
#[derive(Debug)]
pub struct DestinationSetup {
    control: Control,
    streams: u16,
}

/// The machine is accepted; data streams may join.
#[derive(Debug)]
pub struct DestinationAccepted {
    control: Control,
    acceptance: Acceptance,
}

/// Data streams are open; memory is received.
#[derive(Debug)]
pub struct DestinationStreaming {
    control: Control,
}

/// The state has arrived; the machine is restored from it.
#[derive(Debug)]
pub struct DestinationRestoring {
    control: Control,
}

/// The source has decided: the guest belongs to this side. Exactly one of the two methods must be
/// called; dropping this makes the source keep the guest paused, with an unknown outcome.
#[derive(Debug)]
#[must_use = "the source waits for the report that the guest runs here"]
pub struct DestinationCommitted {
    control: Control,
}

/// The first steps: a source arrives and describes its machine.
impl Listener {
    /// Waits until a source has sent its hello, at most for `limit`.
    pub fn accept(&mut self, limit: Option<Duration>) -> Result<DestinationSession, SessionError> {
        let deadline = limit.and_then(|limit| Instant::now().checked_add(limit));
        let wanted = |arrival: &Arrival| match arrival {
            Arrival::Control(_) => Ok(()),
            Arrival::Data { .. } => Err("it is a data stream, but there is no session"),
        };
        loop {
            let (wire, peer, arrival) =
                self.next_source(wanted, deadline).map_err(|reason| match (reason, limit) {
                    (NoArrival::Failed(error), _) => error,
                    (_, limit) => SessionError::NobodyCame {
                        address: self.address.to_string(),
                        limit: limit.unwrap_or_default(),
                    },
                })?;
            let Arrival::Control(source) = arrival else { continue };
            match self.welcome(wire, &peer) {
                Ok(control) => return Ok(DestinationSession::new(control, source)),
                // It has disconnected; another one may connect.
                Err(error) => self.refusals.note(&peer, &error.to_string()),
            }
        }
    }

    /// Waits until a source has described its machine, at most for `limit`. A source that sends a
    /// hello and then fails counts as refused, and another one may connect: until a machine is
    /// accepted, no connection can end the destination.
    pub fn receive_setup<T: DeserializeOwned>(
        &mut self,
        limit: Option<Duration>,
    ) -> Result<(DestinationSetup, T), SessionError> {
        let begin = Instant::now();
        loop {
            let left = limit.map(|limit| limit.saturating_sub(begin.elapsed()));
            let session = self.accept(left).map_err(|error| match (error, limit) {
                (SessionError::NobodyCame { address, .. }, Some(limit)) => {
                    SessionError::NobodyCame { address, limit }
                }
                (error, _) => error,
            })?;
            let peer = session.peer().to_owned();
            match session.setup() {
                Err(error) if !matches!(error, SessionError::Cancelled) => {
                    self.refusals.note(&peer, &error.to_string());
                }
                result => return result,
            }
        }
    }

    /// Answers the hello of a source.
    fn welcome(&self, wire: Wire, peer: &str) -> Result<Control, SessionError> {
        const DOING: &str = "while answering its hello";
        let connection = self.connection(wire, peer);
        let mut control =
            Control::new(connection, Side::Destination, self.limits, self.cancel.clone());
        let answered = control.connection.write_all(&Role::Control.preamble());
        answered.map_err(|error| control.connection.explain(&error, DOING))?;
        control.note_received(MessageKind::Hello, DOING)?;
        control.send(&Message::Hello(self.greeting.clone()), DOING)?;
        Ok(control)
    }
}

impl DestinationSession {
    pub(super) const fn new(control: Control, source: Greeting) -> Self {
        Self { control, source }
    }

    /// The source's greeting.
    pub const fn source(&self) -> &Greeting {
        &self.source
    }

    /// Name of the source, for messages.
    pub fn peer(&self) -> &str {
        self.control.connection.peer()
    }

    /// Waits for the description of the machine, in the monitor's own format.
    pub fn setup<T: DeserializeOwned>(mut self) -> Result<(DestinationSetup, T), SessionError> {
        match self.receive_setup() {
            Ok(SetupBody { streams, machine }) => {
                Ok((DestinationSetup { control: self.control, streams }, machine))
            }
            Err(error) => Err(self.control.end(error)),
        }
    }

    fn receive_setup<T: DeserializeOwned>(&mut self) -> Result<SetupBody<T>, SessionError> {
        let body = match self.control.receive(self.control.limits.setup, SETUP)? {
            Message::Setup(body) => body,
            other => return Err(self.control.unexpected(other.kind(), SETUP)),
        };
        serde_json::from_slice(&body)
            .map_err(|error| self.control.malformed(format!("a setup: {error}")))
    }
}

impl DestinationSetup {
    /// Number of data streams that the source requests.
    pub const fn streams(&self) -> u16 {
        self.streams
    }

    /// Accepts the machine, with at most `streams` data streams.
    pub fn accept(mut self, streams: u16) -> Result<DestinationAccepted, SessionError> {
        let acceptance = match SessionId::random()
            .map_err(SessionError::system("get random numbers"))
        {
            Ok(session) => Acceptance { session, streams: streams.clamp(1, self.streams.max(1)) },
            Err(error) => return Err(self.control.end(error)),
        };
        match self
            .control
            .send(&Message::Accept(acceptance.clone()), "while sending it the acceptance")
        {
            Ok(()) => Ok(DestinationAccepted { control: self.control, acceptance }),
            Err(error) => Err(self.control.end(error)),
        }
    }

    /// Refuses the machine and sends the reason to the source.
    pub fn refuse(mut self, reason: impl Into<Reason>) {
        // A source that has disconnected does not need the reason.
        let _ = self.control.send(&Message::Refuse(reason.into()), "while sending it the refusal");
        self.control.connection.close(self.control.limits.farewell);
    }
}

impl DestinationAccepted {
    /// Number of data streams of the session.
    pub const fn streams(&self) -> u16 {
        self.acceptance.streams
    }

    /// Waits for the file descriptors that the setup announced.
    pub fn receive_descriptors(&mut self) -> Result<Vec<OwnedFd>, SessionError> {
        let limit = self.control.limits.progress;
        let count = match self.control.receive(limit, DESCRIPTORS)? {
            Message::Descriptors(count) if count <= MOST_DESCRIPTORS => count,
            Message::Descriptors(count) => {
                return Err(self.control.malformed(format!(
                    "{count} descriptors, but at most {MOST_DESCRIPTORS} are allowed"
                )));
            }
            other => return Err(self.control.unexpected(other.kind(), DESCRIPTORS)),
        };
        let deadline = (Instant::now() + limit, limit);
        let connection = &self.control.connection;
        (0..count)
            .map(|_| descriptors::receive(connection, &self.control.cancel, deadline))
            .collect::<Result<_, _>>()
            .map_err(|error| connection.explain(&error, DESCRIPTORS))
    }

    /// Waits until all data streams have connected to `listener`; other connections are refused.
    /// Returns them in order of their numbers.
    pub fn join(
        mut self,
        listener: &mut Listener,
    ) -> Result<(DestinationStreaming, Vec<Connection>), SessionError> {
        match self.collect(listener) {
            Ok(streams) => Ok((DestinationStreaming { control: self.control }, streams)),
            Err(error) => Err(self.control.end(error)),
        }
    }

    fn collect(&mut self, listener: &mut Listener) -> Result<Vec<Connection>, SessionError> {
        let limits = self.control.limits;
        let deadline = Instant::now() + limits.streams;
        let mut streams: Vec<Option<Connection>> = Vec::new();
        streams.resize_with(usize::from(self.acceptance.streams), || None);
        while streams.iter().any(Option::is_none) {
            let missing: Vec<_> = streams.iter().map(Option::is_none).collect();
            let control = self.control.connection.as_fd();
            match listener.next_stream(self.acceptance.session, &missing, deadline, control) {
                Ok((mut connection, stream)) => {
                    connection.set_progress_limit(limits.progress);
                    streams[usize::from(stream)] = Some(connection);
                }
                Err(NoArrival::Failed(error)) => return Err(error),
                Err(NoArrival::Late) => {
                    let peer = self.control.connection.peer().to_owned();
                    return Err(SessionError::TimedOut {
                        peer,
                        waiting_for: STREAMS,
                        limit: limits.streams,
                    });
                }
                // Before all streams are open the source can only send an abort.
                Err(NoArrival::Control) => {
                    let message = self.control.receive(limits.progress, STREAMS)?;
                    return Err(self.control.unexpected(message.kind(), STREAMS));
                }
            }
        }
        Ok(streams.into_iter().flatten().collect())
    }

    /// Ends the session. Returns the reason that the source sent before, if any.
    pub fn abort(self, reason: impl Into<Reason>) -> Option<SessionError> {
        self.control.abort(reason.into())
    }
}

impl DestinationStreaming {
    /// Confirms to the source that all of `round` is in memory.
    pub fn round_done(&mut self, round: u32) -> Result<(), SessionError> {
        self.control.send(&Message::RoundDone(round), "while sending it the end of a round")
    }

    /// Waits for the state other than memory.
    pub fn receive_state(mut self) -> Result<(DestinationRestoring, Vec<u8>), SessionError> {
        match self.control.receive(self.control.limits.progress, STATE) {
            Ok(Message::State(state)) => {
                Ok((DestinationRestoring { control: self.control }, state))
            }
            Ok(other) => {
                let error = self.control.unexpected(other.kind(), STATE);
                Err(self.control.end(error))
            }
            Err(error) => Err(self.control.end(error)),
        }
    }

    /// Ends the session. Returns the reason that the source sent before, if any: it explains a
    /// failed data stream better.
    pub fn abort(self, reason: impl Into<Reason>) -> Option<SessionError> {
        self.control.abort(reason.into())
    }
}

impl DestinationRestoring {
    /// Reports that the guest can start here, and waits for the source's decision. After an error
    /// this side must end without having run the guest.
    pub fn ready(mut self) -> Result<DestinationCommitted, SessionError> {
        let decision = self
            .control
            .send(&Message::Ready, "while reporting to it that this side is ready")
            .and_then(|()| self.control.receive(self.control.limits.commit, DECISION));
        match decision {
            Ok(Message::Commit) if self.control.cancel.decide() => {
                self.control.connection.ignore_cancel();
                Ok(DestinationCommitted { control: self.control })
            }
            Ok(Message::Commit) => Err(self.control.end(SessionError::Cancelled)),
            Ok(other) => {
                let error = self.control.unexpected(other.kind(), DECISION);
                Err(self.control.end(error))
            }
            Err(error) => Err(self.control.end(error)),
        }
    }

    /// Ends the session because the machine cannot be restored. Returns the reason that the source
    /// sent before, if any.
    pub fn fail(self, reason: impl Into<Reason>) -> Option<SessionError> {
        self.control.abort(reason.into())
    }
}

impl DestinationCommitted {
    /// Reports that the guest runs here; call it once it does. A failure to send this changes
    /// nothing: the source keeps the guest paused.
    pub fn running(mut self) {
        if let Err(error) =
            self.control.send(&Message::Running, "while reporting to it that the guest runs here")
        {
            tracing::warn!(
                "the guest runs here, but this could not be reported to the source: {error}"
            );
        }
        self.control.connection.close(self.control.limits.farewell);
    }

    /// Reports that the guest has not run here and never will: the source resumes it.
    pub fn failed(self, reason: impl Into<Reason>) {
        self.control.abort(reason.into());
    }
}
