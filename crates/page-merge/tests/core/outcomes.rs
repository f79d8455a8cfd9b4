//! Outcomes for pages that cannot be merged, and for runs.

use ebb_page_merge::testing::World;
use ebb_page_merge::{Answer, Node, PageHasher, Secret, Settings, StableStore};

use crate::support::{Host, eager};

#[test]
fn a_page_written_to_between_hash_and_freeze_keeps_the_new_content() {
    let mut host = Host::new(eager());
    let guest = host.guest(4);
    (0..4).for_each(|pfn| guest.write(pfn, 5));
    host.passes(1);
    guest.write_before_freeze(0, 6);
    host.passes(1);
    host.check();
    assert_eq!(guest.read(0), Some(6));
    assert!(host.merger.statistics().replaced_different > 0);
    host.settle();
    assert_eq!(host.counts(), (1, 2, 0, 1));
    // Restored to the old content.
    guest.write(0, 5);
    host.settle();
    assert_eq!(host.counts(), (1, 3, 0, 0));
}

#[test]
fn a_pinned_page_stays_unchanged_and_is_retried() {
    let mut host = Host::new(eager());
    let guest = host.guest(3);
    (0..3).for_each(|pfn| guest.write(pfn, 5));
    guest.pin(1, true);
    let statistics = host.settle();
    assert!(guest.slot(1).is_none());
    assert_eq!((statistics.merged_pages, statistics.pages_refused), (2, 1));
    let busy = statistics.replaced_busy;
    assert!((1..=3).contains(&busy), "{busy}");
    guest.pin(1, false);
    host.settle();
    assert_eq!(host.counts(), (1, 2, 0, 0));
    assert_eq!(host.world.hashed_pages(), 3, "pages with a known hash are hashed again");
}

#[test]
fn excluded_pages_are_not_counted_and_not_merged() {
    let mut host = Host::new(eager());
    let guest = host.guest(10);
    (0..10).for_each(|pfn| guest.write(pfn, 5));
    (0..5).for_each(|pfn| guest.exclude(pfn, true));
    host.settle();
    assert_eq!(host.counts(), (1, 4, 0, 0));
    assert!((0..5).all(|pfn| guest.slot(pfn).is_none()));
}

/// Equal memory of two machines is merged with neighbouring slots, in both.
#[test]
fn clones_share_runs() {
    let mut host = Host::new(eager());
    let (one, other) = (host.guest(2000), host.guest(2000));
    for pfn in 0..2000 {
        one.write(pfn, 1 + pfn);
        other.write(pfn, 1 + pfn);
    }
    host.settle();
    assert_eq!(host.counts(), (2000, 2000, 0, 0));
    assert!(one.mappings() <= 4, "{}", one.mappings());
    assert_eq!(one.mappings(), other.mappings());
}

/// Pages wait to be replaced together. Waiting pages must not be found as partners of others.
#[test]
fn a_page_is_replaced_once_although_it_waits_while_others_look_for_partners() {
    // With two sharers a stable page is full, so that each further pair of pages needs another one.
    let mut host = Host::new(Settings { max_page_sharing: 2, ..eager() });
    let guest = host.guest(2048);
    (0..2048).for_each(|pfn| guest.write(pfn, if pfn % 32 == 0 { 5 } else { 1000 + pfn }));
    host.passes(2);
    host.check();
    let statistics = host.merger.statistics();
    assert_eq!((statistics.replaced_done, statistics.replaced_gone), (64, 0), "{statistics:?}");
    assert_eq!(host.counts(), (32, 32, 0, 2048 - 64));
}

/// With few mappings left, short runs are no longer replaced, but long ones are.
#[test]
fn scarce_mappings_go_to_long_runs() {
    let mut host = Host::new(eager());
    let guest = host.guest(4096);
    // Every second page a duplicate of another scattered one; then runs of 64 which occur twice.
    (0..1024).step_by(2).for_each(|pfn| guest.write(pfn, 1 + pfn % 512));
    (1..1024).step_by(2).for_each(|pfn| guest.write(pfn, 100_000 + pfn));
    guest.limit_mappings(Some(60));
    host.passes(10);
    host.check();
    let scattered = host.merger.statistics();
    assert!(scattered.replaced_no_mappings > 0);
    assert!(guest.mappings() <= 60);
    guest.limit_mappings(Some(100));
    for pfn in 2048..4096 {
        guest.write(pfn, 200_000 + pfn % 1024);
    }
    host.settle();
    assert!((2048..4096).all(|pfn| guest.slot(pfn).is_some()), "long runs were refused");
    assert!(guest.mappings() <= 100);
    // Refused pages are retried seldom, and cost nothing in between.
    let before = host.merger.statistics();
    let hashed = host.world.hashed_pages();
    host.passes(64);
    let after = host.merger.statistics();
    assert_eq!(host.world.hashed_pages(), hashed);
    assert!(after.replaced_no_mappings - before.replaced_no_mappings <= 8 * before.pages_refused);
    assert_eq!(guest.mappings(), guest.mappings().min(100));
}

/// Without mappings, contents are published for the pages of one step at most.
#[test]
fn little_is_published_in_vain() {
    // Also if runs must be longer than the core would require.
    let mut host = Host::new(Settings { min_run_pages: 100, ..eager() });
    let guest = host.guest(16_384);
    guest.limit_mappings(Some(0));
    // All pages have a partner, whose neighbours are others.
    (0..8192).for_each(|pfn| guest.write(pfn, 1 + pfn));
    (0..8192).for_each(|pfn| guest.write(8192 + pfn, 1 + pfn * 2731 % 8192));
    host.passes(3);
    host.check();
    assert!(host.world.published_pages() > 0);
    assert!(host.world.published_pages() <= 2048, "{}", host.world.published_pages());
    assert_eq!(guest.mappings(), 0);
}

/// Pages of all nodes share, and what they share is where the first of them was.
#[test]
fn across_nodes_a_stable_page_is_on_the_node_of_its_first_user() {
    let mut host = Host::new(eager());
    let (one, other) = (host.guest(64), host.guest(64));
    for pfn in 0..64 {
        one.write(pfn, 1 + pfn);
        one.move_to(pfn, Node(1));
        other.write(pfn, 1 + pfn);
    }
    let statistics = host.settle();
    assert_eq!(host.counts(), (64, 64, 0, 0));
    assert!(host.world.slot_nodes().values().all(|node| *node == Node(1)));
    assert_eq!(statistics.remote_merged_pages, 64);
}

/// Pages that are equal in two domains of a host are merged within each of them only.
#[test]
fn domains_never_share() {
    let world = World::new();
    let mut hosts = [0, 1].map(|domain| Host::in_world(&world, domain, eager()));
    let guests = hosts.each_mut().map(|host| host.guest(100));
    for guest in &guests {
        (0..100).for_each(|pfn| guest.write(pfn, 7));
    }
    for host in &mut hosts {
        host.settle();
        assert_eq!(host.counts(), (1, 99, 0, 0));
    }
    hosts[0].check();
    assert_eq!(world.slots_in_use(), 2);
    assert_ne!(guests[0].slot(0).unwrap().segment, guests[1].slot(0).unwrap().segment);
}

#[test]
fn without_room_or_store_pages_stay_unchanged_and_are_merged_later() {
    let mut host = Host::new(eager());
    let guest = host.guest(10);
    (0..10).for_each(|pfn| guest.write(pfn, 5));
    host.world.set_room(false);
    let statistics = host.settle();
    assert!(statistics.store_errors > 0);
    assert_eq!(statistics.merged_pages, 0);
    assert!(host.merger.last_error().unwrap().contains("no room for another stable page"));
    host.world.set_room(true);
    host.store().gone = true;
    host.passes(40);
    host.check();
    assert_eq!(host.merger.statistics().merged_pages, 0);
    host.store().gone = false;
    host.passes(40);
    assert_eq!(host.counts(), (1, 9, 0, 0));
}

/// A failing store is queried once per pass, not for every page.
#[test]
fn a_lost_store_is_not_queried_for_every_page() {
    let mut host = Host::new(eager());
    let guest = host.guest(5000);
    (0..5000).for_each(|pfn| guest.write(pfn, 1 + pfn));
    host.store().gone = true;
    host.passes(10);
    assert!(host.merger.statistics().store_errors <= 10);
    assert_eq!(host.merger.statistics().pages_unshared, 5000);
}

/// The store has no room: sharing without a new stable page continues, in the same pass and for
/// pages that are scanned for the first time.
#[test]
fn a_full_store_still_shares_existing_pages() {
    let mut host = Host::new(eager());
    let guest = host.guest(1536);
    (600..602).for_each(|pfn| guest.write(pfn, 5));
    host.settle();
    assert_eq!(host.counts(), (1, 1, 0, 0));
    host.world.set_room(false);
    for pfn in 0..10 {
        // In each pass something fails first.
        guest.write(pfn, 100 + pfn / 2);
    }
    (1100..1110).for_each(|pfn| guest.write(pfn, 5));
    host.passes(3);
    let statistics = host.merger.statistics();
    assert!((1..=3).contains(&statistics.store_errors), "{statistics:?}");
    assert_eq!(statistics.merged_pages, 12);
    assert!(host.merger.last_error().is_some());
    host.world.set_room(true);
    host.settle();
    assert_eq!(host.counts(), (6, 16, 0, 0));
    assert_eq!(host.merger.last_error(), None, "the error is past");
}

/// Pages for which a slow store was not queried are queried once it answers: others may have them.
#[test]
fn queries_omitted_while_a_store_is_late_are_made_later() {
    let mut host = Host::new(eager());
    let guest = host.guest(600);
    (0..600).for_each(|pfn| guest.write(pfn, 1 + pfn));
    host.store().late = true;
    host.passes(4);
    assert!((1..=4).contains(&host.merger.statistics().store_errors));
    assert!(host.merger.last_error().unwrap().contains("did not answer"));
    host.store().late = false;
    let hash =
        |content: u64| PageHasher::new(&Secret([0; 32])).hash(&content.to_le_bytes().repeat(512));
    host.store().wanted = vec![hash(3), hash(555)];
    host.settle();
    assert!(guest.slot(2).is_some() && guest.slot(554).is_some());
    assert_eq!(host.counts(), (2, 0, 0, 598));
}

/// Pages that other processes have (a shared store) are published at once, or merged upon a
/// notification.
#[test]
fn pages_that_others_have_are_merged_without_a_partner_here() {
    let mut host = Host::new(eager());
    let guest = host.guest(3);
    (0..3).for_each(|pfn| guest.write(pfn, 50 + pfn));
    let hash =
        |content: u64| PageHasher::new(&Secret([0; 32])).hash(&content.to_le_bytes().repeat(512));
    host.store().wanted = vec![hash(50)];
    host.settle();
    assert!(guest.slot(0).is_some());
    assert_eq!(host.counts(), (1, 0, 0, 2));

    // Another process publishes what page 1 contains.
    let content = 51_u64.to_le_bytes().repeat(512);
    let mut slots = Vec::new();
    host.store().publish(Node::ANY, &[hash(51)], &content, &mut slots).unwrap();
    host.passes(3);
    assert!(guest.slot(1).is_none(), "no notification has arrived yet");
    host.store().notifications = vec![(Node::ANY, hash(51)), (Node::ANY, hash(99))];
    host.passes(1);
    assert_eq!(guest.slot(1), Some(slots[0]));
    host.store().unused(slots[0]);
    host.check();
    let mut answers = Vec::new();
    host.store().query(Node::ANY, &[hash(52)], &mut answers).unwrap();
    assert_eq!(answers, [Answer::Unknown]);
}

/// A block that fails does not keep others from being merged.
#[test]
fn failing_memory_is_skipped() {
    let mut host = Host::new(eager());
    let guest = host.guest(1536);
    (0..1536).for_each(|pfn| guest.write(pfn, 1 + pfn % 512));
    for _ in 0..6 {
        guest.fail(1);
        host.passes(1);
        host.check();
    }
    assert!(host.merger.statistics().memory_errors >= 6);
    assert_eq!(host.merger.last_error(), Some("simulated failure"));
    host.settle();
    assert_eq!(host.counts(), (512, 1024, 0, 0));
}

/// Pages of zeros among others do not need a long run when mappings are scarce.
#[test]
fn zeros_need_no_mappings() {
    let mut host = Host::new(Settings { use_zero_pages: true, ..eager() });
    let guest = host.guest(100);
    guest.limit_mappings(Some(0));
    (0..100).for_each(|pfn| guest.write(pfn, if pfn % 2 == 0 { 0 } else { 1 + pfn % 4 }));
    let statistics = host.settle();
    assert_eq!((statistics.ksm_zero_pages, statistics.merged_pages), (50, 0));
}
