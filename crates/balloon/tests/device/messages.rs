//! Messages on the inflate and deflate queues (docs/extension.md).

use std::sync::Arc;

use ebb_abi::balloon::extension::{
    Encoding, HEADER_BYTES, Header, Layout, MAX_BITMAP_BITS, MAX_MESSAGE_BYTES, Purpose,
    encode_range,
};
use ebb_abi::balloon::{Feature, Features, Numbering, QueueKind};
use ebb_abi::{PageRange, Pfn};
use ebb_balloon::testing::{Buffer, Guest, Setup, message};
use ebb_balloon::{Balloon, GuestError};

const ALL: Features = Features::ALL_WITH_EXTENSION;

/// First page of the part of memory that tests use.
const FIRST: u64 = 512;

fn range(start: u64, pages: u64) -> PageRange {
    PageRange::new(Pfn(start), pages)
}

/// A guest with marked memory and messages.
fn marked_guest(negotiated: Features) -> Guest {
    let guest = Guest::with_extension(negotiated);
    guest.mark(guest.low_pages());
    guest.mark(guest.high_pages());
    guest
}

#[track_caller]
fn assert_counted(guest: &Guest, error: GuestError, count: u64) {
    let errors = guest.balloon.counters().errors;
    assert_eq!((errors.get(error), errors.total()), (count, count), "{}: {errors:?}", error.name());
}

#[test]
fn every_encoding_means_the_same() {
    // Blocks of several orders, as a driver gets them.
    let blocks = [range(1024, 512), range(FIRST, 4), range(2048, 1024), range(FIRST + 8, 2)];
    let pages: u64 = blocks.iter().map(|block| block.pages).sum();
    let mut messages = Vec::new();
    for encoding in Encoding::ALL {
        let mut guest = marked_guest(ALL);
        let progress = guest.inflate_blocks(encoding, &blocks);
        assert!(progress.interrupt && progress.pending);
        guest.balloon.flush();
        let expected: Vec<u64> =
            (512..516).chain(520..522).chain(1024..1536).chain(2048..3072).collect();
        assert_eq!(guest.unmarked(guest.low_pages()), expected);

        let _ = guest.deflate_blocks(encoding, &blocks);
        assert_eq!(guest.used(QueueKind::Deflate).len(), 1);
        let counters = guest.balloon.counters();
        assert_eq!(counters.errors.total(), 0);
        assert_eq!((counters.inflate.bytes, counters.deflate.bytes), (pages * 4096, pages * 4096));
        assert_eq!((counters.inflate.ranges, counters.discard.bytes), (4, pages * 4096));
        messages.push(counters.inflate.message_bytes);
        let encodings = counters.encodings;
        assert_eq!(encodings.pfns + encodings.bitmaps + encodings.ranges, 2);
        assert_eq!(encodings.arrays, 0);
    }
    assert_eq!(messages, [32 + pages * 4, 32 + (2560 / 2_u64).div_ceil(8), 32 + 4 * 16]);
}

#[test]
fn pages_come_back_in_another_encoding_and_in_parts() {
    let mut guest = marked_guest(ALL);
    let _ = guest.inflate_blocks(Encoding::Ranges, &[range(FIRST, 300)]);
    let _ = guest.deflate_blocks(Encoding::Bitmap, &[range(FIRST + 3, 2), range(FIRST + 100, 1)]);
    let _ = guest.deflate_blocks(Encoding::Pfns, &[range(FIRST + 200, 1)]);
    guest.balloon.flush();
    assert_eq!(guest.unmarked(guest.low_pages()).len(), 296);
    assert!(guest.unmarked(range(FIRST + 3, 2)).is_empty());
    assert_eq!(guest.balloon.counters().errors.total(), 0);
}

#[test]
fn pages_outside_memory_are_ignored() {
    for encoding in [Encoding::Bitmap, Encoding::Ranges] {
        let mut guest = marked_guest(ALL);
        // From the end of the first region, across the hole; from before the second region's end.
        let _ = guest.inflate_blocks(encoding, &[range(4095, 2), range(0x10_0fff, 11)]);
        guest.balloon.flush();
        assert_eq!(guest.unmarked(guest.low_pages()), [4095]);
        assert_eq!(guest.unmarked(guest.high_pages()), [0x10_0fff]);
        assert_eq!(guest.balloon.counters().rejected_pages, 11);
        assert_counted(&guest, GuestError::OutsideRam, 1);
    }
}

#[test]
fn duplicates_count_once() {
    let mut guest = marked_guest(ALL);
    let _ = guest
        .inflate_blocks(Encoding::Ranges, &[range(FIRST, 4), range(FIRST + 2, 4), range(FIRST, 1)]);
    assert_eq!(guest.balloon.counters().inflate.bytes, 6 * 4096);
    assert_counted(&guest, GuestError::DoublePage, 1);
}

#[test]
fn bits_after_the_last_one_are_ignored() {
    let mut guest = marked_guest(ALL);
    let layout = Layout::Bitmap { start: Pfn(FIRST), page_shift: 12, bits: 3 };
    let header = Header::new(Purpose::Inflate, layout).unwrap().to_bytes();
    let _ = guest.send_bytes(QueueKind::Inflate, &[&header[..], &[0xff]].concat());
    guest.balloon.flush();
    assert_eq!(guest.unmarked(guest.low_pages()), [512, 513, 514]);
}

/// A valid message of one page with bytes changed from `offset` on.
fn with_changed_bytes(offset: usize, value: &[u8]) -> Vec<u8> {
    let mut bytes = message(Purpose::Inflate, Encoding::Ranges, &[range(FIRST, 1)]);
    bytes[offset..offset + value.len()].copy_from_slice(value);
    bytes
}

#[test]
fn broken_messages_are_refused_counted_and_returned() {
    let sound = message(Purpose::Inflate, Encoding::Ranges, &[range(FIRST, 1)]);
    let bitmap = message(Purpose::Inflate, Encoding::Bitmap, &[range(FIRST, 1)]);
    let cases = [
        (sound[..HEADER_BYTES - 1].to_vec(), GuestError::BadMessage),
        (vec![7], GuestError::BadMessage),
        (with_changed_bytes(0, &[0]), GuestError::BadMessage),
        (with_changed_bytes(0, &[9]), GuestError::BadMessage),
        (with_changed_bytes(2, &[13]), GuestError::BadMessage),
        (with_changed_bytes(4, &[1]), GuestError::BadMessage),
        (with_changed_bytes(6, &[4]), GuestError::BadMessage),
        (with_changed_bytes(8, &[1]), GuestError::BadMessage),
        (with_changed_bytes(16, &[1]), GuestError::BadMessage),
        (with_changed_bytes(24, &[0]), GuestError::BadMessage),
        (with_changed_bytes(28, &[1]), GuestError::BadMessage),
        (with_changed_bytes(24, &[0xff; 8]), GuestError::BadMessage),
        // Another queue's.
        (message(Purpose::Deflate, Encoding::Ranges, &[range(FIRST, 1)]), GuestError::BadMessage),
        // An array as without the extension.
        (FIRST.to_le_bytes().repeat(32), GuestError::BadMessage),
        (sound[..sound.len() - 1].to_vec(), GuestError::MessageLength),
        ([&sound[..], &[0]].concat(), GuestError::MessageLength),
        (with_changed_bytes(24, &[2]), GuestError::MessageLength),
        ([&bitmap[..], &[0]].concat(), GuestError::MessageLength),
        (with_changed_bytes(40, &[0]), GuestError::BadRange),
        (with_changed_bytes(46, &[0x10]), GuestError::BadRange),
        (with_changed_bytes(32, &[0xff; 8]), GuestError::BadRange),
        (with_changed_bytes(32, &[0xff; 16]), GuestError::BadRange),
    ];
    for (bytes, error) in cases {
        let mut guest = marked_guest(ALL.without(Feature::MustTellHost));
        let progress = guest.send_bytes(QueueKind::Inflate, &bytes);
        assert!(progress.interrupt && !progress.pending, "{bytes:?}");
        assert_counted(&guest, error, 1);
        assert_eq!(guest.used_with_lengths(QueueKind::Inflate).len(), 1);
        assert_eq!(guest.balloon.counters().discard.bytes, 0);
        // The device continues.
        let _ = guest.inflate_blocks(Encoding::Ranges, &[range(FIRST, 1)]);
        assert_eq!(guest.balloon.counters().discard.bytes, 4096);
    }
}

#[test]
fn an_encoding_that_was_not_negotiated_is_refused() {
    for (feature, forbidden, allowed) in [
        (Feature::PageBitmap, Encoding::Ranges, Encoding::Bitmap),
        (Feature::PageRanges, Encoding::Bitmap, Encoding::Ranges),
    ] {
        let mut guest = marked_guest(Features::ALL_BALLOON.with(feature));
        let _ = guest.inflate_blocks(forbidden, &[range(FIRST, 8)]);
        assert_counted(&guest, GuestError::ForbiddenEncoding, 1);
        let _ = guest.inflate_blocks(allowed, &[range(FIRST, 8)]);
        let _ = guest.inflate_blocks(Encoding::Pfns, &[range(FIRST + 8, 8)]);
        assert_eq!(guest.balloon.counters().inflate.bytes, 16 * 4096);
        assert_counted(&guest, GuestError::ForbiddenEncoding, 1);
    }
}

#[test]
fn the_stock_driver_on_a_device_with_the_extension_sends_arrays() {
    for negotiated in [Features::ALL_BALLOON, Features::ALL_BALLOON.with(Feature::HostRequest)] {
        let mut guest = marked_guest(negotiated);
        let _ = guest.inflate(512..1024);
        assert_eq!(guest.unmarked(guest.low_pages()).len(), 512);
        let counters = guest.balloon.counters();
        assert_eq!((counters.encodings.arrays, counters.errors.total()), (1, 0));
        assert_eq!(counters.inflate.message_bytes, 512 * 4);
    }
}

/// A message of the largest size, in the upper region, all of which the driver uses here.
fn largest_message(guest: &Guest, purpose: Purpose, byte: u8) -> Buffer {
    let layout = Layout::Bitmap { start: Pfn(0), page_shift: 12, bits: MAX_BITMAP_BITS };
    let address = guest.high_pages().start.address();
    guest.write(address, &Header::new(purpose, layout).unwrap().to_bytes());
    guest.write(address + HEADER_BYTES as u64, &vec![byte; MAX_BITMAP_BITS as usize / 8]);
    Buffer { address, length: MAX_MESSAGE_BYTES as u32, writable: false }
}

#[test]
fn the_largest_message_is_processed_in_steps() {
    let mut guest = Guest::with_extension(ALL);
    let buffer = largest_message(&guest, Purpose::Deflate, 0x55);
    let index = guest.index(QueueKind::Deflate);
    guest.offer(QueueKind::Deflate, &[buffer]);
    let mut calls = 1;
    while guest.balloon.process_queue(index).more {
        calls += 1;
    }
    assert!(calls > 16, "{calls}");
    assert_eq!(guest.used(QueueKind::Deflate).len(), 1);
    // Every other page of both regions.
    assert_eq!(guest.balloon.counters().deflate.bytes, 16 << 20);
    let longer = Buffer { length: buffer.length + 1, ..buffer };
    let _ = guest.send(QueueKind::Deflate, &[longer]);
    assert_eq!(guest.balloon.counters().errors.get(GuestError::OversizedChain), 1);
    assert_eq!(guest.used(QueueKind::Deflate).len(), 1);
}

#[test]
fn all_of_memory_in_one_range_is_discarded_in_steps_outside_of_the_lock() {
    let setup = Setup { offered: ALL, negotiated: ALL, region_bytes: 64 << 20, ..Setup::default() };
    let mut guest = Guest::new(setup);
    let discarder = guest.balloon.discarder();
    let index = guest.index(QueueKind::Inflate);
    let bytes = message(
        Purpose::Inflate,
        Encoding::Ranges,
        &[range(FIRST, (64 << 8) - FIRST), guest.high_pages()],
    );
    let buffer = guest.buffer(&bytes);
    guest.offer(QueueKind::Inflate, &[buffer]);
    let mut steps = 0;
    loop {
        let before = guest.balloon.counters().discard.bytes;
        let progress = guest.balloon.process_queue(index);
        // Nothing is discarded while the device is locked.
        assert_eq!(guest.balloon.counters().discard.bytes, before);
        assert!(guest.balloon.info().pending_bytes <= 64 << 20);
        steps += 1;
        if !progress.more {
            assert!(progress.interrupt);
            break;
        }
        assert!(progress.due && !progress.interrupt);
        assert!(guest.used(QueueKind::Inflate).is_empty());
        discarder.discard_due();
    }
    guest.balloon.flush();
    assert_eq!(steps, 4);
    assert_eq!(guest.balloon.counters().discard.bytes, (126 << 20));
    assert_eq!(guest.used(QueueKind::Inflate).len(), 1);
}

#[test]
fn fragments_are_discarded_a_bounded_number_at_a_time() {
    let mut guest = Guest::with_extension(ALL);
    let index = guest.index(QueueKind::Inflate);
    // Every other page of both regions: no two pages form a range.
    let pages: Vec<_> = (FIRST / 2..2048)
        .map(|page| range(2 * page, 1))
        .chain((0..2048).map(|page| range(0x10_0000 + 2 * page, 1)))
        .collect();
    let buffer = guest.buffer(&message(Purpose::Inflate, Encoding::Ranges, &pages));
    guest.offer(QueueKind::Inflate, &[buffer]);
    let mut most = 0;
    loop {
        let before = guest.balloon.counters().discard.ranges;
        let more = guest.balloon.process_queue(index).more;
        most = most.max(guest.balloon.counters().discard.ranges - before);
        if !more {
            break;
        }
    }
    assert!((1..=2048).contains(&most), "{most}");
    guest.balloon.flush();
    assert_eq!(guest.balloon.counters().discard.bytes, pages.len() as u64 * 4096);
}

#[test]
fn without_must_tell_host_the_answer_comes_after_the_last_step() {
    let setup = Setup { region_bytes: 512 << 20, offered: ALL, ..Setup::default() };
    let mut guest = Guest::new(Setup { negotiated: ALL.without(Feature::MustTellHost), ..setup });
    let index = guest.index(QueueKind::Inflate);
    let bytes = message(Purpose::Inflate, Encoding::Ranges, &[guest.high_pages()]);
    let buffer = guest.buffer(&bytes);
    guest.offer(QueueKind::Inflate, &[buffer]);
    let first = guest.balloon.process_queue(index);
    assert!(first.more && !first.interrupt && !first.pending);
    assert!(guest.used(QueueKind::Inflate).is_empty());
    assert!(guest.balloon.counters().discard.bytes >= 256 << 20);
    while guest.balloon.process_queue(index).more {}
    assert_eq!(guest.used(QueueKind::Inflate).len(), 1);
    assert_eq!(guest.balloon.counters().discard.bytes, 512 << 20);
}

#[test]
fn a_message_in_progress_is_dropped_on_reset() {
    let mut guest = Guest::with_extension(ALL);
    let buffer = largest_message(&guest, Purpose::Deflate, 0x55);
    guest.offer(QueueKind::Deflate, &[buffer]);
    assert!(guest.balloon.process_queue(1).more);
    guest.balloon.reset();
    guest.activate();
    let before = guest.balloon.counters().deflate;
    assert!(!guest.balloon.process_queue(1).more);
    assert_eq!(guest.balloon.counters().deflate, before);
}

#[test]
fn a_message_in_progress_is_read_again_after_a_restore() {
    let mut guest = Guest::with_extension(ALL);
    let buffer = largest_message(&guest, Purpose::Deflate, 0xff);
    guest.offer(QueueKind::Deflate, &[buffer]);
    assert!(guest.balloon.process_queue(1).more);
    let state = guest.balloon.save();
    let states = guest.balloon.queue_states();
    assert_eq!(states.iter().map(|state| state.next_avail).collect::<Vec<_>>(), [0; 6]);

    // The copy starts over; the saved device continues.
    let queues =
        states.iter().map(|state| virtio_queue::Queue::try_from(*state).unwrap()).collect();
    let mut copy = Balloon::restore(&state, Arc::clone(&guest.ram), queues).unwrap();
    while guest.balloon.process_queue(1).more {}
    assert_eq!(guest.used(QueueKind::Deflate).len(), 1);
    assert_eq!(guest.balloon.queue_states()[1].next_avail, 1);
    while copy.process_queue(1).more {}
    assert_eq!(copy.queue_states()[1].next_used, 1);
    assert_eq!(copy.counters().deflate.bytes, guest.balloon.counters().deflate.bytes);
}

#[test]
fn after_a_refused_deflation_nothing_old_is_discarded() {
    let mut guest = marked_guest(ALL);
    let _ = guest.inflate_blocks(Encoding::Ranges, &[range(FIRST, 256)]);
    assert_eq!(guest.balloon.info().pending_bytes, 1 << 20);
    let mut bytes = message(Purpose::Deflate, Encoding::Ranges, &[range(FIRST, 256)]);
    bytes.push(0);
    let _ = guest.send_bytes(QueueKind::Deflate, &bytes);
    // The driver assumes that its pages were deflated.
    guest.mark(range(FIRST, 256));
    let _ = guest.inflate_blocks(Encoding::Ranges, &[range(FIRST + 256, 256)]);
    guest.balloon.flush();
    assert!(guest.unmarked(range(FIRST, 256)).is_empty());
    assert_eq!(guest.unmarked(range(FIRST + 256, 256)).len(), 256);
}

#[test]
fn poisoned_pages_are_kept_in_every_encoding() {
    for encoding in Encoding::ALL {
        let mut guest = marked_guest(ALL);
        guest.balloon.write_config(12, &0xaa_u32.to_le_bytes());
        let _ = guest.inflate_blocks(encoding, &[range(FIRST, 512)]);
        guest.balloon.flush();
        assert!(guest.unmarked(guest.low_pages()).is_empty());
        assert_eq!(guest.balloon.counters().discard.poisoned_bytes, 2 << 20);
    }
}

#[test]
fn a_message_may_be_spread_over_descriptors() {
    let mut guest = marked_guest(ALL);
    let bytes = [
        &Header::new(Purpose::Inflate, Layout::Ranges { count: 2 }).unwrap().to_bytes()[..],
        &encode_range(range(FIRST, 1)),
        &encode_range(range(FIRST + 7, 1)),
    ]
    .concat();
    let chain: Vec<Buffer> = bytes.chunks(5).map(|part| guest.buffer(part)).collect();
    let _ = guest.send(QueueKind::Inflate, &chain);
    guest.balloon.flush();
    assert_eq!(guest.unmarked(guest.low_pages()), [512, 519]);
    assert_eq!(guest.balloon.counters().errors.total(), 0);
}

#[test]
fn every_numbering_and_every_subset_of_the_extension_works() {
    let queues = [
        Feature::StatisticsQueue,
        Feature::FreePageHint,
        Feature::PageReporting,
        Feature::HostRequest,
    ];
    let encodings = [Feature::PageBitmap, Feature::PageRanges];
    let features = [&queues[..], &encodings[..]].concat();
    for bits in 0..64 {
        let chosen = features.iter().enumerate().filter(|(index, _)| bits >> index & 1 != 0);
        let negotiated = chosen
            .fold(Features::from(Feature::MustTellHost), |set, (_, feature)| set.with(*feature));
        for numbering in Numbering::ALL {
            let setup = Setup {
                offered: ALL,
                negotiated,
                numbering,
                region_bytes: 4 << 20,
                ..Setup::default()
            };
            let mut guest = Guest::new(setup);
            if negotiated.has_messages() {
                let _ = guest.inflate_blocks(Encoding::Pfns, &[range(FIRST, 512)]);
            } else {
                let _ = guest.inflate(512..1024);
            }
            assert_eq!(
                guest.balloon.counters().discard.bytes,
                2 << 20,
                "{numbering:?} {negotiated}"
            );
            let exists = negotiated.contains(Feature::HostRequest);
            let expected = exists.then(|| guest.index(QueueKind::HostRequest));
            assert_eq!(guest.balloon.queue_index(QueueKind::HostRequest), expected);
            if exists {
                guest.leave_request_buffer();
                assert_eq!(guest.balloon.counters().host_request.buffers, 1);
            }
            assert_eq!(guest.balloon.counters().errors.total(), 0);
        }
    }
}
