//! The session between two monitors: addresses, authentication, protocol, and the decision which of
//! them runs the guest.
//!
//! A destination listens ([`Listener`]), a source connects ([`dial`], [`connect`]): over TCP with
//! mutual TLS 1.3, or over a unix socket between processes of one user. A control connection carries
//! messages in frames; memory is sent over data streams, separate connections that join the session
//! by its random id. All are made before the first message, perhaps by another process than the
//! source: a monitor needs no right to connect. Data connections stay silent until the machine is
//! accepted.
//!
//! Each side is a sequence of types, one per step, so that a step can be neither skipped nor
//! repeated:
//!
//! | source | destination |
//! | --- | --- |
//! | [`dial`], [`connect`] | [`Listener::accept`] |
//! | [`SourceSession::setup`] | [`DestinationSession::setup`] (both in [`Listener::receive_setup`]), [`DestinationSetup::accept`] or [`refuse`](DestinationSetup::refuse) |
//! | [`SourceAccepted::send_descriptors`] (unix sockets) | [`DestinationAccepted::receive_descriptors`] |
//! | [`SourceAccepted::open_streams`] | [`DestinationAccepted::join`] |
//! | [`SourceStreaming::wait_round_done`] | [`DestinationStreaming::round_done`] |
//! | [`SourceStreaming::send_state`] | [`DestinationStreaming::receive_state`] |
//! | [`SourcePrepared::commit`] | [`DestinationRestoring::ready`] |
//! | [`Outcome`] | [`DestinationCommitted::running`] or [`failed`](DestinationCommitted::failed) |
//!
//! A method that consumes its step and fails has sent the reason to the other side and closed the
//! connection. A method that borrows it leaves that to the caller, which calls `abort` with a
//! reason.
//!
//! # Exactly one of the two runs the guest
//!
//! Until the source has written its decision, the guest belongs to the source and continues there
//! after any failure. From then on it belongs to the destination, and the source resumes it only if
//! the destination reports explicitly that it has not run it and never will. If the connection is
//! cut in between, the source cannot know: [`Outcome::Unknown`], with the guest paused until an
//! operator has checked the destination. The destination runs the guest only if it has read the
//! decision.
//!
//! # Time
//!
//! Every wait has a limit ([`TimeLimits`]), and ends at once when the session is cancelled
//! ([`CancelHandle`]). This module uses neither an async runtime nor threads: sockets are
//! non-blocking, and waits are ppoll(2) on the socket and the handle's event.

mod address;
mod cancel;
mod candidate;
mod connection;
mod control;
mod descriptors;
mod destination;
mod dial;
mod error;
#[cfg(feature = "testing")]
#[doc(hidden)]
pub mod fuzzing;
mod intake;
mod limits;
mod listener;
mod message;
mod preamble;
mod protocol;
mod reason;
mod refusals;
mod security;
mod session_id;
mod source;
mod tls;
mod users;
mod wire;

pub use address::{Address, AddressError, LONGEST_UNIX_PATH_BYTES};
pub use cancel::{CancelHandle, Cancellation};
pub use connection::{Connection, ShutdownHandle};
pub use destination::{
    DestinationAccepted, DestinationCommitted, DestinationRestoring, DestinationSession,
    DestinationSetup, DestinationStreaming,
};
pub use dial::dial;
pub use error::SessionError;
pub use limits::TimeLimits;
pub use listener::Listener;
pub use message::{Greeting, LARGE_BYTES, MOST_DESCRIPTORS, MessageKind};
pub use preamble::{MOST_STREAMS, PROTOCOL_VERSION};
pub use reason::Reason;
pub use refusals::Refusals;
pub use security::{Security, TlsFile, TlsFiles};
pub use source::{
    Outcome, SourceAccepted, SourcePrepared, SourceSession, SourceStreaming, connect,
};
