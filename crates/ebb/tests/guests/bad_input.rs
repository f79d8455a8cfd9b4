//! Invalid requests: a message that names the cause and the remedy, an exit code, and no files left
//! behind.

use std::fs::{self, File};
use std::io::Read;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command as Program, Stdio};
use std::thread;

use ebb_agent::protocol::Command;
use ebb_vmm::api::{ClientError, VmState};
use serde_json::{Value, json};

use crate::guest::MIB;
use crate::harness::{Scene, Test, eventually};
use crate::setup::Setup;

/// The tests.
pub const TESTS: &[Test] = &[
    Test::new("bad_input::kernels_and_images", 240, kernels_and_images),
    Test::new("bad_input::sizes_and_options", 240, sizes_and_options),
    Test::new("bad_input::isolation", 240, isolation),
    Test::new("bad_input::cgroup_without_rights", 120, cgroup_without_rights),
    Test::new("bad_input::descriptors", 240, descriptors),
    Test::new("bad_input::sockets", 240, sockets),
    Test::new("bad_input::disks", 240, disks),
    Test::new("bad_input::kvm_without_permission", 120, kvm_without_permission),
];

/// Runs a program that must end by itself with this code and print all of these words.
#[track_caller]
fn expect_failure(mut program: Program, code: i32, words: &[&str]) {
    program.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
    let mut process = program.spawn().unwrap();
    let mut errors = process.stderr.take().unwrap();
    let reader = thread::spawn(move || {
        let mut text = String::new();
        let _ = errors.read_to_string(&mut text);
        text
    });
    let status = eventually("the monitor refuses", 20, || {
        process.try_wait().unwrap().ok_or_else(|| format!("it runs: {program:?}"))
    });
    let text = reader.join().unwrap();
    assert_eq!(status.code(), Some(code), "{program:?}\n{text}");
    for word in words {
        assert!(text.contains(word), "'{word}' is missing for {program:?}:\n{text}");
    }
    assert!(!text.contains("panicked"), "{text}");
    let causes = text.matches("os error").count();
    assert!(causes <= 1, "the cause is printed {causes} times: {text}");
}

/// As [`expect_failure`], for a setup whose socket must not be left behind.
#[track_caller]
fn refuse(scene: &Scene, setup: &Setup<'_>, code: i32, words: &[&str]) {
    expect_failure(setup.program(), code, words);
    assert!(!scene.path("api").exists(), "the socket is left behind");
}

fn kernels_and_images(scene: &Scene) {
    let setup = || Setup::new(scene);
    let missing = scene.path("missing");
    refuse(scene, &setup().kernel(&missing), 1, &["missing", "No such file"]);
    refuse(scene, &setup().initrd(&missing), 1, &["missing", "No such file"]);
    refuse(scene, &setup().kernel(&scene.path("")), 1, &["directory"]);

    let text = scene.path("text");
    fs::write(&text, "This is no kernel. ".repeat(1000)).unwrap();
    refuse(scene, &setup().kernel(&text), 1, &["text", "bzImage"]);
    let empty = scene.path("empty");
    fs::write(&empty, "").unwrap();
    refuse(scene, &setup().kernel(&empty), 1, &["empty"]);
    // A truncated kernel.
    for kernel in [&scene.world.bzimage, &scene.world.vmlinux] {
        let cut = scene.path("cut");
        let whole = fs::read(kernel).unwrap();
        fs::write(&cut, &whole[..whole.len() / 2]).unwrap();
        refuse(scene, &setup().kernel(&cut), 1, &["cut"]);
    }
    // A program of this machine is an ELF file, but not a kernel.
    refuse(scene, &setup().kernel(&scene.world.busybox), 1, &["busybox"]);

    let large = scene.path("large");
    File::create(&large).unwrap().set_len(600 << 20).unwrap();
    refuse(scene, &setup().initrd(&large), 1, &["large", "--memory"]);
    refuse(scene, &setup().memory("size=16M"), 1, &["memory"]);
    refuse(scene, &setup().words(&"x".repeat(5000)), 1, &["command line"]);
}

fn sizes_and_options(scene: &Scene) {
    let setup = || Setup::new(scene);
    for (memory, words) in [
        ("size=1M", ["--memory", "16M"]),
        ("size=513M", ["--memory", "514M"]),
        ("size=100", ["--memory", "16M"]),
        ("size=12X", ["--memory", "12X"]),
        ("size=512M,backing=paper", ["paper", "hugetlb"]),
        ("size=512M,colour=red", ["colour", "backing"]),
        ("backing=anon", ["size", "--memory"]),
        ("size=512M,size=1G", ["size", "twice"]),
    ] {
        refuse(scene, &setup().memory(memory), 2, &words);
    }
    refuse(scene, &setup().balloon("size=1G"), 2, &["--balloon", "1G", "512M"]);
    refuse(scene, &setup().balloon("reporting=perhaps"), 2, &["perhaps", "on"]);
    for option in [
        "page_bitmap",
        "page_ranges",
        "host_requests",
        "init_reported",
        "init_on_inflate",
        "verify_reports",
    ] {
        refuse(
            scene,
            &setup().balloon(&format!("{option}=perhaps")),
            2,
            &[option, "perhaps", "on, off"],
        );
    }
    refuse(scene, &setup().args(["--cpus", "0"]), 2, &["--cpus"]);
    refuse(scene, &setup().args(["--cpus", "255"]), 2, &["--cpus", "254"]);
    refuse(scene, &setup().args(["--colour", "red"]), 2, &["--colour"]);
    refuse(scene, &setup().args(["--numa", "size=256M,cpus=0"]), 2, &["--numa", "256M", "512M"]);
    refuse(scene, &setup().args(["--numa", "size=512M,cpus=0-1"]), 2, &["--numa", "vCPU 1"]);
    refuse(scene, &setup().args(["--numa", "size=512M,cpus=0,host_node=63"]), 1, &["63"]);
    // More than KVM supports, and more than any machine has.
    refuse(scene, &setup().memory("size=64T"), 1, &["KVM", "--memory"]);
    refuse(scene, &setup().memory("size=200T"), 1, &["memory", "address space"]);
    refuse(scene, &setup().memory("size=64T,prealloc=on"), 1, &["in advance", "host has"]);
    refuse(scene, &setup().memory("size=1T,backing=hugetlb"), 1, &["huge pages", "nr_hugepages"]);
}

/// Requests for isolation that this host cannot fulfil.
fn isolation(scene: &Scene) {
    let setup = || Setup::new(scene);
    refuse(scene, &setup().args(["--user", "no-such-account"]), 1, &["no-such-account", "--user"]);
    refuse(scene, &setup().args(["--user", "1:2:3"]), 1, &["1:2:3"]);
    refuse(
        scene,
        &setup().args(["--cgroup", "path=/nowhere/x"]),
        1,
        &["/nowhere/x", "create its parent"],
    );
    let wanted = "path=ebb-bad,cpu_weight=1000000";
    refuse(scene, &setup().args(["--cgroup", wanted]), 1, &["cpu.weight", "ebb-bad"]);
    // What was created is removed again.
    assert!(!Path::new("/sys/fs/cgroup/ebb-bad").exists());
    refuse(scene, &setup().args(["--cgroup", "memory_max=1G"]), 2, &["`path` is missing"]);
    refuse(scene, &setup().args(["--isolate", "maybe"]), 2, &["auto", "off"]);
}

/// An ordinary user in front of root's cgroups.
fn cgroup_without_rights(scene: &Scene) {
    let root = Path::new("/sys/fs/cgroup");
    if !rustix::process::geteuid().is_root() || !root.join("cgroup.procs").exists() {
        // No cgroups of version 2, or none that this user could make.
        return;
    }
    fs::set_permissions(scene.path(""), fs::Permissions::from_mode(0o777)).unwrap();
    let existing = root.join("ebb-of-root");
    fs::create_dir(&existing).unwrap();
    for (name, words) in [
        ("ebb-new", ["create it", "Permission denied", "a cgroup that this user owns"]),
        ("ebb-of-root", ["move to it", "Permission denied", "cgroup.procs"]),
    ] {
        let setup = Setup::new(scene).args(["--cgroup", &format!("path={name}")]);
        let mut program = setup.program();
        program.uid(NOBODY).gid(fs::metadata("/dev/kvm").unwrap().gid());
        expect_failure(program, 1, &words);
        assert!(!scene.path("api").exists(), "the socket is left behind");
    }
    assert!(!root.join("ebb-new").exists());
    fs::remove_dir(&existing).unwrap();
}

/// Descriptors of the wrong kinds for a snapshot and for a migration.
fn descriptors(scene: &Scene) {
    let guest = Setup::new(scene).memory("size=256M").start();
    guest.run(Command::Hold { bytes: 32 * MIB, pattern: 9 });
    let diary = scene.path("diary");
    fs::write(&diary, "not empty").unwrap();
    let empty = scene.path("empty");
    fs::write(&empty, "").unwrap();
    let open = |options: &mut fs::OpenOptions, path: &Path| -> OwnedFd {
        options.open(path).unwrap().into()
    };
    let read = |path: &Path| open(File::options().read(true), path);
    let write = |path: &Path| open(File::options().write(true), path);
    let pipe = || OwnedFd::from(std::io::pipe().unwrap().1);
    let socket = || OwnedFd::from(UnixStream::pair().unwrap().0);
    let unusable = |descriptor: OwnedFd| [socket(), descriptor].into();
    let snapshot = |descriptor: OwnedFd| vec![descriptor];
    let requests: [(&str, Vec<OwnedFd>, &str); 11] = [
        ("snapshot", snapshot(pipe()), "is a FIFO"),
        ("snapshot", snapshot(socket()), "is a socket"),
        ("snapshot", snapshot(read(&scene.path(""))), "is a directory"),
        ("snapshot", snapshot(read(&empty)), "is not open for writing"),
        ("snapshot", snapshot(open(File::options().append(true), &empty)), "O_APPEND"),
        ("snapshot", snapshot(write(&diary)), "is not empty"),
        ("snapshot", vec![write(&empty), write(&empty)], "more than one"),
        ("migrate", unusable(write(&empty)), "descriptor 2 must be a socket"),
        ("migrate", unusable(pipe()), "descriptor 2 must be a socket"),
        ("migrate", unusable(read(&scene.path(""))), "is a directory"),
        ("migrate", vec![socket()], "takes 2 connected sockets"),
    ];
    for (operation, descriptors, words) in requests {
        let borrowed: Vec<_> = descriptors.iter().map(AsFd::as_fd).collect();
        let body = match operation {
            "snapshot" => json!({ "path": "/named" }),
            _ => json!({ "to": "unix:/named", "streams": 1 }),
        };
        let target = format!("/vm/{operation}");
        match guest.client().put_json_with::<Value>(&target, &body, &borrowed) {
            Err(ClientError::Refused { status: 422, detail }) => {
                assert!(detail.message.contains(words), "'{words}' is missing: {detail:?}");
            }
            other => panic!("{operation}, {words}: {other:?}"),
        }
        assert_eq!(guest.vm().state, VmState::Running);
    }
    assert_eq!(fs::read(&diary).unwrap(), b"not empty");
    assert_eq!(fs::read(&empty).unwrap(), b"");
    // A request that is right still works.
    guest.save(&scene.path("vm.snapshot"));
    assert_eq!(guest.wrong_pages(), 0);
}

fn sockets(scene: &Scene) {
    let guest = Setup::new(scene).start();
    // The socket of a running machine is not taken over.
    let socket = guest.socket().display().to_string();
    expect_failure(Setup::new(scene).program(), 1, &[&socket]);
    assert_eq!(guest.vm().pid, guest.pid());
    guest.run(Command::MemInfo);

    let file = scene.path("file");
    fs::write(&file, "precious").unwrap();
    expect_failure(Setup::new(scene).socket("file").program(), 1, &["file"]);
    assert_eq!(fs::read_to_string(&file).unwrap(), "precious");
    expect_failure(Setup::new(scene).socket("no/such/api").program(), 1, &["no/such/api"]);
    expect_failure(Setup::new(scene).socket(&"long".repeat(30)).program(), 1, &["long", "107"]);
}

fn disks(scene: &Scene) {
    let setup = || Setup::new(scene);
    let path = scene.path("disk");
    let disk = format!("path={}", path.display());
    refuse(scene, &setup().args(["--disk", &disk]), 1, &["disk", "No such file"]);
    fs::write(&path, vec![0; 1000]).unwrap();
    refuse(scene, &setup().args(["--disk", &disk]), 1, &["disk", "512"]);
    fs::write(&path, vec![0; 4096]).unwrap();
    let guest = setup().args(["--disk", &disk]).start();
    let name = path.display().to_string();
    for second in [disk.clone(), format!("{disk},readonly=on")] {
        let other = setup().socket("other").args(["--disk", &second]);
        expect_failure(other.program(), 1, &[&name, "in use", "readonly"]);
        assert!(!scene.path("other").exists());
    }
    guest.run(Command::MemInfo);
}

/// Linux's user `nobody`.
const NOBODY: u32 = 65534;

fn kvm_without_permission(scene: &Scene) {
    let mode = fs::metadata("/dev/kvm").unwrap().permissions().mode();
    if !rustix::process::geteuid().is_root() || mode & 0o006 == 0o006 {
        // Access cannot be denied here: this user cannot become another one, or all users may
        // access the device.
        return;
    }
    fs::set_permissions(scene.path(""), fs::Permissions::from_mode(0o777)).unwrap();
    let mut program = Setup::new(scene).program();
    program.uid(NOBODY).gid(NOBODY);
    expect_failure(program, 1, &["/dev/kvm", "permission", "group"]);
    assert!(!scene.path("api").exists());
    assert!(Path::new("/dev/kvm").exists());
}
