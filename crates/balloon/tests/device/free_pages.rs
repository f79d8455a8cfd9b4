//! Collecting the free pages that a driver names.

use std::collections::BTreeSet;
use std::thread;
use std::time::{Duration, Instant};

use ebb_abi::balloon::extension::{AnswerStatus, Encoding, Purpose};
use ebb_abi::balloon::{Feature, Features, QueueKind};
use ebb_abi::{Order, PageRange, Pfn};
use ebb_balloon::testing::{Guest, Setup, message};
use ebb_balloon::{FreePageCollector, FreePageMap, FreePageSummary, HintEnd};
use proptest::prelude::*;

fn range(start: u64, pages: u64) -> PageRange {
    PageRange::new(Pfn(start), pages)
}

#[test]
fn waiting_ends_with_the_whole_answer() {
    let mut guest =
        Guest::with_extension(Features::ALL_WITH_EXTENSION.without(Feature::PagePoison));
    guest.leave_request_buffer();
    let collector = FreePageCollector::new(&guest.ram);
    assert_eq!(
        guest.balloon.request_free_pages(Order::PAGE, Box::new(collector.clone())),
        Ok(true)
    );
    assert_eq!(collector.wait(Instant::now()), None);

    let waiting = thread::spawn({
        let collector = collector.clone();
        move || collector.wait(Instant::now() + Duration::from_secs(600))
    });
    for (status, block) in
        [(AnswerStatus::More, range(1000, 2000)), (AnswerStatus::Done, range(0x10_0000, 8))]
    {
        let purpose = Purpose::FreePages { request_id: 1, status };
        let _ =
            guest.send_bytes(QueueKind::HostRequest, &message(purpose, Encoding::Ranges, &[block]));
    }
    assert_eq!(waiting.join().unwrap(), Some(HintEnd::Complete));
    assert_eq!(
        collector.summary(),
        FreePageSummary {
            bytes: 2008 * 4096,
            ranges: 2,
            // 8 at 1000, 16 at 1008, 1024 at 1024, 512 + 256 + 128 + 32 + 16 + 8 at 2048; and the
            // other 8.
            blocks: [0, 0, 0, 3, 2, 1, 0, 1, 1, 1, 1],
            huge_block_bytes: 3 * 512 * 4096,
            largest_range_bytes: 2000 * 4096,
        }
    );
    assert_eq!(
        collector.map().ranges().collect::<Vec<_>>(),
        [range(1000, 2000), range(0x10_0000, 8)]
    );
    let answer = collector.answer();
    assert_eq!(
        (answer.encodings.ranges, answer.message_bytes, answer.poisoned_bytes),
        (2, 2 * 48, 0)
    );
    assert_eq!(answer.translate_ns, guest.balloon.counters().host_request.translate_ns);
}

#[test]
fn a_reset_ends_waiting() {
    let mut guest = Guest::with_extension(Features::ALL_WITH_EXTENSION);
    let collector = FreePageCollector::new(&guest.ram);
    assert_eq!(
        guest.balloon.request_free_pages(Order::PAGE, Box::new(collector.clone())),
        Ok(false)
    );
    guest.balloon.reset();
    assert_eq!(collector.wait(Instant::now()), Some(HintEnd::Reset));
    assert_eq!(collector.summary(), FreePageSummary::default());
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 32, ..ProptestConfig::default() })]

    /// The model is the plain set of pages of memory.
    #[test]
    fn a_map_is_a_set_of_pages_of_memory(
        steps in prop::collection::vec(
            (any::<bool>(), any::<bool>(), 0..1100_u64, 0..300_u64),
            0..40,
        ),
    ) {
        let guest = Guest::new(Setup { region_bytes: 4 << 20, ..Setup::default() });
        let mut map = FreePageMap::new(&guest.ram);
        let mut model = BTreeSet::new();
        for (insert, high, start, pages) in steps {
            let start = start + if high { 0x10_0000 - 40 } else { 0 };
            let named = (start..start + pages)
                .filter(|page| *page < 1024 || (0x10_0000..0x10_0400).contains(page));
            if insert {
                map.insert(range(start, pages));
                model.extend(named);
            } else {
                map.remove(range(start, pages));
                named.for_each(|page| {
                    model.remove(&page);
                });
            }
        }
        let listed: BTreeSet<u64> =
            map.ranges().flat_map(|range| range.start.0..range.end().0).collect();
        let summary = map.summary();
        let in_blocks: u64 = (0..).zip(summary.blocks).map(|(order, blocks)| blocks << order).sum();
        prop_assert_eq!(
            (summary.bytes, in_blocks),
            (model.len() as u64 * 4096, model.len() as u64)
        );
        prop_assert_eq!(listed, model);
    }
}
