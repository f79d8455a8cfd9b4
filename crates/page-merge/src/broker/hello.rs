//! Beginning of a connection: sixteen bytes that declare its role, and for a client a hello and a
//! welcome.
//!
//! | bytes | content |
//! | --- | --- |
//! | 0..8 | `EBB-SPM` and a line feed |
//! | 8..10 | version of the protocol, little endian |
//! | 10 | 1: a client, 2: a query of the broker's state, 3: an introduction |
//! | 11..16 | 0 |
//!
//! An introduction comes before the beginning proper, from a process that makes the connection for
//! another one: a hello, which is not answered. The other process can be a client of its domain
//! only.

use crate::settings::Nodes;
use serde::{Deserialize, Serialize};

use super::limits::ToldLimits;
use super::name::DomainName;

/// The version of the protocol. Both sides must have the same.
pub const PROTOCOL_VERSION: u16 = 1;

const MAGIC: [u8; 8] = *b"EBB-SPM\n";

/// Length of a preamble.
pub(super) const PREAMBLE_BYTES: usize = 16;

/// Role of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Role {
    Member,
    Status,
    /// Of another process as a client.
    Introduction,
}

/// An invalid preamble.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum PreambleError {
    #[error("it does not speak the protocol of Ebb's merge broker")]
    Foreign,
    #[error("it speaks version {0} of the protocol, and this is version {PROTOCOL_VERSION}")]
    Version(u16),
}

impl Role {
    pub(super) fn preamble(self) -> [u8; PREAMBLE_BYTES] {
        let mut bytes = [0; PREAMBLE_BYTES];
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[8..10].copy_from_slice(&PROTOCOL_VERSION.to_le_bytes());
        bytes[10] = match self {
            Self::Member => 1,
            Self::Status => 2,
            Self::Introduction => 3,
        };
        bytes
    }

    /// The role, or `None` if more bytes are needed. An invalid preamble is detected at its first
    /// wrong byte.
    pub(super) fn parse(bytes: &[u8]) -> Result<Option<Self>, PreambleError> {
        let seen = bytes.len().min(MAGIC.len());
        if bytes[..seen] != MAGIC[..seen] {
            return Err(PreambleError::Foreign);
        }
        let Some(preamble) = bytes.first_chunk::<PREAMBLE_BYTES>() else { return Ok(None) };
        let version = u16::from_le_bytes([preamble[8], preamble[9]]);
        if version != PROTOCOL_VERSION {
            return Err(PreambleError::Version(version));
        }
        match (preamble[10], &preamble[11..]) {
            (1, [0, 0, 0, 0, 0]) => Ok(Some(Self::Member)),
            (2, [0, 0, 0, 0, 0]) => Ok(Some(Self::Status)),
            (3, [0, 0, 0, 0, 0]) => Ok(Some(Self::Introduction)),
            _ => Err(PreambleError::Foreign),
        }
    }
}

/// Identity of a client. Its domain is fixed for the rest of its connection.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Hello {
    pub domain: DomainName,
    pub placement: Nodes,
}

/// The broker's answer to an accepted client.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Welcome {
    /// The secret of the domain's hashes.
    pub secret: [u8; 32],
    /// The host's nodes with memory.
    pub nodes: Vec<u32>,
    pub limits: ToldLimits,
}

impl std::fmt::Debug for Welcome {
    /// The secret must not be logged.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Welcome")
            .field("nodes", &self.nodes)
            .field("limits", &self.limits)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_prefix_of_a_preamble_is_judged_like_the_whole() {
        for role in [Role::Member, Role::Status, Role::Introduction] {
            let preamble = role.preamble();
            for length in 0..PREAMBLE_BYTES {
                assert_eq!(Role::parse(&preamble[..length]), Ok(None));
            }
            assert_eq!(Role::parse(&preamble), Ok(Some(role)));
        }
    }

    #[test]
    fn other_bytes_are_refused() {
        let good = Role::Member.preamble();
        for place in 0..PREAMBLE_BYTES {
            let mut bad = good;
            bad[place] ^= 0x40;
            assert!(Role::parse(&bad).is_err(), "byte {place}");
        }
        assert_eq!(Role::parse(b"G"), Err(PreambleError::Foreign));
        let mut newer = good;
        newer[8] = 2;
        assert_eq!(Role::parse(&newer), Err(PreambleError::Version(2)));
    }
}
