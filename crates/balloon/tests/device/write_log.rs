//! The device's changes of memory are in the memory's write log: a migration has to send them.

use std::collections::BTreeSet;

use ebb_abi::Pfn;
use ebb_abi::balloon::QueueKind;
use ebb_balloon::testing::{Buffer, Guest};
use ebb_guest_ram::PageBitmap;

/// Pages in the log after the device has processed a queue.
fn logged(guest: &mut Guest, kind: QueueKind) -> BTreeSet<u64> {
    guest.ram.start_write_log().unwrap();
    let _ = guest.kick(kind);
    let mut pages = PageBitmap::new(&guest.ram.page_ranges());
    guest.ram.take_write_log(&mut pages);
    pages.ranges().flat_map(|range| range.start.0..range.end().0).collect()
}

fn used_ring(guest: &Guest, kind: QueueKind) -> u64 {
    Pfn::containing(guest.used_index_address(kind)).0
}

#[test]
fn reported_pages_and_the_used_ring_are_logged() {
    let mut guest = Guest::with_all_features();
    guest.offer(
        QueueKind::Reporting,
        &[Buffer { address: 600 << 12, length: 3 << 12, writable: true }],
    );
    let expected = BTreeSet::from([600, 601, 602, used_ring(&guest, QueueKind::Reporting)]);
    assert_eq!(logged(&mut guest, QueueKind::Reporting), expected);
}

#[test]
fn ballooned_pages_are_logged_when_they_are_discarded() {
    let mut guest = Guest::with_all_features();
    let buffer = guest.pfns([600, 602]);
    guest.offer(QueueKind::Inflate, &[buffer]);
    // The pages wait to be discarded together with others.
    let used = used_ring(&guest, QueueKind::Inflate);
    assert_eq!(logged(&mut guest, QueueKind::Inflate), BTreeSet::from([used]));
    guest.balloon.flush();
    let mut pages = PageBitmap::new(&guest.ram.page_ranges());
    guest.ram.take_write_log(&mut pages);
    let pages: BTreeSet<u64> =
        pages.ranges().flat_map(|range| range.start.0..range.end().0).collect();
    assert_eq!(pages, BTreeSet::from([600, 602]));
}
