//! What it costs to ask a guest which of its pages are free, and what it answers.
//!
//! The patch series of 2016 that proposed the question held a zone's lock over its whole walk,
//! which its review objected to. Here the walk is made in steps (docs/extension.md, section 5);
//! what a step holds the lock for, what all of it takes the guest, and how long the host waits are
//! measured while nothing else happens in the guest: fresh from its boot, and after a program has
//! used most of its memory.

use std::collections::BTreeMap;

use ebb_agent::protocol::Command;
use ebb_vmm::api::{FreePagesReport, FreePagesStatus};

use crate::LabError;
use crate::error::GuestProblem;
use crate::harness::counters::Counters;
use crate::harness::driver::{Driver, Encoding, Module, Tracker};
use crate::harness::experiment::{Experiment, HostShape, Runs, SeriesPlan, Subject};
use crate::harness::monitor::{GuestSize, Setup};
use crate::harness::testbed::Testbed;
use crate::report::figures::{DataTable, Value};
use crate::report::results::{Better, GuestRecord, MetricInfo, Scale, Series, rounded};
use crate::report::statistics::{median, quantile};

/// The experiment.
#[derive(Debug, Clone, Copy)]
pub struct FreePages;

/// Sizes of one scale.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Sizes {
    host: HostShape,
    guest: GuestSize,
    program_mib: u64,
    /// How often the guest is asked before and after the program.
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

/// The series that asks for blocks of 2 MiB only.
const BLOCKS: &str = "blocks";
/// The order of such a block.
const BLOCK_ORDER: u8 = 9;

impl Experiment for FreePages {
    fn name(&self) -> &'static str {
        "free-pages"
    }

    fn summary(&self) -> &'static str {
        "What it costs to ask an idle guest which of its pages are free"
    }

    fn host(&self, scale: Scale) -> HostShape {
        sizes(scale).host
    }

    fn parameters(&self, scale: Scale) -> BTreeMap<String, u64> {
        let sizes = sizes(scale);
        BTreeMap::from([
            ("host_mib".to_owned(), sizes.host.memory_mib),
            ("swap_mib".to_owned(), sizes.host.swap_mib),
            ("guest_mib".to_owned(), sizes.guest.memory_mib),
            ("guest_cpus".to_owned(), u64::from(sizes.guest.cpus)),
            ("program_mib".to_owned(), sizes.program_mib),
            ("questions".to_owned(), u64::from(sizes.questions)),
        ])
    }

    fn metrics(&self) -> Vec<MetricInfo> {
        let lower =
            |name: &str, title: &str, unit: &str| MetricInfo::new(name, title, unit, Better::Lower);
        let higher = |name: &str, title: &str, unit: &str| {
            MetricInfo::new(name, title, unit, Better::Higher)
        };
        vec![
            lower("guest_ms", "Guest's time for an answer, fresh from boot", "ms"),
            lower("guest_used_ms", "The same after a program", "ms"),
            lower("guest_max_ms", "The longest answer", "ms"),
            lower("longest_lock_us", "Longest time under a zone's lock in an answer", "us"),
            lower("longest_lock_max_us", "The longest of all", "us"),
            lower("elapsed_ms", "From the question to the end of its answer, fresh", "ms"),
            lower("elapsed_used_ms", "The same after a program", "ms"),
            higher("coverage_percent", "Named, of what the guest counts as free, fresh", "%"),
            higher("coverage_used_percent", "The same after a program", "%"),
            lower("messages", "Messages of an answer, after a program", ""),
            lower("queue_kib", "Their size", "KiB"),
            lower("translate_ms", "Host: reading them", "ms"),
        ]
    }

    fn series(&self) -> Vec<SeriesPlan> {
        let plan = |name, summary, encoding| SeriesPlan {
            name,
            summary,
            runs: Runs::ByDefault,
            subject: Subject::Guests(Setup {
                driver: Driver::Module(Module {
                    tracker: Tracker::Off,
                    encoding,
                    ..Module::DEFAULT
                }),
                ..Setup::EBB
            }),
        };
        vec![
            plan("ranges", "all free pages, answered in ranges", Encoding::Ranges),
            plan("bitmap", "all free pages, answered in bitmaps", Encoding::Bitmap),
            plan(BLOCKS, "blocks of 2 MiB and up, in whatever is shorter", Encoding::Auto),
        ]
    }

    fn guests(&self, _scale: Scale) -> u32 {
        1
    }

    fn run(&self, testbed: &mut Testbed<'_>, series: &mut Series) -> Result<(), LabError> {
        let sizes = sizes(testbed.scale());
        let min_order = if series.name == BLOCKS { BLOCK_ORDER } else { 0 };
        let mut record = testbed.start_controlled_guest(sizes.guest)?;
        let mut questions = Vec::new();
        let outcome = ask_all(testbed, &mut record, sizes, min_order, &mut questions);
        tell(&questions, series);
        series.guests.push(record);
        outcome
    }
}

/// What the guest's memory was when it was asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Memory {
    Fresh,
    Used,
}

/// One question and its answer.
#[derive(Debug, Clone, PartialEq)]
struct Question {
    memory: Memory,
    report: FreePagesReport,
    /// What the guest's driver counted meanwhile.
    driver: Counters,
    /// The longest time under a lock in this answer.
    longest_lock_ns: Option<f64>,
    /// What the guest's kernel counted as free right before.
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
            testbed.events().step(record.guest, format!("is asked for its free pages, {number}"));
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
    if report.status != FreePagesStatus::Done {
        let problem = GuestProblem::Protocol(format!("its answer ended as {:?}", report.status));
        return Err(LabError::Guest { guest, problem, diagnostics: String::new() });
    }
    // Unlike the other counters this one begins anew with each request.
    let longest_lock_ns = now.get("longest_lock_ns");
    Ok(Question { memory, report, driver: now.since(&before), longest_lock_ns, free_bytes })
}

fn tell(questions: &[Question], series: &mut Series) {
    let of = |memory: Memory| questions.iter().filter(move |question| question.memory == memory);
    let used_middle = |value: fn(&Question) -> f64| median(of(Memory::Used).map(value));
    let metrics = [
        ("guest_ms", median(of(Memory::Fresh).filter_map(Question::guest_ms))),
        ("guest_used_ms", median(of(Memory::Used).filter_map(Question::guest_ms))),
        ("guest_max_ms", quantile(questions.iter().filter_map(Question::guest_ms), 1.0)),
        ("longest_lock_us", median(questions.iter().filter_map(Question::longest_lock_us))),
        (
            "longest_lock_max_us",
            quantile(questions.iter().filter_map(Question::longest_lock_us), 1.0),
        ),
        ("elapsed_ms", median(of(Memory::Fresh).map(Question::elapsed_ms))),
        ("elapsed_used_ms", used_middle(Question::elapsed_ms)),
        ("coverage_percent", median(of(Memory::Fresh).filter_map(Question::coverage_percent))),
        ("coverage_used_percent", median(of(Memory::Used).filter_map(Question::coverage_percent))),
        ("messages", used_middle(|question| question.report.messages as f64)),
        ("queue_kib", used_middle(|question| question.report.message_bytes as f64 / 1024.0)),
        ("translate_ms", used_middle(|question| question.report.translate_ns as f64 / 1e6)),
    ];
    series.metrics = metrics.map(|(name, value)| (name.to_owned(), value.map(rounded))).into();
    series.details.push(questions_table(questions));
    if let Some(last) = questions.last() {
        series.details.push(blocks_table(&last.report));
    }
}

fn questions_table(questions: &[Question]) -> DataTable {
    let columns = [
        "memory",
        "guest, ms",
        "question to answer, ms",
        "named, MiB",
        "free in the guest, MiB",
        "ranges",
        "messages",
        "bytes",
        "host reads, us",
        "times under a lock",
        "longest, us",
    ];
    let mib = |bytes: u64| rounded(bytes as f64 / f64::from(1 << 20));
    let number = |value: Option<f64>| {
        value.map_or_else(|| Value::from("-"), |value| Value::from(rounded(value)))
    };
    let row = |question: &Question| {
        vec![
            Value::from(match question.memory {
                Memory::Fresh => "fresh",
                Memory::Used => "used before",
            }),
            number(question.guest_ms()),
            Value::from(rounded(question.elapsed_ms())),
            Value::from(mib(question.report.bytes)),
            number(question.free_bytes.map(mib)),
            Value::from(question.report.ranges),
            Value::from(question.report.messages),
            Value::from(question.report.message_bytes),
            Value::from(rounded(question.report.translate_ns as f64 / 1e3)),
            number(question.driver.get("locks")),
            number(question.longest_lock_us()),
        ]
    };
    DataTable {
        title: "questions".to_owned(),
        columns: columns.map(str::to_owned).into(),
        rows: questions.iter().map(row).collect(),
    }
}

fn blocks_table(report: &FreePagesReport) -> DataTable {
    let row = |blocks: &ebb_vmm::api::FreeBlocks| {
        vec![
            Value::from(u64::from(blocks.order)),
            Value::from(blocks.blocks),
            Value::from(blocks.bytes),
        ]
    };
    DataTable {
        title: "the last answer by size of blocks".to_owned(),
        columns: ["order", "blocks", "bytes"].map(str::to_owned).into(),
        rows: report.by_order.iter().map(row).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn question(memory: Memory, walk_ns: u64, bytes: u64) -> Question {
        let report = serde_json::json!({
            "request_id": 1, "status": "done", "min_order": 0, "bytes": bytes, "blocks": 1, "ranges": 1,
            "largest_range_bytes": bytes, "by_order": [{"order": 10, "block_bytes": 4 << 20, "blocks": 1, "bytes": 4 << 20}],
            "poisoned_bytes": 0, "memory_bytes": 1 << 30, "free_memory_bytes": null, "free_memory_age_ms": null,
            "coverage_percent": null, "messages": 2, "encodings": {"pfns": 0, "bitmaps": 0, "ranges": 2},
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
    fn every_metric_that_is_described_is_measured() {
        let mut series = Series::new("ranges", String::new());
        let questions = [
            question(Memory::Fresh, 3_000_000, 784 << 20),
            question(Memory::Used, 5_000_000, 400 << 20),
            question(Memory::Used, 7_000_000, 400 << 20),
        ];
        tell(&questions, &mut series);
        let described: Vec<String> =
            FreePages.metrics().into_iter().map(|info| info.name).collect();
        assert_eq!(series.metrics.len(), described.len());
        assert!(
            described.iter().all(|name| series.metrics[name].is_some()),
            "{:?}",
            series.metrics
        );
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
    fn the_program_leaves_the_guest_room_to_live() {
        for scale in [Scale::Demo, Scale::Full] {
            let sizes = sizes(scale);
            assert!(sizes.program_mib + 192 <= sizes.guest.memory_mib);
            assert!(sizes.guest.memory_mib + 512 < sizes.host.memory_mib, "no swap shall disturb");
        }
    }
}
