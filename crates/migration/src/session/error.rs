//! Errors of a session, worded for the operator.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use thiserror::Error;

use super::message::MessageKind;
use super::reason::Reason;

/// Why a session could not be established, or ended.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum SessionError {
    /// The name or address of the other side cannot be resolved.
    #[error("{address} cannot be found: {source}; check the name, or write the address in numbers")]
    NotFound {
        /// The address.
        address: String,
        /// Error of the resolver.
        source: io::Error,
    },
    /// Nothing answers at the address.
    #[error(
        "{address} cannot be reached: {source}; check that `ebb receive` listens there and that no \
         packet filter is in between"
    )]
    Unreachable {
        /// The address.
        address: String,
        /// Error of the system.
        source: io::Error,
    },
    /// TCP without encryption, which was not requested explicitly.
    #[error(
        "{address} is a TCP address: without TLS, anyone on the network path, or any process that \
         takes the port, could read and change the guest's memory; give --tls-cert, --tls-key, \
         --tls-ca and --peer-name, use unix:PATH, or --insecure if all users of this host and of \
         the network are trusted"
    )]
    Unencrypted {
        /// The address.
        address: String,
    },
    /// TLS was requested on a unix socket.
    #[error(
        "TLS is for tcp: addresses; {address} is protected by the user id: omit the --tls options"
    )]
    TlsOverUnix {
        /// The address.
        address: String,
    },
    /// The destination cannot listen.
    #[error("cannot listen on {address}: {what}: {source}; choose another address")]
    Listen {
        /// The address.
        address: String,
        /// Operation, for the message.
        what: &'static str,
        /// Error of the system.
        source: io::Error,
    },
    /// The destination cannot listen at a path.
    #[error(transparent)]
    ListenUnix(#[from] ebb_local_io::ListenError),
    /// The process at the other end of a unix socket belongs to another user.
    #[error(
        "the process at {address} belongs to user {theirs}, but only processes of user {ours} and \
         of root are trusted; run both as the same user"
    )]
    ForeignUser {
        /// The socket.
        address: String,
        /// User id of that process.
        theirs: u32,
        /// User id of this process.
        ours: u32,
    },
    /// A certificate or key file cannot be used.
    #[error("{option} {path:?} cannot be used: {problem}")]
    TlsFile {
        /// The option that named it.
        option: &'static str,
        /// The file.
        path: PathBuf,
        /// Reason, and what to do.
        problem: String,
    },
    /// A destination with TLS that would accept a machine from any holder of a certificate.
    #[error(
        "--peer-name is missing: without it, every holder of a certificate of the authorities \
         could send a machine; give the name in the source's certificate"
    )]
    NoPeerName,
    /// This side does not accept the other side's certificate.
    #[error("this side refuses the certificate of {peer}: {problem}")]
    CertificateRefusedHere {
        /// The other side.
        peer: String,
        /// Reason, and what to do.
        problem: String,
    },
    /// The other side does not accept this side's certificate.
    #[error("{peer} refuses the certificate of this side: {problem}")]
    CertificateRefusedThere {
        /// The other side.
        peer: String,
        /// Its reason, and what to do.
        problem: String,
    },
    /// TLS failed otherwise.
    #[error("TLS with {peer} failed: {problem}")]
    Tls {
        /// The other side.
        peer: String,
        /// Problem found.
        problem: String,
    },
    /// Another program than Ebb answers.
    #[error(
        "{peer} does not speak Ebb's migration protocol: {found}; check the address, and whether \
         both sides use TLS"
    )]
    NotEbb {
        /// The other side.
        peer: String,
        /// Description of the bytes it sent.
        found: String,
    },
    /// The other side speaks another version of the protocol.
    #[error(
        "{peer} speaks version {theirs} of the migration protocol, this side version {ours}; use \
         the same release of Ebb on both sides"
    )]
    Version {
        /// The other side.
        peer: String,
        /// Its version.
        theirs: u16,
        /// This side's.
        ours: u16,
    },
    /// A wait has timed out.
    #[error("{peer} timed out after {} s {waiting_for}", limit.as_secs_f64())]
    TimedOut {
        /// The other side.
        peer: String,
        /// Operation that timed out.
        waiting_for: &'static str,
        /// Time limit.
        limit: Duration,
    },
    /// The connection has ended.
    #[error("the connection to {peer} has ended {doing}: {problem}")]
    Cut {
        /// The other side.
        peer: String,
        /// Operation during which it happened.
        doing: &'static str,
        /// Error of the system.
        problem: String,
    },
    /// The destination refuses the machine.
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
    /// A message that is not valid at this point.
    #[error(
        "{peer} sent {found} {doing}, which is not valid there; use the same release of Ebb on \
         both sides"
    )]
    Unexpected {
        /// The other side.
        peer: String,
        /// The message.
        found: MessageKind,
        /// Operation during which it happened.
        doing: &'static str,
    },
    /// A message that cannot be parsed.
    #[error(
        "{peer} sent something that cannot be parsed: {problem}; use the same release of Ebb on \
         both sides"
    )]
    Malformed {
        /// The other side.
        peer: String,
        /// Parse error.
        problem: String,
    },
    /// A message of this side that is too long.
    #[error("{kind} of {bytes} bytes is longer than the {limit} bytes that the protocol allows")]
    TooLong {
        /// Which message.
        kind: MessageKind,
        /// Its length.
        bytes: usize,
        /// The longest possible.
        limit: usize,
    },
    /// An invalid number of data streams.
    #[error("{asked} data streams were requested; 1 to {most} are possible")]
    Streams {
        /// Number requested.
        asked: u16,
        /// Largest number.
        most: u16,
    },
    /// File descriptors can be sent only over a unix socket.
    #[error(
        "memory can be handed over only through a unix: address, and {peer} is not one; copy it, \
         or use unix:PATH on both sides"
    )]
    NoDescriptors {
        /// The other side.
        peer: String,
    },
    /// No sockets for a control connection and a data stream.
    #[error("a migration needs at least two connected sockets, for control and for memory")]
    TooFewSockets,
    /// Cancelled on this side.
    #[error("the migration was cancelled")]
    Cancelled,
    /// No source has connected in time.
    #[error("no source has connected to {address} within {} s", limit.as_secs_f64())]
    NobodyCame {
        /// Address of this listener.
        address: String,
        /// Time limit.
        limit: Duration,
    },
    /// A system call failed.
    #[error("cannot {what}: {source}")]
    System {
        /// Operation, for the message.
        what: &'static str,
        /// Error of the system.
        source: io::Error,
    },
}

impl SessionError {
    pub(super) fn system(what: &'static str) -> impl FnOnce(rustix::io::Errno) -> Self {
        move |errno| Self::System { what, source: errno.into() }
    }
}
