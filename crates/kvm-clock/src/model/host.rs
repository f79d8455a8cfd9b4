//! The host's clocks.

use crate::units::{Kilohertz, NS_PER_SECOND};

/// The whole in parts per billion.
const WHOLE_PPB: u64 = NS_PER_SECOND;
/// A tick in units of nanoseconds times kilohertz times parts per billion.
const TICK: u128 = 1_000_000 * WHOLE_PPB as u128;

/// Clock source of a host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ClockSource {
    /// The TSC: `CLOCK_MONOTONIC_RAW` is the TSC divided by its nominal frequency, errors included.
    Tsc,
    /// Another source, for example the HPET, with which KVM uses no master clock.
    Other {
        /// Frequency error in parts in 10^9; positive if it runs faster than true time.
        error_ppb: i64,
    },
}

/// Behaviour of the TSC during suspend.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TscInSuspend {
    /// It keeps counting.
    RunsOn,
    /// It restarts from 0 when the host wakes.
    Resets,
}

/// A count and its fractional remainder.
#[derive(Clone, Copy, Debug, Default)]
struct Counter {
    count: u64,
    rest: u128,
}

impl Counter {
    /// Adds `parts / whole`.
    fn add(&mut self, parts: u128, whole: u128) {
        let parts = self.rest + parts;
        self.count = self.count.wrapping_add((parts / whole) as u64);
        self.rest = parts % whole;
    }
}

/// All clocks of a host. See [`crate::model`].
#[derive(Clone, Debug)]
pub struct HostClock {
    tsc_khz: Kilohertz,
    tsc_error_ppb: i64,
    tsc: Counter,
    source: ClockSource,
    /// The TSC and the raw clock when the TSC last became the clock source or the host last woke.
    tsc_base: u64,
    raw_base_ns: u64,
    raw_ns: Counter,
    slew_ppb: i64,
    monotonic_ns: Counter,
    suspended_ns: u64,
    realtime_at_boot_ns: i64,
}

impl HostClock {
    /// Real time at boot: a second in January 2020.
    const BOOT_REALTIME_NS: i64 = 1_579_702_953 * NS_PER_SECOND as i64;

    pub(super) const fn new(tsc_khz: Kilohertz) -> Self {
        const ZERO: Counter = Counter { count: 0, rest: 0 };
        Self {
            tsc_khz,
            tsc_error_ppb: 0,
            tsc: ZERO,
            source: ClockSource::Tsc,
            tsc_base: 0,
            raw_base_ns: 0,
            raw_ns: ZERO,
            slew_ppb: 0,
            monotonic_ns: ZERO,
            suspended_ns: 0,
            realtime_at_boot_ns: Self::BOOT_REALTIME_NS,
        }
    }

    /// The TSC's nominal frequency.
    pub const fn tsc_khz(&self) -> Kilohertz {
        self.tsc_khz
    }

    /// The TSC.
    pub const fn tsc(&self) -> u64 {
        self.tsc.count
    }

    /// The clock source.
    pub const fn source(&self) -> ClockSource {
        self.source
    }

    /// `CLOCK_MONOTONIC_RAW`: the clock source since boot, without the time suspended.
    pub const fn raw_ns(&self) -> u64 {
        self.raw_ns.count
    }

    /// `CLOCK_MONOTONIC`: the slewed raw clock.
    pub const fn monotonic_ns(&self) -> u64 {
        self.monotonic_ns.count
    }

    /// D: the lead of `CLOCK_MONOTONIC` over `CLOCK_MONOTONIC_RAW`.
    pub const fn drift_ns(&self) -> i64 {
        self.monotonic_ns().wrapping_sub(self.raw_ns()).cast_signed()
    }

    /// Time suspended since boot.
    pub const fn suspended_ns(&self) -> u64 {
        self.suspended_ns
    }

    /// `CLOCK_BOOTTIME`: `CLOCK_MONOTONIC` plus the time suspended.
    pub const fn boottime_ns(&self) -> u64 {
        self.monotonic_ns() + self.suspended_ns
    }

    /// The raw clock plus the time suspended: the base of KVM's clock (`get_kvmclock_base_ns`).
    pub const fn raw_boottime_ns(&self) -> u64 {
        self.raw_ns() + self.suspended_ns
    }

    /// `CLOCK_REALTIME`, in nanoseconds since 1970; 0 before that.
    pub const fn realtime_ns(&self) -> u64 {
        self.boottime_ns().saturating_add_signed(self.realtime_at_boot_ns)
    }

    /// `CLOCK_REALTIME - CLOCK_BOOTTIME` (`getboottime64`).
    pub(super) const fn realtime_at_boot_ns(&self) -> i64 {
        self.realtime_at_boot_ns
    }

    pub(super) fn advance(&mut self, ns: u64) {
        self.advance_tsc(ns);
        let before_ns = self.raw_ns();
        match self.source {
            ClockSource::Tsc => {
                let ticks = self.tsc().wrapping_sub(self.tsc_base);
                // 64 bits of nanoseconds are 584 years.
                let ns = self.tsc_khz.ns_in_ticks(ticks).unwrap_or(u64::MAX);
                self.raw_ns.count = self.raw_base_ns.saturating_add(ns);
            }
            ClockSource::Other { error_ppb } => {
                self.raw_ns.add(u128::from(ns) * parts(error_ppb), u128::from(WHOLE_PPB));
            }
        }
        let raw_ns = self.raw_ns() - before_ns;
        self.monotonic_ns.add(u128::from(raw_ns) * parts(self.slew_ppb), u128::from(WHOLE_PPB));
    }

    fn advance_tsc(&mut self, ns: u64) {
        self.tsc
            .add(u128::from(ns) * u128::from(self.tsc_khz.get()) * parts(self.tsc_error_ppb), TICK);
    }

    pub(super) fn set_slew_ppb(&mut self, ppb: i64) {
        self.slew_ppb = ppb;
    }

    pub(super) fn set_tsc_error_ppb(&mut self, ppb: i64) {
        self.tsc_error_ppb = ppb;
    }

    pub(super) fn step_realtime(&mut self, ns: i64) {
        self.realtime_at_boot_ns = self.realtime_at_boot_ns.saturating_add(ns);
    }

    pub(super) fn set_clock_source(&mut self, source: ClockSource) {
        self.source = source;
        self.rebase();
    }

    pub(super) fn suspend(&mut self, ns: u64, tsc: TscInSuspend) {
        match tsc {
            TscInSuspend::RunsOn => self.advance_tsc(ns),
            TscInSuspend::Resets => self.tsc = Counter::default(),
        }
        self.suspended_ns += ns;
        self.rebase();
    }

    /// Rebases the raw clock so that it continues from its present value.
    fn rebase(&mut self) {
        self.tsc_base = self.tsc();
        self.raw_base_ns = self.raw_ns();
    }
}

/// The factor `1 + ppb / 10^9` in parts in 10^9; 0, which stops the clock, if it would be negative.
fn parts(ppb: i64) -> u128 {
    u128::from(WHOLE_PPB.saturating_add_signed(ppb))
}
