//! The connection of two monitors: how they find, trust and understand each other, and which of
//! them runs the guest in the end.
//!
//! A destination listens ([`Listener`]), a source connects ([`connect`]): over TCP, plain on
//! loopback and with mutual TLS 1.3 elsewhere, or over a unix socket between processes of one user.
//! A control connection carries messages in frames; memory goes over data streams, connections of
//! their own that join the session by its random id.
//!
//! Each side is a row of types, one for each step, so that a step cannot be left out or done twice:
//!
//! | source | destination |
//! | --- | --- |
//! | [`connect`] | [`Listener::accept`] |
//! | [`SourceSession::setup`] | [`DestinationSession::setup`] (both in [`Listener::receive_setup`]), [`DestinationSetup::accept`] or [`refuse`](DestinationSetup::refuse) |
//! | [`SourceAccepted::send_descriptors`] (unix sockets) | [`DestinationAccepted::receive_descriptors`] |
//! | [`SourceAccepted::open_streams`] | [`DestinationAccepted::join`] |
//! | [`SourceStreaming::wait_round_done`] | [`DestinationStreaming::round_done`] |
//! | [`SourceStreaming::send_state`] | [`DestinationStreaming::receive_state`] |
//! | [`SourcePrepared::commit`] | [`DestinationRestoring::ready`] |
//! | [`Outcome`] | [`DestinationCommitted::running`] or [`failed`](DestinationCommitted::failed) |
//!
//! A method that consumes its step and fails has told the other side and closed the connection. A
//! method that borrows it leaves that to the caller, who calls `abort` with a reason.
//!
//! # Exactly one of the two runs the guest
//!
//! Until the source has written its decision, the guest is the source's, and whatever goes wrong,
//! it runs on there. From then on it is the destination's, and the source runs it again only if the
//! destination says in so many words that it has not and never will. If the connection is cut in
//! between, the source cannot know: [`Outcome::Unknown`], with the guest paused until an operator
//! has looked. The destination runs the guest only if it has read the decision.
//!
//! # Time
//!
//! Every wait has a limit ([`TimeLimits`]), and ends at once when the session is cancelled
//! ([`CancelHandle`]). There is no runtime and no thread in here: sockets are non-blocking, and
//! waits are ppoll(2) on the socket and the handle's event.

mod address;
mod cancel;
mod candidate;
mod connection;
mod control;
mod descriptors;
mod destination;
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
mod refusals;
mod security;
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
pub use error::{Reason, SessionError};
pub use limits::TimeLimits;
pub use listener::Listener;
pub use message::{Greeting, LARGE_BYTES, MOST_DESCRIPTORS, MessageKind};
pub use preamble::{MOST_STREAMS, PROTOCOL_VERSION};
pub use refusals::Refusals;
pub use security::{Security, TlsFiles};
pub use source::{
    Outcome, SourceAccepted, SourcePrepared, SourceSession, SourceStreaming, connect,
};
