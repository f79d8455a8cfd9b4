//! Authentication of the two sides of a session.

use std::path::PathBuf;

use super::address::Address;
use super::error::SessionError;

/// How the two sides authenticate each other.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum Security {
    /// Unix sockets, where the other process must belong to the same user or root.
    #[default]
    Local,
    /// Also TCP without encryption and authentication: any process that reaches the port, or
    /// listens there, can send or receive a guest's memory. On loopback these are the processes of
    /// all users of the host. Only on explicit request of the operator.
    Insecure,
    /// TLS 1.3 with certificates on both sides, for TCP.
    Tls(TlsFiles),
}

/// Certificates and keys, as PEM files.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TlsFiles {
    /// The own certificate, followed by intermediate certificates.
    pub certificate: PathBuf,
    /// The own certificate's private key (PKCS #8, PKCS #1 or SEC 1).
    pub key: PathBuf,
    /// The authorities that may have issued the other side's certificate.
    pub authorities: PathBuf,
    /// Names or addresses of which the other side's certificate must have one. A source uses the
    /// first, or else the host of the address that it connects to; a destination needs at least
    /// one.
    pub peer_names: Vec<String>,
}

/// Transport of a session's connections, once addresses are known.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Transport {
    Plain,
    Tls,
}

impl Security {
    /// Returns the transport for `address`, or an error if the address may not be used.
    pub(super) fn transport(&self, address: &Address) -> Result<Transport, SessionError> {
        match (self, address) {
            (Self::Tls(_), Address::Tcp { .. }) => Ok(Transport::Tls),
            (Self::Tls(_), Address::Unix { .. }) => {
                Err(SessionError::TlsOverUnix { address: address.to_string() })
            }
            (Self::Local, Address::Tcp { .. }) => {
                Err(SessionError::Unencrypted { address: address.to_string() })
            }
            (Self::Local | Self::Insecure, _) => Ok(Transport::Plain),
        }
    }
}
