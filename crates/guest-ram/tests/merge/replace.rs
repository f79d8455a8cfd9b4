//! Outcomes of replacing pages.

use ebb_abi::Pfn;
use ebb_guest_ram::merge::{MergeOutcome, MergeTarget, PageLook};
use ebb_guest_ram::{GuestRange, HugePages, StableSlot};

use crate::common::{Setup, mappings_of, setup};

#[test]
fn equal_content_is_shared_until_a_write() {
    let Some(mut setup) = setup(512, HugePages::Off) else { return };
    (0..16).for_each(|page| setup.fill(page, 7));
    let slot = setup.publish(&[7])[0];
    assert_eq!(
        setup.look(0, 17)[..],
        [[PageLook::Written; 16].as_slice(), &[PageLook::Absent]].concat()
    );
    assert_eq!(setup.look(0, 16), [PageLook::Clean; 16]);
    let before = setup.ram.resident_bytes().unwrap();
    let pages: Vec<_> = (0..16).map(|page| (page, slot)).collect();
    assert_eq!(setup.replace(&pages), [MergeOutcome::Done; 16]);
    assert_eq!(before - setup.ram.resident_bytes().unwrap(), 16 * 4096);
    assert_eq!(setup.ram.merged_bytes(), 16 * 4096);
    assert!((0..16).all(|page| setup.is_full_of(page, 7)));
    assert_eq!(setup.look(0, 16), [PageLook::Merged; 16]);

    setup.fill(3, 9);
    assert!(setup.is_full_of(3, 9) && setup.is_full_of(4, 7), "the others do not see it");
    let looks = setup.look(0, 16);
    assert_eq!(looks[3], PageLook::Broken(slot));
    assert!((0..16).filter(|page| *page != 3).all(|page| looks[page] == PageLook::Merged));
    assert_eq!(setup.look(3, 1), [PageLook::Copied], "it is reported once");
    assert_eq!(setup.ram.merged_bytes(), 15 * 4096);
}

#[test]
fn a_page_that_was_written_to_after_it_was_hashed_is_different() {
    let Some(mut setup) = setup(512, HugePages::Off) else { return };
    (0..3).for_each(|page| setup.fill(page, 7));
    let slots = setup.publish(&[7, 7, 7]);
    setup.look(0, 3);
    setup.fill(1, 8);
    let pages: Vec<_> = (0..3).zip(slots).collect();
    let outcomes = [MergeOutcome::Done, MergeOutcome::Different, MergeOutcome::Done];
    assert_eq!(setup.replace(&pages), outcomes);
    assert!(setup.is_full_of(0, 7) && setup.is_full_of(1, 8) && setup.is_full_of(2, 7));
    // It is watched as before.
    assert_eq!(setup.look(1, 1), [PageLook::Written]);
    assert_eq!(setup.look(1, 1), [PageLook::Clean]);
    setup.fill(1, 9);
    assert_eq!(setup.look(1, 1), [PageLook::Written]);
}

#[test]
fn merged_pages_stay_out_of_core_dumps() {
    let Some(mut setup) = setup(512, HugePages::Off) else { return };
    (0..512).for_each(|page| setup.fill(page, 7));
    let slot = setup.publish(&[7])[0];
    setup.look(0, 512);
    // More than are replaced at a time, with gaps.
    let pages: Vec<_> = (0..512).step_by(3).map(|page| (page, slot)).collect();
    assert!(setup.replace(&pages).iter().all(|outcome| *outcome == MergeOutcome::Done));
    let smaps = std::fs::read_to_string("/proc/self/smaps").unwrap();
    let (start, end) = (setup.address(0), setup.address(0) + 512 * 4096);
    let (mut within, mut flags) = (false, Vec::new());
    for line in smaps.lines() {
        if let Some(found) = line.strip_prefix("VmFlags:").filter(|_| within) {
            flags.push(found.to_owned());
        }
        let from = line.split_once('-').and_then(|(from, _)| usize::from_str_radix(from, 16).ok());
        within = from.map_or(within, |from| (start..end).contains(&from));
    }
    assert!(flags.len() >= 2 * 170, "{}", flags.len());
    assert!(
        flags.iter().all(|flags| flags.split_whitespace().any(|flag| flag == "dd")),
        "{flags:?}"
    );
}

#[test]
fn a_page_is_merged_once() {
    let Some(mut setup) = setup(512, HugePages::Off) else { return };
    setup.fill(5, 7);
    let slots = setup.publish(&[7, 7]);
    assert_eq!(setup.replace(&[(5, slots[0])]), [MergeOutcome::Done]);
    assert_eq!(setup.replace(&[(5, slots[1])]), [MergeOutcome::Gone]);
    // In one call too.
    setup.fill(9, 7);
    assert_eq!(
        setup.replace(&[(9, slots[0]), (9, slots[1])]),
        [MergeOutcome::Done, MergeOutcome::Gone]
    );
    assert!(setup.is_full_of(5, 7) && setup.is_full_of(9, 7));
    assert_eq!(setup.ram.merged_bytes(), 2 * 4096);
}

#[test]
fn zeros_are_replaced_by_nothing_and_take_no_mapping() {
    let Some(mut setup) = setup(512, HugePages::Off) else { return };
    (0..64).for_each(|page| setup.fill(page, 0));
    setup.fill(20, 1);
    let pages: Vec<_> = (0..64).map(|page| (Pfn(page), MergeTarget::Zero)).collect();
    let mappings = mappings_of(&setup);
    let outcomes = setup.replace_by(&pages);
    assert!((0..64).all(|page| outcomes[page]
        == if page == 20 { MergeOutcome::Different } else { MergeOutcome::Done }));
    assert_eq!(mappings_of(&setup), mappings);
    assert_eq!(setup.ram.resident_bytes().unwrap(), 4096);
    assert_eq!(setup.ram.merged_bytes(), 0);
    assert_eq!(setup.look(0, 64).iter().filter(|look| **look == PageLook::Absent).count(), 63);
    assert!(setup.is_full_of(19, 0) && setup.is_full_of(20, 1));
    // First accesses need no handler.
    setup.fill(21, 3);
    assert!(setup.is_full_of(21, 3));
}

#[test]
fn absent_and_foreign_pages_are_gone() {
    let Some(mut setup) = setup(512, HugePages::Off) else { return };
    let slot = setup.publish(&[7])[0];
    setup.fill(1, 7);
    let nowhere = StableSlot { segment: 77, index: 0 };
    let outcomes = setup.replace(&[(0, slot), (1, nowhere), (600, slot)]);
    assert_eq!(outcomes, [MergeOutcome::Gone; 3]);
    assert!(setup.is_full_of(1, 7));
    assert_eq!(setup.look(1, 1), [PageLook::Written]);
    let mut looks = Vec::new();
    let error = setup.session.look(GuestRange::new(Pfn(510), 4), &mut looks).unwrap_err();
    assert!(error.to_string().contains("not within one region"), "{error}");
}

#[test]
fn neighbours_with_neighbouring_slots_are_one_mapping() {
    let Some(mut setup) = setup(1024, HugePages::Off) else { return };
    (0..512).for_each(|page| setup.fill(page, page as u8 | 1));
    let bytes: Vec<u8> = (0..512).map(|page| page as u8 | 1).collect();
    let slots = setup.publish(&bytes);
    let before = mappings_of(&setup);
    let pages: Vec<_> = (64..320).map(|page| (page, slots[page as usize])).collect();
    assert_eq!(setup.replace(&pages), [MergeOutcome::Done; 256]);
    assert_eq!(mappings_of(&setup), before + 2);
    // Later neighbours join it.
    let pages: Vec<_> = (0..64).chain(320..512).map(|page| (page, slots[page as usize])).collect();
    assert_eq!(setup.replace(&pages), [MergeOutcome::Done; 256]);
    assert_eq!(mappings_of(&setup), before + 1);
    assert!((0..512).all(|page| setup.is_full_of(page, page as u8 | 1)));
}

#[test]
fn unmerged_pages_keep_their_content_and_are_private() {
    let Some(mut setup) = setup(512, HugePages::Off) else { return };
    (0..32).for_each(|page| setup.fill(page, 7));
    let slot = setup.publish(&[7])[0];
    let pages: Vec<_> = (0..32).map(|page| (page, slot)).collect();
    setup.replace(&pages);
    setup.fill(4, 8);
    let mut released = Vec::new();
    setup.session.unmerge(GuestRange::new(Pfn(0), 16), &mut released).unwrap();
    assert_eq!(released, [slot; 16]);
    assert_eq!(setup.ram.merged_bytes(), 16 * 4096);
    setup.session.unmerge(GuestRange::new(Pfn(0), 512), &mut released).unwrap();
    assert_eq!(released, [slot; 32]);
    assert_eq!((setup.ram.merged_bytes(), setup.ram.resident_bytes().unwrap()), (0, 32 * 4096));
    // The slot may be reused now.
    setup.stable.write(slot, &[1; 4096]).unwrap();
    assert!((0..32).all(|page| setup.is_full_of(page, if page == 4 { 8 } else { 7 })));
}

#[test]
fn a_discarded_merged_page_is_zero_and_its_share_is_reported() {
    let Some(mut setup) = setup(512, HugePages::Off) else { return };
    (0..8).for_each(|page| setup.fill(page, 7));
    let slot = setup.publish(&[7])[0];
    let pages: Vec<_> = (0..8).map(|page| (page, slot)).collect();
    setup.replace(&pages);
    setup.ram.discard(&[GuestRange::new(Pfn(2), 3)]).unwrap();
    assert!((2..5).all(|page| setup.is_full_of(page, 0)));
    assert!(setup.is_full_of(1, 7) && setup.is_full_of(5, 7));
    let mut released = Vec::new();
    setup.session.take_released(&mut released);
    assert_eq!(released, [slot; 3]);
    // It is watched again, and can be merged again.
    setup.fill(3, 7);
    assert_eq!(setup.look(3, 1), [PageLook::Written]);
    assert_eq!(setup.look(3, 1), [PageLook::Clean]);
    assert_eq!(setup.replace(&[(3, slot)]), [MergeOutcome::Done]);
}

#[test]
fn every_present_page_is_on_a_node() {
    let Some(mut setup) = setup(512, HugePages::Off) else { return };
    setup.fill(0, 7);
    let mut nodes = Vec::new();
    setup.session.nodes(&[Pfn(0), Pfn(1), Pfn(9999)], &mut nodes).unwrap();
    assert!(nodes[0].is_some());
    // With only one node, the kernel is not queried.
    assert!(nodes[1].is_none() || nodes[1] == nodes[0]);
    assert_eq!(nodes[2], None);
}

#[test]
fn there_is_one_session_at_a_time() {
    let Some(setup) = setup(512, HugePages::Off) else { return };
    let Setup { ram, session, .. } = setup;
    let again = ebb_guest_ram::MergeSession::new(ram.clone());
    assert!(matches!(again, Err(ebb_guest_ram::MergeUnavailable::InUse)));
    drop(session);
    assert!(ebb_guest_ram::MergeSession::new(ram).is_ok());
}
