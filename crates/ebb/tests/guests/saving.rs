//! Snapshots that are cut short, at any moment: no file is left, and a guest that goes on is whole.

use std::fs;
use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command as Program, Stdio};

use ebb_agent::protocol::Command;
use ebb_vmm::api::{ClientError, VmState};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use crate::guest::{Guest, MIB};
use crate::harness::{Scene, Test, counts, eventually, when};
use crate::saved::Restore;
use crate::setup::Setup;

/// The tests.
pub const TESTS: &[Test] = &[
    Test::new("saving::a_client_hangs_up", 300, a_client_hangs_up),
    Test::new("saving::sigterm_and_kill", 300, sigterm_and_kill),
    Test::new("saving::during_reboots", 300, during_reboots),
    Test::new("saving::while_others_ask", 300, while_others_ask),
];

/// Attempts to meet a snapshot while memory is copied.
const ATTEMPTS: u32 = 20;

/// A guest whose memory takes some tenths of a second to copy.
fn large_guest(scene: &Scene) -> Guest {
    let (memory, held) = counts(("size=640M", 360 * MIB), ("size=1G", 600 * MIB));
    let guest = Setup::new(scene).memory(memory).args(["--cpus", "2"]).start();
    guest.run(Command::Hold { bytes: held, pattern: 51 });
    guest
}

/// An empty directory for snapshots.
fn directory(scene: &Scene) -> PathBuf {
    let directory = scene.path("snapshots");
    fs::create_dir(&directory).unwrap();
    directory
}

fn names(directory: &Path) -> Vec<String> {
    let entries = fs::read_dir(directory).unwrap();
    entries.map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned()).collect()
}

/// `ebb ctl SOCKET snapshot FILE` as a process; killed when dropped.
struct Ctl(Child);

impl Ctl {
    fn start(scene: &Scene, guest: &Guest, file: &Path) -> Self {
        let mut program = Program::new(&scene.world.ebb);
        program.arg("ctl").arg(guest.socket()).arg("snapshot").arg(file);
        Self(program.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap())
    }

    /// Waits until memory is copied; false if the snapshot was complete before that was seen.
    fn wait_copying(&mut self, guest: &Guest) -> bool {
        while self.0.try_wait().unwrap().is_none() {
            if is_copying(guest) {
                return true;
            }
        }
        false
    }

    fn signal(&self, signal: Signal) {
        let pid = Pid::from_raw(self.0.id().cast_signed()).unwrap();
        kill_process(pid, signal).unwrap();
    }

    /// Waits for its end; returns whether it has succeeded, and its messages.
    fn end(mut self) -> (bool, String) {
        let mut said = String::new();
        self.0.stderr.take().unwrap().read_to_string(&mut said).unwrap();
        (self.0.wait().unwrap().success(), said)
    }
}

impl Drop for Ctl {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Whether memory is copied, in a pause or not.
fn is_copying(guest: &Guest) -> bool {
    let inhibited = guest.balloon().discard_inhibited;
    guest.vm().state == VmState::Saving
        || inhibited.is_some_and(|reason| reason.contains("snapshot"))
}

/// A snapshot whose memory is being copied.
fn copying(scene: &Scene, guest: &Guest, file: &Path) -> Ctl {
    for _ in 0..ATTEMPTS {
        let mut ctl = Ctl::start(scene, guest, file);
        if ctl.wait_copying(guest) {
            return ctl;
        }
        // Perhaps it was too fast to be seen.
        let (done, said) = ctl.end();
        assert!(done, "{said}");
        fs::remove_file(file).unwrap();
    }
    panic!("memory is copied too fast for this test");
}

/// Makes a request that is refused while memory is copied.
#[track_caller]
fn refused_while_saving(guest: &Guest, target: &str) {
    match guest.client().put::<Value>(target) {
        Err(ClientError::Refused { status: 409, detail }) => {
            assert!(detail.message.contains("snapshot") && detail.remedy.is_some(), "{detail:?}");
        }
        Ok(_) => assert!(!is_copying(guest), "{target}"),
        other => panic!("{target}: {other:?}"),
    }
}

fn a_client_hangs_up(scene: &Scene) {
    let guest = large_guest(scene);
    let snapshots = directory(scene);
    let file = snapshots.join("vm.snapshot");
    for (signal, was) in [
        (Signal::INT, VmState::Running),
        (Signal::KILL, VmState::Running),
        (Signal::KILL, VmState::Paused),
    ] {
        if was == VmState::Paused {
            guest.put("/vm/pause");
        }
        let ctl = copying(scene, &guest, &file);
        // Without effect when the copy is done already.
        refused_while_saving(&guest, "/vm/trim");
        if was == VmState::Paused {
            refused_while_saving(&guest, "/vm/pause");
        }
        ctl.signal(signal);
        let (done, said) = ctl.end();
        assert!(!done, "{said}");
        eventually("the machine is as before", 30, || {
            let state = guest.vm().state;
            when(state == was, || format!("{state:?}"))
        });
        assert_eq!(names(&snapshots), [""; 0]);
        if was == VmState::Paused {
            guest.put("/vm/resume");
        }
        assert_eq!(guest.wrong_pages(), 0);
    }
    eventually("the next snapshot is possible", 30, || guest.try_save(&file));
    assert_eq!(names(&snapshots), ["vm.snapshot"]);
    guest.end();
    let guest = Restore::new(scene, &file).start();
    assert_eq!(guest.wrong_pages(), 0);
}

fn sigterm_and_kill(scene: &Scene) {
    let snapshots = directory(scene);
    let file = snapshots.join("vm.snapshot");
    for (how, code) in [("SIGTERM", 6), ("kill", 7)] {
        let mut guest = large_guest(scene);
        // Its vCPUs wait to write in the end.
        let (bytes, seconds) = (200 * MIB, Some(60));
        let churn = Command::Churn { bytes, tasks: 2, seed: 54, operations: None, seconds };
        guest.wait_started(guest.send(churn));
        let ctl = copying(scene, &guest, &file);
        match how {
            "SIGTERM" => guest.signal(Signal::TERM),
            _ => guest.put("/vm/kill"),
        }
        let (found, log) = guest.wait_end();
        assert_eq!(found, Some(code), "{log}");
        assert_eq!(log.lines().count(), 1, "{log}");
        let (done, said) = ctl.end();
        assert!(!done, "{said}");
        assert_eq!(names(&snapshots), [""; 0], "{how}");
        assert!(!guest.socket().exists(), "the socket is left behind");
    }
}

/// What is possible while the memory of a running guest is copied, and what is not.
/// Pauses a machine that is being copied. That is refused for as long as its state is read.
fn pause(guest: &Guest) {
    eventually("the machine is paused", 30, || {
        match guest.client().request("PUT", "/vm/pause", "") {
            Ok(_) => Ok(()),
            Err(ClientError::Refused { status: 409, detail }) => {
                assert!(detail.message.contains("is being written"), "{detail:?}");
                Err(detail.message)
            }
            Err(error) => panic!("{error}"),
        }
    });
}

fn while_others_ask(scene: &Scene) {
    let guest = large_guest(scene);
    let snapshots = directory(scene);
    let file = snapshots.join("vm.snapshot");
    let ctl = copying(scene, &guest, &file);
    for (target, body) in [("/vm/trim", ""), ("/vm/park", "{}"), ("/balloon/reclaim", "{}")] {
        match guest.client().request("PUT", target, body) {
            Err(ClientError::Refused { status: 409, detail }) => {
                assert!(detail.message.contains("snapshot"), "{target}: {detail:?}");
            }
            other => panic!("{target}: {other:?}"),
        }
        assert!(is_copying(&guest), "the copy was too fast for this test");
    }
    let error = guest.try_save(&snapshots.join("second")).unwrap_err();
    assert!(error.contains("is being written"), "{error}");
    // The pause waits for threads that wait to write.
    pause(&guest);
    assert_eq!(guest.vm().state, VmState::Paused);
    guest.put("/vm/resume");
    let (done, said) = ctl.end();
    assert!(done, "{said}");
    fs::remove_file(&file).unwrap();

    // The copy of a machine that was paused meanwhile is completed.
    let ctl = copying(scene, &guest, &file);
    pause(&guest);
    let (done, said) = ctl.end();
    assert!(done, "{said}");
    assert_eq!(guest.vm().state, VmState::Paused);
    assert_eq!(guest.balloon().discard_inhibited, None);
    guest.put("/vm/resume");
    assert_eq!(guest.wrong_pages(), 0);
    guest.end();
    let guest = Restore::new(scene, &file).start();
    assert_eq!(guest.wrong_pages(), 0);
}

fn during_reboots(scene: &Scene) {
    let guest = Setup::new(scene).memory("size=256M").args(["--cpus", "2"]).start();
    let file = scene.path("vm.snapshot");
    for count in 2..5 {
        guest.send(Command::Reboot);
        // Before, during and after the reboot; a snapshot is refused at its very moment.
        for _ in 0..20 {
            if let Err(error) = guest.try_save(&file) {
                assert!(error.contains("about to reboot"), "{error}");
            }
        }
        guest.wait_ready(count);
    }
    guest.run(Command::Hold { bytes: 32 * MIB, pattern: 53 });
    guest.save_and_end(&file);
    let guest = Restore::new(scene, &file).start();
    assert_eq!(guest.wrong_pages(), 0);
}
