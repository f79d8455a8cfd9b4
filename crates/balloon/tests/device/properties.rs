//! Properties over any page numbers in any chains.

use std::collections::BTreeSet;

use ebb_abi::balloon::{Feature, Features, QueueKind};
use ebb_abi::{PageRange, Pfn};
use ebb_balloon::ReportCheck;
use ebb_balloon::testing::{Buffer, Guest, Setup};
use proptest::prelude::*;

/// Pages of a region of the guests used here: 8 MiB; the first quarter belongs to the driver.
const REGION_PAGES: u32 = 2048;
const FIRST: u32 = 512;
const HIGH: u32 = 0x10_0000;

/// Runs of page numbers, ascending, descending or with gaps: in memory, at its boundaries, in the
/// hole, far outside.
fn numbers() -> impl Strategy<Value = Vec<u32>> {
    let start = prop_oneof![
        6 => FIRST..REGION_PAGES,
        3 => HIGH..HIGH + REGION_PAGES,
        1 => 2000..2100_u32,
        1 => HIGH - 50..HIGH + 5,
        1 => any::<u32>(),
    ];
    let length = prop_oneof![3 => 1..4_u32, 1 => 200..600_u32];
    let run =
        (start, length, prop_oneof![4 => Just(1_i64), 1 => Just(-1), 1 => Just(2), 1 => Just(0)])
            .prop_map(|(start, length, stride)| {
                let number =
                    move |index| u32::try_from(i64::from(start) + i64::from(index) * stride);
                (0..length)
                    .filter_map(move |index| number(index).ok())
                    .filter(|number| *number >= FIRST)
                    .collect()
            });
    prop::collection::vec(run, 0..5).prop_map(|runs: Vec<Vec<u32>>| runs.concat())
}

/// Distribution of a buffer's bytes over descriptors: lengths of the parts, bytes that follow the
/// last number, and whether descriptors of the wrong direction stand between the parts.
#[derive(Clone, Debug)]
struct Shape {
    parts: Vec<usize>,
    excess: usize,
    interleave: bool,
}

fn shape() -> impl Strategy<Value = Shape> {
    (prop::collection::vec(0..900_usize, 0..8), 0..4_usize, any::<bool>())
        .prop_map(|(parts, excess, interleave)| Shape { parts, excess, interleave })
}

fn chain(guest: &mut Guest, numbers: &[u32], shape: &Shape) -> Vec<Buffer> {
    let mut bytes: Vec<u8> = numbers.iter().copied().flat_map(u32::to_le_bytes).collect();
    bytes.extend(vec![0xff; shape.excess]);
    let mut chain = Vec::new();
    let mut rest = &bytes[..];
    for length in shape.parts.iter().copied().chain([usize::MAX]) {
        let (part, after) = rest.split_at(length.min(rest.len()));
        rest = after;
        chain.push(guest.buffer(part));
        if shape.interleave {
            chain.push(Buffer { address: u64::from(FIRST) * 4096, length: 4096, writable: true });
        }
    }
    chain
}

/// The numbers of pages in memory.
fn in_memory(numbers: &[u32]) -> BTreeSet<u64> {
    let is_memory =
        |number: &u32| *number < REGION_PAGES || (HIGH..HIGH + REGION_PAGES).contains(number);
    numbers.iter().filter(|number| is_memory(number)).map(|number| u64::from(*number)).collect()
}

/// A guest whose pages are overwritten before they are discarded, so that a page that should not
/// have been touched is detected.
fn guest(must_tell_host: bool) -> Guest {
    let all = Features::ALL_BALLOON.without(Feature::PagePoison);
    let negotiated = if must_tell_host { all } else { all.without(Feature::MustTellHost) };
    let mut guest = Guest::new(Setup {
        negotiated,
        region_bytes: u64::from(REGION_PAGES) * 4096,
        ..Setup::default()
    });
    guest.balloon.set_report_check(ReportCheck::Overwrite);
    guest.mark(guest.low_pages());
    guest.mark(guest.high_pages());
    guest
}

fn unmarked(guest: &Guest) -> BTreeSet<u64> {
    guest
        .unmarked(guest.low_pages())
        .into_iter()
        .chain(guest.unmarked(guest.high_pages()))
        .collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    /// One buffer: exactly the named pages that are memory are discarded, each once.
    #[test]
    fn a_buffer_discards_exactly_the_named_pages(
        numbers in numbers(),
        shape in shape(),
        must_tell_host in any::<bool>(),
    ) {
        let mut guest = guest(must_tell_host);
        let chain = chain(&mut guest, &numbers, &shape);
        let _ = guest.send(QueueKind::Inflate, &chain);
        guest.balloon.flush();
        let expected = in_memory(&numbers);
        let counters = guest.balloon.counters();
        prop_assert_eq!(counters.discard.bytes, expected.len() as u64 * 4096);
        prop_assert_eq!(counters.inflate.bytes, counters.discard.bytes);
        prop_assert_eq!(unmarked(&guest), expected);
        prop_assert_eq!(guest.used(QueueKind::Inflate).len(), 1);
    }

    /// Any sequence of buffers to both queues, with the guest using each page as soon as it has it
    /// back: pages in the balloon are eventually discarded, and no other page ever loses its
    /// content.
    #[test]
    fn pages_outside_the_balloon_keep_their_content(
        steps in prop::collection::vec((0..5_u8, numbers(), shape()), 1..12),
        must_tell_host in any::<bool>(),
    ) {
        let mut guest = guest(must_tell_host);
        let mut balloon: BTreeSet<u64> = BTreeSet::new();
        let mut sent = [0; 2];
        for (action, numbers, shape) in steps {
            let pages = in_memory(&numbers);
            match action {
                0..3 => {
                    let chain = chain(&mut guest, &numbers, &shape);
                    let _ = guest.send(QueueKind::Inflate, &chain);
                    balloon.extend(pages);
                    sent[0] += 1;
                }
                3 => {
                    let chain = chain(&mut guest, &numbers, &shape);
                    let _ = guest.send(QueueKind::Deflate, &chain);
                    sent[1] += 1;
                    for page in pages {
                        balloon.remove(&page);
                        guest.mark(PageRange::new(Pfn(page), 1));
                    }
                }
                _ => guest.balloon.flush(),
            }
            prop_assert!(unmarked(&guest).is_subset(&balloon));
        }
        guest.balloon.flush();
        let discard = guest.balloon.counters().discard;
        prop_assert_eq!(discard.verified_pages * 4096, discard.bytes);
        prop_assert_eq!(unmarked(&guest), balloon);
        prop_assert_eq!(guest.used(QueueKind::Inflate).len(), sent[0]);
        prop_assert_eq!(guest.used(QueueKind::Deflate).len(), sent[1]);
    }

    /// Reports: exactly the whole pages inside the ranges that are memory are discarded.
    #[test]
    fn reports_discard_exactly_the_named_pages(
        ranges in prop::collection::vec(
            (0..3_u64, 0..3000_u64, 0..3_u64, 0..700_u64, 0..3_u64),
            1..20,
        ),
    ) {
        let mut guest = guest(true);
        let bytes = |(place, page, offset, pages, rest): (u64, u64, u64, u64, u64)| {
            let base = [u64::from(FIRST), u64::from(HIGH), u64::from(HIGH) - 100][place as usize];
            ((base + page) * 4096 + offset * 1111, pages * 4096 + rest * 1500)
        };
        let chain: Vec<Buffer> = ranges
            .iter()
            .map(|range| bytes(*range))
            .map(|(address, length)| Buffer { address, length: length as u32, writable: true })
            .collect();
        let _ = guest.send(QueueKind::Reporting, &chain);
        let expected: BTreeSet<u64> = ranges
            .iter()
            .map(|range| bytes(*range))
            .flat_map(|(address, length)| address.div_ceil(4096)..(address + length) / 4096)
            .collect();
        let numbers: Vec<u32> = expected.iter().map(|page| *page as u32).collect();
        let expected = in_memory(&numbers);
        prop_assert_eq!(guest.balloon.counters().discard.bytes, expected.len() as u64 * 4096);
        prop_assert_eq!(unmarked(&guest), expected);
        prop_assert_eq!(guest.used(QueueKind::Reporting).len(), 1);
    }
}
