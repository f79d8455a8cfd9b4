//! Disks: discarding, other sizes, several requests at a time, and what becomes of those in flight
//! when a machine is saved or moved.

use std::fs::{self, File};
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::path::Path;

use ebb_agent::disk_load::{DiskLoad, LoadKind, LoadReport};
use ebb_agent::protocol::Command;
use ebb_vmm::api::{DiskInfo, DiskResize, DisksInfo};

use crate::guest::{Guest, MIB};
use crate::harness::{Scene, Test, eventually, when};
use crate::moved::{Receive, Route, move_to};
use crate::saved::Restore;
use crate::setup::Setup;

/// The tests.
pub const TESTS: &[Test] = &[
    Test::new("disks::discard_zero_and_resize", 180, discard_zero_and_resize),
    Test::new("disks::requests_in_flight", 300, requests_in_flight),
];

/// Runs a command line in the guest; returns whether it succeeded, and its output.
fn shell(guest: &Guest, line: &str) -> (bool, String) {
    let argv = ["/bin/busybox", "sh", "-c", line].map(str::to_owned).to_vec();
    let result = guest.run(Command::Exec { argv });
    (result["code"] == 0, result.to_string())
}

/// Runs one that must succeed.
#[track_caller]
fn succeed(guest: &Guest, line: &str) {
    let (success, output) = shell(guest, line);
    assert!(success, "{line}: {output}");
}

fn disk0(guest: &Guest) -> DiskInfo {
    let mut info: DisksInfo = guest.client().get("/disks").unwrap();
    info.disks.remove(0)
}

fn resize(guest: &Guest, size_bytes: Option<u64>) -> Result<DiskInfo, String> {
    let change = DiskResize { device: "disk0".to_owned(), size_bytes, path: None };
    let info: Result<DisksInfo, _> = guest.client().put_json("/disks", &change);
    info.map(|mut info| info.disks.remove(0)).map_err(|error| error.to_string())
}

fn stored_bytes(path: &Path) -> u64 {
    fs::metadata(path).unwrap().blocks() * 512
}

/// What the guest discards is a hole in the image, and a grown image is a larger disk.
fn discard_zero_and_resize(scene: &Scene) {
    let path = scene.path("disk");
    fs::write(&path, vec![0x5a; 16 << 20]).unwrap();
    let guest = Setup::new(scene).args(["--disk", &format!("path={}", path.display())]).start();
    assert_eq!(stored_bytes(&path), 16 * MIB);
    succeed(&guest, "blkdiscard -o 1048576 -l 4194304 /dev/vda");
    assert_eq!(stored_bytes(&path), 12 * MIB);
    guest.run(Command::DropCaches);
    succeed(
        &guest,
        "dd if=/dev/vda bs=1M skip=1 count=4 | cmp -n 4194304 - /dev/zero && \
         test \"$(head -c 3 /dev/vda)\" = ZZZ",
    );
    let content = fs::read(&path).unwrap();
    assert!(content[..1 << 20].iter().all(|byte| *byte == 0x5a));
    assert!(content[1 << 20..5 << 20].iter().all(|byte| *byte == 0));
    assert!(content[5 << 20..8 << 20].iter().all(|byte| *byte == 0x5a));
    let info = disk0(&guest);
    assert_eq!((info.size_bytes, info.requests.discarded_bytes), (16 * MIB, 4 * MIB), "{info:?}");
    assert!(info.requests.reads > 0 && info.requests.errors == 0, "{info:?}");

    // Nothing changes before the owner of the image has enlarged it.
    assert_eq!(resize(&guest, None).unwrap().size_bytes, 16 * MIB);
    let image = File::options().write(true).open(&path).unwrap();
    image.set_len(24 * MIB).unwrap();
    assert_eq!(resize(&guest, None).unwrap().size_bytes, 24 * MIB);
    let sectors = (24 * MIB / 512).to_string();
    eventually("the guest sees the new size", 20, || {
        let seen = guest.read_file("/sys/block/vda/size");
        when(seen.trim() == sectors, || seen.clone())
    });
    succeed(&guest, "echo end | dd of=/dev/vda bs=512 seek=49151 conv=notrunc,sync,fsync");
    let mut last = [0; 3];
    image.read_at(&mut last, 24 * MIB - 512).ok();
    let content = fs::read(&path).unwrap();
    assert_eq!(&content[content.len() - 512..][..3], b"end");
    // Refused, and nothing changes.
    let error = resize(&guest, Some(32 * MIB)).unwrap_err();
    assert!(error.contains("raw"), "{error}");
    image.set_len(20 * MIB).unwrap();
    let error = resize(&guest, None).unwrap_err();
    assert!(error.contains("less than") && error.contains("enlarge"), "{error}");
    assert_eq!(disk0(&guest).size_bytes, 24 * MIB);
    // The missing part answers with errors; the machine and the rest of the disk go on.
    guest.run(Command::DropCaches);
    assert!(!shell(&guest, "dd if=/dev/vda of=/dev/null bs=4096 skip=5632 count=1").0);
    succeed(&guest, "test \"$(head -c 3 /dev/vda)\" = ZZZ");
    assert!(disk0(&guest).requests.errors > 0);
    guest.end();
}

/// Waits until the guest has written more blocks to each of its disks.
#[track_caller]
fn both_write(guest: &Guest) {
    let writes = || -> Vec<u64> {
        let info: DisksInfo = guest.client().get("/disks").unwrap();
        info.disks.iter().map(|disk| disk.requests.writes).collect()
    };
    let before = writes();
    eventually("both disks are written to", 30, || {
        let now = writes();
        let more = now.iter().zip(&before).all(|(now, before)| *now >= before + 50);
        when(more, || format!("{before:?} -> {now:?}"))
    });
}

/// Threads that write to a raw disk and to an overlay, read back and compare, while the machine is
/// paused, saved, restored and migrated.
fn requests_in_flight(scene: &Scene) {
    let (raw, base) = (scene.path("disk"), scene.path("base"));
    let (overlay, file) = (scene.path("overlay"), scene.path("vm.snapshot"));
    File::create(&raw).unwrap().set_len(64 * MIB).unwrap();
    fs::write(&base, vec![0x5a; 64 << 20]).unwrap();
    let first = format!("path={}", raw.display());
    let second = format!("path={},overlay={}", base.display(), overlay.display());
    let disks = ["--disk", &first, "--disk", &second];
    let guest = Setup::new(scene).memory("size=256M").args(["--cpus", "2"]).args(disks).start();
    // They end on request only: what a guest says before it is moved is said elsewhere.
    let jobs = ["/dev/vda", "/dev/vdb"].map(|path| {
        let job = guest.send(Command::DiskLoad(DiskLoad {
            path: path.to_owned(),
            kind: LoadKind::WriteAndCheck,
            threads: 4,
            block_bytes: 16 << 10,
            span_bytes: 64 * MIB,
            blocks: u32::MAX,
            until: Some("/tmp/end".to_owned()),
        }));
        guest.wait_started(job);
        job
    });
    both_write(&guest);
    for _ in 0..5 {
        guest.put("/vm/pause");
        guest.put("/vm/resume");
    }
    both_write(&guest);
    guest.save_and_end(&file);

    let guest = Restore::new(scene, &file).args(disks).start();
    both_write(&guest);
    let receive = Receive::new(scene, "second", Route::Unix).args(disks);
    let (guest, _) = move_to(receive, guest, [""; 0]);
    both_write(&guest);
    guest.write_file("/tmp/end", "");
    for job in jobs {
        let report: LoadReport = serde_json::from_value(guest.outcome(job).unwrap()).unwrap();
        assert!(report.blocks > 0 && report.wrong_blocks == 0, "{report:?}");
    }
    let info: DisksInfo = guest.client().get("/disks").unwrap();
    assert!(info.disks.iter().all(|disk| disk.requests.errors == 0), "{info:?}");
    // Discarded clusters are holes, and the image can grow.
    let written = stored_bytes(&overlay);
    succeed(&guest, "blkdiscard /dev/vdb");
    assert!(stored_bytes(&overlay) < written / 2, "{written} {}", stored_bytes(&overlay));
    let change = DiskResize { device: "disk1".to_owned(), size_bytes: Some(80 * MIB), path: None };
    let _: DisksInfo = guest.client().put_json("/disks", &change).unwrap();
    let sectors = (80 * MIB / 512).to_string();
    eventually("the guest sees the new size", 20, || {
        let seen = guest.read_file("/sys/block/vdb/size");
        when(seen.trim() == sectors, || seen.clone())
    });
    succeed(&guest, "echo end | dd of=/dev/vdb bs=512 seek=163839 conv=notrunc,sync,fsync");
    guest.end();
    assert!(fs::read(&base).unwrap().iter().all(|byte| *byte == 0x5a), "the base has changed");
}
