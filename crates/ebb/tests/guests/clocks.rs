//! Clocks of guests and of the host, as tests look at them.

use std::fmt;

use ebb_agent::clock::ClockReading;
use ebb_agent::clock_watch::WatchReport;
use ebb_agent::protocol::Command;
use rustix::time::{ClockId, clock_gettime};

use crate::guest::Guest;
use crate::harness::{eventually, when};

/// Lines of a kernel's log that tell of a guest that has stood still without knowing, or of a clock
/// that it distrusts.
const COMPLAINTS: [&str; 7] = [
    "soft lockup",
    "stall",
    "hung task",
    "blocked for more than",
    "unstable",
    "time jump",
    "clock skew",
];
/// Looks at a guest's clocks of which one is taken.
const LOOKS: usize = 4;
/// Readings in a burst, and the pause between bursts: a quarter of a processor in an emulated host.
const BURST: Command = Command::ClockWatchStart { burst_readings: 50, pause_us: 3000 };

/// A guest's clocks between two looks at the host's.
pub struct Look {
    /// The host's CLOCK_MONOTONIC before, in ns.
    pub host_before_ns: i64,
    /// The guest's clocks.
    pub guest: ClockReading,
    /// The host's CLOCK_MONOTONIC after, in ns.
    pub host_after_ns: i64,
    /// Host's CLOCK_REALTIME minus the guest's, at the middle of the look, in ns.
    pub real_time_error_ns: i64,
}

impl Look {
    /// Looks a few times and takes the shortest look, which says most.
    #[track_caller]
    pub fn at(guest: &Guest) -> Self {
        let looks = (0..LOOKS).map(|_| Self::once(guest));
        looks.min_by_key(|look| look.host_after_ns - look.host_before_ns).expect("there was a look")
    }

    #[track_caller]
    fn once(guest: &Guest) -> Self {
        let (host_before_ns, real_before_ns) = (host(ClockId::Monotonic), host(ClockId::Realtime));
        let result = guest.run(Command::Clock);
        let (host_after_ns, real_after_ns) = (host(ClockId::Monotonic), host(ClockId::Realtime));
        let guest: ClockReading = serde_json::from_value(result).expect("a reading of clocks");
        let middle_ns = i64::midpoint(real_before_ns, real_after_ns);
        let real_time_error_ns = middle_ns - guest.realtime_ns.cast_signed();
        Self { host_before_ns, guest, host_after_ns, real_time_error_ns }
    }

    /// The guest's CLOCK_MONOTONIC in ns.
    pub fn monotonic_ns(&self) -> i64 {
        self.guest.monotonic_ns.cast_signed()
    }

    /// How far the clocks have gone since an earlier look.
    pub fn since(&self, earlier: &Self) -> Advance {
        Advance {
            guest_ns: self.monotonic_ns() - earlier.monotonic_ns(),
            host_least_ns: self.host_before_ns - earlier.host_after_ns,
            host_most_ns: self.host_after_ns - earlier.host_before_ns,
        }
    }
}

/// Time that has passed.
#[derive(Debug, Clone, Copy)]
#[expect(clippy::struct_field_names, reason = "units belong to the names")]
pub struct Advance {
    /// In the guest.
    pub guest_ns: i64,
    /// At the host, at least.
    pub host_least_ns: i64,
    /// At the host, at most.
    pub host_most_ns: i64,
}

impl Advance {
    /// How far the guest's time has fallen behind the host's at least, in ns; negative if it need
    /// not have.
    pub fn lag_least_ns(&self) -> i64 {
        self.host_least_ns - self.guest_ns
    }

    /// How far the guest's time has fallen behind the host's at most, in ns; negative if it has run
    /// ahead.
    pub fn lag_most_ns(&self) -> i64 {
        self.host_most_ns - self.guest_ns
    }
}

fn host(clock: ClockId) -> i64 {
    let now = clock_gettime(clock);
    now.tv_sec * 1_000_000_000 + now.tv_nsec
}

/// Starts a reader on each vCPU.
#[track_caller]
pub fn watch(guest: &Guest) {
    guest.run(BURST);
}

/// What the readers have seen so far.
#[track_caller]
pub fn watched(guest: &Guest) -> WatchReport {
    serde_json::from_value(guest.run(Command::ClockWatchRead)).expect("a report")
}

/// Waits until each reader has gone on since `earlier`; no clock may have gone backward.
#[track_caller]
pub fn watched_since(guest: &Guest, earlier: &WatchReport) -> WatchReport {
    eventually("each reader of the clocks goes on", 30, || {
        let now = watched(guest);
        assert_eq!(now.faults(), Vec::<String>::new(), "{now:?}");
        let goes_on = earlier.cpus.iter().zip(&now.cpus).all(|(before, now)| {
            now.readings > before.readings
                && now.monotonic_ns > before.monotonic_ns
                && now.tsc > before.tsc
        });
        when(goes_on, || format!("{earlier:?} {now:?}"))?;
        Ok(now)
    })
}

/// What the guest's kernel complains about, line by line. At boot it may find the time stamp
/// counters of a virtual machine hard to trust, so what counts is what comes later.
#[track_caller]
pub fn complaints(guest: &Guest) -> String {
    let log = guest.run(Command::KernelLog { words: COMPLAINTS.map(str::to_owned).to_vec() });
    log["text"].as_str().expect("text").to_owned()
}

/// Smallest, middle and largest of some numbers, in µs.
pub struct Distribution(Vec<i64>);

impl Distribution {
    /// Of these numbers in ns.
    pub fn of(numbers_ns: impl IntoIterator<Item = i64>) -> Self {
        let mut numbers: Vec<_> = numbers_ns.into_iter().collect();
        numbers.sort_unstable();
        Self(numbers)
    }
}

impl fmt::Display for Distribution {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let at = |tenths: usize| {
            self.0.get((self.0.len().max(1) - 1) * tenths / 10).copied().unwrap_or(0) / 1000
        };
        write!(
            f,
            "{} values: {} / {} / {} / {} / {} µs",
            self.0.len(),
            at(0),
            at(1),
            at(5),
            at(9),
            at(10)
        )?;
        write!(f, " (least, 10 %, middle, 90 %, most)")
    }
}
