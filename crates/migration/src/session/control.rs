//! The control connection: messages over a [`Connection`], each checked against the [`Protocol`].

use std::fmt::Display;
use std::io::Read;
use std::time::{Duration, Instant};

use super::cancel::CancelHandle;
use super::connection::{Begun, Connection, Limit};
use super::error::SessionError;
use super::limits::TimeLimits;
use super::message::{FrameError, HEADER_BYTES, Message, MessageKind, parse_header};
use super::protocol::{Protocol, Side};
use super::reason::Reason;

/// Bytes of a body read at a time, so that a false length costs no memory.
const PIECE_BYTES: usize = 64 << 10;

/// Rate at which the body of a message must arrive at least: far below that of any link on which a
/// migration is worth its time, and fast enough that 64 MiB cannot occupy this side for long.
const LEAST_BYTES_PER_S: u64 = 1 << 20;

/// Most messages searched for the other side's reason at the end.
const MOST_LATE_MESSAGES: usize = 64;

/// Limit of a body as a whole, whose header has just arrived. A limit for each read would let the
/// other side stretch it by sending a byte at a time.
fn body_limit(progress: Duration, bytes: usize) -> Limit {
    Limit::from_now(progress + Duration::from_secs(bytes as u64 / LEAST_BYTES_PER_S))
}

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

    /// Sends a message. If this fails, the other side cannot have received it.
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
                // Nothing was sent: another message may follow.
                Begun::No => self.protocol = before,
                Begun::Perhaps => self.protocol.unsent(kind),
            }
            self.connection.explain(&error, doing)
        })
    }

    /// Waits for the next message. Returns an error if the other side has ended the session.
    /// `doing` completes a sentence: "while waiting for its hello".
    pub(super) fn receive(
        &mut self,
        limit: Duration,
        doing: &'static str,
    ) -> Result<Message, SessionError> {
        let progress = self.limits.progress;
        let message =
            self.read(Limit::from_now(limit), |bytes| body_limit(progress, bytes), doing)?;
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

    /// Records a message that was received elsewhere.
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

    /// Error for a message that the protocol allows here but this side does not expect.
    pub(super) fn unexpected(&self, found: MessageKind, doing: &'static str) -> SessionError {
        SessionError::Unexpected { peer: self.connection.peer().to_owned(), found, doing }
    }

    pub(super) fn malformed(&self, problem: impl Display) -> SessionError {
        SessionError::Malformed {
            peer: self.connection.peer().to_owned(),
            problem: problem.to_string(),
        }
    }

    /// Ends the session because of `error` on this side and sends it to the other side unless it
    /// knows. If the connection was cut and the other side had sent a reason, returns that instead.
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
            // The other side sent a reason before it disconnected.
            Some(word) if cut => word,
            _ => error,
        }
    }

    /// Aborts the session and sends `reason` to the other side, if the protocol still allows it.
    /// Returns the reason that the other side sent before, if any.
    pub(super) fn abort(mut self, reason: Reason) -> Option<SessionError> {
        let farewell = self.limits.farewell;
        let deadline = (Instant::now() + farewell, farewell);
        let limit = Limit::Until(deadline.0, farewell);
        self.connection.ignore_cancel();
        if let Some(kind) = self.protocol.failure_message() {
            let message = if kind == MessageKind::Failed {
                Message::Failed(reason)
            } else {
                Message::Abort(reason)
            };
            // If this cannot be sent, the end of the connection means the same.
            let _ = self.send_within(limit, &message, "while sending it the reason of a failure");
        }
        self.protocol.lost();
        self.connection.end_of_output();
        let word = self.peer_reason(limit);
        self.connection.close_until(deadline);
        word
    }

    /// Returns the reason that the other side sent before it ended.
    fn peer_reason(&mut self, limit: Limit) -> Option<SessionError> {
        for _ in 0..MOST_LATE_MESSAGES {
            let peer = self.connection.peer().to_owned();
            match self.read(limit, |_| limit, "while it ended the session").ok()? {
                Message::Abort(reason) => return Some(SessionError::Aborted { peer, reason }),
                Message::Failed(reason) => return Some(SessionError::Failed { peer, reason }),
                Message::Refuse(reason) => return Some(SessionError::Refused { peer, reason }),
                _ => {}
            }
        }
        None
    }

    /// Reads one message without checking the protocol. `body_limit` is called with the length of
    /// the body when that is known.
    fn read(
        &mut self,
        header_limit: Limit,
        body_limit: impl FnOnce(usize) -> Limit,
        doing: &'static str,
    ) -> Result<Message, SessionError> {
        self.connection.set_limit(header_limit);
        let mut header = [0; HEADER_BYTES];
        self.fill(&mut header, doing)?;
        let (kind, bytes) = parse_header(header).map_err(|error| self.malformed(error))?;
        self.connection.set_limit(body_limit(bytes));
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
