//! Snapshots of guests: preserved state, size of the file, several guests from one file, and
//! refused requests.

use std::fs;
use std::os::fd::AsFd as _;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use ebb_agent::protocol::{Command, Event};
use ebb_vmm::api::{Client, CopiedWhile, SnapshotReport, SnapshotTarget, VmState};
use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};

use crate::guest::{GIB, Guest, MIB};
use crate::harness::{Scene, Test, counts, eventually, when};
use crate::saved::{Restore, SAVE_LIMIT, describe};
use crate::setup::Setup;

/// The tests.
pub const TESTS: &[Test] = &[
    Test::new("snapshot::everything_goes_on", 300, everything_goes_on),
    Test::new("snapshot::reboot_after_restore", 300, reboot_after_restore),
    Test::new("snapshot::while_inflating", 300, while_inflating),
    Test::new("snapshot::of_reported_memory_is_small", 400, of_reported_memory_is_small),
    Test::new("snapshot::several_from_one_file", 300, several_from_one_file),
    Test::new("snapshot::paused_or_not", 240, paused_or_not),
    Test::new("snapshot::while_the_guest_runs", 300, while_the_guest_runs),
    Test::new("snapshot::no_room_or_no_place", 240, no_room_or_no_place),
    Test::new("snapshot::bad_files", 240, bad_files),
];

fn shell(guest: &Guest, line: &str) -> serde_json::Value {
    guest
        .run(Command::Exec { argv: ["/bin/busybox", "sh", "-c", line].map(str::to_owned).to_vec() })
}

/// Runs a command line that accesses the guest's disk and must succeed.
#[track_caller]
fn check_disk(guest: &Guest, line: &str) {
    let result = shell(guest, line);
    assert_eq!(result["code"], 0, "{line}: {result}");
}

fn everything_goes_on(scene: &Scene) {
    let (file, disk) = (scene.path("vm.snapshot"), scene.path("disk"));
    fs::write(&disk, vec![0x5a; 8 << 20]).unwrap();
    let guest = Setup::new(scene)
        .balloon("reporting=on,hinting=on,statistics=1s")
        .args(["--cpus", "2", "--disk", &format!("path={}", disk.display())])
        .start();
    guest.run(Command::Hold { bytes: 64 * MIB, pattern: 11 });
    guest.write_file("/tmp/note", "written before");
    check_disk(
        &guest,
        "head -c 1048576 /dev/urandom > /tmp/a && \
         dd if=/tmp/a of=/dev/vda bs=1M conv=notrunc,fsync",
    );
    guest.inflate_to(128 * MIB);
    eventually("statistics", 30, || guest.statistics().map_err(|error| error.to_string()));
    let vm = guest.vm();
    let events = guest.acpi_events();
    // A program that continues after the restore.
    let line = "until [ -e /tmp/go ]; do sleep 0.2; done; echo still here";
    let argv = ["/bin/busybox", "sh", "-c", line].map(str::to_owned).to_vec();
    let program = guest.send(Command::Exec { argv });
    guest.wait_started(program);
    let report = guest.save_and_end(&file);
    assert_eq!(PathBuf::from(&report.path), file);
    assert!(report.ram_bytes >= 64 * MIB && report.stored_bytes >= report.ram_bytes, "{report:?}");
    assert!(report.file_bytes >= 512 * MIB && report.stored_bytes < 512 * MIB, "{report:?}");
    let description = describe(scene, &file);
    assert_eq!(description["machine"]["cpus"], 2, "{description}");
    assert_eq!(description["ram_bytes"], report.ram_bytes, "{description}");

    let image = format!("path={}", disk.display());
    let mut guest = Restore::new(scene, &file).args(["--verify", "--disk", &image]).start();
    assert_eq!(guest.poll(program), None);
    guest.write_file("/tmp/go", "");
    assert_eq!(guest.outcome(program).unwrap()["stdout"], "still here\n");
    assert_eq!(guest.read_file("/tmp/note"), "written before");
    assert_eq!(guest.acpi_events(), events + 1, "a new generation is announced once");
    assert_eq!(guest.read_file("/sys/devices/system/cpu/online"), "0-1\n");
    assert_eq!(guest.wrong_pages(), 0);
    let restored = guest.vm();
    assert_eq!((restored.memory_bytes, restored.state), (vm.memory_bytes, VmState::Running));
    // The disk: earlier writes are there, and new ones work.
    guest.run(Command::DropCaches);
    check_disk(&guest, "head -c 1048576 /dev/vda | cmp - /tmp/a");
    check_disk(&guest, "dd if=/tmp/a of=/dev/vda bs=1M seek=7 conv=notrunc,fsync");
    let content = fs::read(&disk).unwrap();
    assert!(content[..1 << 20] == content[7 << 20..] && content.len() == 8 << 20);
    // The balloon: its size and queues are restored; the device held the statistics buffer.
    let balloon = guest.balloon();
    assert_eq!((balloon.target_bytes, balloon.actual_bytes), (128 * MIB, 128 * MIB));
    eventually("statistics", 30, || guest.statistics().map_err(|error| error.to_string()));
    guest.inflate_to(192 * MIB);
    guest.inflate_to(0);
    let reported = guest.metric("ebb_balloon_reported_bytes_total");
    guest.run(Command::AllocTouchExit { bytes: 200 * MIB });
    eventually("memory is reported", 60, || {
        let now = guest.metric("ebb_balloon_reported_bytes_total");
        when(now > reported + 100 * MIB, || format!("{reported} -> {now}"))
    });
    assert_eq!(guest.wrong_pages(), 0);
    guest.send(Command::PowerOff);
    let (code, log) = guest.wait_end();
    assert_eq!((code, log.as_str()), (Some(0), ""));

    // The guest has written to its disk since the snapshot was taken.
    let (code, log) = Restore::new(scene, &file).args(["--disk", &image]).refused();
    assert_eq!(code, Some(1), "{log}");
    assert!(log.contains("--accept-changed-disks") && log.contains("disk"), "{log}");
    let accepting = ["--disk", &image, "--accept-changed-disks"];
    let guest = Restore::new(scene, &file).args(accepting).start();
    assert_eq!(guest.wrong_pages(), 0);
    guest.end();
}

fn reboot_after_restore(scene: &Scene) {
    let file = scene.path("vm.snapshot");
    let guest = Setup::new(scene).args(["--cpus", "2", "--on-reboot", "reset"]).start();
    guest.run(Command::Hold { bytes: 64 * MIB, pattern: 1 });
    guest.save_and_end(&file);
    let mut guest = Restore::new(scene, &file).start();
    assert_eq!(guest.wrong_pages(), 0);
    guest.send(Command::Reboot);
    match guest.wait_ready(1) {
        Event::Ready { cpus, warnings, .. } => assert_eq!((cpus, warnings), (2, Vec::new())),
        other => panic!("{other:?}"),
    }
    guest.inflate_to(64 * MIB);
    guest.run(Command::Hold { bytes: 32 * MIB, pattern: 2 });
    assert_eq!(guest.wrong_pages(), 0);
    guest.put("/vm/power-button");
    guest.send(Command::PowerOff);
    let (code, log) = guest.wait_end();
    assert_eq!(code, Some(0), "{log}");
    // The action on reboot can be changed.
    let mut guest = Restore::new(scene, &file).args(["--on-reboot", "exit"]).start();
    guest.send(Command::Reboot);
    let (code, log) = guest.wait_end();
    assert_eq!(code, Some(3), "{log}");
}

fn while_inflating(scene: &Scene) {
    let file = scene.path("vm.snapshot");
    let guest = Setup::new(scene).memory("size=160M,thp=off").start();
    guest.run(Command::AllocTouchExit { bytes: 80 * MIB });
    guest.set_target(70 * MIB);
    eventually("the balloon grows", 20, || {
        let bytes = guest.metric("ebb_balloon_inflated_bytes_total");
        when(bytes > 0, || "nothing yet".to_owned())
    });
    let report = guest.save_and_end(&file);
    let guest = Restore::new(scene, &file).start();
    eventually("the balloon reaches its target", 120, || {
        let info = guest.balloon();
        when((info.target_bytes, info.actual_bytes) == (70 * MIB, 70 * MIB), || format!("{info:?}"))
    });
    // More than the guest can give: the balloon stays below its target, and can be saved like that.
    guest.set_target(154 * MIB);
    let second = scene.path("second.snapshot");
    let smaller = guest.save_and_end(&second);
    assert!(smaller.stored_bytes < report.stored_bytes, "{report:?} {smaller:?}");
    let guest = Restore::new(scene, &second).start();
    assert_eq!(guest.balloon().target_bytes, 154 * MIB);
    guest.inflate_to(0);
    guest.run(Command::Hold { bytes: 50 * MIB, pattern: 9 });
    assert_eq!(guest.wrong_pages(), 0);
}

fn of_reported_memory_is_small(scene: &Scene) {
    let ram = counts(GIB, 2 * GIB);
    let memory = format!("size={ram}");
    let guest = Setup::new(scene).memory(&memory).balloon("reporting=on").start();
    guest.run(Command::AllocTouchExit { bytes: ram / 10 * 6 });
    assert!(guest.metric("ebb_guest_resident_bytes") > 0);
    // Linux reports for as long as it finds free blocks; then the guest is idle.
    let mut last = u64::MAX;
    let mut still = 0;
    eventually("the guest has reported its unused memory", 150, || {
        std::thread::sleep(std::time::Duration::from_secs(1));
        let now = guest.process_bytes();
        still = if now.abs_diff(last) < 2 * MIB && now < ram / 10 * 3 { still + 1 } else { 0 };
        last = now;
        when(still >= 4, || format!("{now} bytes"))
    });
    let file = scene.path("vm.snapshot");
    guest.put("/vm/pause");
    let resident = guest.process_bytes();
    let report = guest.save(&file);
    println!(
        "    idle guest of {} MiB: resident {} MiB, in the file {} MiB, on disk {} MiB, {} ms",
        ram / MIB,
        resident / MIB,
        report.ram_bytes / MIB,
        report.stored_bytes / MIB,
        report.elapsed_ms
    );
    assert!(report.file_bytes >= ram, "{report:?}");
    assert!(report.stored_bytes <= resident / 100 * 110, "{resident} {report:?}");
    guest.end();
    let guest = Restore::new(scene, &file).start();
    guest.run(Command::Hold { bytes: ram / 10 * 2, pattern: 4 });
    assert_eq!(guest.wrong_pages(), 0);
}

fn several_from_one_file(scene: &Scene) {
    let (file, second) = (scene.path("vm.snapshot"), scene.path("second.snapshot"));
    let guest = Setup::new(scene).memory("size=256M").start();
    guest.run(Command::Hold { bytes: 48 * MIB, pattern: 21 });
    guest.write_file("/tmp/note", "common");
    guest.save_and_end(&file);
    let guests = ["first", "second", "third"].map(|name| {
        let guest = Restore::new(scene, &file).socket(name).start();
        guest.write_file("/tmp/note", name);
        guest
    });
    // They keep the file open and do not need its name.
    fs::remove_file(&file).unwrap();
    let [first, changed, third] = &guests;
    first.run(Command::Release);
    first.run(Command::AllocTouchExit { bytes: 100 * MIB });
    changed.run(Command::Hold { bytes: 48 * MIB, pattern: 22 });
    let held = |guest: &Guest| guest.run(Command::VerifyHeld)["held_bytes"].as_u64().unwrap() / MIB;
    assert_eq!(guests.each_ref().map(held), [0, 96, 48]);
    assert_eq!(guests.each_ref().map(Guest::wrong_pages), [0, 0, 0]);
    let notes = guests.each_ref().map(|guest| guest.read_file("/tmp/note"));
    assert_eq!(notes, ["first", "second", "third"]);
    third.put("/vm/pause");
    assert_eq!(changed.vm().state, VmState::Running);
    // A restored guest can be saved again.
    let [_, changed, _] = guests;
    changed.save_and_end(&second);
    let again = Restore::new(scene, &second).socket("again").start();
    assert_eq!((held(&again), again.wrong_pages()), (96, 0));
    assert_eq!(again.read_file("/tmp/note"), "second");
}

fn paused_or_not(scene: &Scene) {
    let file = scene.path("vm.snapshot");
    let guest = Setup::new(scene).memory("size=256M").args(["--cpus", "2"]).start();
    let report = guest.save(&file);
    assert!(report.paused_ms <= report.elapsed_ms, "{report:?}");
    assert_eq!(guest.vm().state, VmState::Running);
    guest.write_file("/tmp/note", "after the first");
    guest.put("/vm/pause");
    // An existing snapshot may be replaced.
    let report = guest.save(&file);
    assert_eq!((report.paused_ms, guest.vm().state), (0, VmState::Paused));
    let id = guest.send(Command::MemInfo);
    std::thread::sleep(std::time::Duration::from_millis(60));
    assert_eq!(guest.poll(id), None, "a paused guest answered");
    guest.put("/vm/resume");
    guest.outcome(id).unwrap();
    guest.end();

    // The API answers before the machine is complete.
    let guest = Restore::new(scene, &file).args(["--paused"]).start();
    eventually("the restored machine is paused", 30, || {
        let state = guest.vm().state;
        when(state == VmState::Paused, || format!("{state:?}"))
    });
    let id = guest.send(Command::MemInfo);
    std::thread::sleep(std::time::Duration::from_millis(60));
    assert_eq!(guest.poll(id), None, "a paused guest answered");
    guest.put("/vm/resume");
    guest.outcome(id).unwrap();
    assert_eq!(guest.read_file("/tmp/note"), "after the first");
}

/// A snapshot for which the machine is paused all the time: what was written to the file cannot be
/// read again.
fn save_paused(guest: &Guest, path: &Path) -> SnapshotReport {
    let file = fs::File::options().write(true).create_new(true).open(path).unwrap();
    let target = SnapshotTarget { path: path.to_owned() };
    let client = Client::new(guest.socket(), SAVE_LIMIT);
    client.put_json_with("/vm/snapshot", &target, &[file.as_fd()]).unwrap()
}

/// Reads a disk into new pages again and again, until it is told to stop; fails if they differ from
/// a copy.
const READ_DISK: &str = "cp /dev/vda /tmp/copy; \
     until [ -e /tmp/stop ]; do \
         echo 3 > /proc/sys/vm/drop_caches; cmp /dev/vda /tmp/copy || exit 1; \
     done";

/// Both sides of a snapshot go on with their own memory: programs that write all the time, a disk
/// whose data the host's kernel writes, and a balloon that grows.
fn while_the_guest_runs(scene: &Scene) {
    let bytes = counts(48, 96) * MIB;
    let churn = Command::Churn { bytes, tasks: 2, seed: 61, operations: None, seconds: Some(12) };
    for memory in ["size=512M", "size=512M,thp=off"] {
        let (first, file) = (scene.path("first.snapshot"), scene.path("vm.snapshot"));
        let disk = scene.path("disk");
        let content: Vec<u8> = (0..8_u32 << 20).map(|index| (index / 509) as u8).collect();
        fs::write(&disk, content).unwrap();
        let disk = format!("path={},readonly=on", disk.display());
        let guest = Setup::new(scene)
            .memory(memory)
            .balloon("reporting=on")
            .args(["--cpus", "2", "--disk", &disk])
            .start();
        guest.run(Command::Hold { bytes: 128 * MIB, pattern: 62 });
        let argv = ["/bin/busybox", "sh", "-c", READ_DISK].map(str::to_owned).to_vec();
        let work = [guest.send(churn.clone()), guest.send(Command::Exec { argv })];
        for started in work {
            guest.wait_started(started);
        }
        let paused = save_paused(&guest, &first);
        assert_eq!(paused.copied, CopiedWhile::Stopped, "{paused:?}");
        fs::remove_file(&first).unwrap();
        guest.set_target(32 * MIB);
        let report = guest.save(&file);
        assert_eq!(report.copied, CopiedWhile::Running, "{report:?}");
        println!(
            "    {memory}: {} MiB in the file; paused for {} of {} ms, and for {} of {} ms while \
             memory is copied as well",
            report.ram_bytes / MIB,
            report.paused_ms,
            report.elapsed_ms,
            paused.paused_ms,
            paused.elapsed_ms
        );
        assert!(report.paused_ms * 2 < paused.paused_ms, "{report:?} {paused:?}");
        assert_eq!(guest.vm().state, VmState::Running);
        assert_eq!(guest.balloon().discard_inhibited, None);
        check_sides(&guest, work);
        guest.end();
        describe(scene, &file);
        let guest = Restore::new(scene, &file).args(["--disk", &disk]).start();
        check_sides(&guest, work);
        guest.end();
        fs::remove_file(&file).unwrap();
    }
}

/// A guest whose balloon grows while a churn and [`READ_DISK`] check its memory.
#[track_caller]
fn check_sides(guest: &Guest, [churn, reads]: [u64; 2]) {
    let report = guest.outcome_within(120, churn).unwrap();
    assert_eq!(report["wrong_pages"], 0, "{report}");
    assert!(report["pages_verified"].as_u64().unwrap() > 0, "{report}");
    guest.write_file("/tmp/stop", "");
    let outcome = guest.outcome(reads).unwrap();
    assert_eq!(outcome["code"], 0, "{outcome}");
    guest.inflate_to(32 * MIB);
    assert_eq!(guest.wrong_pages(), 0);
    guest.inflate_to(0);
    guest.run(Command::AllocTouchExit { bytes: 40 * MIB });
    assert_eq!(guest.wrong_pages(), 0);
}

/// A separate small file system.
pub struct SmallDisk(pub PathBuf);

impl SmallDisk {
    /// Mounts one of 16 MiB.
    pub fn new(path: PathBuf) -> Self {
        fs::create_dir(&path).unwrap();
        mount("tmpfs", &path, "tmpfs", MountFlags::empty(), c"size=16m").unwrap();
        Self(path)
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _ = unmount(&self.0, UnmountFlags::DETACH);
    }
}

fn names(directory: &Path) -> Vec<String> {
    let entries = fs::read_dir(directory).unwrap();
    entries.map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned()).collect()
}

fn no_room_or_no_place(scene: &Scene) {
    let guest = Setup::new(scene).memory("size=256M").args(["--cpus", "2"]).start();
    guest.run(Command::Hold { bytes: 32 * MIB, pattern: 31 });
    let small = SmallDisk::new(scene.path("small"));
    let file = small.0.join("vm.snapshot");
    let error = guest.try_save(&file).unwrap_err();
    assert!(error.contains("No space left"), "{error}");
    assert_eq!(names(&small.0), [""; 0]);
    assert_eq!(guest.vm().state, VmState::Running);

    // An existing file is kept.
    let precious = scene.path("precious");
    fs::write(&precious, "diary").unwrap();
    for (path, word) in [
        (scene.path("no/such/directory/file"), "No such file"),
        (scene.path("small"), "small"),
        (precious.clone(), "not a snapshot"),
        (PathBuf::from("relative"), "path"),
    ] {
        let error = guest.try_save(&path).unwrap_err();
        assert!(error.contains(word), "{}: {error}", path.display());
        assert_eq!(guest.vm().state, VmState::Running);
    }
    assert_eq!(fs::read(&precious).unwrap(), b"diary");
    assert_eq!(guest.wrong_pages(), 0);
    // With enough space it works; without, a paused guest stays paused.
    guest.save(&scene.path("vm.snapshot"));
    guest.put("/vm/pause");
    guest.try_save(&file).unwrap_err();
    assert_eq!(guest.vm().state, VmState::Paused);
    guest.put("/vm/resume");
    assert_eq!(guest.wrong_pages(), 0);
}

fn bad_files(scene: &Scene) {
    let (good, disk) = (scene.path("good.snapshot"), scene.path("disk"));
    fs::write(&disk, vec![0; 1 << 20]).unwrap();
    let guest = Setup::new(scene)
        .memory("size=128M")
        .args(["--disk", &format!("path={},readonly=on", disk.display())])
        .start();
    guest.save_and_end(&good);
    let bad = scene.path("bad.snapshot");
    let refused = |words: &[&str]| {
        let image = format!("path={},readonly=on", disk.display());
        let (code, log) = Restore::new(scene, &bad).args(["--disk", &image]).refused();
        assert_eq!(code, Some(1), "{log}");
        assert_eq!(log.lines().count(), 1, "{log}");
        for word in words {
            assert!(log.contains(word), "{word} is not in: {log}");
        }
    };
    refused(&["bad.snapshot", "No such file"]);
    for (content, word) in [
        (Vec::new(), "not a snapshot"),
        (b"garbage\n".repeat(1000), "not a snapshot"),
        (vec![0; 8192], "not a snapshot"),
    ] {
        fs::write(&bad, content).unwrap();
        refused(&["bad.snapshot", word]);
    }
    let whole = fs::metadata(&good).unwrap().len();
    for length in [20, 64, 4096, whole / 2, whole - 1] {
        fs::copy(&good, &bad).unwrap();
        fs::File::options().write(true).open(&bad).unwrap().set_len(length).unwrap();
        refused(&["bad.snapshot", "cut short"]);
    }
    let change = |offset: u64, length: usize, change: fn(&mut [u8])| {
        use std::os::unix::fs::FileExt;
        fs::copy(&good, &bad).unwrap();
        let file = fs::File::options().read(true).write(true).open(&bad).unwrap();
        let mut bytes = vec![0; length];
        file.read_exact_at(&mut bytes, offset).unwrap();
        change(&mut bytes);
        file.write_all_at(&bytes, offset).unwrap();
    };
    change(8, 4, |version| version.copy_from_slice(&77_u32.to_le_bytes()));
    refused(&["format version 77"]);
    // Each bit is inverted: a fixed value may be what was there.
    let invert = |bytes: &mut [u8]| bytes.iter_mut().for_each(|byte| *byte = !*byte);
    change(40, 1, invert);
    refused(&["damaged"]);
    change(whole - 100, 1, invert);
    refused(&["damaged"]);
    // Damaged guest memory is detected by `--verify`.
    let extent = (2 << 20) + (16 << 20);
    change(extent + 5, 16, invert);
    let (code, log) = Restore::new(scene, &bad).args(["--verify"]).refused();
    assert_eq!(code, Some(1), "{log}");

    let moved = scene.path("moved");
    fs::rename(&disk, &moved).unwrap();
    fs::copy(&good, &bad).unwrap();
    refused(&["disk", "No such file"]);
    // Its path can be replaced, but no disk can be added.
    let named = format!("path={},readonly=on", moved.display());
    let (code, log) =
        Restore::new(scene, &good).args(["--disk", &named, "--disk", &named]).refused();
    assert_eq!(code, Some(1), "{log}");
    assert!(log.contains("1 disks") && log.contains("2 times"), "{log}");
    let guest = Restore::new(scene, &good).args(["--disk", &named]).start();
    assert_eq!(guest.read_file("/sys/block/vda/size").trim(), "2048");
    guest.end();

    // Paths in the file are not opened, and a file that other users can change is not used.
    fs::rename(&moved, &disk).unwrap();
    let refused = |arguments: &[&str], words: &[&str]| {
        let (code, log) = Restore::without_names(scene, &good).args(arguments).refused();
        assert_eq!(code, Some(1), "{log}");
        for word in words {
            assert!(log.contains(word), "{word} is not in: {log}");
        }
    };
    refused(&[], &["--kernel", "--on-reboot exit", "--disk", "--trust-paths"]);
    refused(&["--on-reboot", "exit"], &["--disk"]);
    fs::set_permissions(&good, fs::Permissions::from_mode(0o666)).unwrap();
    refused(&["--trust-paths"], &["good.snapshot", "other users", "--trust"]);
    let guest = Restore::without_names(scene, &good).args(["--trust-paths", "--trust"]).start();
    assert_eq!(guest.read_file("/sys/block/vda/size").trim(), "2048");
}
