//! Checkpoints in memory, and machines that are forked from them.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command as Program, Output};

use ebb_agent::protocol::Command;
use ebb_vmm::api::{CheckpointReport, VmState};
use rustix::process::{Pid, Signal, kill_process, test_kill_process};
use serde_json::Value;

use crate::guest::{Guest, MIB};
use crate::harness::{Scene, Test, eventually, when};
use crate::setup::Setup;

/// The tests.
pub const TESTS: &[Test] = &[Test::new("fork::everything_goes_on", 120, everything_goes_on)];

/// A forked machine: its guest over `ebb console`, and its monitor, which is killed when this is
/// dropped.
struct Fork {
    guest: Guest,
    monitor: Pid,
}

impl Drop for Fork {
    fn drop(&mut self) {
        let _ = kill_process(self.monitor, Signal::KILL);
    }
}

impl Fork {
    /// Waits until the monitor has ended.
    #[track_caller]
    fn wait_end(&self) {
        eventually("the monitor ends", 30, || {
            when(test_kill_process(self.monitor).is_err(), || format!("{:?}", self.monitor))
        });
    }
}

/// `ebb` with these arguments.
fn ebb(scene: &Scene, arguments: &[&str]) -> Output {
    Program::new(&scene.world.ebb).args(arguments).output().unwrap()
}

/// The JSON document that `ebb` prints.
#[track_caller]
fn document(scene: &Scene, arguments: &[&str]) -> Value {
    let output = ebb(scene, arguments);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

/// What `ebb` prints about a failure.
#[track_caller]
fn failure(scene: &Scene, arguments: &[&str]) -> String {
    let output = ebb(scene, arguments);
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(1), "{text}");
    text
}

/// Makes a checkpoint of a guest.
#[track_caller]
fn checkpoint(scene: &Scene, guest: &Guest, name: &str) -> CheckpointReport {
    let socket = guest.socket().to_str().unwrap();
    let report = document(scene, &["ctl", socket, "checkpoint", name, "--json"]);
    serde_json::from_value(report).unwrap()
}

/// Makes machines, whose API sockets are called `name` and their number.
#[track_caller]
fn fork(scene: &Scene, source: &str, name: &str, count: usize, more: &[&str]) -> Vec<Fork> {
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
fn unique(scene: &Scene, name: &str) -> String {
    let folder = scene.path("");
    let folder = Path::new(folder.to_str().unwrap().trim_end_matches('/'));
    format!("{}-{name}", folder.file_name().unwrap().to_str().unwrap().replace("::", "-"))
}

fn everything_goes_on(scene: &Scene) {
    let parent = Setup::new(scene).args(["--cpus", "2", "--forkable"]).start();
    parent.run(Command::Hold { bytes: 64 * MIB, pattern: 5 });
    parent.write_file("/tmp/note", "written before");
    let events = parent.acpi_events();
    let name = unique(scene, "first");
    let report = checkpoint(scene, &parent, &name);
    scene.guests().report(&format!("checkpoint: {report:?}"));
    assert_eq!(parent.wrong_pages(), 0);
    let forks = fork(scene, &name, "a", 3, &[]);
    for (index, fork) in forks.iter().enumerate() {
        let guest = &fork.guest;
        assert_eq!(guest.wrong_pages(), 0);
        assert_eq!(guest.read_file("/tmp/note"), "written before");
        assert_eq!(guest.acpi_events(), events + 1, "a new generation is announced once");
        assert_eq!(guest.read_file("/sys/devices/system/cpu/online"), "0-1\n");
        guest.write_file("/tmp/note", &index.to_string());
        guest.run(Command::Hold { bytes: 16 * MIB, pattern: index as u64 });
        assert_eq!(guest.vm().state, VmState::Running);
    }
    parent.write_file("/tmp/note", "parent");
    for (index, fork) in forks.iter().enumerate() {
        assert_eq!(fork.guest.read_file("/tmp/note"), index.to_string());
        assert_eq!(fork.guest.wrong_pages(), 0);
    }
    assert_eq!(parent.read_file("/tmp/note"), "parent");
    parent.end();
    // A machine that was forked is forked again, and its ancestors are gone.
    let listed = document(scene, &["checkpoints", "--json"]);
    let of = |listed: &Value, name: &str| {
        listed.as_array().unwrap().iter().find(|one| one["name"] == name).cloned()
    };
    assert_eq!(of(&listed, &name).unwrap()["forks"], 3, "{listed}");
    let second = unique(scene, "second");
    checkpoint(scene, &forks[1].guest, &second);
    let listed = document(scene, &["checkpoints", "--json"]);
    assert_eq!(of(&listed, &second).unwrap()["parent"], name.as_str(), "{listed}");
    document_free(scene, &["checkpoints", "remove", &name]);
    let children = fork(scene, &second, "b", 1, &["--paused"]);
    assert_eq!(children[0].guest.vm().state, VmState::Paused);
    children[0].guest.put("/vm/resume");
    assert_eq!(children[0].guest.read_file("/tmp/note"), "1");
    assert_eq!(children[0].guest.wrong_pages(), 0);
    // Directly from a running machine.
    let socket = forks[2].guest.socket().to_str().unwrap().to_owned();
    let direct = fork(scene, &socket, "c", 2, &[]);
    for fork in &direct {
        assert_eq!(fork.guest.read_file("/tmp/note"), "2");
    }
    for fork in forks.into_iter().chain(direct).chain(children) {
        fork.guest.send(Command::PowerOff);
        fork.wait_end();
        let socket = fork.guest.socket().clone();
        eventually("the socket is removed", 10, || when(!socket.exists(), || "there".to_owned()));
    }
    let listed = document(scene, &["checkpoints", "--json"]);
    assert!(of(&listed, &name).is_none() && of(&listed, &second).is_some(), "{listed}");
    document_free(scene, &["checkpoints", "remove", &second]);
    let text = failure(scene, &["fork", &second]);
    assert!(text.contains("there is no checkpoint"), "{text}");
    assert!(fs::read_dir(scene.path("")).unwrap().count() <= 2);
}

/// Runs `ebb`, which prints nothing.
#[track_caller]
fn document_free(scene: &Scene, arguments: &[&str]) {
    let output = ebb(scene, arguments);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}
