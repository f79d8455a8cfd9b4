//! Memory in many small mappings is coalesced.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use ebb_abi::Pfn;
use ebb_guest_ram::merge::{MergeOutcome, PageLook};
use ebb_guest_ram::{GuestRange, HugePages, InhibitReason};

use crate::common::{PAGE, Setup, are_coalesced, mappings_of, setup};

/// A word of a page full of 7.
const SEVENS: u64 = u64::from_ne_bytes([7; 8]);

/// Memory of many mappings, none of which is merged: every fourth page was, and was discarded, and
/// half of these were written to again. Every present page is full of its number.
fn in_pieces() -> Option<Setup> {
    let mut setup = setup(1024, HugePages::Off)?;
    (0..1024).for_each(|page| setup.fill(page, byte(page)));
    let pages: Vec<_> =
        (100..400).step_by(4).map(|page| (page, setup.publish(&[byte(page)])[0])).collect();
    assert!(setup.replace(&pages).iter().all(|outcome| *outcome == MergeOutcome::Done));
    let discarded: Vec<_> = pages.iter().map(|(page, _)| GuestRange::new(Pfn(*page), 1)).collect();
    setup.ram.discard(&discarded).unwrap();
    (100..400).step_by(8).for_each(|page| setup.fill(page, byte(page)));
    Some(setup)
}

fn byte(page: u64) -> u8 {
    (page % 250) as u8 + 1
}

fn is_absent(page: u64) -> bool {
    (100..400).contains(&page) && (page - 100) % 8 == 4
}

fn is_as_it_was(setup: &Setup) -> bool {
    (0..1024).all(|page| setup.is_full_of(page, if is_absent(page) { 0 } else { byte(page) }))
}

/// The present pages except those between the bounds.
fn pages(from: u64, to: u64) -> Vec<(u64, u8)> {
    let wanted = (0..1024).filter(|page| !is_absent(*page) && !(from..to).contains(page));
    wanted.map(|page| (page, byte(page))).collect()
}

#[test]
fn memory_that_is_no_longer_merged_is_in_few_mappings_after_a_while() {
    let Some(mut setup) = in_pieces() else { return };
    let (before, resident) = (mappings_of(&setup), setup.ram.resident_bytes().unwrap());
    assert!(before > 100, "{before}");
    assert!(are_coalesced(&mut setup, &pages(0, 0), 10), "{} mappings", mappings_of(&setup));
    assert_eq!(setup.ram.resident_bytes().unwrap(), resident);
    assert!(setup.ram.broken_cow_stats().joined_mappings > 100);
    assert!(setup.ram.merged_mappings() < 10, "counted: {}", setup.ram.merged_mappings());
    assert!(is_as_it_was(&setup));
    // Writes are detected, and pages are merged, as before.
    let slot = setup.publish(&[7])[0];
    setup.look(0, 512);
    assert_eq!(setup.look(300, 1), [PageLook::Clean]);
    setup.fill(300, 7);
    assert_eq!(setup.look(300, 1), [PageLook::Written]);
    assert_eq!(setup.replace(&[(300, slot)]), [MergeOutcome::Done]);
    setup.fill(300, byte(300));
    assert!(is_as_it_was(&setup));
}

#[test]
fn merged_pages_stay_in_place() {
    let Some(mut setup) = in_pieces() else { return };
    let slots = setup.publish(&(200..264).map(byte).collect::<Vec<_>>());
    (200..264).for_each(|page| setup.fill(page, byte(page)));
    let shared: Vec<_> = (200..264).zip(slots).collect();
    assert_eq!(setup.replace(&shared), [MergeOutcome::Done; 64]);
    assert!(are_coalesced(&mut setup, &pages(200, 264), 12), "{} mappings", mappings_of(&setup));
    assert_eq!(setup.look(200, 64), [PageLook::Merged; 64]);
    assert!((200..264).all(|page| setup.is_full_of(page, byte(page))));
    assert!(setup.is_full_of(199, byte(199)) && setup.is_full_of(265, byte(265)));
}

#[test]
fn coalescing_continues_while_discards_are_inhibited() {
    // No page is copied, and pinned pages are not moved.
    let Some(mut setup) = in_pieces() else { return };
    let _guard = setup.ram.inhibit_discard(InhibitReason::PinnedMemory);
    assert!(are_coalesced(&mut setup, &pages(0, 0), 10), "{} mappings", mappings_of(&setup));
    assert!(is_as_it_was(&setup));
}

/// Threads read and write pages all the time, while mappings around them are coalesced. A thread
/// that is not woken would keep the test from ending, since nothing else happens to these pages
/// then.
#[test]
fn every_thread_that_accesses_moved_pages_is_woken() {
    let Some(mut setup) = setup(512, HugePages::Off) else { return };
    (0..512).for_each(|page| setup.fill(page, 7));
    let slot = setup.publish(&[7])[0];
    let pages: Vec<_> = (100..400).step_by(4).map(|page| (page, slot)).collect();
    let base = setup.address(0);
    let ended = AtomicBool::new(false);
    let counts = [0, 1].map(|_| AtomicU64::new(0));
    let mut rounds = 0;
    std::thread::scope(|scope| {
        for (number, count) in counts.iter().enumerate() {
            let ended = &ended;
            scope.spawn(move || {
                let mut page = number;
                while !ended.load(Ordering::Acquire) {
                    page = (page * 5 + 1 + 2 * number) % 512;
                    if page % 4 != 0 || !(100..400).contains(&page) {
                        // SAFETY: the word is guest memory, which outlives the scope, and is
                        // accessed by atomics only.
                        let word = unsafe { AtomicU64::from_ptr((base + page * PAGE) as *mut u64) };
                        assert_eq!(word.swap(SEVENS, Ordering::Relaxed), SEVENS);
                    }
                    count.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
        for _ in 0..20 {
            let done = setup.replace(&pages).iter().all(|outcome| *outcome == MergeOutcome::Done);
            for (page, _) in &pages {
                setup.ram.discard(&[GuestRange::new(Pfn(*page), 1)]).unwrap();
                setup.fill(*page, 7);
            }
            let joined = setup.ram.broken_cow_stats().joined_mappings;
            // Another test may have created a child process: see `are_coalesced`.
            while done && setup.ram.broken_cow_stats().joined_mappings == joined {
                setup.look(0, 512);
                for (page, _) in &pages {
                    setup.fill(*page, 7);
                }
            }
            rounds += u32::from(done);
            let before = counts.each_ref().map(|count| count.load(Ordering::Relaxed));
            while counts
                .iter()
                .zip(before)
                .any(|(count, before)| count.load(Ordering::Relaxed) < before + 100)
            {
                std::thread::yield_now();
            }
        }
        ended.store(true, Ordering::Release);
    });
    assert!(rounds > 10, "{rounds}");
}
