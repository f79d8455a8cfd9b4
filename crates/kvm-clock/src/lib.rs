//! KVM's paravirtual clock for monitors, guests and tests.

#![no_std]
#![forbid(unsafe_code)]

#[cfg(feature = "alloc")]
extern crate alloc;
#[cfg(test)]
extern crate std;

pub mod guest_tsc;
#[cfg(feature = "alloc")]
pub mod policy;
pub mod units;

#[cfg(feature = "alloc")]
pub use policy::{ClockError, ClockPlan, ClockPolicy, HostReading, SavedClock, TscScaling};
pub use units::{Hertz, Kilohertz};
