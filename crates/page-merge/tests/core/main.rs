//! The core on a simulated host: counts, rules and invariants.
#![allow(clippy::unwrap_used, clippy::needless_for_each)]

mod counts;
mod huge;
mod model;
mod outcomes;
mod renewed;
mod steady;
mod support;
mod switching;
mod worker;
