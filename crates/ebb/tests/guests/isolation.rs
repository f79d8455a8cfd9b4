//! What a running monitor has given up, as the kernel reports it.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command as Program;

use ebb_agent::protocol::Command;
use rustix::process::Signal;
use serde_json::Value;

use crate::guest::{Guest, MIB};
use crate::harness::{Machine, Scene, Test, eventually, when};
use crate::setup::Setup;

/// The tests.
pub const TESTS: &[Test] = &[
    Test::new("isolation::nothing_is_left", 240, nothing_is_left),
    Test::new("isolation::as_requested", 300, as_requested),
    Test::new("isolation::of_an_ordinary_user", 240, of_an_ordinary_user),
];

/// The lines of `ebb doctor --vm` by name, with their grades, and its exit code.
fn doctor(scene: &Scene, guest: &Guest) -> (Vec<(String, String, String)>, Option<i32>) {
    let output = Program::new(&scene.world.ebb)
        .args(["doctor", "--json", "--vm"])
        .arg(guest.socket())
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    let report: Value = serde_json::from_str(&text).unwrap_or_else(|error| {
        panic!("{error}: {text} {}", String::from_utf8_lossy(&output.stderr))
    });
    let word = |check: &Value, field: &str| check[field].as_str().unwrap_or_default().to_owned();
    let checks = report["checks"].as_array().expect("checks").iter();
    let checks =
        checks.map(|check| (word(check, "name"), word(check, "grade"), word(check, "found")));
    (checks.collect(), output.status.code())
}

fn limit(guest: &Guest, name: &str) -> String {
    let limits = fs::read_to_string(format!("/proc/{}/limits", guest.pid())).unwrap();
    let line = limits.lines().find_map(|line| line.strip_prefix(name));
    line.unwrap_or_default().split_ascii_whitespace().take(2).collect::<Vec<_>>().join(" ")
}

fn namespaces(pid: &str) -> Vec<String> {
    ["mnt", "net", "ipc", "uts"]
        .map(|name| fs::read_link(format!("/proc/{pid}/ns/{name}")).unwrap())
        .map(|link| link.display().to_string())
        .to_vec()
}

fn nothing_is_left(scene: &Scene) {
    let disk = scene.path("disk");
    fs::write(&disk, vec![0; 1 << 20]).unwrap();
    let mut path = std::ffi::OsString::from("path=");
    path.push(&disk);
    let start = |name: &str| {
        let setup = Setup::new(scene).socket(name).args(["--cpus", "2", "--rng"]);
        setup.arg_os("--disk", &path)
    };
    let mut guest = start("api").start();
    let (checks, code) = doctor(scene, &guest);
    assert_eq!(code, Some(0), "{checks:?}");
    let not_ok: BTreeSet<_> =
        checks.iter().filter(|(_, grade, _)| grade != "ok").map(|(name, ..)| &**name).collect();
    // Nothing was requested of the first; Debian's cloud kernels lack the second.
    assert!(not_ok.is_subset(&BTreeSet::from(["cgroup", "core scheduling"])), "{checks:?}");

    // The same as other processes see it.
    let process = format!("/proc/{}", guest.pid());
    let owner = fs::metadata(format!("{process}/maps")).unwrap().uid();
    assert_eq!(owner, 0, "the monitor can be traced by processes of its user");
    assert_eq!(fs::read_dir(format!("{process}/root/")).unwrap().count(), 0);
    let (ours, theirs) = (namespaces("self"), namespaces(&guest.pid().to_string()));
    assert!(ours.iter().zip(&theirs).all(|(ours, theirs)| ours != theirs), "{theirs:?}");
    assert_eq!(limit(&guest, "Max core file size"), "0 0");
    for entry in fs::read_dir(format!("{process}/fd")).unwrap() {
        let path = entry.unwrap().path();
        // Through a directory, files could be reached in spite of the empty root.
        assert!(!fs::metadata(&path).is_ok_and(|file| file.is_dir()), "{}", path.display());
    }

    // Everything that was opened still works.
    guest.run(Command::Hold { bytes: 8 * MIB, pattern: 3 });
    guest.inflate_to(32 * MIB);
    guest.put("/vm/trim");
    guest.statistics().unwrap();
    assert!(guest.metric("ebb_process_resident_bytes") > 8 * MIB);
    guest.send(Command::Reboot);
    guest.wait_ready(2);

    // Killed, it leaves no socket behind: its companion removes it.
    guest.signal(Signal::KILL);
    guest.wait_end();
    let socket = guest.socket().clone();
    eventually("the companion removes the socket", 20, || {
        when(!socket.exists(), || "it exists".to_owned())
    });
}

fn user_of(guest: &Guest) -> (u32, u32) {
    let isolation = guest.vm().isolation;
    let status = fs::read_to_string(format!("/proc/{}/status", guest.pid())).unwrap();
    assert!(status.contains(&format!("Uid:\t{}\t", isolation.uid)), "{status}");
    (isolation.uid, isolation.gid)
}

fn as_requested(scene: &Scene) {
    let first = Setup::new(scene).args(["--user", "1234:1235"]).start();
    assert_eq!(user_of(&first), (1234, 1235));
    drop(first);

    // Each machine is another user.
    let monitors = ["a", "b", "c"].map(|name| Setup::new(scene).socket(name).start_api());
    let users: BTreeSet<_> = monitors.iter().map(user_of).collect();
    assert_eq!(users.len(), 3, "{users:?}");
    drop(monitors);

    let off = Setup::new(scene).args(["--isolate", "off"]).start();
    let (checks, code) = doctor(scene, &off);
    assert_eq!((code, user_of(&off)), (Some(1), (0, 0)), "{checks:?}");
    assert_eq!(namespaces("self"), namespaces(&off.pid().to_string()));
    drop(off);

    let Machine::Emulated(_) = scene.world.machine else { return };
    let root = Path::new("/sys/fs/cgroup");
    let parent = root.join("ebb-test");
    fs::create_dir(&parent).unwrap();
    for cgroup in [root, &parent] {
        let _ = fs::write(cgroup.join("cgroup.subtree_control"), "+memory +pids +cpu");
    }
    let wanted = "path=ebb-test/vm,memory_max=900M,memory_high=800M,pids_max=99";
    let guest = Setup::new(scene).args(["--cgroup", wanted]).start();
    let folder = parent.join("vm");
    let read = |name: &str| fs::read_to_string(folder.join(name)).unwrap().trim().to_owned();
    // KVM's kernel threads for the machine are there, too.
    let pid = guest.pid().to_string();
    assert!(read("cgroup.procs").lines().any(|line| line == pid), "{}", read("cgroup.procs"));
    assert_eq!(read("memory.max"), (900 * MIB).to_string());
    assert_eq!((read("memory.high"), read("pids.max")), ((800 * MIB).to_string(), "99".to_owned()));
    // Its memory is charged there.
    guest.run(Command::Hold { bytes: 64 * MIB, pattern: 3 });
    assert!(read("memory.current").parse::<u64>().unwrap() > 64 * MIB);
    // Its companion removes it, as it has not existed before.
    drop(guest);
    eventually("the cgroup is removed", 20, || when(!folder.exists(), || "it exists".to_owned()));
}

/// A user with access to KVM and nothing else.
const USER: u32 = 1000;

fn of_an_ordinary_user(scene: &Scene) {
    // The permissions of the device are those of the machine.
    let Machine::Emulated(_) = scene.world.machine else { return };
    fs::set_permissions("/dev/kvm", fs::Permissions::from_mode(0o666)).unwrap();
    let folder = scene.path("user");
    fs::create_dir(&folder).unwrap();
    chown(&folder, Some(USER), Some(USER)).unwrap();
    fs::set_permissions(scene.path(""), fs::Permissions::from_mode(0o755)).unwrap();
    let setup = || Setup::new(scene).socket("user/api");
    let start = |limited: bool| {
        let setup = setup();
        let mut program = setup.program();
        program.uid(USER).gid(USER);
        let switch = Path::new("/proc/sys/user/max_user_namespaces");
        let before = fs::read_to_string(switch).unwrap();
        if limited {
            fs::write(switch, "0").unwrap();
        }
        let guest = Guest::spawn(program, scene.path("user/api"), &scene.guests());
        guest.wait_ready(1);
        fs::write(switch, before).unwrap();
        guest
    };
    // In a user namespace.
    let guest = start(false);
    assert_eq!(user_of(&guest), (USER, USER));
    let isolation = guest.vm().isolation;
    assert!(isolation.namespaces.iter().any(|name| name == "user"), "{isolation:?}");
    assert!(isolation.empty_root, "{isolation:?}");
    assert_eq!(fs::read_dir(format!("/proc/{}/root/", guest.pid())).unwrap().count(), 0);
    let (checks, code) = doctor(scene, &guest);
    assert_eq!(code, Some(0), "{checks:?}");
    drop(guest);

    // Where the host has none for users, Landlock.
    let guest = start(true);
    let isolation = guest.vm().isolation;
    assert!(isolation.namespaces.is_empty() && !isolation.empty_root, "{isolation:?}");
    assert!(isolation.landlock, "{isolation:?}");
    assert!(isolation.missing.iter().any(|what| what.starts_with("namespaces")), "{isolation:?}");
    let (checks, code) = doctor(scene, &guest);
    assert_eq!(code, Some(0), "{checks:?}");
    guest.put("/vm/trim");
}
