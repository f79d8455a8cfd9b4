//! The first bytes of each connection, in both directions.
//!
//! | bytes | content |
//! | --- | --- |
//! | 0..8 | `EBB-MIG` and a line feed, which a transfer in text mode would change |
//! | 8..10 | version of the protocol, little endian |
//! | 10 | 1: control connection, 2: data stream |
//! | 11 | 0 |
//! | 12..16 | number of the data stream, little endian; 0 for a control connection |
//! | 16..32 | id of the session that a data stream joins; 0 for a control connection |
//!
//! The destination answers with the same bytes, but with its own version.

use super::reason::printable;
use super::session_id::SessionId;

/// Version of the protocol. Both sides must use the same one.
pub const PROTOCOL_VERSION: u16 = 4;

/// First bytes of every connection.
pub(super) const MAGIC: [u8; 8] = *b"EBB-MIG\n";

/// Length of a preamble in bytes.
pub(super) const PREAMBLE_BYTES: usize = 32;

/// Most data streams of a session.
pub const MOST_STREAMS: u16 = 64;

/// Role of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Role {
    Control,
    Data { session: SessionId, stream: u16 },
}

/// Error in the first bytes of a connection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum PreambleError {
    /// Not Ebb; with a description of the bytes.
    Foreign(String),
    Version(u16),
}

impl Role {
    /// Returns the first bytes of a connection with this role.
    pub(super) fn preamble(self) -> [u8; PREAMBLE_BYTES] {
        let mut bytes = [0; PREAMBLE_BYTES];
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[8..10].copy_from_slice(&PROTOCOL_VERSION.to_le_bytes());
        match self {
            Self::Control => bytes[10] = 1,
            Self::Data { session, stream } => {
                bytes[10] = 2;
                bytes[12..16].copy_from_slice(&u32::from(stream).to_le_bytes());
                bytes[16..].copy_from_slice(session.bytes());
            }
        }
        bytes
    }

    /// Parses the first bytes of a connection: `None` if more are needed. Bytes that cannot become
    /// a preamble are refused at the first one that differs.
    pub(super) fn parse(bytes: &[u8]) -> Result<Option<Self>, PreambleError> {
        let same = bytes.iter().zip(&MAGIC).all(|(byte, magic)| byte == magic);
        if !same {
            return Err(PreambleError::Foreign(describe(bytes)));
        }
        let Some(version) = bytes.get(8..10) else { return Ok(None) };
        let version = u16::from_le_bytes([version[0], version[1]]);
        if version != PROTOCOL_VERSION {
            return Err(PreambleError::Version(version));
        }
        let Some(rest) = bytes.get(10..PREAMBLE_BYTES) else { return Ok(None) };
        let stream = u32::from_le_bytes([rest[2], rest[3], rest[4], rest[5]]);
        let mut session = [0; 16];
        session.copy_from_slice(&rest[6..22]);
        match (rest[0], rest[1], u16::try_from(stream)) {
            (1, 0, Ok(0)) if session == [0; 16] => Ok(Some(Self::Control)),
            (2, 0, Ok(stream)) if stream < MOST_STREAMS => {
                Ok(Some(Self::Data { session: SessionId::from_bytes(session), stream }))
            }
            _ => Err(PreambleError::Foreign("a preamble with invalid fields".to_owned())),
        }
    }
}

/// Describes bytes that are not Ebb's.
fn describe(bytes: &[u8]) -> String {
    // The first byte of a TLS record (RFC 8446 section 5.1), and the high byte of its version.
    if let [20..=23, 3, ..] = bytes {
        return "it speaks TLS".to_owned();
    }
    let text = String::from_utf8_lossy(&bytes[..bytes.len().min(24)]);
    format!("it began with {:?}", printable(&text, 24))
}

#[cfg(test)]
mod tests;
