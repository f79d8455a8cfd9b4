//! KVM's paravirtual clock, for monitors, guests and tests.
//!
//! KVM gives each vCPU of a guest a page with a time, the guest TSC of that instant, and a factor
//! between ticks and nanoseconds; the guest adds the TSC ticks since then. This crate implements
//! that clock without the kernel: the layout, the arithmetic, both sides of the protocol, the
//! settings after a pause or a restore, and a model of a host that simulates weeks of drift in an
//! instant. It contains no ioctl and no unsafe code.
//!
//! | module | purpose |
//! | --- | --- |
//! | [`page`] | the two structures shared by host and guest, their registers and flags |
//! | [`scale`] | conversion between frequency and factor |
//! | [`guest_tsc`] | the TSC of a guest with another frequency than its host |
//! | [`units`] | frequencies, and conversion between ticks and time |
//! | [`protocol`] | writing and reading a page in any memory: guest, atomics, model checker |
//! | [`reader`] | a guest's monotonic clock: time, stability and age |
//! | [`policy`] | KVM's clock and each vCPU's TSC after a pause or a restore |
//! | [`model`] | the clocks of a host and of its guests, with and without the bug of 2020 |
//!
//! # Exactness
//!
//! All arithmetic is on integers.
//! - A factor's relative error is in (-2^-31, 0]: a page's time is never ahead of the exact one,
//!   and loses at most 0.47 ns a second. Property-tested from 1 kHz to 10 GHz.
//! - Conversions between ticks and time are exact and rounded down, in 128 bits.
//! - Over a pause the vCPUs' TSCs and KVM's clock advance by the same time, to less than a tick.
//!
//! # Writing and reading a page
//!
//! ```
//! use core::sync::atomic::AtomicU64;
//! use ebb_kvm_clock::protocol::{AtomicTimePage, Stability, StopNotice, TimeUpdate, write_time};
//! use ebb_kvm_clock::scale::TscScale;
//! use ebb_kvm_clock::{Kilohertz, Reader};
//!
//! let page = AtomicTimePage::default();
//! let update = TimeUpdate {
//!     tsc_timestamp: 5_200_000_000,
//!     system_time_ns: 2_000_000_000,
//!     scale: TscScale::for_frequency(Kilohertz::new(2_600_000).unwrap().hertz()),
//!     stability: Stability::Stable,
//! };
//! write_time(&page, &update, StopNotice::Keep);
//!
//! // Shared by the readers of all vCPUs.
//! let latest = AtomicU64::new(0);
//! let reading = Reader::new(&page, &latest).read(|| 5_200_002_600);
//! assert_eq!((reading.time_ns, reading.age_ns), (2_000_000_999, 999));
//! ```
//!
//! # Features
//!
//! - `alloc` (default): [`policy`] and [`model`], which need a heap. Without it the crate needs
//!   only `core`.
//! - `serde`: serialization of saved clocks and policies.
//!
//! # Sources
//!
//! Linux: Documentation/virt/kvm/x86/msr.rst, Documentation/virt/kvm/devices/vcpu.rst section 4,
//! arch/x86/kvm/x86.c, arch/x86/kernel/pvclock.c. The bug: Paolo Bonzini, "KVM: x86: do not mix raw
//! and monotonic clocks in kvmclock", January 2020.

#![no_std]
#![forbid(unsafe_code)]

#[cfg(feature = "alloc")]
extern crate alloc;
#[cfg(test)]
extern crate std;

pub mod guest_tsc;
#[cfg(feature = "alloc")]
pub mod model;
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
