//! The destination's side of a session, one type for each step.

use std::os::fd::{AsFd, OwnedFd};
use std::time::Instant;

use serde::de::DeserializeOwned;

use super::connection::Connection;
use super::control::Control;
use super::descriptors;
use super::error::{Reason, SessionError};
use super::listener::{Listener, NoArrival};
use super::message::{Acceptance, Greeting, MOST_DESCRIPTORS, Message, SetupBody};
use super::preamble::SessionId;

const SETUP: &str = "while its setup was awaited";
const DESCRIPTORS: &str = "while its file descriptors were awaited";
const STREAMS: &str = "while its data streams were awaited";
const STATE: &str = "while the machine's state was awaited";
const DECISION: &str = "while its decision was awaited";

/// A source that has said hello.
#[derive(Debug)]
pub struct DestinationSession {
    control: Control,
    source: Greeting,
}

/// A source that has described its machine.
#[derive(Debug)]
pub struct DestinationSetup {
    control: Control,
    streams: u16,
}

/// The machine is taken; data streams may come.
#[derive(Debug)]
pub struct DestinationAccepted {
    control: Control,
    acceptance: Acceptance,
}

/// Data streams stand; memory is received.
#[derive(Debug)]
pub struct DestinationStreaming {
    control: Control,
}

/// The state is there; the machine is made from it.
#[derive(Debug)]
pub struct DestinationRestoring {
    control: Control,
}

/// The source has decided: the guest is this side's. Exactly one of the two methods must be called;
/// dropping this lets the source keep the guest paused, with an unknown outcome.
#[derive(Debug)]
#[must_use = "the source waits to hear whether the guest runs here"]
pub struct DestinationCommitted {
    control: Control,
}

impl DestinationSession {
    pub(super) const fn new(control: Control, source: Greeting) -> Self {
        Self { control, source }
    }

    /// Who the source says it is.
    pub const fn source(&self) -> &Greeting {
        &self.source
    }

    /// Where the source is, for messages.
    pub fn peer(&self) -> &str {
        self.control.connection.peer()
    }

    /// Waits for the description of the machine, in the monitor's own words.
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
    /// How many data streams the source would like.
    pub const fn streams(&self) -> u16 {
        self.streams
    }

    /// Takes the machine, with at most `streams` data streams.
    pub fn accept(mut self, streams: u16) -> Result<DestinationAccepted, SessionError> {
        let acceptance = match SessionId::random() {
            Ok(session) => Acceptance { session, streams: streams.clamp(1, self.streams.max(1)) },
            Err(error) => return Err(self.control.end(error)),
        };
        match self
            .control
            .send(&Message::Accept(acceptance.clone()), "while it was told that it may begin")
        {
            Ok(()) => Ok(DestinationAccepted { control: self.control, acceptance }),
            Err(error) => Err(self.control.end(error)),
        }
    }

    /// Does not take the machine. The source learns why.
    pub fn refuse(mut self, reason: impl Into<Reason>) {
        // A source that has gone away does not want to know.
        let _ = self.control.send(&Message::Refuse(reason.into()), "while it was refused");
        self.control.connection.close(self.control.limits.farewell);
    }
}

impl DestinationAccepted {
    /// How many data streams there will be.
    pub const fn streams(&self) -> u16 {
        self.acceptance.streams
    }

    /// Waits for the file descriptors that the setup has announced.
    pub fn receive_descriptors(&mut self) -> Result<Vec<OwnedFd>, SessionError> {
        let limit = self.control.limits.progress;
        let count = match self.control.receive(limit, DESCRIPTORS)? {
            Message::Descriptors(count) if count <= MOST_DESCRIPTORS => count,
            Message::Descriptors(count) => {
                return Err(self
                    .control
                    .malformed(format!("{count} descriptors of {MOST_DESCRIPTORS} possible")));
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

    /// Waits until all data streams have come to `listener`; whoever else comes is refused. They
    /// are in order of their numbers.
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
                // Before all streams stand the source has nothing to say but that it gives up.
                Err(NoArrival::Watched) => {
                    let message = self.control.receive(limits.progress, STREAMS)?;
                    return Err(self.control.unexpected(message.kind(), STREAMS));
                }
            }
        }
        Ok(streams.into_iter().flatten().collect())
    }

    /// Ends the session. What the source had said to the same effect before comes back.
    pub fn abort(self, reason: impl Into<Reason>) -> Option<SessionError> {
        self.control.abort(reason.into())
    }
}

impl DestinationStreaming {
    /// Tells the source that everything of `round` is here.
    pub fn round_done(&mut self, round: u32) -> Result<(), SessionError> {
        self.control.send(&Message::RoundDone(round), "while it was told of the end of a round")
    }

    /// Waits for what is left besides memory.
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

    /// Ends the session. What the source had said to the same effect before comes back: it is the
    /// better reason for a data stream that has failed.
    pub fn abort(self, reason: impl Into<Reason>) -> Option<SessionError> {
        self.control.abort(reason.into())
    }
}

impl DestinationRestoring {
    /// Says that the guest could start here, and waits for the source's decision. After an error
    /// this side must end without having run the guest.
    pub fn ready(mut self) -> Result<DestinationCommitted, SessionError> {
        let decision = self
            .control
            .send(&Message::Ready, "while it was told that this side is ready")
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

    /// Ends the session because the machine cannot be made. What the source had said to the same
    /// effect before comes back.
    pub fn fail(self, reason: impl Into<Reason>) -> Option<SessionError> {
        self.control.abort(reason.into())
    }
}

impl DestinationCommitted {
    /// The guest runs here; to be called once it does. That the source cannot be told changes
    /// nothing: it keeps the guest paused.
    pub fn running(mut self) {
        if let Err(error) =
            self.control.send(&Message::Running, "while it was told that the guest runs here")
        {
            tracing::warn!("the guest runs here, but the source does not know: {error}");
        }
        self.control.connection.close(self.control.limits.farewell);
    }

    /// The guest has not run here and never will: the source runs it again.
    pub fn failed(self, reason: impl Into<Reason>) {
        self.control.abort(reason.into());
    }
}
