//! Replays recordings of the trackers of Ebb's balloon driver through their model.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use ebb_agent::protocol::Command;
use ebb_tracker_model::recording::{PageEvent, Recording};
use ebb_tracker_model::replay::{replay, replay_without_one};
use ebb_tracker_model::tracker::Kind;
use ebb_virtual_host::kernel::is_at_least;
use flate2::read::GzDecoder;

use crate::guest::{Guest, MIB};
use crate::harness::{Scene, Test, counts, eventually, when};
use crate::module_support::Module;
use crate::setup::Setup;

/// The tests.
pub const TESTS: &[Test] = &[Test::new("module::recordings_replay", 300, recordings_replay)];

/// File that starts, stops and returns recordings.
const RECORDING: &str = "/sys/kernel/debug/ebb_trackers/recording";
/// Size of the disk over which a compressed recording leaves the guest.
const DISK_BYTES: u64 = 8 << 20;
/// Maximum number of events of a recording, a few times the usual number.
const EVENTS: &str = "100000";
/// Bytes that the program writes page by page: some blocks of 2 MiB.
const PROGRAM_BYTES: u64 = 4 * MIB;
/// Maximum number of events of each kind that are omitted, one at a time.
fn sample() -> usize {
    counts(15, 40)
}
/// Events of a tracker's handling of a block. A recording that lacks any one of them is refused.
const HANDLING: [PageEvent; 4] =
    [PageEvent::Isolate, PageEvent::Report, PageEvent::Answer, PageEvent::Putback];
/// Events of the allocator. A recording that lacks one of them is refused if the same pages have a
/// later event, as most of them have before Linux 6.7: since then a processor's list keeps as many
/// pages as the processor frees in a while.
const ALLOCATOR: [PageEvent; 2] = [PageEvent::Remove, PageEvent::Free];

fn shell(guest: &Guest, line: &str) -> String {
    let argv = ["/bin/busybox", "sh", "-c", line].map(str::to_owned).to_vec();
    let result = guest.run(Command::Exec { argv });
    assert_eq!(result["code"], 0, "{line}: {result}");
    result["stdout"].as_str().expect("text").to_owned()
}

/// Reads a recording, which the guest writes to its disk. What follows it there is not read.
fn read_recording(guest: &Guest, disk: &Path) -> String {
    shell(guest, &format!("gzip -c {RECORDING} | dd of=/dev/vda bs=64k conv=fsync 2>/dev/null"));
    let mut text = String::new();
    let file = File::open(disk).expect("the guest's disk");
    GzDecoder::new(file).read_to_string(&mut text).expect("gzip's format");
    text
}

fn recordings_replay(scene: &Scene) {
    let disk = scene.path("disk");
    File::create(&disk).unwrap().set_len(DISK_BYTES).unwrap();
    let setup = Setup::new(scene)
        .args(["--cpus", "2", "--disk", &format!("path={}", disk.display())])
        .memory("size=256M")
        .balloon("reporting=on,verify_reports=on");
    let quick =
        ["percpu_entries=800", "percpu_order=0", "percpu_flush_ms=500", "bitmap_delay_ms=500"];
    let module = Module::start_with_trackers(setup, &quick);
    let guest = &module.guest;
    let mut recordings = Vec::new();
    for (tracker, kind) in
        [("percpu", Kind::Percpu), ("bitmap", Kind::Bitmap), ("reporting", Kind::Reporting)]
    {
        module.set("tracker", tracker);
        guest.write_file(RECORDING, EVENTS);
        guest.run(Command::AllocTouchExit { bytes: PROGRAM_BYTES });
        guest.run(Command::Sleep { ms: 2500 });
        eventually("free pages are reported", 60, || {
            when(module.counter("reported") > 0, || "none is".to_owned())
        });
        guest.run(Command::AllocTouchExit { bytes: PROGRAM_BYTES });
        guest.run(Command::Sleep { ms: 1000 });
        guest.write_file(RECORDING, "0");
        recordings.push((kind, read_recording(guest, &disk)));
    }
    module.set("tracker", "none");
    assert_eq!(module.counter("isolated_now"), 0);
    module.check_well();
    let later_events: &[PageEvent] =
        if is_at_least(&module.release, 6, 7) { &[] } else { &ALLOCATOR };
    // Without the guest, which would have the processors to share.
    drop(module);
    for (kind, text) in recordings {
        check(kind, &text, later_events);
    }
}

/// Checks that a recording replays, and that it does not without any one event of a block's
/// handling, or without most of the others.
fn check(kind: Kind, text: &str, others: &[PageEvent]) {
    let recording = Recording::read(text).unwrap_or_else(|error| panic!("{kind:?}: {error}"));
    let replayed = replay(&recording).unwrap_or_else(|mismatch| {
        let lines: Vec<&str> = text.lines().take(mismatch.number + 2).collect();
        let last = lines[lines.len().saturating_sub(30)..].join("\n");
        panic!("{kind:?}: {mismatch}\n{last}");
    });
    assert_eq!(replayed.trackers, [kind]);
    let without = |event| {
        replay_without_one(&recording, event, sample()).unwrap_or_else(|error| panic!("{error}"))
    };
    for event in HANDLING {
        let removals = without(event);
        assert!(removals.tried > 0, "{kind:?}: no {event:?} in {replayed:?}");
        assert!(removals.unnoticed.is_empty(), "{kind:?}: {event:?}: {removals:?}");
    }
    for &event in others {
        let removals = without(event);
        assert!(removals.unnoticed.len() * 2 < removals.tried, "{kind:?}: {event:?}: {removals:?}");
    }
}
