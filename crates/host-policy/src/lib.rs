//! What a host with many virtual machines does about its memory.
//!
//! - [`snapshot`]: what is known of the host and its machines at one moment.
//! - [`settings`]: what an operator decides.
//! - [`decide()`]: what is to be done, from a snapshot and what is remembered of those before.
//! - [`action`], [`explain`]: what can be done to a machine, and why it is.
//! - [`history`]: what machines have needed, and how many more fit.
//! - [`report`]: documents of a daemon that carries decisions out.
//!
//! Nothing here does I/O or reads a clock: the time is part of a snapshot, and the same snapshots
//! lead to the same decisions.

pub mod action;
pub mod decide;
pub mod explain;
#[cfg(feature = "testing")]
#[doc(hidden)]
pub mod fuzzing;
mod growth;
pub mod history;
pub mod level;
pub mod report;
pub mod settings;
mod shares;
pub mod snapshot;
mod state;
mod trust;

pub use action::{Action, Order};
pub use decide::{Decision, decide};
pub use explain::{Clamp, Explanation, Rule};
pub use growth::is_urgent;
pub use history::{Fit, fit};
pub use level::{Cause, Level};
pub use settings::{Class, Contradiction, Profile, Settings};
pub use snapshot::{Balloon, Host, Machine, Mean, Means, Pressure, Snapshot, Statistics, Swap};
pub use state::State;
pub use trust::Doubt;

/// Bytes of a mebibyte.
pub const MIB: u64 = 1 << 20;
/// Bytes of a gibibyte.
pub const GIB: u64 = 1 << 30;
