//! Pages that were merged and written to become ordinary pages, and are merged again.

use ebb_guest_ram::merge::{MergeOutcome, PageLook};
use ebb_guest_ram::{GuestRange, HugePages, InhibitReason, StableSlot};

use ebb_abi::Pfn;

use crate::common::{Setup, mappings_of, setup};

/// Pages 64 to 320 merged as one run with these slots; page n is full of `byte(n)`.
fn merged() -> Option<(Setup, Vec<(u64, StableSlot)>)> {
    let mut setup = setup(512, HugePages::Off)?;
    (0..512).for_each(|page| setup.fill(page, byte(page)));
    let slots = setup.publish(&(64..320).map(byte).collect::<Vec<_>>());
    let pages: Vec<_> = (64..320).zip(slots).collect();
    assert_eq!(setup.replace(&pages), [MergeOutcome::Done; 256]);
    Some((setup, pages))
}

fn byte(page: u64) -> u8 {
    (page % 250) as u8 + 1
}

fn fill_all(setup: &Setup, pages: &[(u64, StableSlot)], byte: impl Fn(u64) -> u8) {
    for (page, _) in pages {
        setup.fill(*page, byte(*page));
    }
}

/// Scans until no page is a copy in front of a stable page any more.
fn reanonymize(setup: &mut Setup) {
    let is_copy = |look: &PageLook| matches!(look, PageLook::Broken(_) | PageLook::Copied);
    assert!((0..50).any(|_| !setup.look(0, 512).iter().any(is_copy)));
}

#[test]
fn pages_with_restored_content_are_merged_again() {
    let Some((mut setup, pages)) = merged() else { return };
    let mappings = mappings_of(&setup);
    // Every other page of a part, and all of another one.
    let written: Vec<_> =
        pages.iter().copied().filter(|(page, _)| *page < 128 || page % 2 == 0).collect();
    fill_all(&setup, &written, |_| 255);
    let looks = setup.look(0, 512);
    assert!(written.iter().all(|(page, slot)| looks[*page as usize] == PageLook::Broken(*slot)));
    fill_all(&setup, &written, byte);
    assert_eq!(
        setup.replace(&written[..1]),
        [MergeOutcome::Gone],
        "in front of the stable page it cannot be"
    );
    reanonymize(&mut setup);
    assert_eq!(setup.ram.broken_cow_stats().brought_back_pages, written.len() as u64);
    assert!((0..512).all(|page| setup.is_full_of(page, byte(page))));
    assert_eq!(setup.ram.merged_bytes(), (256 - written.len() as u64) * 4096);
    // Writes are detected, as with any page.
    let clean = setup.look(0, 512);
    assert!(written.iter().all(|(page, _)| clean[*page as usize] == PageLook::Clean));
    setup.fill(64, 99);
    assert_eq!(setup.look(64, 2), [PageLook::Written, PageLook::Clean]);
    setup.fill(64, byte(64));

    assert!(setup.replace(&written).iter().all(|outcome| *outcome == MergeOutcome::Done));
    assert_eq!(setup.ram.broken_cow_stats().remerged_pages, written.len() as u64);
    assert_eq!(setup.ram.merged_bytes(), 256 * 4096);
    assert_eq!(setup.ram.resident_bytes().unwrap(), 256 * 4096);
    assert_eq!(mappings_of(&setup), mappings, "one run again");
    assert!((0..512).all(|page| setup.is_full_of(page, byte(page))));
}

#[test]
fn unique_pages_become_ordinary_memory_and_keep_no_stable_page() {
    let Some((mut setup, pages)) = merged() else { return };
    fill_all(&setup, &pages, |_| 200);
    reanonymize(&mut setup);
    assert_eq!((setup.ram.merged_bytes(), setup.ram.resident_bytes().unwrap()), (0, 512 * 4096));
    assert!(pages.iter().all(|(page, _)| setup.is_full_of(*page, 200)));
    // These pages are discarded like any others.
    setup.ram.discard(&[GuestRange::new(Pfn(100), 8)]).unwrap();
    assert!((100..108).all(|page| setup.is_full_of(page, 0)) && setup.is_full_of(108, 200));
    assert!(setup.look(0, 512).iter().all(|look| *look != PageLook::Excluded));
    let slots = setup.publish(&[200; 2]);
    setup.fill(104, 200);
    assert_eq!(setup.replace(&[(99, slots[0]), (104, slots[1])]), [MergeOutcome::Done; 2]);
    assert_eq!(
        setup.ram.broken_cow_stats().remerged_pages,
        1,
        "discarded pages do not count as merged again"
    );
}

#[test]
fn nothing_is_reanonymized_while_discards_are_inhibited() {
    let Some((mut setup, _)) = merged() else { return };
    setup.fill(70, 200);
    let guard = setup.ram.inhibit_discard(InhibitReason::PinnedMemory);
    for _ in 0..50 {
        assert!(matches!(setup.look(0, 512)[70], PageLook::Broken(_) | PageLook::Copied));
    }
    drop(guard);
    reanonymize(&mut setup);
    assert!(setup.is_full_of(70, 200) && setup.is_full_of(71, byte(71)));
}

#[test]
fn discarded_copies_stay_discarded() {
    let Some((mut setup, _)) = merged() else { return };
    (100..110).for_each(|page| setup.fill(page, 200));
    setup.look(0, 512);
    setup.ram.discard(&[GuestRange::new(Pfn(104), 20)]).unwrap();
    reanonymize(&mut setup);
    assert_eq!(setup.ram.broken_cow_stats().brought_back_pages, 4);
    for page in 0..512 {
        let expected = match page {
            100..104 => 200,
            104..124 => 0,
            _ => byte(page),
        };
        assert!(setup.is_full_of(page, expected), "page {page}");
    }
}
