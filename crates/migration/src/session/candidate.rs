//! An accepted connection before its hello or preamble.

use std::io;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use rustix::event::PollFlags;

use super::intake::{Arrival, Intake, Unwanted, examine};
use super::message::Message;
use super::preamble::{PreambleError, Role};
use super::reason::Reason;
use super::tls;
use super::wire::Wire;

/// A connection to the destination that has not identified itself yet.
#[derive(Debug)]
pub(super) struct Candidate {
    wire: Wire,
    peer: String,
    /// Place in the order of all connections of the listener.
    number: u64,
    deadline: Instant,
    /// `None` once the connection is refused: the peer only has to read the reason.
    received: Option<Vec<u8>>,
}

/// A connection that has identified itself.
pub(super) struct Arrived {
    pub wire: Wire,
    pub peer: String,
    pub number: u64,
}

/// Result of a step of a candidate.
pub(super) enum Step {
    /// More bytes are needed.
    Wait(Candidate),
    /// It has identified itself.
    Arrived(Arrived, Arrival),
    /// It is refused for this reason, and is kept until the peer has read it.
    Refused(Candidate, String),
    /// The connection has ended; with a reason if it was not refused before.
    Gone(Option<String>),
}

impl Candidate {
    pub(super) fn new(
        socket: OwnedFd,
        tls: Option<rustls::Connection>,
        peer: String,
        number: u64,
        deadline: Instant,
    ) -> Self {
        Self { wire: Wire::new(socket, tls), peer, number, deadline, received: Some(Vec::new()) }
    }

    pub(super) fn wire(&self) -> &Wire {
        &self.wire
    }

    pub(super) fn peer(&self) -> &str {
        &self.peer
    }

    pub(super) const fn deadline(&self) -> Instant {
        self.deadline
    }

    /// Place in the order of all connections of the listener.
    pub(super) const fn number(&self) -> u64 {
        self.number
    }

    /// Whether it only has to read why it was refused.
    pub(super) const fn is_refused(&self) -> bool {
        self.received.is_none()
    }

    /// Adds time that has passed without a step.
    pub(super) fn add_time(&mut self, time: Duration) {
        self.deadline += time;
    }

    /// Extends the time to identify itself to `until`.
    pub(super) fn wait_until(&mut self, until: Instant) {
        if !self.is_refused() {
            self.deadline = self.deadline.max(until);
        }
    }

    pub(super) fn interest(&self) -> PollFlags {
        self.wire.interest()
    }

    /// Proceeds as far as possible without waiting.
    pub(super) fn step(mut self, now: Instant) -> Step {
        if now >= self.deadline {
            let late = self.received.is_some();
            return Step::Gone(late.then(|| "it did not identify itself in time".to_owned()));
        }
        if self.received.is_none() {
            return if self.wire.drain() { Step::Wait(self) } else { Step::Gone(None) };
        }
        match self.introduce() {
            Ok(Ok(arrival)) => Step::Arrived(
                Arrived { wire: self.wire, peer: self.peer, number: self.number },
                arrival,
            ),
            Ok(Err(unwanted)) => {
                // A source of another version can report the mismatch only if it receives ours.
                let answers = matches!(unwanted, Unwanted::Preamble(PreambleError::Version(_)));
                let answer = if answers { Role::Control.preamble().to_vec() } else { Vec::new() };
                self.refuse(&answer, unwanted.problem())
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Step::Wait(self),
            // A data connection that its source does not need.
            Err(error)
                if error.kind() == io::ErrorKind::UnexpectedEof
                    && self.received.as_ref().is_some_and(Vec::is_empty) =>
            {
                Step::Gone(None)
            }
            Err(error) => {
                let problem =
                    match error.get_ref().and_then(|inner| inner.downcast_ref::<rustls::Error>()) {
                        Some(error) => tls::explain(error, self.peer.clone()).to_string(),
                        None if error.kind() == io::ErrorKind::UnexpectedEof => {
                            "it disconnected before it had identified itself".to_owned()
                        }
                        None => error.to_string(),
                    };
                self.refuse(&[], problem)
            }
        }
    }

    /// Refuses the connection and sends the reason, which an Ebb source can read.
    pub(super) fn refuse_with_reason(mut self, problem: String) -> Step {
        let mut answer = Role::Control.preamble().to_vec();
        // A reason is far shorter than the longest frame.
        answer.extend(Message::Abort(Reason::from(problem.clone())).encode().unwrap_or_default());
        self.received = None;
        self.refuse(&answer, problem)
    }

    /// A connection that has identified itself and is refused.
    pub(super) fn unwanted(arrived: Arrived, deadline: Instant) -> Self {
        let Arrived { wire, peer, number } = arrived;
        Self { wire, peer, number, deadline, received: None }
    }

    fn refuse(mut self, answer: &[u8], problem: String) -> Step {
        self.received = None;
        // A new connection accepts the few bytes at once; if not, they do not matter.
        let _ = self.wire.try_write(answer);
        self.wire.end_of_output();
        Step::Refused(self, problem)
    }

    fn introduce(&mut self) -> io::Result<Result<Arrival, Unwanted>> {
        self.wire.try_handshake()?;
        let received = self.received.get_or_insert_default();
        loop {
            let missing = match examine(received) {
                Ok(Intake::More(missing)) => missing,
                Ok(Intake::Done(arrival)) => return Ok(Ok(arrival)),
                Err(unwanted) => return Ok(Err(unwanted)),
            };
            // Never more than is missing: later bytes belong to the session.
            let mut piece = [0; 4096];
            let wanted = missing.min(piece.len());
            match self.wire.try_read(&mut piece[..wanted])? {
                0 => return Err(io::ErrorKind::UnexpectedEof.into()),
                count => received.extend(&piece[..count]),
            }
        }
    }
}
