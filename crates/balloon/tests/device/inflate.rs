//! Inflate and deflate.

use ebb_abi::balloon::{Feature, Features, Numbering, QueueKind};
use ebb_abi::{PageRange, Pfn};
use ebb_balloon::GuestError;
use ebb_balloon::testing::{Guest, Setup};
use ebb_guest_ram::{Backing, GuestRam, HugePages, InhibitReason, Populate};

const ALL: Features = Features::ALL_BALLOON;

/// First page number of the part of memory that tests use.
const FIRST: u32 = 512;

fn range(start: u32, pages: u64) -> PageRange {
    PageRange::new(Pfn::from(start), pages)
}

#[test]
fn a_buffer_of_linux_is_answered_first_and_discarded_on_flush() {
    let mut guest = Guest::with_all_features();
    guest.mark(guest.low_pages());
    let progress = guest.inflate(FIRST..FIRST + 256);
    assert!(progress.interrupt && progress.pending);
    assert_eq!(guest.used(QueueKind::Inflate).len(), 1);
    // Half a huge page waits for the other half.
    assert_eq!(guest.balloon.counters().discard.bytes, 0);
    assert_eq!(guest.balloon.info().pending_bytes, 1 << 20);

    guest.balloon.flush();
    assert_eq!(guest.unmarked(guest.low_pages()), (512..768).collect::<Vec<_>>());
    let counters = guest.balloon.counters();
    assert_eq!(
        (counters.discard.bytes, counters.discard.ranges, counters.discard.syscalls),
        (1 << 20, 1, 1)
    );
    assert_eq!(guest.balloon.info().pending_bytes, 0);
}

#[test]
fn two_buffers_that_form_a_huge_page_cost_one_system_call() {
    let mut guest = Guest::with_all_features();
    guest.mark(guest.low_pages());
    assert!(guest.inflate(FIRST..FIRST + 256).pending);
    let progress = guest.inflate(FIRST + 256..FIRST + 512);
    assert!(progress.interrupt && !progress.pending);
    let discard = guest.balloon.counters().discard;
    assert_eq!((discard.bytes, discard.ranges, discard.syscalls), (2 << 20, 1, 1));
    assert_eq!(guest.unmarked(guest.low_pages()).len(), 512);
}

#[test]
fn the_answer_comes_before_the_discard() {
    let mut guest = Guest::with_all_features();
    let index = guest.balloon.queue_index(QueueKind::Inflate).unwrap();
    let discarder = guest.balloon.discarder();
    let buffer = guest.pfns(FIRST..FIRST + 2048);
    guest.offer(QueueKind::Inflate, &[buffer]);
    let progress = guest.balloon.process_queue(index);
    assert!(progress.interrupt && progress.due && progress.pending && !progress.more);
    assert_eq!(guest.used(QueueKind::Inflate).len(), 1);
    assert_eq!(guest.balloon.counters().discard.bytes, 0);
    // The device is not locked while the discarder works.
    discarder.discard_due();
    let discard = guest.balloon.counters().discard;
    assert_eq!((discard.bytes, discard.syscalls), (8 << 20, 1));
    let progress = guest.balloon.process_queue(index);
    assert!(!progress.interrupt && !progress.due && !progress.pending);
}

#[test]
fn without_must_tell_host_pages_are_discarded_before_the_answer() {
    let mut guest = Guest::with_features(ALL.without(Feature::MustTellHost));
    guest.mark(guest.low_pages());
    let progress = guest.inflate((FIRST..FIRST + 256).rev());
    assert!(progress.interrupt && !progress.pending);
    let discard = guest.balloon.counters().discard;
    assert_eq!((discard.bytes, discard.syscalls), (1 << 20, 1));
    assert_eq!(guest.unmarked(guest.low_pages()), (512..768).collect::<Vec<_>>());
    assert_eq!(guest.used(QueueKind::Inflate).len(), 1);
}

#[test]
fn a_page_deflated_while_it_waits_is_never_discarded() {
    let mut guest = Guest::with_all_features();
    guest.mark(guest.low_pages());
    let _ = guest.inflate(FIRST..FIRST + 300);
    let progress = guest.deflate([FIRST + 7, FIRST + 299, FIRST + 400]);
    assert!(progress.interrupt);
    assert_eq!(guest.used(QueueKind::Deflate).len(), 1);
    // The rest of the huge page arrives, then everything is flushed.
    let _ = guest.inflate(FIRST + 300..FIRST + 512);
    guest.balloon.flush();
    assert_eq!(guest.unmarked(range(FIRST, 512)).len(), 510);
    assert!(
        guest.unmarked(range(FIRST + 7, 1)).is_empty()
            && guest.unmarked(range(FIRST + 299, 1)).is_empty()
    );
    let counters = guest.balloon.counters();
    assert_eq!(counters.discard.bytes, 510 * 4096);
    assert_eq!((counters.inflate.bytes, counters.deflate.bytes), (512 * 4096, 3 * 4096));
}

#[test]
fn compaction_inflates_the_new_page_before_it_deflates_the_old_one() {
    // drivers/virtio/virtio_balloon.c, virtballoon_migratepage.
    let mut guest = Guest::with_all_features();
    guest.mark(guest.low_pages());
    let _ = guest.inflate([FIRST]);
    let _ = guest.inflate([FIRST + 1]);
    let _ = guest.deflate([FIRST]);
    guest.balloon.flush();
    assert_eq!(guest.unmarked(range(FIRST, 3)), [u64::from(FIRST) + 1]);
}

#[test]
fn a_page_can_be_inflated_again() {
    let mut guest = Guest::with_all_features();
    for _ in 0..3 {
        guest.mark(range(FIRST, 1));
        let _ = guest.inflate([FIRST]);
        guest.balloon.flush();
        assert_eq!(guest.unmarked(range(FIRST, 1)).len(), 1);
        let _ = guest.deflate([FIRST]);
    }
    assert_eq!(guest.balloon.counters().discard.bytes, 3 * 4096);
}

#[test]
fn waiting_pages_are_bounded_in_number_and_ranges() {
    let mut guest = Guest::with_all_features();
    // Every other page: no two pages form a range.
    for start in (FIRST..4096).step_by(512) {
        let _ = guest.inflate((start..start + 512).step_by(2));
    }
    assert!(guest.balloon.pending_ranges().len() <= 1024);
    let discard = guest.balloon.counters().discard;
    assert!(discard.bytes > 0 && discard.ranges == discard.bytes / 4096);
    guest.balloon.flush();
    assert_eq!(guest.balloon.counters().discard.bytes, 7 * 256 * 4096);
}

#[test]
fn reaching_the_target_flushes() {
    let mut guest = Guest::with_all_features();
    assert_eq!(guest.balloon.set_target_bytes(2 * 4096), Ok(true));
    let _ = guest.inflate([FIRST, FIRST + 9]);
    guest.balloon.write_config(4, &1_u32.to_le_bytes());
    assert_eq!(guest.balloon.counters().discard.bytes, 0);
    guest.balloon.write_config(4, &2_u32.to_le_bytes());
    assert_eq!(guest.balloon.counters().discard.bytes, 2 * 4096);
    assert_eq!(guest.balloon.actual_bytes(), 2 * 4096);
}

#[test]
fn several_buffers_in_the_ring_are_drained_by_one_kick() {
    for negotiated in [ALL, ALL.without(Feature::MustTellHost)] {
        let mut guest = Guest::with_features(negotiated);
        for start in (FIRST..FIRST + 2048).step_by(256) {
            let buffer = guest.pfns(start..start + 256);
            guest.offer(QueueKind::Inflate, &[buffer]);
        }
        let progress = guest.kick(QueueKind::Inflate);
        assert!(progress.interrupt && !progress.pending);
        assert_eq!(guest.used(QueueKind::Inflate).len(), 8);
        let discard = guest.balloon.counters().discard;
        assert_eq!((discard.bytes, discard.ranges, discard.syscalls), (8 << 20, 1, 1));
    }
}

#[test]
fn poisoned_pages_are_kept() {
    let mut guest = Guest::with_all_features();
    guest.mark(guest.low_pages());
    guest.balloon.write_config(12, &0xaa_u32.to_le_bytes());
    assert!(!guest.inflate(FIRST..FIRST + 512).pending);
    guest.balloon.flush();
    assert!(guest.unmarked(guest.low_pages()).is_empty());
    assert_eq!(guest.balloon.counters().discard.poisoned_bytes, 2 << 20);
    assert_eq!(guest.balloon.info().poison_value, Some(0xaa));

    // A pattern of zeros is what a discarded page contains.
    guest.balloon.write_config(12, &[0; 4]);
    let _ = guest.inflate(FIRST..FIRST + 512);
    assert_eq!(guest.unmarked(guest.low_pages()).len(), 512);
}

#[test]
fn a_poison_value_means_nothing_if_the_feature_was_declined() {
    let mut guest = Guest::with_features(ALL.without(Feature::PagePoison));
    guest.balloon.write_config(12, &0xaa_u32.to_le_bytes());
    let _ = guest.inflate(FIRST..FIRST + 512);
    assert_eq!(guest.balloon.counters().discard.bytes, 2 << 20);
    assert_eq!(guest.balloon.info().poison_value, None);
}

#[test]
fn nothing_is_discarded_while_inhibited_and_everything_is_answered() {
    let mut guest = Guest::with_all_features();
    guest.mark(guest.low_pages());
    let guard = guest.ram.inhibit_discard(InhibitReason::PinnedMemory);
    let _ = guest.inflate(FIRST..FIRST + 700);
    guest.balloon.flush();
    assert_eq!(guest.used(QueueKind::Inflate).len(), 1);
    assert!(guest.unmarked(guest.low_pages()).is_empty());
    let discard = guest.balloon.counters().discard;
    assert_eq!((discard.bytes, discard.inhibited_bytes), (0, 700 * 4096));
    assert_eq!(guest.balloon.info().inhibited.len(), 1);
    drop(guard);
    let _ = guest.inflate(FIRST + 1024..FIRST + 1536);
    assert_eq!(guest.unmarked(guest.low_pages()).len(), 512);
}

#[test]
fn memory_of_a_memfd_is_discarded_too() {
    let mut guest = Guest::new(Setup { backing: Backing::Memfd, ..Setup::default() });
    guest.mark(guest.low_pages());
    let buffer = guest.pfns(FIRST..FIRST + 1024);
    guest.offer(QueueKind::Inflate, &[buffer]);
    let before = guest.ram.resident_bytes().unwrap();
    let _ = guest.kick(QueueKind::Inflate);
    assert_eq!(guest.ram.resident_bytes().unwrap(), before - (4 << 20));
    assert_eq!(guest.unmarked(guest.low_pages()).len(), 1024);
}

#[test]
fn hugetlb_pages_are_remembered_across_buffers_and_forgotten_on_reset() {
    let setup = Setup { backing: Backing::Hugetlb2M, ..Setup::default() };
    let region = ebb_guest_ram::RegionSpec {
        start: vm_memory::GuestAddress(0),
        size_bytes: 2 * setup.region_bytes,
        host_node: None,
    };
    if let Err(error) = GuestRam::new(&[region], setup.backing, HugePages::Off, Populate::Lazy) {
        // The machine has no pool of huge pages; guest-ram's tests cover the bookkeeping without
        // one.
        assert!(error.to_string().contains("nr_hugepages"), "{error}");
        return;
    }
    let mut guest = Guest::new(setup);
    guest.mark(guest.low_pages());
    let _ = guest.inflate(FIRST..FIRST + 256);
    guest.balloon.flush();
    assert_eq!(guest.balloon.counters().discard.deferred_bytes, 1 << 20);
    let _ = guest.inflate(FIRST + 256..FIRST + 512);
    guest.balloon.flush();
    assert_eq!(guest.balloon.counters().discard.bytes, 2 << 20);

    let _ = guest.inflate(FIRST + 512..FIRST + 768);
    guest.balloon.flush();
    guest.balloon.reset();
    guest.activate();
    let _ = guest.inflate(FIRST + 768..FIRST + 1024);
    guest.balloon.flush();
    assert_eq!(guest.balloon.counters().discard.bytes, 2 << 20);
    assert_eq!(guest.unmarked(range(FIRST + 512, 512)).len(), 0);
}

#[test]
fn every_numbering_and_every_subset_of_features_works() {
    for numbering in Numbering::ALL {
        for bits in 0..256 {
            let mut guest = Guest::new(Setup {
                offered: ALL | Features::PROPOSED,
                negotiated: Features(bits),
                numbering,
                region_bytes: 4 << 20,
                ..Setup::default()
            });
            let _ = guest.inflate(FIRST..FIRST + 512);
            guest.balloon.flush();
            assert_eq!(guest.balloon.counters().discard.bytes, 2 << 20);
            for kind in [QueueKind::Statistics, QueueKind::FreePageHint, QueueKind::Reporting] {
                let exists = kind.feature().is_some_and(|feature| Features(bits).contains(feature));
                assert_eq!(guest.balloon.queue_index(kind).is_some(), exists);
                if exists {
                    let writable = kind != QueueKind::Statistics;
                    let buffer = guest.buffer(&[0; 20]);
                    let buffer = ebb_balloon::testing::Buffer { writable, ..buffer };
                    let _ = guest.send(kind, &[buffer]);
                    assert_eq!(guest.used(kind).len(), usize::from(writable));
                }
            }
            let counters = guest.balloon.counters();
            let buffers = [counters.statistics, counters.hinting, counters.reporting]
                .map(|queue| queue.buffers);
            let expected =
                [Feature::StatisticsQueue, Feature::FreePageHint, Feature::PageReporting]
                    .map(|feature| u64::from(Features(bits).contains(feature)));
            assert_eq!(buffers, expected, "{numbering:?} {}", Features(bits));
            assert_eq!(counters.errors.get(GuestError::WrongDirection), 0);
        }
    }
}
