//! `ebb top` in a terminal, with a daemon that answers, hangs, answers nonsense and vanishes.

#![allow(clippy::unwrap_used)]

use std::fs::File;
use std::io::{Read as _, Write as _};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use ebb_host_policy::report::{MachineStatus, Status};
use ebb_host_policy::{Cause, GIB, Host, Level};
use ebb_vmm::api::{StatisticsDocument, StatisticsValues};
use ebb_vmm::isolation::IsolationInfo;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{Mode, OFlags};
use rustix::process::{Pid, Signal, kill_process};
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{Termios, Winsize, tcgetattr, tcsetwinsize};
use serde_json::{Value, json};
use tempfile::TempDir;

/// After so long a test fails rather than waits.
const PATIENCE: Duration = Duration::from_secs(60);

fn status() -> Status {
    let machine = |name: &str| MachineStatus {
        name: name.to_owned(),
        machine: None,
        monitor: None,
        socket: format!("/run/{name}.sock"),
        pid: None,
        profile: "default".to_owned(),
        is_held: false,
        trouble: None,
        explanation: None,
    };
    Status {
        version: "1".to_owned(),
        at_ms: 1,
        level: Level::Tight,
        cause: Cause::Available { available_bytes: GIB, limit_bytes: GIB },
        since_ms: 0,
        host: Host { total_bytes: 4 * GIB, available_bytes: GIB, swap: None, pressure: None },
        machines: vec![machine("web-1"), machine("web-2")],
        problems: Vec::new(),
    }
}

#[derive(Clone, Copy, PartialEq)]
enum Mood {
    Answers,
    Hangs,
    Nonsense,
}

/// A daemon's socket.
struct Daemon {
    folder: TempDir,
    mood: Arc<Mutex<Mood>>,
    /// Requests that are no questions.
    orders: Arc<Mutex<Vec<String>>>,
}

impl Daemon {
    fn start() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let listener = UnixListener::bind(folder.path().join("ebbd.sock")).unwrap();
        let mood = Arc::new(Mutex::new(Mood::Answers));
        let orders = Arc::<Mutex<Vec<String>>>::default();
        let daemon = Self { folder, mood: mood.clone(), orders: orders.clone() };
        thread::spawn(move || {
            let mut hanging = Vec::new();
            for stream in listener.incoming() {
                let stream = stream.unwrap();
                match *mood.lock().unwrap() {
                    Mood::Answers => answer(stream, &orders),
                    Mood::Hangs => hanging.push(stream),
                    Mood::Nonsense => drop((&stream).write_all(b"\x1b[2Jnonsense\n")),
                }
            }
        });
        daemon
    }

    fn socket(&self) -> PathBuf {
        self.folder.path().join("ebbd.sock")
    }

    fn is(&self, mood: Mood) {
        *self.mood.lock().unwrap() = mood;
    }

    fn orders(&self) -> Vec<String> {
        self.orders.lock().unwrap().clone()
    }
}

fn answer(mut stream: UnixStream, orders: &Mutex<Vec<String>>) {
    let mut request = String::new();
    while !request.ends_with("\r\n\r\n") && !request.ends_with('}') {
        let mut buffer = [0; 1024];
        let length = stream.read(&mut buffer).unwrap();
        if length == 0 {
            return;
        }
        request.push_str(&String::from_utf8_lossy(&buffer[..length]));
    }
    let path = request.split(' ').nth(1).unwrap();
    if request.starts_with("PUT ") {
        orders.lock().unwrap().push(format!("{path} {}", request.rsplit("\r\n").next().unwrap()));
    }
    let (code, document) = document(path);
    let body = document.to_string();
    let length = body.len();
    let head = format!("HTTP/1.1 {code} x\r\nServer: ebb/1\r\nContent-Length: {length}\r\n\r\n");
    // A client that has gone away needs no answer.
    let _ = stream.write_all(head.as_bytes()).and_then(|()| stream.write_all(body.as_bytes()));
}

/// Answers of a daemon and of a monitor, whose guest does not give new statistics.
fn document(path: &str) -> (u16, Value) {
    let balloon = json!({
        "target_bytes": 0, "actual_bytes": 0, "state": "idle", "offered_features": [],
        "negotiated_features": [], "statistics_interval_seconds": 0,
    });
    let document = match path {
        "/status" => serde_json::to_value(status()).unwrap(),
        "/hold" => json!(MachineStatus { is_held: true, ..status().machines.remove(0) }),
        "/vm" => json!({
            "state": "running", "cpus": 1, "memory_bytes": GIB, "backing": "anon",
            "resident_bytes": GIB / 2, "uptime_ms": 1, "clock": { "policy": "continue" },
            "kernel": "", "pid": 9, "isolation": IsolationInfo::default(), "version": "1",
            "balloon": { "target_bytes": 0, "actual_bytes": 0, "state": "idle" },
        }),
        "/balloon" => balloon,
        "/vm/park" => json!({
            "stages": [], "resident_before_bytes": GIB, "resident_bytes": 77 << 20,
            "elapsed_us": 1,
        }),
        _ => {
            let statistics =
                StatisticsValues { available_memory_bytes: Some(GIB / 4), ..Default::default() };
            let known = StatisticsDocument { age_ms: Some(5000), statistics };
            return (504, json!({ "error": { "message": "it is busy", "last_known": known } }));
        }
    };
    (200, document)
}

fn size(columns: u16, rows: u16) -> Winsize {
    Winsize { ws_row: rows, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 }
}

/// `ebb top` in a terminal.
struct Session {
    outer: File,
    inner: File,
    before: Termios,
    child: Child,
    /// What was written, from the last thing that was waited for.
    written: String,
}

impl Session {
    fn start(option: &str, socket: &Path) -> Self {
        let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC;
        let outer = openpt(flags).unwrap();
        grantpt(&outer).unwrap();
        unlockpt(&outer).unwrap();
        tcsetwinsize(&outer, size(100, 30)).unwrap();
        let name = ptsname(&outer, Vec::new()).unwrap();
        let inner = rustix::fs::open(&name, OFlags::RDWR | OFlags::NOCTTY, Mode::empty()).unwrap();
        let inner = File::from(inner);
        let stream = || Stdio::from(inner.try_clone().unwrap());
        let before = tcgetattr(&inner).unwrap();
        // `setsid` makes the new terminal the controlling one, which gets signals of its size. It
        // becomes the program: there is no process in between.
        let child = Command::new("setsid")
            .args(["--ctty", env!("CARGO_BIN_EXE_ebb"), "top", option])
            .arg(socket)
            .stdin(stream())
            .stdout(stream())
            .stderr(stream())
            .spawn()
            .unwrap();
        Self { outer: File::from(outer), inner, before, child, written: String::new() }
    }

    /// Waits for a word. (Spaces are skipped by movements of the cursor.)
    fn wait_for(&mut self, word: &str) {
        let begin = Instant::now();
        loop {
            if let Some(start) = self.written.find(word) {
                self.written.drain(..start + word.len());
                return;
            }
            assert!(begin.elapsed() < PATIENCE, "no {word:?}: {:?}", self.written);
            self.read();
        }
    }

    fn read(&mut self) {
        let limit = Timespec { tv_sec: 1, tv_nsec: 0 };
        let ready = poll(&mut [PollFd::new(&self.outer, PollFlags::IN)], Some(&limit)).unwrap();
        if ready == 0 {
            return;
        }
        let mut buffer = [0; 4096];
        let length = self.outer.read(&mut buffer).unwrap();
        self.written.push_str(&String::from_utf8_lossy(&buffer[..length]));
    }

    fn press(&mut self, keys: &str) {
        self.outer.write_all(keys.as_bytes()).unwrap();
    }

    fn resize(&mut self, columns: u16, rows: u16) {
        tcsetwinsize(&self.outer, size(columns, rows)).unwrap();
        // The whole screen is drawn again.
        self.wait_for("\u{1b}[2J");
    }

    /// Waits for the end, and returns it after the terminal is seen to be as before.
    fn end(mut self) -> ExitStatus {
        self.wait_for("\u{1b}[?1049l");
        self.wait_for("\u{1b}[?25h");
        let end = self.child.wait().unwrap();
        let after = tcgetattr(&self.inner).unwrap();
        let modes = |termios: &Termios| {
            let Termios { input_modes, output_modes, control_modes, local_modes, .. } = termios;
            (*input_modes, *output_modes, *control_modes, *local_modes)
        };
        assert_eq!(modes(&after), modes(&self.before));
        end
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        // After a failure it still runs.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn keys_and_sizes_change_the_picture_and_q_ends_it() {
    let daemon = Daemon::start();
    let mut session = Session::start("--socket", &daemon.socket());
    session.wait_for("\u{1b}[?1049h");
    session.wait_for("\u{1b}[?25l");
    session.wait_for("tight");
    session.wait_for("web-1");
    session.wait_for("web-2");
    session.press("?");
    session.wait_for("Ctrl-C");
    session.press("x");
    session.wait_for("web-1");
    session.press("/2");
    session.wait_for("name:");
    session.press("\r");
    session.press("h");
    session.wait_for("held");
    assert_eq!(daemon.orders(), [r#"/hold {"machine":"web-2"}"#]);
    session.resize(20, 5);
    session.wait_for("web-2");
    session.resize(1, 1);
    session.resize(120, 40);
    session.wait_for("web-2");
    session.press("q");
    assert_eq!(session.end().code(), Some(0));
}

#[test]
fn a_daemon_in_trouble_is_shown_and_keys_work_meanwhile() {
    let daemon = Daemon::start();
    daemon.is(Mood::Hangs);
    let mut session = Session::start("--socket", &daemon.socket());
    session.press("?");
    session.wait_for("Ctrl-C");
    session.press("x");
    session.wait_for("answer within");
    daemon.is(Mood::Nonsense);
    // The text comes from the daemon, and its escape sequence must not.
    session.wait_for("\\x1b[2Jnonsense");
    daemon.is(Mood::Answers);
    session.wait_for("web-1");
    std::fs::remove_file(daemon.socket()).unwrap();
    session.wait_for("ebbd --help");
    session.press("\u{3}");
    assert_eq!(session.end().code(), Some(0));
}

#[test]
fn a_machine_without_a_daemon_is_parked_after_a_question() {
    let monitor = Daemon::start();
    let mut session = Session::start("--machine", &monitor.socket());
    session.wait_for("running");
    session.press("p");
    session.wait_for("y/n");
    assert_eq!(monitor.orders(), [""; 0]);
    session.press("y");
    session.wait_for("77.0");
    let orders = monitor.orders();
    assert!(orders.len() == 1 && orders[0].starts_with("/vm/park {"), "{orders:?}");
    session.press("q");
    assert_eq!(session.end().code(), Some(0));
}

#[test]
fn signals_end_it_and_the_terminal_is_restored() {
    let daemon = Daemon::start();
    for signal in [Signal::TERM, Signal::HUP, Signal::INT] {
        let mut session = Session::start("--socket", &daemon.socket());
        session.wait_for("web-2");
        kill_process(Pid::from_child(&session.child), signal).unwrap();
        assert_eq!(session.end().code(), Some(1), "{signal:?}");
    }
}

fn without_terminal(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_ebb")).arg("top").args(arguments).output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

#[test]
fn without_a_terminal_there_are_text_and_json() {
    let daemon = Daemon::start();
    let socket = daemon.socket();
    let socket = socket.to_str().unwrap();
    let refused = without_terminal(&["--socket", socket]);
    assert_eq!(refused.status.code(), Some(1));
    assert!(text(&refused.stderr).contains("ebb host status --json"), "{refused:?}");

    let once = without_terminal(&["--socket", socket, "--once"]);
    assert!(once.status.success(), "{once:?}");
    let lines = text(&once.stdout);
    assert!(lines.starts_with("host tight") && lines.contains("\nweb-2 "), "{lines}");
    assert!(!lines.contains('\u{1b}') && lines.lines().all(|line| line.len() <= 100), "{lines}");

    let json = without_terminal(&["--socket", socket, "--json"]);
    assert_eq!(serde_json::from_slice::<Status>(&json.stdout).unwrap(), status());

    let machines = ["--machine", socket, "--machine", "/no/such.sock"];
    let json = without_terminal(&[&machines[..], &["--json"]].concat());
    let documents: Value = serde_json::from_slice(&json.stdout).unwrap();
    let [missing, there] = [&documents[0], &documents[1]];
    assert_eq!((&missing["socket"], &there["socket"]), (&json!("/no/such.sock"), &json!(socket)));
    assert!(missing["error"].as_str().unwrap().contains("there is no socket"), "{documents}");
    assert_eq!(there["documents"]["vm"]["pid"], 9);
    assert_eq!(there["documents"]["statistics"]["age_ms"], 5000);
    let once = without_terminal(&[&machines[..], &["--once"]].concat());
    let lines = text(&once.stdout);
    assert!(lines.contains("\nebbd ") && lines.contains("512.0 MiB  768.0 MiB"), "{lines}");
    assert!(lines.contains("\nsuch ") && lines.contains("there is no socket"), "{lines}");

    let gone = without_terminal(&["--socket", "/no/such.sock", "--once"]);
    assert_eq!(gone.status.code(), Some(1));
    assert!(text(&gone.stderr).contains("no ebbd serves /no/such.sock"), "{gone:?}");
}
