//! A guest whose equal pages are merged by its monitor during everything that changes memory:
//! writes, the balloon, reports of free pages, a reboot, snapshots and migration.

use ebb_agent::count::CountReport;
use ebb_agent::protocol::{Command, Event};
use ebb_vmm::api::MergeState;
use serde_json::json;

use crate::guest::{Guest, MIB};
use crate::harness::{Scene, Test, WRONG_CONTENT, counts, eventually, when};
use crate::merge_support::{PAGE_BYTES, merged};
use crate::moved::{Receive, Route, move_to};
use crate::saved::Restore;
use crate::setup::Setup;

/// The tests.
pub const TESTS: &[Test] = &[
    Test::new("merge::no_write_is_lost", 240, no_write_is_lost).merging(),
    Test::new("merge::written_and_merged_again", 240, written_and_merged_again).merging(),
    Test::new("merge::discards_and_a_reboot", 240, discards_and_a_reboot).merging(),
    Test::new("merge::saved_and_moved", 240, saved_and_moved).merging(),
    Test::new("merge::huge_pages", 240, huge_pages).merging(),
];

/// Memory that contains each page twice, in bytes.
const HELD: u64 = 2 * 16 * MIB;
/// Minimum of it that must be merged: the limits on mappings may exclude single pages. A guest's
/// kernel alone has less than half as many equal pages.
const MERGED: u64 = HELD / 4 * 3;
/// Memory whose pages are incremented, in bytes.
const COUNTED: u64 = 24 * MIB;
/// Maximum number of rounds of some seconds, within the test's time limit. A host needs two, or as
/// many as fill the limit if it is so slow that each page is written once in a round.
fn most_rounds() -> u32 {
    counts(30, 72)
}

/// Writes two copies of the same pages in the guest.
#[track_caller]
fn hold_twice(guest: &Guest, pattern: u64) {
    for _ in 0..2 {
        guest.run(Command::Hold { bytes: HELD / 2, pattern });
    }
}

fn no_write_is_lost(scene: &Scene) {
    let guest = merged(scene, "224M", "").args(["--cpus", "2"]).start_and_merge();
    // Otherwise a page that was written to soon after it was merged is not merged for some scans,
    // and it depends on what else the guest writes whether that is ever over before the next sweep.
    guest.set_merge(&json!({ "smart_scan": false }));
    let mut increments = 0;
    // At least two rounds, and as many as a slow host needs to merge pages, and to merge pages
    // again that were merged and then written to.
    for round in 1..=most_rounds() {
        // A sweep takes some hundred milliseconds, so each page is unchanged for a while and then
        // written to at any step of the merging thread.
        let count = Command::Count {
            bytes: COUNTED,
            tasks: 2,
            kinds: 96,
            burst_pages: 128,
            pause_us: 20_000,
            seconds: 5,
        };
        let report: CountReport = serde_json::from_value(guest.run(count)).unwrap();
        assert_eq!(report.wrong_pages, 0, "{WRONG_CONTENT}: {report:?}");
        increments += report.increments;
        let now = guest.merge_statistics();
        let merged = now.replaced.expect("the counts of replaced pages").done;
        let again = now.remerged_pages.expect("the count of remerged pages");
        // More than a few by chance.
        if round > 1 && merged > COUNTED / PAGE_BYTES / 2 && again > COUNTED / PAGE_BYTES / 8 {
            break;
        }
        assert!(
            round < most_rounds(),
            "{merged} merged, {again} of them again: {report:?} {now:?}"
        );
    }
    assert_eq!(guest.merge().state, MergeState::Merging, "{increments} increments");
}

/// The guest reuses the same memory for other content, again twice, and returns nothing to the host
/// in between.
fn written_and_merged_again(scene: &Scene) {
    // Little memory, so that the same pages are used again.
    let guest = merged(scene, "128M", "").start_and_merge();
    hold_twice(&guest, 61);
    guest.wait_merged(MERGED);
    let sharing = guest.merge_statistics().pages_sharing.unwrap();
    for pattern in [62, 61] {
        let before = guest.merge_statistics().remerged_pages.unwrap();
        guest.run(Command::Release);
        hold_twice(&guest, pattern);
        guest.check_held();
        eventually("as many pages share as before", 60, || {
            let now = guest.merge_statistics();
            let again = now.remerged_pages > Some(before + MERGED / PAGE_BYTES / 8);
            when(again && now.pages_sharing >= Some(sharing / 16 * 15), || {
                format!("{before} merged again and {sharing} sharing before, now {now:?}")
            })
        });
        guest.check_held();
    }
}

fn discards_and_a_reboot(scene: &Scene) {
    let mut guest = merged(scene, "224M", "")
        .balloon("reporting=on")
        .args(["--on-reboot", "reset"])
        .start_and_merge();
    hold_twice(&guest, 51);
    let before = guest.resident();
    guest.wait_merged(MERGED);
    guest.check_held();
    let statistics = guest.merge_statistics();
    assert!(statistics.pages_sharing >= Some(MERGED / PAGE_BYTES / 2), "{statistics:?}");
    let resident = guest.resident();
    assert!(resident < before, "{before} -> {resident} bytes are the machine's own");
    // The balloon inflates and deflates; some of its pages are merged or were zeroed.
    guest.inflate_to(48 * MIB);
    guest.check_held();
    guest.inflate_to(0);
    guest.run(Command::AllocTouchExit { bytes: 48 * MIB });
    guest.check_held();
    // Merged pages are freed, reported, and reused for other content.
    let merged = || guest.merge_statistics().merged_bytes.unwrap();
    let (reported, merged_before) = (guest.metric("ebb_balloon_reported_bytes_total"), merged());
    guest.run(Command::Release);
    eventually("released memory is reported", 60, || {
        let now = guest.metric("ebb_balloon_reported_bytes_total");
        when(now >= reported + HELD / 2, || format!("{reported} -> {now} bytes"))
    });
    eventually("released memory is no longer merged", 30, || {
        let now = merged();
        when(now + MERGED / 2 <= merged_before, || format!("{merged_before} -> {now} bytes"))
    });
    hold_twice(&guest, 52);
    guest.check_held();
    guest.wait_merged(MERGED);
    guest.check_held();

    guest.send(Command::Reboot);
    match guest.wait_ready(2) {
        Event::Ready { warnings, .. } => assert_eq!(warnings, [] as [String; 0]),
        other => panic!("{other:?}"),
    }
    hold_twice(&guest, 53);
    guest.wait_merged(MERGED);
    guest.check_held();
    // Everything can be unmerged without an effect on the guest.
    guest.unmerge();
    guest.check_held();
    assert_eq!(guest.stable_frames().len(), 0);
    guest.send(Command::PowerOff);
    let (code, log) = guest.wait_end();
    assert_eq!(code, Some(0), "{log}");
}

/// Huge pages are split only for equal pages, and what is not equal any more becomes huge again.
fn huge_pages(scene: &Scene) {
    let guest = Setup::new(scene).memory("size=192M,merge=owner").start_and_merge();
    guest.run(Command::Hold { bytes: 32 * MIB, pattern: 57 });
    hold_twice(&guest, 58);
    let before = guest.huge_bytes();
    assert!(before >= 32 * MIB + HELD, "{before} bytes of huge pages");
    guest.wait_merged(MERGED);
    guest.check_held();
    // What was split is counted in the next scan.
    let scans = guest.merge_statistics().full_scans.unwrap();
    eventually("two more scans", 60, || {
        let now = guest.merge_statistics().full_scans.unwrap();
        when(now >= scans + 2, || format!("{scans} -> {now}"))
    });
    let merged = guest.merge_statistics();
    let huge = guest.huge_bytes();
    // Besides, the kernel has equal pages, and pages of zeros.
    let zeros = merged.ksm_zero_pages.unwrap() * PAGE_BYTES;
    let split = HELD + zeros + 16 * MIB;
    assert!(huge + split >= before, "{before} -> {huge} bytes are huge: {merged:?}");
    assert!(merged.huge_pages_split >= Some(MERGED >> 21), "{merged:?}");
    assert!(merged.huge_pages_split_in_vain <= Some(4), "{merged:?}");
    assert!(merged.untracked_pages > Some(0), "{merged:?}");
    // The same memory, with other content and without equal pages.
    guest.run(Command::Release);
    guest.run(Command::Hold { bytes: 64 * MIB, pattern: 59 });
    eventually("memory becomes huge again", 120, || {
        let now = guest.merge_statistics();
        let again = now.huge_pages_collapsed > Some(0);
        when(again && guest.huge_bytes() > huge, || format!("{huge} bytes were huge: {now:?}"))
    });
    guest.check_held();
}

fn saved_and_moved(scene: &Scene) {
    let file = scene.path("vm.snapshot");
    let guest = merged(scene, "192M", "").start_and_merge();
    hold_twice(&guest, 54);
    guest.wait_merged(MERGED);
    guest.check_held();
    // The guest continues after a snapshot, and so does merging.
    guest.save(&file);
    guest.check_held();
    let scans = guest.merge_statistics().full_scans;
    eventually("scans continue", 30, || {
        let now = guest.merge_statistics().full_scans;
        when(now > scans, || format!("{now:?}"))
    });
    // The file contains memory as the guest sees it. Whether its pages are merged is decided at
    // each restore.
    for (name, arguments, merges) in [
        ("apart", &[][..], false),
        ("merges", &["--memory", "merge=owner"], true),
        ("trusts", &["--trust-paths"], true),
    ] {
        let restored =
            Restore::new(scene, &file).socket(name).args(["--verify"]).args(arguments).start();
        restored.check_held();
        assert_eq!(restored.merge().state != MergeState::Off, merges, "{name}");
        restored.end();
    }
    let second = Receive::new(scene, "second", Route::Unix).args(["--memory", "merge=owner"]);
    let (guest, report) = move_to(second, guest, ["--free-pages", "off"]);
    assert!(report["bytes_sent"].as_u64() >= Some(HELD / 2), "{report}");
    guest.check_held();
    // The destination merges its pages again.
    guest.merge_quickly();
    guest.wait_merged(MERGED);
    guest.check_held();
}
