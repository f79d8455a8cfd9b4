//! Shares that are moved to other stable pages.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;

use ebb_abi::Pfn;
use ebb_guest_ram::merge::{MergeOutcome, PageLook};
use ebb_guest_ram::{GuestRange, HugePages, StableSlot};

use crate::common::{PAGE, Setup, mappings_of, setup};

impl Setup {
    fn move_shares(&mut self, pages: &[(u64, StableSlot)]) -> Vec<MergeOutcome> {
        let pages: Vec<_> = pages.iter().map(|(page, slot)| (Pfn(*page), *slot)).collect();
        let mut outcomes = Vec::new();
        self.session.move_shares(&pages, &mut outcomes);
        assert_eq!(outcomes.len(), pages.len());
        outcomes
    }

    fn slots(&self, start: u64, pages: u64) -> Vec<(u64, StableSlot)> {
        let mut slots = Vec::new();
        self.session.slots(GuestRange::new(Pfn(start), pages), &mut slots);
        slots.into_iter().map(|(page, slot)| (page.0, slot)).collect()
    }

    fn released(&mut self) -> Vec<StableSlot> {
        let mut released = Vec::new();
        self.session.take_released(&mut released);
        released
    }
}

#[test]
fn shares_are_moved_to_equal_stable_pages_only() {
    let Some(mut setup) = setup(1024, HugePages::Off) else { return };
    let bytes: Vec<u8> = (0..64).map(|page| page + 1).collect();
    (0..64).for_each(|page| setup.fill(page, bytes[page as usize]));
    let old = setup.publish(&bytes);
    let pages = |slots: &[StableSlot]| -> Vec<_> { (0..).zip(slots.iter().copied()).collect() };
    assert_eq!(setup.replace(&pages(&old)), [MergeOutcome::Done; 64]);
    let mappings = mappings_of(&setup);
    // One differs, one is written to, and one was discarded.
    let mut others = bytes.clone();
    others[7] = 99;
    let new = setup.publish(&others);
    setup.fill(20, 55);
    setup.ram.discard(&[GuestRange::new(Pfn(30), 1)]).unwrap();
    let mut expected = vec![MergeOutcome::Done; 64];
    expected[7] = MergeOutcome::Different;
    expected[20] = MergeOutcome::Gone;
    expected[30] = MergeOutcome::Gone;
    assert_eq!(setup.released(), [old[30]]);
    assert_eq!(setup.move_shares(&pages(&new)), expected);
    let moved: Vec<usize> = (0..64).filter(|page| ![7, 20, 30].contains(page)).collect();
    let mut released = setup.released();
    released.sort();
    assert_eq!(released, moved.iter().map(|page| old[*page]).collect::<Vec<_>>());
    let looks = setup.look(0, 64);
    for page in 0..64 {
        let byte = match page {
            20 => 55,
            30 => 0,
            _ => bytes[page],
        };
        assert!(setup.is_full_of(page as u64, byte), "page {page}");
        let look = match page {
            20 => PageLook::Broken(old[20]),
            30 => PageLook::Absent,
            _ => PageLook::Merged,
        };
        assert_eq!(looks[page], look, "page {page}");
    }
    let shared = setup.slots(0, 64);
    let slot = |page: usize| if page == 7 { old[7] } else { new[page] };
    let expected: Vec<_> = (0..64)
        .filter(|page| ![20, 30].contains(page))
        .map(|page| (page as u64, slot(page)))
        .collect();
    assert_eq!(shared, expected);
    // One piece less at the hole, and two more at the page that differs and the one written to.
    assert!(mappings_of(&setup) <= mappings + 8, "{} of {mappings}", mappings_of(&setup));
    // The former ones are free now.
    let former = StableSlot { segment: old[0].segment, index: old[0].index };
    setup.stable.write(former, &[77; PAGE]).unwrap();
    assert!(setup.is_full_of(0, bytes[0]));
    // Nothing is left to be done.
    assert_eq!(setup.move_shares(&[(0, new[0])]), [MergeOutcome::Gone]);
    assert_eq!(setup.move_shares(&[(500, new[0]), (5000, new[0])]), [MergeOutcome::Gone; 2]);
    // Moved pages are merged like others.
    setup.fill(0, 33);
    assert_eq!(setup.look(0, 1), [PageLook::Broken(new[0])]);
    let mut released = Vec::new();
    setup.session.unmerge(GuestRange::new(Pfn(0), 64), &mut released).unwrap();
    assert_eq!(released.len(), 61);
    assert!(setup.is_full_of(0, 33) && setup.is_full_of(63, 64));
}

/// Threads read and write pages while their shares are moved back and forth.
#[test]
fn no_write_is_lost_and_no_thread_waits_for_ever() {
    const BYTE: u64 = u64::from_ne_bytes([7; 8]);
    let Some(mut setup) = setup(1024, HugePages::Off) else { return };
    (0..512).for_each(|page| setup.fill(page, 7));
    let slots = [setup.publish(&[7; 512]), setup.publish(&[7; 512])];
    let pages = |turn: usize| -> Vec<_> { (0..).zip(slots[turn].iter().copied()).collect() };
    setup.replace(&pages(0));
    let base = setup.address(0);
    let ended = AtomicBool::new(false);
    let mut moved = 0;
    thread::scope(|scope| {
        for number in 0..2_usize {
            let ended = &ended;
            scope.spawn(move || {
                let mut count = 0_u64;
                while !ended.load(Ordering::Acquire) {
                    count += 1;
                    // Each page is written to by one thread, and read by both.
                    let page = (count as usize * 37) % 512;
                    // SAFETY: the words are guest memory, which outlives the scope, and are
                    // accessed only with atomics.
                    let word = |offset: usize| unsafe {
                        AtomicU64::from_ptr((base + page * PAGE + offset) as *mut u64)
                    };
                    assert_eq!(word(8).load(Ordering::Relaxed), BYTE);
                    if page % 2 == number && count.is_multiple_of(63) {
                        word(0).store(count, Ordering::Relaxed);
                        assert_eq!(word(0).load(Ordering::Relaxed), count, "a write is lost");
                        word(0).store(BYTE, Ordering::Relaxed);
                    }
                }
            });
        }
        for round in 0..300 {
            let outcomes = setup.move_shares(&pages((round + 1) % 2));
            moved += outcomes.iter().filter(|outcome| **outcome == MergeOutcome::Done).count();
            if round % 10 == 9 {
                // What was written to is merged again.
                for _ in 0..3 {
                    setup.look(0, 512);
                }
                setup.replace(&pages((round + 1) % 2));
                setup.released();
            }
        }
        ended.store(true, Ordering::Release);
    });
    assert!(moved > 512, "{moved}");
    assert!((0..512).all(|page| setup.is_full_of(page, 7)));
}
