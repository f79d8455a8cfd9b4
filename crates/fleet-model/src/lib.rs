//! Traces of machines' work, and a model of the host that runs them, to try memory policies on.
//!
//! - [`trace`]: what machines do, made from a seed.
//! - [`strategy`]: what a policy is, and the naive ones.
//! - [`simulation`]: a host that runs a trace under a policy.
//! - [`incidents`]: what has gone wrong elsewhere.

mod guest;
mod host;
pub mod incidents;
mod random;
pub mod simulation;
pub mod strategy;
pub mod trace;

pub use guest::{Equipment, Troubles};
pub use host::HostShape;
pub use simulation::{Moment, Outcome, Simulation};
pub use strategy::Strategy;
pub use trace::{Recipe, Trace};

/// A step of a simulation, in milliseconds.
pub const STEP_MS: u64 = 100;
