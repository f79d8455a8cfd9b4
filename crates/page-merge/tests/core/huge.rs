//! Huge pages are kept unless they are cold and mostly duplicate.

use ebb_page_merge::Settings;
use ebb_page_merge::testing::Guest;

use crate::support::{Host, eager};

/// A huge page at 0 with `duplicates` pages that `other` has too.
fn huge_page(guest: &Guest, other: &Guest, duplicates: u64) {
    for pfn in 0..512 {
        guest.write(pfn, 1000 + pfn);
        if pfn < duplicates {
            other.write(pfn, 1000 + pfn);
        }
    }
    guest.make_huge(0);
}

#[test]
fn a_huge_page_is_split_when_half_of_it_is_duplicate() {
    for (duplicates, split) in [(255, false), (256, true), (512, true)] {
        let mut host = Host::new(eager());
        let (guest, other) = (host.guest(512), host.guest(512));
        huge_page(&guest, &other, duplicates);
        host.settle();
        assert_eq!(guest.is_huge(300), !split && !guest.is_absent(300), "{duplicates}");
        let expected = if split {
            (duplicates, duplicates, 0, 512 - duplicates)
        } else {
            // Both sides wait.
            (0, 0, 0, 512 + duplicates)
        };
        assert_eq!(host.counts(), expected, "{duplicates}");
        assert_eq!(host.merger.statistics().huge_pages_split, u64::from(split));
    }
}

#[test]
fn a_huge_page_of_zeros_is_discarded() {
    let mut host = Host::new(eager());
    let guest = host.guest(512);
    (0..512).for_each(|pfn| guest.write(pfn, u64::from(pfn >= 300)));
    guest.make_huge(0);
    host.settle();
    assert_eq!(host.merger.statistics().ksm_zero_pages, 300);
    assert!(!guest.is_huge(400));
}

#[test]
fn a_huge_page_in_use_is_kept() {
    let mut host = Host::new(eager());
    let (guest, other) = (host.guest(512), host.guest(512));
    huge_page(&guest, &other, 512);
    for round in 0..100 {
        // More than half of it changes between any two times that it is read.
        (200..512).for_each(|pfn| guest.write(pfn, 5000 + round * 512 + pfn));
        host.passes(2);
    }
    host.check();
    assert!(guest.is_huge(0));
    assert_eq!(host.merger.statistics().merged_pages, 0);
    // Then it is as before, and left alone.
    (200..512).for_each(|pfn| guest.write(pfn, 1000 + pfn));
    host.passes(130);
    host.check();
    assert_eq!(host.merger.statistics().merged_pages, 2 * 512);
}

/// A few pages in use do not keep the others from being merged.
#[test]
fn what_is_steady_in_a_huge_page_is_merged() {
    let mut host = Host::new(eager());
    let (guest, other) = (host.guest(512), host.guest(512));
    huge_page(&guest, &other, 512);
    for round in 0..20 {
        guest.write(7, 5000 + round);
        host.passes(1);
    }
    host.check();
    let statistics = host.merger.statistics();
    assert_eq!(statistics.merged_pages, 2 * 511);
    assert_eq!((statistics.huge_pages_split, statistics.huge_pages_split_in_vain), (1, 0));
}

/// Idle huge pages are read ever more rarely, and their pages are counted.
#[test]
fn a_huge_page_without_duplicates_costs_little() {
    let mut host = Host::new(eager());
    let guest = host.guest(1024);
    (0..1024).for_each(|pfn| guest.write(pfn, 1000 + pfn));
    guest.make_huge(0);
    guest.make_huge(512);
    host.passes(4);
    assert_eq!(host.counts(), (0, 0, 1024, 0));
    host.passes(300);
    let statistics = host.merger.statistics();
    assert_eq!(host.counts(), (0, 0, 0, 1024));
    let looks = statistics.clean_pages + statistics.written_pages + statistics.untracked_pages;
    assert_eq!(looks, statistics.pages_scanned);
    // After 3, 6, 12, 24, 48, 96, 160, 224 and 288 passes.
    assert_eq!(host.world.hashed_pages(), 9 * 1024);
    assert!(guest.is_huge(512));
}

/// A split that gains less than it should have is reported.
#[test]
fn a_split_in_vain_is_counted() {
    let mut host = Host::new(eager());
    let (guest, other) = (host.guest(512), host.guest(512));
    huge_page(&guest, &other, 512);
    host.passes(4);
    (0..300).for_each(|pfn| guest.write_before_freeze(pfn, 9000 + pfn));
    host.passes(3);
    host.check();
    let statistics = host.merger.statistics();
    assert_eq!((statistics.huge_pages_split, statistics.huge_pages_split_in_vain), (1, 1));
}

/// A device has pinned all of it when it should have been split, and then its content changes.
#[test]
fn a_split_that_did_not_happen_is_decided_again() {
    let mut host = Host::new(eager());
    let (guest, other) = (host.guest(512), host.guest(512));
    huge_page(&guest, &other, 512);
    (0..512).for_each(|pfn| guest.pin(pfn, true));
    host.passes(8);
    assert!(host.merger.statistics().replaced_busy > 0);
    for pfn in 0..512 {
        guest.pin(pfn, false);
        guest.write(pfn, 9000 + pfn);
    }
    host.passes(200);
    (0..10).for_each(|pfn| other.write(pfn, 9000 + pfn));
    host.passes(200);
    host.check();
    assert!(guest.is_huge(0));
    assert_eq!(host.merger.statistics().huge_pages_split, 0);
}

#[test]
fn what_is_no_longer_merged_becomes_huge_again() {
    let mut host = Host::new(eager());
    let (guest, other) = (host.guest(512), host.guest(512));
    huge_page(&guest, &other, 512);
    host.settle();
    assert!(!guest.is_huge(0));
    (1..512).for_each(|pfn| guest.write(pfn, 5000 + pfn));
    host.settle();
    assert!(!guest.is_huge(0), "a page is merged");
    guest.write(0, 5000);
    host.settle();
    assert!(guest.is_huge(0));
    assert_eq!(host.merger.statistics().huge_pages_collapsed, 1);
    // And is merged again when it is worth it.
    (0..512).for_each(|pfn| other.write(pfn, 5000 + pfn));
    host.passes(200);
    host.check();
    assert_eq!(host.merger.statistics().merged_pages, 2 * 512);
}

/// Merged pages are discarded, and the host makes a huge page of what is written there later.
#[test]
fn a_new_huge_page_has_no_merged_pages() {
    let mut host = Host::new(eager());
    let guest = host.guest(512);
    (0..512).for_each(|pfn| guest.write(pfn, 9));
    host.settle();
    assert_eq!(host.counts(), (1, 511, 0, 0));
    (0..512).for_each(|pfn| guest.discard(pfn));
    (0..512).for_each(|pfn| guest.write(pfn, 1 + pfn));
    guest.make_huge(0);
    host.passes(1);
    host.check();
    assert_eq!(host.merger.statistics().merged_pages, 0);
}

#[test]
fn failed_attempts_to_make_a_huge_page_become_rare() {
    let mut host = Host::new(eager());
    let guest = host.guest(1024);
    (0..1024).for_each(|pfn| guest.write(pfn, 1 + pfn));
    guest.make_huge(512);
    guest.pin(3, true);
    host.passes(500);
    assert!(!guest.is_huge(0));
    // After 16, 32 and so on up to 128 passes, and then after 144, 176, 240 and 368.
    assert_eq!(host.world.collapse_attempts(), 12);
    guest.pin(3, false);
    host.passes(200);
    assert!(guest.is_huge(0));
}

#[test]
fn where_mappings_are_scarce_scattered_duplicates_split_no_huge_page() {
    let mut host = Host::new(eager());
    let guest = host.guest(1536);
    guest.limit_mappings(Some(0));
    // The small pages have equal ones among themselves, and with every other one of the huge page.
    (0..512).for_each(|pfn| guest.write(pfn, 1000 + pfn));
    guest.make_huge(0);
    (0..256).for_each(|pfn| guest.write(512 + pfn, 1000 + pfn * 2));
    (0..256).for_each(|pfn| guest.write(768 + pfn, 1000 + pfn * 91 % 256 * 2));
    host.passes(200);
    host.check();
    assert!(guest.is_huge(0));
    assert_eq!(host.merger.statistics().huge_pages_split, 0);
    guest.limit_mappings(None);
    host.passes(200);
    host.check();
    assert!(!guest.is_huge(0));
}

/// Small pages stay small in a memory without huge pages.
#[test]
fn nothing_becomes_huge_where_nothing_was() {
    let mut host = Host::new(eager());
    let guest = host.guest(512);
    (0..512).for_each(|pfn| guest.write(pfn, 1 + pfn));
    host.passes(100);
    assert!(!guest.is_huge(0));
    assert_eq!(host.merger.statistics().huge_pages_collapsed, 0);
}

/// Two machines with huge pages and the same content.
#[test]
fn clones_with_huge_pages_are_merged() {
    let mut host = Host::new(eager());
    let (one, other) = (host.guest(1024), host.guest(1024));
    for guest in [&one, &other] {
        (0..1024).for_each(|pfn| guest.write(pfn, 1 + pfn));
        guest.make_huge(0);
        guest.make_huge(512);
    }
    host.settle();
    assert_eq!(host.counts(), (1024, 1024, 0, 0));
    assert!(one.mappings() <= 2 && other.mappings() <= 2);
}

/// Eight huge pages, of which each has six runs of 64 pages that are in six others.
#[test]
fn huge_pages_whose_duplicates_are_in_many_others_are_merged() {
    let mut host = Host::new(eager());
    let guest = host.guest(8 * 512);
    for block in 0..8_u64 {
        for run in 0..8 {
            let partner = if run < 6 { block ^ (run + 1) } else { block };
            let first = 1000 + (block.min(partner) * 8 + run) * 64;
            (0..64).for_each(|page| guest.write(block * 512 + run * 64 + page, first + page));
        }
        guest.make_huge(block * 512);
    }
    host.settle();
    let statistics = host.merger.statistics();
    assert_eq!(statistics.merged_pages, 8 * 384);
    assert_eq!((statistics.huge_pages_split, statistics.huge_pages_split_in_vain), (8, 0));
}

/// A huge page all of whose pages are in others, but in each of these only few.
#[test]
fn a_huge_page_is_not_worth_the_split_of_many_others() {
    let mut host = Host::new(eager());
    let guest = host.guest(9 * 512);
    (0..512).for_each(|pfn| guest.write(pfn, 1000 + pfn));
    guest.make_huge(0);
    for block in 1..9_u64 {
        (0..512).for_each(|page| guest.write(block * 512 + page, 10_000 + block * 512 + page));
        let first = (block - 1) * 64;
        (0..64).for_each(|page| guest.write(block * 512 + page, 1000 + first + page));
        guest.make_huge(block * 512);
    }
    host.settle();
    host.passes(200);
    host.check();
    let statistics = host.merger.statistics();
    assert_eq!((statistics.merged_pages, statistics.huge_pages_split), (0, 0));
    // They are not read more often than others, however often they are judged.
    assert!(host.world.hashed_pages() <= 9 * 512 * 9, "{}", host.world.hashed_pages());
}

/// Others find its pages one by one, until splitting is worthwhile.
#[test]
fn a_huge_page_is_judged_again_when_enough_of_its_pages_have_partners() {
    let mut host = Host::new(eager());
    let (guest, other) = (host.guest(512), host.guest(512));
    huge_page(&guest, &other, 0);
    host.settle();
    let hashed = host.world.hashed_pages();
    host.passes(20);
    assert!(host.world.hashed_pages() - hashed <= 512, "a huge page is read rarely");
    (0..200).for_each(|pfn| other.write(pfn, 1000 + pfn));
    host.settle();
    assert!(guest.is_huge(0));
    (200..300).for_each(|pfn| other.write(pfn, 1000 + pfn));
    host.settle();
    assert!(!guest.is_huge(0));
    assert_eq!(host.counts(), (300, 300, 0, 212));
}

/// A huge page with the same content everywhere has its duplicates within itself.
#[test]
fn a_huge_page_of_one_content_is_merged_with_itself() {
    let mut host = Host::new(eager());
    let guest = host.guest(512);
    (0..512).for_each(|pfn| guest.write(pfn, 9));
    guest.make_huge(0);
    host.settle();
    assert_eq!(host.counts(), (1, 511, 0, 0));
}

/// Such as a guest's page structures of free memory. Each copy of one stable page takes a mapping of
/// its own, and neighbours of which each is on the next stable page take one together.
#[test]
fn pages_of_one_content_take_few_mappings() {
    const BLOCKS: u64 = 8;
    let mut host = Host::new(Settings { most_copies: 64, ..eager() });
    let guest = host.guest(BLOCKS * 512);
    (0..BLOCKS * 512).for_each(|pfn| guest.write(pfn, 7));
    (0..BLOCKS).for_each(|block| guest.make_huge(block * 512));
    host.settle();
    let statistics = host.merger.statistics();
    assert_eq!(statistics.merged_pages, BLOCKS * 512);
    assert!(statistics.pages_shared <= 65, "{statistics:?}");
    assert!(guest.mappings() <= BLOCKS as usize * 10, "{}", guest.mappings());
}

/// Few neighbours have one stable page.
#[test]
fn few_equal_neighbours_are_one_stable_page() {
    let mut host = Host::new(Settings { most_copies: 64, ..eager() });
    let guest = host.guest(512);
    (0..512).for_each(|pfn| guest.write(pfn, 1000 + pfn / 15));
    host.settle();
    let statistics = host.merger.statistics();
    assert_eq!(statistics.merged_pages, 512);
    assert_eq!(statistics.pages_shared, 512_u64.div_ceil(15));
}
