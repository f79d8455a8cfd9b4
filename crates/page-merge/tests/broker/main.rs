//! The broker of stable pages with real sockets, memory files and processes.

#![allow(missing_docs)]

mod child;
mod cuts;
mod death;
mod domains;
mod fuzz_smoke;
mod hostile;
mod raw;
mod restart;
mod sealed;
mod sharing;
mod support;
