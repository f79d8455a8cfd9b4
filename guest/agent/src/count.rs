//! Counters in all pages of some memory, counted up one page after another for as long as asked,
//! with every page checked before it is written.
//!
//! Many pages have the same content at any time, so whoever merges equal pages finds the same ones
//! again and again, and each of them is written to again. A write that is lost, or that shows in
//! another page, is found when the page's turn comes next, because what each page has to hold is
//! known apart from it.

use std::hint::black_box;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::child::Child;
use crate::memory::{Mapping, PAGE_BYTES, PAGE_WORDS, pattern_word};

/// Most processes.
pub const TASK_LIMIT: u32 = 16;
/// Most pages between two pauses.
const BURST_LIMIT: u32 = 1 << 20;

/// What is to be done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Count {
    /// Memory of all processes together.
    pub bytes: u64,
    /// Processes.
    pub tasks: u32,
    /// How many different contents there are as long as all pages have been counted up equally
    /// often.
    pub kinds: u32,
    /// Pages that are counted up without a pause.
    pub burst_pages: u32,
    /// Length of a pause in microseconds.
    pub pause_us: u64,
    /// How long it goes on.
    pub seconds: u64,
}

/// What was done and found.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CountReport {
    /// How often a page was counted up.
    pub increments: u64,
    /// Times that all pages were, by the process that did so least often.
    pub sweeps: u64,
    /// Checks of pages that found something else than what was written.
    pub wrong_pages: u64,
    /// The first of these.
    pub first_wrong: Option<WrongWord>,
}

/// A word that does not hold what was written to it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct WrongWord {
    /// Number of the page.
    pub page: usize,
    /// Number of the word in it.
    pub word: usize,
    /// What it should hold.
    pub expected: u64,
    /// What it holds.
    pub found: u64,
    /// How often the page was counted up before.
    pub count: u64,
}

impl Count {
    /// Does it. The calling process must have a single thread.
    ///
    /// # Errors
    /// Says what cannot be meant, or which process could not do its work.
    pub fn run(self) -> Result<CountReport, String> {
        let pages = self.bytes / u64::from(self.tasks.max(1)) / PAGE_BYTES as u64;
        let bad = |name: &str, value: u64, range: &str| {
            Err(format!("{name}: {value} was asked for; {range}"))
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

/// One process' pages.
struct Task {
    order: Count,
    mapping: Mapping,
    /// How often each page was counted up.
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

    /// Counts until the deadline, but to the end of the first sweep, and checks everything once
    /// more.
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
            // One mistake counts once.
            for (word, value) in self.mapping.page_mut(page).iter_mut().enumerate() {
                *value = expected(word);
            }
        }
    }
}

/// Neighbours are of different kinds, and the kinds follow each other in the same order again and
/// again, so that runs of pages are equal too.
fn kind_of(page: usize, kinds: u32) -> u64 {
    page as u64 % u64::from(kinds)
}

/// The word that counts in pages of a kind.
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
    fn all_pages_are_counted_up_and_nothing_is_wrong() {
        let report = Task::new(COUNT, 64).unwrap().run(Instant::now());
        assert_eq!((report.sweeps, report.increments, report.wrong_pages), (1, 64, 0));
        assert_eq!(report.first_wrong, None);
    }

    #[test]
    fn pages_of_a_kind_are_equal_and_others_are_not() {
        let mut task = Task::new(COUNT, 64).unwrap();
        for page in 0..64 {
            task.count_up(page);
        }
        assert_eq!(task.mapping.page(3), task.mapping.page(63));
        assert_ne!(task.mapping.page(3), task.mapping.page(4));
    }

    #[test]
    fn a_lost_write_and_a_strange_one_are_found() {
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
    fn impossible_requests_are_refused() {
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
