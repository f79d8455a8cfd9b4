//! The lab: experiments on real guests, and on the machine itself.
//!
//! An experiment defines the shape of a host, starts guests on it, runs work in them and measures
//! the host's memory. The same code runs directly on a machine with a usable KVM, or in the virtual
//! host (crate `ebb-virtual-host`) elsewhere. The result is one document
//! ([`report::results::Results`]) with a table and a page made from it.

pub mod error;
pub mod experiments;
pub mod harness;
pub mod report;

pub use error::LabError;
