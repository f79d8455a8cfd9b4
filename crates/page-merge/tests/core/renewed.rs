//! A store of stable pages that takes the place of another one.

use ebb_page_merge::testing::Guest;
use ebb_page_merge::{Answer, Nodes, Settings};

use crate::support::{Host, eager};

/// Two machines with 100 equal pages each, merged.
fn host() -> (Host, [Guest; 2]) {
    let mut host = Host::new(eager());
    let guests = [host.guest(600), host.guest(600)];
    for guest in &guests {
        (0..100).for_each(|pfn| guest.write(pfn, 1000 + pfn));
    }
    host.settle();
    assert_eq!(host.counts(), (100, 100, 0, 0));
    (host, guests)
}

#[test]
fn shares_are_moved_to_the_new_store_and_pages_stay_merged() {
    let (mut host, _guests) = host();
    host.renew();
    for _ in 0..16 {
        host.passes(1);
        host.check();
        assert_eq!(host.merged_pages(), 200, "no page is unmerged");
        // In one machine a stable page per content is in use, or two while shares are moved.
        assert!((100..=200).contains(&host.slots_in_use()), "{}", host.slots_in_use());
    }
    let statistics = host.merger.statistics();
    assert_eq!((statistics.moved_pages, host.former_slots()), (200, 0));
    assert_eq!(host.counts(), (100, 100, 0, 0));
    assert_eq!(host.world.unmerge_calls(), 0);
}

/// Contents are hashed with the new store's secret, also those that wait for partners.
#[test]
fn pages_that_wait_find_partners_under_the_new_secret() {
    let (mut host, [first, second]) = host();
    first.write(200, 7);
    host.passes(3);
    assert_eq!(host.counts().3, 1);
    host.renew();
    second.write(300, 7);
    // The same as stable pages of the former store, which are found no longer until they are moved.
    second.write(301, 1000);
    host.settle();
    assert_eq!(host.counts(), (101, 102, 0, 0));
    assert_eq!(first.slot(200), second.slot(300));
    assert_eq!(first.slot(0), second.slot(301));
    assert_eq!(host.former_slots(), 0);
}

/// Machines write, discard and unmerge while their shares are in two stores.
#[test]
fn shares_of_the_former_store_are_released_there() {
    let (mut host, [first, second]) = host();
    host.renew();
    first.write(0, 5);
    first.discard(1);
    second.discard(1);
    host.passes(1);
    host.check();
    host.unmerge();
    host.check();
    assert_eq!((host.slots_in_use(), host.merged_pages()), (0, 0));
}

/// The second one is renewed before all shares have left the first one, and the third one fails for
/// a while.
#[test]
fn stores_can_be_renewed_again_and_again() {
    let (mut host, _guests) = host();
    for _ in 0..3 {
        host.renew();
        host.passes(1);
        host.check();
    }
    host.store().gone = true;
    host.passes(20);
    host.check();
    assert_eq!(host.merged_pages(), 200);
    assert!(host.former_slots() > 0);
    host.store().gone = false;
    host.world.set_room(false);
    host.passes(20);
    host.check();
    assert_eq!(host.merged_pages(), 200);
    host.world.set_room(true);
    host.passes(20);
    host.check();
    assert_eq!((host.former_slots(), host.counts()), (0, (100, 100, 0, 0)));
}

/// What cannot be moved stays where it is, and nothing is reserved for it.
#[test]
fn without_mappings_shares_stay_where_they_are() {
    let (mut host, [first, _]) = host();
    first.limit_mappings(Some(0));
    host.renew();
    host.passes(20);
    host.check();
    assert_eq!((host.merged_pages(), host.former_slots()), (200, 100));
    first.limit_mappings(None);
    host.passes(20);
    host.check();
    assert_eq!(host.former_slots(), 0);
}

/// A page changes between the time at which it is read and the time at which its share is moved.
#[test]
fn a_page_that_is_written_to_meanwhile_keeps_its_content() {
    let (mut host, [first, second]) = host();
    host.renew();
    first.write_before_freeze(7, 55);
    second.write_before_freeze(8, 56);
    host.settle();
    assert_eq!((first.read(7), second.read(8)), (Some(55), Some(56)));
    assert_eq!(host.counts(), (100, 98, 0, 2));
    assert_eq!(host.former_slots(), 0);
}

/// Where nodes are kept apart, each share is moved on its node.
#[test]
fn nodes_are_kept_apart_in_the_new_store() {
    let mut host = Host::new(Settings { merge_across_nodes: Nodes::Apart, ..eager() });
    let guest = host.guest(40);
    for pfn in 0..40 {
        guest.write(pfn, 3);
        guest.move_to(pfn, ebb_page_merge::Node(pfn as u32 % 2));
    }
    host.settle();
    host.renew();
    host.settle();
    assert_eq!(host.counts(), (2, 38, 0, 0));
    assert_eq!(host.former_slots(), 0);
    assert!(guest.merged().iter().all(|(_, page, slot)| page == slot));
}

/// The former store is asked nothing any more.
#[test]
fn a_lost_store_is_not_asked_again() {
    let (mut host, _guests) = host();
    host.store().gone = true;
    host.passes(20);
    let errors = host.merger.statistics().store_errors;
    host.renew();
    host.passes(20);
    assert_eq!(host.merger.statistics().store_errors, errors);
    assert!(host.merger.last_error().is_none());
    let mut answers: Vec<Answer> = Vec::new();
    let nothing = ebb_page_merge::StableStore::query(
        host.store(),
        ebb_page_merge::Node::ANY,
        &[],
        &mut answers,
    );
    assert!(nothing.is_ok());
}
