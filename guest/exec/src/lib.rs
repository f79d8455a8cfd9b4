//! The agent of Linux guests: runs commands and moves files for `ebb exec` and `ebb cp`, over
//! virtio-vsock.
//!
//! Each session has a connection of its own, and carries frames ([`wire`]). The host's side uses
//! the same frames ([`channel`]) and packs and unpacks files in the same way ([`archive`]). Neither
//! side trusts the other: frames and what may wait are bounded, and nothing is written outside of
//! the directory that the person named.

pub mod account;
pub mod archive;
pub mod channel;
pub mod command_line;
pub mod exec;
pub mod fork;
#[cfg(any(test, feature = "testing"))]
pub mod fuzzing;
mod interfaces;
pub mod reseed;
pub mod server;
pub mod transfer;
pub mod wire;
