//! Messages of the control connection: frames of length, kind and body.

use std::fmt;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use thiserror::Error;

use super::reason::{Reason, printable};
use super::session_id::SessionId;

/// Size of a frame's header: length of the body (32 bits, little endian) and kind.
pub(super) const HEADER_BYTES: usize = 5;

/// Longest body of most messages.
const SMALL_BYTES: usize = 64 << 10;

/// Longest body of a setup and of a state.
pub const LARGE_BYTES: usize = 64 << 20;

/// Most file descriptors in one session.
pub const MOST_DESCRIPTORS: u16 = 64;

/// Kind of a message and its number on the wire.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u8)]
pub enum MessageKind {
    /// Either: the greeting.
    Hello = 1,
    /// Source: description of the machine.
    Setup = 2,
    /// Destination: the machine is accepted, data streams may join.
    Accept = 3,
    /// Destination: the machine is refused.
    Refuse = 4,
    /// Source: file descriptors follow.
    Descriptors = 5,
    /// Destination: a round is complete in memory.
    RoundDone = 6,
    /// Source: the state other than memory.
    State = 7,
    /// Destination: the guest can start here.
    Ready = 8,
    /// Source: the decision that the destination runs the guest.
    Commit = 9,
    /// Destination: the guest runs here.
    Running = 10,
    /// Destination: the guest does not run here and never will.
    Failed = 11,
    /// Either, before [`Commit`](Self::Commit): the session has failed.
    Abort = 12,
}

impl MessageKind {
    /// All kinds.
    pub const ALL: [Self; 12] = [
        Self::Hello,
        Self::Setup,
        Self::Accept,
        Self::Refuse,
        Self::Descriptors,
        Self::RoundDone,
        Self::State,
        Self::Ready,
        Self::Commit,
        Self::Running,
        Self::Failed,
        Self::Abort,
    ];

    fn from_number(number: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|&kind| kind as u8 == number)
    }

    /// Largest size of the body in bytes.
    pub const fn longest_bytes(self) -> usize {
        match self {
            Self::Setup | Self::State => LARGE_BYTES,
            Self::Ready | Self::Commit | Self::Running => 0,
            _ => SMALL_BYTES,
        }
    }
}

impl fmt::Display for MessageKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Hello => "a hello",
            Self::Setup => "a setup",
            Self::Accept => "an acceptance",
            Self::Refuse => "a refusal",
            Self::Descriptors => "file descriptors",
            Self::RoundDone => "the end of a round",
            Self::State => "a state",
            Self::Ready => "a ready message",
            Self::Commit => "a commit message",
            Self::Running => "a running message",
            Self::Failed => "a failure message",
            Self::Abort => "an abort message",
        })
    }
}

/// Greeting of one side.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Greeting {
    /// The program and its version, for messages: `ebb 0.1.0`.
    pub monitor: String,
    /// Capabilities of this side beyond the protocol's version. Unknown ones are ignored.
    #[serde(default)]
    pub capabilities: Vec<String>,
}

/// The acceptance of a machine.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Acceptance {
    /// Id that data streams must present.
    pub session: SessionId,
    /// Number of data streams.
    pub streams: u16,
}

/// A setup: the session's parameters, and the machine in the monitor's format.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct SetupBody<T> {
    /// Number of data streams that the source requests.
    pub streams: u16,
    /// The machine.
    pub machine: T,
}

/// A message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Message {
    Hello(Greeting),
    /// JSON of a [`SetupBody`], whose type is known only to the monitor.
    Setup(Vec<u8>),
    Accept(Acceptance),
    Refuse(Reason),
    Descriptors(u16),
    RoundDone(u32),
    State(Vec<u8>),
    Ready,
    Commit,
    Running,
    Failed(Reason),
    Abort(Reason),
}

/// An invalid frame.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub(super) enum FrameError {
    #[error("a message of the unknown kind {0}")]
    Kind(u8),
    #[error("{kind} of {bytes} bytes, but at most {} are allowed", kind.longest_bytes())]
    Long { kind: MessageKind, bytes: u32 },
    #[error("{kind} that does not parse: {problem}")]
    Body { kind: MessageKind, problem: String },
}

/// Returns the kind of the frame that begins with `header`, and the length of its body.
pub(super) fn parse_header(header: [u8; HEADER_BYTES]) -> Result<(MessageKind, usize), FrameError> {
    let [a, b, c, d, kind] = header;
    let kind = MessageKind::from_number(kind).ok_or(FrameError::Kind(kind))?;
    let bytes = u32::from_le_bytes([a, b, c, d]);
    if bytes as usize > kind.longest_bytes() {
        return Err(FrameError::Long { kind, bytes });
    }
    Ok((kind, bytes as usize))
}

impl Message {
    pub(super) const fn kind(&self) -> MessageKind {
        match self {
            Self::Hello(_) => MessageKind::Hello,
            Self::Setup(_) => MessageKind::Setup,
            Self::Accept(_) => MessageKind::Accept,
            Self::Refuse(_) => MessageKind::Refuse,
            Self::Descriptors(_) => MessageKind::Descriptors,
            Self::RoundDone(_) => MessageKind::RoundDone,
            Self::State(_) => MessageKind::State,
            Self::Ready => MessageKind::Ready,
            Self::Commit => MessageKind::Commit,
            Self::Running => MessageKind::Running,
            Self::Failed(_) => MessageKind::Failed,
            Self::Abort(_) => MessageKind::Abort,
        }
    }

    /// Encodes the message as a frame.
    pub(super) fn encode(&self) -> Result<Vec<u8>, FrameError> {
        let kind = self.kind();
        let mut frame = vec![0, 0, 0, 0, kind as u8];
        let failed =
            |error: serde_json::Error| FrameError::Body { kind, problem: error.to_string() };
        match self {
            Self::Hello(greeting) => serde_json::to_writer(&mut frame, greeting).map_err(failed)?,
            Self::Accept(acceptance) => {
                serde_json::to_writer(&mut frame, acceptance).map_err(failed)?;
            }
            Self::Refuse(reason) | Self::Failed(reason) | Self::Abort(reason) => {
                serde_json::to_writer(&mut frame, reason).map_err(failed)?;
            }
            Self::Descriptors(count) => frame.extend(count.to_le_bytes()),
            Self::RoundDone(round) => frame.extend(round.to_le_bytes()),
            Self::Setup(body) | Self::State(body) => frame.extend(body),
            Self::Ready | Self::Commit | Self::Running => {}
        }
        let bytes = u32::try_from(frame.len() - HEADER_BYTES).unwrap_or(u32::MAX);
        if bytes as usize > kind.longest_bytes() {
            return Err(FrameError::Long { kind, bytes });
        }
        frame.splice(..4, bytes.to_le_bytes());
        Ok(frame)
    }

    /// Decodes a message from a frame's kind and body.
    pub(super) fn decode(kind: MessageKind, body: Vec<u8>) -> Result<Self, FrameError> {
        fn json<T: DeserializeOwned>(kind: MessageKind, body: &[u8]) -> Result<T, FrameError> {
            serde_json::from_slice(body)
                .map_err(|error| FrameError::Body { kind, problem: error.to_string() })
        }
        fn number<const N: usize>(kind: MessageKind, body: &[u8]) -> Result<[u8; N], FrameError> {
            let problem = || format!("{} bytes instead of {N}", body.len());
            body.try_into().map_err(|_| FrameError::Body { kind, problem: problem() })
        }
        Ok(match kind {
            MessageKind::Hello => Self::Hello(json::<Greeting>(kind, &body)?.printable()),
            MessageKind::Setup => Self::Setup(body),
            MessageKind::Accept => Self::Accept(json(kind, &body)?),
            MessageKind::Refuse => Self::Refuse(json(kind, &body)?),
            MessageKind::Descriptors => Self::Descriptors(u16::from_le_bytes(number(kind, &body)?)),
            MessageKind::RoundDone => Self::RoundDone(u32::from_le_bytes(number(kind, &body)?)),
            MessageKind::State => Self::State(body),
            MessageKind::Ready => Self::Ready,
            MessageKind::Commit => Self::Commit,
            MessageKind::Running => Self::Running,
            MessageKind::Failed => Self::Failed(json(kind, &body)?),
            MessageKind::Abort => Self::Abort(json(kind, &body)?),
        })
    }
}

impl Greeting {
    /// Makes the program's name printable: the other side logs it.
    fn printable(self) -> Self {
        Self { monitor: printable(&self.monitor, 80), ..self }
    }
}

#[cfg(test)]
mod tests;
