//! Samples of the clocks of guests and of the host.

use std::fmt;

use ebb_agent::clock::ClockReading;
use ebb_agent::clock_watch::WatchReport;
use ebb_agent::protocol::Command;
use rustix::time::{ClockId, clock_gettime};

use crate::guest::Guest;
use crate::harness::{eventually, when};

/// Words of kernel messages about an unnoticed pause of the guest or a distrusted clock.
const COMPLAINTS: [&str; 7] = [
    "soft lockup",
    "stall",
    "hung task",
    "blocked for more than",
    "unstable",
    "time jump",
    "clock skew",
];
/// Number of attempts to sample a guest's clocks, of which the best one is used.
const ATTEMPTS: usize = 4;
/// Timing of the readers, which use a quarter of a processor in an emulated host.
const BURST: Command = Command::ClockWatchStart { burst_readings: 50, pause_us: 3000 };

/// A guest's clocks, read between two readings of the host's.
pub struct ClockSample {
    /// The host's CLOCK_MONOTONIC before, in ns.
    pub host_before_ns: i64,
    /// The guest's clocks.
    pub guest: ClockReading,
    /// The host's CLOCK_MONOTONIC after, in ns.
    pub host_after_ns: i64,
    /// Host's CLOCK_REALTIME minus the guest's, at the middle of the sample, in ns.
    pub real_time_error_ns: i64,
}

impl ClockSample {
    /// Takes several samples and returns the shortest, which is the most exact.
    #[track_caller]
    pub fn take(guest: &Guest) -> Self {
        let samples = (0..ATTEMPTS).map(|_| Self::once(guest));
        samples
            .min_by_key(|sample| sample.host_after_ns - sample.host_before_ns)
            .expect("at least one sample")
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

    /// The advance of the clocks since an earlier sample.
    pub fn since(&self, earlier: &Self) -> Advance {
        Advance {
            guest_ns: self.monotonic_ns() - earlier.monotonic_ns(),
            host_least_ns: self.host_before_ns - earlier.host_after_ns,
            host_most_ns: self.host_after_ns - earlier.host_before_ns,
        }
    }
}

/// Elapsed time in the guest and at the host.
#[derive(Debug, Clone, Copy)]
#[expect(clippy::struct_field_names, reason = "units belong to the names")]
pub struct Advance {
    /// Elapsed time in the guest.
    pub guest_ns: i64,
    /// Lower bound of the elapsed time at the host.
    pub host_least_ns: i64,
    /// Upper bound of the elapsed time at the host.
    pub host_most_ns: i64,
}

impl Advance {
    /// Lower bound of the lag of the guest's time behind the host's in ns; possibly negative.
    pub fn lag_least_ns(&self) -> i64 {
        self.host_least_ns - self.guest_ns
    }

    /// Upper bound of the lag of the guest's time behind the host's in ns; negative if the guest's
    /// time is ahead.
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

/// The readers' observations so far.
#[track_caller]
pub fn watched(guest: &Guest) -> WatchReport {
    serde_json::from_value(guest.run(Command::ClockWatchRead)).expect("a report")
}

/// Waits until each reader has made progress since `earlier` and checks for errors of the clocks.
#[track_caller]
pub fn watched_since(guest: &Guest, earlier: &WatchReport) -> WatchReport {
    eventually("each reader of the clocks makes progress", 30, || {
        let now = watched(guest);
        assert_eq!(now.faults(), Vec::<String>::new(), "{now:?}");
        let progresses = earlier.cpus.iter().zip(&now.cpus).all(|(before, now)| {
            now.readings > before.readings
                && now.monotonic_ns > before.monotonic_ns
                && now.tsc > before.tsc
        });
        when(progresses, || format!("{earlier:?} {now:?}"))?;
        Ok(now)
    })
}

/// Complaints in the guest's kernel log, line by line. At boot the kernel may distrust the time
/// stamp counters of a virtual machine, so that only later complaints count.
#[track_caller]
pub fn complaints(guest: &Guest) -> String {
    let log = guest.run(Command::KernelLog { words: COMPLAINTS.map(str::to_owned).to_vec() });
    log["text"].as_str().expect("text").to_owned()
}

/// Distribution of some numbers, printed in µs.
pub struct Distribution(Vec<i64>);

impl Distribution {
    /// The distribution of these numbers in ns.
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
        write!(f, " (minimum, 10 %, median, 90 %, maximum)")
    }
}
