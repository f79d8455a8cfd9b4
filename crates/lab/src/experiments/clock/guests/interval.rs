//! Times that are known to lie between two bounds, and samples of guests' clocks from outside.

use std::time::Instant;

use ebb_agent::clock::ClockReading;

use super::super::host_clock::{Ahead, HostClock};
use crate::harness::guest::Answer;

/// A time in ns that is somewhere between two bounds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Interval {
    pub(super) low_ns: i64,
    pub(super) high_ns: i64,
}

impl Interval {
    /// An exactly known time.
    pub(super) const ZERO: Self = Self { low_ns: 0, high_ns: 0 };

    /// An interval between these two times, in any order.
    pub(super) fn between(one_ns: i64, other_ns: i64) -> Self {
        Self { low_ns: one_ns.min(other_ns), high_ns: one_ns.max(other_ns) }
    }

    pub(super) fn plus(self, other: Self) -> Self {
        Self { low_ns: self.low_ns + other.low_ns, high_ns: self.high_ns + other.high_ns }
    }

    pub(super) fn minus(self, other: Self) -> Self {
        Self { low_ns: self.low_ns - other.high_ns, high_ns: self.high_ns - other.low_ns }
    }

    /// Whether the interval contains this time.
    pub(super) fn holds(self, ns: i64) -> bool {
        self.low_ns <= ns && ns <= self.high_ns
    }

    /// The best estimate.
    pub(super) fn middle_ns(self) -> i64 {
        i64::midpoint(self.low_ns, self.high_ns)
    }

    /// Maximum error of the estimate.
    pub(super) fn uncertainty_ns(self) -> i64 {
        (self.high_ns - self.low_ns + 1) / 2
    }

    /// Minimum distance from zero.
    pub(super) fn surely_ns(self) -> i64 {
        self.low_ns.max(-self.high_ns).max(0)
    }

    /// Maximum distance from zero.
    pub(super) fn at_most_ns(self) -> i64 {
        self.high_ns.max(-self.low_ns)
    }
}

/// Intersection of intervals of the same time.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Known(Option<(i64, i64)>);

impl Known {
    /// Adds an interval.
    pub(super) fn add(&mut self, next: Interval) {
        let (low_ns, high_ns) = self.0.unwrap_or((next.low_ns, next.high_ns));
        self.0 = Some((low_ns.max(next.low_ns), high_ns.min(next.high_ns)));
    }

    /// The resulting interval. If some intervals contradict others, the time was not steady, and
    /// the result covers the range between them. `None` without any.
    pub(super) fn interval(self) -> Option<Interval> {
        self.0.map(|(low_ns, high_ns)| Interval::between(low_ns, high_ns))
    }
}

/// The host's clocks relative to the clock of this process.
#[derive(Debug, Clone, Copy)]
pub(super) struct HostTimes {
    base: Instant,
    /// How far the time since `base` is ahead of the host's clocks.
    raw: Ahead,
    real: Ahead,
}

impl HostTimes {
    /// Reads them. The result is valid for some seconds: the host's clocks may be slewed against
    /// each other.
    pub(super) fn read(base: Instant) -> Self {
        let ahead_of = |clock| {
            let Ok(ahead) = Ahead::of(clock, || {
                Ok::<_, std::convert::Infallible>(ns_between(base, Instant::now()))
            });
            ahead
        };
        Self { base, raw: ahead_of(HostClock::Raw), real: ahead_of(HostClock::Realtime) }
    }

    /// `CLOCK_MONOTONIC_RAW` at this time.
    pub(super) fn raw(self, at: Instant) -> Interval {
        Interval::between(ns_between(self.base, at), ns_between(self.base, at))
            .minus(bounds(self.raw))
    }
}

fn bounds(ahead: Ahead) -> Interval {
    Interval::between(ahead.ns - ahead.uncertainty_ns, ahead.ns + ahead.uncertainty_ns)
}

/// Time from one instant to a later one.
pub(super) fn ns_between(from: Instant, to: Instant) -> i64 {
    i64::try_from(to.saturating_duration_since(from).as_nanos()).unwrap_or(i64::MAX)
}

/// A sample of a guest's clocks relative to the host's.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Look {
    /// The host's time, in seconds since the series began.
    pub(super) at_s: f64,
    /// How far the guest's `CLOCK_MONOTONIC` is ahead of the host's `CLOCK_MONOTONIC_RAW`.
    pub(super) monotonic: Interval,
    /// How far the guest's `CLOCK_REALTIME` is ahead of the host's.
    pub(super) real: Interval,
    /// Whether it was read in the guest's memory, not over its console.
    pub(super) seen: bool,
    /// The smallest reading of the guest's `CLOCK_MONOTONIC`.
    pub(super) smallest_ns: i64,
}

impl Look {
    /// A sample from readings over the console, each with the times between which it was made, and
    /// from the guest's memory if that could be read. `None` without readings.
    pub(super) fn from(
        host: HostTimes,
        readings: &[(ClockReading, Answer)],
        seen: Option<Interval>,
    ) -> Option<Self> {
        let mut asked = Known::default();
        for (reading, answer) in readings {
            let guest_ns = reading.monotonic_ns.cast_signed();
            asked.add(Interval::between(
                guest_ns - ns_between(host.base, answer.answered),
                guest_ns - ns_between(host.base, answer.sent),
            ));
        }
        let ahead = seen.or_else(|| asked.interval())?;
        let (last, real) =
            (readings.last()?, readings.iter().map(|(reading, _)| real_time(reading)));
        Some(Self {
            at_s: ns_between(host.base, last.1.answered) as f64 / 1e9,
            monotonic: ahead.plus(bounds(host.raw)),
            real: ahead.plus(real.min_by_key(|ahead| ahead.high_ns)?).plus(bounds(host.real)),
            seen: seen.is_some(),
            smallest_ns: readings
                .iter()
                .map(|(reading, _)| reading.monotonic_ns.cast_signed())
                .min()?,
        })
    }
}

/// How far a guest's real time is ahead of its monotonic time, which was read before it: too large
/// by at most the duration of the reading.
fn real_time(reading: &ClockReading) -> Interval {
    let ahead_ns = reading.realtime_ns.cast_signed() - reading.monotonic_ns.cast_signed();
    let ticks = reading.tsc_after.saturating_sub(reading.tsc);
    // No processor of today counts slower.
    let khz = reading.tsc_khz.unwrap_or(1_000_000).max(1);
    let took_ns = ticks.saturating_mul(1_000_000) / khz;
    Interval::between(ahead_ns - took_ns.cast_signed(), ahead_ns)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::time::Duration;

    /// A reading of a guest's clock with the times of its request and answer.
    fn reading(
        base: Instant,
        guest_ns: i64,
        sent_us: u64,
        answered_us: u64,
    ) -> (ClockReading, Answer) {
        let clock = ClockReading {
            monotonic_ns: guest_ns.cast_unsigned(),
            realtime_ns: guest_ns.cast_unsigned() + 1_000,
            tsc: 10,
            tsc_after: 10,
            ..ClockReading::take()
        };
        let answer = Answer {
            sent: base + Duration::from_micros(sent_us),
            answered: base + Duration::from_micros(answered_us),
            elapsed: Duration::ZERO,
            waited: Duration::from_micros(answered_us - sent_us),
            result: serde_json::Value::Null,
        };
        (clock, answer)
    }

    fn exact(base: Instant) -> HostTimes {
        let same = Ahead { ns: 0, uncertainty_ns: 0 };
        HostTimes { base, raw: same, real: same }
    }

    #[test]
    fn combined_readings_are_more_precise_than_each() {
        let base = Instant::now();
        // The guest is 5 ms ahead. One command was slow on its way in, one answer on its way out.
        let slow_in = reading(base, 5_000_000 + 3_000_000, 0, 3_100);
        let slow_out = reading(base, 5_000_000 + 10_200_000, 10_000, 14_000);
        let look = Look::from(exact(base), &[slow_in, slow_out], None).unwrap();
        assert_eq!(look.monotonic, Interval { low_ns: 4_900_000, high_ns: 5_200_000 });
        assert_eq!(look.monotonic.uncertainty_ns(), 150_000);
        assert_eq!(look.real.minus(look.monotonic).middle_ns(), 1_000);
        let seen = Interval { low_ns: 4_990_000, high_ns: 5_010_000 };
        let readings = [reading(base, 8_000_000, 0, 4_000)];
        assert_eq!(Look::from(exact(base), &readings, Some(seen)).unwrap().monotonic, seen);
        assert_eq!(Look::from(exact(base), &[], Some(seen)), None);
    }

    #[test]
    fn an_unsteady_clock_has_an_interval_that_covers_all_readings() {
        let base = Instant::now();
        let readings = [reading(base, 1_000_000, 0, 100), reading(base, 3_000_000, 1_000, 1_100)];
        let look = Look::from(exact(base), &readings, None).unwrap();
        assert_eq!(look.monotonic, Interval { low_ns: 1_000_000, high_ns: 1_900_000 });
    }

    #[test]
    fn the_hosts_clocks_are_those_of_the_system() {
        let host = HostTimes::read(Instant::now());
        let (before_ns, at) = (HostClock::Raw.now_ns(), Instant::now());
        let raw = host.raw(at);
        assert!(raw.high_ns >= before_ns, "{raw:?} {before_ns}");
        assert!(raw.low_ns <= HostClock::Raw.now_ns(), "{raw:?}");
    }

    #[test]
    fn the_minimum_distance_is_zero_for_intervals_around_zero() {
        let surely = |low_ns, high_ns| Interval { low_ns, high_ns }.surely_ns();
        assert_eq!([surely(-5, 7), surely(3, 7), surely(-9, -4)], [0, 3, 4]);
        assert_eq!(Interval { low_ns: -9, high_ns: -4 }.at_most_ns(), 9);
    }

    proptest! {
        #[test]
        fn sums_and_differences_contain_those_of_all_values(
            a in -1_000_i64..1_000, b in 0_i64..1_000, c in -1_000_i64..1_000, d in 0_i64..1_000,
            x in 0.0..1.0_f64, y in 0.0..1.0_f64,
        ) {
            let (one, other) = (Interval::between(a, a + b), Interval::between(c + d, c));
            let (p, q) = (a + (b as f64 * x) as i64, c + (d as f64 * y) as i64);
            let holds =
                |interval: Interval, value| interval.low_ns <= value && value <= interval.high_ns;
            prop_assert!(holds(one.plus(other), p + q) && holds(one.minus(other), p - q));
            prop_assert!((one.middle_ns() - p).abs() <= one.uncertainty_ns());
            prop_assert!(one.surely_ns() <= p.abs() && p.abs() <= one.at_most_ns());
        }

        /// The bounds contain a steady clock for any delay of commands and answers.
        #[test]
        fn a_steady_clock_is_found(
            ahead_ns in 0_i64..1_000_000_000,
            ways in prop::collection::vec((0_u64..5_000, 0_u64..5_000), 1..10),
        ) {
            let base = Instant::now();
            let readings: Vec<_> = ways.iter().zip(0_u64..).map(|((there_us, back_us), number)| {
                let sent_us = number * 20_000;
                let guest_ns = ahead_ns + 1_000 * (sent_us + there_us).cast_signed();
                reading(base, guest_ns, sent_us, sent_us + there_us + back_us)
            }).collect();
            let found = Look::from(exact(base), &readings, None).unwrap().monotonic;
            prop_assert!(found.low_ns <= ahead_ns && ahead_ns <= found.high_ns, "{found:?}");
        }
    }
}
