//! Parking: an idle guest becomes small without harm, and whatever it cannot do is said.

use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::process::Command as Program;
use std::time::Duration;

use ebb_agent::protocol::Command;
use ebb_vmm::api::{
    Client, ClientError, ParkReport, ParkStage, ParkStageEnd, ParkStageName, ParkStatus, VmState,
};
use serde_json::{Value, json};

use crate::guest::{Guest, MIB};
use crate::harness::{Scene, Test, eventually, when};
use crate::module_support::Module;
use crate::place::GUEST_AGENT;
use crate::setup::Setup;

/// The tests.
pub const TESTS: &[Test] = &[
    Test::new("park::evicts_cold_caches", 240, evicts_cold_caches),
    Test::new("park::with_ebb_balloon", 240, with_ebb_balloon),
    Test::new("park::with_the_agent", 240, with_the_agent),
    Test::new("park::of_a_busy_guest", 300, of_a_busy_guest),
    Test::new("park::what_is_not_possible", 240, what_is_not_possible),
    Test::new("park::interrupted", 240, interrupted),
    Test::new("park::of_a_machine_that_changes", 240, of_a_machine_that_changes),
];

/// File caches of a guest.
const CACHES: u64 = 128 * MIB;
/// Memory of a program that goes on.
const HELD: u64 = 48 * MIB;

/// A guest of 512 MiB with a disk of [`CACHES`] bytes that are not zero.
fn with_disk(scene: &Scene) -> Setup<'_> {
    let path = scene.path("disk");
    let file = File::create(&path).unwrap();
    let block: Vec<u8> = (0..MIB).map(|index| (index % 251) as u8 + 1).collect();
    for number in 0..CACHES / MIB {
        file.write_all_at(&block, number * MIB).unwrap();
    }
    Setup::new(scene).args(["--disk", &format!("path={},readonly=on", path.display())])
}

/// Leaves behind what an idle guest has: a program, cold file caches, freed memory.
fn work(guest: &Guest) {
    // Linux drops the caches of a block device when it is closed for the last time.
    let keep_open = "sleep 100000 < /dev/vda > /dev/null 2>&1 &";
    let argv = ["/bin/busybox", "sh", "-c", keep_open].map(str::to_owned);
    guest.run(Command::Exec { argv: argv.to_vec() });
    guest.run(Command::Hold { bytes: HELD, pattern: 31 });
    read_disk(guest);
    guest.run(Command::AllocTouchExit { bytes: 160 * MIB });
}

fn read_disk(guest: &Guest) {
    guest.run(Command::TouchFile { path: "/dev/vda".to_owned(), bytes: CACHES });
}

fn request(guest: &Guest, body: &Value) -> Result<ParkReport, ClientError> {
    Client::new(guest.socket(), Duration::from_secs(60)).put_json("/vm/park", body)
}

#[track_caller]
fn park(guest: &Guest, body: &Value) -> ParkReport {
    request(guest, body).unwrap_or_else(|error| panic!("{body}: {error}"))
}

/// A counter of the host's `/proc/vmstat`.
pub fn host_counter(name: &str) -> u64 {
    let text = std::fs::read_to_string("/proc/vmstat").unwrap();
    let value = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
    value.unwrap_or_else(|| panic!("no {name}")).parse().unwrap()
}

/// Has the host's kernel split huge pages of which parts were discarded, as it does when it is
/// short of memory (Linux mm/huge_memory.c, `deferred_split_scan`); returns their number.
fn split_rest_of_huge_pages() -> u64 {
    let before = host_counter("thp_split_page");
    std::fs::write("/proc/sys/vm/drop_caches", "2").unwrap();
    host_counter("thp_split_page") - before
}

fn stage(report: &ParkReport, name: ParkStageName) -> &ParkStage {
    report.stages.iter().find(|stage| stage.stage == name).expect("all stages are in the report")
}

/// Nothing of the guest's is lost, and its balloon is as before.
fn check_well(guest: &Guest) {
    let balloon = guest.balloon();
    assert_eq!((balloon.target_bytes, balloon.actual_bytes), (0, 0), "{balloon:?}");
    assert_eq!(guest.wrong_pages(), 0);
    assert_eq!(guest.value("/proc/vmstat", "oom_kill"), 0);
}

/// With Linux's driver, and no reporting: all comes from the pulse.
fn evicts_cold_caches(scene: &Scene) {
    let guest = with_disk(scene).start();
    let status: ParkStatus = guest.client().get("/vm/park").unwrap();
    assert_eq!(status, ParkStatus { last: None, since: None });
    work(&guest);
    let before = guest.resident();
    assert!(before > CACHES + HELD + 160 * MIB, "{before} bytes");

    let split_before = host_counter("thp_split_page");
    let report = park(&guest, &json!({}));
    let split = host_counter("thp_split_page") - split_before;
    let left = split_rest_of_huge_pages();
    assert!(split > 0 && left <= split, "{split} huge pages were split, {left} not: {report:?}");
    assert_eq!(stage(&report, ParkStageName::Report).end, ParkStageEnd::Skipped, "{report:?}");
    let evict = stage(&report, ParkStageName::Evict);
    assert_eq!((evict.end, evict.reason.as_deref()), (ParkStageEnd::Done, None), "{report:?}");
    assert!(evict.returned_bytes > CACHES * 3 / 4 + 150 * MIB, "{report:?}");
    assert_eq!(stage(&report, ParkStageName::Trim).end, ParkStageEnd::Done, "{report:?}");
    assert!(report.resident_bytes < HELD + 128 * MIB, "{report:?}");
    assert!(report.resident_bytes <= guest.resident(), "{report:?}");
    check_well(&guest);

    // What the guest reads again is seen.
    read_disk(&guest);
    let status: ParkStatus = guest.client().get("/vm/park").unwrap();
    let since = status.since.unwrap();
    assert_eq!(status.last, Some(report));
    assert!(since.caches_grown_bytes.unwrap() > CACHES * 3 / 4, "{since:?}");

    // It keeps what it is to keep, caches included.
    let available = guest.meminfo("MemAvailable");
    let keep = available - 64 * MIB;
    let report = park(&guest, &json!({ "keep_bytes": keep }));
    let evict = stage(&report, ParkStageName::Evict);
    assert_eq!(evict.end, ParkStageEnd::Done, "{report:?}");
    let cached = guest.meminfo("Cached") + guest.meminfo("Buffers");
    assert!(cached > CACHES * 3 / 4, "{cached} bytes of caches: {report:?}");
    check_well(&guest);
}

/// With Ebb's driver, free memory is reported at once, in fragments of any size.
fn with_ebb_balloon(scene: &Scene) {
    let setup = with_disk(scene).balloon("reporting=on,verify_reports=on");
    let module = Module::start(setup, &["tracker=none"]);
    let guest = &module.guest;
    work(guest);
    let report = park(guest, &json!({}));
    let evict = stage(&report, ParkStageName::Evict);
    assert_eq!(evict.end, ParkStageEnd::Done, "{report:?}");
    assert!(evict.returned_bytes > CACHES / 2 + 120 * MIB, "{report:?}");
    assert_eq!(stage(&report, ParkStageName::Report).end, ParkStageEnd::Done, "{report:?}");
    // Nothing that is free is resident, apart from what the guest has freed since.
    let used = 512 * MIB - guest.meminfo("MemFree");
    assert!(report.resident_bytes < used + 8 * MIB, "{used} bytes in use: {report:?}");
    check_well(guest);
    guest.run(Command::AllocTouchExit { bytes: 300 * MIB });
    check_well(guest);
    module.check_well();
}

/// The guest's kernel evicts on the agent's request, and Linux reports what is free by itself.
fn with_the_agent(scene: &Scene) {
    let vsock = format!("cid=8,path={}", scene.path("vsock").display());
    let guest = with_disk(scene)
        .initrd(&scene.world.hostile_initrd)
        .args(["--vsock", &vsock])
        .balloon("reporting=on")
        .start();
    let socket = guest.socket().display().to_string();
    let ebb = |arguments: &[&str]| {
        let output = Program::new(&scene.world.ebb).args(arguments).output().unwrap();
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        (output.status.code(), text(&output.stdout), text(&output.stderr))
    };
    let park = || ebb(&["ctl", &socket, "park", "--agent", "--json"]);
    let (code, _, error) = park();
    assert!(code == Some(1) && error.contains("install ebb-guest-agent"), "{code:?} {error}");
    let agent = guest.send(Command::Exec { argv: vec![GUEST_AGENT.to_owned()] });
    guest.wait_started(agent);
    let shell = |script: &str| {
        let arguments = ["exec", "--wait", "60", &socket, "--", "/bin/busybox", "sh", "-c", script];
        let (code, _, error) = ebb(&arguments);
        assert_eq!(code, Some(0), "{error}");
    };
    shell("ln -s busybox /bin/sh");
    let (code, _, error) = park();
    assert!(code == Some(1) && error.contains("cgroup v2"), "{code:?} {error}");
    shell("mount -t cgroup2 none /sys/fs/cgroup");

    work(&guest);
    let before = guest.resident();
    let (code, report, error) = park();
    assert_eq!(code, Some(0), "{error}");
    let report: ParkReport = serde_json::from_str(&report).unwrap();
    let names: Vec<_> = report.stages.iter().map(|stage| (stage.stage, stage.end)).collect();
    let all = [ParkStageName::Evict, ParkStageName::Report, ParkStageName::Trim];
    assert_eq!(names, all.map(|name| (name, ParkStageEnd::Done)), "{report:?}");
    assert!(report.resident_bytes + CACHES / 2 + 120 * MIB < before, "{before}: {report:?}");
    let cached = guest.meminfo("Cached") + guest.meminfo("Buffers");
    assert!((12 * MIB..CACHES / 2).contains(&cached), "{cached} bytes of caches: {report:?}");
    check_well(&guest);
}

/// A guest that uses its memory keeps it, although its driver may not deflate on its own.
fn of_a_busy_guest(scene: &Scene) {
    let guest =
        with_disk(scene).args(["--cpus", "2"]).balloon("reporting=on,deflate_on_oom=off").start();
    guest.run(Command::Hold { bytes: HELD, pattern: 32 });
    let mut ends = Vec::new();
    for _ in 0..4 {
        let program = guest.send(Command::AllocTouchExit { bytes: 280 * MIB });
        let report = park(&guest, &json!({ "keep_bytes": 64 * MIB }));
        ends.push(stage(&report, ParkStageName::Evict).end);
        guest.outcome(program).unwrap_or_else(|error| panic!("{error}: {report:?}"));
        check_well(&guest);
    }
    assert!(ends.contains(&ParkStageEnd::Stopped), "{ends:?}");
}

/// Each stage that a guest does not allow is skipped with its reason, and the others are done.
fn what_is_not_possible(scene: &Scene) {
    let guest = Setup::new(scene).memory("size=256M").balloon("statistics=off").start();
    let (status, message) = guest.refused("PUT", "/vm/park", r#"{"keep_bytes": 268435457}"#);
    assert!(
        status == 422 && message.contains("keep_bytes") | message.contains("memory"),
        "{message}"
    );
    let (status, _) = guest.refused("PUT", "/vm/park", r#"{"timeout_ms": 1}"#);
    assert_eq!(status, 422);
    let reason = |report: &ParkReport, name| {
        let stage = stage(report, name);
        assert_eq!(stage.end, ParkStageEnd::Skipped, "{report:?}");
        stage.reason.clone().unwrap()
    };
    let report = park(&guest, &json!({}));
    let evict = reason(&report, ParkStageName::Evict);
    assert!(evict.contains("statistics"), "{evict}");
    let trim = stage(&report, ParkStageName::Trim);
    assert!(trim.end == ParkStageEnd::Done && trim.returned_bytes > 0, "{report:?}");

    guest.put("/vm/pause");
    let report = park(&guest, &json!({}));
    for name in [ParkStageName::Report, ParkStageName::Evict] {
        let reason = reason(&report, name);
        assert!(reason.contains("not running") || reason.contains("statistics"), "{reason}");
    }
    assert_eq!(guest.vm().state, VmState::Paused);
    guest.put("/vm/resume");
    guest.set_target(32 * MIB);
    guest.inflate_to(32 * MIB);
    drop(guest);

    // A balloon that is already on its way is its user's.
    let guest = Setup::new(scene).memory("size=256M").socket("second").start();
    guest.set_target(256 * MIB);
    let evict = reason(&park(&guest, &json!({})), ParkStageName::Evict);
    assert!(evict.contains("not reached its target"), "{evict}");
    guest.set_target(16 * MIB);
    eventually("the balloon shrinks", 60, || {
        let info = guest.balloon();
        when(info.actual_bytes == 16 * MIB, || format!("{info:?}"))
    });
    // Its size stays the same.
    let report = park(&guest, &json!({}));
    assert_eq!(stage(&report, ParkStageName::Evict).end, ParkStageEnd::Done, "{report:?}");
    let info = guest.balloon();
    assert_eq!((info.target_bytes, info.actual_bytes), (16 * MIB, 16 * MIB));

    let driverless = Module::start_without(Setup::new(scene).memory("size=256M").socket("third"));
    let report = park(&driverless.guest, &json!({}));
    let evict = reason(&report, ParkStageName::Evict);
    assert!(evict.contains("no driver"), "{evict}");
}

/// Starts a parking, does something while the balloon is being inflated, and returns the answer.
fn park_and<T>(guest: &Guest, then: impl FnOnce() -> T) -> (Result<ParkReport, ClientError>, T) {
    std::thread::scope(|threads| {
        let asking = threads.spawn(|| request(guest, &json!({})));
        eventually("the balloon is being inflated", 20, || {
            let info = guest.balloon();
            when(info.target_bytes > 0, || format!("{info:?}"))
        });
        let done = then();
        (asking.join().unwrap(), done)
    })
}

fn wait_for_an_empty_balloon(guest: &Guest) {
    eventually("the balloon is empty again", 60, || {
        let info = guest.balloon();
        when(info.target_bytes == 0 && info.actual_bytes == 0, || format!("{info:?}"))
    });
}

/// A client that leaves, and other requests meanwhile.
fn interrupted(scene: &Scene) {
    let guest = with_disk(scene).start();
    work(&guest);
    std::thread::scope(|threads| {
        // Its client gives up after a moment, and closes its connection.
        let limit = Duration::from_millis(300);
        let client = Client::new(guest.socket(), limit);
        let asking = threads.spawn(move || client.put_json::<ParkReport>("/vm/park", &json!({})));
        eventually("the balloon is being inflated", 20, || {
            let info = guest.balloon();
            when(info.target_bytes > 0 || asking.is_finished(), || format!("{info:?}"))
        });
        if !asking.is_finished() {
            let (status, message) = guest.refused("PUT", "/vm/park", "");
            assert!(status == 409, "{status} {message}");
        }
        drop(asking.join());
    });
    wait_for_an_empty_balloon(&guest);
    check_well(&guest);

    // Another user of the balloon has the last word.
    let (report, ()) = park_and(&guest, || guest.set_target(64 * MIB));
    let report = report.unwrap();
    let evict = stage(&report, ParkStageName::Evict);
    assert_eq!(evict.end, ParkStageEnd::Stopped, "{report:?}");
    assert!(evict.reason.as_ref().unwrap().contains("target was changed"), "{report:?}");
    assert_eq!(guest.balloon().target_bytes, 64 * MIB);
}

/// A machine that is paused, starts again, or ends meanwhile.
fn of_a_machine_that_changes(scene: &Scene) {
    let mut guest = with_disk(scene).start();
    work(&guest);
    let (report, ()) = park_and(&guest, || guest.put("/vm/pause"));
    let report = report.unwrap();
    assert_eq!(stage(&report, ParkStageName::Evict).end, ParkStageEnd::Stopped, "{report:?}");
    assert_eq!((guest.balloon().target_bytes, guest.vm().state), (0, VmState::Paused));
    guest.put("/vm/resume");
    wait_for_an_empty_balloon(&guest);
    check_well(&guest);

    let (report, _) = park_and(&guest, || {
        guest.send(Command::Reboot);
        guest.wait_ready(2)
    });
    // It may have ended before the guest did.
    report.unwrap();
    wait_for_an_empty_balloon(&guest);
    check_well(&guest);

    // At once: there is no answer.
    drop(park_and(&guest, || guest.put("/vm/kill")));
    let (code, log) = guest.wait_end();
    assert_eq!(code, Some(7), "{log}");
}
