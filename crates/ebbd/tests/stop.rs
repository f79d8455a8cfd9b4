//! Machines that are stopped: whatever fails, and whenever the daemon is killed, a machine has either
//! ended with its snapshot, or goes on.

#![allow(clippy::unwrap_used)]

mod fake;

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::sync::{Arc, Mutex};
use std::thread::sleep;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};

const LIMIT: Duration = Duration::from_secs(60);

/// A daemon on a host that counts as pressed, and a parked machine.
struct Scene {
    directory: tempfile::TempDir,
    daemon: Child,
    /// What the monitor was asked to do, in this order.
    asked: Arc<Mutex<Vec<String>>>,
}

impl Scene {
    /// `snapshot` is what the monitor answers to the request for one.
    fn start(snapshot: Option<(u16, Value)>) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let path = |name: &str| directory.path().join(name);
        for name in ["machines", "others", "snapshots"] {
            fs::create_dir(path(name)).unwrap();
        }
        let asked = Arc::new(Mutex::new(Vec::<String>::new()));
        let record = asked.clone();
        fake::monitor(&path("machines/m.sock"), move |request: &str| {
            let mut asked = record.lock().unwrap();
            match request {
                "GET /vm" => {
                    let count = |name: &str| asked.iter().filter(|it| *it == name).count();
                    let is_paused = count("PUT /vm/pause") > count("PUT /vm/resume");
                    let state = if is_paused { "paused" } else { "running" };
                    Some((200, json!({ "state": state, "memory_bytes": 4096 })))
                }
                "GET /balloon" => Some((404, json!({}))),
                request if request.starts_with("PUT") => {
                    asked.push(request.to_owned());
                    if request == "PUT /vm/snapshot" { snapshot.clone() } else { Some(ok()) }
                }
                _ => Some(ok()),
            }
        });
        fs::write(path("ebbd.toml"), configuration(directory.path(), "machines")).unwrap();
        let mut program = Command::new(env!("CARGO_BIN_EXE_ebbd"));
        program.args(["--log", "error", "--config"]).arg(path("ebbd.toml"));
        program.arg("--state").arg(path("state")).arg("--socket").arg(path("ebbd.sock"));
        let daemon = program.spawn().unwrap();
        Self { directory, daemon, asked }
    }

    /// Waits until this was asked for, and returns all that was but trims.
    #[track_caller]
    fn until(&self, request: &str) -> Vec<String> {
        let started = Instant::now();
        loop {
            let asked = self.asked.lock().unwrap().clone();
            if asked.iter().any(|other| other == request) {
                return asked.into_iter().filter(|it| it != "PUT /vm/trim").collect();
            }
            assert!(started.elapsed() < LIMIT, "{request} is missing: {asked:?}");
            sleep(Duration::from_millis(20));
        }
    }

    fn snapshots(&self) -> Vec<PathBuf> {
        let entries = fs::read_dir(self.directory.path().join("snapshots")).unwrap();
        entries.map(|entry| entry.unwrap().path()).collect()
    }
}

impl Drop for Scene {
    fn drop(&mut self) {
        let _ = self.daemon.kill();
        let _ = self.daemon.wait();
    }
}

/// A configuration with the machines of this directory.
fn configuration(directory: &Path, machines: &str) -> String {
    format!(
        "machines = [\"{}\"]\nsnapshots = \"{}\"\ninterval_ms = 200\n[policy]\n\
         tight_percent = 99\npressed_percent = 98\nemergency_percent = 1\n\
         [policy.default]\nclass = \"parked\"\n",
        directory.join(machines).display(),
        directory.join("snapshots").display()
    )
}

fn ok() -> (u16, Value) {
    (200, json!({}))
}

#[test]
fn a_machine_ends_after_its_snapshot_has_its_name() {
    let scene = Scene::start(Some(ok()));
    let asked = scene.until("PUT /vm/kill");
    assert_eq!(asked, ["PUT /vm/pause", "PUT /vm/snapshot", "PUT /vm/kill"]);
    let snapshots = scene.snapshots();
    assert_eq!(snapshots, [scene.directory.path().join("snapshots/m.snapshot")]);
    let mode = fs::metadata(&snapshots[0]).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
}

#[test]
fn a_machine_whose_disk_is_full_goes_on() {
    let scene = Scene::start(Some((500, json!({ "error": { "message": "no space left" } }))));
    let asked = scene.until("PUT /vm/resume");
    assert_eq!(asked, ["PUT /vm/pause", "PUT /vm/snapshot", "PUT /vm/resume"]);
    assert!(scene.snapshots().is_empty());
}

#[test]
fn a_machine_whose_daemon_is_killed_goes_on() {
    let mut scene = Scene::start(None);
    scene.until("PUT /vm/snapshot");
    scene.daemon.kill().unwrap();
    scene.daemon.wait().unwrap();
    let asked = scene.until("PUT /vm/resume");
    assert_eq!(asked, ["PUT /vm/pause", "PUT /vm/snapshot", "PUT /vm/resume"]);
    assert!(scene.snapshots().is_empty());
}

#[test]
fn a_machine_that_leaves_the_configuration_goes_on() {
    let mut scene = Scene::start(None);
    scene.until("PUT /vm/snapshot");
    let text = configuration(scene.directory.path(), "others");
    fs::write(scene.directory.path().join("ebbd.toml"), text).unwrap();
    let pid = Pid::from_raw(scene.daemon.id().cast_signed()).unwrap();
    kill_process(pid, Signal::HUP).unwrap();
    let asked = scene.until("PUT /vm/resume");
    assert_eq!(asked, ["PUT /vm/pause", "PUT /vm/snapshot", "PUT /vm/resume"]);
    assert!(scene.daemon.try_wait().unwrap().is_none() && scene.snapshots().is_empty());
}
