//! Merging of guest memory by the process that owns it, on the kernel that runs the tests.
//!
//! Kernels without what it takes (Linux before 6.8) are told apart by what the library says; there
//! is nothing to test then.

#![allow(clippy::unwrap_used, reason = "a test")]

mod coalesce_vmas;
mod common;
mod huge;
mod mappings;
mod pinned;
mod reanonymize;
mod refused;
mod replace;
mod stress;
mod waiting;
