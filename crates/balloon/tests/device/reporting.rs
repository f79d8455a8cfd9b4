//! Page reporting.

use ebb_abi::balloon::{QueueKind, REPORTING_QUEUE_MIN_ENTRIES};
use ebb_balloon::testing::{Buffer, Guest, Setup};
use ebb_guest_ram::{DiscardMethod, InhibitReason};

const MIB: u64 = 1 << 20;

fn report(address: u64, size_bytes: u64) -> Buffer {
    Buffer { address, length: size_bytes as u32, writable: true }
}

#[test]
fn reported_pages_are_discarded_before_the_buffer_is_returned() {
    let mut guest = Guest::with_all_features();
    guest.mark(guest.low_pages());
    let progress =
        guest.send(QueueKind::Reporting, &[report(8 * MIB, 2 * MIB), report(4 * MIB, 2 * MIB)]);
    assert!(progress.interrupt && !progress.pending);
    assert_eq!(guest.used(QueueKind::Reporting).len(), 1);
    assert_eq!(guest.unmarked(guest.low_pages()).len(), 1024);
    let counters = guest.balloon.counters();
    assert_eq!((counters.reporting.bytes, counters.reporting.ranges), (4 * MIB, 2));
    assert_eq!((counters.discard.bytes, counters.discard.ranges), (4 * MIB, 2));
    let vectored = guest.ram.discard_method() == DiscardMethod::Vectored;
    assert_eq!(counters.discard.syscalls, if vectored { 1 } else { 2 });
}

#[test]
fn reports_of_neighbours_become_one_range() {
    let mut guest = Guest::with_all_features();
    let chain: Vec<_> = (0..REPORTING_QUEUE_MIN_ENTRIES)
        .map(|index| report(4 * MIB + u64::from(index ^ 1) * 64 * 4096, 64 * 4096))
        .collect();
    let _ = guest.send(QueueKind::Reporting, &chain);
    let discard = guest.balloon.counters().discard;
    assert_eq!((discard.bytes, discard.ranges, discard.syscalls), (8 * MIB, 1, 1));
}

#[test]
fn overlapping_reports_and_those_outside_memory_are_clipped() {
    let mut guest = Guest::with_all_features();
    guest.mark(guest.low_pages());
    let chain = [
        report(14 * MIB, 4 * MIB),
        report(15 * MIB, MIB),
        report(1 << 40, MIB),
        report(u64::MAX - 4095, 8192),
    ];
    let _ = guest.send(QueueKind::Reporting, &chain);
    assert_eq!(guest.unmarked(guest.low_pages()).len(), 512);
    let counters = guest.balloon.counters();
    assert_eq!(counters.discard.bytes, 2 * MIB);
    assert_eq!(counters.rejected_pages, 512 + 256);
    assert_eq!(guest.used(QueueKind::Reporting).len(), 1);
}

#[test]
fn poisoned_reports_are_answered_and_kept() {
    let mut guest = Guest::with_all_features();
    guest.mark(guest.low_pages());
    guest.balloon.write_config(12, &1_u32.to_le_bytes());
    let _ = guest.send(QueueKind::Reporting, &[report(4 * MIB, 2 * MIB)]);
    assert_eq!(guest.used(QueueKind::Reporting).len(), 1);
    assert!(guest.unmarked(guest.low_pages()).is_empty());
    assert_eq!(guest.balloon.counters().discard.poisoned_bytes, 2 * MIB);
}

#[test]
fn inhibited_reports_are_answered_and_kept() {
    let mut guest = Guest::with_all_features();
    guest.mark(guest.low_pages());
    let _guard = guest.ram.inhibit_discard(InhibitReason::BackgroundSnapshot);
    let _ = guest.send(QueueKind::Reporting, &[report(4 * MIB, 2 * MIB)]);
    assert_eq!(guest.used(QueueKind::Reporting).len(), 1);
    assert!(guest.unmarked(guest.low_pages()).is_empty());
    assert_eq!(guest.balloon.counters().discard.inhibited_bytes, 2 * MIB);
}

#[test]
fn the_ring_is_large_enough_for_linux() {
    let guest = Guest::new(Setup::default());
    assert!(
        guest.balloon.queue_max_sizes().iter().all(|size| *size >= REPORTING_QUEUE_MIN_ENTRIES)
    );
}
