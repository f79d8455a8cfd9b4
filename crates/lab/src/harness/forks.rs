//! Machines that are forked from a running one by `ebb fork`, and their first answers.
//!
//! The guest of a template has a service that sends back what arrives on a socket of the host. Its
//! forks continue it, so that the time of the first answer is that of a program in the guest.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::os::fd::AsFd as _;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command as Program;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use ebb_agent::protocol::Command;
use ebb_agent::vsock::Service;
use ebb_vmm::api::{CheckpointReport, Client, SnapshotReport, SnapshotTarget, VmInfo, VmState};
use rustix::process::{Pid, Signal, kill_process, test_kill_process};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use tempfile::TempDir;

use crate::LabError;
use crate::error::GuestProblem;
use crate::harness::devices::Device;
use crate::harness::guest::Guest;
use crate::harness::merging::Merging;
use crate::harness::monitor::MonitorKind;
use crate::harness::proc;
use crate::harness::size::GuestSize;
use crate::harness::testbed::Testbed;

/// Number of the template among the guests of its series.
pub const TEMPLATE: u32 = 1;
/// Modules that a template's guest needs for its socket.
pub const SOCKET_MODULE: &str = "vmw_vsock_virtio_transport";
/// Port of the guest's service.
pub(super) const PORT: u32 = 52;
/// Time limit for a template's boot; an emulated host may be slow.
const BOOT_LIMIT: Duration = Duration::from_secs(240);
/// Time limit for a request to a monitor, snapshots included.
const API_LIMIT: Duration = Duration::from_secs(180);
/// Time limit for the first answer of a machine.
const ANSWER_LIMIT: Duration = Duration::from_secs(60);
/// Time limit for one attempt to be answered. A connection that the guest does not expect is reset
/// at once.
const ATTEMPT_LIMIT: Duration = Duration::from_secs(10);
/// Interval of attempts.
const RETRY: Duration = Duration::from_millis(1);
/// Time limit for the end of a killed monitor.
const END_LIMIT: Duration = Duration::from_secs(20);
/// Interval of looking for it.
const END_INTERVAL: Duration = Duration::from_millis(5);
/// Number of templates of this process, for the names of their checkpoints.
static CHECKPOINTS: AtomicU32 = AtomicU32::new(0);

/// A guest from which machines are forked.
pub struct Template {
    /// The guest.
    pub guest: Guest,
    directory: Arc<TempDir>,
    ebb: PathBuf,
    /// Options of its forks.
    options: Vec<String>,
}

impl Template {
    /// Boots it, with a disk that it only reads, and starts its service.
    ///
    /// # Errors
    /// Those of a guest's start.
    pub fn start(
        testbed: &Testbed<'_>,
        size: GuestSize,
        disk: Option<&Path>,
    ) -> Result<Self, LabError> {
        let directory = tempfile::tempdir().map_err(LabError::of_file(std::env::temp_dir()))?;
        testbed.events().step(TEMPLATE, "starts");
        let socket = directory.path().join("template.sock");
        let mut command = testbed.template_command(size, Some(&socket))?;
        let vsock = directory.path().join("template.vsock");
        command.args(["--forkable", "--vsock", &format!("path={}", vsock.display())]);
        let disk = disk.map(|path| Device::SharedDisk { path }.arguments(MonitorKind::Ebb));
        let mut options = disk.unwrap_or_default();
        command.args(&options);
        let merging = testbed.setup().merging;
        let memory = merging.memory_option();
        if matches!(merging, Merging::Owner(_)) {
            options.extend(["--memory", memory.trim_start_matches(',')].map(str::to_owned));
        }
        let mut guest = Guest::start(TEMPLATE, command)?;
        testbed.show(&[guest.pid()]);
        guest.wait_ready(BOOT_LIMIT)?;
        guest.begin(Command::VsockServe { port: PORT, service: Service::Echo })?;
        let ebb = testbed.ebb().get_program().into();
        Ok(Self { guest, directory: Arc::new(directory), ebb, options })
    }

    /// Its API.
    pub fn client(&self) -> Client {
        Client::new(self.directory.path().join("template.sock"), API_LIMIT)
    }

    /// Makes a checkpoint of it, by `ebb ctl SOCKET checkpoint NAME`.
    ///
    /// # Errors
    /// [`LabError::Guest`].
    pub fn checkpoint(&self) -> Result<(Checkpoint, CheckpointReport), LabError> {
        let number = CHECKPOINTS.fetch_add(1, Ordering::Relaxed);
        let checkpoint = Checkpoint {
            name: format!("ebb-lab-{}-{number}", std::process::id()),
            directory: Arc::clone(&self.directory),
            ebb: self.ebb.clone(),
            options: self.options.clone(),
        };
        let socket = self.directory.path().join("template.sock");
        let mut program = Program::new(&self.ebb);
        program.arg("ctl").arg(socket).args(["checkpoint", &checkpoint.name, "--json"]);
        let report = document(TEMPLATE, program)?;
        Ok((checkpoint, report))
    }

    /// What a program of its guest sends to a client of a port.
    ///
    /// # Errors
    /// [`LabError::Guest`].
    pub fn read_from(&self, port: u32) -> Result<Vec<u8>, LabError> {
        read_from(TEMPLATE, &self.directory.path().join("template.vsock"), port)
    }

    /// Writes a snapshot of it.
    ///
    /// # Errors
    /// [`LabError::Guest`].
    pub fn snapshot(&self) -> Result<Snapshot, LabError> {
        self.snapshot_to(self.directory.path().join("template.snapshot"))
    }

    /// The same, to this file.
    ///
    /// # Errors
    /// [`LabError::Guest`].
    pub fn snapshot_to(&self, path: PathBuf) -> Result<Snapshot, LabError> {
        Snapshot::take(TEMPLATE, &self.client(), path, Arc::clone(&self.directory))
    }

    /// Ends its monitor, and waits until the memory of that is free.
    pub fn end(&mut self) {
        self.guest.kill();
        wait_end(|| self.guest.ended_by_itself().is_some());
    }
}

/// A snapshot's file, which is removed when this is dropped.
pub struct Snapshot {
    /// The monitor's report.
    pub report: SnapshotReport,
    path: PathBuf,
    /// For sockets of the machines that are restored.
    directory: Arc<TempDir>,
}

impl Snapshot {
    fn take(
        guest: u32,
        client: &Client,
        path: PathBuf,
        directory: Arc<TempDir>,
    ) -> Result<Self, LabError> {
        let report = ebb_vmm::snapshot::take(client, &path)
            .map_err(|error| LabError::unexpected(guest, error))?;
        Ok(Self { report, path, directory })
    }

    /// Its file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Restores it once; returns the time from the start of `ebb restore` to the first answer. The
    /// machine is ended.
    ///
    /// # Errors
    /// Those of a guest's start.
    pub fn restore(&self, testbed: &Testbed<'_>, number: u32) -> Result<Duration, LabError> {
        let mut restored = self.start(testbed, number, &[])?;
        restored.wait_answer()?;
        Ok(restored.elapsed())
    }

    /// Begins to restore it, with further options of `ebb restore`.
    ///
    /// # Errors
    /// Those of a guest's start.
    pub fn start(
        &self,
        testbed: &Testbed<'_>,
        number: u32,
        options: &[&OsStr],
    ) -> Result<Restored, LabError> {
        let socket = |kind| self.directory.path().join(format!("restored-{number}.{kind}"));
        let (api, vsock) = (socket("sock"), socket("vsock"));
        let mut command = testbed.restore_command(&self.path, &api);
        command.args(["--vsock", &format!("path={}", vsock.display())]).args(options);
        let begun = Instant::now();
        Ok(Restored { guest: Guest::start(number, command)?, begun, api, vsock })
    }
}

/// A machine that was restored from a snapshot. Its monitor ends when this is dropped.
pub struct Restored {
    guest: Guest,
    begun: Instant,
    api: PathBuf,
    vsock: PathBuf,
}

impl Restored {
    /// Its guest.
    pub fn guest(&mut self) -> &mut Guest {
        &mut self.guest
    }

    /// The socket of its API.
    pub fn api(&self) -> &Path {
        &self.api
    }

    /// Time since the start of its monitor.
    pub fn elapsed(&self) -> Duration {
        self.begun.elapsed()
    }

    /// Waits until a program of its guest answers.
    ///
    /// # Errors
    /// [`LabError::Guest`].
    pub fn wait_answer(&mut self) -> Result<(), LabError> {
        wait_answer(self.guest.number(), &self.vsock, || self.guest.ended_by_itself())
    }

    /// Waits until its monitor has built it and leaves it paused.
    ///
    /// # Errors
    /// [`LabError::Guest`].
    pub fn wait_paused(&mut self) -> Result<(), LabError> {
        let client = Client::new(&self.api, API_LIMIT);
        let deadline = Instant::now() + ANSWER_LIMIT;
        let is_paused = || client.get::<VmInfo>("/vm").is_ok_and(|vm| vm.state == VmState::Paused);
        while !is_paused() {
            if let Some(error) = self.guest.ended_by_itself() {
                return Err(error);
            }
            if Instant::now() > deadline {
                let problem =
                    GuestProblem::TimeOut { what: "restored machine", limit: ANSWER_LIMIT };
                return Err(self.guest.failed(problem));
            }
            thread::sleep(RETRY);
        }
        Ok(())
    }

    /// Lets it run.
    ///
    /// # Errors
    /// [`LabError::Guest`].
    pub fn resume(&self) -> Result<(), LabError> {
        let resumed = Client::new(&self.api, API_LIMIT).put::<VmInfo>("/vm/resume");
        let number = self.guest.number();
        resumed.map(drop).map_err(|error| LabError::unexpected(number, error))
    }

    /// Page faults of its monitor and its guest that have waited for a disk.
    ///
    /// # Errors
    /// [`LabError::SystemFile`].
    pub fn major_faults(&self) -> Result<u64, LabError> {
        let path = format!("/proc/{}/stat", self.guest.pid());
        let text = fs::read_to_string(&path).map_err(LabError::of_file(&path))?;
        let none = || LabError::of_file(&path)(io::ErrorKind::InvalidData.into());
        proc::major_faults(&text).ok_or_else(none)
    }
}

impl Drop for Snapshot {
    fn drop(&mut self) {
        // It is in a directory that is removed.
        let _ = fs::remove_file(&self.path);
    }
}

/// A checkpoint in memory, which is removed when this is dropped.
pub struct Checkpoint {
    name: String,
    directory: Arc<TempDir>,
    ebb: PathBuf,
    options: Vec<String>,
}

/// What `ebb fork --json` prints.
#[derive(Deserialize)]
struct Report {
    machines: Vec<Made>,
}

#[derive(Deserialize)]
struct Made {
    pid: i32,
    #[serde(default)]
    reseeded: bool,
}

impl Checkpoint {
    /// Makes a machine by `ebb fork`; it has this number among the guests of its series.
    ///
    /// # Errors
    /// [`LabError::Guest`].
    pub fn fork(&self, number: u32) -> Result<Fork, LabError> {
        let mut forks = self.fork_several(number, 1, &number.to_string())?;
        forks.pop().ok_or_else(|| LabError::unexpected(number, "no machine was made"))
    }

    /// Makes `count` machines by one `ebb fork -n`, the first of them with this number.
    ///
    /// # Errors
    /// [`LabError::Guest`].
    pub fn fork_many(&self, first: u32, count: u32) -> Result<Vec<Fork>, LabError> {
        self.fork_several(first, count, &format!("{first}-{{}}"))
    }

    fn fork_several(&self, first: u32, count: u32, name: &str) -> Result<Vec<Fork>, LabError> {
        let path = |kind: &str| self.directory.path().join(format!("{name}.{kind}"));
        let (api, vsock) = (path("sock"), path("vsock"));
        let mut program = Program::new(&self.ebb);
        program.args(["fork", &self.name, "-n", &count.to_string(), "--json", "--api"]).arg(&api);
        program.args(["--vsock", &format!("path={}", vsock.display())]);
        program.args(&self.options);
        let report: Report = document(first, program)?;
        let of = |pattern: &Path, index: u32| {
            PathBuf::from(pattern.display().to_string().replace("{}", &index.to_string()))
        };
        let fork = |(index, made): (u32, Made)| {
            let pid = Pid::from_raw(made.pid)?;
            let (api, vsock) = (of(&api, index), of(&vsock, index));
            let (ebb, directory) = (self.ebb.clone(), Arc::clone(&self.directory));
            let (number, reseeded) = (first + index, made.reseeded);
            Some(Fork { number, pid, reseeded, api, vsock, ebb, directory })
        };
        Ok((0..).zip(report.machines).filter_map(fork).collect())
    }
}

impl Drop for Checkpoint {
    fn drop(&mut self) {
        // Without a checkpoint it fails.
        let _ = Program::new(&self.ebb).args(["checkpoints", "remove", &self.name]).output();
    }
}

/// A machine that was forked; its monitor is killed when this is dropped.
pub struct Fork {
    number: u32,
    pid: Pid,
    reseeded: bool,
    api: PathBuf,
    vsock: PathBuf,
    ebb: PathBuf,
    directory: Arc<TempDir>,
}

impl Fork {
    /// Its number among the guests of its series.
    pub fn number(&self) -> u32 {
        self.number
    }

    /// Process of its monitor.
    pub fn pid(&self) -> u32 {
        self.pid.as_raw_nonzero().get().unsigned_abs()
    }

    /// Whether the agent of its guest has confirmed that its random numbers are new.
    pub fn reseeded(&self) -> bool {
        self.reseeded
    }

    /// Its API.
    pub fn client(&self) -> Client {
        Client::new(&self.api, API_LIMIT)
    }

    /// What a program of its guest sends to a client of a port.
    ///
    /// # Errors
    /// [`LabError::Guest`].
    pub fn read_from(&self, port: u32) -> Result<Vec<u8>, LabError> {
        read_from(self.number, &self.vsock, port)
    }

    /// Waits until a program of its guest answers.
    ///
    /// # Errors
    /// [`LabError::Guest`].
    pub fn wait_answer(&self) -> Result<(), LabError> {
        let lost = || {
            let ended = test_kill_process(self.pid).is_err();
            ended.then(|| LabError::unexpected(self.number, "its monitor has ended"))
        };
        wait_answer(self.number, &self.vsock, lost)
    }

    /// Connects with the console of its guest, which was forked from `template`.
    ///
    /// # Errors
    /// [`LabError::StartMonitor`].
    pub fn console(&self, template: &Template) -> Result<Guest, LabError> {
        let mut program = Program::new(&self.ebb);
        program.arg("console").arg(&self.api);
        template.guest.forked(self.number, program)
    }

    /// Writes a snapshot of it, whose memory is copied in the pause: its file cannot be read again,
    /// which copies while the guest runs need.
    ///
    /// # Errors
    /// [`LabError::Guest`].
    pub fn snapshot_in_pause(&self) -> Result<Snapshot, LabError> {
        let path = self.api.with_extension("snapshot");
        let file = File::options().write(true).create_new(true).open(&path);
        let file = file.map_err(LabError::of_file(&path))?;
        let target = SnapshotTarget { path: path.clone() };
        let report = self.client().put_json_with("/vm/snapshot", &target, &[file.as_fd()]);
        let report = report.map_err(|error| LabError::unexpected(self.number, error))?;
        let directory = Arc::clone(&self.directory);
        Ok(Snapshot { report, path, directory })
    }
}

impl Drop for Fork {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = kill_process(self.pid, Signal::KILL);
        wait_end(|| test_kill_process(self.pid).is_err());
    }
}

/// Waits for the end of a process that was killed.
fn wait_end(mut has_ended: impl FnMut() -> bool) {
    let deadline = Instant::now() + END_LIMIT;
    while !has_ended() && Instant::now() < deadline {
        thread::sleep(END_INTERVAL);
    }
}

/// Runs `ebb`; returns the document that it prints.
fn document<T: DeserializeOwned>(guest: u32, mut program: Program) -> Result<T, LabError> {
    let output = program.output().map_err(|cause| LabError::StartMonitor {
        program: program.get_program().to_string_lossy().into_owned(),
        cause,
    })?;
    if !output.status.success() {
        let text = String::from_utf8_lossy(&output.stderr).trim_end().to_owned();
        return Err(LabError::guest(guest, GuestProblem::Failed(text)));
    }
    serde_json::from_slice(&output.stdout).map_err(|error| LabError::unexpected(guest, error))
}

/// Waits until the service of a guest answers; `lost` finds that it cannot.
fn wait_answer(
    guest: u32,
    vsock: &Path,
    mut lost: impl FnMut() -> Option<LabError>,
) -> Result<(), LabError> {
    let deadline = Instant::now() + ANSWER_LIMIT;
    while !answers(vsock) {
        if let Some(error) = lost() {
            return Err(error);
        }
        if Instant::now() > deadline {
            let problem = GuestProblem::TimeOut { what: "first answer", limit: ANSWER_LIMIT };
            return Err(LabError::guest(guest, problem));
        }
        thread::sleep(RETRY);
    }
    Ok(())
}

/// Whether a byte comes back from the service.
fn answers(vsock: &Path) -> bool {
    let exchange = || -> io::Result<bool> {
        let mut stream = connect(vsock, PORT, ATTEMPT_LIMIT)?;
        let mut answer = [0];
        stream.get_mut().write_all(b"?")?;
        stream.read_exact(&mut answer)?;
        Ok(&answer == b"?")
    };
    exchange().unwrap_or(false)
}

/// Connects with a port of a guest (docs/vsock.md).
fn connect(vsock: &Path, port: u32, limit: Duration) -> io::Result<BufReader<UnixStream>> {
    const MOST_BYTES: u64 = 64;
    let mut stream = UnixStream::connect(vsock)?;
    stream.set_read_timeout(Some(limit))?;
    stream.write_all(format!("CONNECT {port}\n").as_bytes())?;
    let (mut stream, mut line) = (BufReader::new(stream), String::new());
    (&mut stream).take(MOST_BYTES).read_line(&mut line)?;
    if line.starts_with("OK ") { Ok(stream) } else { Err(io::ErrorKind::ConnectionRefused.into()) }
}

/// What a guest sends to a client of a port.
fn read_from(guest: u32, vsock: &Path, port: u32) -> Result<Vec<u8>, LabError> {
    let read = || -> io::Result<Vec<u8>> {
        let mut bytes = Vec::new();
        connect(vsock, port, ANSWER_LIMIT)?.read_to_end(&mut bytes)?;
        Ok(bytes)
    };
    let failed = |error| LabError::unexpected(guest, format!("port {port} of its guest: {error}"));
    read().map_err(failed)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixListener;

    #[test]
    fn an_answer_is_a_byte_that_comes_back() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("vsock");
        assert!(!answers(&path), "there is no socket");
        let listener = UnixListener::bind(&path).unwrap();
        for (line, back, expected) in
            [("OK 1073741824\n", "?", true), ("OK 1\n", "!", false), ("", "", false)]
        {
            thread::scope(|scope| {
                scope.spawn(|| {
                    let (mut stream, _) = listener.accept().unwrap();
                    let mut asked = String::new();
                    BufReader::new(&stream).read_line(&mut asked).unwrap();
                    assert_eq!(asked, "CONNECT 52\n");
                    stream.write_all(line.as_bytes()).unwrap();
                    if expected {
                        stream.read_exact(&mut [0]).unwrap();
                    }
                    stream.write_all(back.as_bytes()).unwrap();
                });
                assert_eq!(answers(&path), expected);
            });
        }
    }

    #[test]
    fn a_failure_of_the_program_is_shown() {
        let shell = |script| {
            let mut program = Program::new("/bin/sh");
            program.args(["-c", script]);
            document::<Report>(7, program)
        };
        let error = shell("echo 'no such checkpoint' >&2; exit 1").err().unwrap().to_string();
        assert!(error.contains("guest 7") && error.contains("no such checkpoint"), "{error}");
        let made = shell("echo '{\"machines\": [{\"pid\": 42, \"elapsed_us\": 7}]}'").unwrap();
        assert_eq!(made.machines[0].pid, 42);
    }
}
