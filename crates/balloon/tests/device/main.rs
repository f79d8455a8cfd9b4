//! The device driven over real rings in real guest memory. Tests read like a protocol: what the
//! driver sends, what the device returns, and the effect on memory.

#![allow(
    clippy::unwrap_used,
    reason = "clippy.toml allows it in test functions, but not in their helpers"
)]

mod free_pages;
mod hinting;
mod host_request;
mod inflate;
mod initialized;
mod lifecycle;
mod malformed;
mod merged;
mod message_properties;
mod messages;
mod ordering;
mod properties;
mod reporting;
mod statistics;
mod verify;
mod write_log;
