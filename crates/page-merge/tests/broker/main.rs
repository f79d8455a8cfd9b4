//! The broker of stable pages with real sockets, memory files and processes.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a failing helper is a failing test")]

mod child;
mod cuts;
mod death;
mod descriptors;
mod domains;
mod end_to_end;
mod fuzz_smoke;
mod hostile;
mod machine;
mod raw;
mod restart;
mod sealed;
mod sharing;
mod support;
