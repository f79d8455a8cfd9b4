//! Merging with exhausted resources.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a failing helper is a failing test")]

mod child;
mod memory;
mod run_folder;
