//! merge_across_nodes, and stable pages on other nodes than they should be.

use ebb_page_merge::{Node, Nodes, Run, Settings, SettingsError};

use crate::support::{Host, eager};

/// Equal pages on two nodes.
fn host(nodes: Nodes) -> (Host, ebb_page_merge::testing::Guest) {
    let mut host = Host::new(Settings { merge_across_nodes: nodes, ..eager() });
    let guest = host.guest(200);
    for pfn in 0..200 {
        guest.write(pfn, 1 + pfn % 10);
        guest.move_to(pfn, Node((pfn / 100) as u32));
    }
    (host, guest)
}

#[test]
fn switching_is_refused_while_anything_is_merged() {
    let (mut host, guest) = host(Nodes::Across);
    host.settle();
    for apart in [true, false] {
        let mut settings = host.merger.settings().clone();
        if apart {
            settings.merge_across_nodes = Nodes::Apart;
        } else {
            settings.max_page_sharing = 100;
        }
        let error = host.merger.change(settings).unwrap_err();
        let name = if apart { "merge_across_nodes" } else { "max_page_sharing" };
        assert_eq!(error, SettingsError::Merged { setting: name, merged_pages: 200 });
        assert!(error.to_string().contains("set run to unmerge"), "{error}");
    }
    assert_eq!(host.merger.settings().merge_across_nodes, Nodes::Across);
    // In the middle of unmerging it is still refused.
    host.change(|settings| settings.run = Run::Unmerge);
    host.merger.step(1);
    (0..200).filter(|&pfn| guest.slot(pfn).is_some()).for_each(|pfn| guest.discard(pfn));
    host.change(|settings| settings.run = Run::Stop);
    host.change(|settings| {
        settings.merge_across_nodes = Nodes::Apart;
        settings.run = Run::Merge;
    });
}

/// Discarded pages are not merged, even if the core has not scanned them since.
#[test]
fn switching_is_allowed_when_the_last_merged_page_is_discarded() {
    let (mut host, guest) = host(Nodes::Across);
    host.settle();
    (0..200).for_each(|pfn| guest.discard(pfn));
    let settings = Settings { merge_across_nodes: Nodes::Apart, ..host.merger.settings().clone() };
    // The records still say merged until the next scan.
    if host.merger.change(settings.clone()).is_err() {
        host.passes(1);
        host.merger.change(settings).unwrap();
    }
    host.settle();
    assert_eq!(host.counts(), (0, 0, 0, 0));
}

/// Entries of the old index are not found under the new rule, also if pages were only waiting for
/// partners.
#[test]
fn nothing_stale_survives_a_switch() {
    let mut host = Host::new(eager());
    let guest = host.guest(4);
    guest.write(0, 1);
    guest.move_to(0, Node(1));
    host.settle();
    assert_eq!(host.counts(), (0, 0, 0, 1));
    host.change(|settings| settings.merge_across_nodes = Nodes::Apart);
    assert_eq!(host.counts(), (0, 0, 0, 0));
    guest.write(1, 1);
    host.settle();
    assert_eq!(host.counts(), (0, 0, 0, 2));
    host.change(|settings| settings.merge_across_nodes = Nodes::Across);
    host.settle();
    assert_eq!(host.counts(), (1, 1, 0, 0));
}

/// A page that waits for a partner is moved to another node: it must not be merged with pages of
/// the old one.
#[test]
fn a_waiting_page_that_moved_is_found_on_its_new_node() {
    let mut host = Host::new(Settings { merge_across_nodes: Nodes::Apart, ..eager() });
    let guest = host.guest(3);
    guest.write(0, 1);
    host.settle();
    guest.move_to(0, Node(1));
    guest.write(1, 1);
    host.settle();
    assert_eq!(host.counts(), (0, 0, 0, 2));
    assert!(guest.slot(0).is_none());
    guest.write(2, 1);
    guest.move_to(2, Node(1));
    host.settle();
    assert_eq!(host.counts(), (1, 1, 0, 1));
    assert_eq!(guest.slot(0), guest.slot(2));
    assert_eq!(guest.merged()[0].2, Node(1));
    assert_eq!(
        host.merger.statistics().moved_pages,
        0,
        "merged with the wrong node's page, and moved"
    );
}

/// Memory of a node is taken offline: its stable pages move to another node. The shares of them are
/// moved to stable pages on the right node, and no page is unmerged for it.
#[test]
fn shares_of_stable_pages_that_moved_follow_their_pages_where_nodes_are_apart() {
    let (mut host, guest) = host(Nodes::Apart);
    host.settle();
    assert_eq!(host.counts(), (20, 180, 0, 0));
    for (slot, node) in host.world.slot_nodes() {
        if node == Node(1) {
            host.world.move_slot(slot, Node(0));
        }
    }
    host.slots_were_moved = true;
    host.passes(40);
    host.slots_were_moved = false;
    host.check();
    let statistics = host.merger.statistics();
    assert_eq!((statistics.moved_pages, statistics.remote_merged_pages), (100, 0));
    assert_eq!(host.world.unmerge_calls(), 0);
    assert_eq!(host.counts(), (20, 180, 0, 0));
    assert!(guest.merged().iter().all(|(_, page, slot)| page == slot));
}

/// Across nodes it is only counted.
#[test]
fn stable_pages_that_moved_are_counted_where_nodes_are_not_apart() {
    let (mut host, _guest) = host(Nodes::Across);
    let statistics = host.settle();
    assert_eq!(statistics.remote_merged_pages, 100);
    for slot in host.world.slot_nodes().into_keys() {
        host.world.move_slot(slot, Node(5));
    }
    host.passes(16);
    assert_eq!(host.merger.statistics().remote_merged_pages, 200);
    assert_eq!(host.merger.statistics().merged_pages, 200);
}

/// While nothing is merged, KSM allows the switch without unmerging first; so does this crate.
#[test]
fn switching_with_nothing_merged_needs_no_unmerging() {
    let mut host = Host::new(eager());
    let guest = host.guest(10);
    (0..10).for_each(|pfn| guest.write(pfn, 1 + pfn));
    host.settle();
    host.change(|settings| settings.merge_across_nodes = Nodes::Apart);
    host.settle();
    assert_eq!(host.counts(), (0, 0, 0, 10));
}
