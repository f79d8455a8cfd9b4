//! The lab: experiments on real guests, and on the machine itself.
//!
//! An experiment gives a host its shape, starts guests on it, lets them work and measures what the
//! host has left. It runs the same code directly on a machine whose KVM serves, or in the virtual
//! host (crate `ebb-virtual-host`) elsewhere. What it finds is one document ([`results::Results`])
//! with a table and a page made from it.

pub mod assets;
pub mod balloon;
pub mod bench;
pub mod clock;
pub mod console;
pub mod counters;
pub mod density;
pub mod direct;
pub mod drawing;
pub mod driver;
pub mod error;
pub mod event;
pub mod experiment;
pub mod faults;
pub mod figures;
pub mod free_pages;
pub mod guest;
pub mod host;
pub mod in_virtual_host;
pub mod inflate;
pub mod link;
pub mod memhog;
pub mod merge_speed;
pub mod merging;
pub mod migrate;
pub mod monitor;
pub mod numa_merge;
pub mod output;
pub mod place;
pub mod plot;
pub mod proc;
pub mod progress;
pub mod qmp;
pub mod report;
pub mod results;
pub mod run;
pub mod sampler;
pub mod statistics;
pub mod survey;
pub mod table;
pub mod watch;

pub use error::LabError;
