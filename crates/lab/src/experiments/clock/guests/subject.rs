//! The guest of a series: it is sampled, stopped, saved, and continued in another monitor.

use std::path::PathBuf;
use std::thread;
use std::time::{Duration, Instant};

use ebb_agent::clock::ClockReading;
use ebb_agent::clock_watch::WatchReport;
use ebb_agent::protocol::Command;
use ebb_vmm::api::{Client, ClockInfo, SnapshotReport, VmInfo};
use serde_json::Value;

use super::board::Board;
use super::interval::{HostTimes, Interval, Look};
use super::memory::GuestMemory;
use crate::LabError;
use crate::error::GuestProblem;
use crate::harness::guest::Guest;
use crate::harness::guest_process::Sending;
use crate::harness::size::GuestSize;
use crate::harness::testbed::Testbed;

/// The guest.
pub(in crate::experiments::clock) const SIZE: GuestSize = GuestSize { memory_mib: 512, cpus: 2 };
/// The only guest of its series.
const NUMBER: u32 = 1;
/// Time limit for a guest's boot.
const BOOT_LIMIT: Duration = Duration::from_secs(240);
/// Time limit for an answer of a running guest, also after its restore.
const ANSWER_LIMIT: Duration = Duration::from_secs(60);
/// Time limit for a request to the monitor.
const API_LIMIT: Duration = Duration::from_secs(30);
/// Time limit for writing a snapshot.
const SAVE_LIMIT: Duration = Duration::from_secs(120);
/// Number of readings over the console in a sample; combined they are more precise than the best of
/// them.
const READINGS: usize = 12;
/// The same if the guest's memory gives the precise value.
const READINGS_BESIDE: usize = 2;
/// Number of attempts to find the readers' board: the gaps that identify it grow with time.
const SEARCHES: u32 = 5;
/// Delay between two attempts.
const SEARCH_INTERVAL: Duration = Duration::from_millis(500);
/// Timing of the readers, which use a quarter of a processor in an emulated host.
const WATCH: Command = Command::ClockWatchStart { burst_readings: 300, pause_us: 5000 };
/// Words of kernel messages about an unnoticed pause of the guest or a distrusted clock.
const COMPLAINTS: [&str; 7] = [
    "soft lockup",
    "stall",
    "hung task",
    "blocked for more than",
    "unstable",
    "time jump",
    "clock skew",
];

/// A guest between its boot and the end of its series.
pub(super) struct Subject<'a, 'b> {
    // Dropped before the directory of its socket and snapshot.
    guest: Guest,
    testbed: &'a mut Testbed<'b>,
    directory: tempfile::TempDir,
    restores: u32,
    began: Instant,
    view: View,
}

/// How the guest's clock is read.
enum View {
    /// In the guest's memory.
    Memory(GuestMemory, Board),
    /// Over the console only, with the reason.
    Console(String),
}

/// A guest that has been saved: its monitor has ended.
pub(super) struct Saved {
    /// Its monitor's report.
    pub(super) report: SnapshotReport,
    /// Times of the request to stop and of its completion, by the host's raw clock.
    stopped: Interval,
}

/// A stop of the guest.
pub(super) struct Stop {
    /// Bounds of the duration of the stop by the host's time, from the requests to its monitor.
    pub(super) asked: Interval,
    /// The monitor's report of when it stopped and resumed.
    pub(super) reported: ClockInfo,
}

/// A guest that was continued in another monitor.
pub(super) struct Restored {
    /// Its stop.
    pub(super) stop: Stop,
    /// Time from the start of the monitor to the guest's first answer.
    pub(super) first_answer: Duration,
}

impl<'a, 'b> Subject<'a, 'b> {
    /// Boots the guest and starts a reader of its clocks on each vCPU.
    pub(super) fn boot(testbed: &'a mut Testbed<'b>) -> Result<Self, LabError> {
        let directory = tempfile::tempdir().map_err(LabError::of_file(std::env::temp_dir()))?;
        testbed.events().step(NUMBER, "starts");
        let began = Instant::now();
        let control = directory.path().join("control-0");
        let guest = Guest::start(NUMBER, testbed.command(SIZE, Some(&control))?)?;
        testbed.show(&[guest.pid()]);
        let view = View::Console(String::new());
        let mut subject = Self { guest, testbed, directory, restores: 0, began, view };
        subject.guest.wait_ready(BOOT_LIMIT)?;
        subject.command(WATCH)?;
        subject.view = subject.find_board()?;
        Ok(subject)
    }

    fn find_board(&mut self) -> Result<View, LabError> {
        let memory = match self.memory() {
            Ok(memory) => memory,
            Err(error) => return Ok(View::Console(error.to_string())),
        };
        for _ in 0..SEARCHES {
            // By then the readers have seen gaps that distinguish their board from other memory.
            thread::sleep(SEARCH_INTERVAL);
            let asked = Instant::now();
            let report = self.watched()?;
            match Board::find(&memory, &report, asked) {
                Ok(Some(board)) => return Ok(View::Memory(memory, board)),
                Ok(None) => {}
                Err(error) => return Ok(View::Console(error.to_string())),
            }
        }
        Ok(View::Console("the readers' board was not found in the guest's memory".to_owned()))
    }

    fn memory(&self) -> std::io::Result<GuestMemory> {
        GuestMemory::open(self.guest.pid(), SIZE.memory_mib << 20)
    }

    /// Why the guest's clock is read over the console only; `None` if it is not.
    pub(super) fn console_only(&self) -> Option<&str> {
        match &self.view {
            View::Memory(..) => None,
            View::Console(why) => Some(why),
        }
    }

    /// Reports the step that begins now.
    pub(super) fn step(&self, text: impl Into<String>) {
        self.testbed.events().step(NUMBER, text);
    }

    fn command(&mut self, command: Command) -> Result<Value, LabError> {
        Ok(self.guest.command(command, ANSWER_LIMIT, &mut || {})?.result)
    }

    fn document<T: serde::de::DeserializeOwned>(
        &mut self,
        command: Command,
    ) -> Result<T, LabError> {
        let result = self.command(command)?;
        serde_json::from_value(result).map_err(|error| self.unexpected(&error))
    }

    fn unexpected(&self, error: &dyn std::fmt::Display) -> LabError {
        self.guest.failed(GuestProblem::Protocol(error.to_string()))
    }

    /// The name of the guest's clock source.
    pub(super) fn clock_source(&mut self) -> Result<String, LabError> {
        Ok(self.document::<ClockReading>(Command::Clock)?.clocksource)
    }

    /// Takes a sample of the guest's clocks.
    pub(super) fn look(&mut self) -> Result<Look, LabError> {
        let seen = match &self.view {
            View::Console(_) => None,
            View::Memory(memory, board) => match board.look(memory, self.began) {
                Ok(Some(seen)) => Some(seen),
                Ok(None) => {
                    // The guest's kernel may have migrated the page.
                    self.view = self.find_board()?;
                    None
                }
                Err(error) => {
                    self.view = View::Console(error.to_string());
                    None
                }
            },
        };
        let host = self.host();
        let count = if seen.is_some() { READINGS_BESIDE } else { READINGS };
        let mut readings = Vec::with_capacity(count);
        for _ in 0..count {
            let answer =
                self.guest.exchange(Command::Clock, Sending::EndLast, ANSWER_LIMIT, &mut || {})?;
            let reading = serde_json::from_value(answer.result.clone());
            readings.push((reading.map_err(|error| self.unexpected(&error))?, answer));
        }
        Look::from(host, &readings, seen).ok_or_else(|| self.unexpected(&"there was no reading"))
    }

    /// The readers' report since the boot.
    pub(super) fn watched(&mut self) -> Result<WatchReport, LabError> {
        self.document(Command::ClockWatchRead)
    }

    /// Complaints in the guest's kernel log, line by line.
    pub(super) fn complaints(&mut self) -> Result<Vec<String>, LabError> {
        let words = COMPLAINTS.map(str::to_owned).to_vec();
        let log = self.command(Command::KernelLog { words })?;
        Ok(log["text"].as_str().unwrap_or_default().lines().map(str::to_owned).collect())
    }

    /// Stops the guest for a while.
    pub(super) fn pause(&mut self, pause: Duration) -> Result<Stop, LabError> {
        let stopped = self.put("/vm/pause")?;
        thread::sleep(pause);
        let asked = self.put("/vm/resume")?.minus(stopped);
        Ok(Stop { asked, reported: self.clock()? })
    }

    /// Saves the guest and kills its monitor, so that the guest can only continue from the file.
    pub(super) fn save_and_end(&mut self) -> Result<Saved, LabError> {
        let stopped = self.put("/vm/pause")?;
        let report = ebb_vmm::snapshot::take(&self.client(SAVE_LIMIT), &self.snapshot())
            .map_err(|error| self.refused(&error))?;
        self.guest.kill();
        Ok(Saved { report, stopped })
    }

    /// Continues the saved guest in a new monitor.
    pub(super) fn restore(&mut self, saved: &Saved) -> Result<Restored, LabError> {
        self.restores += 1;
        let command = self.testbed.restore_command(&self.snapshot(), &self.control());
        let started = Instant::now();
        let mut guest = Guest::start(NUMBER, command)?;
        guest.goes_on_from(&mut self.guest);
        self.testbed.show(&[guest.pid()]);
        // The assignment drops the former process and waits for it.
        self.guest = guest;
        self.command(Command::MemInfo)?;
        let first_answer = started.elapsed();
        let host = self.host();
        let resumed =
            Interval::between(host.raw(started).low_ns, host.raw(started + first_answer).high_ns);
        if let View::Memory(memory, _) = &mut self.view {
            match GuestMemory::open(self.guest.pid(), SIZE.memory_mib << 20) {
                Ok(now) => *memory = now,
                Err(error) => self.view = View::Console(error.to_string()),
            }
        }
        Ok(Restored {
            stop: Stop { asked: resumed.minus(saved.stopped), reported: self.clock()? },
            first_answer,
        })
    }

    /// The monitor's report of the guest's clocks.
    fn clock(&mut self) -> Result<ClockInfo, LabError> {
        let info = self.client(API_LIMIT).get::<VmInfo>("/vm");
        Ok(info.map_err(|error| self.refused(&error))?.clock)
    }

    /// Sends a request without a body; returns the time of its execution by the host's raw clock.
    fn put(&mut self, target: &str) -> Result<Interval, LabError> {
        let client = self.client(API_LIMIT);
        let before = Instant::now();
        client.put::<Value>(target).map_err(|error| self.refused(&error))?;
        let after = Instant::now();
        let host = self.host();
        Ok(Interval::between(host.raw(before).low_ns, host.raw(after).high_ns))
    }

    fn host(&self) -> HostTimes {
        HostTimes::read(self.began)
    }

    fn client(&self, limit: Duration) -> Client {
        Client::new(self.control(), limit)
    }

    /// The error for a failed request: the end of the guest, if it has ended, explains more.
    fn refused(&mut self, error: &dyn std::fmt::Display) -> LabError {
        self.guest.ended_by_itself().unwrap_or_else(|| self.unexpected(error))
    }

    fn control(&self) -> PathBuf {
        self.directory.path().join(format!("control-{}", self.restores))
    }

    fn snapshot(&self) -> PathBuf {
        self.directory.path().join("vm.snapshot")
    }
}
