//! A guest's clock: the time of a vCPU's page and TSC, clamped to the times of the other vCPUs.

use core::hint::spin_loop;
use core::sync::atomic::{AtomicU64, Ordering};

use crate::page::TimeFlags;
use crate::protocol::{SharedWords, Stability, try_read_time};

/// The latest time returned to any vCPU of a guest, shared by the readers of all vCPUs.
pub trait LastTime {
    /// The latest time, in nanoseconds.
    fn load_ns(&self) -> u64;
    /// Replaces `current_ns` by `new_ns`; returns the present value as an error if it differs.
    fn replace_ns(&self, current_ns: u64, new_ns: u64) -> Result<(), u64>;
}

impl LastTime for AtomicU64 {
    fn load_ns(&self) -> u64 {
        self.load(Ordering::Relaxed)
    }

    // Relaxed: only the values of this one variable matter, and all vCPUs agree on its modification
    // order.
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

/// Returns `time_ns`, or the latest time returned to any vCPU if that is later (Linux
/// `pvclock_clocksource_read`).
///
/// No call returns less than a call that ended before it began. Times are compared as unsigned
/// numbers, as in Linux: a negative time, which reads as a very late one, is kept for ever and
/// stops the clock.
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

/// A time with its properties.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reading {
    /// The clock, modulo 2^64 as in guests. For an unstable clock it is never less than an earlier
    /// reading of any vCPU; stable readings are neither clamped nor recorded for later ones, as in
    /// Linux.
    pub time_ns: u64,
    /// Whether it can be compared with other vCPUs' readings without the clamp.
    pub stability: Stability,
    /// Time since the host wrote the page, which is taken from the TSC alone.
    pub age_ns: u64,
    /// Whether a notice that the vCPU was stopped is pending ([`crate::protocol::take_stop_notice`]
    /// clears it).
    pub stopped: Stopped,
}

/// Whether the monitor has stopped the vCPU since the guest last took a notice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Stopped {
    /// It was stopped: a watchdog should restart its interval.
    Yes,
    /// It was not stopped.
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

    /// The present time. `tsc` reads the counter of the page's own vCPU (see [`try_read_time`]) and
    /// is called once per attempt.
    ///
    /// Spins while the host writes the page, which takes nanoseconds unless the host is preempted
    /// during the write. Use [`Self::try_read`] where that matters.
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
        // A stable clock does not record the latest time.
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
        // A second later the page's time is 0.877 s, and the guest still reads the old time.
        assert_eq!(reader.read(|| 1_000_000_000).time_ns, negative);
        write_time(&page, &update(0, -123_000_000, Stability::Stable), StopNotice::Keep);
        assert_eq!(reader.read(|| 1_000_000_000).time_ns, 877_000_000);
    }

    proptest! {
        /// Readers with any offsets between their TSCs, in any order, with pages rewritten at any
        /// time: no reading is less than the one before, and each is either its page's time or the
        /// latest one.
        #[test]
        fn time_never_goes_backwards(
            steps in prop::collection::vec(
                (0usize..3, 0u64..1_000_000, any::<bool>(), -5_000i64..5_000),
                1..100,
            ),
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
                    let update = update(tsc, time_ns, Stability::Unstable);
                    write_time(&pages[vcpu], &update, StopNotice::Keep);
                }
                let unclamped_ns = try_read_time(&pages[vcpu], || tsc).unwrap().0.time_ns(tsc);
                let time_ns = Reader::new(&pages[vcpu], &last).read(|| tsc).time_ns;
                prop_assert_eq!(time_ns, unclamped_ns.max(latest_ns));
                latest_ns = time_ns;
            }
        }
    }
}
