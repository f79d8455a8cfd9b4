//! The guest of a series, which is moved from one end of a link to the other and back.

use std::path::PathBuf;
use std::thread;
use std::time::{Duration, Instant};

use ebb_agent::churn::ChurnReport;
use ebb_agent::protocol::Command;
use serde_json::Value;

use super::strategies::{self, Order, Report, Strategy};
use crate::LabError;
use crate::error::GuestProblem;
use crate::harness::guest::{Begun, Guest};
use crate::harness::host;
use crate::harness::link::{End, Link};
use crate::harness::size::GuestSize;
use crate::harness::testbed::{self, Testbed};
use crate::harness::watch::{ReturnWatch, Verdict};
use crate::report::results::Scale;

/// The only guest of its series.
const NUMBER: u32 = 1;
/// Time limit for a guest's boot.
const BOOT_LIMIT: Duration = Duration::from_secs(240);
/// Time limit for an answer of a running guest.
const ANSWER_LIMIT: Duration = Duration::from_secs(60);
/// Time limit for writing or reading all memory of a large guest.
const MEMORY_LIMIT: Duration = Duration::from_secs(240);
/// Time limit until a monitor listens.
const LISTEN_LIMIT: Duration = Duration::from_secs(60);
/// Interval of checks of a starting monitor, and of a guest that returns memory.
const LISTEN_INTERVAL: Duration = Duration::from_millis(10);
const RETURN_INTERVAL: Duration = Duration::from_millis(200);
/// Port that the receiving monitor listens on, in its own namespace.
const PORT: u16 = 4444;
/// Seeds of the content that the guest writes.
const HOLD_PATTERN: u64 = 0x5eed_0001;
const LOAD_SEED: u64 = 0x5eed_0002;

/// A guest between its boot and the end of its series.
pub(super) struct Subject<'a, 'b> {
    // Dropped before the directory of its socket.
    guest: Guest,
    testbed: &'a Testbed<'b>,
    link: &'a Link,
    directory: tempfile::TempDir,
    size: GuestSize,
    end: End,
    moves: u32,
}

/// A load that runs during the migration.
#[derive(Debug, Clone, Copy)]
pub(super) struct Load {
    begun: Begun,
    since: Instant,
    lasts: Duration,
}

impl Load {
    /// Whether it may have ended.
    pub(super) fn is_over(&self) -> bool {
        self.since.elapsed() >= self.lasts
    }
}

impl<'a, 'b> Subject<'a, 'b> {
    /// Boots a guest at one end of the link, and lets it keep some memory.
    pub(super) fn boot(
        testbed: &'a Testbed<'b>,
        link: &'a Link,
        size: GuestSize,
        hold_mib: u64,
    ) -> Result<Self, LabError> {
        let directory = tempfile::tempdir().map_err(LabError::of_file(std::env::temp_dir()))?;
        testbed.events().step(NUMBER, "starts");
        let mut command = testbed.command(size, Some(&directory.path().join("control-0")))?;
        let end = End::Left;
        link.namespace(end).enter(&mut command)?;
        let guest = Guest::start(NUMBER, command)?;
        testbed.show(&[guest.pid()]);
        let mut subject = Self { guest, testbed, link, directory, size, end, moves: 0 };
        subject.guest.wait_ready(BOOT_LIMIT)?;
        subject.guest.require_driver(testbed.setup().driver.in_guest())?;
        let hold = Command::Hold { bytes: hold_mib << 20, pattern: HOLD_PATTERN };
        subject.command(hold, MEMORY_LIMIT)?;
        Ok(subject)
    }

    fn command(&mut self, command: Command, limit: Duration) -> Result<Value, LabError> {
        Ok(self.guest.command(command, limit, &mut || {})?.result)
    }

    /// Reports the step that begins now.
    pub(super) fn step(&self, text: impl Into<String>) {
        self.testbed.events().step(NUMBER, text);
    }

    /// Lets the guest write to most of its memory and free it again.
    pub(super) fn use_memory(&mut self, program_mib: u64) -> Result<(), LabError> {
        self.step("runs its program");
        self.command(Command::AllocTouchExit { bytes: program_mib << 20 }, MEMORY_LIMIT).map(drop)
    }

    /// Waits until the guest has returned its freed memory.
    pub(super) fn wait_for_return(
        &mut self,
        program_mib: u64,
        scale: Scale,
    ) -> Result<(), LabError> {
        self.step("returns its memory");
        let began = Instant::now();
        let mut watch: Option<ReturnWatch> = None;
        loop {
            let Some(footprint_mib) = testbed::footprint_mib(self.guest.pid()) else {
                return Err(self.guest.lost("its memory"));
            };
            let watch = watch.get_or_insert_with(|| {
                ReturnWatch::new(footprint_mib, program_mib as f64, testbed::patience(scale))
            });
            if watch.observe(began.elapsed().as_secs_f64(), footprint_mib) == Verdict::Over {
                return Ok(());
            }
            thread::sleep(RETURN_INTERVAL);
        }
    }

    /// Memory that the guest uses: all that its kernel does not count as free.
    pub(super) fn used_bytes(&mut self) -> Result<u64, LabError> {
        let memory = self.command(Command::MemInfo, ANSWER_LIMIT)?;
        let free_kib = memory["MemFree"].as_u64().ok_or_else(|| {
            self.guest.failed(GuestProblem::Protocol(format!("no MemFree in {memory}")))
        })?;
        Ok((self.size.memory_mib << 20).saturating_sub(free_kib << 10))
    }

    /// Starts to rewrite a working set.
    pub(super) fn begin_load(
        &mut self,
        working_set_mib: u64,
        lasts: Duration,
    ) -> Result<Load, LabError> {
        let churn = Command::Churn {
            bytes: working_set_mib << 20,
            tasks: 1,
            seed: LOAD_SEED + u64::from(self.moves),
            operations: None,
            seconds: Some(lasts.as_secs()),
        };
        Ok(Load { begun: self.guest.begin(churn)?, since: Instant::now(), lasts })
    }

    /// Waits for the end of a load and returns its report.
    pub(super) fn finish_load(&mut self, load: Load) -> Result<ChurnReport, LabError> {
        let answer = self.guest.finish(load.begun, load.lasts + ANSWER_LIMIT)?;
        let report: ChurnReport = serde_json::from_value(answer.result)
            .map_err(|error| self.guest.failed(GuestProblem::Protocol(error.to_string())))?;
        match report.wrong_pages {
            0 => Ok(report),
            _ => Err(self.guest.failed(GuestProblem::Damaged(format!("{report:?}")))),
        }
    }

    /// Checks that the memory that the guest keeps has its content.
    pub(super) fn verify(&mut self) -> Result<(), LabError> {
        let result = self.command(Command::VerifyHeld, MEMORY_LIMIT)?;
        if result["wrong_pages"].as_u64() == Some(0) && result["held_bytes"].as_u64() != Some(0) {
            return Ok(());
        }
        Err(self.guest.failed(GuestProblem::Damaged(result.to_string())))
    }

    /// Migrates the guest to the other end; returns the source's report, and the time until the
    /// guest answered there, in ms.
    pub(super) fn migrate(
        &mut self,
        strategy: Strategy,
        patience: Duration,
    ) -> Result<(Report, f64), LabError> {
        let to = self.end.other();
        let address = format!("{}:{PORT}", to.address());
        let here = self.control();
        self.moves += 1;
        let mut command = self.testbed.receive_command(self.size, &address, &self.control())?;
        self.link.namespace(to).enter(&mut command)?;
        let mut taking = Guest::start(NUMBER, command)?;
        self.testbed.show(&[self.guest.pid(), taking.pid()]);
        wait_until_listening(&mut taking)?;
        let order = Order { pid: self.guest.pid(), control: &here, address: &address, patience };
        let begun = Instant::now();
        let report = strategies::run(strategy, self.testbed.ebb(), &order).map_err(|reason| {
            let other =
                taking.ended_by_itself().map(|error| format!("\n  at the other end: {error}"));
            self.guest.failed(GuestProblem::Migration(reason + &other.unwrap_or_default()))
        })?;
        taking.goes_on_from(&mut self.guest);
        let earlier = std::mem::replace(&mut self.guest, taking);
        self.end = to;
        self.command(Command::MemInfo, ANSWER_LIMIT)?;
        let answered_ms = begun.elapsed().as_secs_f64() * 1e3;
        // This kills it and waits for it, which takes a while if it has much memory.
        drop(earlier);
        self.testbed.show(&[self.guest.pid()]);
        Ok((report, answered_ms))
    }

    /// The control socket of its present monitor.
    fn control(&self) -> PathBuf {
        self.directory.path().join(format!("control-{}", self.moves))
    }
}

/// Waits until a monitor listens for a guest.
fn wait_until_listening(taking: &mut Guest) -> Result<(), LabError> {
    let begun = Instant::now();
    while !host::listens(taking.pid(), PORT) {
        if let Some(error) = taking.ended_by_itself() {
            return Err(error);
        }
        if begun.elapsed() > LISTEN_LIMIT {
            let what = "monitor that listens for the guest";
            return Err(taking.failed(GuestProblem::TimeOut { what, limit: LISTEN_LIMIT }));
        }
        thread::sleep(LISTEN_INTERVAL);
    }
    Ok(())
}
