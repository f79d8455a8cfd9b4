//! Checks the page's protocol and the readers' clamp with loom, over all interleavings and all
//! values that the memory model lets a load return.
//!
//! Each property is checked for the crate's own functions on loom's atomics, and for variants that
//! lack one step. The variants must fail, which shows that the check is effective.

#![allow(clippy::unwrap_used)]

use ebb_kvm_clock::page::{TimeFlags, VcpuTimeInfo};
use ebb_kvm_clock::protocol::{
    SharedWords, Stability, StopNotice, TimeUpdate, take_stop_notice, try_read_time, write_time,
};
use ebb_kvm_clock::reader::{LastTime, never_backwards};
use ebb_kvm_clock::scale::TscScale;
use loom::sync::Arc;
use loom::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};
use loom::thread;

/// Index of the version in a page.
const VERSION: usize = 0;
/// The words whose accesses loom explores: the version, and the first, a middle and the last word
/// that it guards. All eight words take most of a minute and behave alike.
const SEARCHED: [usize; 4] = [VERSION, 2, 6, 7];

/// A time page on loom's atomics; for words that are not searched, stores are dropped and loads
/// return 0.
struct LoomPage([AtomicU32; SEARCHED.len()]);

impl LoomPage {
    fn new(info: &VcpuTimeInfo) -> Self {
        let bytes = info.to_bytes();
        Self(SEARCHED.map(|index| {
            AtomicU32::new(u32::from_le_bytes(std::array::from_fn(|byte| bytes[index * 4 + byte])))
        }))
    }

    fn searched(&self, index: usize) -> Option<&AtomicU32> {
        SEARCHED.iter().position(|&searched| searched == index).map(|place| &self.0[place])
    }
}

impl SharedWords for LoomPage {
    fn load(&self, index: usize, ordering: Ordering) -> u32 {
        self.searched(index).map_or(0, |word| word.load(ordering))
    }

    fn store(&self, index: usize, value: u32, ordering: Ordering) {
        if let Some(word) = self.searched(index) {
            word.store(value, ordering);
        }
    }

    fn fetch_and(&self, index: usize, mask: u32, ordering: Ordering) -> u32 {
        self.searched(index).map_or(0, |word| word.fetch_and(mask, ordering))
    }

    fn fence(&self, ordering: Ordering) {
        fence(ordering);
    }
}

/// The missing step of the protocol.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Flaw {
    None,
    /// The writer never makes the version odd.
    NoOddVersion,
    /// The fields may be seen before the odd version.
    NoReleaseFence,
    /// The even version may be seen before the fields.
    RelaxedEvenVersion,
    /// The reader's fields may be loaded after its second load of the version.
    NoAcquireFence,
    /// The reader's fields may be loaded before its first load of the version.
    RelaxedFirstLoad,
}

/// The side that accesses a page.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Side {
    Writer,
    Reader,
}

/// A page that drops one step of the crate's functions.
struct Flawed<'a> {
    page: &'a LoomPage,
    side: Side,
    flaw: Flaw,
}

impl SharedWords for Flawed<'_> {
    fn load(&self, index: usize, ordering: Ordering) -> u32 {
        match (self.side, self.flaw, ordering) {
            // The writer reads its own value of round 0. It must not read it from loom's atomics:
            // loom keeps one access of an atomic for its search, and this one would hide the
            // reader's.
            (Side::Writer, ..) if index == VERSION => 0,
            (Side::Writer, ..) => u32::from(TimeFlags::TSC_STABLE.0) << 8,
            (_, Flaw::RelaxedFirstLoad, Ordering::Acquire) => {
                self.page.load(index, Ordering::Relaxed)
            }
            _ => self.page.load(index, ordering),
        }
    }

    fn store(&self, index: usize, value: u32, ordering: Ordering) {
        match (self.flaw, ordering) {
            (Flaw::NoOddVersion, _) if index == VERSION && !value.is_multiple_of(2) => {}
            (Flaw::RelaxedEvenVersion, Ordering::Release) => {
                self.page.store(index, value, Ordering::Relaxed);
            }
            _ => self.page.store(index, value, ordering),
        }
    }

    fn fetch_and(&self, index: usize, mask: u32, ordering: Ordering) -> u32 {
        self.page.fetch_and(index, mask, ordering)
    }

    fn fence(&self, ordering: Ordering) {
        match (self.flaw, ordering) {
            (Flaw::NoReleaseFence, Ordering::Release)
            | (Flaw::NoAcquireFence, Ordering::Acquire) => {}
            _ => self.page.fence(ordering),
        }
    }
}

/// The page of a round: each searched word contains the round's number.
fn update(round: u32) -> TimeUpdate {
    TimeUpdate {
        tsc_timestamp: u64::from(round),
        system_time_ns: 0,
        scale: TscScale { mul: round, shift: round as i8 },
        stability: Stability::Stable,
    }
}

fn info(round: u32) -> VcpuTimeInfo {
    VcpuTimeInfo {
        version: round * 2,
        tsc_timestamp: u64::from(round),
        tsc_to_system_mul: round,
        tsc_shift: round as i8,
        flags: TimeFlags::TSC_STABLE,
        ..VcpuTimeInfo::default()
    }
}

/// One writer and one reader with one attempt: an accepted page is that of its version's round.
fn no_torn_read(flaw: Flaw) {
    loom::model(move || {
        let page = Arc::new(LoomPage::new(&info(0)));
        let writer = {
            let page = Arc::clone(&page);
            thread::spawn(move || {
                let page = Flawed { page: &page, side: Side::Writer, flaw };
                write_time(&page, &update(1), StopNotice::Keep);
            })
        };
        let seen = Flawed { page: &page, side: Side::Reader, flaw };
        if let Some((read, _)) = try_read_time(&seen, || 0) {
            assert_eq!(read, info(read.version / 2), "torn");
        }
        writer.join().unwrap();
    });
}

#[test]
fn no_read_is_torn() {
    no_torn_read(Flaw::None);
}

#[test]
#[should_panic(expected = "torn")]
fn without_the_odd_version_a_read_is_torn() {
    no_torn_read(Flaw::NoOddVersion);
}

#[test]
#[should_panic(expected = "torn")]
fn without_the_release_fence_a_read_is_torn() {
    no_torn_read(Flaw::NoReleaseFence);
}

#[test]
#[should_panic(expected = "torn")]
fn with_a_relaxed_even_version_a_read_is_torn() {
    no_torn_read(Flaw::RelaxedEvenVersion);
}

#[test]
#[should_panic(expected = "torn")]
fn without_the_acquire_fence_a_read_is_torn() {
    no_torn_read(Flaw::NoAcquireFence);
}

#[test]
#[should_panic(expected = "torn")]
fn with_a_relaxed_first_load_a_read_is_torn() {
    no_torn_read(Flaw::RelaxedFirstLoad);
}

/// A guest takes the notice while the host writes: the notice is never lost, and it is cleared once
/// the guest has taken it without a concurrent write.
#[test]
fn a_stop_notice_is_never_lost() {
    loom::model(|| {
        let page = Arc::new(LoomPage::new(&info(0)));
        let writer = {
            let page = Arc::clone(&page);
            thread::spawn(move || write_time(&*page, &update(1), StopNotice::Give))
        };
        let taken_meanwhile = take_stop_notice(&*page);
        writer.join().unwrap();
        let taken_afterwards = take_stop_notice(&*page);
        assert!(taken_meanwhile || taken_afterwards);
        assert!(!take_stop_notice(&*page));
    });
}

struct LoomLast(AtomicU64);

impl LastTime for LoomLast {
    fn load_ns(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }

    fn replace_ns(&self, current_ns: u64, new_ns: u64) -> Result<(), u64> {
        self.0.compare_exchange(current_ns, new_ns, Ordering::Relaxed, Ordering::Relaxed).map(drop)
    }
}

/// The clamp, or a replacement of it.
type Clamp = fn(&LoomLast, u64) -> u64;

/// A store instead of the exchange: if two readers are ahead of the old time, the later store wins.
fn store_instead(last: &LoomLast, time_ns: u64) -> u64 {
    let latest_ns = last.load_ns();
    if time_ns > latest_ns {
        last.0.store(time_ns, Ordering::Relaxed);
        return time_ns;
    }
    latest_ns
}

/// Two vCPUs with different TSCs read twice each; after both have ended, a third one reads, whose
/// TSC is behind. No vCPU sees time go backwards, and the third sees no time before theirs.
fn time_is_monotonic(clamp: Clamp) {
    loom::model(move || {
        let last = Arc::new(LoomLast(AtomicU64::new(10)));
        let vcpu = {
            let last = Arc::clone(&last);
            thread::spawn(move || [clamp(&last, 20), clamp(&last, 21)])
        };
        let here = [clamp(&last, 30), clamp(&last, 15)];
        let there = vcpu.join().unwrap();
        let afterwards = clamp(&last, 12);
        assert!(here[0] <= here[1] && there[0] <= there[1], "backwards");
        assert!(afterwards >= here[1].max(there[1]), "backwards");
    });
}

#[test]
fn the_clamp_keeps_time_from_going_backwards() {
    time_is_monotonic(never_backwards);
}

#[test]
#[should_panic(expected = "backwards")]
fn a_plain_store_lets_time_go_backwards() {
    time_is_monotonic(store_instead);
}
