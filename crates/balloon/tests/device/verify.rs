//! Pages that are overwritten before they are discarded.

use ebb_abi::balloon::{Feature, Features, QueueKind};
use ebb_abi::{PageRange, Pfn};
use ebb_balloon::testing::{Buffer, Guest, Setup};
use ebb_balloon::{ReportCheck, overwritten_word};
use ebb_guest_ram::{Backing, InhibitReason};
use vm_memory::{Bytes, GuestAddress};

const NO_POISON: Features = Features::ALL_BALLOON.without(Feature::PagePoison);

fn checked(setup: Setup) -> Guest {
    let mut guest = Guest::new(setup);
    guest.balloon.set_report_check(ReportCheck::Overwrite);
    guest
}

fn word(guest: &Guest, address: u64) -> u64 {
    guest.ram.memory().read_obj(GuestAddress(address)).unwrap()
}

fn report(guest: &mut Guest, pages: PageRange) {
    let length = pages.size_bytes() as u32;
    let _ = guest.send(
        QueueKind::Reporting,
        &[Buffer { address: pages.start.address(), length, writable: true }],
    );
}

#[test]
fn use_of_a_reported_page_is_detected() {
    for backing in [Backing::Anonymous, Backing::Memfd] {
        let mut guest = checked(Setup { negotiated: NO_POISON, backing, ..Setup::default() });
        let reported = PageRange::new(Pfn(1024), 8);
        guest.mark(guest.low_pages());
        // The pattern is visible only where nothing is discarded.
        let kept = guest.ram.inhibit_discard(InhibitReason::Operator);
        report(&mut guest, reported);
        let _ = guest.inflate([2048]);
        guest.balloon.flush();
        for address in [1024 << 12, (1031 << 12) + 4088, 2048 << 12] {
            assert_eq!(word(&guest, address), overwritten_word(address), "{backing:?}");
        }
        assert_eq!(guest.unmarked(guest.low_pages()).len(), 9);
        let counters = guest.balloon.counters().discard;
        assert_eq!((counters.verified_pages, counters.bytes), (9, 0));

        drop(kept);
        report(&mut guest, reported);
        let _ = guest.inflate([2048]);
        guest.balloon.flush();
        assert_eq!((word(&guest, 1024 << 12), word(&guest, 2048 << 12)), (0, 0), "{backing:?}");
        let counters = guest.balloon.counters().discard;
        assert_eq!((counters.verified_pages, counters.bytes), (18, 9 * 4096));
        assert_eq!(guest.used(QueueKind::Reporting).len(), 2);
    }
}

#[test]
fn pages_that_left_the_balloon_are_not_touched() {
    let mut guest = checked(Setup { negotiated: NO_POISON, ..Setup::default() });
    guest.mark(guest.low_pages());
    let _ = guest.inflate([2048, 2049]);
    let _ = guest.deflate([2048]);
    guest.balloon.flush();
    assert_eq!(guest.unmarked(guest.low_pages()), [2049]);
    assert_eq!(guest.balloon.counters().discard.verified_pages, 1);
}

#[test]
fn a_guest_that_relies_on_the_content_of_free_pages_keeps_it() {
    for poison_value in [0xaa_u32, 0] {
        let mut guest = checked(Setup::default());
        guest.balloon.write_config(12, &poison_value.to_le_bytes());
        guest.mark(guest.low_pages());
        let _kept = guest.ram.inhibit_discard(InhibitReason::Operator);
        report(&mut guest, PageRange::new(Pfn(1024), 8));
        let _ = guest.inflate([2048]);
        guest.balloon.flush();
        assert!(guest.unmarked(guest.low_pages()).is_empty());
        assert_eq!(guest.balloon.counters().discard.verified_pages, 0);
    }
}

#[test]
fn no_page_is_overwritten_with_zeros() {
    assert!((0..1 << 20).map(|index| overwritten_word(index * 8)).all(|word| word != 0));
    assert_ne!(overwritten_word(0xebb0_0000_0000_0000), 0);
}

#[test]
fn a_later_driver_is_checked_by_its_own_features() {
    let mut guest = checked(Setup { negotiated: NO_POISON, ..Setup::default() });
    guest.balloon.reset();
    let queues = guest.fresh_queues();
    guest.balloon.activate(Features::ALL_BALLOON.0, queues).unwrap();
    report(&mut guest, PageRange::new(Pfn(1024), 8));
    guest.balloon.reset();
    guest.activate();
    report(&mut guest, PageRange::new(Pfn(1024), 4));
    assert_eq!(guest.balloon.counters().discard.verified_pages, 4);
}
