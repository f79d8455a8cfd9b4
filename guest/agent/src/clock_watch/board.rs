//! The readers' observations, in shared memory that can be read while they run.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use serde::{Deserialize, Serialize};

/// Maximum number of watched processors.
pub const CPU_LIMIT: usize = 64;

/// Steps of a clock in the wrong direction.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Steps {
    /// Number of steps.
    pub count: u64,
    /// The largest step in ns (in ticks for the time stamp counter).
    pub largest: u64,
}

/// Observations of one reader.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CpuReport {
    /// The processor that the reader is bound to.
    pub cpu: u32,
    /// Number of readings of each clock so far.
    pub readings: u64,
    /// The last reading of CLOCK_MONOTONIC in ns.
    pub monotonic_ns: u64,
    /// The last reading of the time stamp counter.
    pub tsc: u64,
    /// Readings of CLOCK_MONOTONIC below this reader's previous one.
    pub backward: Steps,
    /// Readings of CLOCK_MONOTONIC below a value that any reader had published before the reading
    /// began: a warp in kvm-unit-tests' kvmclock_test. They include steps backward; after one,
    /// every reading counts until the clock has passed the largest published value.
    pub warps: Steps,
    /// As `backward`, for the time stamp counter.
    pub tsc_backward: Steps,
    /// As `warps`, for the time stamp counter (Linux arch/x86/kernel/tsc_sync.c, check_tsc_warp).
    pub tsc_warps: Steps,
    /// Readings of CLOCK_REALTIME below this reader's previous one.
    pub realtime_backward: Steps,
    /// Largest difference of CLOCK_MONOTONIC between two successive readings in a burst, in ns.
    pub largest_burst_gap_ns: u64,
    /// The same including the sleeps between bursts.
    pub largest_gap_ns: u64,
    /// The same since the previous report, in ns.
    pub largest_gap_since_report_ns: u64,
}

/// Observations of all readers.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct WatchReport {
    /// One entry per processor, in order.
    pub cpus: Vec<CpuReport>,
}

impl WatchReport {
    /// Total number of readings.
    pub fn readings(&self) -> u64 {
        self.cpus.iter().map(|cpu| cpu.readings).sum()
    }

    /// Descriptions of all errors. The time stamp counter is ignored: a hypervisor may have reasons
    /// to set it back.
    pub fn faults(&self) -> Vec<String> {
        let fault = |cpu: &CpuReport, name: &str, steps: Steps| {
            (steps.count > 0).then(|| {
                format!("CPU {}: {} {name}, largest {} ns", cpu.cpu, steps.count, steps.largest)
            })
        };
        let faults = self.cpus.iter().flat_map(|cpu| {
            [
                fault(cpu, "steps backward", cpu.backward),
                fault(cpu, "warps", cpu.warps),
                fault(cpu, "steps backward of real time", cpu.realtime_backward),
            ]
        });
        faults.flatten().collect()
    }
}

/// [`Steps`] with one writer.
#[derive(Default)]
struct AtomicSteps {
    count: AtomicU64,
    largest: AtomicU64,
}

impl AtomicSteps {
    /// Counts a step if `now` is below `floor`.
    fn judge(&self, floor: u64, now: u64) {
        if now < floor {
            self.count.fetch_add(1, Ordering::Relaxed);
            self.largest.fetch_max(floor - now, Ordering::Relaxed);
        }
    }

    fn load(&self) -> Steps {
        Steps {
            count: self.count.load(Ordering::Relaxed),
            largest: self.largest.load(Ordering::Relaxed),
        }
    }
}

/// The record of one reader, on separate cache lines to avoid false sharing.
///
/// All zeros is a record without readings. Only its reader writes to it, except for
/// `gap_since_report`.
#[repr(align(128))]
#[derive(Default)]
struct Record {
    readings: AtomicU64,
    monotonic: AtomicU64,
    tsc: AtomicU64,
    realtime: AtomicU64,
    backward: AtomicSteps,
    warps: AtomicSteps,
    tsc_backward: AtomicSteps,
    tsc_warps: AtomicSteps,
    realtime_backward: AtomicSteps,
    burst_gap: AtomicU64,
    gap: AtomicU64,
    gap_since_report: AtomicU64,
}

/// Position of a reading in its burst.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Position {
    /// First of a burst, or first at all.
    First,
    /// Directly after another one.
    Next,
}

/// The largest values that any reader has published, loaded before a reading.
#[derive(Debug, Clone, Copy)]
pub struct Published {
    /// CLOCK_MONOTONIC in ns.
    pub monotonic_ns: u64,
    /// Time stamp counter.
    pub tsc: u64,
}

/// One reading.
#[derive(Debug, Clone, Copy)]
pub struct Reading {
    /// CLOCK_MONOTONIC in ns.
    pub monotonic_ns: u64,
    /// Time stamp counter.
    pub tsc: u64,
    /// CLOCK_REALTIME in ns.
    pub realtime_ns: u64,
}

/// A value on a separate cache line.
#[repr(align(128))]
#[derive(Default)]
struct Alone(AtomicU64);

/// All records. All zeros is an empty board.
pub struct Board {
    monotonic: Alone,
    tsc: Alone,
    /// Error number of a reader that could not be bound to its processor; 0 if none failed.
    error: AtomicU32,
    records: [Record; CPU_LIMIT],
}

impl Board {
    /// The values published so far. Must be called before the clocks are read: a published value
    /// was read earlier, on any processor, so that a smaller reading afterwards means that time
    /// went backward.
    pub fn published(&self) -> Published {
        Published {
            monotonic_ns: self.monotonic.0.load(Ordering::Acquire),
            tsc: self.tsc.0.load(Ordering::Acquire),
        }
    }

    /// Checks a reading of the reader with this index and publishes it.
    pub fn enter(&self, index: usize, position: Position, before: Published, now: Reading) {
        let Some(record) = self.records.get(index) else { return };
        record.warps.judge(before.monotonic_ns, now.monotonic_ns);
        record.tsc_warps.judge(before.tsc, now.tsc);
        if record.readings.load(Ordering::Relaxed) > 0 {
            let last = record.monotonic.load(Ordering::Relaxed);
            record.backward.judge(last, now.monotonic_ns);
            record.tsc_backward.judge(record.tsc.load(Ordering::Relaxed), now.tsc);
            record
                .realtime_backward
                .judge(record.realtime.load(Ordering::Relaxed), now.realtime_ns);
            let gap = now.monotonic_ns.saturating_sub(last);
            record.gap.fetch_max(gap, Ordering::Relaxed);
            record.gap_since_report.fetch_max(gap, Ordering::Relaxed);
            if position == Position::Next {
                record.burst_gap.fetch_max(gap, Ordering::Relaxed);
            }
        }
        record.monotonic.store(now.monotonic_ns, Ordering::Relaxed);
        record.tsc.store(now.tsc, Ordering::Relaxed);
        record.realtime.store(now.realtime_ns, Ordering::Relaxed);
        record.readings.fetch_add(1, Ordering::Relaxed);
        // Release: a reading that sees the value begins after this one's end.
        self.monotonic.0.fetch_max(now.monotonic_ns, Ordering::AcqRel);
        self.tsc.0.fetch_max(now.tsc, Ordering::AcqRel);
    }

    /// Records that a reader could not start.
    pub fn fail(&self, errno: i32) {
        self.error.store(errno.unsigned_abs(), Ordering::Relaxed);
    }

    /// The observations of these processors' readers; starts a new interval of
    /// `largest_gap_since_report_ns`.
    pub fn report(&self, cpus: &[u32]) -> Result<WatchReport, std::io::Error> {
        match self.error.load(Ordering::Relaxed) {
            0 => {}
            errno => return Err(std::io::Error::from_raw_os_error(errno.cast_signed())),
        }
        let report = |(cpu, record): (&u32, &Record)| CpuReport {
            cpu: *cpu,
            readings: record.readings.load(Ordering::Relaxed),
            monotonic_ns: record.monotonic.load(Ordering::Relaxed),
            tsc: record.tsc.load(Ordering::Relaxed),
            backward: record.backward.load(),
            warps: record.warps.load(),
            tsc_backward: record.tsc_backward.load(),
            tsc_warps: record.tsc_warps.load(),
            realtime_backward: record.realtime_backward.load(),
            largest_burst_gap_ns: record.burst_gap.load(Ordering::Relaxed),
            largest_gap_ns: record.gap.load(Ordering::Relaxed),
            largest_gap_since_report_ns: record.gap_since_report.swap(0, Ordering::Relaxed),
        };
        Ok(WatchReport { cpus: cpus.iter().zip(&self.records).map(report).collect() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn board() -> Board {
        Board {
            monotonic: Alone::default(),
            tsc: Alone::default(),
            error: AtomicU32::new(0),
            records: std::array::from_fn(|_| Record::default()),
        }
    }

    fn enter(board: &Board, index: usize, position: Position, monotonic_ns: u64, realtime_ns: u64) {
        let reading = Reading { monotonic_ns, tsc: 2 * monotonic_ns, realtime_ns };
        board.enter(index, position, board.published(), reading);
    }

    #[test]
    fn steps_and_gaps_are_counted() {
        let board = board();
        for (index, position, monotonic_ns, realtime_ns) in [
            (0, Position::First, 100, 1000),
            (0, Position::Next, 110, 1010),
            (1, Position::First, 105, 1005),
            (1, Position::Next, 130, 990),
            (0, Position::First, 150, 1020),
            (0, Position::Next, 149, 1020),
        ] {
            enter(&board, index, position, monotonic_ns, realtime_ns);
        }
        let report = board.report(&[3, 7]).unwrap();
        let first = CpuReport {
            cpu: 3,
            readings: 4,
            monotonic_ns: 149,
            tsc: 298,
            backward: Steps { count: 1, largest: 1 },
            warps: Steps { count: 1, largest: 1 },
            tsc_backward: Steps { count: 1, largest: 2 },
            tsc_warps: Steps { count: 1, largest: 2 },
            realtime_backward: Steps::default(),
            largest_burst_gap_ns: 10,
            largest_gap_ns: 40,
            largest_gap_since_report_ns: 40,
        };
        let second = CpuReport {
            cpu: 7,
            readings: 2,
            monotonic_ns: 130,
            tsc: 260,
            warps: Steps { count: 1, largest: 5 },
            tsc_warps: Steps { count: 1, largest: 10 },
            realtime_backward: Steps { count: 1, largest: 15 },
            largest_burst_gap_ns: 25,
            largest_gap_ns: 25,
            largest_gap_since_report_ns: 25,
            ..CpuReport::default()
        };
        assert_eq!(report.cpus, [first, second]);
        assert_eq!(report.readings(), 6);
        assert_eq!(report.faults().len(), 4, "{:?}", report.faults());
        assert_eq!(board.report(&[3]).unwrap().cpus[0].largest_gap_since_report_ns, 0);
    }

    #[test]
    fn a_reader_without_its_processor_is_reported() {
        let board = board();
        board.fail(libc::EINVAL);
        assert_eq!(board.report(&[0]).unwrap_err().raw_os_error(), Some(libc::EINVAL));
    }

    proptest! {
        #[test]
        fn readings_in_order_have_no_faults(
            steps in prop::collection::vec((0_usize..4, 0_u64..1000), 1..100),
        ) {
            let board = board();
            let mut now = 1;
            for (index, step) in &steps {
                now += step;
                enter(&board, *index, Position::Next, now, now);
            }
            let report = board.report(&[0, 1, 2, 3]).unwrap();
            prop_assert_eq!(report.faults(), Vec::<String>::new());
            prop_assert_eq!(report.readings(), steps.len() as u64);
        }

        /// Compares the board with a model that keeps all readings.
        #[test]
        fn each_smaller_reading_is_a_warp(
            readings in prop::collection::vec((0_usize..3, 1_u64..1000), 1..60),
        ) {
            let board = board();
            let mut warps = [Steps::default(); 3];
            for (at, (index, now)) in readings.iter().enumerate() {
                let largest = readings[..at].iter().map(|(_, value)| *value).max().unwrap_or(0);
                if *now < largest {
                    warps[*index].count += 1;
                    warps[*index].largest = warps[*index].largest.max(largest - now);
                }
                enter(&board, *index, Position::First, *now, *now);
            }
            let report = board.report(&[0, 1, 2]).unwrap();
            prop_assert_eq!(report.cpus.iter().map(|cpu| cpu.warps).collect::<Vec<_>>(), warps);
            for cpu in &report.cpus {
                prop_assert!(cpu.backward.count <= cpu.warps.count, "a step backward is a warp");
            }
        }
    }
}
