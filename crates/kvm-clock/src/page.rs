//! The memory that KVM shares with a guest: one time page a vCPU, and a wall clock.
//!
//! Both structures are little-endian, as x86 is. The guest chooses their addresses and writes them
//! to model-specific registers (Linux, Documentation/virt/kvm/x86/msr.rst;
//! arch/x86/include/asm/pvclock-abi.h).

use core::mem::{align_of, offset_of, size_of};

use crate::scale::TscScale;

/// MSR for the address of the wall clock; on a write KVM fills in the structure
/// (`MSR_KVM_WALL_CLOCK_NEW`).
pub const MSR_WALL_CLOCK: u32 = 0x4b56_4d00;

/// MSR for the address of a vCPU's time page; bit 0 enables it (`MSR_KVM_SYSTEM_TIME_NEW`).
pub const MSR_SYSTEM_TIME: u32 = 0x4b56_4d01;

/// The bit of [`MSR_SYSTEM_TIME`] that enables the page.
pub const SYSTEM_TIME_ENABLE: u64 = 1;

/// Size of [`VcpuTimeInfo`] in bytes.
pub const TIME_PAGE_BYTES: usize = 32;

/// Size of [`WallClock`] in bytes.
pub const WALL_CLOCK_BYTES: usize = 12;

/// Bits of [`VcpuTimeInfo::flags`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[repr(transparent)]
pub struct TimeFlags(pub u8);

impl TimeFlags {
    /// No flags.
    pub const NONE: Self = Self(0);
    /// Times read on different vCPUs can be compared (`PVCLOCK_TSC_STABLE_BIT`). Without it a
    /// reader has to clamp its time to the latest that any vCPU has seen.
    pub const TSC_STABLE: Self = Self(1);
    /// The monitor paused the vCPU (`PVCLOCK_GUEST_STOPPED`): watchdogs should ignore the time
    /// since. The guest clears it.
    pub const GUEST_STOPPED: Self = Self(2);

    /// Whether all bits of `other` are set.
    #[must_use]
    pub const fn contains(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }

    /// The bits in either.
    #[must_use]
    pub const fn union(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// The bits in both.
    #[must_use]
    pub const fn intersection(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }
}

/// A vCPU's time page (`struct pvclock_vcpu_time_info`).
///
/// Time in nanoseconds is `system_time_ns + scale(tsc - tsc_timestamp)`; see
/// [`VcpuTimeInfo::time_ns`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct VcpuTimeInfo {
    /// Odd while the host writes; a new even number after each write.
    pub version: u32,
    /// Unused.
    pub padding0: u32,
    /// Guest TSC at the instant of [`Self::system_time_ns`].
    pub tsc_timestamp: u64,
    /// The clock at that instant, modulo 2^64.
    pub system_time_ns: u64,
    /// Multiplier of [`TscScale`].
    pub tsc_to_system_mul: u32,
    /// Shift of [`TscScale`].
    pub tsc_shift: i8,
    /// State of the clock.
    pub flags: TimeFlags,
    /// Unused.
    pub padding1: [u8; 2],
}

const _: () = {
    assert!(size_of::<VcpuTimeInfo>() == TIME_PAGE_BYTES);
    assert!(align_of::<VcpuTimeInfo>() == 8);
    assert!(offset_of!(VcpuTimeInfo, version) == 0);
    assert!(offset_of!(VcpuTimeInfo, tsc_timestamp) == 8);
    assert!(offset_of!(VcpuTimeInfo, system_time_ns) == 16);
    assert!(offset_of!(VcpuTimeInfo, tsc_to_system_mul) == 24);
    assert!(offset_of!(VcpuTimeInfo, tsc_shift) == 28);
    assert!(offset_of!(VcpuTimeInfo, flags) == 29);
    assert!(offset_of!(VcpuTimeInfo, padding1) == 30);
};

impl VcpuTimeInfo {
    /// The factor between ticks and nanoseconds.
    pub const fn scale(&self) -> TscScale {
        TscScale { mul: self.tsc_to_system_mul, shift: self.tsc_shift }
    }

    /// Nanoseconds from the page's timestamp to `tsc`; 0 if `tsc` is before it.
    ///
    /// Guests compute without this lower bound: a TSC slightly behind the timestamp makes their
    /// time jump by centuries.
    pub const fn age_ns(&self, tsc: u64) -> u64 {
        let ticks = tsc.wrapping_sub(self.tsc_timestamp);
        if ticks.cast_signed() < 0 { 0 } else { self.scale().ns(ticks) }
    }

    /// The time at `tsc`, modulo 2^64 as guests compute it: a negative time reads as a very late
    /// one.
    pub const fn time_ns(&self, tsc: u64) -> u64 {
        self.system_time_ns.wrapping_add(self.age_ns(tsc))
    }

    /// Encodes the page as in memory.
    pub fn to_bytes(&self) -> [u8; TIME_PAGE_BYTES] {
        let mut bytes = [0; TIME_PAGE_BYTES];
        for (bytes, word) in bytes.chunks_exact_mut(4).zip(self.to_words()) {
            bytes.copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }

    /// Decodes a page from memory.
    pub fn from_bytes(bytes: &[u8; TIME_PAGE_BYTES]) -> Self {
        let mut words = [0; TIME_PAGE_BYTES / 4];
        for (word, bytes) in words.iter_mut().zip(bytes.as_chunks::<4>().0) {
            *word = u32::from_le_bytes(*bytes);
        }
        Self::from_words(words)
    }

    /// Encodes the page as eight little-endian words.
    pub(crate) const fn to_words(self) -> [u32; TIME_PAGE_BYTES / 4] {
        let last = self.padding1;
        [
            self.version,
            self.padding0,
            self.tsc_timestamp as u32,
            (self.tsc_timestamp >> 32) as u32,
            self.system_time_ns as u32,
            (self.system_time_ns >> 32) as u32,
            self.tsc_to_system_mul,
            u32::from_le_bytes([self.tsc_shift.cast_unsigned(), self.flags.0, last[0], last[1]]),
        ]
    }

    /// Decodes a page from eight little-endian words.
    pub(crate) const fn from_words(words: [u32; TIME_PAGE_BYTES / 4]) -> Self {
        let [shift, flags, ref padding1 @ ..] = words[7].to_le_bytes();
        Self {
            version: words[0],
            padding0: words[1],
            tsc_timestamp: words[2] as u64 | (words[3] as u64) << 32,
            system_time_ns: words[4] as u64 | (words[5] as u64) << 32,
            tsc_to_system_mul: words[6],
            tsc_shift: shift.cast_signed(),
            flags: TimeFlags(flags),
            padding1: *padding1,
        }
    }
}

/// The wall clock (`struct pvclock_wall_clock`): the real time at system time 0 of the guest.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct WallClock {
    /// Odd while the host writes.
    pub version: u32,
    /// Seconds since 1970; 32 bits, which overflow in 2106.
    pub sec: u32,
    /// Nanoseconds in that second.
    pub nsec: u32,
}

const _: () = {
    assert!(size_of::<WallClock>() == WALL_CLOCK_BYTES);
    assert!(align_of::<WallClock>() == 4);
    assert!(offset_of!(WallClock, sec) == 4);
    assert!(offset_of!(WallClock, nsec) == 8);
};

impl WallClock {
    /// The wall clock for the real time `ns` since 1970, with version 0. Seconds are truncated to
    /// 32 bits, as in KVM.
    pub const fn from_ns(ns: u64) -> Self {
        let second = crate::units::NS_PER_SECOND;
        Self { version: 0, sec: (ns / second) as u32, nsec: (ns % second) as u32 }
    }

    /// Nanoseconds since 1970.
    pub const fn ns(&self) -> u64 {
        self.sec as u64 * crate::units::NS_PER_SECOND + self.nsec as u64
    }

    /// Encodes the structure as in memory.
    pub fn to_bytes(&self) -> [u8; WALL_CLOCK_BYTES] {
        let mut bytes = [0; WALL_CLOCK_BYTES];
        for (bytes, word) in bytes.chunks_exact_mut(4).zip([self.version, self.sec, self.nsec]) {
            bytes.copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }

    /// Decodes the structure from memory.
    pub fn from_bytes(bytes: &[u8; WALL_CLOCK_BYTES]) -> Self {
        let [version, sec, nsec] = [0, 4, 8]
            .map(|at| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]));
        Self { version, sec, nsec }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn fields_are_at_the_offsets_of_the_abi() {
        let page = VcpuTimeInfo {
            version: 0x0403_0201,
            padding0: 0x0807_0605,
            tsc_timestamp: 0x100f_0e0d_0c0b_0a09,
            system_time_ns: 0x1817_1615_1413_1211,
            tsc_to_system_mul: 0x1c1b_1a19,
            tsc_shift: 0x1d,
            flags: TimeFlags(0x1e),
            padding1: [0x1f, 0x20],
        };
        let bytes: [u8; 32] = core::array::from_fn(|index| index as u8 + 1);
        assert_eq!(page.to_bytes(), bytes);
        assert_eq!(VcpuTimeInfo::from_bytes(&bytes), page);
        let wall = WallClock { version: 0x0403_0201, sec: 0x0807_0605, nsec: 0x0c0b_0a09 };
        assert_eq!(wall.to_bytes(), bytes[..12]);
        assert_eq!(WallClock::from_bytes(&wall.to_bytes()), wall);
    }

    #[test]
    fn shifts_keep_their_sign() {
        let page = VcpuTimeInfo { tsc_shift: -2, ..VcpuTimeInfo::default() };
        assert_eq!(page.to_bytes()[28], 0xfe);
        assert_eq!(VcpuTimeInfo::from_bytes(&page.to_bytes()).tsc_shift, -2);
    }

    #[test]
    fn a_tsc_before_the_timestamp_does_not_make_time_jump() {
        let page = VcpuTimeInfo {
            tsc_timestamp: 1000,
            system_time_ns: 77,
            tsc_to_system_mul: 1 << 31,
            tsc_shift: 1,
            ..VcpuTimeInfo::default()
        };
        assert_eq!(page.time_ns(1000), 77);
        assert_eq!(page.time_ns(1500), 577);
        assert_eq!(page.time_ns(999), 77);
        // The counter wraps.
        let late = VcpuTimeInfo { tsc_timestamp: u64::MAX, ..page };
        assert_eq!(late.time_ns(9), 87);
    }

    proptest! {
        #[test]
        fn structures_survive_encoding(
            bytes in any::<[u8; TIME_PAGE_BYTES]>(),
            wall_ns in 0..u64::from(u32::MAX) * 1_000_000_000,
        ) {
            prop_assert_eq!(VcpuTimeInfo::from_bytes(&bytes).to_bytes(), bytes);
            prop_assert_eq!(WallClock::from_ns(wall_ns).ns(), wall_ns);
        }

        /// Reading is defined for any content of the memory.
        #[test]
        fn any_page_can_be_read(bytes in any::<[u8; TIME_PAGE_BYTES]>(), tsc in any::<u64>()) {
            let page = VcpuTimeInfo::from_bytes(&bytes);
            prop_assert_eq!(page.time_ns(tsc), page.system_time_ns.wrapping_add(page.age_ns(tsc)));
        }
    }
}
