//! Threads that access pages while they are moved away.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;

use ebb_guest_ram::HugePages;
use ebb_guest_ram::merge::MergeOutcome;

use crate::common::{PAGE, setup};

/// Threads read and write pages of a block all the time, and other pages for the first time, while
/// the block's pages are replaced and unmerged again and again. A thread that is not woken would
/// keep the test from ending.
#[test]
fn every_thread_that_accesses_a_frozen_page_is_woken() {
    let Some(mut setup) = setup(1 << 14, HugePages::Off) else { return };
    (0..512).for_each(|page| setup.fill(page, 7));
    // Half of them differ from their slots, and are moved back each time.
    let bytes: Vec<u8> = (0..512).map(|page| if page % 16 < 8 { 7 } else { 8 }).collect();
    let slots = setup.publish(&bytes);
    let pages: Vec<_> = (0..512).map(|page| (page, slots[page as usize])).collect();
    let base = setup.address(0);
    let ended = AtomicBool::new(false);
    let (reads, firsts) = (AtomicU64::new(0), AtomicU64::new(0));
    let mut done = 0;
    thread::scope(|scope| {
        for number in 0..2 {
            let (ended, reads) = (&ended, &reads);
            scope.spawn(move || {
                let mut page = number;
                while !ended.load(Ordering::Acquire) {
                    page = (page * 5 + 1 + number) % 512;
                    let word = base + page * PAGE + 8 * (page % 500);
                    // SAFETY: the word is guest memory, which outlives the scope, and is accessed
                    // only with atomics.
                    let word = unsafe { AtomicU64::from_ptr(word as *mut u64) };
                    assert_eq!(word.load(Ordering::Relaxed), u64::from_ne_bytes([7; 8]));
                    if page % 16 >= 8 {
                        word.store(u64::from_ne_bytes([7; 8]), Ordering::Relaxed);
                    }
                    reads.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
        let (ended, firsts) = (&ended, &firsts);
        scope.spawn(move || {
            for page in 512..1 << 14 {
                if ended.load(Ordering::Acquire) {
                    break;
                }
                // SAFETY: as above.
                let word = unsafe { AtomicU64::from_ptr((base + page * PAGE) as *mut u64) };
                word.store(page as u64, Ordering::Relaxed);
                firsts.fetch_add(1, Ordering::Relaxed);
                thread::yield_now();
            }
        });
        for _ in 0..200 {
            let outcomes = setup.replace(&pages);
            done += outcomes.iter().filter(|outcome| **outcome == MergeOutcome::Done).count();
            // This does not end while the other threads make no progress, as would be the case if
            // they were not woken.
            let before = reads.load(Ordering::Relaxed);
            while reads.load(Ordering::Relaxed) < before + 100 {
                thread::yield_now();
            }
        }
        ended.store(true, Ordering::Release);
    });
    assert_eq!(done, 256, "each page of the equal half once");
    assert!(firsts.load(Ordering::Relaxed) > 0);
}
