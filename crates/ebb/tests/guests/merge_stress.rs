//! The stress of merging without a guest, on the kernel that guests' monitors have: threads write
//! and verify what they wrote. That it detects mistakes is tested where it runs at full speed
//! (`crates/guest-ram/tests/merge`).

use ebb_guest_ram::HugePages;
use ebb_guest_ram::merge::stress::{Freeze, Stress, run};

use crate::harness::{Scene, Test, WRONG_CONTENT};

/// The tests.
pub const TESTS: &[Test] =
    &[Test::new("merge_stress::no_write_is_lost", 120, no_write_is_lost).merging()];

fn no_write_is_lost(_scene: &Scene) {
    let stress = Stress {
        pages: 1024,
        writers: 2,
        writes: 40_000,
        freeze: Freeze::Yes,
        huge_pages: HugePages::Off,
    };
    let report = run(&stress).unwrap_or_else(|error| panic!("{error}"));
    assert_eq!(report.lost, 0, "{WRONG_CONTENT}: {report:?}");
    assert!(report.writes >= 80_000, "{report:?}");
    // Written pages were merged repeatedly.
    assert!(report.merged > 2000 && report.broken > 500 && report.discarded > 0, "{report:?}");
}
