//! The guest of a series: it is looked at, stopped, saved, and goes on in another monitor.

use std::path::PathBuf;
use std::thread;
use std::time::{Duration, Instant};

use ebb_agent::clock::ClockReading;
use ebb_agent::clock_watch::WatchReport;
use ebb_agent::protocol::Command;
use ebb_kvm_clock::ClockPolicy;
use ebb_vmm::api::{Client, ClientError, SnapshotReport, VmInfo};
use serde_json::{Value, json};

use super::interval::{HostTimes, Interval, Look};
use crate::LabError;
use crate::bench::Bench;
use crate::error::GuestProblem;
use crate::guest::{Guest, Sending};
use crate::monitor::GuestSize;

/// The guest.
pub(in crate::clock) const SIZE: GuestSize = GuestSize { memory_mib: 512, cpus: 2 };
/// The only guest of its series.
const NUMBER: u32 = 1;
/// A guest that is not up by then will not come.
const BOOT_LIMIT: Duration = Duration::from_secs(240);
/// A guest that runs has answered by then, also after its restore.
const ANSWER_LIMIT: Duration = Duration::from_secs(60);
/// For a request to the monitor.
const API_LIMIT: Duration = Duration::from_secs(30);
/// For writing a snapshot.
const SAVE_LIMIT: Duration = Duration::from_secs(120);
/// How often the socket of a monitor that starts is looked for.
const API_INTERVAL: Duration = Duration::from_millis(2);
/// Readings in a look; together they say more than the best of them.
const READINGS: usize = 12;
/// The readers' rhythm: a quarter of a processor in an emulated host.
const WATCH: Command = Command::ClockWatchStart { burst_readings: 50, pause_us: 3000 };
/// Lines of a kernel's log that tell of a guest that has stood still without knowing, or of a clock that it distrusts.
const COMPLAINTS: [&str; 7] =
    ["soft lockup", "stall", "hung task", "blocked for more than", "unstable", "time jump", "clock skew"];

/// A guest between its boot and the end of its series.
pub(super) struct Subject<'a, 'b> {
    // Dropped before the directory of its socket and snapshot.
    guest: Guest,
    bench: &'a mut Bench<'b>,
    directory: tempfile::TempDir,
    restores: u32,
    began: Instant,
}

/// A guest that has been saved: its monitor has ended.
pub(super) struct Saved {
    /// What its monitor said.
    pub(super) report: SnapshotReport,
    /// When it was stopped, by the host's raw clock.
    pub(super) stopped: Interval,
}

/// A guest that goes on.
pub(super) struct Restored {
    /// When its clock went on, by the host's raw clock.
    pub(super) resumed: Interval,
    /// From the start of the monitor to the guest's first answer.
    pub(super) first_answer: Duration,
}

impl<'a, 'b> Subject<'a, 'b> {
    /// Boots the guest and starts a reader of its clocks on each vCPU.
    pub(super) fn boot(bench: &'a mut Bench<'b>) -> Result<Self, LabError> {
        let directory = tempfile::tempdir()
            .map_err(|cause| LabError::SystemFile { path: std::env::temp_dir(), cause })?;
        bench.events().step(NUMBER, "starts");
        let began = Instant::now();
        let control = directory.path().join("control-0");
        let guest = Guest::start(NUMBER, bench.command(SIZE, Some(&control))?)?;
        bench.show(guest.pid());
        let mut subject = Self { guest, bench, directory, restores: 0, began };
        subject.guest.wait_ready(BOOT_LIMIT)?;
        subject.command(WATCH)?;
        Ok(subject)
    }

    /// Tells what begins now.
    pub(super) fn step(&self, text: impl Into<String>) {
        self.bench.events().step(NUMBER, text);
    }

    fn policy(&self) -> ClockPolicy {
        self.bench.setup().clock
    }

    fn command(&mut self, command: Command) -> Result<Value, LabError> {
        Ok(self.guest.command(command, ANSWER_LIMIT, &mut || {})?.result)
    }

    fn document<T: serde::de::DeserializeOwned>(&mut self, command: Command) -> Result<T, LabError> {
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

    /// Looks at the guest's clocks.
    pub(super) fn look(&mut self) -> Result<Look, LabError> {
        let host = self.host();
        let mut readings = Vec::with_capacity(READINGS);
        for _ in 0..READINGS {
            let answer = self.guest.exchange(Command::Clock, Sending::EndLast, ANSWER_LIMIT, &mut || {})?;
            let reading = serde_json::from_value(answer.result.clone());
            readings.push((reading.map_err(|error| self.unexpected(&error))?, answer));
        }
        Look::from(host, &readings).ok_or_else(|| self.unexpected(&"there was no reading"))
    }

    /// What the readers have seen since the boot.
    pub(super) fn watched(&mut self) -> Result<WatchReport, LabError> {
        self.document(Command::ClockWatchRead)
    }

    /// What the guest's kernel complains about, line by line.
    pub(super) fn complaints(&mut self) -> Result<Vec<String>, LabError> {
        let words = COMPLAINTS.map(str::to_owned).to_vec();
        let log = self.command(Command::KernelLog { words })?;
        Ok(log["text"].as_str().unwrap_or_default().lines().map(str::to_owned).collect())
    }

    /// Stops the guest for a while: the host's time for which it stood still.
    pub(super) fn pause(&mut self, pause: Duration) -> Result<Interval, LabError> {
        let stopped = self.put("/vm/pause")?;
        thread::sleep(pause);
        Ok(self.put("/vm/resume")?.minus(stopped))
    }

    /// Saves the guest and kills its monitor: what goes on afterwards comes from the file.
    pub(super) fn save_and_end(&mut self) -> Result<Saved, LabError> {
        let stopped = self.put("/vm/pause")?;
        let body = json!({ "path": self.snapshot() });
        let report =
            self.client(SAVE_LIMIT).put_json("/vm/snapshot", &body).map_err(|error| self.refused(&error))?;
        self.guest.kill();
        Ok(Saved { report, stopped })
    }

    /// Lets the saved guest go on in a new monitor. With `continue`, when its clock goes on is part of the promise, and a resume
    /// through the API tells that better than a start; with `catch-up` it starts at once.
    pub(super) fn restore(&mut self) -> Result<Restored, LabError> {
        self.restores += 1;
        let mut command = self.bench.restore_command(&self.snapshot(), &self.control());
        if self.policy() == ClockPolicy::Continue {
            command.arg("--paused");
        }
        let started = Instant::now();
        let mut guest = Guest::start(NUMBER, command)?;
        guest.goes_on_from(&self.guest);
        self.bench.show(guest.pid());
        self.guest = guest;
        let resumed = match self.policy() {
            ClockPolicy::Continue => {
                self.wait_for_api(started)?;
                self.put("/vm/resume")?
            }
            ClockPolicy::CatchUp => Interval::ZERO,
        };
        self.command(Command::MemInfo)?;
        let first_answer = started.elapsed();
        let resumed = if self.policy() == ClockPolicy::CatchUp {
            let host = self.host();
            let (from, to) = (host.raw(started), host.raw(started + first_answer));
            Interval::between(from.low_ns, to.high_ns)
        } else {
            resumed
        };
        Ok(Restored { resumed, first_answer })
    }

    fn wait_for_api(&mut self, started: Instant) -> Result<(), LabError> {
        loop {
            match self.client(API_LIMIT).get::<VmInfo>("/vm") {
                Ok(_) => return Ok(()),
                Err(error) if started.elapsed() > API_LIMIT => return Err(self.refused(&error)),
                Err(_) => {}
            }
            if let Some(error) = self.guest.ended_by_itself() {
                return Err(error);
            }
            thread::sleep(API_INTERVAL);
        }
    }

    /// Sends an empty request: the time by the host's raw clock at which it was carried out.
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

    /// The error for a request that failed: if the guest has ended, that says more.
    fn refused(&mut self, error: &ClientError) -> LabError {
        self.guest.ended_by_itself().unwrap_or_else(|| self.unexpected(error))
    }

    fn control(&self) -> PathBuf {
        self.directory.path().join(format!("control-{}", self.restores))
    }

    fn snapshot(&self) -> PathBuf {
        self.directory.path().join("vm.snapshot")
    }
}
