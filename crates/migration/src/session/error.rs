//! What can go wrong with a session, in words for the operator.

use std::fmt;
use std::io;
use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use thiserror::Error;

use super::message::MessageKind;

/// Longest reason that is kept of what the other side says.
const LONGEST_REASON_CHARACTERS: usize = 2000;

/// A reason in the words of the other side: of bounded length and without control characters, so
/// that it can be printed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "String", into = "String")]
pub struct Reason(String);

impl From<String> for Reason {
    fn from(text: String) -> Self {
        Self(printable(&text, LONGEST_REASON_CHARACTERS))
    }
}

impl From<&str> for Reason {
    fn from(text: &str) -> Self {
        text.to_owned().into()
    }
}

impl From<Reason> for String {
    fn from(reason: Reason) -> Self {
        reason.0
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.0.is_empty() { "no reason given" } else { &self.0 })
    }
}

/// At most `longest` characters of `text`, with a space for every control character.
pub(super) fn printable(text: &str, longest: usize) -> String {
    text.chars().take(longest).map(|c| if c.is_control() { ' ' } else { c }).collect()
}

/// Why a session did not come about, or ended.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum SessionError {
    /// The name or address of the other side leads nowhere.
    #[error("{address} cannot be found: {source}; check the name, or write the address in numbers")]
    NotFound {
        /// What was asked.
        address: String,
        /// What the resolver said.
        source: io::Error,
    },
    /// Nobody answers there.
    #[error(
        "{address} cannot be reached: {source}; check that `ebb receive` listens there and that no packet filter is in between"
    )]
    Unreachable {
        /// What was asked.
        address: String,
        /// What the system said.
        source: io::Error,
    },
    /// TCP without encryption, which was not asked for in words.
    #[error(
        "{address} is a TCP address, and without TLS anyone on the way, or who takes the port, could read and change the guest's memory; give --tls-cert, --tls-key, --tls-ca and --peer-name, use unix:PATH, or --insecure if all users of this host and of the network are trusted"
    )]
    Unencrypted {
        /// What was asked.
        address: String,
    },
    /// TLS was asked for on a unix socket.
    #[error(
        "TLS is for tcp: addresses; {address} is protected by the user's id: leave --tls-* away"
    )]
    TlsOverUnix {
        /// What was asked.
        address: String,
    },
    /// The destination cannot listen.
    #[error("cannot listen on {address}: {what}: {source}; choose another address")]
    Listen {
        /// What was asked.
        address: String,
        /// What was attempted.
        what: &'static str,
        /// What the system said.
        source: io::Error,
    },
    /// The destination cannot listen at a path.
    #[error(transparent)]
    ListenUnix(#[from] ebb_local_io::ListenError),
    /// The process at the other end of a unix socket belongs to somebody else.
    #[error(
        "the process at {address} belongs to user {theirs}, and only those of user {ours} and of root are trusted; run both as the same user"
    )]
    ForeignUser {
        /// The socket.
        address: String,
        /// Its user.
        theirs: u32,
        /// Who runs this process.
        ours: u32,
    },
    /// A certificate or key file cannot be used.
    #[error("{option} {path:?} cannot be used: {problem}")]
    TlsFile {
        /// The option that named it.
        option: &'static str,
        /// The file.
        path: PathBuf,
        /// Why, and what to do.
        problem: String,
    },
    /// A destination with TLS that would take a machine from everybody with a certificate.
    #[error(
        "--peer-name is missing: without it, every holder of a certificate of the authorities could send a machine; give the name in the source's certificate"
    )]
    NoPeerName,
    /// This side does not accept the other side's certificate.
    #[error("this side refuses the certificate of {peer}: {problem}")]
    CertificateRefusedHere {
        /// The other side.
        peer: String,
        /// Why, and what to do.
        problem: String,
    },
    /// The other side does not accept this side's certificate.
    #[error("{peer} refuses the certificate of this side: {problem}")]
    CertificateRefusedThere {
        /// The other side.
        peer: String,
        /// What it said, and what to do.
        problem: String,
    },
    /// TLS failed otherwise.
    #[error("TLS with {peer} failed: {problem}")]
    Tls {
        /// The other side.
        peer: String,
        /// What was found.
        problem: String,
    },
    /// Something else than Ebb answers.
    #[error(
        "{peer} does not speak Ebb's migration protocol: {found}; check the address, and whether both sides use TLS"
    )]
    NotEbb {
        /// The other side.
        peer: String,
        /// What it sent.
        found: String,
    },
    /// Another version of the protocol.
    #[error(
        "{peer} speaks version {theirs} of the migration protocol, this side version {ours}; use the same release of Ebb on both sides"
    )]
    Version {
        /// The other side.
        peer: String,
        /// Its version.
        theirs: u16,
        /// This side's.
        ours: u16,
    },
    /// A wait has lasted too long.
    #[error("{peer} let this side wait for more than {} s {waiting_for}", limit.as_secs_f64())]
    TimedOut {
        /// The other side.
        peer: String,
        /// For what.
        waiting_for: &'static str,
        /// How long.
        limit: Duration,
    },
    /// The connection has ended.
    #[error("the connection to {peer} has ended {doing}: {problem}")]
    Cut {
        /// The other side.
        peer: String,
        /// During what.
        doing: &'static str,
        /// What the system said.
        problem: String,
    },
    /// The destination does not take the machine.
    #[error("{peer} refuses the machine: {reason}")]
    Refused {
        /// The destination.
        peer: String,
        /// Why.
        reason: Reason,
    },
    /// The other side has ended the session.
    #[error("{peer} has ended the migration: {reason}")]
    Aborted {
        /// The other side.
        peer: String,
        /// Why.
        reason: Reason,
    },
    /// The destination could not take the machine over; it has ended and will never run it.
    #[error("{peer} could not take over: {reason}")]
    Failed {
        /// The destination.
        peer: String,
        /// Why.
        reason: Reason,
    },
    /// A message that has no place there.
    #[error(
        "{peer} sent {found} {doing}, which has no place there; use the same release of Ebb on both sides"
    )]
    Unexpected {
        /// The other side.
        peer: String,
        /// Which.
        found: MessageKind,
        /// During what.
        doing: &'static str,
    },
    /// A message that cannot be read.
    #[error(
        "{peer} sent something that cannot be read: {problem}; use the same release of Ebb on both sides"
    )]
    Malformed {
        /// The other side.
        peer: String,
        /// What is wrong.
        problem: String,
    },
    /// What this side has to say does not fit.
    #[error("{kind} of {bytes} bytes is longer than the {limit} bytes that the protocol allows")]
    TooLong {
        /// Which message.
        kind: MessageKind,
        /// Its length.
        bytes: usize,
        /// The longest possible.
        limit: usize,
    },
    /// Data streams outside of what is possible.
    #[error("{asked} data streams were asked for; 1 to {most} are possible")]
    Streams {
        /// How many were asked.
        asked: u16,
        /// The most.
        most: u16,
    },
    /// File descriptors can only go through a unix socket.
    #[error(
        "memory can be handed over only through a unix: address, and {peer} is none; copy it, or use unix:PATH on both sides"
    )]
    NoDescriptors {
        /// The other side.
        peer: String,
    },
    /// Cancelled on this side.
    #[error("the migration was cancelled")]
    Cancelled,
    /// Nobody came.
    #[error("no source has come to {address} within {} s", limit.as_secs_f64())]
    NobodyCame {
        /// Where this side listens.
        address: String,
        /// How long.
        limit: Duration,
    },
    /// The system refused something.
    #[error("cannot {what}: {source}")]
    System {
        /// What was attempted.
        what: &'static str,
        /// What the system said.
        source: io::Error,
    },
}

impl SessionError {
    pub(super) fn system(what: &'static str) -> impl FnOnce(rustix::io::Errno) -> Self {
        move |errno| Self::System { what, source: errno.into() }
    }
}
