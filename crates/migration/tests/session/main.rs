//! Sessions over real sockets on this host.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a failing helper is a failing test")]

mod certificates;
mod cuts;
mod drive;
mod encrypted;
mod fuzz_smoke;
mod local;
mod proxy;
mod reasons;
mod remnants;
mod sockets;
mod strangers;

/// As in the program `ebb`.
#[global_allocator]
static ALLOCATOR: ebb_migration::ClearingAllocator = ebb_migration::ClearingAllocator;
