//! Instructions of page faults and of frees, in a guest whose emulator counts them.
//!
//! The time stamp counter of such an emulator advances by one with each instruction (QEMU's
//! `-icount shift=0`), and the kernel's clocks follow it: a nanosecond of a task's run time is an
//! instruction. Idle time is skipped, so that pauses cost nothing. On any other machine the numbers
//! are ticks and have no meaning beyond it.

use std::fs;
use std::io;
use std::thread;
use std::time::Duration;

use rustix::time::ClockId;
use serde::{Deserialize, Serialize};

use super::FaultKind;
use super::mapper::{Mapper, check_size};
use crate::clock;
use crate::memory::PAGE_BYTES;

/// Maximum number of passes of either kind.
pub const PASS_LIMIT: u32 = 1000;
/// Statistics of the scheduler (Linux Documentation/scheduler/sched-stats.rst).
const SCHEDSTAT: &str = "/proc/schedstat";
/// Shortest pause in which this task stops to run.
const SHORT_MS: u64 = 1;
/// Position of the time that tasks ran, in ns, in the line of a CPU, after its name.
const RUN_TIME_FIELD: usize = 6;

/// Parameters of a run: one task maps memory, writes a byte to each page and unmaps it, a number of
/// times. It is idle before the first measured pass and after the last one, so that a tracker's
/// delayed work is done apart from these passes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct FaultInstructions {
    /// Kind of the mappings.
    pub kind: FaultKind,
    /// Size of each mapping: a multiple of the page size, with [`FaultKind::Fault1Huge`] of the
    /// huge page size.
    pub mapping_bytes: u64,
    /// Number of passes before these, which are not measured: the first ones allocate a file's
    /// pages and activate them (Linux `mark_page_accessed`).
    pub warm_up_passes: u32,
    /// Number of measured passes, 1 to [`PASS_LIMIT`].
    pub passes: u32,
    /// Idle time before and after the passes in ms.
    pub idle_ms: u64,
}

/// Result of a run. All counts are instructions.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct InstructionReport {
    /// Number of pages written.
    pub pages: u64,
    /// Mapping the memory and writing to each page, with whatever ran in between.
    pub fault: u64,
    /// Unmapping it, in the same way.
    pub free: u64,
    /// Executed by other tasks, such as the kernel's threads, in the idle time after the passes.
    pub afterwards: u64,
}

impl FaultInstructions {
    /// Runs the measurement.
    pub fn run(self) -> Result<InstructionReport, String> {
        check_size(self.kind, self.mapping_bytes)?;
        let (passes, warm_up) = (self.passes, self.warm_up_passes);
        if !(1..=PASS_LIMIT).contains(&passes) || warm_up > PASS_LIMIT {
            return Err(format!(
                "passes: {passes} and {warm_up} before them requested; 1 to {PASS_LIMIT} are possible"
            ));
        }
        self.measure().map_err(|error| error.to_string())
    }

    fn measure(self) -> io::Result<InstructionReport> {
        let mapper = Mapper::new(self.kind, self.mapping_bytes)?;
        let mut report = InstructionReport::default();
        for _ in 0..self.warm_up_passes {
            pass(&mapper)?;
        }
        others_ns_after(self.idle_ms)?;
        for _ in 0..self.passes {
            let one = pass(&mapper)?;
            report.fault += one.fault;
            report.free += one.free;
        }
        let before = others_ns_after(SHORT_MS)?;
        report.afterwards = others_ns_after(self.idle_ms)?.saturating_sub(before);
        report.pages = u64::from(self.passes) * (self.mapping_bytes / PAGE_BYTES as u64);
        Ok(report)
    }
}

/// Instructions of one pass.
struct Pass {
    fault: u64,
    free: u64,
}

fn pass(mapper: &Mapper) -> io::Result<Pass> {
    let start = clock::tsc();
    let mut mapping = mapper.map()?;
    for page in 0..mapping.pages() {
        mapping.write_byte(page * PAGE_BYTES);
    }
    let written = clock::tsc();
    drop(mapping);
    let end = clock::tsc();
    Ok(Pass { fault: written - start, free: end - written })
}

/// Sleeps; returns the run time of all other tasks so far in ns. The scheduler adds a task's run
/// time when the task stops to run, which this one did last before it slept.
fn others_ns_after(idle_ms: u64) -> io::Result<u64> {
    thread::sleep(Duration::from_millis(idle_ms));
    let unknown = || io::Error::other(format!("{SCHEDSTAT} has no run time of the CPUs"));
    let all = run_time_of(&fs::read_to_string(SCHEDSTAT)?).ok_or_else(unknown)?;
    Ok(all.saturating_sub(clock::read(ClockId::ThreadCPUTime)))
}

/// Run time of all tasks in ns: the sum over all CPUs.
fn run_time_of(schedstat: &str) -> Option<u64> {
    let of_cpu = |line: &str| {
        let (name, fields) = line.split_once(' ')?;
        name.strip_prefix("cpu")?.parse::<u32>().ok()?;
        fields.split(' ').nth(RUN_TIME_FIELD)?.parse::<u64>().ok()
    };
    schedstat.lines().filter_map(of_cpu).reduce(|sum, one| sum + one)
}

#[cfg(test)]
mod tests {
    use super::*;

    const RUN: FaultInstructions = FaultInstructions {
        kind: FaultKind::Fault1,
        mapping_bytes: 1 << 20,
        warm_up_passes: 1,
        passes: 2,
        idle_ms: 1,
    };

    #[test]
    fn the_run_time_is_the_sum_of_all_cpus() {
        let text = "version 15\ntimestamp 4294902000\ncpu0 1 0 3 4 5 6 700 8 9\n\
                    domain0 3 0 0 0 0 0 5 0 0\ncpu1 0 0 0 0 0 0 30 0 0\n";
        assert_eq!(run_time_of(text), Some(730));
        assert_eq!(run_time_of("version 15\n"), None);
    }

    #[test]
    fn each_page_of_each_pass_is_written() {
        for kind in [FaultKind::Fault1, FaultKind::Fault2, FaultKind::Fault3] {
            let mapper = Mapper::new(kind, 1 << 20).unwrap();
            let one = pass(&mapper).unwrap();
            assert!(one.fault > 0 && one.free > 0, "{kind:?}");
        }
        if std::path::Path::new(SCHEDSTAT).exists() {
            assert_eq!(RUN.run().unwrap().pages, 512);
        }
    }

    #[test]
    fn invalid_parameters_are_refused_with_their_range() {
        for (run, words) in [
            (FaultInstructions { passes: 0, ..RUN }, "1 to 1000"),
            (FaultInstructions { mapping_bytes: 4097, ..RUN }, "multiple of 4096"),
            (FaultInstructions { kind: FaultKind::Fault1Huge, ..RUN }, "multiple of 2097152"),
        ] {
            let error = run.run().unwrap_err();
            assert!(error.contains(words), "{error}");
        }
    }
}
