use std::collections::BTreeSet;
use std::vec;
use std::vec::Vec;

use proptest::prelude::*;

use super::*;
use crate::balloon::{Feature, Features};
use crate::{HUGE_PAGE_SIZE_PAGES, PageRange, Pfn};

fn range(start: u64, pages: u64) -> PageRange {
    PageRange::new(Pfn(start), pages)
}

#[test]
fn fields_are_at_the_offsets_of_the_specification() {
    let answer =
        Purpose::FreePages { request_id: 0x0807_0605_0403_0201, status: AnswerStatus::Done };
    let layout = Layout::Bitmap { start: Pfn(0x1_0000_0200), page_shift: 21, bits: 0x0102 };
    let bytes = Header::new(answer, layout).unwrap().to_bytes();
    assert_eq!(
        bytes,
        [
            3, 0, 21, 0, 2, 0, 2, 0, 1, 2, 3, 4, 5, 6, 7, 8, //
            0, 2, 0, 0, 1, 0, 0, 0, 2, 1, 0, 0, 0, 0, 0, 0,
        ]
    );
    let request = HostRequest::FreePages { request_id: 0x0807_0605_0403_0201, page_shift: 21 };
    assert_eq!(request.to_bytes(), [3, 0, 21, 0, 0, 0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8]);
    assert_eq!(
        HostRequest::Cancel { request_id: 9 }.to_bytes(),
        [4, 0, 0, 0, 0, 0, 0, 0, 9, 0, 0, 0, 0, 0, 0, 0]
    );
    assert_eq!(
        encode_range(range(0x0201, 0x0403)),
        [1, 2, 0, 0, 0, 0, 0, 0, 3, 4, 0, 0, 0, 0, 0, 0]
    );
}

/// The two messages that the specification shows (section "Names for C").
#[test]
fn the_examples_of_the_specification_are_encoded_alike() {
    let text = include_str!("../../../../../docs/extension.md");
    let hex: Vec<Vec<u8>> = text
        .lines()
        .map(str::trim)
        .filter(|line| line.len() >= 2 && line.split_whitespace().all(|byte| byte.len() == 2))
        .filter_map(|line| {
            line.split_whitespace().map(|byte| u8::from_str_radix(byte, 16).ok()).collect()
        })
        .collect();
    let layout = Layout::Ranges { count: 1 };
    assert_eq!(hex[0], Header::new(Purpose::Inflate, layout).unwrap().to_bytes());
    assert_eq!(hex[1], encode_range(range((4 << 30 | 2 << 20) >> 12, 512)));
    let purpose = Purpose::FreePages { request_id: 7, status: AnswerStatus::Done };
    let layout = Layout::Bitmap { start: Pfn::containing(4 << 30), page_shift: 21, bits: 4 };
    assert_eq!(hex[2], Header::new(purpose, layout).unwrap().to_bytes());
    let runs: Vec<_> =
        Bitmap::new(&hex[3], 4).unwrap().runs(0..4).map(|run| (run.first, run.bits)).collect();
    assert_eq!(runs, [(0, 1), (3, 1)]);
    assert_eq!(hex.len(), 4);
}

/// Decodes a valid header with one field changed.
fn broken(offset: usize, value: u64, width: usize) -> Result<Header, HeaderError> {
    let layout = Layout::Bitmap { start: Pfn(512), page_shift: 21, bits: 64 };
    let mut bytes = Header::new(Purpose::Inflate, layout).unwrap().to_bytes();
    bytes[offset..offset + width].copy_from_slice(&value.to_le_bytes()[..width]);
    Header::from_bytes(bytes)
}

#[test]
fn each_field_is_checked() {
    assert!(broken(0, 2, 2).is_ok());
    for command in [0, 4, 5, 0xffff] {
        assert_eq!(broken(0, command, 2), Err(HeaderError::Command(command as u16)));
    }
    // An answer has a status and a request.
    assert_eq!(broken(0, 3, 2), Err(HeaderError::Status(0)));
    for shift in [0, 11, 31, 64, 0xffff] {
        assert_eq!(broken(2, shift, 2), Err(HeaderError::PageShift(shift as u16)));
    }
    // 2 MiB is not a block boundary of 4 MiB blocks.
    assert_eq!(broken(2, 22, 2), Err(HeaderError::StartPfn(512)));
    assert_eq!(broken(4, 1, 2), Err(HeaderError::Status(1)));
    for encoding in [0, 4, 0xffff] {
        assert_eq!(broken(6, encoding, 2), Err(HeaderError::Encoding(encoding as u16)));
    }
    // Page frame numbers and ranges have neither a block size nor a start.
    assert_eq!(broken(6, 1, 2), Err(HeaderError::PageShift(21)));
    assert_eq!(broken(8, 7, 8), Err(HeaderError::RequestId(7)));
    assert_eq!(broken(16, 513, 8), Err(HeaderError::StartPfn(513)));
    assert!(broken(16, PFN_LIMIT - 64 * 512, 8).is_ok());
    let start = PFN_LIMIT - 63 * 512;
    assert_eq!(broken(16, start, 8), Err(HeaderError::StartPfn(start)));
    assert_eq!(
        broken(16, 0_u64.wrapping_sub(512), 8),
        Err(HeaderError::StartPfn(0_u64.wrapping_sub(512)))
    );
    assert!(broken(24, MAX_BITMAP_BITS.into(), 8).is_ok());
    for count in [0, u64::from(MAX_BITMAP_BITS) + 1, u64::from(u32::MAX) + 1, u64::MAX] {
        assert_eq!(broken(24, count, 8), Err(HeaderError::Count(count)));
    }
}

#[test]
fn only_answers_may_be_empty() {
    let done = Purpose::FreePages { request_id: 1, status: AnswerStatus::Done };
    for layout in [Layout::Pfns { count: 0 }, Layout::Ranges { count: 0 }] {
        assert!(Header::new(done, layout).is_ok());
        assert_eq!(Header::new(Purpose::Deflate, layout), Err(HeaderError::Count(0)));
    }
    let no_request = Purpose::FreePages { request_id: 0, status: AnswerStatus::Done };
    assert_eq!(Header::new(no_request, Layout::Pfns { count: 1 }), Err(HeaderError::RequestId(0)));
    assert!(Header::new(done, Layout::Ranges { count: MAX_RANGES + 1 }).is_err());
    assert!(Header::new(done, Layout::Pfns { count: MAX_PFNS + 1 }).is_err());
}

#[test]
fn each_field_of_a_request_is_checked() {
    let bytes = |command: u8, shift: u8, reserved: u8, id: u8| {
        [command, 0, shift, 0, 0, 0, 0, reserved, id, 0, 0, 0, 0, 0, 0, 0]
    };
    assert_eq!(HostRequest::from_bytes(bytes(1, 12, 0, 1)), Err(RequestError::Command(1)));
    assert_eq!(HostRequest::from_bytes(bytes(3, 12, 0, 0)), Err(RequestError::RequestId));
    assert_eq!(HostRequest::from_bytes(bytes(3, 11, 0, 1)), Err(RequestError::PageShift(11)));
    assert_eq!(HostRequest::from_bytes(bytes(5, 31, 0, 1)), Err(RequestError::PageShift(31)));
    assert_eq!(HostRequest::from_bytes(bytes(6, 12, 0, 1)), Err(RequestError::Command(6)));
    assert_eq!(HostRequest::from_bytes(bytes(4, 12, 0, 1)), Err(RequestError::PageShift(12)));
    assert_eq!(HostRequest::from_bytes(bytes(4, 0, 1, 1)), Err(RequestError::Reserved(1 << 24)));
    for request in [
        HostRequest::FreePages { request_id: 5, page_shift: 30 },
        HostRequest::Report { request_id: 5, page_shift: 12 },
        HostRequest::Cancel { request_id: 5 },
    ] {
        assert_eq!(HostRequest::from_bytes(request.to_bytes()), Ok(request));
    }
}

#[test]
fn ranges_outside_the_address_space_are_refused() {
    let mut bytes = Vec::new();
    for (start, pages) in
        [(5, 1), (5, 0), (PFN_LIMIT - 1, 1), (PFN_LIMIT, 1), (u64::MAX, 2), (2, u64::MAX)]
    {
        bytes.extend(encode_range(range(start, pages)));
    }
    bytes.extend([1; 15]);
    let results: Vec<bool> = Ranges::new(&bytes).map(|range| range.is_ok()).collect();
    assert_eq!(results, [true, false, true, false, false, false]);
}

#[test]
fn the_shortest_encoding_follows_the_blocks() {
    let both = Features::EXTENSION;
    let shortest =
        |blocks: &[PageRange], features| Shape::of(blocks.iter().copied()).shortest(features);
    // 7 GiB in separate blocks of 4 MiB: 448 bytes of bitmap beat 28 KiB of ranges.
    let blocks: Vec<_> = (0..1792).map(|index| range(index * 2048, 1024)).collect();
    assert_eq!(shortest(&blocks, both), Some(Encoding::Bitmap));
    assert_eq!(Shape::of(blocks.iter().copied()).page_shift(), 22);
    assert_eq!(shortest(&blocks, Feature::PageRanges.into()), Some(Encoding::Ranges));
    // As page frame numbers they do not fit into one message.
    assert_eq!(shortest(&blocks, Features::NONE), None);
    // The same amount as one range.
    assert_eq!(shortest(&[range(1024, 1792 * 1024)], both), Some(Encoding::Ranges));
    // One page, as when the guest's compaction moves a page of the balloon.
    assert_eq!(shortest(&[range(7, 1)], Feature::PageRanges.into()), Some(Encoding::Pfns));
    // A few pages far apart.
    let scattered: Vec<_> = (0..100).map(|index| range(index * 99_991, 1)).collect();
    assert_eq!(shortest(&scattered, both), Some(Encoding::Pfns));
    // 32-bit page frame numbers end at 16 TiB.
    assert_eq!(shortest(&[range(1 << 32, 1)], Features::NONE), None);
    assert_eq!(shortest(&[], both), None);
}

fn pages(ranges: &[PageRange]) -> BTreeSet<u64> {
    ranges.iter().flat_map(|range| range.start.0..range.end().0).collect()
}

/// Disjoint, naturally aligned blocks of several orders in a window.
fn blocks() -> impl Strategy<Value = Vec<PageRange>> {
    prop::collection::vec((0..6_u8, 0..256_u64), 1..40).prop_map(|blocks| {
        let mut taken = BTreeSet::new();
        blocks
            .into_iter()
            .map(|(order, number)| range(HUGE_PAGE_SIZE_PAGES + (number << order), 1 << order))
            .filter(|block| {
                let fresh = pages(&[*block]).is_disjoint(&taken);
                taken.extend(block.start.0..block.end().0);
                fresh
            })
            .collect()
    })
}

proptest! {
    #[test]
    fn decoded_headers_encode_to_the_same_bytes(bytes in any::<[u8; HEADER_BYTES]>()) {
        if let Ok(header) = Header::from_bytes(bytes) {
            prop_assert_eq!(header.to_bytes(), bytes);
        }
    }

    /// Nearly valid bytes: each accepted header encodes to the same bytes and respects the limits.
    #[test]
    fn accepted_headers_are_bounded(
        command in 0..5_u16,
        page_shift in prop_oneof![Just(12_u16), 10..33_u16],
        status in 0..5_u16,
        encoding in 0..5_u16,
        request_id in prop_oneof![Just(0), any::<u64>()],
        start in prop_oneof![Just(0), (0..64_u64).prop_map(|bit| 1 << bit), any::<u64>()],
        count in prop_oneof![
            0..100_u64,
            0x0_ffff..0x1_0002_u64,
            0x7f_ffff..0x80_0002_u64,
            any::<u64>(),
        ],
    ) {
        let mut bytes = [0; HEADER_BYTES];
        for (index, field) in [command, page_shift, status, encoding].into_iter().enumerate() {
            bytes[index * 2..][..2].copy_from_slice(&field.to_le_bytes());
        }
        for (index, field) in [request_id, start, count].into_iter().enumerate() {
            bytes[8 + index * 8..][..8].copy_from_slice(&field.to_le_bytes());
        }
        let Ok(header) = Header::from_bytes(bytes) else { return Ok(()) };
        prop_assert_eq!(header.to_bytes(), bytes);
        prop_assert_eq!(Header::new(header.purpose(), header.layout()), Ok(header));
        let layout = header.layout();
        prop_assert!(HEADER_BYTES + layout.payload_bytes() <= MAX_MESSAGE_BYTES);
        if let Layout::Bitmap { bits: 1.., .. } = layout {
            prop_assert!(layout.pages_of_bits(layout.count() - 1, 1).end().0 <= PFN_LIMIT);
        }
    }

    #[test]
    fn decoded_requests_encode_to_the_same_bytes(
        bytes in any::<[u8; REQUEST_BYTES]>(),
        command in 0..6_u8,
        shift in 0..32_u8,
    ) {
        let mut likely = bytes;
        likely[..8].copy_from_slice(&[command, 0, shift, 0, 0, 0, 0, 0]);
        for bytes in [bytes, likely] {
            if let Ok(request) = HostRequest::from_bytes(bytes) {
                prop_assert_eq!(request.to_bytes(), bytes);
            }
        }
    }

    /// The model is a plain list of bit numbers; windows of any size yield the same bits.
    #[test]
    fn runs_contain_exactly_the_set_bits(
        bytes in prop::collection::vec(prop_oneof![Just(0_u8), Just(0xff_u8), any::<u8>()], 0..70),
        excess in 0..8_u32,
        window in 1..200_u32,
    ) {
        let bits = (bytes.len() as u32 * 8).saturating_sub(excess);
        let bitmap = Bitmap::new(&bytes, bits).expect("enough bytes");
        let expected: Vec<u32> =
            (0..bits).filter(|bit| bytes[*bit as usize / 8] >> (bit % 8) & 1 != 0).collect();
        let runs: Vec<BitRun> = bitmap.runs(0..bits).collect();
        prop_assert!(runs.windows(2).all(|pair| pair[0].first + pair[0].bits < pair[1].first));
        let listed = |runs: &[BitRun]| -> Vec<u32> {
            runs.iter().flat_map(|run| run.first..run.first + run.bits).collect()
        };
        prop_assert_eq!(listed(&runs), expected.clone());
        let parts: Vec<BitRun> = (0..=bits)
            .step_by(window as usize)
            .flat_map(|start| bitmap.runs(start..start + window))
            .collect();
        prop_assert_eq!(listed(&parts), expected);
        prop_assert!(Bitmap::new(&bytes, bytes.len() as u32 * 8 + 1).is_none());
        prop_assert_eq!(bitmap.runs(bits..u32::MAX).next(), None);
    }

    #[test]
    fn any_bytes_decode_to_entries(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        prop_assert_eq!(Pfns::new(&bytes).count(), bytes.len() / 4);
        prop_assert_eq!(Ranges::new(&bytes).count(), bytes.len() / 16);
        for range in Ranges::new(&bytes).flatten() {
            prop_assert!(!range.is_empty() && range.end().0 <= PFN_LIMIT);
        }
    }

    /// A set of blocks survives every encoding, in the number of bytes that its shape predicts.
    #[test]
    fn blocks_survive_every_encoding(blocks in blocks()) {
        let shape = Shape::of(blocks.iter().copied());
        let expected = pages(&blocks);
        prop_assert_eq!(shape.pages as usize, expected.len());

        let bits = u32::try_from(shape.bits()).expect("a small window");
        let mut bytes = vec![0xaa; bits.div_ceil(8) as usize];
        let start = Pfn(shape.first_page());
        let mut writer =
            BitmapWriter::new(&mut bytes, start, shape.page_shift(), bits).expect("a window");
        for block in &blocks {
            prop_assert_eq!(writer.set(*block), *block);
        }
        let layout = Layout::Bitmap { start, page_shift: shape.page_shift(), bits };
        prop_assert!(Header::new(Purpose::Inflate, layout).is_ok());
        prop_assert_eq!(layout.payload_bytes(), bytes.len());
        prop_assert_eq!(shape.message_bytes(Encoding::Bitmap), Some(HEADER_BYTES + bytes.len()));
        let runs = Bitmap::new(&bytes, bits).expect("enough bytes").runs(0..bits);
        let read: Vec<_> = runs.map(|run| layout.pages_of_bits(run.first, run.bits)).collect();
        prop_assert_eq!(pages(&read), expected.clone());

        let bytes: Vec<u8> = blocks.iter().flat_map(|block| encode_range(*block)).collect();
        prop_assert_eq!(shape.message_bytes(Encoding::Ranges), Some(HEADER_BYTES + bytes.len()));
        let read: Vec<_> = Ranges::new(&bytes).collect::<Result<_, _>>().expect("valid ranges");
        prop_assert_eq!(read, blocks);

        let bytes: Vec<u8> =
            expected.iter().flat_map(|page| (*page as u32).to_le_bytes()).collect();
        prop_assert_eq!(shape.message_bytes(Encoding::Pfns), Some(HEADER_BYTES + bytes.len()));
        prop_assert_eq!(Pfns::new(&bytes).map(|pfn| pfn.0).collect::<BTreeSet<_>>(), expected);

        let all = Encoding::ALL.map(|encoding| shape.message_bytes(encoding));
        let shortest = shape.shortest(Features::EXTENSION).expect("a small set");
        prop_assert_eq!(shape.message_bytes(shortest), all.into_iter().flatten().min());
    }

    /// A writer sets no bit outside of the range, and none of a partial block.
    #[test]
    fn a_writer_sets_whole_blocks_inside_its_window(
        order in 0..4_u32,
        start in 0..20_u64,
        bits in 0..90_u32,
        first in 0..400_u64,
        length in 0..400_u64,
    ) {
        let start = start << order;
        let mut bytes = [0xff; 12];
        let page_shift = crate::PAGE_SHIFT + order;
        let mut writer =
            BitmapWriter::new(&mut bytes, Pfn(start), page_shift, bits).expect("a window");
        let set = writer.set(range(first, length));
        let expected: BTreeSet<u64> = (0..u64::from(bits))
            .map(|bit| range(start + (bit << order), 1 << order))
            .filter(|block| block.start.0 >= first && block.end().0 <= first + length)
            .flat_map(|block| block.start.0..block.end().0)
            .collect();
        prop_assert_eq!(pages(&[set]), expected.clone());
        let layout = Layout::Bitmap { start: Pfn(start), page_shift, bits };
        let runs = Bitmap::new(&bytes, bits).expect("enough bytes").runs(0..bits);
        let read: Vec<_> = runs.map(|run| layout.pages_of_bits(run.first, run.bits)).collect();
        prop_assert_eq!(pages(&read), expected);
    }
}
