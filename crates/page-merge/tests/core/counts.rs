//! The counts that LTP's ksm01 to ksm07 (testcases/kernel/mem/ksm) and Linux's
//! tools/testing/selftests/mm/ksm_tests.c and ksm_functional_tests.c expect of the kernel, on
//! simulated memory.

use ebb_abi::{PageRange, Pfn};
use ebb_page_merge::{Node, Nodes, Settings};

use crate::support::{Host, eager};

/// Pages of each of LTP's children.
const PAGES: u64 = 600;

fn fill(guest: &ebb_page_merge::testing::Guest, content: char) {
    (0..PAGES).for_each(|pfn| guest.write(pfn, u64::from(content)));
}

/// ksm01: three children whose memory is equal in different ways, one after the other. (ksm02,
/// ksm03 and ksm04 do the same under a cpuset, a memory group and memory policies.)
fn four_groups(settings: Settings, children: usize) {
    let mut host = Host::new(settings);
    let guests: Vec<_> = (0..children).map(|_| host.guest(PAGES)).collect();
    let all = PAGES * children as u64;
    let phases = [("cac", (2, all - 2)), ("cba", (3, all - 3)), ("ddd", (1, all - 1))];
    for (contents, (shared, sharing)) in phases {
        for (number, guest) in guests.iter().enumerate() {
            // From the fourth on, children behave like the first.
            let number = if number < 3 { number } else { 0 };
            // In the first phase the second child has other content than the first, and the third
            // that of the second.
            let content = match contents {
                "cac" => ['c', 'a', 'a'][number],
                other => other.chars().nth(number).unwrap(),
            };
            fill(guest, content);
        }
        host.settle();
        assert_eq!(host.counts(), (shared, sharing, 0, 0), "{contents}");
    }
    // One byte of the second child's last page.
    guests[1].write(PAGES - 1, u64::from('e'));
    host.settle();
    assert_eq!(host.counts(), (1, all - 2, 0, 1));
    host.unmerge();
    assert_eq!(host.counts(), (0, 0, 0, 0));
    assert_eq!(host.world.slots_in_use(), 0);
    assert_eq!(guests[1].read(PAGES - 1), Some(u64::from('e')));
    assert_eq!(guests[0].read(0), Some(u64::from('d')));
    host.change(|settings| settings.run = ebb_page_merge::Run::Stop);
    host.merger.step(u64::MAX);
    assert_eq!(host.counts(), (0, 0, 0, 0));
}

#[test]
fn ltp_ksm01_four_groups_of_equal_pages() {
    four_groups(eager(), 3);
    four_groups(eager(), 5);
}

#[test]
fn ltp_ksm01_with_smart_scan() {
    four_groups(Settings { smart_scan: true, ..eager() }, 3);
}

#[test]
fn ltp_ksm02_to_ksm04_with_nodes_apart_on_one_node() {
    four_groups(Settings { merge_across_nodes: Nodes::Apart, ..eager() }, 3);
}

/// ksm05: merging and discarding at the same time must not cause errors (it was an oops of an old
/// kernel).
#[test]
fn ltp_ksm05_discard_while_merging() {
    let mut host = Host::new(eager());
    let guest = host.guest(PAGES);
    for round in 0..20 {
        fill(&guest, 'a');
        host.merger.scan(PAGES / 2);
        (0..PAGES).step_by(1 + round % 3).for_each(|pfn| guest.discard(pfn));
        host.passes(1);
        host.check();
    }
    (0..PAGES).for_each(|pfn| guest.discard(pfn));
    host.settle();
    assert_eq!(host.counts(), (0, 0, 0, 0));
}

/// ksm06: P equal pages on each of M nodes, first merged across nodes, then apart.
#[test]
fn ltp_ksm06_merge_across_nodes() {
    for nodes in 1_u32..=8 {
        let mut host = Host::new(eager());
        let guest = host.guest(u64::from(nodes) * 100);
        for pfn in 0..u64::from(nodes) * 100 {
            guest.write(pfn, 10);
            guest.move_to(pfn, Node((pfn / 100) as u32));
        }
        let all = u64::from(nodes) * 100;
        host.settle();
        assert_eq!(host.counts(), (1, all - 1, 0, 0));
        host.unmerge();
        host.change(|settings| {
            settings.merge_across_nodes = Nodes::Apart;
            settings.run = ebb_page_merge::Run::Merge;
        });
        let statistics = host.settle();
        assert_eq!(host.counts(), (u64::from(nodes), all - u64::from(nodes), 0, 0));
        assert_eq!(statistics.remote_merged_pages, 0);
        for pfn in 0..all {
            let slot = guest.slot(pfn).unwrap();
            assert_eq!(host.world.slot_nodes()[&slot], Node((pfn / 100) as u32));
        }
        host.unmerge();
        assert_eq!(host.counts(), (0, 0, 0, 0));
        host.change(|settings| {
            settings.merge_across_nodes = Nodes::Across;
            settings.run = ebb_page_merge::Run::Merge;
        });
        let statistics = host.settle();
        assert_eq!(host.counts(), (1, all - 1, 0, 0));
        // All but the pages of node 0, where the simulation has pages of no particular node.
        assert_eq!(statistics.remote_merged_pages, all - 100);
    }
}

/// ksm07: pages that change repeatedly are skipped.
#[test]
fn ltp_ksm07_smart_scan_skips() {
    let mut host = Host::new(Settings { smart_scan: true, ..eager() });
    let guest = host.guest(100);
    for round in 0..40 {
        for pfn in 0..100 {
            guest.write(pfn, 1 + round * 100 + pfn);
        }
        host.passes(3);
    }
    let smart = host.merger.statistics();
    assert!(smart.pages_skipped > 0);

    let mut host = Host::new(eager());
    let guest = host.guest(100);
    for round in 0..40 {
        for pfn in 0..100 {
            guest.write(pfn, 1 + round * 100 + pfn);
        }
        host.passes(3);
    }
    let plain = host.merger.statistics();
    assert_eq!(plain.pages_skipped, 0);
    assert!(
        smart.hashed_pages * 2 < plain.hashed_pages,
        "{} {}",
        smart.hashed_pages,
        plain.hashed_pages
    );
}

/// check_ksm_merge: all of a number of equal pages are merged (`pages_shared` + `pages_sharing`).
#[test]
fn selftest_merge() {
    for pages in [2, 10, 512, 513, 2000] {
        let mut host = Host::new(eager());
        let guest = host.guest(pages);
        (0..pages).for_each(|pfn| guest.write(pfn, u64::from('*')));
        host.settle();
        assert_eq!(host.counts(), (1, pages - 1, 0, 0));
    }
    let mut host = Host::new(eager());
    let guest = host.guest(1);
    guest.write(0, u64::from('*'));
    host.settle();
    assert_eq!(host.counts(), (0, 0, 0, 1));
}

/// check_ksm_unmerge: both of two merged pages are written to, and after one pass nothing is
/// merged.
#[test]
fn selftest_unmerge_by_writing() {
    let mut host = Host::new(eager());
    let guest = host.guest(2);
    (0..2).for_each(|pfn| guest.write(pfn, u64::from('*')));
    host.settle();
    assert_eq!(host.counts(), (1, 1, 0, 0));
    guest.write(0, u64::from('-'));
    guest.write(1, u64::from('+'));
    host.passes(1);
    assert_eq!(host.counts(), (0, 0, 2, 0));
    host.settle();
    assert_eq!(host.counts(), (0, 0, 0, 2));
}

/// check_ksm_zero_page_merge, and test_unmerge_zero_pages of ksm_functional_tests: with
/// `use_zero_pages` zeros are not merged with each other but discarded, and counted until they are
/// written to.
#[test]
fn selftest_zero_pages() {
    let zeros = |use_zero_pages| {
        let mut host = Host::new(Settings { use_zero_pages, ..eager() });
        let guest = host.guest(100);
        (0..100).for_each(|pfn| guest.write(pfn, 0));
        host.settle();
        (host, guest)
    };
    let (host, guest) = zeros(false);
    assert_eq!(host.counts(), (1, 99, 0, 0));
    assert_eq!(guest.read(5), Some(0));
    let (mut host, guest) = zeros(true);
    assert_eq!(host.counts(), (0, 0, 0, 0));
    assert_eq!(host.merger.statistics().ksm_zero_pages, 100);
    assert!((0..100).all(|pfn| guest.is_absent(pfn) && guest.read(pfn) == Some(0)));
    assert!(host.merger.statistics().general_profit > 95 * 4096 - 10_000);
    (0..50).for_each(|pfn| guest.write(pfn, 7 + pfn));
    host.passes(1);
    assert_eq!(host.merger.statistics().ksm_zero_pages, 50);
    host.unmerge();
    assert_eq!(host.merger.statistics().ksm_zero_pages, 0);
    assert_eq!(guest.read(99), Some(0));
}

/// test_unmerge_discarded of ksm_functional_tests: half of the merged pages are discarded.
#[test]
fn selftest_discarded() {
    let mut host = Host::new(eager());
    let guest = host.guest(100);
    (0..100).for_each(|pfn| guest.write(pfn, 3));
    host.settle();
    (0..50).for_each(|pfn| guest.discard(pfn));
    host.passes(1);
    assert_eq!(host.counts(), (1, 49, 0, 0));
    assert_eq!(guest.read(0), Some(0));
    host.unmerge();
    assert_eq!(host.counts(), (0, 0, 0, 0));
    assert_eq!((guest.read(0), guest.read(99)), (Some(0), Some(3)));
}

/// check_ksm_numa_merge: two equal pages on two nodes.
#[test]
fn selftest_two_nodes() {
    for (nodes, expected) in [(Nodes::Across, (1, 1, 0, 0)), (Nodes::Apart, (0, 0, 0, 2))] {
        let mut host = Host::new(Settings { merge_across_nodes: nodes, ..eager() });
        let guest = host.guest(2);
        guest.write(0, 42);
        guest.write(1, 42);
        guest.move_to(1, Node(1));
        host.settle();
        assert_eq!(host.counts(), expected);
    }
}

/// A page with the maximum number of sharers gets a duplicate, and both are a chain (mm/ksm.c,
/// `max_page_sharing`).
#[test]
fn chains_of_duplicates() {
    let mut host = Host::new(Settings { max_page_sharing: 10, ..eager() });
    let guest = host.guest(100);
    (0..100).for_each(|pfn| guest.write(pfn, 3));
    host.settle();
    assert_eq!(host.counts(), (10, 90, 0, 0));
    let statistics = host.merger.statistics();
    assert_eq!((statistics.stable_node_chains, statistics.stable_node_dups), (1, 10));
    // All sharers of all but one page leave: the chain is dissolved.
    let kept = guest.slot(55).unwrap();
    (0..100)
        .filter(|&pfn| guest.slot(pfn) != Some(kept))
        .for_each(|pfn| guest.write(pfn, 1000 + pfn));
    host.passes(1);
    let statistics = host.merger.statistics();
    assert_eq!(
        (statistics.pages_shared, statistics.stable_node_chains, statistics.stable_node_dups),
        (1, 0, 0)
    );
    // There is room for new sharers only as the old ones leave.
    guest.write(55, 9);
    (0..100).find(|&pfn| guest.slot(pfn).is_none()).map(|pfn| guest.write(pfn, 3)).unwrap();
    host.settle();
    assert_eq!(host.counts(), (1, 9, 0, 90));
}

/// Two ranges of a machine, and machines that begin in the middle of a block.
#[test]
fn ranges_with_gaps() {
    let mut host = Host::new(eager());
    let ranges = [PageRange::new(Pfn(3), 10), PageRange::new(Pfn(700), 900)];
    let guest = host.guest_of(&ranges);
    ranges.iter().for_each(|range| {
        (range.start.0..range.end().0).for_each(|pfn| guest.write(pfn, 1 + pfn % 10));
    });
    host.settle();
    assert_eq!(host.counts(), (10, 900, 0, 0));
    assert_eq!(host.merger.statistics().pages_scanned, 40 * 910);
}

/// Most of a guest's memory does not exist until it is used, and after it was freed.
#[test]
fn memory_that_does_not_exist_is_not_looked_at() {
    let mut host = Host::new(eager());
    let guest = host.guest(64 * 512);
    let looked_at = |host: &mut Host| {
        let before = host.merger.statistics().pages_scanned;
        host.passes(1);
        host.merger.statistics().pages_scanned - before
    };
    assert_eq!(looked_at(&mut host), 0);
    let pages = [7 * 512 + 5, 40 * 512, 63 * 512 + 511];
    pages.iter().for_each(|pfn| guest.write(*pfn, 9));
    assert_eq!(looked_at(&mut host), 3 * 512);
    host.settle();
    assert_eq!(host.counts(), (1, 2, 0, 0));
    assert_eq!(looked_at(&mut host), 3 * 512);
    pages.iter().for_each(|pfn| guest.discard(*pfn));
    assert_eq!(looked_at(&mut host), 3 * 512);
    assert_eq!(looked_at(&mut host), 0);
    assert_eq!(host.counts(), (0, 0, 0, 0));
}
