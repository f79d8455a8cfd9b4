//! From ticks to nanoseconds: a multiplication and a shift.
//!
//! A page's factor is `mul / 2^32 * 2^shift` with `mul` in [2^31, 2^32). It is truncated, never
//! rounded up, so that a page's time is never ahead of the exact one: the relative error is in
//! (-2^-31, 0], that is 0.47 ns a second or 40 us a day. Dividing ticks by a power of two (a
//! negative shift) loses up to `2^-shift - 1` ticks more, a constant error.

use crate::guest_tsc::TscRatio;
use crate::units::{Hertz, Kilohertz, NS_PER_SECOND};

/// A factor between ticks of a TSC and nanoseconds (`tsc_to_system_mul` and `tsc_shift`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TscScale {
    /// Multiplier: a binary fraction below 1 with 32 bits.
    pub mul: u32,
    /// Shift of the ticks before the multiplication, to the left when positive.
    pub shift: i8,
}

impl TscScale {
    /// The factor for a TSC of `frequency`: the largest one not above the exact value.
    ///
    /// Defined from 1 Hz to 2^64 - 1 Hz. Linux (`kvm_get_time_scale`) computes the same for
    /// frequencies below 2^32 Hz, and drops bits of the frequency above that.
    pub const fn for_frequency(frequency: Hertz) -> Self {
        Self::for_fraction(frequency.get() as u128, 0)
    }

    /// The factor for a guest's TSC that a host TSC of `host` scales by `ratio`.
    ///
    /// KVM computes it from the scaled frequency in whole kilohertz instead: a guest of 1 GHz on a
    /// host of 2.6 GHz gets the factor of 999999 kHz, and its clock gains 1 ppm, 86 ms a day.
    pub const fn for_scaled(host: Kilohertz, ratio: TscRatio) -> Self {
        Self::for_fraction(host.hertz().get() as u128 * ratio.raw() as u128, ratio.fraction_bits())
    }

    /// The factor for a frequency of `numerator / 2^fraction_bits` hertz, which is not zero.
    ///
    /// `mul = 10^9 * 2^fraction_bits * 2^32 / (numerator * 2^shift)`, for the one shift that brings
    /// it into its range.
    const fn for_fraction(numerator: u128, fraction_bits: u32) -> Self {
        // At most 2^30 * 2^48: far from the end of 128 bits.
        let dividend = (NS_PER_SECOND as u128) << fraction_bits;
        // The shift for which dividend / (numerator * 2^shift) is in [1/2, 1): one more than the
        // difference of both binary logarithms, or that difference itself.
        let mut shift = dividend.ilog2() as i32 - numerator.ilog2() as i32;
        if !less_than_shifted(dividend, numerator, shift) {
            shift += 1;
        }
        Self { mul: shifted_quotient(dividend, numerator, 32 - shift) as u32, shift: shift as i8 }
    }

    /// The frequency that this factor stands for, rounded to the nearest hertz; `None` for a
    /// multiplier of 0 and for frequencies below half a hertz or beyond 64 bits.
    ///
    /// For a factor made by [`Self::for_frequency`] from f the result is in
    /// [f, f + f * 2^-31 + 1/2 Hz].
    pub const fn frequency(self) -> Option<Hertz> {
        if self.mul == 0 || self.shift > 64 || self.shift < -64 {
            return None;
        }
        // 10^9 * 2^32 / (mul * 2^shift), doubled for rounding.
        let numerator = (NS_PER_SECOND as u128) << 33;
        let mul = self.mul as u128;
        let doubled = if self.shift >= 0 {
            numerator / (mul << self.shift)
        } else {
            // At most 2^63 * 2^64.
            (numerator << -self.shift) / mul
        };
        let hertz = doubled.div_ceil(2);
        if hertz > u64::MAX as u128 { None } else { Hertz::new(hertz as u64) }
    }

    /// The frequency in kilohertz, rounded to the nearest; `None` if there is none below 2^32 kHz.
    ///
    /// Exact for a factor made from whole kilohertz up to 1 THz.
    pub const fn kilohertz(self) -> Option<Kilohertz> {
        let Some(hertz) = self.frequency() else { return None };
        let khz = (hertz.get() / 500).div_ceil(2);
        if khz > u32::MAX as u64 { None } else { Kilohertz::new(khz as u32) }
    }

    /// Nanoseconds in `ticks`, rounded down, modulo 2^64; defined for any `mul` and `shift` that
    /// memory may contain.
    ///
    /// Equal to Linux's `pvclock_scale_delta` wherever that does not overflow: the shifted ticks
    /// have 128 bits here.
    pub const fn ns(self, ticks: u64) -> u64 {
        let ticks = ticks as u128;
        let distance = self.shift.unsigned_abs() as u32;
        let shifted = if distance >= 128 {
            0
        } else if self.shift >= 0 {
            ticks << distance
        } else {
            ticks >> distance
        };
        (shifted.wrapping_mul(self.mul as u128) >> 32) as u64
    }
}

/// Whether `left < right * 2^shift`, where the leading bits of both sides are at the same position.
const fn less_than_shifted(left: u128, right: u128, shift: i32) -> bool {
    if shift >= 0 { left < right << shift } else { (left << -shift) < right }
}

/// `dividend * 2^shift / divisor`, rounded down, for a quotient below 2^32; bit by bit where 128
/// bits do not suffice.
const fn shifted_quotient(dividend: u128, divisor: u128, shift: i32) -> u128 {
    if shift < 0 {
        // The shifted quotient has 32 bits, the unshifted one more: the divisor is far below the
        // dividend, and shifting it does not overflow.
        return dividend / (divisor << -shift);
    }
    let mut quotient = dividend / divisor;
    let mut rest = dividend % divisor;
    let mut bit = 0;
    while bit < shift {
        // No overflow: the rest is below the divisor, which has at most 106 bits.
        rest <<= 1;
        quotient <<= 1;
        if rest >= divisor {
            rest -= divisor;
            quotient |= 1;
        }
        bit += 1;
    }
    quotient
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::guest_tsc::FractionBits;
    use proptest::prelude::*;

    fn hz(hz: u64) -> Hertz {
        Hertz::new(hz).unwrap()
    }

    fn khz(khz: u32) -> Kilohertz {
        Kilohertz::new(khz).unwrap()
    }

    #[test]
    fn factors_of_well_known_frequencies() {
        for (frequency, mul, shift) in [
            (1_000_000_000, 1 << 31, 1),
            (2_000_000_000, 1 << 31, 0),
            (2_600_000_000, 3_303_820_996, -1),
            (3_000_000_000, 2_863_311_530, -1),
            (5_000_000_000, 3_435_973_836, -2),
        ] {
            assert_eq!(
                TscScale::for_frequency(hz(frequency)),
                TscScale { mul, shift },
                "{frequency} Hz"
            );
        }
    }

    #[test]
    fn a_second_is_a_second() {
        for frequency in [1_000_000_000u64, 2_000_000_000] {
            assert_eq!(TscScale::for_frequency(hz(frequency)).ns(frequency), NS_PER_SECOND);
        }
        // Truncated, so that a page's time is never ahead.
        assert_eq!(TscScale::for_frequency(hz(2_600_000_000)).ns(2_600_000_000), NS_PER_SECOND - 1);
    }

    #[test]
    fn extreme_frequencies_have_factors() {
        for frequency in [1, 2, 3, u64::MAX / 2, u64::MAX] {
            let scale = TscScale::for_frequency(hz(frequency));
            assert!(scale.mul >= 1 << 31, "{frequency}: {scale:?}");
            assert!(scale.frequency().is_none_or(|back| back.get() >= frequency));
        }
        assert_eq!(TscScale::for_frequency(hz(1)).ns(3), 3 * NS_PER_SECOND);
    }

    #[test]
    fn invalid_factors_have_no_frequency() {
        for (mul, shift) in [(0, 0), (1, 127), (u32::MAX, 64), (1, -128), (1, -64)] {
            assert_eq!(TscScale { mul, shift }.frequency(), None, "{mul} {shift}");
        }
    }

    #[test]
    fn truncated_kilohertz_cost_a_scaled_guest_86_ms_a_day() {
        let day_ns = 86_400 * NS_PER_SECOND;
        let (host, guest) = (khz(2_600_000), khz(1_000_000));
        for fraction in [FractionBits::Amd32, FractionBits::Intel48] {
            let ratio = TscRatio::new(guest, host, fraction).unwrap();
            let ticks = ratio.scale(host.ticks_in_ns(day_ns).unwrap());
            // As in KVM (kvm_guest_time_update): scale the host's kilohertz.
            let truncated = khz(ratio.scale(u64::from(host.get())) as u32);
            assert_eq!(truncated.get(), 999_999);
            let error_ns =
                TscScale::for_frequency(truncated.hertz()).ns(ticks) as i64 - day_ns as i64;
            assert_eq!(error_ns / 1_000_000, 86, "{error_ns}");
            // From the ratio: only the factor's own error remains.
            let error_ns = TscScale::for_scaled(host, ratio).ns(ticks) as i64 - day_ns as i64;
            assert!((-41_000..=0).contains(&error_ns), "{error_ns}");
        }
    }

    fn frequencies() -> impl Strategy<Value = u64> {
        // Logarithmically uniform from 1 kHz to 10 GHz, and around powers of two and their
        // neighbours.
        prop_oneof![
            (10u32..34, any::<u64>()).prop_map(|(bits, noise)| {
                ((1 << bits) | (noise & ((1 << bits) - 1))).clamp(1_000, 10_000_000_000)
            }),
            (10u32..34, 0u64..3).prop_map(|(bits, offset)| (1u64 << bits) - 1 + offset),
        ]
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(4096))]

        /// The multiplier is normalized and is the exact one, truncated: its relative error is in
        /// (-2^-31, 0].
        #[test]
        fn the_factor_has_the_stated_error(frequency in frequencies()) {
            let scale = TscScale::for_frequency(hz(frequency));
            prop_assert!(scale.mul >= 1 << 31);
            // mul <= 10^9 * 2^(32 - shift) / f < mul + 1, without division.
            let exact = u128::from(NS_PER_SECOND) << (32 - i32::from(scale.shift));
            let mul = u128::from(scale.mul);
            prop_assert!(mul * u128::from(frequency) <= exact);
            prop_assert!((mul + 1) * u128::from(frequency) > exact);
        }

        /// Time is never ahead of the exact one, and behind it by less than the sum of its 2^-31st,
        /// the ticks that a right shift drops, and the rounding to nanoseconds.
        #[test]
        fn time_is_never_ahead(frequency in frequencies(), wanted_ns in 0u64..1 << 62) {
            let scale = TscScale::for_frequency(hz(frequency));
            let ticks = (u128::from(wanted_ns) * u128::from(frequency)
                / u128::from(NS_PER_SECOND)) as u64;
            let ns = u128::from(scale.ns(ticks));
            let exact_by_frequency = u128::from(ticks) * u128::from(NS_PER_SECOND);
            prop_assert!(ns * u128::from(frequency) <= exact_by_frequency);
            let dropped_ticks = if scale.shift < 0 { (1u128 << -scale.shift) - 1 } else { 0 };
            let behind = exact_by_frequency - ns * u128::from(frequency);
            let bound = (exact_by_frequency >> 31)
                + dropped_ticks * u128::from(NS_PER_SECOND)
                + u128::from(frequency);
            prop_assert!(behind <= bound, "{} > {}", behind, bound);
        }

        /// The frequency of a factor is not below the original one, above it by at most the stated
        /// bound, and exact for kilohertz.
        #[test]
        fn frequencies_survive_conversion(frequency in frequencies()) {
            let back = TscScale::for_frequency(hz(frequency)).frequency().unwrap().get();
            prop_assert!(back >= frequency);
            let bound = (u128::from(frequency) << 1) + (1 << 31);
            prop_assert!(u128::from(back - frequency) << 32 <= bound);
            let whole = khz((frequency / 1000) as u32);
            prop_assert_eq!(TscScale::for_frequency(whole.hertz()).kilohertz(), Some(whole));
        }

        /// Time never decreases when ticks increase.
        #[test]
        fn time_is_monotonic(
            frequency in frequencies(),
            ticks in 0u64..1 << 55,
            more in 0u64..1 << 20,
        ) {
            let scale = TscScale::for_frequency(hz(frequency.max(1_000_000)));
            prop_assert!(scale.ns(ticks + more) >= scale.ns(ticks));
        }

        /// A scaled guest's factor is as exact as that of its exact frequency, for the ratio
        /// formats of both vendors.
        #[test]
        fn scaled_factors_have_the_stated_error(
            host in 500_000u32..10_000_000,
            guest in 500_000u32..10_000_000,
            fraction in prop::sample::select(&[FractionBits::Amd32, FractionBits::Intel48]),
        ) {
            let ratio = TscRatio::new(khz(guest), khz(host), fraction).unwrap();
            let scale = TscScale::for_scaled(khz(host), ratio);
            prop_assert!(scale.mul >= 1 << 31);
            // A hundred seconds of host ticks; the guest's clock is not ahead of the host's time,
            // and less than 60 ns behind: 47 by the factor, the rest by rounding.
            let host_ticks = u64::from(host) * 100_000;
            let ns = scale.ns(ratio.scale(host_ticks));
            prop_assert!(ns <= 100 * NS_PER_SECOND && ns + 60 > 100 * NS_PER_SECOND, "{}", ns);
        }
    }
}
