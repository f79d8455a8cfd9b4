//! KVM's paravirtual clock for monitors, guests and tests.

#![no_std]
#![forbid(unsafe_code)]

#[cfg(feature = "alloc")]
extern crate alloc;
#[cfg(test)]
extern crate std;

pub mod guest_tsc;
pub mod page;
#[cfg(feature = "alloc")]
pub mod policy;
pub mod protocol;
pub mod reader;
pub mod scale;
pub mod units;

#[cfg(feature = "alloc")]
pub use policy::{ClockError, ClockPlan, ClockPolicy, HostReading, SavedClock, TscScaling};
pub use reader::Reader;
pub use units::{Hertz, Kilohertz};
