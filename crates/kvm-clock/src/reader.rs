//! A guest's clock: what its vCPU's page and TSC say, held back to what other vCPUs have seen.

use core::hint::spin_loop;
use core::sync::atomic::{AtomicU64, Ordering};

use crate::page::TimeFlags;
use crate::protocol::{SharedWords, Stability, try_read_time};

/// The latest time that any vCPU of a guest has been given, shared by all their readers.
pub trait LastTime {
    /// The latest time, in nanoseconds.
    fn load_ns(&self) -> u64;
    /// Replaces `current_ns` by `new_ns`; the present value if it is another one.
    fn replace_ns(&self, current_ns: u64, new_ns: u64) -> Result<(), u64>;
}

impl LastTime for AtomicU64 {
    fn load_ns(&self) -> u64 {
        self.load(Ordering::Relaxed)
    }

    // Relaxed: the promise is about the values of this one variable, whose modification order all
    // vCPUs agree on.
    fn replace_ns(&self, current_ns: u64, new_ns: u64) -> Result<(), u64> {
        self.compare_exchange_weak(current_ns, new_ns, Ordering::Relaxed, Ordering::Relaxed)
            .map(drop)
    }
}

impl<L: LastTime + ?Sized> LastTime for &L {
    fn load_ns(&self) -> u64 {
        (**self).load_ns()
    }

    fn replace_ns(&self, current_ns: u64, new_ns: u64) -> Result<(), u64> {
        (**self).replace_ns(current_ns, new_ns)
    }
}

/// `time_ns`, or the latest time given to any vCPU if that is later (Linux
/// `pvclock_clocksource_read`).
///
/// No call returns less than a call that ended before it began. Times are compared as unsigned
/// numbers, as Linux does: a negative time, which reads as a very late one, is kept for ever, and
/// the clock stands still from then on.
pub fn never_backwards(last: &impl LastTime, time_ns: u64) -> u64 {
    let mut latest_ns = last.load_ns();
    while time_ns > latest_ns {
        match last.replace_ns(latest_ns, time_ns) {
            Ok(()) => return time_ns,
            Err(present_ns) => latest_ns = present_ns,
        }
    }
    latest_ns
}

/// A time with what is known about it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reading {
    /// The clock, modulo 2^64 as guests have it. Of a clock that is not stable it is never less
    /// than an earlier reading of any vCPU; stable readings are not held back, nor remembered for
    /// later ones, as in Linux.
    pub time_ns: u64,
    /// Whether it can be compared with other vCPUs' readings without being held back.
    pub stability: Stability,
    /// Time since the host wrote the page: how far the reading relies on the TSC alone.
    pub age_ns: u64,
    /// Whether there is a notice that the vCPU was stopped ([`crate::protocol::take_stop_notice`]
    /// takes it).
    pub stopped: Stopped,
}

/// Whether the monitor has stopped the vCPU since the guest last looked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Stopped {
    /// Yes: a watchdog should start anew.
    Yes,
    /// No.
    No,
}

/// The reader of one vCPU's page.
#[derive(Clone, Debug)]
pub struct Reader<P, L> {
    page: P,
    last: L,
}

impl<P: SharedWords, L: LastTime> Reader<P, L> {
    /// A reader of `page`; `last` is shared with the readers of the guest's other vCPUs.
    pub const fn new(page: P, last: L) -> Self {
        Self { page, last }
    }

    /// The present time. `tsc` reads the counter of the page's own vCPU (see [`try_read_time`]),
    /// once an attempt.
    ///
    /// Waits while the host writes the page, which takes it nanoseconds, unless it is preempted in
    /// the middle of that. Where that matters use [`Self::try_read`].
    pub fn read(&self, mut tsc: impl FnMut() -> u64) -> Reading {
        loop {
            if let Some(reading) = self.try_read(&mut tsc) {
                return reading;
            }
            spin_loop();
        }
    }

    /// The present time; `None` if the host was writing the page.
    pub fn try_read(&self, tsc: impl FnOnce() -> u64) -> Option<Reading> {
        let (info, tsc) = try_read_time(&self.page, tsc)?;
        let stable = info.flags.contains(TimeFlags::TSC_STABLE);
        let time_ns = info.time_ns(tsc);
        Some(Reading {
            time_ns: if stable { time_ns } else { never_backwards(&self.last, time_ns) },
            stability: if stable { Stability::Stable } else { Stability::Unstable },
            age_ns: info.age_ns(tsc),
            stopped: if info.flags.contains(TimeFlags::GUEST_STOPPED) {
                Stopped::Yes
            } else {
                Stopped::No
            },
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::protocol::{AtomicTimePage, StopNotice, TimeUpdate, write_time};
    use crate::scale::TscScale;
    use crate::units::Hertz;
    use proptest::prelude::*;

    fn update(tsc_timestamp: u64, system_time_ns: i64, stability: Stability) -> TimeUpdate {
        let scale = TscScale::for_frequency(Hertz::new(1_000_000_000).unwrap());
        TimeUpdate { tsc_timestamp, system_time_ns, scale, stability }
    }

    #[test]
    fn a_reading_has_time_stability_and_age() {
        let page = AtomicTimePage::default();
        write_time(&page, &update(1000, 500, Stability::Stable), StopNotice::Give);
        let last = AtomicU64::new(0);
        let reading = Reader::new(&page, &last).read(|| 1250);
        assert_eq!(
            reading,
            Reading {
                time_ns: 750,
                stability: Stability::Stable,
                age_ns: 250,
                stopped: Stopped::Yes
            }
        );
        // A stable clock needs no memory of the latest time.
        assert_eq!(last.load_ns(), 0);
    }

    #[test]
    fn vcpus_with_different_tscs_do_not_see_time_go_back() {
        let pages: [AtomicTimePage; 2] = core::array::from_fn(|_| AtomicTimePage::default());
        let last = AtomicU64::new(0);
        for page in &pages {
            write_time(page, &update(1000, 0, Stability::Unstable), StopNotice::Keep);
        }
        let [ahead, behind] = pages.each_ref().map(|page| Reader::new(page, &last));
        assert_eq!(ahead.read(|| 3000).time_ns, 2000);
        assert_eq!(behind.read(|| 2900).time_ns, 2000);
        assert_eq!(behind.read(|| 3100).time_ns, 2100);
    }

    #[test]
    fn a_negative_time_stops_an_unstable_clock_for_ever() {
        let page = AtomicTimePage::default();
        let last = AtomicU64::new(0);
        let reader = Reader::new(&page, &last);
        write_time(&page, &update(0, -123_000_000, Stability::Unstable), StopNotice::Keep);
        let negative = reader.read(|| 0).time_ns;
        assert_eq!(negative, u64::MAX - 122_999_999);
        // A second later the page says 0.877 s, and the guest is told the old time.
        assert_eq!(reader.read(|| 1_000_000_000).time_ns, negative);
        write_time(&page, &update(0, -123_000_000, Stability::Stable), StopNotice::Keep);
        assert_eq!(reader.read(|| 1_000_000_000).time_ns, 877_000_000);
    }

    proptest! {
        /// Readers with any offsets between their TSCs, in any order, with pages written anew at
        /// any time: no reading is less than the one before, and each is either its page's time or
        /// the latest one.
        #[test]
        fn time_never_goes_backwards(
            steps in prop::collection::vec((0usize..3, 0u64..1_000_000, any::<bool>(), -5_000i64..5_000), 1..100),
        ) {
            let pages: [AtomicTimePage; 3] = core::array::from_fn(|_| AtomicTimePage::default());
            let last = AtomicU64::new(0);
            for page in &pages {
                write_time(page, &update(0, 10_000, Stability::Unstable), StopNotice::Keep);
            }
            let mut tsc = 0;
            let mut latest_ns = 0;
            for (vcpu, ticks, renew, error_ns) in steps {
                tsc += ticks;
                if renew {
                    let time_ns = tsc as i64 + 10_000 + error_ns;
                    write_time(&pages[vcpu], &update(tsc, time_ns, Stability::Unstable), StopNotice::Keep);
                }
                let unclamped_ns = try_read_time(&pages[vcpu], || tsc).unwrap().0.time_ns(tsc);
                let time_ns = Reader::new(&pages[vcpu], &last).read(|| tsc).time_ns;
                prop_assert_eq!(time_ns, unclamped_ns.max(latest_ns));
                latest_ns = time_ns;
            }
        }
    }
}
