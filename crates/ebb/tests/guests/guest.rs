//! A guest under test: `ebb run` as a child, its agent on the serial console, its API socket.

use std::fmt::Write as _;
use std::fs;
use std::mem;
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::{Command as Program, ExitStatus};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use ebb_agent::protocol::{Command, Crash, Event, Request};
use ebb_lab::harness::guest_process::{GuestProcess, NotSaid, Said, Sending, Transcript};
use ebb_vmm::api::{BalloonInfo, Client, ClientError, StatisticsDocument, VmInfo};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use crate::harness::{Guests, eventually, limit, when};

/// Time limit from the start of the monitor to the agent's first message; it takes about 2 s in a
/// virtual host on an idle machine.
const BOOT_LIMIT_S: u64 = 60;
/// Time limit for a command of the agent.
const COMMAND_LIMIT_S: u64 = 60;
/// Time limit for an answer of the API.
const API_LIMIT_S: u64 = 10;
/// Time limit in a request that waits for the guest: less than that of the API's answer.
pub const REQUEST_MS: u64 = 25_000;
/// Time limit for the end of a monitor whose guest has ended.
const END_LIMIT_S: u64 = 20;
/// The monitor's message before the number of the vCPU that had a triple fault.
const TRIPLE_FAULT: &str = "the guest crashed: triple fault on vCPU ";
/// Number of the next command, for all guests: a restored guest must not get a command with a
/// number that it has already answered.
static NEXT_COMMAND: AtomicU64 = AtomicU64::new(1);
/// One MiB in bytes.
pub const MIB: u64 = 1 << 20;
/// One GiB in bytes.
pub const GIB: u64 = 1 << 30;

/// A guest as needed to end it or to report its state.
#[derive(Clone)]
pub struct Handle {
    transcript: Transcript,
    /// `None` once the process was waited for: its pid may then belong to another process.
    pid: Arc<Mutex<Option<Pid>>>,
    socket: PathBuf,
    command: String,
    /// Whether the test has requested a triple fault.
    triple_fault_asked: Arc<AtomicBool>,
}

impl Handle {
    /// Sends SIGKILL.
    pub fn kill(&self) {
        if let Some(pid) = *self.pid.lock().unwrap_or_else(PoisonError::into_inner) {
            let _ = kill_process(pid, Signal::KILL);
        }
    }

    /// The vCPU on which the guest has ended with a triple fault that the test did not request.
    pub fn unasked_triple_fault(&self) -> Option<u32> {
        if self.triple_fault_asked.load(Ordering::Relaxed) {
            return None;
        }
        let number = |line: &str| line.split_once(TRIPLE_FAULT)?.1.trim().parse().ok();
        self.transcript.lock().log.lines().find_map(number)
    }

    /// Command, state, console and log.
    pub fn diagnose(&self) -> String {
        let mut text = format!("\n--- {}\n", self.command);
        let pid = *self.pid.lock().unwrap_or_else(PoisonError::into_inner);
        match pid {
            None => text.push_str("it has ended\n"),
            Some(pid) => {
                let pid = pid.as_raw_nonzero();
                let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
                let wanted = ["State:", "VmRSS:", "RssShmem:", "HugetlbPages:", "Threads:"];
                for line in
                    status.lines().filter(|line| wanted.iter().any(|name| line.starts_with(name)))
                {
                    let _ = writeln!(text, "{line}");
                }
                text.push_str(&threads(pid));
                let started = !self.transcript.lock().events.is_empty();
                text.push_str(&crate::trace::moment(started));
                let client = Client::new(&self.socket, Duration::from_secs(2));
                for target in ["/vm", "/balloon", "/balloon/statistics", "/merge"] {
                    match client.request("GET", target, "") {
                        Ok(reply) => drop(writeln!(text, "{target}: {}", reply.body)),
                        Err(error) => drop(writeln!(text, "{target}: {error}")),
                    }
                }
            }
        }
        let said = self.transcript.lock();
        for (name, lines) in [("console", &said.console), ("log", &said.log)] {
            let _ = writeln!(text, "{name}:");
            for line in lines.lines().skip(lines.lines().len().saturating_sub(25)) {
                let _ = writeln!(text, "    {line}");
            }
        }
        let console = said.console.lines().collect::<Vec<_>>().join("\n");
        text.push_str(crate::trace::impossible_interrupt(&console).unwrap_or_default());
        let events: Vec<_> = said.events.iter().rev().take(3).rev().map(|it| &it.event).collect();
        let _ = writeln!(text, "last events: {events:?}");
        text
    }
}

/// A running guest; killed and waited for when dropped.
pub struct Guest {
    process: GuestProcess,
    /// Output before it moved here. Its last line may end here: a migration stops a guest in the
    /// middle of what it says.
    before: Said,
    handle: Handle,
    guests: Arc<Guests>,
    status: Option<ExitStatus>,
}

impl Guest {
    /// Starts a monitor with the guest's console on standard input and output.
    pub fn spawn(mut program: Program, socket: PathBuf, guests: &Arc<Guests>) -> Self {
        let command = format!("{program:?}");
        let process =
            GuestProcess::start(&mut program).unwrap_or_else(|error| panic!("{command}: {error}"));
        let handle = Handle {
            transcript: process.transcript().clone(),
            pid: Arc::new(Mutex::new(Pid::from_raw(process.pid().cast_signed()))),
            socket,
            command,
            triple_fault_asked: Arc::default(),
        };
        guests.add(handle.clone());
        let before = Said::default();
        Self { process, before, handle, guests: guests.clone(), status: None }
    }

    /// Takes over what the same guest has said in `source`, whose monitor has ended.
    pub fn continue_from(&mut self, mut source: Self) {
        self.before = mem::take(&mut source.before);
        let last = mem::take(&mut *source.handle.transcript.lock());
        self.before.events.extend(last.events);
        self.before.console = last.console;
        self.before.unfinished = last.unfinished;
    }

    /// The last lines of the console that are no events, beginning with those before the guest
    /// moved here.
    pub fn console_lines(&self) -> Vec<String> {
        let said = self.handle.transcript.lock();
        let mut lines: Vec<String> = self.before.console.lines().map(str::to_owned).collect();
        let mut here = said.console.lines();
        if let (Some(line), true) = (lines.last_mut(), self.before.unfinished.is_some()) {
            line.push_str(here.next().unwrap_or_default());
        }
        lines.extend(here.map(str::to_owned));
        lines
    }

    /// The monitor's process.
    pub fn pid(&self) -> u32 {
        self.process.pid()
    }

    /// The API socket's path.
    pub fn socket(&self) -> &PathBuf {
        &self.handle.socket
    }

    /// A client of the API.
    pub fn client(&self) -> Client {
        Client::new(&self.handle.socket, limit(API_LIMIT_S))
    }

    /// Waits for the agent's "ready" message number `count` and returns it.
    #[track_caller]
    pub fn wait_ready(&self, count: usize) -> Event {
        self.wait(limit(BOOT_LIMIT_S), &format!("start number {count} of the agent"), |said| {
            said.starts().nth(count - 1).map(|arrival| arrival.event.clone())
        })
    }

    /// Number of the agent's "ready" messages.
    pub fn starts(&self) -> usize {
        self.handle.transcript.lock().starts().count()
    }

    /// Waits until the API answers.
    #[track_caller]
    pub fn wait_api(&mut self) {
        eventually("the API answers", 30, || {
            let asked = self.client().request("GET", "/vm", "");
            assert!(
                asked.is_ok() || self.is_running(),
                "the monitor has ended: {:?}",
                self.wait_end()
            );
            asked.map(drop).map_err(|error| error.to_string())
        });
    }

    /// Waits until `look` finds something in the output.
    #[track_caller]
    fn wait<T>(&self, limit: Duration, what: &str, look: impl FnMut(&Said) -> Option<T>) -> T {
        match self.handle.transcript.wait(Instant::now() + limit, look) {
            Ok(found) => found,
            Err(NotSaid::Closed) => panic!("the monitor has ended before this: {what}"),
            Err(NotSaid::TimeOut) => panic!("not within {} s: {what}", limit.as_secs()),
        }
    }

    /// Sends a command to the agent; returns its number.
    #[track_caller]
    pub fn send(&self, command: Command) -> u64 {
        if command == (Command::Crash { how: Crash::TripleFault }) {
            self.handle.triple_fault_asked.store(true, Ordering::Relaxed);
        }
        let id = NEXT_COMMAND.fetch_add(1, Ordering::Relaxed);
        self.process
            .send(&Request { id, command }, Sending::AtOnce)
            .expect("the monitor reads its standard input");
        id
    }

    /// The result of a command, if it has ended.
    pub fn poll(&self, id: u64) -> Option<Result<Value, String>> {
        self.end_of(&self.handle.transcript.lock(), id)
    }

    /// The result of a command that has ended here or before the guest moved here.
    fn end_of(&self, said: &Said, id: u64) -> Option<Result<Value, String>> {
        let whole = said.end_of(id).or_else(|| self.before.end_of(id));
        if let Some((_, outcome)) = whole {
            return Some(outcome.map(|(_, result)| result.clone()).map_err(str::to_owned));
        }
        let line = [self.before.unfinished.as_deref()?, said.console.lines().next()?].concat();
        match Event::from_line(line.as_bytes())? {
            Event::Done { id: of, result, .. } if of == id => Some(Ok(result)),
            Event::Failed { id: of, error } if of == id => Some(Err(error)),
            _ => None,
        }
    }

    /// Waits until the agent has accepted a command: a command in transit to the guest is not part
    /// of a snapshot.
    #[track_caller]
    pub fn wait_started(&self, id: u64) {
        self.wait(limit(COMMAND_LIMIT_S), &format!("the start of command {id}"), |said| {
            let started = |event: &Event| matches!(event, Event::Started { id: of } if *of == id);
            said.events.iter().any(|arrival| started(&arrival.event)).then_some(())
        });
    }

    /// Waits for the end of a command and returns its result.
    #[track_caller]
    pub fn outcome(&self, id: u64) -> Result<Value, String> {
        self.outcome_within(COMMAND_LIMIT_S, id)
    }

    /// As [`outcome`](Self::outcome), for commands that may take longer than others.
    #[track_caller]
    pub fn outcome_within(&self, seconds: u64, id: u64) -> Result<Value, String> {
        self.wait(limit(seconds), &format!("the end of command {id}"), |said| self.end_of(said, id))
    }

    /// Runs a command of the agent, which must succeed.
    #[track_caller]
    pub fn run(&self, command: Command) -> Value {
        let text = format!("{command:?}");
        let id = self.send(command);
        self.outcome(id).unwrap_or_else(|error| panic!("{text}: {error}"))
    }

    /// Text of a file in the guest.
    #[track_caller]
    pub fn read_file(&self, path: &str) -> String {
        self.read_lines(path, &[])
    }

    /// Lines of a file in the guest that contain one of these words, or all if none is given. Each
    /// byte that is sent interrupts the guest: a few thousand take seconds in an emulated host.
    #[track_caller]
    pub fn read_lines(&self, path: &str, words: &[&str]) -> String {
        let words = words.iter().map(|word| (*word).to_owned()).collect();
        let result = self.run(Command::ReadFile { path: path.to_owned(), words });
        result["text"].as_str().expect("text").to_owned()
    }

    /// The value after `name` in a file of such lines in the guest.
    #[track_caller]
    pub fn value(&self, path: &str, name: &str) -> u64 {
        let text = self.read_lines(path, &[name]);
        let value = text.lines().find_map(|line| {
            let mut words = line.split_ascii_whitespace();
            words.next().filter(|word| *word == name)?;
            words.next()?.parse().ok()
        });
        value.unwrap_or_else(|| panic!("no {name} in {path}:\n{text}"))
    }

    /// Writes a file in the guest.
    #[track_caller]
    pub fn write_file(&self, path: &str, text: &str) {
        self.run(Command::WriteFile { path: path.to_owned(), text: text.to_owned() });
    }

    /// Interrupts of the machine's ACPI event device, which announce the power button and a new VM
    /// generation id.
    #[track_caller]
    pub fn acpi_events(&self) -> u64 {
        let line = self.read_lines("/proc/interrupts", &["ACPI:Ged"]);
        assert_eq!(line.lines().count(), 1, "an event device: {line:?}");
        line.split_ascii_whitespace().skip(1).map_while(|word| word.parse::<u64>().ok()).sum()
    }

    /// A field of the guest's `/proc/meminfo`, in bytes.
    #[track_caller]
    pub fn meminfo(&self, name: &str) -> u64 {
        self.value("/proc/meminfo", &format!("{name}:")) * 1024
    }

    /// Number of pages whose content differs from what [`Command::Hold`] wrote.
    #[track_caller]
    pub fn wrong_pages(&self) -> u64 {
        self.run(Command::VerifyHeld)["wrong_pages"].as_u64().expect("a number")
    }

    /// `GET /vm`.
    #[track_caller]
    pub fn vm(&self) -> VmInfo {
        self.client().get("/vm").unwrap_or_else(|error| panic!("{error}"))
    }

    /// `GET /balloon`.
    #[track_caller]
    pub fn balloon(&self) -> BalloonInfo {
        self.client().get("/balloon").unwrap_or_else(|error| panic!("{error}"))
    }

    /// Requests fresh statistics.
    pub fn statistics(&self) -> Result<StatisticsDocument, ClientError> {
        self.client().get("/balloon/statistics")
    }

    /// Sends a PUT without a body.
    #[track_caller]
    pub fn put(&self, target: &str) {
        self.client()
            .request("PUT", target, "")
            .unwrap_or_else(|error| panic!("{target}: {error}"));
    }

    /// Sends a PUT without a body and returns the document in the answer.
    pub fn put_for<T: serde::de::DeserializeOwned>(&self, target: &str) -> T {
        self.client().put(target).unwrap_or_else(|error| panic!("{target}: {error}"))
    }

    /// The status and message of a request that must be refused.
    #[track_caller]
    pub fn refused(&self, method: &str, target: &str, body: &str) -> (u16, String) {
        match self.client().request(method, target, body) {
            Err(ClientError::Refused { status, detail }) => {
                let remedy = detail.remedy.unwrap_or_default();
                (status, format!("{} {remedy}", detail.message))
            }
            other => panic!("{method} {target} {body}: {other:?} instead of a refusal"),
        }
    }

    /// Sets the balloon's target and returns at once.
    #[track_caller]
    pub fn set_target(&self, target_bytes: u64) {
        let body = serde_json::json!({ "target_bytes": target_bytes });
        let info: BalloonInfo =
            self.client().put_json("/balloon", &body).unwrap_or_else(|error| panic!("{error}"));
        assert_eq!(info.target_bytes, target_bytes);
    }

    /// Sets the balloon's target and waits until the balloon reaches it.
    #[track_caller]
    pub fn inflate_to(&self, target_bytes: u64) {
        self.set_target(target_bytes);
        eventually("the balloon reaches its target", 60, || {
            let info = self.balloon();
            when(info.actual_bytes == target_bytes, || format!("{info:?}"))
        });
    }

    /// Resident guest memory according to the API.
    #[track_caller]
    pub fn resident(&self) -> u64 {
        self.vm().resident_bytes
    }

    /// Huge pages of anonymous memory in the monitor's process, in bytes.
    pub fn huge_bytes(&self) -> u64 {
        let path = format!("/proc/{}/smaps_rollup", self.pid());
        let text = fs::read_to_string(path).expect("the monitor runs");
        let line = text.lines().find_map(|line| line.strip_prefix("AnonHugePages:"));
        let kib = line.expect("AnonHugePages").trim().trim_end_matches(" kB");
        kib.parse::<u64>().expect("a number") * 1024
    }

    /// Resident memory of the monitor's process according to Linux, without pages of files: those
    /// of the program come and go, and their count lags behind by up to 64 page faults of each
    /// thread, of up to 16 pages each, before Linux 6.2 (`check_sync_rss_stat`).
    pub fn process_bytes(&self) -> u64 {
        let text =
            fs::read_to_string(format!("/proc/{}/status", self.pid())).expect("the monitor runs");
        let field = |name: &str| {
            let line = text.lines().find(|line| line.starts_with(name)).unwrap_or_default();
            line.split_ascii_whitespace()
                .nth(1)
                .and_then(|number| number.parse::<u64>().ok())
                .unwrap_or(0)
        };
        ["RssAnon:", "RssShmem:", "VmSwap:", "HugetlbPages:"].map(field).iter().sum::<u64>() * 1024
    }

    /// A counter of `GET /metrics`, such as `name` or `name{kind="x"}`.
    #[track_caller]
    pub fn metric(&self, name: &str) -> u64 {
        let reply =
            self.client().request("GET", "/metrics", "").unwrap_or_else(|error| panic!("{error}"));
        let line = reply.body.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        line.unwrap_or_else(|| panic!("no metric {name} in:\n{}", reply.body))
            .parse()
            .expect("a number")
    }

    /// Sends a signal to the monitor.
    pub fn signal(&self, signal: Signal) {
        let pid = Pid::from_raw(self.pid().cast_signed()).expect("a process has a number");
        kill_process(pid, signal).expect("the monitor runs");
    }

    /// Waits until the monitor ends by itself; returns the exit code, or `None` for a signal, and
    /// the last part of its log.
    #[track_caller]
    pub fn wait_end(&mut self) -> (Option<i32>, String) {
        let status = eventually("the monitor ends", END_LIMIT_S, || {
            self.process.status().ok_or_else(|| "it still runs".to_owned())
        });
        self.ended(status);
        let log = self.log();
        assert!(!log.contains('\x1b'), "the log of a program has control characters: {log:?}");
        (status.code(), log)
    }

    /// Whether the monitor has not ended.
    pub fn is_running(&mut self) -> bool {
        self.status.is_none() && self.process.status().is_none()
    }

    /// Signal that has ended the monitor.
    pub fn end_signal(&self) -> Option<i32> {
        self.status.and_then(|status| status.signal())
    }

    /// The monitor's log, as far as it is kept.
    pub fn log(&self) -> String {
        self.handle.transcript.lock().log.lines().collect::<Vec<_>>().join("\n")
    }

    /// Number of bytes that the monitor has logged.
    pub fn log_bytes(&self) -> u64 {
        self.handle.transcript.lock().log_bytes
    }

    fn ended(&mut self, status: ExitStatus) {
        *self.handle.pid.lock().unwrap_or_else(PoisonError::into_inner) = None;
        self.status = Some(status);
        self.process.finish_reading();
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        if thread::panicking() {
            // Include the last messages: a monitor that ends removes its socket before it reports
            // the reason.
            let deadline = Instant::now() + Duration::from_secs(5);
            while self.is_running() && !self.socket().exists() && Instant::now() < deadline {
                thread::sleep(Duration::from_millis(50));
            }
            if let (None, Some(status)) = (self.status, self.process.status()) {
                self.ended(status);
            }
            self.guests.report(&self.handle.diagnose());
        }
        if self.status.is_none() {
            self.process.kill();
            if let Some(status) = self.process.wait_end(Duration::from_secs(END_LIMIT_S)) {
                self.ended(status);
            }
        }
    }
}

/// Name, processor time and wait channel of each thread.
fn threads(pid: impl std::fmt::Display) -> String {
    let read = |path: PathBuf| fs::read_to_string(path).unwrap_or_default().trim().to_owned();
    let tasks = fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    let mut text = String::new();
    for task in tasks {
        let [name, stat, place] =
            ["comm", "stat", "wchan"].map(|name| read(task.path().join(name)));
        // utime and stime in ticks of 10 ms: proc(5), fields 14 and 15, counted after the name in
        // parentheses.
        let fields: Vec<&str> = stat.rsplit(") ").next().unwrap_or_default().split(' ').collect();
        let ticks = |index: usize| fields.get(index).copied().unwrap_or("?");
        let _ = writeln!(text, "thread {name}: {} + {} ticks, {place}", ticks(11), ticks(12));
    }
    text
}
