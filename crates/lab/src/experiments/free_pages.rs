//! Cost and result of requests for a guest's free pages.
//!
//! The patch series of 2016 that proposed the request held a zone's lock over its whole walk, which
//! its review objected to. Here the walk is made in steps (docs/extension.md, section 5). The time
//! under the lock in a step, the guest's time for the whole answer, and the host's time of waiting
//! are measured in an otherwise idle guest: right after its boot, and after a program has used most
//! of its memory.

use ebb_agent::protocol::Command;
use ebb_vmm::api::{FreeBlocks, FreePagesReport, RequestStatus};
use serde::Serialize;

use crate::LabError;
use crate::harness::counters::Counters;
use crate::harness::driver::{Driver, Encoding, Module, Tracker};
use crate::harness::experiment::{Experiment, Run, SeriesPlan, parameters};
use crate::harness::monitor::Setup;
use crate::harness::size::{GuestSize, HostShape};
use crate::harness::testbed::Testbed;
use crate::report::figures::DataTable;
use crate::report::metrics::{self, Metric};
use crate::report::results::{GuestRecord, Scale, Series};
use crate::report::statistics::quantile;

/// The experiment.
pub static FREE_PAGES: Experiment = Experiment {
    name: "free-pages",
    summary: "What it costs to ask an idle guest which of its pages are free",
    host: |scale, _| sizes(scale).host,
    parameters: |scale| parameters(&sizes(scale)),
    metrics: || metrics::describe(metrics()),
    series,
    ..Experiment::DEFAULT
};

/// Sizes of one scale.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
struct Sizes {
    #[serde(flatten)]
    host: HostShape,
    #[serde(flatten)]
    guest: GuestSize,
    program_mib: u64,
    /// Number of requests before and after the program.
    questions: u32,
}

fn sizes(scale: Scale) -> Sizes {
    match scale {
        Scale::Demo => Sizes {
            host: HostShape { memory_mib: 1792, swap_mib: 512, nodes: 1 },
            guest: GuestSize { memory_mib: 1024, cpus: 1 },
            program_mib: 768,
            questions: 5,
        },
        Scale::Full => Sizes {
            host: HostShape { memory_mib: 10 * 1024, swap_mib: 1024, nodes: 1 },
            guest: GuestSize { memory_mib: 8 * 1024, cpus: 1 },
            program_mib: 7 * 1024,
            questions: 10,
        },
    }
}

/// The series that requests blocks of 2 MiB only.
const BLOCKS: &str = "blocks";
/// The order of such a block.
const BLOCK_ORDER: u8 = 9;

fn series() -> Vec<SeriesPlan> {
    let plan = |name, summary, encoding| {
        let module = Module { tracker: Tracker::Off, encoding, ..Module::DEFAULT };
        let setup = Setup { driver: Driver::Module(module), ..Setup::EBB };
        SeriesPlan::new(name, summary, Run::Guests(setup, run))
    };
    vec![
        plan("ranges", "all free pages, answered in ranges", Encoding::Ranges),
        plan("bitmap", "all free pages, answered in bitmaps", Encoding::Bitmap),
        plan(BLOCKS, "blocks of 2 MiB and up, in the shorter encoding", Encoding::Auto),
    ]
}

fn metrics() -> Vec<Metric<Vec<Question>>> {
    type Questions = Vec<Question>;
    /// The median of requests with this memory.
    fn middle(
        memory: Memory,
        (name, title, unit): (&str, &str, &str),
        value: fn(&Question) -> Option<f64>,
    ) -> Metric<Questions> {
        Metric::median(name, title, unit, move |all: &Questions| {
            all.iter().filter(|one| one.memory == memory).filter_map(value).collect()
        })
    }
    fn largest(all: &Questions, value: fn(&Question) -> Option<f64>) -> Option<f64> {
        quantile(all.iter().filter_map(value), 1.0)
    }
    use Memory::{Fresh, Used};
    let coverage =
        |memory, words| middle(memory, words, Question::coverage_percent).better_higher();
    vec![
        middle(
            Fresh,
            ("guest_ms", "Guest's time for an answer, fresh from boot", "ms"),
            Question::guest_ms,
        ),
        middle(Used, ("guest_used_ms", "The same after a program", "ms"), Question::guest_ms),
        Metric::lower("guest_max_ms", "The longest answer", "ms", |all: &Questions| {
            largest(all, Question::guest_ms)
        }),
        Metric::median(
            "longest_lock_us",
            "Longest time under a zone's lock in an answer",
            "us",
            |all: &Questions| all.iter().filter_map(Question::longest_lock_us).collect(),
        ),
        Metric::lower("longest_lock_max_us", "The longest of all", "us", |all: &Questions| {
            largest(all, Question::longest_lock_us)
        }),
        middle(
            Fresh,
            ("elapsed_ms", "From the question to the end of its answer, fresh", "ms"),
            |one| Some(one.elapsed_ms()),
        ),
        middle(Used, ("elapsed_used_ms", "The same after a program", "ms"), |one| {
            Some(one.elapsed_ms())
        }),
        coverage(
            Fresh,
            ("coverage_percent", "Named, of what the guest counts as free, fresh", "%"),
        ),
        coverage(Used, ("coverage_used_percent", "The same after a program", "%")),
        middle(Used, ("messages", "Messages of an answer, after a program", ""), |one| {
            Some(one.report.messages as f64)
        }),
        middle(Used, ("queue_kib", "Their size", "KiB"), |one| {
            Some(one.report.message_bytes as f64 / 1024.0)
        }),
        middle(Used, ("translate_ms", "Host: reading them", "ms"), |one| {
            Some(one.report.translate_ns as f64 / 1e6)
        }),
    ]
}

fn run(testbed: &mut Testbed<'_>, series: &mut Series) -> Result<(), LabError> {
    let sizes = sizes(testbed.scale());
    let min_order = if series.name == BLOCKS { BLOCK_ORDER } else { 0 };
    let mut record = testbed.start_controlled_guest(sizes.guest)?;
    let mut questions = Vec::new();
    let outcome = ask_all(testbed, &mut record, sizes, min_order, &mut questions);
    fill(&questions, series);
    series.guests.push(record);
    outcome
}

fn fill(questions: &Vec<Question>, series: &mut Series) {
    metrics::measure(&metrics(), questions, series);
    series.details.push(questions_table(questions));
    series.details.extend(questions.last().map(|last| blocks_table(&last.report)));
}

/// State of the guest's memory at a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Memory {
    Fresh,
    Used,
}

/// A request and its answer.
#[derive(Debug, Clone, PartialEq)]
struct Question {
    memory: Memory,
    report: FreePagesReport,
    /// Growth of the counters of the guest's driver.
    driver: Counters,
    /// The longest time under a lock in this answer.
    longest_lock_ns: Option<f64>,
    /// Free memory according to the guest's kernel right before the request.
    free_bytes: Option<u64>,
}

impl Question {
    fn guest_ms(&self) -> Option<f64> {
        Some(self.driver.get("walk_ns")? / 1e6)
    }

    fn longest_lock_us(&self) -> Option<f64> {
        Some(self.longest_lock_ns? / 1e3)
    }

    fn elapsed_ms(&self) -> f64 {
        self.report.elapsed_us as f64 / 1e3
    }

    fn coverage_percent(&self) -> Option<f64> {
        let free = self.free_bytes.filter(|free| *free > 0)?;
        Some(self.report.bytes as f64 / free as f64 * 100.0)
    }
}

fn ask_all(
    testbed: &mut Testbed<'_>,
    record: &mut GuestRecord,
    sizes: Sizes,
    min_order: u8,
    questions: &mut Vec<Question>,
) -> Result<(), LabError> {
    for memory in [Memory::Fresh, Memory::Used] {
        if memory == Memory::Used {
            let command = Command::AllocTouchExit { bytes: sizes.program_mib << 20 };
            testbed.run_program(record, command, sizes.program_mib)?;
        }
        for number in 1..=sizes.questions {
            testbed.events().step(record.guest, format!("names its free pages, {number}"));
            questions.push(ask(testbed, record.guest, memory, min_order)?);
        }
    }
    Ok(())
}

fn ask(
    testbed: &mut Testbed<'_>,
    guest: u32,
    memory: Memory,
    min_order: u8,
) -> Result<Question, LabError> {
    let free_bytes = testbed.ask(guest, Command::MemInfo)?["MemFree"].as_u64().map(|kib| kib << 10);
    let before = testbed.driver_counters(guest)?.unwrap_or_default();
    let report = testbed.free_pages(guest, min_order)?;
    let now = testbed.driver_counters(guest)?.unwrap_or_default();
    if report.status != RequestStatus::Done {
        let what = format!("its answer ended as {:?}", report.status);
        return Err(LabError::unexpected(guest, what));
    }
    // Unlike the other counters, this one restarts with each request.
    let longest_lock_ns = now.get("longest_lock_ns");
    Ok(Question { memory, report, driver: now.since(&before), longest_lock_ns, free_bytes })
}

fn questions_table(questions: &[Question]) -> DataTable {
    let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
    let memory = |one: &Question| match one.memory {
        Memory::Fresh => "fresh",
        Memory::Used => "used before",
    };
    DataTable::of(
        "questions",
        questions,
        &[
            ("memory", &|one| memory(one).into()),
            ("guest, ms", &|one| one.guest_ms().into()),
            ("question to answer, ms", &|one| one.elapsed_ms().into()),
            ("named, MiB", &|one| mib(one.report.bytes).into()),
            ("free in the guest, MiB", &|one| one.free_bytes.map(mib).into()),
            ("ranges", &|one| one.report.ranges.into()),
            ("messages", &|one| one.report.messages.into()),
            ("bytes", &|one| one.report.message_bytes.into()),
            ("host reads, us", &|one| (one.report.translate_ns as f64 / 1e3).into()),
            ("times under a lock", &|one| one.driver.get("locks").into()),
            ("longest, us", &|one| one.longest_lock_us().into()),
        ],
    )
}

fn blocks_table(report: &FreePagesReport) -> DataTable {
    DataTable::of(
        "the last answer by size of blocks",
        &report.by_order,
        &[
            ("order", &|one: &FreeBlocks| u32::from(one.order).into()),
            ("blocks", &|one| one.blocks.into()),
            ("bytes", &|one| one.bytes.into()),
        ],
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn question(memory: Memory, walk_ns: u64, bytes: u64) -> Question {
        let report = serde_json::json!({
            "request_id": 1, "status": "done", "min_order": 0, "bytes": bytes, "blocks": 1,
            "ranges": 1, "largest_range_bytes": bytes,
            "by_order": [{"order": 10, "block_bytes": 4 << 20, "blocks": 1, "bytes": 4 << 20}],
            "poisoned_bytes": 0, "memory_bytes": 1 << 30, "free_memory_bytes": null,
            "free_memory_age_ms": null, "coverage_percent": null, "messages": 2,
            "encodings": {"pfns": 0, "bitmaps": 0, "ranges": 2},
            "message_bytes": 2048, "translate_ns": 500_000, "elapsed_us": 7500
        });
        Question {
            memory,
            report: serde_json::from_value(report).unwrap(),
            driver: Counters::of_driver(&format!("walk_ns {walk_ns}\nlocks 9\n")),
            longest_lock_ns: Some(80_000.0),
            free_bytes: Some(800 << 20),
        }
    }

    #[test]
    fn metrics_follow_from_the_questions() {
        let mut series = Series::new("ranges", String::new());
        let questions = vec![
            question(Memory::Fresh, 3_000_000, 784 << 20),
            question(Memory::Used, 5_000_000, 400 << 20),
            question(Memory::Used, 7_000_000, 400 << 20),
        ];
        fill(&questions, &mut series);
        assert!(series.metrics.values().all(Option::is_some), "{:?}", series.metrics);
        let metric = |name: &str| series.metrics[name].unwrap();
        assert!(
            (metric("guest_ms") - 3.0).abs() < 1e-9 && (metric("guest_used_ms") - 6.0).abs() < 1e-9
        );
        assert!(
            (metric("guest_max_ms") - 7.0).abs() < 1e-9
                && (metric("longest_lock_us") - 80.0).abs() < 1e-9
        );
        assert!((metric("coverage_percent") - 98.0).abs() < 1e-9);
        assert!((metric("coverage_used_percent") - 50.0).abs() < 1e-9);
        assert_eq!(series.details[0].rows.len(), 3);
        assert_eq!(series.details[1].rows.len(), 1);
    }

    #[test]
    fn the_program_leaves_memory_for_the_guest() {
        for scale in [Scale::Demo, Scale::Full] {
            let sizes = sizes(scale);
            assert!(sizes.program_mib + 192 <= sizes.guest.memory_mib);
            assert!(sizes.guest.memory_mib + 512 < sizes.host.memory_mib, "the host must not swap");
        }
    }
}
