//! Address of a destination: `tcp:HOST:PORT` or `unix:PATH`.

use std::fmt;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, ToSocketAddrs};
use std::path::{Path, PathBuf};
use std::str::FromStr;

use thiserror::Error;

/// Longest path of a unix socket: `sun_path` without its closing zero (unix(7)).
pub const LONGEST_UNIX_PATH_BYTES: usize = 107;

/// Longest host name (RFC 1035 section 2.3.4).
const LONGEST_HOST_BYTES: usize = 253;

/// Syntax, for messages.
const SYNTAX: &str = "write tcp:HOST:PORT, tcp:[IPV6]:PORT or unix:PATH";

/// Address at which a destination listens.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Address {
    /// `tcp:HOST:PORT`.
    Tcp {
        /// A name or a numeric address, without brackets.
        host: String,
        /// The port; 0 when listening means any free one.
        port: u16,
    },
    /// `unix:PATH`.
    Unix {
        /// The socket's path.
        path: PathBuf,
    },
}

/// A text that is not an address.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum AddressError {
    /// Neither `tcp:` nor `unix:`.
    #[error("the address {text:?} begins with neither tcp: nor unix:; {SYNTAX}")]
    Kind {
        /// The text.
        text: String,
    },
    /// No port after the host.
    #[error("the address {text:?} has no port; {SYNTAX}")]
    NoPort {
        /// The text.
        text: String,
    },
    /// The port is not a number from 0 to 65535.
    #[error("the port {port:?} in {text:?} is not a number from 0 to 65535; {SYNTAX}")]
    Port {
        /// The text.
        text: String,
        /// Its port.
        port: String,
    },
    /// The host is empty, too long, or has invalid characters.
    #[error("the host {host:?} in {text:?} is not valid: {problem}; {SYNTAX}")]
    Host {
        /// The text.
        text: String,
        /// Its host.
        host: String,
        /// Reason.
        problem: &'static str,
    },
    /// The path is empty, too long, or has a zero byte.
    #[error("the path in {text:?} is not valid for a socket: {problem}; choose another one")]
    Path {
        /// The text.
        text: String,
        /// Reason.
        problem: &'static str,
    },
}

impl Address {
    /// Returns the socket addresses of a TCP address. Numeric addresses and `localhost` need no
    /// resolver, and so no system call.
    pub(super) fn resolve(host: &str, port: u16) -> io::Result<Vec<SocketAddr>> {
        if let Ok(ip) = host.parse::<IpAddr>() {
            return Ok(vec![SocketAddr::new(ip, port)]);
        }
        if host.eq_ignore_ascii_case("localhost") {
            let both = [IpAddr::V4(Ipv4Addr::LOCALHOST), IpAddr::V6(Ipv6Addr::LOCALHOST)];
            return Ok(both.map(|ip| SocketAddr::new(ip, port)).to_vec());
        }
        let found: Vec<_> = (host, port).to_socket_addrs()?.collect();
        if found.is_empty() {
            return Err(io::Error::new(io::ErrorKind::NotFound, "the name has no address"));
        }
        Ok(found)
    }

    /// Converts the address of a TCP socket.
    pub(super) fn of_socket(address: SocketAddr) -> Self {
        Self::Tcp { host: address.ip().to_string(), port: address.port() }
    }

    /// Makes the path of a unix address absolute, relative to `folder`; other addresses stay as
    /// they are. For a client that passes an address to a process with another working directory.
    #[must_use]
    pub fn absolute(self, folder: &Path) -> Self {
        match self {
            Self::Unix { path } => Self::Unix { path: folder.join(path) },
            tcp @ Self::Tcp { .. } => tcp,
        }
    }
}

impl FromStr for Address {
    type Err = AddressError;

    fn from_str(text: &str) -> Result<Self, AddressError> {
        if let Some(rest) = text.strip_prefix("tcp:") {
            parse_tcp(text, rest)
        } else if let Some(path) = text.strip_prefix("unix:") {
            parse_unix(text, path)
        } else {
            Err(AddressError::Kind { text: text.to_owned() })
        }
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp { host, port } if host.contains(':') => write!(f, "tcp:[{host}]:{port}"),
            Self::Tcp { host, port } => write!(f, "tcp:{host}:{port}"),
            Self::Unix { path } => write!(f, "unix:{}", path.display()),
        }
    }
}

fn parse_tcp(text: &str, rest: &str) -> Result<Address, AddressError> {
    let no_port = || AddressError::NoPort { text: text.to_owned() };
    let bad_host = |host: &str, problem| AddressError::Host {
        text: text.to_owned(),
        host: host.to_owned(),
        problem,
    };
    let (host, port) = if let Some(bracketed) = rest.strip_prefix('[') {
        let (host, after) =
            bracketed.split_once(']').ok_or_else(|| bad_host(rest, "a ] is missing"))?;
        host.parse::<Ipv6Addr>()
            .map_err(|_| bad_host(host, "only an IPv6 address may be in brackets"))?;
        (host, after.strip_prefix(':').ok_or_else(no_port)?)
    } else {
        let (host, port) = rest.rsplit_once(':').ok_or_else(no_port)?;
        if host.contains(':') {
            return Err(bad_host(host, "an IPv6 address must be in brackets"));
        }
        (host, port)
    };
    if host.is_empty() {
        return Err(bad_host(host, "it is empty"));
    }
    if host.len() > LONGEST_HOST_BYTES {
        return Err(bad_host(host, "it is longer than 253 bytes"));
    }
    let fits = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_' | ':');
    if !host.chars().all(fits) {
        return Err(bad_host(
            host,
            "it has characters other than letters, digits, dots and dashes",
        ));
    }
    // `parse` would accept a plus sign.
    let number = Some(port).filter(|port| port.bytes().all(|byte| byte.is_ascii_digit()));
    let port = number
        .and_then(|port| port.parse().ok())
        .ok_or_else(|| AddressError::Port { text: text.to_owned(), port: port.to_owned() })?;
    Ok(Address::Tcp { host: host.to_owned(), port })
}

fn parse_unix(text: &str, path: &str) -> Result<Address, AddressError> {
    let problem = if path.is_empty() {
        "it is empty"
    } else if path.len() > LONGEST_UNIX_PATH_BYTES {
        "it is longer than 107 bytes"
    } else if path.contains('\0') {
        "it has a zero byte"
    } else {
        return Ok(Address::Unix { path: path.into() });
    };
    Err(AddressError::Path { text: text.to_owned(), problem })
}

#[cfg(test)]
mod tests;
