//! The daemon with a real QEMU, which undoes nothing by itself: however the daemon ends, the guest
//! gets its memory back and runs.

#![allow(clippy::unwrap_used)]

mod machine;

use std::fs;
use std::process::{Child, Command};
use std::thread::sleep;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};

use machine::{LIMIT, MIB, Machine};

/// All that the guest has, and what its profile allows.
const SIZE: u64 = 256 * MIB;
const CEILING: u64 = 192 * MIB;

/// A daemon for the machine; killed when dropped.
struct Daemon(Child);

impl Daemon {
    fn start(machine: &Machine, ceiling: Option<u64>) -> Self {
        let path = |name: &str| machine.directory.path().join(name);
        let ceiling = ceiling.map_or_else(String::new, |ceiling| {
            let profile = format!("ceiling_bytes = {ceiling}\nreserve_bytes = {}", 16 * MIB);
            format!("[policy.default]\n{profile}\n")
        });
        let text = format!(
            "machines = [\"{}\"]\n[policy]\ntight_percent = 3\npressed_percent = 2\n\
             emergency_percent = 1\n{ceiling}",
            path("machines").display()
        );
        fs::write(path("ebbd.toml"), text).unwrap();
        let mut program = Command::new(env!("CARGO_BIN_EXE_ebbd"));
        program.arg("--config").arg(path("ebbd.toml")).arg("--state").arg(path("state"));
        Self(program.arg("--socket").arg(path("ebbd.sock")).spawn().unwrap())
    }

    fn signal(&self, signal: Signal) {
        send(self.0.id(), signal);
    }

    /// Its second process, if it has one.
    fn watchdog(&self) -> Option<u32> {
        children(self.0.id()).first().copied()
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn send(pid: u32, signal: Signal) {
    kill_process(Pid::from_raw(pid.cast_signed()).unwrap(), signal).unwrap();
}

fn children(pid: u32) -> Vec<u32> {
    let text = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap_or_default();
    text.split_ascii_whitespace().map(|word| word.parse().unwrap()).collect()
}

/// Whether a process runs.
fn runs(pid: u32) -> bool {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    !status.is_empty() && !status.contains("State:\tZ")
}

#[track_caller]
fn eventually(what: &str, mut is_so: impl FnMut() -> bool) {
    let started = Instant::now();
    while !is_so() {
        assert!(started.elapsed() < LIMIT, "not in time: {what}");
        sleep(Duration::from_millis(100));
    }
}

/// What the balloon leaves to the guest.
fn rest(machine: &Machine) -> u64 {
    let answer = machine.tell(&json!({ "execute": "query-balloon" }));
    answer["return"]["actual"].as_u64().unwrap_or(SIZE)
}

fn is_running(machine: &Machine) -> bool {
    machine.tell(&json!({ "execute": "query-status" }))["return"]["running"] == true
}

fn journal(machine: &Machine) -> Value {
    let text = fs::read_to_string(machine.directory.path().join("state/taken.json")).unwrap();
    serde_json::from_str(&text).unwrap()
}

#[test]
fn a_guest_of_qemu_gets_everything_back() {
    let machine = Machine::start();
    let socket = machine.socket();
    eventually("QEMU serves its sockets", || socket.exists() && machine.other().exists());
    machine.tell(&json!({ "execute": "cont" }));
    let squeezed = |daemon: &Daemon| {
        eventually("the balloon is there", || rest(&machine) <= CEILING);
        let entry = json!([{ "socket": socket, "undo": "balloon" }]);
        assert_eq!(journal(&machine), entry);
        daemon.watchdog().expect("a watchdog")
    };
    let released = |watchdog: u32| {
        eventually("the balloon is released", || rest(&machine) == SIZE);
        eventually("the watchdog has ended", || !runs(watchdog));
    };

    // It is killed.
    let mut daemon = Daemon::start(&machine, Some(CEILING));
    let watchdog = squeezed(&daemon);
    daemon.signal(Signal::KILL);
    daemon.0.wait().unwrap();
    released(watchdog);

    // It stands still: the watchdog kills it.
    daemon = Daemon::start(&machine, Some(CEILING));
    let watchdog = squeezed(&daemon);
    daemon.signal(Signal::STOP);
    released(watchdog);
    assert!(daemon.0.wait().unwrap().code().is_none());

    // It ends by itself. A watchdog that has died was replaced before.
    daemon = Daemon::start(&machine, Some(CEILING));
    let first = squeezed(&daemon);
    send(first, Signal::KILL);
    eventually("another watchdog", || daemon.watchdog().is_some_and(|second| second != first));
    let watchdog = squeezed(&daemon);
    daemon.signal(Signal::TERM);
    assert_eq!(daemon.0.wait().unwrap().code(), Some(0));
    released(watchdog);

    // Both are killed: the next daemon undoes it, also a pause, which it would leave alone if
    // another client had paused the machine.
    daemon = Daemon::start(&machine, Some(CEILING));
    let watchdog = squeezed(&daemon);
    send(watchdog, Signal::STOP);
    daemon.signal(Signal::KILL);
    daemon.0.wait().unwrap();
    send(watchdog, Signal::KILL);
    assert!(rest(&machine) <= CEILING);
    machine.tell(&json!({ "execute": "stop" }));
    let entries = ["balloon", "pause"].map(|undo| json!({ "socket": socket, "undo": undo }));
    let path = machine.directory.path().join("state/taken.json");
    fs::write(path, Value::from(entries.to_vec()).to_string()).unwrap();
    daemon = Daemon::start(&machine, None);
    eventually("the guest runs", || is_running(&machine));
    eventually("the balloon is released", || rest(&machine) == SIZE);
    eventually("it is forgotten", || journal(&machine) == json!([]));

    // Another client's pause stays.
    machine.tell(&json!({ "execute": "stop" }));
    sleep(Duration::from_secs(3));
    assert!(!is_running(&machine));
    drop(daemon);
}
