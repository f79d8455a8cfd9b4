//! Huge pages are kept unless they are cold and mostly duplicate.

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
    for round in 0..30 {
        // One write in every second pass: never cold for three.
        guest.write(7, 5000 + round);
        host.passes(2);
    }
    assert!(guest.is_huge(0));
    assert_eq!(host.merger.statistics().merged_pages, 0);
    host.settle();
    assert_eq!(host.merger.statistics().merged_pages, 2 * 511);
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

/// Others find its pages one by one, until splitting is worthwhile.
#[test]
fn a_huge_page_is_judged_again_when_enough_of_its_pages_have_partners() {
    let mut host = Host::new(eager());
    let (guest, other) = (host.guest(512), host.guest(512));
    huge_page(&guest, &other, 0);
    host.settle();
    let hashed = host.world.hashed_pages();
    host.passes(20);
    assert_eq!(host.world.hashed_pages(), hashed, "a huge page that was judged costs nothing");
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
