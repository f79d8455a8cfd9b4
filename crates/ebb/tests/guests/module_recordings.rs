//! Replays recordings of the trackers of Ebb's balloon driver through their model.

use std::io::Read;

use ebb_agent::protocol::Command;
use ebb_tracker_model::recording::{PageEvent, Recording};
use ebb_tracker_model::replay::{replay, replay_without_one};
use ebb_tracker_model::tracker::Kind;
use flate2::read::GzDecoder;

use crate::guest::{Guest, MIB};
use crate::harness::{Scene, Test, eventually, when};
use crate::module_support::Module;
use crate::setup::Setup;

/// The tests.
pub const TESTS: &[Test] = &[Test::new("module::recordings_replay", 300, recordings_replay)];

/// File that starts, stops and returns recordings.
const RECORDING: &str = "/sys/kernel/debug/ebb_balloon/recording";
/// Bytes of a file to read at a time; the agent limits the length.
const PIECE_BYTES: usize = 48 << 10;
/// Maximum number of events of a recording, a few times the usual number.
const EVENTS: &str = "100000";
/// Bytes that the program writes page by page: some blocks of 2 MiB.
const PROGRAM_BYTES: u64 = 4 * MIB;
/// Maximum number of events of each kind that are omitted, one at a time.
const SAMPLE: usize = 40;
/// Events of a tracker's handling of a block. A recording that lacks any one of them is refused.
const HANDLING: [PageEvent; 4] =
    [PageEvent::Isolate, PageEvent::Report, PageEvent::Answer, PageEvent::Putback];
/// Events of the allocator. A recording that lacks one of them is refused if the same pages have a
/// later event, as most of them have.
const ALLOCATOR: [PageEvent; 2] = [PageEvent::Remove, PageEvent::Free];

fn shell(guest: &Guest, line: &str) -> String {
    let argv = ["/bin/busybox", "sh", "-c", line].map(str::to_owned).to_vec();
    let result = guest.run(Command::Exec { argv });
    assert_eq!(result["code"], 0, "{line}: {result}");
    result["stdout"].as_str().expect("text").to_owned()
}

/// Reads a recording over the console, which is slow: compressed, in hexadecimal digits.
fn read_recording(guest: &Guest) -> String {
    shell(guest, &format!("gzip -c {RECORDING} | xxd -p > /recording"));
    let mut digits = String::new();
    for piece in 0.. {
        let line = format!("dd if=/recording bs={PIECE_BYTES} skip={piece} count=1 2>/dev/null");
        let part = shell(guest, &line);
        digits.push_str(&part);
        if part.len() < PIECE_BYTES {
            break;
        }
    }
    digits.retain(|digit| digit.is_ascii_hexdigit());
    let bytes: Vec<u8> = (0..digits.len() / 2)
        .map(|at| u8::from_str_radix(&digits[2 * at..2 * at + 2], 16).expect("digits"))
        .collect();
    let mut text = String::new();
    GzDecoder::new(bytes.as_slice()).read_to_string(&mut text).expect("gzip's format");
    text
}

fn recordings_replay(scene: &Scene) {
    let setup = Setup::new(scene)
        .args(["--cpus", "2"])
        .memory("size=256M")
        .balloon("reporting=on,verify_reports=on");
    let quick =
        ["percpu_entries=800", "percpu_order=0", "percpu_flush_ms=500", "bitmap_delay_ms=500"];
    let module = Module::start(setup, &quick);
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
            let counters = guest.read_file("/sys/kernel/debug/ebb_balloon/counters");
            when(module.counter("reported") > 0, || counters)
        });
        guest.run(Command::AllocTouchExit { bytes: PROGRAM_BYTES });
        guest.run(Command::Sleep { ms: 1000 });
        guest.write_file(RECORDING, "0");
        recordings.push((kind, read_recording(guest)));
    }
    module.set("tracker", "none");
    assert_eq!(module.counter("isolated_now"), 0);
    module.check_well();
    // Without the guest, which would have the processors to share.
    drop(module);
    for (kind, text) in recordings {
        check(kind, &text);
    }
}

/// Checks that a recording replays, and that it does not without any one event of a block's
/// handling.
fn check(kind: Kind, text: &str) {
    let recording = Recording::read(text).unwrap_or_else(|error| panic!("{kind:?}: {error}"));
    let replayed = replay(&recording).unwrap_or_else(|mismatch| {
        let lines: Vec<&str> = text.lines().take(mismatch.number + 2).collect();
        let last = lines[lines.len().saturating_sub(30)..].join("\n");
        panic!("{kind:?}: {mismatch}\n{last}");
    });
    assert_eq!(replayed.trackers, [kind]);
    let without = |event| {
        replay_without_one(&recording, event, SAMPLE).unwrap_or_else(|error| panic!("{error}"))
    };
    for event in HANDLING {
        let removals = without(event);
        assert!(removals.tried > 0, "{kind:?}: no {event:?} in {replayed:?}");
        assert!(removals.unnoticed.is_empty(), "{kind:?}: {event:?}: {removals:?}");
    }
    for event in ALLOCATOR {
        let removals = without(event);
        assert!(removals.unnoticed.len() * 2 < removals.tried, "{kind:?}: {event:?}: {removals:?}");
    }
}
