//! Checkpoints in memory, and machines that are forked from them.

use std::collections::BTreeSet;
use std::fs;
use std::time::Duration;

use ebb_agent::protocol::Command;
use ebb_vmm::api::{Client, CopiedWhile, VmState};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use crate::forked::{checkpoint, document, ebb, failure, fork, holders, pid_of, silently, unique};
use crate::guest::{Guest, MIB};
use crate::harness::{Scene, Test, counts, eventually, when};
use crate::saved::Restore;
use crate::setup::Setup;

/// The tests.
pub const TESTS: &[Test] = &[
    Test::new("fork::everything_goes_on", 240, everything_goes_on),
    Test::new("fork::memory_is_copied_on_write", 400, memory_is_copied_on_write),
    Test::new("fork::kills", 400, kills),
];

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
    // What they do not have alone is named: parent, checkpoint, two others.
    let socket = forks[0].guest.socket().to_str().unwrap();
    let report = document(scene, &["doctor", "--json", "--vm", socket]);
    let mut checks = report["checks"].as_array().unwrap().iter();
    let relatives = checks.find(|check| check["name"] == "relatives").unwrap();
    let found = relatives["found"].as_str().unwrap();
    assert!(found.starts_with("4: ") && found.contains("ebb-checkpoint"), "{relatives}");
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
    silently(scene, &["checkpoints", "remove", &name]);
    let log = scene.path("log{}");
    let more = ["--paused", "--log-file", log.to_str().unwrap()];
    let children = fork(scene, &second, "b", 1, &more);
    assert_eq!(fs::read_to_string(scene.path("log0")).unwrap(), "");
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
    silently(scene, &["checkpoints", "remove", &second]);
    let text = failure(scene, &["fork", &second]);
    assert!(text.contains("there is no checkpoint"), "{text}");
    // Nothing is left but the log of one monitor.
    let left: Vec<_> = fs::read_dir(scene.path("")).unwrap().map(|it| it.unwrap().path()).collect();
    assert_eq!(left, [scene.path("log0")]);
}

/// Sixteen bytes of the guest's random numbers, in hexadecimal digits.
#[track_caller]
fn random(guest: &Guest) -> String {
    let line = "head -c 16 /dev/urandom | od -An -tx1 | tr -d ' '";
    let argv = ["/bin/busybox", "sh", "-c", line].map(str::to_owned).to_vec();
    guest.run(Command::Exec { argv })["stdout"].as_str().unwrap().trim().to_owned()
}

/// The guest's memory changes everywhere while it is forked, and each page is checked in the
/// parent, in its forks and in theirs. Freed memory goes back in each of them alone.
fn memory_is_copied_on_write(scene: &Scene) {
    let parent = Setup::new(scene)
        .balloon("reporting=on")
        .args(["--cpus", "2", "--forkable", "--log", "warn,ebb_vmm::vm::fork=debug"])
        .start();
    parent.run(Command::Hold { bytes: 128 * MIB, pattern: 9 });
    let before = parent.read_file("/proc/uptime");
    let bytes = counts(48, 64) * MIB;
    let churn = Command::Churn { bytes, tasks: 2, seed: 71, operations: None, seconds: Some(20) };
    let command = parent.send(churn);
    parent.wait_started(command);
    std::thread::sleep(Duration::from_secs(2));
    let name = unique(scene, "churn");
    checkpoint(scene, &parent, &name);
    let forks = fork(scene, &name, "a", 2, &[]);
    let second = unique(scene, "later");
    checkpoint(scene, &forks[0].guest, &second);
    let later = fork(scene, &second, "b", 1, &[]);
    let guests = || {
        let forks = forks.iter().chain(&later).map(|fork| &fork.guest);
        std::iter::once(&parent).chain(forks)
    };
    // While it runs, a fork of a fork and the first machine are saved.
    let saved = scene.path("of-a-fork.snapshot");
    for guest in [&parent, &later[0].guest] {
        let report = guest.save(&saved);
        assert_eq!(report.copied, CopiedWhile::Running, "{report:?}");
    }
    for guest in guests() {
        let report = guest.outcome_within(240, command).unwrap();
        assert_eq!(report["wrong_pages"], 0, "{report}");
        assert!(report["pages_verified"].as_u64().unwrap() > 1000, "{report}");
        assert_eq!(guest.wrong_pages(), 0);
    }
    let uptime = |text: &str| text.split(' ').next().unwrap().parse::<f64>().unwrap();
    for guest in guests() {
        assert!(uptime(&guest.read_file("/proc/uptime")) > uptime(&before));
    }
    let randoms: BTreeSet<String> = guests().map(random).collect();
    assert_eq!(randoms.len(), 4, "{randoms:?}");
    // What was split by writing is huge again.
    parent.run(Command::Hold { bytes: 128 * MIB, pattern: 10 });
    eventually("the first machine has huge pages again", 120, || {
        let log = parent.log();
        when(log.lines().any(|line| line.contains("are huge again")), || log)
    });
    // A fork frees memory that it shares with its ancestors.
    forks[1].guest.run(Command::Release);
    eventually("its memory is back", 60, || {
        let now = forks[1].guest.vm().resident_bytes;
        when(now < 200 * MIB, || format!("{now}"))
    });
    assert_eq!(parent.wrong_pages() + forks[0].guest.wrong_pages(), 0);
    let restored = Restore::new(scene, &saved).socket("restored").start();
    assert_eq!(restored.wrong_pages(), 0);
    for name in [&name, &second] {
        silently(scene, &["checkpoints", "remove", name]);
    }
}

/// A monitor, a checkpoint or a machine is killed in the middle, and the others go on.
fn kills(scene: &Scene) {
    let parent = Setup::new(scene).args(["--forkable"]).start();
    parent.run(Command::Hold { bytes: 32 * MIB, pattern: 3 });
    let socket = parent.socket().to_str().unwrap().to_owned();
    let mut random = crate::kills::moments(scene);
    for round in 0..counts(12, 150) {
        let name = unique(scene, &format!("kill{round}"));
        let report = checkpoint(scene, &parent, &name);
        let holder = Pid::from_raw(report.pid.cast_signed()).unwrap();
        let forks = fork(scene, &name, &format!("a{round}-"), 2, &[]);
        // While it forks, or right after.
        let wait = Duration::from_millis(random.below(60) as u64);
        let victim = match random.below(3) {
            0 => holder,
            1 => forks[0].monitor,
            _ => forks[1].monitor,
        };
        let more = std::thread::scope(|scope| {
            scope.spawn(move || {
                std::thread::sleep(wait);
                let _ = kill_process(victim, Signal::KILL);
            });
            let api = scene.path(&format!("b{round}"));
            ebb(scene, &["fork", &name, "--api", api.to_str().unwrap(), "--json"])
        });
        let text = String::from_utf8_lossy(&more.stderr).into_owned();
        assert!(more.status.success() || victim == holder, "{text}");
        for fork in forks.iter().filter(|fork| fork.monitor != victim) {
            assert_eq!(fork.guest.wrong_pages(), 0);
        }
        assert_eq!(parent.wrong_pages(), 0);
        if let Ok(report) = serde_json::from_slice::<Value>(&more.stdout)
            && let Some(made) = report["machines"].get(0)
        {
            let made = i32::try_from(made["pid"].as_i64().unwrap()).unwrap();
            let _ = kill_process(Pid::from_raw(made).unwrap(), Signal::KILL);
        }
        let _ = kill_process(holder, Signal::KILL);
    }
    // A monitor is killed while a checkpoint of its machine is made: there is one with a name, or
    // none.
    let name = unique(scene, "last");
    checkpoint(scene, &parent, &name);
    for (index, fork) in fork(scene, &name, "dies", counts(8, 60), &[]).iter().enumerate() {
        let wait = Duration::from_millis(random.below(60) as u64);
        std::thread::scope(|scope| {
            scope.spawn(move || {
                std::thread::sleep(wait);
                let _ = kill_process(fork.monitor, Signal::KILL);
            });
            let socket = fork.guest.socket().to_str().unwrap();
            let of_fork = unique(scene, &format!("dies{index}"));
            let made = ebb(scene, &["ctl", socket, "checkpoint", &of_fork]);
            if made.status.success() {
                silently(scene, &["checkpoints", "remove", &of_fork]);
            }
        });
    }
    eventually("no checkpoint is left without a name", 10, || {
        let listed = document(scene, &["checkpoints", "--json"]);
        let listed: BTreeSet<_> = listed.as_array().unwrap().iter().map(pid_of).collect();
        let holders = holders();
        when(holders.is_subset(&listed), || format!("{holders:?} of {listed:?}"))
    });
    // The parent is killed, and what was made of it goes on.
    let early = fork(scene, &name, "early", 1, &[]);
    kill_process(Pid::from_raw(parent.pid().cast_signed()).unwrap(), Signal::KILL).unwrap();
    drop(parent);
    assert!(Client::new(&socket, Duration::from_secs(1)).request("GET", "/vm", "").is_err());
    let late = fork(scene, &name, "late", 1, &[]);
    for fork in early.iter().chain(&late) {
        assert_eq!(fork.guest.wrong_pages(), 0);
    }
    let listed = document(scene, &["checkpoints", "--json"]);
    let killed = |one: &Value| one["name"].as_str().unwrap().contains(&unique(scene, "kill"));
    assert!(!listed.as_array().unwrap().iter().any(killed), "{listed}");
    silently(scene, &["checkpoints", "remove", &name]);
}
