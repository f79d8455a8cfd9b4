//! What a host with many virtual machines does about its memory.
//!
//! - [`snapshot`]: what is known of the host and its machines at one moment.
//! - [`action`]: what can be done to a machine.
//!
//! Nothing here does I/O or reads a clock: the time is part of a snapshot.

pub mod action;
pub mod snapshot;

pub use action::{Action, Order};
pub use snapshot::{Balloon, Host, Machine, Mean, Means, Pressure, Snapshot, Statistics, Swap};

/// Bytes of a mebibyte.
pub const MIB: u64 = 1 << 20;
/// Bytes of a gibibyte.
pub const GIB: u64 = 1 << 30;
