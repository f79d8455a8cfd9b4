//! Memory in many small mappings is put into one again.

use ebb_abi::Pfn;
use ebb_guest_ram::merge::{MergeOutcome, PageLook};
use ebb_guest_ram::{GuestRange, HugePages, InhibitReason};

use crate::common::{Setup, is_mended, mappings_of, setup};

/// Memory of many mappings, none of which is merged: every fourth page was, and was discarded, and half of these were written to again.
/// Every page that is there is full of its number.
fn in_pieces() -> Option<Setup> {
    let mut setup = setup(1024, HugePages::Off)?;
    (0..1024).for_each(|page| setup.fill(page, byte(page)));
    let pages: Vec<_> = (100..400).step_by(4).map(|page| (page, setup.publish(&[byte(page)])[0])).collect();
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

/// What is there apart from what lies between the bounds.
fn pages(from: u64, to: u64) -> Vec<(u64, u8)> {
    let wanted = (0..1024).filter(|page| !is_absent(*page) && !(from..to).contains(page));
    wanted.map(|page| (page, byte(page))).collect()
}

#[test]
fn what_is_not_merged_any_more_is_in_few_mappings_after_a_while() {
    let Some(mut setup) = in_pieces() else { return };
    let (before, resident) = (mappings_of(&setup), setup.ram.resident_bytes().unwrap());
    assert!(before > 100, "{before}");
    assert!(is_mended(&mut setup, &pages(0, 0), 10), "{} mappings", mappings_of(&setup));
    assert_eq!(setup.ram.resident_bytes().unwrap(), resident);
    assert!(setup.ram.returns().joined_mappings > 100);
    assert!(setup.ram.merged_mappings() < 10, "it counts: {}", setup.ram.merged_mappings());
    assert!(is_as_it_was(&setup));
    // Writes are noticed, and pages are merged, as before.
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
fn what_is_merged_is_left_where_it_is() {
    let Some(mut setup) = in_pieces() else { return };
    let slots = setup.publish(&(200..264).map(byte).collect::<Vec<_>>());
    (200..264).for_each(|page| setup.fill(page, byte(page)));
    let shared: Vec<_> = (200..264).zip(slots).collect();
    assert_eq!(setup.replace(&shared), [MergeOutcome::Done; 64]);
    assert!(is_mended(&mut setup, &pages(200, 264), 12), "{} mappings", mappings_of(&setup));
    assert_eq!(setup.look(200, 64), [PageLook::Merged; 64]);
    assert!((200..264).all(|page| setup.is_full_of(page, byte(page))));
    assert!(setup.is_full_of(199, byte(199)) && setup.is_full_of(265, byte(265)));
}

#[test]
fn it_goes_on_while_discards_are_inhibited() {
    // Nothing is copied, and what is pinned is not moved.
    let Some(mut setup) = in_pieces() else { return };
    let _guard = setup.ram.inhibit_discard(InhibitReason::PinnedMemory);
    assert!(is_mended(&mut setup, &pages(0, 0), 10), "{} mappings", mappings_of(&setup));
    assert!(is_as_it_was(&setup));
}
