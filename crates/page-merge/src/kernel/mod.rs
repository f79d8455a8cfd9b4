//! Merging by the kernel: Linux's KSM, its settings and its users.
//!
//! The kernel merges the pages of all processes that asked for it (`madvise(MADV_MERGEABLE)`), by
//! one thread, `ksmd`, with one set of settings for the whole host (Linux
//! Documentation/admin-guide/mm/ksm.rst). It knows no trust domains. So this back end is for
//! virtual machines of *one* domain only, and refuses a second one while a user of another is
//! there.
//!
//! | module | what |
//! | --- | --- |
//! | [`knobs`] | the settings, by name |
//! | [`sysfs`] | reading and writing the files, which are opened once |
//! | [`change`] | the order in which settings may be changed, pure |
//! | [`users`] | who uses it: a file that also keeps what the settings were before |
//!
//! Everything is opened when a [`Ksm`] and a [`KsmUsers`] are made; settings can be changed and put
//! back later by a thread that has no privileges any more.

pub mod change;
pub mod knobs;
pub mod sysfs;
pub mod users;

mod error;
mod record;

pub use change::Step;
pub use error::KsmError;
pub use knobs::{Counter, Knob, Values};
pub use sysfs::{Counters, Ksm};
pub use users::{KsmUsers, Membership};

/// Where Linux has the settings.
pub const SYSFS: &str = "/sys/kernel/mm/ksm";

#[cfg(test)]
mod tests;
