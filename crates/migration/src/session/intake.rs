//! The destination's parser for the first bytes of a connection: which side it is from, and its
//! role.

use super::message::{FrameError, Greeting, HEADER_BYTES, Message, MessageKind, parse_header};
use super::preamble::{PREAMBLE_BYTES, PreambleError, Role};
use super::session_id::SessionId;

/// Role of a new connection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Arrival {
    /// A source.
    Control(Greeting),
    /// A data stream.
    Data { session: SessionId, stream: u16 },
}

/// Progress of a connection's identification.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Intake {
    /// At least this many bytes are missing, and no more may be read for now.
    More(usize),
    Done(Arrival),
}

/// Why a connection is refused.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Unwanted {
    Preamble(PreambleError),
    Frame(FrameError),
    /// A message other than a hello.
    Message(MessageKind),
}

/// Examines the bytes received so far.
pub(super) fn examine(bytes: &[u8]) -> Result<Intake, Unwanted> {
    let Some(role) = Role::parse(bytes).map_err(Unwanted::Preamble)? else {
        return Ok(Intake::More(PREAMBLE_BYTES - bytes.len()));
    };
    if let Role::Data { session, stream } = role {
        return Ok(Intake::Done(Arrival::Data { session, stream }));
    }
    let frame = &bytes[PREAMBLE_BYTES..];
    let Some((&header, body)) = frame.split_first_chunk::<HEADER_BYTES>() else {
        return Ok(Intake::More(HEADER_BYTES - frame.len()));
    };
    let (kind, length) = parse_header(header).map_err(Unwanted::Frame)?;
    if kind != MessageKind::Hello {
        return Err(Unwanted::Message(kind));
    }
    if body.len() < length {
        return Ok(Intake::More(length - body.len()));
    }
    match Message::decode(kind, body.to_vec()).map_err(Unwanted::Frame)? {
        Message::Hello(greeting) => Ok(Intake::Done(Arrival::Control(greeting))),
        other => Err(Unwanted::Message(other.kind())),
    }
}

impl Unwanted {
    /// Description for the destination's log.
    pub(super) fn problem(&self) -> String {
        match self {
            Self::Preamble(PreambleError::Foreign(found)) => {
                format!("it does not speak Ebb's migration protocol: {found}")
            }
            Self::Preamble(PreambleError::Version(theirs)) => {
                let ours = super::preamble::PROTOCOL_VERSION;
                format!(
                    "it speaks version {theirs} of the migration protocol, this side version {ours}"
                )
            }
            Self::Frame(error) => format!("it sent {error}"),
            Self::Message(kind) => format!("it sent {kind} instead of a hello"),
        }
    }
}

#[cfg(test)]
mod tests;
