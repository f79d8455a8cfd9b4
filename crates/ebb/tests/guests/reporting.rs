//! Free page reporting returns memory to the host.

use ebb_agent::protocol::Command;
use ebb_vmm::api::BalloonFeature;

use crate::guest::{Guest, MIB};
use crate::harness::{Scene, Test, eventually, when};
use crate::setup::Setup;

/// The tests.
pub const TESTS: &[Test] = &[
    Test::new("reporting::returns_memory", 300, returns_memory),
    Test::new("reporting::off_keeps_memory", 240, off_keeps_memory),
    Test::new("reporting::with_init_on_free", 300, with_init_on_free),
    Test::new("reporting::needs_the_poison_feature", 240, needs_the_poison_feature),
];

/// Memory that the program writes to, in bytes.
const PROGRAM_BYTES: u64 = 600 * MIB;

/// Runs the program and waits until at least 80 % of its memory are returned to the host.
fn check_returns(guest: &Guest) {
    // A guest also reports memory freed at boot; the peak is measured while the program holds its
    // memory.
    guest.run(Command::Hold { bytes: PROGRAM_BYTES, pattern: 3 });
    let (peak, process_peak) = (guest.resident(), guest.process_bytes());
    assert!(peak > PROGRAM_BYTES, "{peak}");
    guest.run(Command::Release);
    let must_fall = PROGRAM_BYTES / 10 * 8;
    // Linux starts after 2 s and reports at most a sixteenth of a list every 2 s.
    eventually("reported memory is returned to the host", 90, || {
        let (resident, process) = (guest.resident(), guest.process_bytes());
        when(resident + must_fall <= peak && process + must_fall <= process_peak, || {
            format!("{peak} -> {resident} bytes, process {process_peak} -> {process}")
        })
    });
    assert!(guest.metric("ebb_balloon_reported_bytes_total") >= must_fall);
    // Reported memory can be used again; measured while it is held, too, as a pass may follow at
    // once when it is freed.
    guest.run(Command::Hold { bytes: PROGRAM_BYTES, pattern: 4 });
    assert_eq!(guest.wrong_pages(), 0);
    let resident = guest.resident();
    assert!(resident > PROGRAM_BYTES, "{resident}");
}

fn returns_memory(scene: &Scene) {
    let guest = Setup::new(scene).memory("size=1G").balloon("reporting=on").start();
    assert!(guest.balloon().negotiated_features.contains(&BalloonFeature::PageReporting));
    check_returns(&guest);
}

fn off_keeps_memory(scene: &Scene) {
    let guest = Setup::new(scene).memory("size=1G").balloon("reporting=off").start();
    let info = guest.balloon();
    assert!(!info.offered_features.contains(&BalloonFeature::PageReporting), "{info:?}");
    assert!(!info.negotiated_features.contains(&BalloonFeature::PageReporting), "{info:?}");
    guest.run(Command::AllocTouchExit { bytes: PROGRAM_BYTES });
    let peak = guest.resident();
    assert!(peak > PROGRAM_BYTES, "{peak}");
    // Longer than two passes of a guest that reports.
    guest.run(Command::Sleep { ms: 4500 });
    assert!(guest.resident() >= peak - 8 * MIB, "{peak} -> {}", guest.resident());
    assert_eq!(guest.metric("ebb_balloon_reported_bytes_total"), 0);
    assert_eq!(guest.metric("ebb_balloon_discarded_bytes_total"), 0);
}

fn with_init_on_free(scene: &Scene) {
    let guest = Setup::new(scene)
        .memory("size=1G")
        .words("init_on_free=1")
        .balloon("reporting=on,poison=on")
        .start();
    let info = guest.balloon();
    for feature in [BalloonFeature::PageReporting, BalloonFeature::PagePoison] {
        assert!(info.negotiated_features.contains(&feature), "{info:?}");
    }
    // Free pages are zero, and so are discarded ones: all can be discarded.
    assert_eq!(info.poison, None);
    check_returns(&guest);
}

fn needs_the_poison_feature(scene: &Scene) {
    // Linux does not use reporting if it initializes freed pages and cannot report the pattern
    // (virtballoon_validate).
    let guest =
        Setup::new(scene).words("init_on_free=1").balloon("reporting=on,poison=off").start();
    let info = guest.balloon();
    assert!(info.offered_features.contains(&BalloonFeature::PageReporting), "{info:?}");
    assert!(!info.negotiated_features.contains(&BalloonFeature::PageReporting), "{info:?}");
    // The other queues work, although a preceding queue is missing.
    guest.inflate_to(64 * MIB);
    guest.inflate_to(0);
    assert!(guest.statistics().unwrap().statistics.total_memory_bytes.is_some());
}
