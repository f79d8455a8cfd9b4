//! Drivers that break the rules: whatever they do, chains are returned, memory that they did not
//! name keeps its content, and the device continues.

use ebb_abi::balloon::{Feature, Features, QueueKind};
use ebb_abi::{PageRange, Pfn};
use ebb_balloon::GuestError;
use ebb_balloon::testing::{Buffer, Guest, QUEUE_SIZE};

const FIRST: u32 = 512;

const ALL_QUEUES: [QueueKind; 5] = [
    QueueKind::Inflate,
    QueueKind::Deflate,
    QueueKind::Statistics,
    QueueKind::FreePageHint,
    QueueKind::Reporting,
];

/// A guest whose memory is marked and whose device has no waiting pages.
fn marked_guest() -> Guest {
    let guest = Guest::with_features(Features::ALL_BALLOON.without(Feature::MustTellHost));
    guest.mark(guest.low_pages());
    guest
}

#[track_caller]
fn assert_counted(guest: &Guest, error: GuestError, count: u64) {
    let errors = guest.balloon.counters().errors;
    assert_eq!(errors.get(error), count, "{}: {errors:?}", error.name());
}

/// The device still works.
#[track_caller]
fn assert_alive(guest: &mut Guest) {
    let before = guest.balloon.counters().discard.bytes;
    guest.used(QueueKind::Inflate);
    let _ = guest.inflate([4000]);
    assert_eq!(guest.used(QueueKind::Inflate).len(), 1);
    assert_eq!(guest.balloon.counters().discard.bytes, before + 4096);
}

#[test]
fn page_numbers_outside_memory_are_ignored_and_the_others_used() {
    let mut guest = marked_guest();
    // Past the first region, the MMIO hole, past the second region, the largest number.
    let outside = [4096, 0xf_ee00, 0x10_1000, u32::MAX];
    let _ = guest.inflate([FIRST, outside[0], outside[1], FIRST + 5, outside[2], outside[3]]);
    assert_eq!(guest.unmarked(guest.low_pages()), [u64::from(FIRST), u64::from(FIRST) + 5]);
    assert_eq!(guest.balloon.counters().rejected_pages, 4);
    assert_counted(&guest, GuestError::OutsideRam, 1);
    assert_eq!(guest.used(QueueKind::Inflate).len(), 1);
    let _ = guest.deflate(outside);
    assert_eq!(guest.balloon.counters().rejected_pages, 8);
    assert_eq!(guest.used(QueueKind::Deflate).len(), 1);
}

#[test]
fn a_run_across_the_end_of_memory_is_clipped() {
    let mut guest = marked_guest();
    let _ = guest.inflate(4094..4100);
    assert_eq!(guest.unmarked(guest.low_pages()), [4094, 4095]);
    assert_eq!(guest.balloon.counters().rejected_pages, 4);
}

#[test]
fn duplicates_are_discarded_once() {
    let mut guest = marked_guest();
    let _ = guest.inflate([FIRST + 3, FIRST, FIRST + 3, FIRST + 3, FIRST + 1]);
    assert_eq!(guest.balloon.counters().discard.bytes, 3 * 4096);
    assert_counted(&guest, GuestError::DoublePage, 1);
}

#[test]
fn a_number_cut_off_by_the_end_of_the_buffer_is_ignored() {
    let mut guest = marked_guest();
    let mut bytes = FIRST.to_le_bytes().to_vec();
    bytes.extend([0x01, 0x02]);
    let buffer = guest.buffer(&bytes);
    let _ = guest.send(QueueKind::Inflate, &[buffer]);
    assert_eq!(guest.unmarked(guest.low_pages()), [u64::from(FIRST)]);
    assert_counted(&guest, GuestError::PartialEntry, 1);
}

#[test]
fn a_number_across_two_descriptors_is_read() {
    let mut guest = marked_guest();
    let bytes: Vec<u8> =
        [FIRST, FIRST + 1, FIRST + 2].into_iter().flat_map(u32::to_le_bytes).collect();
    let chain: Vec<Buffer> = [&bytes[..3], &bytes[3..4], &bytes[4..9], &bytes[9..]]
        .map(|part| guest.buffer(part))
        .to_vec();
    let _ = guest.send(QueueKind::Inflate, &chain);
    assert_eq!(guest.unmarked(guest.low_pages()), [512, 513, 514]);
    assert_eq!(guest.balloon.counters().errors.total(), 0);
}

#[test]
fn buffers_outside_memory_are_returned() {
    for kind in ALL_QUEUES {
        let mut guest = marked_guest();
        let writable = matches!(kind, QueueKind::FreePageHint | QueueKind::Reporting);
        for address in [3 << 30, (16 << 20) - 2, u64::MAX - 100, u64::MAX] {
            let _ = guest.send(kind, &[Buffer { address, length: 64, writable }]);
        }
        assert!(guest.unmarked(guest.low_pages()).is_empty());
        // The device keeps the latest statistics buffer.
        let kept = usize::from(kind == QueueKind::Statistics);
        assert_eq!(guest.used(kind).len(), 4 - kept, "{}", kind.name());
        assert!(guest.balloon.counters().errors.total() >= 1);
        assert_alive(&mut guest);
    }
}

#[test]
fn descriptors_of_the_wrong_direction_are_ignored() {
    let mut guest = marked_guest();
    let numbers = guest.pfns([FIRST]);
    let more = guest.pfns([FIRST + 1]);
    let target = Buffer { address: 0x80_0000, length: 4096, writable: true };
    let _ = guest
        .send(QueueKind::Inflate, &[target, numbers, Buffer { writable: true, ..numbers }, more]);
    assert_eq!(guest.unmarked(guest.low_pages()), [512, 513]);
    assert_counted(&guest, GuestError::WrongDirection, 2);
    let _ = guest.send(QueueKind::Reporting, &[Buffer { writable: false, ..target }, target]);
    assert_eq!(guest.unmarked(guest.low_pages()), [512, 513, 2048]);
    assert_counted(&guest, GuestError::WrongDirection, 3);
}

#[test]
fn empty_chains_are_returned() {
    for kind in ALL_QUEUES {
        let mut guest = marked_guest();
        let empty = Buffer { address: 0x1000, length: 0, writable: kind == QueueKind::Reporting };
        let _ = guest.send(kind, &[empty]);
        assert_counted(&guest, GuestError::EmptyChain, 1);
        assert_eq!(guest.used(kind).len(), usize::from(kind != QueueKind::Statistics));
        assert_alive(&mut guest);
    }
}

#[test]
fn oversized_buffers_are_truncated_and_returned() {
    let mut guest = marked_guest();
    // 16 MiB of numbers, the arbitrary content of memory.
    let whole_region = Buffer { address: 0, length: 16 << 20, writable: false };
    let _ = guest.send(QueueKind::Deflate, &[whole_region]);
    assert_counted(&guest, GuestError::OversizedChain, 1);
    assert_eq!(guest.used(QueueKind::Deflate).len(), 1);
    let _ = guest.send(QueueKind::Statistics, &[whole_region]);
    assert_counted(&guest, GuestError::OversizedChain, 2);
    let _ = guest.send(QueueKind::FreePageHint, &[whole_region]);
    assert_counted(&guest, GuestError::OversizedChain, 3);
    assert_eq!(guest.used(QueueKind::FreePageHint).len(), 1);
    assert_alive(&mut guest);
}

#[test]
fn a_buffer_of_more_numbers_than_linux_sends_is_used_entirely() {
    // Firecracker treats more than 256 numbers as an error and keeps the buffer.
    let mut guest = marked_guest();
    let _ = guest.inflate(FIRST..FIRST + 3000);
    assert_eq!(guest.unmarked(guest.low_pages()).len(), 3000);
    assert_eq!(guest.used(QueueKind::Inflate).len(), 1);
    assert_eq!(guest.balloon.counters().errors.total(), 0);
}

#[test]
fn a_chain_that_loops_ends() {
    let mut guest = marked_guest();
    let buffer = guest.pfns([FIRST]);
    guest.store_descriptor(QueueKind::Inflate, 0, buffer.address, buffer.length, 1, 1);
    guest.store_descriptor(QueueKind::Inflate, 1, buffer.address, buffer.length, 1, 0);
    guest.publish(QueueKind::Inflate, 0);
    let _ = guest.kick(QueueKind::Inflate);
    assert_eq!(guest.used(QueueKind::Inflate), [0]);
    assert_eq!(guest.unmarked(guest.low_pages()), [u64::from(FIRST)]);
}

#[test]
fn indirect_tables_are_refused() {
    const INDIRECT: u16 = 4;
    const NEXT: u16 = 1;
    for kind in ALL_QUEUES {
        let mut guest = marked_guest();
        let numbers = guest.pfns([FIRST]);
        // A table of one descriptor, which would be valid.
        let mut entry = numbers.address.to_le_bytes().to_vec();
        entry.extend(numbers.length.to_le_bytes());
        entry.extend([0; 4]);
        let table = guest.buffer(&entry).address;
        guest.store_descriptor(kind, 0, table, 16, INDIRECT, 0);
        guest.store_descriptor(kind, 1, numbers.address, 0, NEXT, 0);
        guest.publish(kind, 0);
        guest.publish(kind, 1);
        let _ = guest.kick(kind);
        assert_eq!(guest.used(kind), [0, 1], "{}", kind.name());
        assert_counted(&guest, GuestError::IndirectTable, 2);
        assert!(guest.unmarked(guest.low_pages()).is_empty());
        assert_alive(&mut guest);
    }
}

#[test]
fn a_head_that_does_not_exist_is_skipped() {
    for kind in ALL_QUEUES {
        let mut guest = marked_guest();
        guest.publish(kind, QUEUE_SIZE);
        guest.publish(kind, u16::MAX);
        let _ = guest.kick(kind);
        assert!(guest.used(kind).is_empty());
        assert_counted(&guest, GuestError::BadHead, 2);
        assert_alive(&mut guest);
    }
}

#[test]
fn an_impossible_ring_index_stops_the_queue_until_reset() {
    for kind in ALL_QUEUES {
        let mut guest = marked_guest();
        guest.set_available_index(kind, QUEUE_SIZE + 1);
        for _ in 0..1000 {
            let progress = guest.kick(kind);
            assert!(!progress.interrupt && !progress.more);
        }
        // Counted once, not once a kick.
        assert_counted(&guest, GuestError::BrokenQueue, 1);
        guest.balloon.reset();
        guest.activate();
        assert_alive(&mut guest);
    }
}

#[test]
fn an_index_without_a_chain_behind_it_does_not_keep_the_device_busy() {
    // The whole ring at once, with arbitrary descriptors: each entry is taken once.
    let mut guest = marked_guest();
    guest.set_available_index(QueueKind::Inflate, QUEUE_SIZE);
    let _ = guest.kick(QueueKind::Inflate);
    assert_eq!(guest.used(QueueKind::Inflate).len(), usize::from(QUEUE_SIZE));
    assert!(!guest.kick(QueueKind::Inflate).interrupt);
}

#[test]
fn work_of_a_call_is_bounded() {
    let mut guest = Guest::with_all_features();
    let index = guest.balloon.queue_index(QueueKind::Inflate).unwrap();
    // Each of the 128 chains names 65536 pages: the whole of memory and what surrounds it.
    let numbers = Buffer { address: 2 << 20, length: 256 << 10, writable: false };
    for _ in 0..QUEUE_SIZE {
        guest.offer(QueueKind::Inflate, &[numbers]);
    }
    let mut calls = 0;
    let mut most = 0;
    loop {
        let before = guest.balloon.counters().inflate.buffers;
        let more = guest.balloon.process_queue(index).more;
        most = most.max(guest.balloon.counters().inflate.buffers - before);
        calls += 1;
        if !more {
            break;
        }
    }
    assert_eq!(most, 1);
    assert!(calls >= u32::from(QUEUE_SIZE));
    assert_eq!(guest.used(QueueKind::Inflate).len(), usize::from(QUEUE_SIZE));
}

#[test]
fn inflating_and_deflating_in_turn_does_not_spin() {
    // A guest under memory pressure does this with DEFLATE_ON_OOM: each buffer is processed once,
    // and then the queue is idle.
    let mut guest = Guest::with_all_features();
    for _ in 0..200 {
        let _ = guest.inflate(FIRST..FIRST + 256);
        let _ = guest.deflate(FIRST..FIRST + 256);
        assert!(!guest.kick(QueueKind::Inflate).interrupt);
        assert!(!guest.kick(QueueKind::Deflate).interrupt);
    }
    let counters = guest.balloon.counters();
    assert_eq!((counters.inflate.buffers, counters.deflate.buffers), (200, 200));
    assert_eq!(counters.discard.bytes, 0);
}

#[test]
fn the_ring_itself_may_go_into_the_balloon() {
    // Its content becomes zeros, which is the driver's loss; the device must survive.
    let mut guest = Guest::with_features(Features::ALL_BALLOON.without(Feature::MustTellHost));
    let _ = guest.inflate(0..4096);
    let _ = guest.kick(QueueKind::Inflate);
    guest.balloon.reset();
    guest.activate();
    assert_alive(&mut guest);
}

#[test]
fn kicks_of_queues_that_do_not_exist_do_nothing() {
    let mut guest = Guest::with_features(Features::NONE);
    for index in [2, 3, 4, 5, 1000, usize::MAX] {
        assert_eq!(guest.balloon.process_queue(index), ebb_balloon::Progress::default());
    }
    guest.balloon.reset();
    assert_eq!(guest.balloon.process_queue(0), ebb_balloon::Progress::default());
    assert_eq!(guest.balloon.counters().errors.total(), 0);
}

#[test]
fn a_write_to_a_read_only_field_is_counted() {
    let mut guest = marked_guest();
    guest.balloon.write_config(0, &7_u32.to_le_bytes());
    assert_eq!(guest.balloon.target_bytes(), 0);
    assert_counted(&guest, GuestError::ReadOnlyConfig, 1);
}

#[test]
fn only_whole_pages_of_unaligned_reports_are_discarded() {
    let mut guest = marked_guest();
    let start = guest.low_pages().start.address();
    let _ = guest.send(
        QueueKind::Reporting,
        &[Buffer { address: start + 100, length: 3 * 4096, writable: true }],
    );
    assert_eq!(guest.unmarked(guest.low_pages()), [513, 514]);
    assert_eq!(guest.unmarked(PageRange::new(Pfn(512), 1)), [0_u64; 0]);
    assert_counted(&guest, GuestError::UnalignedRange, 1);
}
