//! The control connection: messages over a [`Connection`], each one checked against the
//! [`Protocol`].

use std::fmt::Display;
use std::io::Read;
use std::time::{Duration, Instant};

use super::cancel::CancelHandle;
use super::connection::{Begun, Connection, Limit};
use super::error::{Reason, SessionError};
use super::limits::TimeLimits;
use super::message::{FrameError, HEADER_BYTES, Message, MessageKind, parse_header};
use super::protocol::{Protocol, Side};

/// What is read of a body at a time, so that a length that is a lie costs no memory.
const PIECE_BYTES: usize = 64 << 10;

/// Most messages that are looked through for the other side's last words.
const MOST_LATE_MESSAGES: usize = 64;

/// One end of the control connection.
#[derive(Debug)]
pub(super) struct Control {
    pub connection: Connection,
    pub protocol: Protocol,
    pub limits: TimeLimits,
    pub cancel: CancelHandle,
}

impl Control {
    pub(super) fn new(
        connection: Connection,
        side: Side,
        limits: TimeLimits,
        cancel: CancelHandle,
    ) -> Self {
        Self { connection, protocol: Protocol::new(side), limits, cancel }
    }

    /// Sends a message. If that fails, the other side cannot have it.
    pub(super) fn send(
        &mut self,
        message: &Message,
        doing: &'static str,
    ) -> Result<(), SessionError> {
        self.send_within(Limit::Progress(self.limits.progress), message, doing)
    }

    fn send_within(
        &mut self,
        limit: Limit,
        message: &Message,
        doing: &'static str,
    ) -> Result<(), SessionError> {
        let kind = message.kind();
        let frame = message.encode().map_err(|error| match error {
            FrameError::Long { kind, bytes } => {
                SessionError::TooLong { kind, bytes: bytes as usize, limit: kind.longest_bytes() }
            }
            error => {
                SessionError::Malformed { peer: "this side".to_owned(), problem: error.to_string() }
            }
        })?;
        let misplaced =
            |_| SessionError::Unexpected { peer: "this side".to_owned(), found: kind, doing };
        let before = self.protocol;
        self.protocol.send(kind).map_err(misplaced)?;
        self.connection.set_limit(limit);
        self.connection.write_frame(&frame).map_err(|(error, begun)| {
            match begun {
                // As if it had never been tried: another message may follow.
                Begun::No => self.protocol = before,
                Begun::Perhaps => self.protocol.unsent(kind),
            }
            self.connection.explain(&error, doing)
        })
    }

    /// Waits for the next message. That the other side has ended the session is an error. `doing`
    /// completes a sentence: "while its hello was awaited".
    pub(super) fn receive(
        &mut self,
        limit: Duration,
        doing: &'static str,
    ) -> Result<Message, SessionError> {
        // A large body takes its time: once it has begun, it only has to go on.
        let message =
            self.read(Limit::from_now(limit), Limit::Progress(self.limits.progress), doing)?;
        let peer = self.connection.peer().to_owned();
        let found = message.kind();
        if self.protocol.receive(found).is_err() {
            return Err(SessionError::Unexpected { peer, found, doing });
        }
        match message {
            Message::Abort(reason) => Err(SessionError::Aborted { peer, reason }),
            Message::Failed(reason) => Err(SessionError::Failed { peer, reason }),
            Message::Refuse(reason) => Err(SessionError::Refused { peer, reason }),
            message => Ok(message),
        }
    }

    /// A message has been received elsewhere.
    pub(super) fn note_received(
        &mut self,
        found: MessageKind,
        doing: &'static str,
    ) -> Result<(), SessionError> {
        let peer = || self.connection.peer().to_owned();
        self.protocol.receive(found).map_err(|_| SessionError::Unexpected {
            peer: peer(),
            found,
            doing,
        })
    }

    /// A message that the protocol allows at this place and that this side does not expect.
    pub(super) fn unexpected(&self, found: MessageKind, doing: &'static str) -> SessionError {
        SessionError::Unexpected { peer: self.connection.peer().to_owned(), found, doing }
    }

    pub(super) fn malformed(&self, problem: impl Display) -> SessionError {
        SessionError::Malformed {
            peer: self.connection.peer().to_owned(),
            problem: problem.to_string(),
        }
    }

    /// Ends the session because of `error`, which this side has met: the other side is told unless
    /// it knows. If the connection is cut and the other side had given a reason, that comes back
    /// instead.
    pub(super) fn end(self, error: SessionError) -> SessionError {
        let known_there = matches!(
            error,
            SessionError::Aborted { .. }
                | SessionError::Failed { .. }
                | SessionError::Refused { .. }
        );
        if known_there {
            self.connection.close(self.limits.farewell);
            return error;
        }
        let cut = matches!(error, SessionError::Cut { .. });
        match self.abort(error.to_string().into()) {
            // It went away with a word: that is the reason.
            Some(word) if cut => word,
            _ => error,
        }
    }

    /// Tells the other side that nothing comes of it, if it has not been told and the protocol
    /// still allows it. What the other side had said to the same effect before comes back.
    pub(super) fn abort(mut self, reason: Reason) -> Option<SessionError> {
        let farewell = self.limits.farewell;
        let deadline = (Instant::now() + farewell, farewell);
        let limit = Limit::Until(deadline.0, farewell);
        self.connection.ignore_cancel();
        if let Some(kind) = self.protocol.word_of_failure() {
            let message = if kind == MessageKind::Failed {
                Message::Failed(reason)
            } else {
                Message::Abort(reason)
            };
            // If it cannot be told, the end of the connection says the same.
            let _ = self.send_within(limit, &message, "while it was told that this side gives up");
        }
        self.protocol.lost();
        self.connection.end_of_output();
        let word = self.last_word(limit);
        self.connection.close_until(deadline);
        word
    }

    /// The reason that the other side gave before it ended.
    fn last_word(&mut self, limit: Limit) -> Option<SessionError> {
        for _ in 0..MOST_LATE_MESSAGES {
            let peer = self.connection.peer().to_owned();
            match self.read(limit, limit, "while it ended").ok()? {
                Message::Abort(reason) => return Some(SessionError::Aborted { peer, reason }),
                Message::Failed(reason) => return Some(SessionError::Failed { peer, reason }),
                Message::Refuse(reason) => return Some(SessionError::Refused { peer, reason }),
                _ => {}
            }
        }
        None
    }

    /// Reads one message, whatever its place.
    fn read(
        &mut self,
        header_limit: Limit,
        body_limit: Limit,
        doing: &'static str,
    ) -> Result<Message, SessionError> {
        self.connection.set_limit(header_limit);
        let mut header = [0; HEADER_BYTES];
        self.fill(&mut header, doing)?;
        let (kind, bytes) = parse_header(header).map_err(|error| self.malformed(error))?;
        self.connection.set_limit(body_limit);
        let mut body = Vec::new();
        while body.len() < bytes {
            let begin = body.len();
            body.resize(bytes.min(begin + PIECE_BYTES), 0);
            self.fill(&mut body[begin..], doing)?;
        }
        Message::decode(kind, body).map_err(|error| self.malformed(error))
    }

    fn fill(&mut self, buffer: &mut [u8], doing: &'static str) -> Result<(), SessionError> {
        self.connection.read_exact(buffer).map_err(|error| self.connection.explain(&error, doing))
    }
}
