//! Trimming: only zero pages are returned to the host, also of a busy guest.

use ebb_agent::protocol::Command;
use ebb_vmm::api::TrimReport;

use crate::guest::{Guest, MIB};
use crate::harness::{Scene, Test};
use crate::setup::Setup;

/// The tests.
pub const TESTS: &[Test] = &[
    Test::new("trim::returns_zeros", 240, returns_zeros),
    Test::new("trim::beside_a_busy_guest", 300, beside_a_busy_guest),
];

/// Trims all of the guest's memory.
fn trim(guest: &Guest) -> TrimReport {
    let mut total = TrimReport::default();
    while !total.complete {
        total.add(&guest.put_for("/vm/trim"));
    }
    total
}

fn returns_zeros(scene: &Scene) {
    let guest = Setup::new(scene).memory("size=1G").start();
    guest.run(Command::Hold { bytes: 64 * MIB, pattern: 3 });
    let before = guest.resident();
    let report = trim(&guest);
    // A kernel that has just booted has touched parts of many huge pages.
    assert!(report.returned_bytes > 8 * MIB, "{report:?}");
    assert!(report.returned_bytes < report.scanned_bytes, "{report:?}");
    assert!(report.pauses > 0, "{report:?}");
    let after = guest.resident();
    assert!(after + report.returned_bytes / 2 < before, "{before} -> {after}, {report:?}");
    assert!(after > 64 * MIB, "{after}");
    assert_eq!(guest.wrong_pages(), 0);

    guest.put("/vm/pause");
    let report = trim(&guest);
    assert_eq!((report.pauses, report.longest_pause_us), (0, 0), "{report:?}");
    guest.put("/vm/resume");
    assert_eq!(guest.wrong_pages(), 0);
}

fn beside_a_busy_guest(scene: &Scene) {
    let guest =
        Setup::new(scene).args(["--cpus", "2"]).memory("size=1G").balloon("reporting=on").start();
    guest.run(Command::Hold { bytes: 96 * MIB, pattern: 9 });
    let work = guest.send(Command::AllocTouchExit { bytes: 500 * MIB });
    let mut returned = 0;
    for _ in 0..8 {
        returned += trim(&guest).returned_bytes;
    }
    assert!(returned > 0);
    guest.outcome(work).unwrap();
    assert_eq!(guest.wrong_pages(), 0);
    guest.run(Command::AllocTouchExit { bytes: 300 * MIB });
    assert_eq!(guest.wrong_pages(), 0);
}
