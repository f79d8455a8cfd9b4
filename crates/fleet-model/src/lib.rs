//! Traces of machines' work, and a model of the host that runs them, to try memory policies on.
//!
//! - [`trace`]: what machines do, made from a seed.

mod random;
pub mod trace;

pub use trace::{Recipe, Trace};
