//! The id of a session.

use std::fmt::Write as _;

use rustix::io::Errno;
use serde::{Deserialize, Serialize};

/// Id that proves that a data stream belongs to a session: 128 random bits known only to the two
/// sides.
#[derive(Clone, Copy, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct SessionId([u8; 16]);

impl std::fmt::Debug for SessionId {
    /// Hides the id: it is a secret and must not be logged.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("SessionId(..)")
    }
}

impl PartialEq for SessionId {
    /// Compares in constant time, so that the id cannot be guessed byte by byte.
    fn eq(&self, other: &Self) -> bool {
        self.0.iter().zip(&other.0).fold(0, |difference, (a, b)| difference | (a ^ b)) == 0
    }
}

impl Eq for SessionId {}

impl SessionId {
    /// Generates a new id.
    pub(super) fn random() -> Result<Self, Errno> {
        let mut bytes = [0; 16];
        let flags = rustix::rand::GetRandomFlags::empty();
        // getrandom(2) fills requests of up to 256 bytes completely.
        rustix::rand::getrandom(&mut bytes, flags)?;
        Ok(Self(bytes))
    }

    /// The id in these bytes of a preamble.
    pub(super) const fn from_bytes(bytes: [u8; 16]) -> Self {
        Self(bytes)
    }

    /// The bytes of this id in a preamble.
    pub(super) const fn bytes(&self) -> &[u8; 16] {
        &self.0
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
