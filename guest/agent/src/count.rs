//! Workload with a counter in each page. The pages are incremented in turn for a given time, and
//! each is checked before it is written.
//!
//! Many pages have the same content at any time, so that they are merged again and again, and each
//! merged page is written to again. A lost write, or one that appears in another page, is detected
//! at the page's next turn, because its expected content is recorded separately.

use std::hint::black_box;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::child::Child;
use crate::memory::{Mapping, PAGE_BYTES, PAGE_WORDS, pattern_word};

/// Maximum number of processes.
pub const TASK_LIMIT: u32 = 16;
/// Maximum number of pages between two pauses.
const BURST_LIMIT: u32 = 1 << 20;

/// Parameters of the workload.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Count {
    /// Total memory of all processes.
    pub bytes: u64,
    /// Number of processes.
    pub tasks: u32,
    /// Number of different page contents while all counters are equal.
    pub kinds: u32,
    /// Number of pages to increment between two pauses.
    pub burst_pages: u32,
    /// Length of a pause in microseconds.
    pub pause_us: u64,
    /// Duration.
    pub seconds: u64,
}

/// Result of the workload.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CountReport {
    /// Number of increments.
    pub increments: u64,
    /// Number of complete sweeps over all pages by the slowest process.
    pub sweeps: u64,
    /// Number of checks that found a wrong page.
    pub wrong_pages: u64,
    /// The first wrong word found.
    pub first_wrong: Option<WrongWord>,
}

/// A word whose content differs from the last write.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct WrongWord {
    /// Number of the page.
    pub page: usize,
    /// Number of the word in the page.
    pub word: usize,
    /// Expected value.
    pub expected: u64,
    /// Value found.
    pub found: u64,
    /// Number of previous increments of the page.
    pub count: u64,
}

impl Count {
    /// Runs the workload. The calling process must have a single thread.
    ///
    /// # Errors
    /// An invalid parameter, or the failure of a process.
    pub fn run(self) -> Result<CountReport, String> {
        let pages = self.bytes / u64::from(self.tasks.max(1)) / PAGE_BYTES as u64;
        let bad = |name: &str, value: u64, range: &str| {
            Err(format!("{name}: {value} requested; {range}"))
        };
        if !(1..=TASK_LIMIT).contains(&self.tasks) {
            return bad("tasks", self.tasks.into(), &format!("1 to {TASK_LIMIT} are possible"));
        }
        if pages == 0 {
            return bad("bytes", self.bytes, &format!("{} tasks need a page each", self.tasks));
        }
        if !(1..=pages).contains(&u64::from(self.kinds)) {
            return bad(
                "kinds",
                self.kinds.into(),
                &format!("1 to {pages}, the pages of a task, are possible"),
            );
        }
        if !(1..=BURST_LIMIT).contains(&self.burst_pages) {
            return bad(
                "burst_pages",
                self.burst_pages.into(),
                &format!("1 to {BURST_LIMIT} are possible"),
            );
        }
        let deadline = Instant::now() + Duration::from_secs(self.seconds);
        let task = |_| Child::start(|| Ok(Task::new(self, pages as usize)?.run(deadline)));
        let children: Vec<_> = (0..self.tasks)
            .map(task)
            .collect::<Result<_, _>>()
            .map_err(|error| format!("a task: {error}"))?;
        let mut report = CountReport { sweeps: u64::MAX, ..CountReport::default() };
        for child in children {
            let part: CountReport = child.finish().map_err(|error| format!("a task: {error}"))?;
            report.increments += part.increments;
            report.sweeps = report.sweeps.min(part.sweeps);
            report.wrong_pages += part.wrong_pages;
            report.first_wrong = report.first_wrong.or(part.first_wrong);
        }
        Ok(report)
    }
}

/// The pages of one process.
struct Task {
    order: Count,
    mapping: Mapping,
    /// Number of increments of each page.
    counts: Vec<u64>,
    report: CountReport,
}

impl Task {
    fn new(order: Count, pages: usize) -> Result<Self, String> {
        let mut mapping = Mapping::new((pages * PAGE_BYTES) as u64)
            .map_err(|error| format!("{pages} pages: {error}"))?;
        for page in 0..pages {
            let kind = kind_of(page, order.kinds);
            for (word, value) in mapping.page_mut(page).iter_mut().enumerate() {
                *value = pattern_word(kind, word);
            }
        }
        Ok(Self { order, mapping, counts: vec![0; pages], report: CountReport::default() })
    }

    /// Increments until the deadline, but at least for one sweep, and then checks all pages.
    fn run(mut self, deadline: Instant) -> CountReport {
        let (burst, pause) =
            (self.order.burst_pages as usize, Duration::from_micros(self.order.pause_us));
        'all: loop {
            for page in 0..self.counts.len() {
                if page % burst == 0 {
                    std::thread::sleep(pause);
                    if self.report.sweeps > 0 && Instant::now() >= deadline {
                        break 'all;
                    }
                }
                self.count_up(page);
            }
            self.report.sweeps += 1;
        }
        for page in 0..self.counts.len() {
            self.check(page);
        }
        self.report
    }

    fn count_up(&mut self, page: usize) {
        self.check(page);
        let place = counter_of(kind_of(page, self.order.kinds));
        let words = black_box(self.mapping.page_mut(page));
        words[place] = words[place].wrapping_add(1);
        self.counts[page] += 1;
        self.report.increments += 1;
    }

    fn check(&mut self, page: usize) {
        let (kind, count) = (kind_of(page, self.order.kinds), self.counts[page]);
        let place = counter_of(kind);
        let expected = |word: usize| {
            let first = pattern_word(kind, word);
            if word == place { first.wrapping_add(count) } else { first }
        };
        let words = black_box(self.mapping.page(page));
        let wrong = (0..PAGE_WORDS).find(|word| words[*word] != expected(*word));
        if let Some(word) = wrong {
            self.report.wrong_pages += 1;
            let wrong =
                WrongWord { page, word, expected: expected(word), found: words[word], count };
            self.report.first_wrong.get_or_insert(wrong);
            // Restore the page, so that an error is counted once.
            for (word, value) in self.mapping.page_mut(page).iter_mut().enumerate() {
                *value = expected(word);
            }
        }
    }
}

/// Kind of a page. Neighbours are of different kinds, and the sequence of kinds repeats, so that
/// runs of pages are equal too.
fn kind_of(page: usize, kinds: u32) -> u64 {
    page as u64 % u64::from(kinds)
}

/// Index of the counter in pages of a kind.
fn counter_of(kind: u64) -> usize {
    (kind as usize).wrapping_mul(37) % PAGE_WORDS
}

#[cfg(test)]
mod tests {
    use super::*;

    const COUNT: Count = Count {
        bytes: 64 * PAGE_BYTES as u64,
        tasks: 1,
        kinds: 4,
        burst_pages: 16,
        pause_us: 0,
        seconds: 0,
    };

    #[test]
    fn all_pages_are_incremented_and_right() {
        let report = Task::new(COUNT, 64).unwrap().run(Instant::now());
        assert_eq!((report.sweeps, report.increments, report.wrong_pages), (1, 64, 0));
        assert_eq!(report.first_wrong, None);
    }

    #[test]
    fn only_pages_of_a_kind_are_equal() {
        let mut task = Task::new(COUNT, 64).unwrap();
        for page in 0..64 {
            task.count_up(page);
        }
        assert_eq!(task.mapping.page(3), task.mapping.page(63));
        assert_ne!(task.mapping.page(3), task.mapping.page(4));
    }

    #[test]
    fn lost_and_foreign_writes_are_detected() {
        let mut task = Task::new(COUNT, 64).unwrap();
        let before = task.mapping.page(5).to_vec();
        task.count_up(5);
        task.mapping.page_mut(5).copy_from_slice(&before);
        task.mapping.page_mut(9)[77] ^= 1;
        let report = task.run(Instant::now());
        assert_eq!(report.wrong_pages, 2, "{report:?}");
        let first = report.first_wrong.unwrap();
        assert_eq!((first.page, first.word, first.count), (5, counter_of(1), 1));
        assert_eq!(first.expected, first.found.wrapping_add(1));
    }

    #[test]
    fn invalid_parameters_are_refused() {
        for (count, words) in [
            (Count { tasks: 0, ..COUNT }, "tasks: 0"),
            (Count { tasks: 17, ..COUNT }, "1 to 16"),
            (Count { bytes: 4095, ..COUNT }, "bytes: 4095"),
            (Count { kinds: 0, ..COUNT }, "kinds: 0"),
            (Count { kinds: 65, ..COUNT }, "1 to 64"),
            (Count { burst_pages: 0, ..COUNT }, "burst_pages: 0"),
        ] {
            let error = count.run().unwrap_err();
            assert!(error.contains(words), "{error}");
        }
    }
}
