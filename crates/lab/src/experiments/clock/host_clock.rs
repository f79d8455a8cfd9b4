//! Reading two clocks as simultaneously as possible.

use std::convert::Infallible;

use rustix::time::{ClockId, clock_gettime};

/// Number of attempts at a reading, of which the shortest one counts.
const ATTEMPTS: u32 = 50;
const NS_PER_SECOND: i64 = 1_000_000_000;

/// A clock of the host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum HostClock {
    Raw,
    Monotonic,
    Boottime,
    Realtime,
}

impl HostClock {
    /// The clocks that KVM's clock may advance with.
    pub(super) const ALL: [Self; 3] = [Self::Raw, Self::Monotonic, Self::Boottime];

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Raw => "CLOCK_MONOTONIC_RAW",
            Self::Monotonic => "CLOCK_MONOTONIC",
            Self::Boottime => "CLOCK_BOOTTIME",
            Self::Realtime => "CLOCK_REALTIME",
        }
    }

    pub(super) fn now_ns(self) -> i64 {
        let now = clock_gettime(match self {
            Self::Raw => ClockId::MonotonicRaw,
            Self::Monotonic => ClockId::Monotonic,
            Self::Boottime => ClockId::Boottime,
            Self::Realtime => ClockId::Realtime,
        });
        now.tv_sec * NS_PER_SECOND + now.tv_nsec
    }
}

/// How far a clock is ahead of another one, and the precision.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Ahead {
    pub(super) ns: i64,
    /// Maximum error of `ns`: half of the time between the two readings of the other clock.
    pub(super) uncertainty_ns: i64,
}

impl Ahead {
    /// The result for a value read between two readings of the other clock.
    pub(super) fn between(before_ns: i64, value_ns: i64, after_ns: i64) -> Self {
        let uncertainty_ns = (after_ns - before_ns + 1) / 2;
        Self { ns: value_ns - (before_ns + uncertainty_ns), uncertainty_ns }
    }

    /// The best of several attempts at reading `value` between two readings of `clock`.
    pub(super) fn of<E>(
        clock: HostClock,
        mut value: impl FnMut() -> Result<i64, E>,
    ) -> Result<Self, E> {
        let mut once = || {
            let before_ns = clock.now_ns();
            let value_ns = value()?;
            Ok(Self::between(before_ns, value_ns, clock.now_ns()))
        };
        let mut best = once()?;
        for _ in 1..ATTEMPTS {
            let next = once()?;
            if next.uncertainty_ns < best.uncertainty_ns {
                best = next;
            }
        }
        Ok(best)
    }

    /// How far `CLOCK_MONOTONIC` is ahead of `CLOCK_MONOTONIC_RAW` at present.
    pub(super) fn of_monotonic() -> Self {
        let Ok(ahead) =
            Self::of(HostClock::Raw, || Ok::<_, Infallible>(HostClock::Monotonic.now_ns()));
        ahead
    }

    /// The change since an earlier reading.
    pub(super) fn since(self, earlier: Self) -> Self {
        Self {
            ns: self.ns - earlier.ns,
            uncertainty_ns: self.uncertainty_ns + earlier.uncertainty_ns,
        }
    }

    pub(super) fn shown(self) -> String {
        format!("{:+} ns (to within {} ns)", self.ns, self.uncertainty_ns)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_read_between_two_readings_is_known_to_half_the_time_between() {
        let read = Ahead::between(1000, 5060, 1100);
        assert_eq!(read, Ahead { ns: 4010, uncertainty_ns: 50 });
        let later = Ahead { ns: 4100, uncertainty_ns: 30 };
        assert_eq!(later.since(read), Ahead { ns: 90, uncertainty_ns: 80 });
    }

    #[test]
    fn a_clock_is_not_ahead_of_itself() {
        let Ok(read) = Ahead::of(HostClock::Raw, || Ok::<_, Infallible>(HostClock::Raw.now_ns()));
        assert!(read.ns.abs() <= read.uncertainty_ns, "{read:?}");
    }
}
