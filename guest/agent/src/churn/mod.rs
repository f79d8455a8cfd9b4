//! Workload that maps, writes, checks and frees memory in part and in whole, and lets child
//! processes inherit it. The content of every page is known, and each page is checked before it is
//! freed.
//!
//! The operations depend only on a seed; their number may depend on a time limit. All of them are
//! ordinary uses of memory: a page's content is wrong only if it was changed from outside.

mod region;

use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

pub use region::{Source, WrongPage};

use crate::child::Child;
use crate::memory::{HUGE_PAGE_BYTES, PAGE_BYTES};
use crate::random::{Random, mix};
use region::Region;

/// Maximum number of processes.
pub const TASK_LIMIT: u32 = 16;
/// Minimum memory of a process in bytes.
pub const LEAST_TASK_BYTES: u64 = 8 << 20;
/// Number of pages in a huge page.
const HUGE_PAGES: usize = HUGE_PAGE_BYTES / PAGE_BYTES;

/// Parameters of the workload.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Churn {
    /// Maximum total memory of all processes, apart from copies for their child processes.
    pub bytes: u64,
    /// Number of processes.
    pub tasks: u32,
    /// Seed of the operations.
    pub seed: u64,
    /// Total number of operations of all processes.
    pub operations: Option<u64>,
    /// Time limit.
    pub seconds: Option<u64>,
}

/// Result of the workload.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChurnReport {
    /// Number of operations.
    pub operations: u64,
    /// Number of pages written.
    pub pages_written: u64,
    /// Number of pages checked.
    pub pages_verified: u64,
    /// Number of pages freed, including unmapped ones.
    pub pages_freed: u64,
    /// Number of child processes that inherited memory and wrote to it.
    pub forks: u64,
    /// Number of operations that the kernel refused, for example for lack of memory.
    pub refused: u64,
    /// Number of pages with wrong content.
    pub wrong_pages: u64,
    /// The first wrong page found.
    pub first_wrong: Option<WrongPage>,
}

impl ChurnReport {
    /// Adds the result of another process.
    pub fn add(&mut self, other: Self) {
        self.operations += other.operations;
        self.pages_written += other.pages_written;
        self.pages_verified += other.pages_verified;
        self.pages_freed += other.pages_freed;
        self.forks += other.forks;
        self.refused += other.refused;
        self.wrong_pages += other.wrong_pages;
        self.first_wrong = self.first_wrong.take().or(other.first_wrong);
    }

    fn wrong(&mut self, page: WrongPage) {
        self.wrong_pages += 1;
        self.first_wrong.get_or_insert(page);
    }
}

impl Churn {
    /// Runs the workload. The calling process must have a single thread.
    pub fn run(self) -> Result<ChurnReport, String> {
        if !(1..=TASK_LIMIT).contains(&self.tasks) {
            return Err(format!("tasks: {} requested; 1 to {TASK_LIMIT} are possible", self.tasks));
        }
        let tasks = u64::from(self.tasks);
        let task_bytes = self.bytes / tasks;
        if task_bytes < LEAST_TASK_BYTES {
            return Err(format!(
                "bytes: {} requested; {tasks} tasks need at least {LEAST_TASK_BYTES} each",
                self.bytes
            ));
        }
        if self.operations.is_none() && self.seconds.is_none() {
            return Err(
                "neither operations nor seconds given: the workload would never end".to_owned()
            );
        }
        let deadline = self.seconds.map(|seconds| Instant::now() + Duration::from_secs(seconds));
        let children = (0..tasks)
            .map(|index| {
                // The first tasks get the remainder of the division.
                let operations =
                    self.operations.map(|all| all / tasks + u64::from(index < all % tasks));
                let pages = usize::try_from(task_bytes / PAGE_BYTES as u64).unwrap_or(usize::MAX);
                let seed = mix(self.seed.wrapping_add(index));
                Child::start(|| Ok(Task::new(seed, pages).run(operations, deadline)))
            })
            .collect::<Result<Vec<_>, _>>()
            .map_err(|error| format!("a task: {error}"))?;
        let mut report = ChurnReport::default();
        for child in children {
            report.add(child.finish().map_err(|error| format!("a task: {error}"))?);
        }
        Ok(report)
    }
}

/// Operations of a task.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Operation {
    Map,
    Unmap,
    GiveBack,
    Rewrite,
    Verify,
    Fork,
}

/// The memory of one process.
struct Task {
    random: Random,
    limit_pages: usize,
    regions: Vec<Region>,
    report: ChurnReport,
}

impl Task {
    fn new(seed: u64, limit_pages: usize) -> Self {
        Self {
            random: Random::new(seed),
            limit_pages,
            regions: Vec::new(),
            report: ChurnReport::default(),
        }
    }

    fn run(mut self, operations: Option<u64>, deadline: Option<Instant>) -> ChurnReport {
        while operations.is_none_or(|limit| self.report.operations < limit)
            && deadline.is_none_or(|deadline| Instant::now() < deadline)
        {
            self.step();
        }
        while !self.regions.is_empty() {
            self.unmap(0);
        }
        self.report
    }

    fn step(&mut self) {
        let operation = match self.random.below(100) {
            0..30 => Operation::Map,
            30..48 => Operation::Unmap,
            48..64 => Operation::GiveBack,
            64..82 => Operation::Rewrite,
            82..97 => Operation::Verify,
            _ => Operation::Fork,
        };
        self.report.operations += 1;
        let chosen = self.random.below(self.regions.len());
        if self.regions.is_empty() || operation == Operation::Map {
            self.map();
            return;
        }
        let pages = self.part_of(chosen);
        match operation {
            Operation::Map => {}
            Operation::Unmap => self.unmap(chosen),
            Operation::GiveBack => {
                self.verify(chosen, pages.clone());
                self.report.pages_freed += pages.len() as u64;
                let given = self.regions[chosen].give_back(pages);
                self.report.refused += u64::from(given.is_err());
            }
            Operation::Rewrite => {
                self.verify(chosen, pages.clone());
                self.write(chosen, pages);
            }
            Operation::Verify => self.verify(chosen, 0..self.regions[chosen].pages()),
            Operation::Fork => self.fork(chosen, pages),
        }
    }

    /// Maps a new region and writes to it; unmaps others first if the limit is reached.
    fn map(&mut self) {
        let (source, most_pages) = match self.random.below(20) {
            0..8 => (Source::Anonymous, 64),
            8..13 => (Source::Anonymous, 1024),
            13..16 => (Source::Huge, 4 * HUGE_PAGES),
            16..18 => (Source::SharedFile, 512),
            _ => (Source::PrivateFile, 256),
        };
        // At most a quarter of the limit, so that there are many regions.
        let most_pages = most_pages.min(self.limit_pages / 4);
        let pages = 1 + self.random.below(most_pages);
        let seed = self.random.draw();
        let Ok(region) = Region::map(source, pages, seed) else {
            self.report.refused += 1;
            return;
        };
        while self.cost_pages() + region.cost_pages() > self.limit_pages {
            let old = self.random.below(self.regions.len().min(4));
            self.unmap(old);
        }
        self.regions.push(region);
        let last = self.regions.len() - 1;
        if self.random.chance(3, 4) {
            self.write(last, 0..self.regions[last].pages());
        } else {
            for page in 0..self.regions[last].pages() {
                if self.random.chance(1, 2) {
                    self.write(last, page..page + 1);
                }
            }
        }
    }

    fn unmap(&mut self, index: usize) {
        self.verify(index, 0..self.regions[index].pages());
        let region = self.regions.swap_remove(index);
        self.report.pages_freed += region.pages() as u64;
    }

    fn write(&mut self, index: usize, pages: std::ops::Range<usize>) {
        self.report.pages_written += pages.len() as u64;
        self.regions[index].write(pages);
    }

    fn verify(&mut self, index: usize, pages: std::ops::Range<usize>) {
        self.report.pages_verified += pages.len() as u64;
        let report = &mut self.report;
        self.regions[index].verify(pages, |page| report.wrong(page));
    }

    /// Forks a child process that writes to inherited pages while this one writes to the same, so
    /// that both cause copies.
    fn fork(&mut self, index: usize, pages: std::ops::Range<usize>) {
        self.report.forks += 1;
        let region = &mut self.regions[index];
        let all = 0..region.pages();
        // Only one of both may write to shared pages.
        let childs = if region.is_shared() { 0..0 } else { pages.clone() };
        let child = Child::start(|| {
            let mut report =
                ChurnReport { pages_written: childs.len() as u64, ..ChurnReport::default() };
            region.write(childs);
            if !region.is_shared() {
                report.pages_verified = all.len() as u64;
                region.verify(all, |page| report.wrong(page));
            }
            Ok(report)
        });
        self.write(index, pages);
        match child.map(Child::finish) {
            Ok(Ok(report)) => self.report.add(report),
            // The OOM killer, which selects the largest process first, killed it.
            Ok(Err(_)) | Err(_) => self.report.refused += 1,
        }
        self.verify(index, 0..self.regions[index].pages());
    }

    /// A random non-empty part of a region.
    fn part_of(&mut self, index: usize) -> std::ops::Range<usize> {
        let pages = self.regions[index].pages();
        let start = self.random.below(pages);
        start..start + 1 + self.random.below(pages - start)
    }

    fn cost_pages(&self) -> usize {
        self.regions.iter().map(Region::cost_pages).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CHURN: Churn =
        Churn { bytes: 8 << 20, tasks: 1, seed: 1, operations: Some(1), seconds: None };

    /// Runs operations of a task, without those that require a single-threaded process.
    fn steps(seed: u64, count: usize) -> ChurnReport {
        let mut task = Task::new(seed, 8 << 8);
        let mut steps = 0;
        while steps < count {
            let mut ahead = task.random.clone();
            if ahead.below(100) >= 97 {
                task.random = ahead;
                continue;
            }
            task.step();
            assert!(task.cost_pages() <= task.limit_pages);
            steps += 1;
        }
        task.run(Some(0), None)
    }

    #[test]
    fn all_pages_are_right_and_all_memory_is_freed() {
        let report = steps(5, 400);
        assert_eq!(
            (report.operations, report.wrong_pages, report.first_wrong.as_ref()),
            (400, 0, None)
        );
        assert!(
            report.pages_written > 1000 && report.pages_verified > report.pages_written,
            "{report:?}"
        );
        assert!(report.pages_freed > 0 && report.refused == 0, "{report:?}");
    }

    #[test]
    fn the_seed_determines_the_operations() {
        assert_eq!(steps(1, 100), steps(1, 100));
        assert_ne!(steps(1, 100), steps(2, 100));
    }

    #[test]
    fn invalid_parameters_are_refused() {
        for (churn, words) in [
            (Churn { tasks: 0, ..CHURN }, "tasks: 0 requested; 1 to 16"),
            (Churn { tasks: 17, ..CHURN }, "1 to 16"),
            (Churn { tasks: 2, ..CHURN }, "at least 8388608 each"),
            (Churn { operations: None, ..CHURN }, "would never end"),
        ] {
            let error = churn.run().unwrap_err();
            assert!(error.contains(words), "{error}");
        }
    }
}
