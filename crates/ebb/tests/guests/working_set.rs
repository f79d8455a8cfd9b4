//! What a restored machine uses at first is recorded, and read ahead in the next one.

use std::fs;
use std::path::Path;
use std::process::{Command as Program, Output, Stdio};

use ebb_agent::protocol::Command;
use ebb_vmm::api::{VmState, WorkingSet};

use crate::guest::MIB;
use crate::harness::{Scene, Test, eventually, when};
use crate::saved::Restore;
use crate::setup::Setup;

/// The tests.
pub const TESTS: &[Test] =
    &[Test::new("working_set::recorded_and_read_ahead", 240, recorded_and_read_ahead)];

const HELD_BYTES: u64 = 128 * MIB;

fn recorder(scene: &Scene, socket: &Path, file: &Path) -> Program {
    let mut program = Program::new(&scene.world.ebb);
    program.arg("ctl").arg(socket).arg("working-set").arg(file).arg("--json");
    program
}

#[track_caller]
fn refused(output: &Output, words: &str) {
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.code() == Some(1) && text.contains(words), "{output:?}");
}

fn recorded_and_read_ahead(scene: &Scene) {
    let (file, set) = (scene.path("vm.snapshot"), scene.path("vm.working-set"));
    let guest = Setup::new(scene).memory("size=512M").balloon("reporting=on").start();
    guest.run(Command::Hold { bytes: HELD_BYTES, pattern: 5 });
    guest.write_file("/tmp/note", "kept");
    let output = recorder(scene, guest.socket(), &set).output().unwrap();
    refused(&output, "was not restored from a snapshot");
    guest.save_and_end(&file);

    // From the first access on: the recorder looks before the guest runs.
    let guest = Restore::new(scene, &file).args(["--paused"]).start();
    eventually("the restored machine is paused", 30, || {
        let state = guest.vm().state;
        when(state == VmState::Paused, || format!("{state:?}"))
    });
    let recording = recorder(scene, guest.socket(), &set)
        .args(["--for", "4"])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    guest.put("/vm/resume");
    assert_eq!(guest.read_file("/tmp/note"), "kept");
    let output = recording.wait_with_output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let first = WorkingSet::read(&set).unwrap();
    assert!((MIB..40 * MIB).contains(&first.size_bytes()), "{}", first.size_bytes());
    // In the order of the accesses, which is not that of the addresses.
    assert!(!first.extents.is_sorted_by_key(|extent| extent.offset_bytes), "{first:?}");

    // All that was accessed until now, in place of the first recording.
    assert_eq!(guest.wrong_pages(), 0);
    let output = recorder(scene, guest.socket(), &set).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let said: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let all = WorkingSet::read(&set).unwrap();
    assert_eq!(said["bytes"], all.size_bytes());
    assert!((HELD_BYTES..256 * MIB).contains(&all.size_bytes()), "{said}");
    // What the guest has freed is not contained, but for what lies in blocks of 2 MiB that others
    // use, too: the kernel does not report those. They were 14 MiB of 48.
    guest.run(Command::Release);
    let less = scene.path("less");
    eventually("freed pages are not contained", 60, || {
        let output = recorder(scene, guest.socket(), &less).output().unwrap();
        assert!(output.status.success(), "{output:?}");
        let bytes = WorkingSet::read(&less).unwrap().size_bytes();
        when(bytes + HELD_BYTES / 2 < all.size_bytes(), || format!("{bytes} of {said}"))
    });
    // Its snapshot is another one.
    let second = scene.path("second.snapshot");
    guest.save_and_end(&second);

    // The machine does not depend on it.
    let guest = Restore::new(scene, &file).arg_os("--working-set", &set).start();
    assert_eq!((guest.wrong_pages(), guest.read_file("/tmp/note")), (0, "kept".to_owned()));
    eventually("the thread that reads ahead ends", 30, || {
        let tasks = fs::read_dir(format!("/proc/{}/task", guest.pid())).unwrap();
        let names = tasks.map(|task| fs::read_to_string(task.unwrap().path().join("comm")));
        let names: Vec<_> = names.filter_map(Result::ok).collect();
        when(!names.contains(&"read-ahead\n".to_owned()), || format!("{names:?}"))
    });

    let diary = scene.path("diary");
    fs::write(&diary, "dear diary").unwrap();
    refused(&recorder(scene, guest.socket(), &diary).output().unwrap(), "is not overwritten");
    assert_eq!(fs::read(&diary).unwrap(), b"dear diary");
    refused(&recorder(scene, guest.socket(), &file).output().unwrap(), "is not overwritten");
    guest.end();
    for (snapshot, set, words) in [
        (&second, &set, "it belongs to another snapshot"),
        (&file, &diary, "not the file of a working set"),
        (&file, &scene.path("missing"), "No such file"),
    ] {
        let (code, log) = Restore::new(scene, snapshot).arg_os("--working-set", set).refused();
        assert!(code == Some(1) && log.contains(words) && log.lines().count() == 1, "{log}");
    }
    let mut outside = all;
    outside.extents[0].offset_bytes = 1 << 40;
    fs::write(&set, serde_json::to_vec(&outside).unwrap()).unwrap();
    let (code, log) = Restore::new(scene, &file).arg_os("--working-set", &set).refused();
    assert!(code == Some(1) && log.contains("names other memory"), "{log}");
}
