//! The lab: experiments on real guests.
//!
//! An experiment gives a host its shape, starts guests on it, lets them work and measures what the host has left.
//! It runs the same code directly on a machine whose KVM serves, or in the virtual host (crate `ebb-virtual-host`)
//! elsewhere. What it finds is one document ([`results::Results`]) with a table and a page made from it.

pub mod error;
pub mod output;
pub mod plot;
pub mod proc;
pub mod report;
pub mod results;
pub mod statistics;
pub mod table;

pub use error::LabError;
