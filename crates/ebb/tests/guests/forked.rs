//! Machines that are forked from a guest or from its checkpoint.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command as Program, Output};

use ebb_agent::protocol::Command;
use ebb_vmm::api::CheckpointReport;
use rustix::process::{Pid, Signal, kill_process, test_kill_process};
use serde_json::Value;

use crate::guest::Guest;
use crate::harness::{Scene, eventually, when};
use crate::place::GUEST_AGENT;

/// A forked machine: its guest over `ebb console`, and its monitor, which is killed when this is
/// dropped.
pub struct Fork {
    pub guest: Guest,
    pub monitor: Pid,
}

impl Drop for Fork {
    fn drop(&mut self) {
        let _ = kill_process(self.monitor, Signal::KILL);
    }
}

impl Fork {
    /// The monitor's process.
    pub fn pid(&self) -> u32 {
        self.monitor.as_raw_nonzero().get().cast_unsigned()
    }

    /// Waits until the monitor has ended.
    #[track_caller]
    pub fn wait_end(&self) {
        eventually("the monitor ends", 30, || {
            when(test_kill_process(self.monitor).is_err(), || format!("{:?}", self.monitor))
        });
    }
}

/// `ebb` with these arguments.
pub fn ebb(scene: &Scene, arguments: &[&str]) -> Output {
    Program::new(&scene.world.ebb).args(arguments).output().unwrap()
}

/// The JSON document that `ebb` prints.
#[track_caller]
pub fn document(scene: &Scene, arguments: &[&str]) -> Value {
    let output = ebb(scene, arguments);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

/// What `ebb` prints about a failure.
#[track_caller]
pub fn failure(scene: &Scene, arguments: &[&str]) -> String {
    let output = ebb(scene, arguments);
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(1), "{text}");
    text
}

/// Makes a checkpoint of a guest.
#[track_caller]
pub fn checkpoint(scene: &Scene, guest: &Guest, name: &str) -> CheckpointReport {
    let socket = guest.socket().to_str().unwrap();
    let report = document(scene, &["ctl", socket, "checkpoint", name, "--json"]);
    serde_json::from_value(report).unwrap()
}

/// Makes machines, whose API sockets are called `name` and their number.
#[track_caller]
pub fn fork(scene: &Scene, source: &str, name: &str, count: usize, more: &[&str]) -> Vec<Fork> {
    let pattern = scene.path(&format!("{name}{{}}"));
    let (pattern, count) = (pattern.to_str().unwrap(), count.to_string());
    let arguments = ["fork", source, "-n", &count, "--api", pattern, "--json"];
    let report = document(scene, &[&arguments, more].concat());
    let attach = |made: &Value| {
        let monitor = i32::try_from(made["pid"].as_i64().unwrap()).unwrap();
        let socket = PathBuf::from(made["api"].as_str().unwrap());
        let mut program = Program::new(&scene.world.ebb);
        program.arg("console").arg(&socket);
        let guest = Guest::spawn(program, socket, &scene.guests());
        Fork { guest, monitor: Pid::from_raw(monitor).unwrap() }
    };
    report["machines"].as_array().unwrap().iter().map(attach).collect()
}

/// A name for a checkpoint that no other test uses.
pub fn unique(scene: &Scene, name: &str) -> String {
    let folder = scene.path("");
    let folder = Path::new(folder.to_str().unwrap().trim_end_matches('/'));
    format!("{}-{name}", folder.file_name().unwrap().to_str().unwrap().replace("::", "-"))
}

/// Runs `ebb`, which must succeed.
#[track_caller]
pub fn silently(scene: &Scene, arguments: &[&str]) {
    let output = ebb(scene, arguments);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

/// Starts the agent in a guest, and waits until it answers.
#[track_caller]
pub fn start_agent(scene: &Scene, guest: &Guest) {
    let job = guest.send(Command::Exec { argv: vec![GUEST_AGENT.to_owned()] });
    guest.wait_started(job);
    let socket = guest.socket().to_str().unwrap();
    silently(scene, &["exec", "--wait", "60", "-n", socket, "--", "/bin/busybox", "true"]);
}

/// The process of a checkpoint, as `ebb checkpoints` prints it.
pub fn pid_of(listed: &Value) -> i64 {
    listed["pid"].as_i64().unwrap()
}

/// Processes that hold a checkpoint.
pub fn holders() -> BTreeSet<i64> {
    let processes = fs::read_dir("/proc").unwrap().map(|entry| entry.unwrap());
    processes
        .filter_map(|process| {
            let pid = process.file_name().to_str()?.parse().ok()?;
            let name = fs::read_to_string(process.path().join("comm")).ok()?;
            (name == "ebb-checkpoint\n").then_some(pid)
        })
        .collect()
}
