//! The first bytes of each connection, in both directions.
//!
//! | bytes | content |
//! | --- | --- |
//! | 0..8 | `EBB-MIG` and a line feed, which transfers in text mode would change |
//! | 8..10 | version of the protocol, little endian |
//! | 10 | 1: control connection, 2: data stream |
//! | 11 | 0 |
//! | 12..16 | number of the data stream, little endian; 0 for a control connection |
//! | 16..32 | id of the session that a data stream joins; 0 for a control connection |
//!
//! The destination answers with the same bytes, but with its own version.

use std::fmt::Write as _;

use serde::{Deserialize, Serialize};

use super::error::{SessionError, printable};

/// The version of the protocol. Both sides must have the same.
pub const PROTOCOL_VERSION: u16 = 1;

/// How every connection begins.
pub(super) const MAGIC: [u8; 8] = *b"EBB-MIG\n";

/// Length of a preamble.
pub(super) const PREAMBLE_BYTES: usize = 32;

/// Most data streams of a session.
pub const MOST_STREAMS: u16 = 64;

/// What shows that a data stream belongs to a session: 128 random bits that only the two sides
/// know.
#[derive(Clone, Copy, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct SessionId([u8; 16]);

impl std::fmt::Debug for SessionId {
    /// The id is a secret; it does not belong into logs.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("SessionId(..)")
    }
}

impl PartialEq for SessionId {
    /// In constant time, so that nobody finds the id byte by byte.
    fn eq(&self, other: &Self) -> bool {
        self.0.iter().zip(&other.0).fold(0, |difference, (a, b)| difference | (a ^ b)) == 0
    }
}

impl Eq for SessionId {}

impl SessionId {
    /// A new one.
    pub(super) fn random() -> Result<Self, SessionError> {
        let mut bytes = [0; 16];
        let flags = rustix::rand::GetRandomFlags::empty();
        // getrandom(2) fills requests of up to 256 bytes completely.
        rustix::rand::getrandom(&mut bytes, flags)
            .map_err(SessionError::system("get random numbers"))?;
        Ok(Self(bytes))
    }
}

impl From<SessionId> for String {
    fn from(id: SessionId) -> Self {
        id.0.iter().fold(Self::new(), |mut text, byte| {
            // Writing to a string cannot fail.
            let _ = write!(text, "{byte:02x}");
            text
        })
    }
}

impl TryFrom<String> for SessionId {
    type Error = &'static str;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        const PROBLEM: &str = "a session's id is 32 hexadecimal digits";
        let digits = Some(text.as_bytes()).filter(|digits| digits.len() == 32).ok_or(PROBLEM)?;
        let digit = |byte: u8| char::from(byte).to_digit(16).ok_or(PROBLEM);
        let mut id = [0; 16];
        for (byte, pair) in id.iter_mut().zip(digits.chunks_exact(2)) {
            *byte = (digit(pair[0])? << 4 | digit(pair[1])?) as u8;
        }
        Ok(Self(id))
    }
}

/// What a connection is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Role {
    Control,
    Data { session: SessionId, stream: u16 },
}

/// What is wrong with the first bytes of a connection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum PreambleError {
    /// Not Ebb; the words say what it looks like.
    Foreign(String),
    Version(u16),
}

impl Role {
    /// The first bytes of a connection for this.
    pub(super) fn preamble(self) -> [u8; PREAMBLE_BYTES] {
        let mut bytes = [0; PREAMBLE_BYTES];
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[8..10].copy_from_slice(&PROTOCOL_VERSION.to_le_bytes());
        match self {
            Self::Control => bytes[10] = 1,
            Self::Data { session, stream } => {
                bytes[10] = 2;
                bytes[12..16].copy_from_slice(&u32::from(stream).to_le_bytes());
                bytes[16..].copy_from_slice(&session.0);
            }
        }
        bytes
    }

    /// Reads the first bytes of a connection: `None` if more are needed. What cannot become a
    /// preamble is refused as early as it shows.
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
                Ok(Some(Self::Data { session: SessionId(session), stream }))
            }
            _ => Err(PreambleError::Foreign("a preamble with impossible fields".to_owned())),
        }
    }
}

/// What bytes that are not Ebb's look like.
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
