//! Checkpoints in memory, and machines that are forked from them.

use std::collections::BTreeSet;
use std::fs;
use std::io::{Read as _, Write as _};
use std::os::fd::AsFd as _;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command as Program, Output};
use std::time::Duration;

use ebb_agent::protocol::Command;
use ebb_agent::vsock::Service;
use ebb_vmm::api::{CheckpointReport, Client, CopiedWhile, VmState};
use rustix::process::{Pid, Signal, kill_process, test_kill_process};
use serde_json::Value;

use crate::guest::{Guest, MIB};
use crate::harness::{Scene, Test, counts, eventually, when};
use crate::place::GUEST_AGENT;
use crate::saved::Restore;
use crate::setup::Setup;

/// The tests.
pub const TESTS: &[Test] = &[
    Test::new("fork::everything_goes_on", 240, everything_goes_on),
    Test::new("fork::memory_is_copied_on_write", 400, memory_is_copied_on_write),
    Test::new("fork::what_each_has_alone", 300, what_each_has_alone),
    Test::new("fork::what_its_guest_is_told", 300, what_its_guest_is_told),
    Test::new("fork::kills", 400, kills),
    Test::new("fork::refused_requests", 240, refused_requests),
];

/// A forked machine: its guest over `ebb console`, and its monitor, which is killed when this is
/// dropped.
pub struct Fork {
    pub guest: Guest,
    monitor: Pid,
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
    let churn =
        Command::Churn { bytes: 64 * MIB, tasks: 2, seed: 71, operations: None, seconds: Some(20) };
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

/// Sockets, disks, interfaces and cgroups.
fn what_each_has_alone(scene: &Scene) {
    let path = |name: &str| scene.path(name).to_str().unwrap().to_owned();
    fs::write(path("base"), vec![0x5a; 8 << 20]).unwrap();
    let disk = format!("path={},overlay={}", path("base"), path("overlay"));
    let vsock = format!("path={}", path("vsock"));
    let parent = Setup::new(scene).args(["--forkable", "--disk", &disk, "--vsock", &vsock]).start();
    let shell = |guest: &Guest, line: &str| {
        let argv = ["/bin/busybox", "sh", "-c", line].map(str::to_owned).to_vec();
        let result = guest.run(Command::Exec { argv });
        assert_eq!(result["code"], 0, "{line}: {result}");
    };
    let write = |guest: &Guest, text: &str| {
        let line = format!("printf {text} | dd of=/dev/vda bs=4096 seek=3 conv=notrunc,fsync");
        shell(guest, &line);
    };
    let check = |guest: &Guest, text: &str| {
        shell(guest, "echo 3 > /proc/sys/vm/drop_caches");
        let line = format!("[ $(dd if=/dev/vda bs=4096 skip=3 count=1 | head -c 6) = {text} ]");
        shell(guest, &line);
    };
    write(&parent, "before");
    let serving = parent.send(Command::VsockServe { port: 52, service: Service::Echo });
    parent.wait_started(serving);
    // Its disk is copied in the moment of the checkpoint.
    let name = unique(scene, "own");
    let socket = parent.socket().to_str().unwrap();
    let copies = ["--copy-disks", &path("")];
    silently(scene, &[&["ctl", socket, "checkpoint", &name], &copies[..]].concat());
    write(&parent, "parent");
    // The same by hand, of a machine that is paused.
    parent.put("/vm/pause");
    let plain = unique(scene, "plain");
    silently(scene, &["ctl", socket, "checkpoint", &plain]);
    let nowhere = ["ctl", socket, "checkpoint", "nowhere", "--copy-disks", "/nowhere"];
    assert!(failure(scene, &nowhere).contains("/nowhere"));
    fs::copy(path("overlay"), path("by-hand")).unwrap();
    let modified = fs::metadata(path("overlay")).unwrap().modified().unwrap();
    let by_hand = fs::File::options().write(true).open(path("by-hand")).unwrap();
    by_hand.set_modified(modified).unwrap();
    parent.put("/vm/resume");
    write(&parent, "newest");

    let refused_of = |name: &str, api: &str, more: &[&str]| {
        let text = failure(scene, &[&["fork", name, "--api", api], more].concat());
        for left in ["refused", "refused.vsock", "refused.disk"] {
            assert!(!scene.path(left).exists(), "{left}: {text}");
        }
        text
    };
    let refused = |more: &[&str]| refused_of(&name, &path("refused"), more);
    let other_vsock = format!("path={}", path("refused.vsock"));
    let text = refused(&["--vsock", &other_vsock]);
    assert!(text.contains("--disk path=FILE"), "{text}");
    assert!(refused(&["--disk", &disk, "--vsock", &other_vsock]).contains("in use"));
    let new = format!("path={},overlay={}", path("base"), path("refused.disk"));
    assert!(refused(&["--disk", &new]).contains("--vsock path=PATH"));
    let raw = format!("path={}", path("refused.disk"));
    assert!(refused(&["--disk", &raw, "--vsock", &other_vsock]).contains("overlay=FILE"));
    // After its disk was made.
    let text = refused_of(&name, socket, &["--disk", &new, "--vsock", &other_vsock]);
    assert!(text.contains("another process listens"), "{text}");
    let more = ["--disk", &new, "--vsock", &other_vsock];
    let text = refused_of(&plain, &path("refused"), &more);
    assert!(text.contains("no copy"), "{text}");
    fs::copy(path("overlay"), path("changed")).unwrap();
    let changed = format!("path={},overlay={}", path("base"), path("changed"));
    let text = refused(&["--disk", &changed, "--vsock", &other_vsock]);
    assert!(text.contains("--accept-changed-disks"), "{text}");

    let disks = format!("path={},overlay={}", path("base"), path("overlay{}"));
    let sockets = format!("path={}", path("vsock{}"));
    let cgroup = format!("path={}/{{}},pids_max=64", unique(scene, "forks"));
    let root = Path::new("/sys/fs/cgroup");
    let cgroups = root.join(unique(scene, "forks"));
    fs::create_dir(&cgroups).unwrap();
    for folder in [root, &cgroups] {
        fs::write(folder.join("cgroup.subtree_control"), "+memory +pids +cpu").unwrap();
    }
    let more = ["--disk", &disks, "--vsock", &sockets, "--cgroup", &cgroup];
    let forks = fork(scene, &name, "a", 2, &more);
    let by_hand = format!("path={},overlay={}", path("base"), path("by-hand"));
    let of_plain = format!("path={}", path("of-plain.vsock"));
    let more = ["--disk", &by_hand, "--vsock", &of_plain];
    check(&fork(scene, &plain, "of-plain", 1, &more)[0].guest, "parent");
    let direct = format!("path={},overlay={}", path("base"), path("direct"));
    let of_direct = format!("path={}", path("direct.vsock"));
    let more = ["--disk", &direct, "--vsock", &of_direct];
    check(&fork(scene, socket, "direct-", 1, &more)[0].guest, "newest");
    for (number, fork) in forks.iter().enumerate() {
        check(&fork.guest, "before");
        write(&fork.guest, &format!("fork-{number}"));
        let mut stream = crate::vsock::connect(&scene.path(&format!("vsock{number}")), 52).unwrap();
        stream.write_all(b"hello").unwrap();
        stream.shutdown(std::net::Shutdown::Write).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        assert_eq!(answer, "hello");
        let folder = cgroups.join(number.to_string());
        let processes = fs::read_to_string(folder.join("cgroup.procs")).unwrap();
        let monitor = fork.monitor.as_raw_nonzero().to_string();
        assert!(processes.lines().any(|line| line == monitor), "{processes}");
        assert_eq!(fs::read_to_string(folder.join("pids.max")).unwrap(), "64\n");
    }
    for (number, fork) in forks.iter().enumerate() {
        check(&fork.guest, &format!("fork-{number}"));
    }
    check(&parent, "newest");
    for (number, fork) in forks.into_iter().enumerate() {
        fork.guest.put("/vm/kill");
        fork.wait_end();
        let folder = cgroups.join(number.to_string());
        let socket = scene.path(&format!("vsock{number}"));
        eventually("socket and cgroup are removed", 20, || {
            when(!folder.exists() && !socket.exists(), || {
                format!("{} {}", folder.display(), socket.display())
            })
        });
    }
    fs::remove_dir(&cgroups).unwrap();
    silently(scene, &["checkpoints", "remove", &name, &plain]);
}

/// Scripts in the guest, and random numbers that no two machines have in common. Their raw disks
/// are made of the checkpoint's copy.
fn what_its_guest_is_told(scene: &Scene) {
    let vsock = format!("path={}", scene.path("vsock").display());
    fs::write(scene.path("raw"), "content\n".repeat(1 << 15)).unwrap();
    let disk = format!("path={}", scene.path("raw").display());
    let disks = format!("path={}", scene.path("raw{}").display());
    let parent = Setup::new(scene)
        .initrd(&scene.world.hostile_initrd)
        .args(["--forkable", "--vsock", &vsock, "--disk", &disk])
        .start();
    let socket = parent.socket().to_str().unwrap();
    let sockets = format!("path={}", scene.path("vsock{}").display());
    let forks = |source: &str, count: usize| {
        let (pattern, count) = (scene.path("fork{}"), count.to_string());
        let pattern = pattern.to_str().unwrap();
        let more = ["--api", pattern, "--vsock", &sockets, "--disk", &disks, "--json"];
        document(scene, &[&["fork", source, "-n", &count], &more[..]].concat())
    };
    let kill_all = |report: &Value| {
        for (number, made) in report["machines"].as_array().unwrap().iter().enumerate() {
            silently(scene, &["ctl", made["api"].as_str().unwrap(), "kill"]);
            fs::remove_file(scene.path(&format!("raw{number}"))).unwrap();
        }
    };
    // Without an agent.
    let report = forks(socket, 1);
    assert_eq!(report["machines"][0]["reseeded"], false, "{report}");
    kill_all(&report);

    let job = parent.send(Command::Exec { argv: vec![GUEST_AGENT.to_owned()] });
    parent.wait_started(job);
    let shell = |socket: &str, line: &str| {
        let arguments =
            ["exec", "--wait", "60", "-n", socket, "--", "/bin/busybox", "sh", "-c", line];
        let output = ebb(scene, &arguments);
        assert!(output.status.success(), "{line}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    };
    let script = "mkdir -p /etc/ebb/fork.d && cd /etc/ebb/fork.d && \
        echo '#!/bin/busybox sh\necho $* >> /moments; [ ! -e /fails ] || exit 3' > 10-note && \
        chmod +x 10-note";
    shell(socket, &script.replace("\\n", "\n"));
    let name = unique(scene, "told");
    let folder = scene.path("");
    let copies = ["--copy-disks", folder.to_str().unwrap()];
    silently(scene, &[&["ctl", socket, "checkpoint", &name], &copies[..]].concat());
    assert_eq!(shell(socket, "cat /moments"), "before\ncontinue\n");
    let mut randoms = BTreeSet::new();
    let batch = 16;
    for _ in 0..counts(2, 64) {
        let report = forks(&name, batch);
        for (number, made) in report["machines"].as_array().unwrap().iter().enumerate() {
            assert_eq!(made["reseeded"], true, "{report}");
            assert!(made["answered_us"].as_u64() >= made["elapsed_us"].as_u64(), "{report}");
            let line = "head -c 16 /dev/urandom | od -An -tx1; cat /moments; head -n 1 /dev/vda";
            let said = shell(made["api"].as_str().unwrap(), line);
            let (random, moments) = said.split_once('\n').unwrap();
            assert_eq!(moments, format!("before\nfork {number}\ncontent\n"));
            assert!(randoms.insert(random.to_owned()), "{random}");
        }
        kill_all(&report);
    }
    assert_eq!(shell(socket, "cat /moments"), "before\ncontinue\n");

    // A script that fails.
    shell(socket, "touch /fails");
    let second = unique(scene, "untold");
    let text = failure(scene, &["ctl", socket, "checkpoint", &second]);
    assert!(text.contains("10-note before") && text.contains("--hooks off"), "{text}");
    assert_eq!(shell(socket, "cat /moments; rm /fails"), "before\ncontinue\n".repeat(2));
    silently(scene, &["ctl", socket, "checkpoint", &second, "--hooks", "off"]);
    assert_eq!(shell(socket, "cat /moments; touch /fails"), "before\ncontinue\n".repeat(2));
    let failing = unique(scene, "fails");
    let arguments = ["ctl", socket, "checkpoint", &failing, "--hooks", "off"];
    silently(scene, &[&arguments, &copies[..]].concat());
    let api = scene.path("fails");
    let more = ["--vsock", &sockets, "--disk", &disks];
    let arguments = [&["fork", &failing, "--api", api.to_str().unwrap()], &more[..]].concat();
    let output = ebb(scene, &arguments);
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.code() == Some(1) && text.contains("10-note fork 0"), "{text}");
    // It runs.
    silently(scene, &["ctl", api.to_str().unwrap(), "kill"]);
    silently(scene, &["checkpoints", "remove", &name, &second, &failing]);
}

/// A monitor, a checkpoint or a machine is killed in the middle, and the others go on.
fn kills(scene: &Scene) {
    let parent = Setup::new(scene).args(["--forkable"]).start();
    parent.run(Command::Hold { bytes: 32 * MIB, pattern: 3 });
    let socket = parent.socket().to_str().unwrap().to_owned();
    let mut random = crate::kills::moments(scene);
    for round in 0..counts(12, 100) {
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
    for (index, fork) in fork(scene, &name, "dies", counts(8, 40), &[]).iter().enumerate() {
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

fn pid_of(listed: &Value) -> i64 {
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

fn refused_requests(scene: &Scene) {
    let plain = Setup::new(scene).start();
    let socket = plain.socket().to_str().unwrap().to_owned();
    let name = unique(scene, "refused");
    let text = failure(scene, &["ctl", &socket, "checkpoint", &name]);
    assert!(text.contains("--forkable"), "{text}");
    assert!(failure(scene, &["fork", &socket]).contains("--forkable"));
    assert!(failure(scene, &["fork", &name]).contains("there is no checkpoint"));
    plain.end();

    let refused = |memory: &str| {
        let setup = Setup::new(scene).memory(memory).args(["--forkable"]);
        let (code, log) = setup.spawn().wait_end();
        assert_eq!(code, Some(2), "{log}");
        log
    };
    assert!(refused("size=512M,backing=memfd").contains("--forkable"));
    assert!(refused("size=512M,merge=owner").contains("--forkable"));

    let guest = Setup::new(scene).socket("second").args(["--forkable"]).start();
    let socket = guest.socket().to_str().unwrap().to_owned();
    for bad in ["a b", "..\u{e9}", &"x".repeat(65)] {
        let text = failure(scene, &["ctl", &socket, "checkpoint", bad]);
        assert!(text.contains("64 letters"), "{text}");
    }
    checkpoint(scene, &guest, &name);
    let text = failure(scene, &["ctl", &socket, "checkpoint", &name]);
    assert!(text.contains("another process listens"), "{text}");
    let api = scene.path("fork");
    let api = api.to_str().unwrap();
    let text = failure(scene, &["fork", &name, "-n", "2", "--api", api]);
    assert!(text.contains("{}"), "{text}");
    let vsock = format!("path={api}.vsock");
    let text = failure(scene, &["fork", &name, "--api", api, "--vsock", &vsock]);
    assert!(text.contains("0 socket devices"), "{text}");
    let text = failure(scene, &["fork", &name, "--api", api, "--disk", "path=/nowhere"]);
    assert!(text.contains("0 disks"), "{text}");
    let text = failure(scene, &["fork", &name, "-n", "10000"]);
    assert!(text.contains("room for"), "{text}");
    let text = failure(scene, &["fork", &name, "--api", &socket]);
    assert!(text.contains("another process listens"), "{text}");
    assert!(!Path::new(api).exists() && !Path::new(&format!("{api}.vsock")).exists());
    // The log of the second machine cannot be opened: the first one goes on.
    fs::create_dir(scene.path("log0")).unwrap();
    let (logs, pattern) = (scene.path("log{}/log"), scene.path("logged{}"));
    let (logs, pattern) = (logs.to_str().unwrap(), pattern.to_str().unwrap());
    let arguments = ["fork", &name, "-n", "3", "--api", pattern, "--log-file", logs];
    let text = failure(scene, &arguments);
    assert!(text.contains("machine 1") && text.contains("log1/log"), "{text}");
    assert!(!scene.path("logged1").exists() && !scene.path("logged2").exists());
    silently(scene, &["ctl", scene.path("logged0").to_str().unwrap(), "kill"]);
    // Not a socket, and none at all.
    let (status, text) = guest.refused("PUT", "/vm/checkpoint", r#"{"name": "x"}"#);
    assert_eq!(status, 422, "{text}");
    let target = serde_json::json!({ "name": "x" });
    let null = fs::File::open("/dev/null").unwrap();
    let error = guest
        .client()
        .put_json_with::<CheckpointReport>("/vm/checkpoint", &target, &[null.as_fd()])
        .unwrap_err();
    assert!(error.to_string().contains("one socket"), "{error}");
    // Clients that say nothing, or nonsense, do not keep others from a checkpoint.
    let place = format!("/run/ebb/checkpoints/{name}.sock");
    let silent: Vec<_> = (0..4).map(|_| UnixStream::connect(&place).unwrap()).collect();
    let mut wrong = UnixStream::connect(&place).unwrap();
    wrong.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
    let forks = fork(scene, &name, "after", 1, &[]);
    assert_eq!(forks[0].guest.vm().state, VmState::Running);
    drop((silent, wrong));
    // A guest that has been paused, and one that has a snapshot written.
    guest.put("/vm/pause");
    assert_eq!(checkpoint(scene, &guest, &unique(scene, "paused")).paused_us, 0);
    let paused = fork(scene, &unique(scene, "paused"), "paused", 1, &[]);
    assert_eq!(paused[0].guest.vm().state, VmState::Running);
    let report = paused[0].guest.save(&scene.path("of-a-fork.snapshot"));
    assert_eq!(report.copied, CopiedWhile::Running, "{report:?}");
    assert_eq!(guest.vm().state, VmState::Paused);
    for name in [&name, &unique(scene, "paused")] {
        silently(scene, &["checkpoints", "remove", name]);
    }
    guest.put("/vm/resume");
    guest.end();
    let restored = Restore::new(scene, &scene.path("of-a-fork.snapshot"))
        .socket("restored")
        .args(["--forkable"])
        .start();
    // Memory that is mapped from a snapshot's file is forked, too.
    let socket = restored.socket().to_str().unwrap().to_owned();
    let forks = fork(scene, &socket, "of-restored", 2, &[]);
    restored.end();
    for fork in forks {
        fork.guest.write_file("/tmp/x", "written");
        assert_eq!(fork.guest.read_file("/tmp/x"), "written");
    }
}

/// Runs `ebb`, which must succeed.
#[track_caller]
pub fn silently(scene: &Scene, arguments: &[&str]) {
    let output = ebb(scene, arguments);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}
