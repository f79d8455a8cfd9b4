//! Merging by the kernel: Linux's KSM, its settings and counters, and its one trust domain.
//!
//! The kernel merges the pages of all processes that asked for it (`madvise(MADV_MERGEABLE)`), with
//! one thread, `ksmd`, and one set of settings for the whole host (Linux
//! Documentation/admin-guide/mm/ksm.rst). It has no trust domains. So this back end is for virtual
//! machines of *one* domain only, and refuses a second domain while a machine of another one exists
//! ([`KernelDomain`]).
//!
//! The settings belong to the host: a monitor reads them, and the operator of the host changes
//! them, in the order that [`Ksm::apply`] implements and, temporarily, through a [`KsmGuard`].

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

/// Directory of the settings.
pub const SYSFS: &str = "/sys/kernel/mm/ksm";

#[cfg(test)]
mod tests;
