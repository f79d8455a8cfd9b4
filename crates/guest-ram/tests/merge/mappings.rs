//! Exhausted mappings: longer runs are still merged, and nothing is lost.

use std::process::Command;
use std::ptr;

use ebb_guest_ram::HugePages;
use ebb_guest_ram::merge::MergeOutcome;

use crate::common::{PAGE, setup};

#[test]
fn single_pages_are_refused_before_longer_runs() {
    run_alone("mappings::with_half_of_the_pages_single");
}

/// Run in a separate process by the previous test: all memories of a process share the bound.
#[test]
#[ignore = "for single_pages_are_refused_before_longer_runs"]
fn with_half_of_the_pages_single() {
    const PAGES: u64 = 1 << 15;
    let Some(mut setup) = setup(PAGES, HugePages::Off) else { return };
    let limit: u64 =
        std::fs::read_to_string("/proc/sys/vm/max_map_count").unwrap().trim().parse().unwrap();
    if limit > 2 * PAGES {
        eprintln!("not tested: vm.max_map_count is {limit}, which this test cannot use up");
        return;
    }
    (0..PAGES).for_each(|page| setup.fill(page, 7));
    let slots = setup.publish(&[7; 64]);
    // Every other page of the first half.
    let mut outcomes = Vec::new();
    for start in (0..PAGES / 2).step_by(512) {
        let pages: Vec<_> = (start..start + 512).step_by(2).map(|page| (page, slots[0])).collect();
        outcomes.extend(setup.replace(&pages));
    }
    let done = outcomes.iter().filter(|outcome| **outcome == MergeOutcome::Done).count();
    assert!(done > 1000 && done < outcomes.len(), "{done} of {}", outcomes.len());
    assert!(
        outcomes
            .iter()
            .all(|outcome| matches!(outcome, MergeOutcome::Done | MergeOutcome::NoMappings))
    );
    // Runs of 64 pages are merged.
    let pages: Vec<_> =
        (0..64).map(|page| (PAGES / 2 + 600 + page, slots[page as usize])).collect();
    assert_eq!(setup.replace(&pages), [MergeOutcome::Done; 64]);
    assert!((0..PAGES).all(|page| setup.is_full_of(page, 7)));
}

#[test]
fn a_process_without_mappings_left_loses_nothing() {
    run_alone("mappings::with_all_mappings_used_up");
}

/// Runs an ignored test in a separate process.
fn run_alone(test: &str) {
    let me = std::env::current_exe().unwrap();
    let out =
        Command::new(me).args(["--exact", test, "--ignored", "--nocapture"]).output().unwrap();
    let text = String::from_utf8_lossy(&out.stdout);
    assert!(
        out.status.success() && text.contains("1 passed"),
        "{text}{}",
        String::from_utf8_lossy(&out.stderr)
    );
}

/// Run in a separate process by the previous test.
#[test]
#[ignore = "for a_process_without_mappings_left_loses_nothing"]
fn with_all_mappings_used_up() {
    let Some(mut setup) = setup(512, HugePages::Off) else { return };
    (0..512).for_each(|page| setup.fill(page, 7));
    let slots = setup.publish(&[7; 64]);
    setup.look(0, 512);
    // One page each, and neighbours with different protections, so that they are not joined.
    let mut taken = Vec::with_capacity(1 << 20);
    for number in 0..1 << 20 {
        let protection = if number % 2 == 0 { libc::PROT_NONE } else { libc::PROT_READ };
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: a new mapping at an address chosen by the kernel.
        let address = unsafe { libc::mmap(ptr::null_mut(), PAGE, protection, flags, -1, 0) };
        if address == libc::MAP_FAILED {
            break;
        }
        taken.push(address);
    }
    let pages: Vec<_> = (100..164).map(|page| (page, slots[page as usize - 100])).collect();
    let used_up = setup.replace(&pages);
    // Some room: enough to freeze a run, but not to map all of it.
    for address in taken.drain(..3) {
        // SAFETY: a mapping that was created above.
        unsafe { libc::munmap(address, PAGE) };
    }
    let little_room: Vec<_> = (200..216).step_by(2).map(|page| (page, slots[0])).collect();
    let little_room = setup.replace(&little_room);
    for address in taken {
        // SAFETY: as above.
        unsafe { libc::munmap(address, PAGE) };
    }
    assert_eq!(used_up, [MergeOutcome::NoMappings; 64]);
    assert!(little_room.contains(&MergeOutcome::NoMappings), "{little_room:?}");
    assert!((0..512).all(|page| setup.is_full_of(page, 7)));
    assert_eq!(setup.replace(&pages), [MergeOutcome::Done; 64]);
    assert!((0..512).all(|page| setup.is_full_of(page, 7)));
}
