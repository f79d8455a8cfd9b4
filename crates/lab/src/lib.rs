//! The lab: experiments on real guests, and on the machine itself.
//!
//! An experiment gives a host its shape, starts guests on it, lets them work and measures what the
//! host has left. It runs the same code directly on a machine whose KVM serves, or in the virtual
//! host (crate `ebb-virtual-host`) elsewhere. What it finds is one document ([`report::results::Results`])
//! with a table and a page made from it.

pub mod error;
pub mod experiments;
pub mod harness;
pub mod report;

pub use error::LabError;
