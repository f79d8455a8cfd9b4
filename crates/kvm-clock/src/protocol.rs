//! The protocol by which a host writes and a guest reads the shared structures, for any memory.
//!
//! # The protocol
//!
//! There are one writer and any number of readers. The writer makes the version odd, writes the
//! fields, and sets the version to the next even number. A reader loads the version, the fields,
//! and the version again, and retries if it was odd or has changed. Memory ordering:
//!
//! | writer | reader |
//! | --- | --- |
//! | store version odd (relaxed) | load version (acquire) |
//! | release fence | load fields (relaxed) |
//! | store fields (relaxed) | acquire fence |
//! | store version even (release) | load version (relaxed) |
//!
//! The release fence pairs with the acquire fence: a reader that saw any field of a write also sees
//! the preceding odd version. The release store pairs with the acquire load: a reader that saw the
//! even version sees all fields. This is a sequence lock as in Boehm, "Can seqlocks get
//! along with programming language memory models?" (2012), and Linux's `pvclock_read_begin` and
//! `kvm_setup_guest_pvclock` on x86, where loads are not reordered with loads nor stores with
//! stores, so that the ordering costs no instruction and only constrains the compiler.
//!
//! Every access is a 32-bit atomic, since the ABI aligns a page to 4 bytes. The memory can be any
//! implementation of [`SharedWords`]: [`AtomicWords`] in this crate, guest memory in a monitor, and
//! a model checker's atomics in this crate's tests, which run these functions over all
//! interleavings.
//!
//! # GUEST_STOPPED
//!
//! The flag is the only part of a page that the guest writes: the guest clears it after reading it.
//! A host that writes the page therefore preserves the flag (Linux `kvm_setup_guest_pvclock`), and
//! a request of the monitor (`KVMCLOCK_CTRL`) sets it, once. A guest that clears the flag while the
//! host writes may find it set again: its watchdogs may be reset once too often, but never too
//! rarely.

use core::sync::atomic::{AtomicU32, Ordering, fence};

use crate::page::{TIME_PAGE_BYTES, TimeFlags, VcpuTimeInfo, WALL_CLOCK_BYTES, WallClock};
use crate::scale::TscScale;

/// Index of the version, in both structures.
const VERSION: usize = 0;
/// Index of the word that contains shift and flags.
const FLAGS_WORD: usize = 7;
/// Bit position of the flags in that word.
const FLAGS_SHIFT: u32 = 8;
/// Words of a time page.
const TIME_WORDS: usize = TIME_PAGE_BYTES / 4;
/// Words of a wall clock.
const WALL_WORDS: usize = WALL_CLOCK_BYTES / 4;

/// Memory that host and guest share, as 32-bit little-endian words.
///
/// Implementations convert the byte order on a big-endian machine. Each access has to be a single
/// atomic one.
pub trait SharedWords {
    /// Loads the word at `index`.
    fn load(&self, index: usize, ordering: Ordering) -> u32;
    /// Stores the word at `index`.
    fn store(&self, index: usize, value: u32, ordering: Ordering);
    /// Replaces the word at `index` by its bitwise and with `mask`; returns the previous value.
    fn fetch_and(&self, index: usize, mask: u32, ordering: Ordering) -> u32;
    /// A fence of the same memory model.
    fn fence(&self, ordering: Ordering);
}

impl<M: SharedWords + ?Sized> SharedWords for &M {
    fn load(&self, index: usize, ordering: Ordering) -> u32 {
        (**self).load(index, ordering)
    }

    fn store(&self, index: usize, value: u32, ordering: Ordering) {
        (**self).store(index, value, ordering);
    }

    fn fetch_and(&self, index: usize, mask: u32, ordering: Ordering) -> u32 {
        (**self).fetch_and(index, mask, ordering)
    }

    fn fence(&self, ordering: Ordering) {
        (**self).fence(ordering);
    }
}

/// A page in plain memory. `repr(transparent)`, so that a monitor may cast a pointer into mapped
/// guest memory to a reference to it.
#[derive(Debug)]
#[repr(transparent)]
pub struct AtomicWords<const WORDS: usize>([AtomicU32; WORDS]);

/// A time page in plain memory.
pub type AtomicTimePage = AtomicWords<TIME_WORDS>;

/// A wall clock in plain memory.
pub type AtomicWallClock = AtomicWords<WALL_WORDS>;

const _: () = {
    assert!(size_of::<AtomicTimePage>() == TIME_PAGE_BYTES);
    assert!(size_of::<AtomicWallClock>() == WALL_CLOCK_BYTES);
    assert!(align_of::<AtomicTimePage>() == 4);
};

impl<const WORDS: usize> Default for AtomicWords<WORDS> {
    /// All words 0.
    fn default() -> Self {
        Self([const { AtomicU32::new(0) }; WORDS])
    }
}

impl<const WORDS: usize> SharedWords for AtomicWords<WORDS> {
    fn load(&self, index: usize, ordering: Ordering) -> u32 {
        u32::from_le(self.0[index].load(ordering))
    }

    fn store(&self, index: usize, value: u32, ordering: Ordering) {
        self.0[index].store(value.to_le(), ordering);
    }

    fn fetch_and(&self, index: usize, mask: u32, ordering: Ordering) -> u32 {
        u32::from_le(self.0[index].fetch_and(mask.to_le(), ordering))
    }

    fn fence(&self, ordering: Ordering) {
        fence(ordering);
    }
}

/// Whether times read on different vCPUs can be compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Stability {
    /// They can be compared ([`TimeFlags::TSC_STABLE`]).
    Stable,
    /// They may be off by the differences between the vCPUs' TSCs and pages.
    Unstable,
}

/// Whether a write notifies the guest that it was stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum StopNotice {
    /// No new notice; one that the guest has not taken yet is kept.
    Keep,
    /// The monitor requested a notice (`KVMCLOCK_CTRL`).
    Give,
}

/// Content of a time page as written by the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TimeUpdate {
    /// Guest TSC of the instant.
    pub tsc_timestamp: u64,
    /// The clock at that instant; negative in kernels that mix their clocks, and then read as a
    /// very late time.
    pub system_time_ns: i64,
    /// The factor between ticks and nanoseconds.
    pub scale: TscScale,
    /// Whether pages of different vCPUs can be compared.
    pub stability: Stability,
}

/// Writes a vCPU's time page. Only one writer is allowed at a time.
pub fn write_time(page: &impl SharedWords, update: &TimeUpdate, notice: StopNotice) {
    let mut flags = match update.stability {
        Stability::Stable => TimeFlags::TSC_STABLE,
        Stability::Unstable => TimeFlags::NONE,
    };
    let version = open(page);
    let present = TimeFlags((page.load(FLAGS_WORD, Ordering::Relaxed) >> FLAGS_SHIFT) as u8);
    flags = flags.union(present.intersection(TimeFlags::GUEST_STOPPED));
    if notice == StopNotice::Give {
        flags = flags.union(TimeFlags::GUEST_STOPPED);
    }
    let info = VcpuTimeInfo {
        tsc_timestamp: update.tsc_timestamp,
        system_time_ns: update.system_time_ns.cast_unsigned(),
        tsc_to_system_mul: update.scale.mul,
        tsc_shift: update.scale.shift,
        flags,
        ..VcpuTimeInfo::default()
    };
    store_fields(page, info.to_words());
    close(page, version);
}

/// Writes the wall clock: the real time at which the guest's system time was 0.
pub fn write_wall_clock(memory: &impl SharedWords, wall: &WallClock) {
    let version = open(memory);
    store_fields(memory, [0, wall.sec, wall.nsec]);
    close(memory, version);
}

/// Makes the version odd and returns it.
fn open(memory: &impl SharedWords) -> u32 {
    // The guest may have written any number.
    let odd = memory.load(VERSION, Ordering::Relaxed).wrapping_add(1) | 1;
    memory.store(VERSION, odd, Ordering::Relaxed);
    memory.fence(Ordering::Release);
    odd
}

/// Makes the version even again.
fn close(memory: &impl SharedWords, odd: u32) {
    memory.store(VERSION, odd.wrapping_add(1), Ordering::Release);
}

/// Stores all words but the version.
fn store_fields<const WORDS: usize>(memory: &impl SharedWords, words: [u32; WORDS]) {
    for (index, word) in words.into_iter().enumerate().skip(VERSION + 1) {
        memory.store(index, word, Ordering::Relaxed);
    }
}

/// Reads a time page once, with the TSC in between; `None` if the host wrote at the same time.
///
/// `tsc` reads the counter of the page's own vCPU, ordered after the preceding loads
/// (`lfence; rdtsc` or `rdtscp`).
pub fn try_read_time(
    page: &impl SharedWords,
    tsc: impl FnOnce() -> u64,
) -> Option<(VcpuTimeInfo, u64)> {
    let (words, tsc) = try_read::<TIME_WORDS, _>(page, tsc)?;
    Some((VcpuTimeInfo::from_words(words), tsc))
}

/// Reads the wall clock once; `None` if the host wrote at the same time.
pub fn try_read_wall_clock(memory: &impl SharedWords) -> Option<WallClock> {
    let ([version, sec, nsec], ()) = try_read::<WALL_WORDS, _>(memory, || ())?;
    Some(WallClock { version, sec, nsec })
}

/// Reads all words of one write, and calls the closure in between.
fn try_read<const WORDS: usize, T>(
    memory: &impl SharedWords,
    between: impl FnOnce() -> T,
) -> Option<([u32; WORDS], T)> {
    let version = memory.load(VERSION, Ordering::Acquire);
    if !version.is_multiple_of(2) {
        return None;
    }
    let mut words = [version; WORDS];
    for (index, word) in words.iter_mut().enumerate().skip(VERSION + 1) {
        *word = memory.load(index, Ordering::Relaxed);
    }
    let between = between();
    memory.fence(Ordering::Acquire);
    (memory.load(VERSION, Ordering::Relaxed) == version).then_some((words, between))
}

/// Clears the notice that the vCPU was stopped and returns whether it was set: the guest's side of
/// `KVMCLOCK_CTRL`.
pub fn take_stop_notice(page: &impl SharedWords) -> bool {
    let bit = u32::from(TimeFlags::GUEST_STOPPED.0) << FLAGS_SHIFT;
    // Check first, so that the page is written only if the flag is set.
    page.load(FLAGS_WORD, Ordering::Relaxed) & bit != 0
        && page.fetch_and(FLAGS_WORD, !bit, Ordering::Relaxed) & bit != 0
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const UPDATE: TimeUpdate = TimeUpdate {
        tsc_timestamp: 0x1122_3344_5566_7788,
        system_time_ns: -5,
        scale: TscScale { mul: 0xdead_beef, shift: -2 },
        stability: Stability::Stable,
    };

    fn read(page: &AtomicTimePage) -> VcpuTimeInfo {
        try_read_time(page, || 0).unwrap().0
    }

    #[test]
    fn a_written_page_is_read_back() {
        let page = AtomicTimePage::default();
        write_time(&page, &UPDATE, StopNotice::Keep);
        let info = read(&page);
        assert_eq!(info.version, 2);
        assert_eq!(info.tsc_timestamp, UPDATE.tsc_timestamp);
        assert_eq!(info.system_time_ns, u64::MAX - 4);
        assert_eq!(info.scale(), UPDATE.scale);
        assert_eq!(info.flags, TimeFlags::TSC_STABLE);
        let wall = AtomicWallClock::default();
        write_wall_clock(&wall, &WallClock::from_ns(12_000_000_034));
        assert_eq!(try_read_wall_clock(&wall), Some(WallClock { version: 2, sec: 12, nsec: 34 }));
    }

    #[test]
    fn a_page_that_is_being_written_is_not_read() {
        let page = AtomicTimePage::default();
        open(&page);
        assert_eq!(try_read_time(&page, || 0), None);
    }

    #[test]
    fn a_page_that_changes_during_a_read_is_not_read() {
        let page = AtomicTimePage::default();
        let outcome = try_read_time(&page, || {
            write_time(&page, &UPDATE, StopNotice::Keep);
            0
        });
        assert_eq!(outcome, None);
    }

    #[test]
    fn a_stop_notice_stays_until_the_guest_takes_it() {
        let page = AtomicTimePage::default();
        assert!(!take_stop_notice(&page));
        write_time(&page, &UPDATE, StopNotice::Give);
        write_time(&page, &UPDATE, StopNotice::Keep);
        assert_eq!(read(&page).flags, TimeFlags::TSC_STABLE.union(TimeFlags::GUEST_STOPPED));
        assert!(take_stop_notice(&page));
        assert!(!take_stop_notice(&page));
        write_time(&page, &UPDATE, StopNotice::Keep);
        assert_eq!(read(&page).flags, TimeFlags::TSC_STABLE);
    }

    #[test]
    fn guests_clear_no_other_flag() {
        let page = AtomicTimePage::default();
        write_time(&page, &UPDATE, StopNotice::Keep);
        write_time(
            &page,
            &TimeUpdate { stability: Stability::Unstable, ..UPDATE },
            StopNotice::Keep,
        );
        assert_eq!(read(&page).flags, TimeFlags::NONE);
    }

    proptest! {
        /// For any version that the guest left, a written page has an even version that differs
        /// from it.
        #[test]
        fn versions_end_even_and_new(before in any::<u32>()) {
            let page = AtomicTimePage::default();
            page.store(VERSION, before, Ordering::Relaxed);
            write_time(&page, &UPDATE, StopNotice::Keep);
            let after = page.load(VERSION, Ordering::Relaxed);
            prop_assert!(after.is_multiple_of(2) && after != before);
        }
    }
}
