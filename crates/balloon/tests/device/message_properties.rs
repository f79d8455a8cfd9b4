//! Properties of messages: a plain model reads the same bytes, field by field and page by page.

use std::collections::BTreeSet;

use ebb_abi::balloon::extension::{AnswerStatus, HEADER_BYTES};
use ebb_abi::balloon::extension::{Encoding, Purpose, Shape};
use ebb_abi::balloon::{Feature, Features, QueueKind};
use ebb_abi::{Order, PageRange, Pfn};
use ebb_balloon::testing::{Buffer, Guest, Setup, message};
use proptest::prelude::*;

use crate::hinting::Log;

const ALL: Features = Features::ALL_WITH_EXTENSION;

/// Pages of a region of the guests used here: 8 MiB; the first quarter belongs to the driver.
const REGION_PAGES: u64 = 2048;
const FIRST: u64 = 512;
const HIGH: u64 = 0x10_0000;

/// All pages of memory.
fn memory() -> impl Iterator<Item = u64> {
    (0..REGION_PAGES).chain(HIGH..HIGH + REGION_PAGES)
}

/// Interprets a message by the specification: its pages that are memory, or `None` if it must be
/// refused.
fn model(bytes: &[u8], command: u64, negotiated: Features) -> Option<BTreeSet<u64>> {
    let number = |at: usize, size: usize| {
        bytes
            .get(at..at + size)
            .map(|field| field.iter().rev().fold(0_u64, |sum, byte| sum << 8 | u64::from(*byte)))
    };
    let bit = |index: u128| bytes[HEADER_BYTES + (index / 8) as usize] >> (index % 8) & 1 != 0;
    let (page_shift, status, encoding) = (number(2, 2)?, number(4, 2)?, number(6, 2)?);
    let (request_id, start, count) = (number(8, 8)?, number(16, 8)?, number(24, 8)?);
    let is_answer = command == 3;
    let header_is_legal = number(0, 2)? == command
        && if is_answer { (1..=3).contains(&status) } else { status == 0 }
        && is_answer == (request_id != 0)
        && (is_answer || count > 0)
        && (encoding == 2 || (page_shift == 12 && start == 0));
    if !header_is_legal {
        return None;
    }
    let payload = bytes.len() - HEADER_BYTES;
    let entries = |size: u64| {
        (count <= 65_536 && count * size == payload as u64).then_some(0..count as usize)
    };
    match encoding {
        1 => {
            let named: Option<BTreeSet<u64>> =
                entries(4)?.map(|index| number(HEADER_BYTES + 4 * index, 4)).collect();
            let named = named?;
            Some(memory().filter(|page| named.contains(page)).collect())
        }
        2 if negotiated.contains(Feature::PageBitmap) => {
            let is_legal = (12..=30).contains(&page_shift)
                && count <= 8 << 20
                && count.div_ceil(8) == payload as u64
                && start % (1 << (page_shift - 12)) == 0
                && u128::from(start) + (u128::from(count) << (page_shift - 12)) <= 1 << 52;
            let is_named = |page: &u64| {
                let block = u128::from(page.checked_sub(start)?) >> (page_shift - 12);
                (block < u128::from(count) && bit(block)).then_some(())
            };
            is_legal.then(|| memory().filter(|page| is_named(page).is_some()).collect())
        }
        3 if negotiated.contains(Feature::PageRanges) => {
            let ranges: Option<Vec<(u128, u128)>> = entries(16)?
                .map(|index| {
                    let at = HEADER_BYTES + 16 * index;
                    let (start, pages) =
                        (u128::from(number(at, 8)?), u128::from(number(at + 8, 8)?));
                    (pages > 0 && start + pages <= 1 << 52).then_some((start, start + pages))
                })
                .collect();
            let ranges = ranges?;
            let is_named = |page: &u64| {
                ranges.iter().any(|(start, end)| (*start..*end).contains(&u128::from(*page)))
            };
            Some(memory().filter(is_named).collect())
        }
        _ => None,
    }
}

/// Blocks of any order: in memory, at its boundaries, in the hole, far outside.
fn blocks() -> impl Strategy<Value = Vec<PageRange>> {
    let start = prop_oneof![
        6 => FIRST..REGION_PAGES,
        4 => HIGH..HIGH + REGION_PAGES,
        1 => REGION_PAGES - 20..REGION_PAGES + 20,
        1 => HIGH - 20..HIGH + 20,
        1 => HIGH + REGION_PAGES - 20..HIGH + REGION_PAGES + 20,
    ];
    let block = (start, prop_oneof![4 => 0..4_u32, 1 => 4..10_u32])
        .prop_map(|(start, order)| PageRange::new(Pfn(start >> order << order), 1 << order));
    let near = prop::collection::vec(block, 1..12);
    prop_oneof![
        12 => near,
        1 => (any::<u32>(), 1..u64::from(u32::MAX)).prop_map(|(start, pages)| {
            vec![PageRange::new(Pfn(u64::from(start).max(FIRST)), pages)]
        }),
    ]
}

/// A driver's message: blocks in an encoding, perhaps with a byte changed or bytes missing.
#[derive(Clone, Debug)]
struct Sent {
    encoding: Encoding,
    blocks: Vec<PageRange>,
    parts: Vec<usize>,
    spoil: Option<(usize, u8)>,
    missing: usize,
}

fn sent() -> impl Strategy<Value = Sent> {
    (
        prop::sample::select(&Encoding::ALL[..]),
        blocks(),
        prop::collection::vec(0..200_usize, 0..6),
        prop::option::weighted(0.3, (prop_oneof![0..40_usize, any::<usize>()], any::<u8>())),
        prop_oneof![8 => Just(0), 1 => 1..5_usize],
    )
        .prop_map(|(encoding, blocks, parts, spoil, missing)| Sent {
            encoding,
            blocks,
            parts,
            spoil,
            missing,
        })
}

impl Sent {
    /// The bytes; a set that does not fit into a message of its encoding is sent as ranges.
    fn bytes(&self, purpose: Purpose) -> Vec<u8> {
        let shape = Shape::of(self.blocks.iter().copied());
        let fits = shape.message_bytes(self.encoding).is_some_and(|bytes| bytes < 1 << 16);
        let encoding = if fits { self.encoding } else { Encoding::Ranges };
        let mut bytes = message(purpose, encoding, &self.blocks);
        bytes.truncate(bytes.len() - self.missing);
        if let Some((place, value)) = self.spoil {
            let place = place % bytes.len();
            bytes[place] = value;
        }
        bytes
    }

    fn chain(&self, guest: &mut Guest, bytes: &[u8]) -> Vec<Buffer> {
        let mut rest = bytes;
        let mut chain = Vec::new();
        for length in self.parts.iter().copied().chain([usize::MAX]) {
            let (part, after) = rest.split_at(length.min(rest.len()));
            rest = after;
            chain.push(guest.buffer(part));
        }
        chain
    }
}

fn guest(negotiated: Features) -> Guest {
    let setup =
        Setup { offered: ALL, negotiated, region_bytes: REGION_PAGES * 4096, ..Setup::default() };
    let guest = Guest::new(setup);
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

/// Extension features that make messages, and whether the driver tells the host.
fn features() -> impl Strategy<Value = Features> {
    prop::sample::select(vec![0b01_u64, 0b10, 0b11, 0b11]).prop_flat_map(|encodings| {
        any::<bool>().prop_map(move |must_tell_host| {
            let features =
                Features(Features::ALL_BALLOON.0 | encodings << 50).with(Feature::HostRequest);
            if must_tell_host { features } else { features.without(Feature::MustTellHost) }
        })
    })
}

/// Blocks in the order in which a driver gets them that allocates the largest free order and falls
/// back to smaller ones.
fn allocate(free: &BTreeSet<u64>) -> Vec<PageRange> {
    let mut left = free.clone();
    let mut blocks = Vec::new();
    for order in (0..=10_u32).rev() {
        for start in (0..2 * REGION_PAGES).step_by(1 << order) {
            let block = start..start + (1 << order);
            if block.clone().all(|page| left.contains(&page)) {
                blocks.push(PageRange::new(Pfn(start), 1 << order));
                block.for_each(|page| {
                    left.remove(&page);
                });
            }
        }
    }
    blocks
}

/// The messages of a driver with one page for them: blocks are gathered as long as the shortest
/// encoding fits.
fn messages(purpose: Purpose, blocks: &[PageRange], negotiated: Features) -> Vec<Vec<u8>> {
    const PAGE_BYTES: usize = 4096;
    let fitting = |blocks: &[PageRange]| {
        let shape = Shape::of(blocks.iter().copied());
        let encoding = shape.shortest(negotiated)?;
        shape.message_bytes(encoding).filter(|bytes| *bytes <= PAGE_BYTES).map(|_| encoding)
    };
    let mut sent = Vec::new();
    let mut rest = blocks;
    while !rest.is_empty() {
        let count = (1..=rest.len()).take_while(|count| fitting(&rest[..*count]).is_some()).last();
        let (now, later) = rest.split_at(count.unwrap());
        sent.push(message(purpose, fitting(now).unwrap(), now));
        rest = later;
    }
    sent
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    /// A driver on a fragmented guest: all free pages are inflated in messages of one page each, in
    /// no more bytes than numbers would take; whole huge pages are discarded as such; and all pages
    /// are deflated again.
    #[test]
    fn a_driver_with_one_page_for_messages_inflates_what_is_free(
        used in prop::collection::btree_set(FIRST..2 * REGION_PAGES, 0..200),
        negotiated in features(),
    ) {
        let setup = Setup {
            offered: ALL,
            negotiated,
            region_bytes: 2 * REGION_PAGES * 4096,
            ..Setup::default()
        };
        let mut guest = Guest::new(setup);
        guest.mark(guest.low_pages());
        let free: BTreeSet<u64> =
            (FIRST..2 * REGION_PAGES).filter(|page| !used.contains(page)).collect();
        let blocks = allocate(&free);
        for bytes in messages(Purpose::Inflate, &blocks, negotiated) {
            let _ = guest.send_bytes(QueueKind::Inflate, &bytes);
        }
        guest.balloon.flush();
        let counters = guest.balloon.counters();
        prop_assert_eq!(counters.errors.total(), 0);
        let unmarked: BTreeSet<u64> = guest.unmarked(guest.low_pages()).into_iter().collect();
        prop_assert_eq!(unmarked, free.clone());
        let buffers = counters.inflate.buffers;
        let limit_bytes = free.len() as u64 * 4 + buffers * HEADER_BYTES as u64;
        prop_assert!(counters.inflate.message_bytes <= limit_bytes);
        prop_assert!(counters.discard.ranges <= blocks.len() as u64);

        for bytes in messages(Purpose::Deflate, &blocks, negotiated) {
            let _ = guest.send_bytes(QueueKind::Deflate, &bytes);
        }
        guest.mark(guest.low_pages());
        guest.balloon.flush();
        prop_assert!(guest.unmarked(guest.low_pages()).is_empty());
        prop_assert_eq!(guest.balloon.counters().deflate.bytes, counters.inflate.bytes);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    /// Any sequence of messages to both queues, with the guest using each page as soon as it has it
    /// back: exactly the pages that the model reads are inflated and deflated.
    #[test]
    fn messages_do_what_the_model_reads(
        negotiated in features(),
        steps in prop::collection::vec((0..5_u8, sent()), 1..12),
    ) {
        let mut guest = guest(negotiated);
        let mut balloon: BTreeSet<u64> = BTreeSet::new();
        for (action, sent) in steps {
            let (kind, purpose, command) = match action {
                0..3 => (QueueKind::Inflate, Purpose::Inflate, 1),
                3 => (QueueKind::Deflate, Purpose::Deflate, 2),
                _ => {
                    guest.balloon.flush();
                    continue;
                }
            };
            let bytes = sent.bytes(purpose);
            let pages = model(&bytes, command, negotiated);
            if pages.iter().flatten().any(|page| *page < FIRST) {
                // A changed byte named the rings.
                continue;
            }
            let before = guest.balloon.counters();
            let chain = sent.chain(&mut guest, &bytes);
            let _ = guest.send(kind, &chain);
            prop_assert_eq!(guest.used(kind).len(), 1);
            let counters = guest.balloon.counters();
            let accepted = pages.is_some();
            let moved = pages.as_ref().map_or(0, |pages| pages.len() as u64 * 4096);
            let total = |counters: &ebb_balloon::Counters| {
                counters.inflate.bytes + counters.deflate.bytes
            };
            prop_assert_eq!(total(&counters) - total(&before), moved, "{:?}", bytes);
            let encoded = |counters: &ebb_balloon::Counters| {
                counters.encodings.pfns + counters.encodings.bitmaps + counters.encodings.ranges
            };
            prop_assert_eq!(encoded(&counters) - encoded(&before), u64::from(accepted));
            let errors = counters.errors.total() - before.errors.total();
            prop_assert!(accepted || errors == 1);
            let pages = pages.unwrap_or_default();
            if kind == QueueKind::Inflate {
                balloon.extend(pages);
            } else {
                for page in pages {
                    balloon.remove(&page);
                    guest.mark(PageRange::new(Pfn(page), 1));
                }
            }
            prop_assert!(unmarked(&guest).is_subset(&balloon));
        }
        guest.balloon.flush();
        prop_assert_eq!(unmarked(&guest), balloon);
    }

    /// Any answer: the requester receives the pages that the model reads, and nothing is discarded.
    #[test]
    fn answers_pass_on_what_the_model_reads(
        negotiated in features().prop_map(|features| features.without(Feature::PagePoison)),
        messages in prop::collection::vec((sent(), 0..4_u64), 1..8),
    ) {
        let mut guest = guest(negotiated);
        guest.leave_request_buffer();
        let log = Log::default();
        let sink = Box::new(log.clone());
        prop_assert_eq!(guest.balloon.request_free_pages(Order::PAGE, sink), Ok(true));
        guest.used(QueueKind::HostRequest);
        let mut named = BTreeSet::new();
        for (sent, id) in &messages {
            let purpose =
                Purpose::FreePages { request_id: (*id).max(1), status: AnswerStatus::More };
            let bytes = sent.bytes(purpose);
            let pages = model(&bytes, 3, negotiated);
            let is_mine = bytes.get(8..16) == Some(&1_u64.to_le_bytes()[..]);
            let still_open = log.ends().is_empty();
            if is_mine && still_open {
                named.extend(pages.into_iter().flatten());
            }
            let chain = sent.chain(&mut guest, &bytes);
            let _ = guest.send(QueueKind::HostRequest, &chain);
        }
        prop_assert_eq!(guest.used(QueueKind::HostRequest).len(), messages.len());
        prop_assert_eq!(log.hinted(), named);
        guest.balloon.flush();
        prop_assert!(unmarked(&guest).is_empty());
        prop_assert_eq!(guest.balloon.counters().discard.bytes, 0);
    }
}
