//! `ebbd` and `ebb host`: what is taken from machines, that it is given back however the daemon
//! ends, and that a bad monitor costs only its own machine.

mod fit;

use std::fs;
use std::io::{Read as _, Write as _};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command as Program, Output, Stdio};
use std::thread;
use std::time::Duration;

use ebb_agent::protocol::Command;
use ebb_agent::trace_load::{Part, TraceLoad};
use ebb_host_policy::report::{Admission, Arrival};
use ebb_page_merge::kernel::{Knob, Ksm, KsmGuard, SYSFS, Values};
use ebb_vmm::api::{Client, VmState};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};

use crate::firecracker::{boot_args, document, done, serve};
use crate::guest::{Guest, MIB};
use crate::harness::{Scene, Test, eventually, when};
use crate::saved::Restore;
use crate::setup::Setup;

/// The tests.
pub const TESTS: &[Test] = &[
    Test::new("host::idle_memory_is_taken", 240, idle_memory_is_taken),
    Test::new("host::nothing_stays_squeezed", 300, nothing_stays_squeezed),
    Test::new("host::bad_monitors", 240, bad_monitors),
    Test::new("host::peaks_follow_each_other", 300, peaks_follow_each_other),
    Test::new("host::firecracker_s_api", 300, firecracker_s_api),
    Test::new("host::parked_machines_are_stopped", 300, parked_machines_are_stopped),
    Test::new("host::fit_is_what_fits", 400, fit::is_what_fits),
    Test::new("host::settings_of_ksm", 120, settings_of_ksm).merging(),
];

/// First argument that runs this program as the daemon.
pub const ARGUMENT: &str = "ebbd";

/// A host that is always pressed, so that whatever can be taken is taken.
const PRESSED: &str = "tight_percent = 99\npressed_percent = 98\nemergency_percent = 1\n\
                       stale_ms = 2500\nlease_ms = 4000\nidle_ms = 1000\n";
/// A host that never is.
const PLENTY: &str = "tight_percent = 3\npressed_percent = 2\nemergency_percent = 1\n\
                      stale_ms = 2500\nlease_ms = 4000\n";

/// A running daemon.
struct Daemon<'a> {
    scene: &'a Scene,
    child: Child,
}

impl<'a> Daemon<'a> {
    fn program(scene: &Scene) -> Program {
        let mut program = Program::new(std::env::current_exe().unwrap());
        program.args([ARGUMENT, "--log", "info", "--config"]).arg(scene.path("ebbd.toml"));
        program.arg("--socket").arg(scene.path("ebbd.sock"));
        program.arg("--state").arg(scene.path("state"));
        program.stdin(Stdio::null());
        program
    }

    fn configure(scene: &Scene, policy: &str) {
        let folder = folder(scene);
        let (folder, snapshots) = (folder.display(), scene.path("snapshots"));
        let text = format!(
            "machines = [\"{folder}\"]\nsnapshots = \"{}\"\ninterval_ms = 500\n[policy]\n{policy}",
            snapshots.display()
        );
        fs::write(scene.path("ebbd.toml"), text).unwrap();
    }

    #[track_caller]
    fn start(scene: &'a Scene, policy: &str) -> Self {
        Self::configure(scene, policy);
        let log = fs::File::options().create(true).append(true).open(scene.path("ebbd.log"));
        let child = Self::program(scene).stderr(log.unwrap()).spawn().unwrap();
        let daemon = Self { scene, child };
        eventually("the daemon answers", 20, || {
            let output = daemon.ebb(&["status"]);
            when(output.status.success(), || format!("{output:?}"))
        });
        daemon
    }

    /// `ebb host` with these arguments.
    fn ebb(&self, arguments: &[&str]) -> Output {
        let mut program = Program::new(&self.scene.world.ebb);
        program.args(["host", "--socket"]).arg(self.scene.path("ebbd.sock")).args(arguments);
        program.output().unwrap()
    }

    /// What it prints, which must succeed.
    #[track_caller]
    fn text(&self, arguments: &[&str]) -> String {
        let output = self.ebb(arguments);
        assert!(output.status.success(), "{arguments:?}: {output:?}");
        String::from_utf8(output.stdout).unwrap()
    }

    #[track_caller]
    fn json(&self, arguments: &[&str]) -> Value {
        let text = self.text(&[arguments, &["--json"]].concat());
        serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text}"))
    }

    #[track_caller]
    fn refused(&self, arguments: &[&str]) -> String {
        let output = self.ebb(arguments);
        assert_eq!(output.status.code(), Some(1), "{arguments:?}: {output:?}");
        String::from_utf8(output.stderr).unwrap()
    }

    /// The document about a machine; null if the daemon has not found it yet.
    #[track_caller]
    fn machine(&self, name: &str) -> Value {
        let status = self.json(&["status"]);
        let machines = status["machines"].as_array().unwrap();
        machines.iter().find(|machine| machine["name"] == name).cloned().unwrap_or_default()
    }

    fn signal(&self, signal: Signal) {
        let pid = Pid::from_raw(self.child.id().cast_signed()).unwrap();
        kill_process(pid, signal).unwrap();
    }

    /// Ends it and waits; returns its exit code.
    fn end(&mut self, signal: Signal) -> Option<i32> {
        self.signal(signal);
        self.child.wait().unwrap().code()
    }
}

impl Drop for Daemon<'_> {
    fn drop(&mut self) {
        if thread::panicking() {
            let log = fs::read_to_string(self.scene.path("ebbd.log")).unwrap_or_default();
            eprintln!("{log}");
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The directory of the machines' sockets.
fn folder(scene: &Scene) -> PathBuf {
    let folder = scene.path("machines");
    fs::create_dir_all(&folder).unwrap();
    folder
}

fn machine(scene: &Scene, name: &str) -> Guest {
    folder(scene);
    Setup::new(scene).balloon("reporting=off").socket(&format!("machines/{name}.sock")).start()
}

fn idle_memory_is_taken(scene: &Scene) {
    let guest = machine(scene, "web-1");
    guest.run(Command::AllocTouchExit { bytes: 200 * MIB });
    let before = guest.resident();
    let mut daemon = Daemon::start(scene, PRESSED);
    eventually("the guest's free memory is taken", 60, || {
        let now = guest.resident();
        when(now + 150 * MIB < before, || format!("{before} -> {now}"))
    });
    eventually("the decision is shown", 20, || {
        let shown = daemon.machine("web-1");
        let is_there = shown["monitor"] == "ebb" && shown["explanation"]["rule"].is_object();
        when(is_there && shown["trouble"].is_null(), || shown.to_string())
    });
    let log = fs::read_to_string(scene.path("ebbd.log")).unwrap();
    assert!(log.contains("ordered machine=\"web-1\" action=Park"), "{log}");
    let text = daemon.text(&["explain", "web-1"]);
    for word in ["resident", "because", "action", "means", "available"] {
        assert!(text.contains(word), "no {word}: {text}");
    }
    assert!(daemon.text(&[]).contains("host pressed"), "{}", daemon.text(&[]));
    top_shows(scene, &guest, "web-1");
    assert!(daemon.json(&["plan"])["machines"][0]["explanation"].is_object());
    // A machine that is held is left alone.
    assert_eq!(daemon.json(&["hold", "web-1"])["is_held"], true);
    guest.run(Command::AllocTouchExit { bytes: 200 * MIB });
    thread::sleep(Duration::from_secs(4));
    let held = guest.resident();
    assert!(held + 50 * MIB > before, "{before} -> {held}");
    eventually("the hold is the reason", 20, || {
        let rule = daemon.machine("web-1")["explanation"]["rule"]["name"].clone();
        when(rule == "held", || rule.to_string())
    });
    // It is remembered.
    assert_eq!(daemon.end(Signal::KILL), None);
    daemon = Daemon::start(scene, PRESSED);
    assert_eq!(daemon.machine("web-1")["is_held"], true);
    assert!(daemon.text(&["release", "web-1"]).contains("no longer held"));
    assert!(daemon.refused(&["hold", "web-2"]).contains("no machine \"web-2\""));
    assert!(daemon.refused(&["explain", "web-2"]).contains("ebb host status lists them"));
    assert!(daemon.refused(&["fit", "--memory", "1G", "--profile", "x"]).contains("no profile"));
    // A pressed host has no room.
    assert_eq!(daemon.json(&["fit", "--memory", "1G"])["machines"], 0);
    let run = |memory: &str| {
        let mut program = Program::new(&scene.world.ebb);
        program.args(["run", "--memory", memory, "--via"]).arg(scene.path("ebbd.sock"));
        program.arg("--api").arg(folder(scene).join("web-2.sock"));
        program.arg("--kernel").arg(&scene.world.vmlinux).output().unwrap()
    };
    let refused = run("64M");
    assert_eq!(refused.status.code(), Some(9), "{refused:?}");
    let text = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(text.contains("no room") && text.contains("the host is pressed"), "{text}");
    // A second daemon is refused, the first one goes on.
    let second = Daemon::program(scene).output().unwrap();
    assert_eq!(second.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&second.stderr).contains("another ebbd"), "{second:?}");
    // A mistake in the configuration changes nothing.
    Daemon::configure(scene, "tight_percent = 200\n");
    assert!(daemon.refused(&["settings", "--reload"]).contains("below 100"));
    assert_eq!(daemon.json(&["settings"])["policy"]["tight_percent"], 99);
    Daemon::configure(scene, PLENTY);
    assert_eq!(daemon.json(&["settings", "--reload"])["policy"]["tight_percent"], 3);
    eventually("the host has plenty", 60, || {
        let level = daemon.json(&["status"])["level"].clone();
        when(level == "plenty", || level.to_string())
    });
    let fit = daemon.json(&["fit", "--memory", "64M"]);
    assert!(fit["machines"].as_u64().unwrap() > 0, "{fit}");
    admitted_in_order(scene, &daemon);
    assert_eq!(run("900G").status.code(), Some(9));
    assert_eq!(daemon.end(Signal::TERM), Some(0));
    assert!(!scene.path("ebbd.sock").exists());
    assert!(daemon.refused(&["status"]).contains("no ebbd serves"));
    assert_eq!(guest.wrong_pages(), 0);
}

/// One picture of `ebb top`, with the daemon and without.
fn top_shows(scene: &Scene, guest: &Guest, name: &str) {
    let daemon = scene.path("ebbd.sock");
    for (option, socket) in [("--socket", &daemon), ("--machine", guest.socket())] {
        let mut program = Program::new(&scene.world.ebb);
        let output = program.args(["top", "--once", option]).arg(socket).output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success() && text.contains(name), "{output:?}");
        assert!(text.contains("512.0 MiB"), "{text}");
    }
}

/// Room is kept for those that were admitted, and those that came first are first.
fn admitted_in_order(scene: &Scene, daemon: &Daemon) {
    let client = || Client::new(scene.path("ebbd.sock"), Duration::from_secs(30));
    let ask = |name: &str, memory_bytes: u64, wait_ms: u64| -> Admission {
        let machine = name.to_owned();
        client().put_json("/admit", &Arrival { machine, memory_bytes, wait_ms }).unwrap()
    };
    let room = daemon.json(&["fit", "--memory", "256M"])["machines"].as_u64().unwrap();
    assert!(room > 1);
    assert!(ask("new-1", 256 * MIB, 0).is_admitted);
    assert_eq!(daemon.json(&["fit", "--memory", "256M"])["machines"], room - 1);
    // One that is too large waits, a small one waits behind it until it gives up. One that is
    // larger than the host is refused at once.
    let whole = daemon.json(&["status"])["host"]["total_bytes"].as_u64().unwrap();
    assert!(!ask("new-2", whole + 1, 600_000).is_admitted);
    thread::scope(|scope| {
        let large = scope.spawn(|| ask("new-2", whole, 4000));
        eventually("the large one waits", 20, || {
            let small = ask("new-3", 64 * MIB, 0);
            when(!small.is_admitted && small.before == 1, || format!("{small:?}"))
        });
        assert!(ask("new-3", 64 * MIB, 20_000).is_admitted);
        assert!(!large.join().unwrap().is_admitted);
    });
    // The machine itself takes the room.
    let sockets = scene.path("ebbd.sock").display().to_string();
    let machine =
        Setup::new(scene).socket("machines/new-1.sock").args(["--via", sockets.as_str()]).start();
    eventually("the daemon sees it", 20, || {
        let shown = daemon.machine("new-1");
        when(shown["machine"].is_object(), || shown.to_string())
    });
    machine.end();
}

/// A ceiling of 384 MiB for a machine of 512: a balloon that is always there.
const CEILING: &str = "[policy.default]\nceiling_bytes = 469762048\nreserve_bytes = 33554432\n";

fn nothing_stays_squeezed(scene: &Scene) {
    let guest = machine(scene, "web-1");
    let policy = format!("{PLENTY}{CEILING}");
    let mut daemon = Daemon::start(scene, &policy);
    let squeezed = || {
        eventually("the balloon has its size", 60, || {
            let info = guest.balloon();
            let is_there = info.actual_bytes >= 60 * MIB && info.lease_ms.is_some();
            when(is_there, || format!("{info:?}"))
        });
    };
    let released = || {
        eventually("the balloon is released", 30, || {
            let info = guest.balloon();
            when(info.target_bytes == 0 && info.actual_bytes == 0, || format!("{info:?}"))
        });
    };
    squeezed();
    // It stays for longer than its lease.
    for _ in 0..12 {
        thread::sleep(Duration::from_millis(500));
        assert!(guest.balloon().target_bytes > 0);
    }
    // A daemon that has been killed, one that stands still, and one that ends.
    assert_eq!(daemon.end(Signal::KILL), None);
    released();
    daemon = Daemon::start(scene, &policy);
    squeezed();
    daemon.signal(Signal::STOP);
    released();
    daemon.signal(Signal::CONT);
    squeezed();
    assert_eq!(daemon.end(Signal::TERM), Some(0));
    released();
    assert_eq!(guest.vm().state, VmState::Running);
    // With a disk that is full, nothing is remembered, and all else works.
    let state = scene.path("state");
    let size = "size=4k";
    rustix::mount::mount(
        "none",
        &state,
        "tmpfs",
        rustix::mount::MountFlags::empty(),
        Some(std::ffi::CString::new(size).unwrap().as_c_str()),
    )
    .unwrap();
    fs::write(state.join("ballast"), vec![0; 4096]).unwrap();
    daemon = Daemon::start(scene, &policy);
    squeezed();
    let problems = daemon.json(&["status"])["problems"].to_string();
    assert!(problems.contains("the state is not saved"), "{problems}");
    assert_eq!(daemon.end(Signal::KILL), None);
    released();
    rustix::mount::unmount(&state, rustix::mount::UnmountFlags::DETACH).unwrap();
}

/// Settings with which machines have about this room above the limit of an emergency, and wait for
/// each other as long as a slow machine needs.
fn with_room(room_bytes: u64) -> String {
    let text = fs::read_to_string("/proc/meminfo").unwrap();
    let bytes = |name: &str| {
        let line = text.lines().find(|line| line.starts_with(name)).unwrap();
        1024 * line.split_ascii_whitespace().nth(1).unwrap().parse::<u64>().unwrap()
    };
    let kept = bytes("MemAvailable:").saturating_sub(room_bytes);
    let emergency = 100 * kept / bytes("MemTotal:");
    let (pressed, tight) = (emergency + 1, emergency + 2);
    format!(
        "emergency_percent = {emergency}\npressed_percent = {pressed}\ntight_percent = {tight}\n\
         pause_ms = 120000\n"
    )
}

/// Work that needs more and more memory for ten seconds, up to this much.
fn growing(bytes: u64) -> TraceLoad {
    let part = Part {
        works: true,
        duration_ms: 10_000,
        programs_kib: bytes >> 10,
        is_steady: true,
        files_kib: 0,
    };
    TraceLoad { files: "/dev/null".to_owned(), report: "/tmp/report".to_owned(), parts: vec![part] }
}

fn peaks_follow_each_other(scene: &Scene) {
    folder(scene);
    // What one has freed is there for the other.
    let guests = ["a", "b"].map(|name| {
        let setup = Setup::new(scene).balloon("reporting=on");
        setup.socket(&format!("machines/{name}.sock")).start()
    });
    // Room for the highest need of one machine.
    let mut daemon = Daemon::start(scene, &with_room(500 * MIB));
    eventually("the daemon sees both", 20, || {
        let shown = ["a", "b"].map(|name| daemon.machine(name));
        when(shown.iter().all(|it| it["machine"].is_object()), || format!("{shown:?}"))
    });
    let is_paused = || guests.iter().position(|guest| guest.vm().state == VmState::Paused);
    // Until one was seen to wait for the other; both do all of their work.
    let wait_for_a_pause = || {
        for _ in 0..10 {
            let work = |guest: &Guest| guest.send(Command::TraceLoad(growing(380 * MIB)));
            let jobs = [work(&guests[0]), work(&guests[1])];
            let mut paused = None;
            while guests.iter().zip(jobs).any(|(guest, job)| guest.poll(job).is_none()) {
                paused = paused.or_else(is_paused);
                if paused.is_some() {
                    return jobs;
                }
                thread::sleep(Duration::from_millis(20));
            }
        }
        panic!("none was paused: {}", fs::read_to_string(scene.path("ebbd.log")).unwrap());
    };
    let jobs = wait_for_a_pause();
    for (guest, job) in guests.iter().zip(jobs) {
        guest.outcome(job).unwrap();
    }
    let log = fs::read_to_string(scene.path("ebbd.log")).unwrap();
    assert!(log.contains("action=Pause") && log.contains("action=Resume"), "{log}");
    // A daemon that dies meanwhile leaves no machine paused.
    let jobs = wait_for_a_pause();
    assert_eq!(daemon.end(Signal::KILL), None);
    for (guest, job) in guests.iter().zip(jobs) {
        guest.outcome(job).unwrap();
        assert_eq!(guest.vm().state, VmState::Running);
    }
}

/// Firecracker's API has no leases: the daemon's second process undoes what it has left.
fn firecracker_s_api(scene: &Scene) {
    folder(scene);
    let guest = serve(scene, "machines/web-1.sock", &[]);
    let api = guest.socket().clone();
    let world = &scene.world;
    done(&api, "PUT", "/machine-config", &json!({ "vcpu_count": 1, "mem_size_mib": 512 }));
    let boot = json!({
        "kernel_image_path": world.vmlinux, "initrd_path": world.initrd,
        "boot_args": boot_args(),
    });
    done(&api, "PUT", "/boot-source", &boot);
    let balloon = json!({ "amount_mib": 0, "deflate_on_oom": true, "stats_polling_interval_s": 1 });
    done(&api, "PUT", "/balloon", &balloon);
    let mut daemon = Daemon::start(scene, &format!("{PLENTY}{CEILING}"));
    eventually("the machine that is not started is shown", 20, || {
        let shown = daemon.machine("web-1");
        let is_there = shown["monitor"] == "firecracker" && shown["machine"]["is_paused"] == true;
        when(is_there, || shown.to_string())
    });
    done(&api, "PUT", "/actions", &json!({ "action_type": "InstanceStart" }));
    guest.wait_ready(1);
    let actual = || document(&api, "/balloon/statistics")["actual_mib"].clone();
    eventually("the balloon has its size", 60, || {
        let (actual, shown) = (actual(), daemon.machine("web-1"));
        when(actual == 64, || format!("{actual} {shown}"))
    });
    // It stays for longer than a lease, although an idle guest says the same again and again.
    for _ in 0..16 {
        thread::sleep(Duration::from_millis(500));
        assert_eq!(document(&api, "/balloon")["amount_mib"], 64, "{}", daemon.machine("web-1"));
    }
    assert_eq!(daemon.end(Signal::KILL), None);
    eventually("the balloon is released", 60, || {
        let actual = actual();
        when(actual == 0, || actual.to_string())
    });
    assert_eq!(document(&api, "/")["state"], "Running");
    guest.run(Command::AllocTouchExit { bytes: 100 * MIB });
}

/// Servers behind sockets of the directory that are no monitors.
fn bad_servers(scene: &Scene) {
    let endless = "HTTP/1.1 200 OK\r\nServer: ebb/1\r\nContent-Length: 999999999999\r\n\r\n";
    let wrong = "HTTP/1.1 200 OK\r\nServer: ebb/1\r\nContent-Length: 2\r\n\r\n[]";
    let other = "HTTP/1.1 200 OK\r\nServer: nginx\r\nContent-Length: 2\r\n\r\n{}";
    for (name, text) in [
        ("silent", ""),
        ("garbage", "\x1b[31mgarbage\r\n\r\n\r\n"),
        ("endless", endless),
        ("wrong", wrong),
        ("other", other),
    ] {
        let listener = UnixListener::bind(folder(scene).join(format!("{name}.sock"))).unwrap();
        let text = text.to_owned();
        thread::spawn(move || {
            while let Ok((mut client, _)) = listener.accept() {
                let text = text.clone();
                // An answer to each request, until the client hangs up.
                thread::spawn(move || {
                    while client.read(&mut [0; 4096]).is_ok_and(|read| read > 0) {
                        let _ = client.write_all(text.as_bytes());
                    }
                });
            }
        });
    }
}

fn bad_monitors(scene: &Scene) {
    bad_servers(scene);
    fs::write(folder(scene).join("file.sock"), "no socket").unwrap();
    let dead = UnixListener::bind(folder(scene).join("dead.sock")).unwrap();
    drop(dead);
    let stopped = machine(scene, "stopped");
    let good = machine(scene, "good");
    good.run(Command::AllocTouchExit { bytes: 200 * MIB });
    stopped.signal(Signal::STOP);
    let before = good.resident();
    let daemon = Daemon::start(scene, PRESSED);
    eventually("the good machine is taken care of", 60, || {
        let now = good.resident();
        when(now + 150 * MIB < before, || format!("{before} -> {now}"))
    });
    for (name, words) in [
        ("silent", "did not answer within"),
        ("stopped", "did not answer within"),
        ("garbage", "not understood"),
        ("endless", "did not answer within"),
        ("wrong", "not understood"),
        ("other", "calls itself 'nginx'"),
        ("dead", "not served"),
    ] {
        eventually("its trouble is shown", 30, || {
            let shown = daemon.machine(name);
            let trouble = shown["trouble"].as_str().unwrap_or_default();
            when(trouble.contains(words), || format!("{name}: {shown}"))
        });
    }
    let text = daemon.text(&["status"]);
    assert!(!text.contains('\x1b') && !text.contains("file"), "{text}");
    let log = fs::read_to_string(scene.path("ebbd.log")).unwrap();
    assert!(log.len() < 10_000, "{} bytes: {log}", log.len());
    // It goes on as soon as it answers; a socket that vanishes is no longer shown.
    stopped.signal(Signal::CONT);
    fs::remove_file(folder(scene).join("other.sock")).unwrap();
    eventually("the stopped monitor is back", 60, || {
        let shown = daemon.machine("stopped");
        let status = daemon.json(&["status"]).to_string();
        let is_back = shown["trouble"].is_null() && shown["machine"].is_object();
        when(is_back && !status.contains("other"), || status)
    });
}

/// KSM has the configured settings while a daemon runs, and then those from before, also if the
/// first daemon was killed.
fn settings_of_ksm(scene: &Scene) {
    let host = KsmGuard::new(Ksm::open(Path::new(SYSFS)).unwrap()).unwrap();
    let before = Values::new().with(Knob::Run, 0).with(Knob::PagesToScan, 100);
    host.ksm().apply(&before).unwrap();
    let has = |run: u64, pages_to_scan: u64| {
        let settings = host.ksm().settings().unwrap();
        let found = [Knob::Run, Knob::PagesToScan].map(|knob| settings.get(knob));
        when(found == [Some(run), Some(pages_to_scan)], || format!("{settings:?}"))
    };
    folder(scene);
    let text =
        |pages_to_scan: u64| format!("{PLENTY}[ksm]\nrun = 1\npages_to_scan = {pages_to_scan}\n");
    let mut daemon = Daemon::start(scene, &text(500));
    has(1, 500).unwrap();
    Daemon::configure(scene, &text(700));
    daemon.text(&["settings", "--reload"]);
    has(1, 700).unwrap();
    daemon.end(Signal::KILL);
    has(1, 700).unwrap();
    drop(daemon);
    let mut daemon = Daemon::start(scene, &text(800));
    has(1, 800).unwrap();
    assert_eq!(daemon.end(Signal::TERM), Some(0));
    has(0, 100).unwrap();
}

/// Machines that are not in use are kept in files when the host is pressed. One whose snapshot
/// cannot be written goes on.
fn parked_machines_are_stopped(scene: &Scene) {
    // What cheaper means take is not enough.
    let policy = format!(
        "{PRESSED}machines = {{ \"old-*\" = \"old\" }}\n\
         [policy.profiles.old]\nclass = \"parked\"\nfloor_bytes = 536870912\n"
    );
    let mut guest = machine(scene, "old-1");
    guest.write_file("/tmp/note", "kept");
    // There is no such directory.
    let mut daemon = Daemon::start(scene, &policy);
    eventually("it is to be stopped", 60, || {
        let log = fs::read_to_string(scene.path("ebbd.log")).unwrap();
        when(log.contains("old-1\" action=Stop") && log.contains("No such file"), || log)
    });
    assert!(guest.is_running());
    eventually("it goes on", 20, || {
        let state = guest.vm().state;
        when(state == VmState::Running, || format!("{state:?}"))
    });
    assert_eq!(daemon.end(Signal::TERM), Some(0));
    fs::create_dir(scene.path("snapshots")).unwrap();
    let daemon = Daemon::start(scene, &policy);
    let (code, log) = guest.wait_end();
    assert_eq!(code, Some(7), "{log}");
    let file = scene.path("snapshots/old-1.snapshot");
    eventually("the machine has gone", 20, || {
        let status = daemon.json(&["status"]);
        when(status["machines"].as_array().unwrap().is_empty(), || status.to_string())
    });
    let names: Vec<_> = fs::read_dir(scene.path("snapshots")).unwrap().collect();
    assert_eq!(names.len(), 1, "{names:?}");
    drop(daemon);
    let restored = Restore::new(scene, &file).args(["--verify"]).start();
    assert_eq!(restored.read_file("/tmp/note"), "kept");
    assert_eq!(restored.wrong_pages(), 0);
}
