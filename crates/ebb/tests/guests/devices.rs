//! The other devices: disks and entropy.

use std::fs::{self, File};
use std::io::{BufRead as _, BufReader, Write as _};
use std::process::{Command as Program, Stdio};

use ebb_agent::protocol::Command;
use ebb_vmm::api::{LimitsChange, LimitsInfo, RateLimits};

use crate::guest::{Guest, MIB};
use crate::harness::{Scene, Test, eventually, when};
use crate::setup::Setup;
use crate::snapshot::SmallDisk;

/// The tests.
pub const TESTS: &[Test] = &[
    Test::new("devices::disk_writes_and_reads", 180, disk_writes_and_reads),
    Test::new("devices::readonly_disk_refuses", 180, readonly_disk_refuses),
    Test::new("devices::limited_disk", 180, limited_disk),
    Test::new("devices::full_host", 180, full_host),
    Test::new("devices::entropy_and_console", 180, entropy_and_console),
];

fn run_shell(guest: &Guest, line: &str) -> serde_json::Value {
    guest
        .run(Command::Exec { argv: ["/bin/busybox", "sh", "-c", line].map(str::to_owned).to_vec() })
}

fn disk_writes_and_reads(scene: &Scene) {
    let path = scene.path("disk");
    let content: Vec<u8> = (0..8 * MIB as u32).map(|index| (index * 7 / 3) as u8).collect();
    fs::write(&path, &content).unwrap();
    let guest = Setup::new(scene).args(["--disk", &format!("path={}", path.display())]).start();
    assert_eq!(guest.read_file("/sys/block/vda/size").trim(), (8 * MIB / 512).to_string());
    assert_eq!(guest.read_file("/sys/block/vda/serial").trim(), "ebb-disk-0");

    // The guest copies the first half to the second one, and both sides see the result.
    let copied =
        run_shell(&guest, "dd if=/dev/vda of=/dev/vda bs=1M count=4 seek=4 conv=notrunc,fsync");
    assert_eq!(copied["code"], 0, "{copied}");
    let changed = fs::read(&path).unwrap();
    assert_eq!(changed.len(), content.len());
    assert!(changed[..4 << 20] == content[..4 << 20] && changed[4 << 20..] == content[..4 << 20]);
    guest.run(Command::DropCaches);
    let same = run_shell(
        &guest,
        "head -c 4194304 /dev/vda > /tmp/a && tail -c 4194304 /dev/vda | cmp - /tmp/a",
    );
    assert_eq!(same["code"], 0, "{same}");
    // The last sector, and not one more.
    let last = run_shell(
        &guest,
        "dd if=/dev/zero of=/dev/vda bs=512 seek=16383 count=1 conv=notrunc,fsync",
    );
    assert_eq!(last["code"], 0, "{last}");
    let beyond = run_shell(
        &guest,
        "dd if=/dev/zero of=/dev/vda bs=512 seek=16384 count=1 conv=notrunc,fsync",
    );
    assert_ne!(beyond["code"], 0, "{beyond}");
    let changed = fs::read(&path).unwrap();
    assert_eq!(changed.len(), content.len());
    assert!(changed[changed.len() - 512..].iter().all(|byte| *byte == 0));
}

fn readonly_disk_refuses(scene: &Scene) {
    let path = scene.path("disk");
    fs::write(&path, vec![0x5a; MIB as usize]).unwrap();
    let disk = format!("path={},readonly=on", path.display());
    let guest = Setup::new(scene).args(["--disk", &disk]).start();
    assert_eq!(guest.read_file("/sys/block/vda/ro").trim(), "1");
    let written =
        run_shell(&guest, "dd if=/dev/zero of=/dev/vda bs=512 count=1 conv=notrunc,fsync");
    assert_ne!(written["code"], 0, "{written}");
    // Also if the guest's driver ignores the flag: the flag is cleared in the guest, but the device
    // still refuses writes.
    run_shell(
        &guest,
        "blockdev --setrw /dev/vda; dd if=/dev/zero of=/dev/vda bs=512 count=1 conv=notrunc,fsync",
    );
    assert!(fs::read(&path).unwrap().iter().all(|byte| *byte == 0x5a));
    assert_eq!(run_shell(&guest, "head -c 3 /dev/vda")["stdout"], "ZZZ");
    // Two machines may read the same image.
    let other = Setup::new(scene).socket("other").args(["--disk", &disk]).start();
    assert_eq!(run_shell(&other, "head -c 3 /dev/vda")["stdout"], "ZZZ");
}

/// A machine whose disk waits for its limit can be paused, and continues when the limit is removed.
fn limited_disk(scene: &Scene) {
    let path = scene.path("disk");
    fs::write(&path, vec![0x5a; 32 * MIB as usize]).unwrap();
    // Enough for what the guest reads at its start; the rest would take months.
    let disk = format!("path={},bandwidth=1,bandwidth_burst=4M", path.display());
    let guest = Setup::new(scene).args(["--disk", &disk]).start();
    let argv = ["/bin/busybox", "sh", "-c", "cat /dev/vda > /dev/null"].map(str::to_owned).to_vec();
    let reads = guest.send(Command::Exec { argv });
    eventually("a request is delayed", 60, || {
        let limits: LimitsInfo = guest.client().get("/limits").unwrap();
        let disk = limits.devices.iter().find(|device| device.device == "disk0").expect("disk0");
        when(disk.delayed_requests > 0, || format!("{disk:?}"))
    });
    guest.put("/vm/pause");
    guest.put("/vm/resume");
    assert_eq!(guest.poll(reads), None);
    let limits = RateLimits { bandwidth: Some(0), ..RateLimits::default() };
    let change = LimitsChange { device: "disk0".to_owned(), limits };
    let _: LimitsInfo = guest.client().put_json("/limits", &change).unwrap();
    assert_eq!(guest.outcome(reads).unwrap()["code"], 0);
}

/// The file system of an image is full: the guest gets an error, the machine goes on, and the same
/// write succeeds when there is room.
fn full_host(scene: &Scene) {
    let small = SmallDisk::new(scene.path("small"));
    let (path, filler) = (small.0.join("disk"), small.0.join("filler"));
    fs::write(&path, vec![0x5a; MIB as usize]).unwrap();
    File::options().write(true).open(&path).unwrap().set_len(32 * MIB).unwrap();
    fs::write(&filler, vec![1; 12 * MIB as usize]).unwrap();
    let guest = Setup::new(scene).args(["--disk", &format!("path={}", path.display())]).start();
    guest.run(Command::Hold { bytes: 8 * MIB, pattern: 5 });
    let write = "tr '\\0' x < /dev/zero | \
                 dd of=/dev/vda bs=1M iflag=fullblock count=8 seek=8 conv=notrunc,fsync";
    for _ in 0..2 {
        let failed = run_shell(&guest, write);
        assert_ne!(failed["code"], 0, "{failed}");
        guest.run(Command::DropCaches);
        assert_eq!(run_shell(&guest, "head -c 3 /dev/vda")["stdout"], "ZZZ");
    }
    // Nothing else was written.
    assert!(fs::read(&path).unwrap()[..8 << 20].iter().all(|byte| matches!(byte, 0 | 0x5a)));
    fs::remove_file(&filler).unwrap();
    let written = run_shell(&guest, write);
    assert_eq!(written["code"], 0, "{written}");
    assert!(fs::read(&path).unwrap()[8 << 20..16 << 20].iter().all(|byte| *byte == b'x'));
    assert_eq!(guest.wrong_pages(), 0);
}

fn entropy_and_console(scene: &Scene) {
    let guest = Setup::new(scene).args(["--rng", "bandwidth=64K"]).start();
    let current = guest.read_file("/sys/class/misc/hw_random/rng_current");
    assert!(current.starts_with("virtio_rng"), "{current}");
    let read = || {
        let result = run_shell(&guest, "head -c 512 /dev/hwrng | hexdump -v -e '1/1 \"%02x\"'");
        result["stdout"].as_str().unwrap().to_owned()
    };
    let (first, second) = (read(), read());
    assert_eq!((first.len(), second.len()), (1024, 1024), "{first}");
    assert_ne!(first, second);
    // 512 random bytes have about 221 different values.
    let distinct =
        |text: &str| text.as_bytes().chunks(2).collect::<std::collections::BTreeSet<_>>().len();
    assert!(distinct(&first) > 150, "{first}");
    console(scene, guest);
}

/// The serial line is read by the test already; others come and go.
fn console(scene: &Scene, guest: Guest) {
    let socket = guest.socket().display().to_string();
    let connect = || {
        let mut ebb = Program::new(&scene.world.ebb);
        ebb.args(["console", &socket]).stdin(Stdio::piped());
        let mut console = ebb.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let lines = BufReader::new(console.stdout.take().unwrap()).lines().map(Result::unwrap);
        (console, lines)
    };
    let (mut first, mut lines) = connect();
    // Recent output, then an answer to what is typed.
    lines.find(|line| line.contains("virtio_rng")).expect("earlier output");
    first.stdin.as_mut().unwrap().write_all(b"typed\n").unwrap();
    lines.find(|line| line.contains("not a command") && line.contains("typed")).unwrap();

    let (second, mut later) = connect();
    let output = first.wait_with_output().unwrap();
    assert!(output.status.success(), "{output:?}");
    assert!(String::from_utf8_lossy(&output.stderr).contains("taken it over"), "{output:?}");
    later.find(|line| line.contains("typed")).expect("earlier output");
    drop(guest);
    let output = second.wait_with_output().unwrap();
    assert!(String::from_utf8_lossy(&output.stderr).contains("has ended"), "{output:?}");
}
