//! Merging of guest memory by the process that owns it, on the kernel that runs the tests.
//!
//! Kernels without the required features (Linux before 6.8) are recognized by the library's errors;
//! nothing is tested there.

#![allow(clippy::unwrap_used, reason = "a test")]

mod absent;
mod coalesce_vmas;
mod common;
mod huge;
mod mappings;
mod move_shares;
mod pinned;
mod reanonymize;
mod refused;
mod replace;
mod stress;
mod waiting;
