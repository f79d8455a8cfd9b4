//! A simulated guest for tests, benchmarks and fuzz targets.
//!
//! [`World`] is the guest, its driver for free page hinting, its balloon, the dirty log and the
//! monitor's devices. All of them act whenever the engine accesses memory or the log, in an order
//! that depends on a seed.

mod dirty;
mod link;
mod target;
mod world;

pub use dirty::NoWrites;
pub use link::{Cut, Link, Wire, link};
pub use target::TestTarget;
pub use world::{
    Activity, Hooks, Random, SimDirty, SimGuest, SimHints, SimMemory, Use, World, page_bytes,
};
