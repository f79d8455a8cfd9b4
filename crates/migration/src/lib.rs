//! Live migration of a virtual machine's memory: pre-copy that skips what the guest does not use.
//!
//! The crate knows neither KVM nor a particular monitor. [`session`] is how two monitors find, trust and understand each
//! other.

pub mod session;
