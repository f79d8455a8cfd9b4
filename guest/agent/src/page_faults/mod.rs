//! Rate of page faults: the test cases page_fault1 to page_fault3 of the benchmark suite
//! will-it-scale.
//!
//! Each task is bound to a processor, waits for all others, and then repeatedly maps memory, writes
//! one byte to each page of 4 KiB, which is counted, and unmaps the memory. The counts are read
//! once a second; the first second is ignored. Differences from the original: the size of a mapping
//! is a parameter, and `madvise(2)` instead of the guest's setting determines whether page_fault1
//! gets huge pages.

mod board;
pub mod instructions;
mod mapper;

use std::io;
use std::thread;
use std::time::{Duration, Instant};

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use serde::{Deserialize, Serialize};

use crate::child::Child;
use crate::memory::PAGE_BYTES;
use board::{Board, SharedBoard};
use mapper::{Mapper, check_size};

/// Maximum number of tasks of a run.
pub const TASK_LIMIT: u32 = 64;
/// Maximum duration of a run in seconds.
pub const SECONDS_LIMIT: u32 = 3600;
/// Interval of the samples.
const SAMPLE: Duration = Duration::from_secs(1);
/// Interval of checks whether all tasks are ready.
const POLL: Duration = Duration::from_millis(1);

/// Kind of the mapping.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FaultKind {
    /// Private anonymous memory without huge pages: page_fault1.
    Fault1,
    /// Private anonymous memory in aligned huge pages: page_fault1 with transparent huge pages.
    Fault1Huge,
    /// A file in `/tmp`, mapped privately: page_fault2. Each write copies the file's page.
    Fault2,
    /// A file in `/tmp`, mapped shared: page_fault3. The file's pages stay allocated.
    Fault3,
}

/// Kind of the tasks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TaskKind {
    /// Processes, each with its own address space.
    Processes,
    /// Threads in one address space.
    Threads,
}

/// Parameters of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PageFaults {
    /// Kind of the mappings.
    pub kind: FaultKind,
    /// Number of tasks, 1 to [`TASK_LIMIT`].
    pub tasks: u32,
    /// Kind of the tasks.
    pub task_kind: TaskKind,
    /// Measured seconds, 1 to [`SECONDS_LIMIT`]; the run takes one more.
    pub seconds: u32,
    /// Size of each mapping: a multiple of the page size, with [`FaultKind::Fault1Huge`] of the
    /// huge page size.
    pub mapping_bytes: u64,
}

/// Result of a run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct FaultReport {
    /// Number of pages written in the measured seconds.
    pub ops_total: u64,
    /// Mean number of pages written per second.
    pub ops_per_s: f64,
    /// Number of pages written in each measured second.
    pub samples: Vec<f64>,
    /// Number of pages written in the measured seconds by each task.
    pub tasks: Vec<u64>,
}

impl PageFaults {
    /// Runs the measurement. The calling process must have a single thread.
    pub fn run(self) -> Result<FaultReport, String> {
        self.check()?;
        let board = SharedBoard::new().map_err(|error| format!("memory for counters: {error}"))?;
        let cpus = allowed_cpus().map_err(|error| format!("processors: {error}"))?;
        let tasks: Vec<(usize, u32)> =
            (0..self.tasks as usize).zip(cpus.into_iter().cycle()).collect();
        let report = match self.task_kind {
            TaskKind::Processes => self.run_processes(&board, &tasks),
            TaskKind::Threads => self.run_threads(&board, &tasks),
        }?;
        match report.ops_total {
            0 => Err("no page was written in the measured time".to_owned()),
            _ => Ok(report),
        }
    }

    fn check(&self) -> Result<(), String> {
        let limits = |name: &str, value: u32, limit: u32| match value {
            value if (1..=limit).contains(&value) => Ok(()),
            _ => Err(format!("{name}: {value} requested; 1 to {limit} are possible")),
        };
        limits("tasks", self.tasks, TASK_LIMIT)?;
        limits("seconds", self.seconds, SECONDS_LIMIT)?;
        check_size(self.kind, self.mapping_bytes)
    }

    fn run_processes(
        self,
        board: &SharedBoard,
        tasks: &[(usize, u32)],
    ) -> Result<FaultReport, String> {
        // If a task fails to start, dropping the previous ones kills them.
        let start = |(index, cpu): &(usize, u32)| {
            Child::<()>::start(|| self.task(board, *index, *cpu)).map_err(describe)
        };
        let children = tasks.iter().map(start).collect::<Result<Vec<_>, _>>()?;
        let all_alive = || children.iter().all(|child| !child.has_ended());
        let report = self.watch(board, all_alive);
        board.stop();
        children.into_iter().try_for_each(Child::finish)?;
        report
    }

    fn run_threads(
        self,
        board: &SharedBoard,
        tasks: &[(usize, u32)],
    ) -> Result<FaultReport, String> {
        thread::scope(|scope| {
            let mut threads = Vec::new();
            for (index, cpu) in tasks {
                let task = move || self.task(board, *index, *cpu);
                match thread::Builder::new().spawn_scoped(scope, task) {
                    Ok(thread) => threads.push(thread),
                    Err(error) => {
                        // Otherwise tasks that wait for all to be ready would wait for ever.
                        board.stop();
                        return Err(describe(error));
                    }
                }
            }
            let report = self.watch(board, || true);
            board.stop();
            for thread in threads {
                thread.join().map_err(|_| "a task has panicked".to_owned())??;
            }
            report
        })
    }

    /// Starts the tasks and samples their counts.
    fn watch(self, board: &Board, all_alive: impl Fn() -> bool) -> Result<FaultReport, String> {
        while board.ready() < self.tasks {
            if board.stopped() || !all_alive() {
                return Err("a task could not start".to_owned());
            }
            thread::sleep(POLL);
        }
        board.go();
        let started = Instant::now();
        let look = || (Instant::now(), board.counts(self.tasks as usize));
        let (mut samples, mut first, mut last) = (Vec::new(), None, look());
        for second in 1..=self.seconds + 1 {
            thread::sleep((started + SAMPLE * second).saturating_duration_since(Instant::now()));
            let now = look();
            let sum = |counts: &[u64]| counts.iter().sum::<u64>();
            if first.is_none() {
                first = Some(now.clone());
            } else {
                samples.push((sum(&now.1) - sum(&last.1)) as f64 / (now.0 - last.0).as_secs_f64());
            }
            last = now;
        }
        let first = first.ok_or("no second was measured")?;
        let tasks: Vec<u64> =
            last.1.iter().zip(&first.1).map(|(last, first)| last - first).collect();
        let ops_total = tasks.iter().sum();
        let ops_per_s = ops_total as f64 / (last.0 - first.0).as_secs_f64();
        Ok(FaultReport { ops_total, ops_per_s, samples, tasks })
    }

    /// Main function of a task.
    fn task(self, board: &Board, index: usize, cpu: u32) -> Result<(), String> {
        let result = bind(cpu).and_then(|()| self.fault(board, index)).map_err(describe);
        if result.is_err() {
            board.stop();
        }
        result
    }

    fn fault(self, board: &Board, index: usize) -> io::Result<()> {
        let mapper = Mapper::new(self.kind, self.mapping_bytes)?;
        board.wait_for_go(POLL);
        let mut count = 0;
        loop {
            let mut mapping = mapper.map()?;
            for page in 0..mapping.pages() {
                mapping.write_byte(page * PAGE_BYTES);
                count += 1;
                board.count(index, count);
                if board.stopped() {
                    return Ok(());
                }
            }
        }
    }
}

fn describe(error: impl std::fmt::Display) -> String {
    format!("a task: {error}")
}

fn allowed_cpus() -> io::Result<Vec<u32>> {
    let allowed = sched_getaffinity(None)?;
    Ok((0..CpuSet::MAX_CPU as u32).filter(|cpu| allowed.is_set(*cpu as usize)).collect())
}

fn bind(cpu: u32) -> io::Result<()> {
    let mut set = CpuSet::new();
    set.set(cpu as usize);
    Ok(sched_setaffinity(None, &set)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    const RUN: PageFaults = PageFaults {
        kind: FaultKind::Fault1,
        tasks: 2,
        task_kind: TaskKind::Threads,
        seconds: 1,
        mapping_bytes: 1 << 20,
    };

    #[test]
    fn threads_write_pages() {
        for kind in [FaultKind::Fault1Huge, FaultKind::Fault2] {
            let report = PageFaults { kind, mapping_bytes: 2 << 20, ..RUN }.run().unwrap();
            assert_eq!((report.samples.len(), report.tasks.len()), (1, 2), "{kind:?}: {report:?}");
            assert_eq!(report.tasks.iter().sum::<u64>(), report.ops_total, "{kind:?}: {report:?}");
            assert!(report.ops_per_s > 0.0 && report.samples[0] > 0.0, "{kind:?}: {report:?}");
        }
    }

    #[test]
    fn invalid_parameters_are_refused_with_their_range() {
        for (run, words) in [
            (PageFaults { tasks: 0, ..RUN }, "tasks: 0 requested; 1 to 64"),
            (PageFaults { tasks: 65, ..RUN }, "1 to 64"),
            (PageFaults { seconds: 0, ..RUN }, "seconds: 0"),
            (PageFaults { mapping_bytes: 0, ..RUN }, "multiple of 4096"),
            (PageFaults { mapping_bytes: 4097, ..RUN }, "multiple of 4096"),
            (PageFaults { kind: FaultKind::Fault1Huge, ..RUN }, "multiple of 2097152"),
        ] {
            let error = run.run().unwrap_err();
            assert!(error.contains(words), "{error}");
        }
        let error = PageFaults { mapping_bytes: 1 << 60, ..RUN }.run().unwrap_err();
        assert!(error.contains("a task"), "{error}");
    }
}
