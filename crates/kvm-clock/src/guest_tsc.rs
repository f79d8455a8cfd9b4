//! The TSC that a guest reads: the host's, scaled by a fixed-point ratio, plus an offset.
//!
//! `guest = ((host * ratio) >> fraction bits) + offset`, the product in 128 bits and everything else modulo 2^64, as the
//! processor does it (Intel SDM volume 3, "Time-Stamp Counter Offset" and "TSC Multiplier"; AMD APM volume 2, "TSC
//! Ratio MSR") and as Linux computes it (`kvm_scale_tsc`, `kvm_compute_l1_tsc_offset` in arch/x86/kvm/x86.c).

use crate::units::Kilohertz;

/// Digits behind the binary point of a TSC ratio; a property of the processor's maker.
///
/// KVM does not tell user space this number, apart from debugfs (`tsc-scaling-ratio-frac-bits`). It is needed to compute an
/// offset: a ratio cut after 32 bits instead of 48 is up to 2^-32 smaller, which is 0.6 ms of TSC after a month's uptime.
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

    /// The largest ratio that the hardware takes (Linux: `SVM_TSC_RATIO_MAX`, and all 64 bits for VMX).
    const fn largest_ratio(self) -> u64 {
        match self {
            Self::Amd32 => 0x00ff_ffff_ffff,
            Self::Intel48 => u64::MAX,
        }
    }
}

/// Ratio of a guest's TSC frequency to its host's, as the hardware holds it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TscRatio {
    ratio: u64,
    fraction_bits: u32,
}

impl TscRatio {
    /// The guest's TSC runs at the host's frequency.
    pub const ONE: Self = Self { ratio: 1, fraction_bits: 0 };

    /// The ratio that KVM programs for a guest of `guest` on a host of `host` (Linux `kvm_set_tsc_khz`), rounded down.
    ///
    /// `None` when the hardware cannot hold it: zero or beyond its integer part. The relative error of the
    /// guest's frequency is in (-2^-n, 0] for a ratio of 1 and n fraction bits, and grows as the ratio falls.
    pub const fn new(guest: Kilohertz, host: Kilohertz, fraction: FractionBits) -> Option<Self> {
        let ratio = ((guest.get() as u128) << fraction.get()) / host.get() as u128;
        if ratio == 0 || ratio > fraction.largest_ratio() as u128 {
            return None;
        }
        Some(Self { ratio: ratio as u64, fraction_bits: fraction.get() })
    }

    /// Guest ticks for a host's TSC value of `host_tsc`, without the offset; modulo 2^64, as in hardware.
    pub const fn scale(self, host_tsc: u64) -> u64 {
        ((host_tsc as u128 * self.ratio as u128) >> self.fraction_bits) as u64
    }

    /// What a guest with `offset` (`KVM_VCPU_TSC_OFFSET`) reads when the host's TSC is `host_tsc`.
    pub const fn guest_tsc(self, host_tsc: u64, offset: u64) -> u64 {
        self.scale(host_tsc).wrapping_add(offset)
    }

    /// The offset with which a guest reads `guest_tsc` when the host's TSC is `host_tsc`; a two's complement number, as
    /// `KVM_VCPU_TSC_OFFSET` takes it.
    pub const fn offset_for(self, guest_tsc: u64, host_tsc: u64) -> u64 {
        guest_tsc.wrapping_sub(self.scale(host_tsc))
    }
}
