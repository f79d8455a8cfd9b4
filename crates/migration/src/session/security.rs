//! Who may take part in a session.

use std::net::SocketAddr;
use std::path::PathBuf;

use super::address::Address;
use super::error::SessionError;

/// How the two sides trust each other.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum Security {
    /// No encryption: unix sockets, where the other process must be of the same user or root, and TCP on loopback.
    #[default]
    Local,
    /// No encryption and no authentication on any TCP address: whoever reaches the port can be given, or give, a guest's
    /// memory. Only when the operator says so.
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
    /// Source: the name that the destination's certificate must have, if it is not the host of the address.
    pub server_name: Option<String>,
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
            (Self::Local | Self::Insecure, _) => Ok(Transport::Plain),
        }
    }

    /// Refuses an unencrypted connection over a network that nobody has asked for.
    pub(super) fn check(&self, address: SocketAddr) -> Result<(), SessionError> {
        if *self == Self::Local && !address.ip().to_canonical().is_loopback() {
            return Err(SessionError::NotLoopback { address: Address::of_socket(address).to_string() });
        }
        Ok(())
    }
}
