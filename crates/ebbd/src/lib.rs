//! `ebbd`: decides what a host does about the memory of its virtual machines, whatever monitors run
//! them.
//!
//! - [`monitors`]: what a monitor says about its machine, and how it carries out an action.
//! - [`clock`]: the clock of snapshots.
//! - [`rights`]: what clients may do.
//! - [`metrics`] and [`web`]: what scrapers and browsers get.
//!
//! What is decided is in the crate `ebb-host-policy`, which does no I/O.

pub mod admission;
pub mod api;
pub mod clients;
pub mod clock;
pub mod common;
pub mod config;
pub mod engine;
pub mod fleet;
#[cfg(any(test, feature = "testing"))]
#[doc(hidden)]
pub mod fuzzing;
pub mod host;
pub mod ksm;
pub mod metrics;
pub mod monitors;
pub mod program;
pub mod rights;
mod service;
pub mod store;
pub mod watchdog;
pub mod web;
