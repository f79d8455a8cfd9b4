//! Merging by the kernel: Linux's KSM, its settings and counters, and its one trust domain.
//!
//! The kernel merges the pages of all processes that asked for it (`madvise(MADV_MERGEABLE)`), by
//! one thread, `ksmd`, with one set of settings for the whole host (Linux
//! Documentation/admin-guide/mm/ksm.rst). It knows no trust domains. So this back end is for
//! virtual machines of *one* domain only, and refuses a second one while a machine of another is
//! there ([`KernelDomain`]).
//!
//! The settings are the host's: a monitor reads them, and whoever runs the host changes them, in
//! the order that [`Ksm::apply`] knows and, for a while only, through a [`KsmGuard`].

pub mod knobs;
pub mod sysfs;

mod change;
mod domain;
mod error;
mod guard;

pub use domain::{KernelDomain, RUN_FOLDER};
pub use error::KsmError;
pub use guard::KsmGuard;
pub use knobs::{Counter, Knob, Values};
pub use sysfs::{Counters, Ksm};

/// Where Linux has the settings.
pub const SYSFS: &str = "/sys/kernel/mm/ksm";

#[cfg(test)]
mod tests;
