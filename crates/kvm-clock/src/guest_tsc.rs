//! The guest's TSC: the host's, scaled by a fixed-point ratio, plus an offset.
//!
//! `guest = ((host * ratio) >> fraction bits) + offset`, the product in 128 bits and everything
//! else modulo 2^64, as the processor does it (Intel SDM volume 3, "Time-Stamp Counter Offset" and
//! "TSC Multiplier"; AMD APM volume 2, "TSC Ratio MSR") and as Linux computes it (`kvm_scale_tsc`,
//! `kvm_compute_l1_tsc_offset` in arch/x86/kvm/x86.c).

use crate::units::Kilohertz;

/// Number of fraction bits of a TSC ratio; depends on the processor's vendor.
///
/// KVM exports this number only in debugfs (`tsc-scaling-ratio-frac-bits`). It is needed to compute
/// an offset: a ratio truncated to 32 instead of 48 bits is up to 2^-32 smaller, which is 0.6 ms of
/// TSC after a month of uptime.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FractionBits {
    /// AMD SVM: 32 bits, and 8 bits of integer part.
    Amd32,
    /// Intel VMX: 48 bits, and 16 bits of integer part.
    Intel48,
}

impl FractionBits {
    /// The number of fraction bits.
    pub const fn get(self) -> u32 {
        match self {
            Self::Amd32 => 32,
            Self::Intel48 => 48,
        }
    }

    /// The largest ratio that the hardware accepts (Linux: `SVM_TSC_RATIO_MAX`, and all 64 bits for
    /// VMX).
    const fn largest_ratio(self) -> u64 {
        match self {
            Self::Amd32 => 0x00ff_ffff_ffff,
            Self::Intel48 => u64::MAX,
        }
    }
}

/// Ratio of a guest's TSC frequency to its host's, in the hardware's format.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TscRatio {
    ratio: u64,
    fraction_bits: u32,
}

impl TscRatio {
    /// Ratio of an unscaled guest, whose TSC runs at the host's frequency.
    pub const ONE: Self = Self { ratio: 1, fraction_bits: 0 };

    /// The ratio that KVM programs for a guest TSC of `guest` on a host TSC of `host` (Linux
    /// `kvm_set_tsc_khz`), rounded down.
    ///
    /// `None` if the hardware cannot represent it: zero or beyond its integer part. The relative
    /// error of the guest's frequency is in (-2^-n, 0] for a ratio of 1 and n fraction bits, and
    /// grows as the ratio falls.
    pub const fn new(guest: Kilohertz, host: Kilohertz, fraction: FractionBits) -> Option<Self> {
        let ratio = ((guest.get() as u128) << fraction.get()) / host.get() as u128;
        if ratio == 0 || ratio > fraction.largest_ratio() as u128 {
            return None;
        }
        Some(Self { ratio: ratio as u64, fraction_bits: fraction.get() })
    }

    /// The ratio in units of 2^-n, n being [`Self::fraction_bits`].
    pub const fn raw(self) -> u64 {
        self.ratio
    }

    /// Number of fraction bits; 0 for [`Self::ONE`].
    pub const fn fraction_bits(self) -> u32 {
        self.fraction_bits
    }

    /// Guest ticks for a host's TSC value of `host_tsc`, without the offset; modulo 2^64, as in
    /// hardware.
    pub const fn scale(self, host_tsc: u64) -> u64 {
        ((host_tsc as u128 * self.ratio as u128) >> self.fraction_bits) as u64
    }

    /// The TSC of a guest with `offset` (`KVM_VCPU_TSC_OFFSET`) when the host's TSC is `host_tsc`.
    pub const fn guest_tsc(self, host_tsc: u64, offset: u64) -> u64 {
        self.scale(host_tsc).wrapping_add(offset)
    }

    /// The offset with which a guest reads `guest_tsc` when the host's TSC is `host_tsc`; a two's
    /// complement number, as `KVM_VCPU_TSC_OFFSET` takes it.
    pub const fn offset_for(self, guest_tsc: u64, host_tsc: u64) -> u64 {
        guest_tsc.wrapping_sub(self.scale(host_tsc))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn khz(khz: u32) -> Kilohertz {
        Kilohertz::new(khz).unwrap()
    }

    #[test]
    fn ratios_have_the_format_of_the_registers() {
        let ratio =
            |fraction| TscRatio::new(khz(3_000_000), khz(2_000_000), fraction).unwrap().raw();
        assert_eq!(ratio(FractionBits::Amd32), 3 << 31);
        assert_eq!(ratio(FractionBits::Intel48), 3 << 47);
        assert_eq!(TscRatio::ONE.scale(u64::MAX), u64::MAX);
    }

    #[test]
    fn ratios_beyond_the_registers_are_refused() {
        assert_eq!(TscRatio::new(khz(256), khz(1), FractionBits::Amd32), None);
        assert!(TscRatio::new(khz(255), khz(1), FractionBits::Amd32).is_some());
        assert!(TscRatio::new(khz(65_535), khz(1), FractionBits::Intel48).is_some());
        assert_eq!(TscRatio::new(khz(65_536), khz(1), FractionBits::Intel48), None);
    }

    proptest! {
        #[test]
        fn offsets_give_the_requested_guest_tsc(
            guest in 1_000u32..10_000_000,
            host in 1_000_000u32..10_000_000,
            host_tsc in any::<u64>(),
            wanted in any::<u64>(),
        ) {
            for fraction in [FractionBits::Amd32, FractionBits::Intel48] {
                let ratio = TscRatio::new(khz(guest), khz(host), fraction).unwrap();
                let offset = ratio.offset_for(wanted, host_tsc);
                prop_assert_eq!(ratio.guest_tsc(host_tsc, offset), wanted);
            }
        }

        /// Scaled ticks are never ahead of the requested frequency, and behind it by at most 2^-n
        /// of the host's ticks plus one tick.
        #[test]
        fn scaling_has_the_stated_error(
            guest in 100_000u32..10_000_000,
            host in 100_000u32..10_000_000,
            host_tsc in 0u64..1 << 57,
        ) {
            for fraction in [FractionBits::Amd32, FractionBits::Intel48] {
                let ratio = TscRatio::new(khz(guest), khz(host), fraction).unwrap();
                let exact = u128::from(host_tsc) * u128::from(guest) / u128::from(host);
                let scaled = u128::from(ratio.scale(host_tsc));
                prop_assert!(scaled <= exact);
                prop_assert!(exact - scaled <= (u128::from(host_tsc) >> fraction.get()) + 1);
            }
        }
    }
}
