//! Frequencies and the unit conversions between ticks and time.

use core::fmt;
use core::num::{NonZeroU32, NonZeroU64};

/// Nanoseconds in a second.
pub const NS_PER_SECOND: u64 = 1_000_000_000;

/// Nanoseconds in a millisecond, the period of one kilohertz.
const NS_PER_MILLISECOND: u128 = 1_000_000;

/// A frequency in hertz; never zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Hertz(NonZeroU64);

impl Hertz {
    /// `hz` hertz; `None` for zero.
    pub const fn new(hz: u64) -> Option<Self> {
        match NonZeroU64::new(hz) {
            Some(hz) => Some(Self(hz)),
            None => None,
        }
    }

    /// The number of hertz.
    pub const fn get(self) -> u64 {
        self.0.get()
    }
}

impl fmt::Display for Hertz {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{} Hz", self.0)
    }
}

/// A frequency in kilohertz, KVM's unit of TSC frequencies (`KVM_GET_TSC_KHZ`, `KVM_SET_TSC_KHZ`);
/// never zero.
///
/// KVM truncates a frequency to whole kilohertz. The remainder becomes drift: up to 1 ppm at 1 GHz,
/// 86 ms a day.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(transparent))]
pub struct Kilohertz(NonZeroU32);

impl Kilohertz {
    /// `khz` kilohertz; `None` for zero.
    pub const fn new(khz: u32) -> Option<Self> {
        match NonZeroU32::new(khz) {
            Some(khz) => Some(Self(khz)),
            None => None,
        }
    }

    /// The number of kilohertz.
    pub const fn get(self) -> u32 {
        self.0.get()
    }

    /// The same frequency in hertz.
    pub const fn hertz(self) -> Hertz {
        // A product of a non-zero 32-bit number and 1000 is neither zero nor beyond 64 bits.
        match Hertz::new(self.0.get() as u64 * 1000) {
            Some(hertz) => hertz,
            None => unreachable!(),
        }
    }

    /// Whole ticks of this frequency in `ns` nanoseconds, exact and rounded down. `None` beyond 64
    /// bits.
    pub const fn ticks_in_ns(self, ns: u64) -> Option<u64> {
        let ticks = ns as u128 * self.0.get() as u128 / NS_PER_MILLISECOND;
        if ticks > u64::MAX as u128 { None } else { Some(ticks as u64) }
    }

    /// Whole nanoseconds in `ticks` of this frequency, exact and rounded down. `None` beyond 64
    /// bits.
    pub const fn ns_in_ticks(self, ticks: u64) -> Option<u64> {
        let ns = ticks as u128 * NS_PER_MILLISECOND / self.0.get() as u128;
        if ns > u64::MAX as u128 { None } else { Some(ns as u64) }
    }
}

impl fmt::Display for Kilohertz {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{} kHz", self.0)
    }
}
