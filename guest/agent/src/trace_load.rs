//! Work with a given need of memory over time: parts, one after the other, in which programs hold
//! memory and read files.
//!
//! A part's work is a number of steps of 100 ms. In each of them some of the memory is written and
//! some of the files are read; what takes longer than the step makes the work longer. So the work
//! is the same wherever it runs, and the time that it takes shows what it waited for. A delay that
//! is shorter than a step is made up for by the next ones: those of timers and of the reports would
//! otherwise add up.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::mm::Advice;
use serde::{Deserialize, Serialize};

use crate::memory::{Mapping, PAGE_BYTES};
use crate::random::Random;

/// A step of the work.
const STEP: Duration = Duration::from_millis(100);
/// The longest sleep of a part that waits.
const NAP: Duration = Duration::from_millis(500);
/// Pages that are written in each step.
const PAGES_OF_STEP: usize = 64;
/// Bytes of files that are read at a time.
const READ_BYTES: usize = 128 << 10;

/// The work.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TraceLoad {
    /// A file or block device whose first bytes are the files.
    pub files: String,
    /// A file that always has the [`TraceReport`] so far.
    pub report: String,
    /// The parts, in their order.
    pub parts: Vec<Part>,
}

/// A part of the work. Its document is an array, since the console is slow.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "(bool, u64, u64, bool, u64)", into = "(bool, u64, u64, bool, u64)")]
pub struct Part {
    /// Whether it works; otherwise it waits for an external event.
    pub works: bool,
    /// Its duration if nothing is waited for, in milliseconds.
    pub duration_ms: u64,
    /// Memory of programs at its end, in KiB.
    pub programs_kib: u64,
    /// Whether programs get there in equal steps, and not at once.
    pub is_steady: bool,
    /// Files that are read in it, in KiB.
    pub files_kib: u64,
}

impl From<(bool, u64, u64, bool, u64)> for Part {
    fn from(tuple: (bool, u64, u64, bool, u64)) -> Self {
        let (works, duration_ms, programs_kib, is_steady, files_kib) = tuple;
        Self { works, duration_ms, programs_kib, is_steady, files_kib }
    }
}

impl From<Part> for (bool, u64, u64, bool, u64) {
    fn from(part: Part) -> Self {
        let Part { works, duration_ms, programs_kib, is_steady, files_kib } = part;
        (works, duration_ms, programs_kib, is_steady, files_kib)
    }
}

/// How far the work is.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TraceReport {
    /// Time that the work so far takes if nothing is waited for, in milliseconds.
    pub own_ms: u64,
    /// The part of it without waiting for external events.
    pub work_ms: u64,
    /// Parts that have ended.
    pub parts: u64,
}

/// Does the work.
///
/// # Errors
/// Memory that cannot be mapped, and errors of the files.
pub fn run(load: &TraceLoad) -> Result<TraceReport, String> {
    let files = File::open(&load.files).map_err(|error| format!("{}: {error}", load.files))?;
    let most_kib = load.parts.iter().map(|part| part.programs_kib).max().unwrap_or(0);
    let memory = Mapping::new(most_kib.max(4) << 10).map_err(|error| error.to_string())?;
    let mut work = Work {
        memory,
        pages: 0,
        files,
        report_path: Path::new(&load.report),
        report: TraceReport::default(),
        random: Random::new(most_kib),
        buffer: vec![0; READ_BYTES],
    };
    for part in &load.parts {
        work.part(part).map_err(|error| format!("part {}: {error}", work.report.parts))?;
    }
    Ok(work.report)
}

struct Work<'a> {
    memory: Mapping,
    /// Pages of the mapping that are in use, from its start.
    pages: usize,
    files: File,
    report_path: &'a Path,
    report: TraceReport,
    random: Random,
    buffer: Vec<u8>,
}

impl Work<'_> {
    fn part(&mut self, part: &Part) -> io::Result<()> {
        let begun = Instant::now();
        let before = self.pages;
        let target = (part.programs_kib << 10) as usize / PAGE_BYTES;
        if !part.is_steady {
            self.resize(target)?;
        }
        let files_bytes = part.files_kib << 10;
        if part.works {
            for offset in (0..files_bytes).step_by(READ_BYTES) {
                self.read(offset)?;
            }
        }
        // What was done at once is part of the duration, as far as it fits in there.
        let done_ms = part.duration_ms.min(begun.elapsed().as_millis() as u64);
        let done = Duration::from_millis(done_ms);
        self.pass(done, part.works)?;
        let left = Duration::from_millis(part.duration_ms).saturating_sub(done);
        let step = if part.works { STEP } else { NAP };
        let steps = left.as_millis().div_ceil(step.as_millis()) as usize;
        let mut due = Instant::now();
        for number in 1..=steps {
            let step = step.min(left.saturating_sub(step * (number as u32 - 1)));
            if part.is_steady {
                let way = target.abs_diff(before) * number / steps;
                let pages = if target > before { before + way } else { before - way };
                self.resize(pages)?;
            }
            if part.works {
                self.touch();
                if files_bytes > 0 {
                    let offset = self.random.draw() % files_bytes;
                    self.read(offset)?;
                }
            }
            self.pass(step, part.works)?;
            due = end_of_step(due, step, Instant::now());
            std::thread::sleep(due.saturating_duration_since(Instant::now()));
        }
        self.resize(target)?;
        self.report.parts += 1;
        self.pass(Duration::ZERO, part.works)
    }

    /// Takes or returns memory, until so many pages are in use.
    fn resize(&mut self, pages: usize) -> io::Result<()> {
        let pages = pages.min(self.memory.pages());
        if pages < self.pages {
            self.memory.advise(pages..self.pages, Advice::LinuxDontNeed)?;
            self.pages = pages;
        }
        (self.pages..pages).for_each(|page| self.memory.write_byte(page * PAGE_BYTES));
        self.pages = pages;
        Ok(())
    }

    /// Writes some of the memory.
    fn touch(&mut self) {
        for _ in 0..PAGES_OF_STEP.min(self.pages) {
            let page = self.random.below(self.pages);
            self.memory.write_byte(page * PAGE_BYTES);
        }
    }

    fn read(&mut self, offset: u64) -> io::Result<()> {
        self.files.read_at(&mut self.buffer, offset / PAGE_BYTES as u64 * PAGE_BYTES as u64)?;
        Ok(())
    }

    /// Reports that so much of the work is done.
    fn pass(&mut self, time: Duration, works: bool) -> io::Result<()> {
        let ms = time.as_millis() as u64;
        self.report.own_ms += ms;
        self.report.work_ms += if works { ms } else { 0 };
        fs::write(self.report_path, serde_json::to_vec(&self.report)?)
    }
}

/// When a step ends that was to begin at `due` and whose work is done at `now`. Of a delay, only
/// what is longer than [`STEP`] stays.
fn end_of_step(due: Instant, step: Duration, now: Instant) -> Instant {
    let end = due + step;
    let late = now.saturating_duration_since(end);
    end + late.saturating_sub(STEP)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn load(folder: &Path, parts: Vec<Part>) -> TraceLoad {
        let path = |name: &str| folder.join(name).display().to_string();
        fs::write(folder.join("files"), vec![7; 1 << 20]).unwrap();
        TraceLoad { files: path("files"), report: path("report"), parts }
    }

    #[test]
    fn all_parts_are_done_and_reported() {
        let folder = tempfile::tempdir().unwrap();
        let part = |works, duration_ms, programs_kib, is_steady| Part {
            works,
            duration_ms,
            programs_kib,
            is_steady,
            files_kib: 512,
        };
        let parts = vec![
            part(false, 20, 256, false),
            part(true, 150, 4096, false),
            part(true, 210, 1024, true),
        ];
        let load = load(folder.path(), parts);
        let begun = Instant::now();
        let report = run(&load).unwrap();
        assert_eq!(report, TraceReport { own_ms: 380, work_ms: 360, parts: 3 });
        assert!(begun.elapsed() >= Duration::from_millis(379));
        let last = fs::read(&load.report).unwrap();
        assert_eq!(serde_json::from_slice::<TraceReport>(&last).unwrap(), report);
    }

    #[test]
    fn short_delays_are_made_up_for_and_long_ones_are_not() {
        let begin = Instant::now();
        let at = |ms| begin + Duration::from_millis(ms);
        // In time, within a step, and after a pause of two seconds.
        for (done, end) in [(30, 100), (130, 100), (200, 100), (2100, 2000)] {
            assert_eq!(end_of_step(begin, STEP, at(done)), at(end), "{done}");
        }
        // Nine steps of 110 ms and one of none end as ten of 100.
        let mut due = begin;
        let mut now = begin;
        for taken in [110, 110, 110, 110, 110, 110, 110, 110, 110, 0] {
            now += Duration::from_millis(taken);
            due = end_of_step(due, STEP, now);
            now = now.max(due);
        }
        assert_eq!((due, now), (at(1000), at(1000)));
    }

    #[test]
    fn a_part_is_a_short_text() {
        let part =
            Part { works: true, duration_ms: 5, programs_kib: 8, is_steady: false, files_kib: 3 };
        let text = serde_json::to_string(&part).unwrap();
        assert_eq!(text, "[true,5,8,false,3]");
        assert_eq!(serde_json::from_str::<Part>(&text).unwrap(), part);
    }

    #[test]
    fn missing_files_are_named() {
        let folder = tempfile::tempdir().unwrap();
        let mut load = load(folder.path(), Vec::new());
        load.files = "/nothing".to_owned();
        assert!(run(&load).unwrap_err().contains("/nothing"));
    }
}
