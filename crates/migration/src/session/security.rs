//! Who may take part in a session.

use std::path::PathBuf;

use super::address::Address;
use super::error::SessionError;

/// How the two sides trust each other.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum Security {
    /// Unix sockets, where the other process must be of the same user or root.
    #[default]
    Local,
    /// Also TCP without encryption and authentication: any process that reaches the port, or
    /// listens there, can be given, or give, a guest's memory. On loopback these are those of all
    /// users of the host. Only when the operator says so.
    Insecure,
    /// TLS 1.3 with certificates on both sides, for TCP.
    Tls(TlsFiles),
}

/// Certificates and keys, as PEM files.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TlsFiles {
    /// The own certificate, with those between it and the authority.
    pub certificate: PathBuf,
    /// The own certificate's private key (PKCS #8, PKCS #1 or SEC 1).
    pub key: PathBuf,
    /// The authorities that the other side's certificate must come from.
    pub authorities: PathBuf,
    /// Names or addresses of which the other side's certificate must have one. A source takes the
    /// first, or else the host of the address that it connects to; a destination needs one.
    pub peer_names: Vec<String>,
}

/// What the connections of a session have to be, once addresses are known.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Transport {
    Plain,
    Tls,
}

impl Security {
    /// Whether `address` may be used, and with TLS or without.
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
