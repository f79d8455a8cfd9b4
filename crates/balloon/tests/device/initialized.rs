//! Pages that the device has initialized (docs/zeroed-pages.md): what it answers must be true.

use std::fs::File;
use std::sync::Arc;

use ebb_abi::balloon::extension::{AnswerStatus, Encoding, Purpose};
use ebb_abi::balloon::{Feature, Features, QueueKind};
use ebb_abi::{Order, PageRange, Pfn};
use ebb_balloon::testing::{Buffer, DRIVER_BYTES, Guest, HIGH_START, Setup, message};
use ebb_balloon::{Balloon, BalloonConfig, FreePageCollector, GuestError, ReportCheck};
use ebb_guest_ram::{Backing, GuestRam, HugePages, InhibitGuard, InhibitReason, RegionSpec};
use proptest::prelude::*;
use rustix::fs::{MemfdFlags, memfd_create};
use vm_memory::{Bytes, GuestAddress};

const PAGE: u64 = 4096;
const MIB: u64 = 1 << 20;
/// Size of each of the two regions of the guests used here.
const REGION_BYTES: u64 = 4 * MIB;
/// First page that tests use, in both regions.
const FIRST: u32 = (DRIVER_BYTES / PAGE) as u32;
const HIGH: u32 = (HIGH_START / PAGE) as u32;
const REGION_PAGES: u32 = (REGION_BYTES / PAGE) as u32;

const NO_POISON: Features = Features::KNOWN.without(Feature::PagePoison);
/// A driver that knows the proposal and no extension.
const PROPOSED: Features =
    Features(Features::ALL_BALLOON.0 | Features::PROPOSED.0).without(Feature::PagePoison);

fn guest(negotiated: Features) -> Guest {
    Guest::new(Setup {
        offered: Features::KNOWN,
        negotiated,
        region_bytes: REGION_BYTES,
        ..Setup::default()
    })
}

fn report(address: u64, size_bytes: u64) -> Buffer {
    Buffer { address, length: size_bytes as u32, writable: true }
}

/// Sends a chain; returns the used length.
fn answer(guest: &mut Guest, kind: QueueKind, chain: &[Buffer]) -> u32 {
    let _ = guest.send(kind, chain);
    let used = guest.used_with_lengths(kind);
    assert_eq!(used.len(), 1);
    used[0].1
}

/// Inflates by these pages with a place for the bitmap; returns its bytes that were written.
fn inflate(guest: &mut Guest, pfns: &[u32], place_bytes: usize) -> Vec<u8> {
    let array = guest.pfns(pfns.iter().copied());
    let place = Buffer { writable: true, ..guest.buffer(&vec![0x5a; place_bytes]) };
    let written = answer(guest, QueueKind::Inflate, &[array, place]) as usize;
    let mut bytes = vec![0; place_bytes];
    guest.ram.memory().read_slice(&mut bytes, GuestAddress(place.address)).unwrap();
    assert!(bytes[written..].iter().all(|byte| *byte == 0x5a), "{bytes:?}");
    bytes.truncate(written);
    bytes
}

fn is_zero(guest: &Guest, pfn: u64) -> bool {
    let mut page = [0; PAGE as usize];
    guest.ram.memory().read_slice(&mut page, GuestAddress(pfn * PAGE)).unwrap();
    page == [0; PAGE as usize]
}

fn initialized(guest: &Guest) -> u64 {
    guest.balloon.counters().initialized_bytes
}

#[test]
fn a_report_is_answered_with_its_length() {
    let mut guest = guest(PROPOSED);
    guest.mark(guest.high_pages());
    let chain = [report(HIGH_START + 2 * MIB, MIB), report(HIGH_START, MIB / 2)];
    assert_eq!(u64::from(answer(&mut guest, QueueKind::Reporting, &chain)), MIB + MIB / 2);
    assert_eq!(guest.unmarked(guest.high_pages()).len(), 256 + 128);
    assert_eq!(initialized(&guest), MIB + MIB / 2);
}

#[test]
fn a_driver_without_the_features_sees_the_standard_device() {
    for negotiated in [Features::ALL_BALLOON, Features::ALL_WITH_EXTENSION] {
        let mut guest = guest(negotiated);
        assert_eq!(answer(&mut guest, QueueKind::Reporting, &[report(HIGH_START, MIB)]), 0);
        assert_eq!(initialized(&guest), 0);
        assert_eq!(guest.balloon.counters().discard.bytes, MIB);
    }
    let mut guest = guest(Features::ALL_BALLOON);
    assert!(inflate(&mut guest, &[FIRST], 1).is_empty());
    assert_eq!(guest.balloon.counters().errors.get(GuestError::WrongDirection), 1);
}

#[test]
fn a_bit_is_set_for_each_inflated_page() {
    for must_tell_host in [PROPOSED, PROPOSED.without(Feature::MustTellHost)] {
        let mut guest = guest(must_tell_host);
        guest.mark(guest.low_pages());
        let pfns: Vec<u32> = (FIRST..FIRST + 11).rev().collect();
        assert_eq!(inflate(&mut guest, &pfns, 9), [0xff, 0b111]);
        // Nothing waits: the answer says what has been done.
        assert_eq!(guest.balloon.info().pending_bytes, 0);
        assert_eq!(guest.unmarked(guest.low_pages()).len(), 11);
        assert_eq!(initialized(&guest), 11 * PAGE);
        assert_eq!(guest.balloon.counters().errors.total(), 0);
    }
}

#[test]
fn a_bitmap_goes_into_several_descriptors_as_far_as_they_reach() {
    let mut guest = guest(PROPOSED);
    let array = guest.pfns(FIRST..FIRST + 40);
    let (first, second) = (guest.buffer(&[0; 3]), guest.buffer(&[0; 1]));
    let place = [first, second].map(|buffer| Buffer { writable: true, ..buffer });
    assert_eq!(answer(&mut guest, QueueKind::Inflate, &[array, place[0], place[1]]), 4);
    let bytes = [(first, 0), (first, 2), (second, 0)].map(|(buffer, offset)| {
        guest.ram.memory().read_obj::<u8>(GuestAddress(buffer.address + offset)).unwrap()
    });
    assert_eq!((bytes, initialized(&guest)), ([0xff; 3], 32 * PAGE));
    // Without a place there is no answer, and the pages are discarded all the same.
    let array = guest.pfns(FIRST + 40..FIRST + 80);
    assert_eq!(answer(&mut guest, QueueKind::Inflate, &[array]), 0);
    assert_eq!(guest.balloon.counters().discard.bytes, 80 * PAGE);
}

#[test]
fn messages_of_the_extension_have_no_bitmap() {
    let mut guest = guest(NO_POISON);
    let pages = [PageRange::new(Pfn::from(FIRST), 8)];
    let buffer = guest.buffer(&message(Purpose::Inflate, Encoding::Pfns, &pages));
    assert_eq!(answer(&mut guest, QueueKind::Inflate, &[buffer]), 0);
    guest.balloon.flush();
    assert_eq!((guest.balloon.counters().discard.bytes, initialized(&guest)), (8 * PAGE, 0));
}

#[test]
fn a_mistake_leaves_the_whole_buffer_uninitialized() {
    let good = report(HIGH_START, MIB);
    let bad = [
        report(HIGH_START + MIB + 512, MIB),
        report(HIGH_START + 3 * MIB, 2 * MIB),
        report(1 << 40, MIB),
        Buffer { writable: false, ..report(HIGH_START + MIB, MIB) },
    ];
    for bad in bad {
        for chain in [[good, bad], [bad, good]] {
            let mut guest = guest(PROPOSED);
            assert_eq!(answer(&mut guest, QueueKind::Reporting, &chain), 0, "{bad:?}");
            assert!(guest.balloon.counters().discard.bytes >= MIB);
            assert_eq!(answer(&mut guest, QueueKind::Reporting, &[good]), MIB as u32);
        }
    }
    for bad in [FIRST, 0x50_0000] {
        let mut guest = guest(PROPOSED);
        assert_eq!(inflate(&mut guest, &[FIRST, bad], 1), [0], "{bad:#x}");
        assert_eq!(inflate(&mut guest, &[FIRST + 1], 1), [1]);
    }
}

#[test]
fn a_bitmap_in_an_inflated_page_sets_no_bit() {
    let mut guest = guest(PROPOSED);
    let array = guest.pfns(FIRST..FIRST + 8);
    let place = report(u64::from(FIRST) * PAGE + 4095, 2);
    assert_eq!(answer(&mut guest, QueueKind::Inflate, &[array, place]), 1);
    assert!((FIRST..FIRST + 8).all(|pfn| is_zero(&guest, pfn.into())));
    assert_eq!(initialized(&guest), 0);
}

#[test]
fn an_answer_of_free_pages_is_not_used_where_the_guest_takes_them_for_zero() {
    // A migration that skips pages named in an answer could leave old content at the destination.
    for feature in [Feature::DeviceInitReported, Feature::DeviceInitOnInflate] {
        let negotiated = Features::ALL_WITH_EXTENSION.without(Feature::PagePoison).with(feature);
        let mut guest = guest(negotiated);
        let place = Buffer { writable: true, ..guest.buffer(&[0; 16]) };
        let _ = guest.send(QueueKind::HostRequest, &[place]);
        let collector = FreePageCollector::new(&guest.ram);
        let asked = guest.balloon.request_free_pages(Order::PAGE, Box::new(collector.clone()));
        assert!(asked.unwrap());
        let purpose = Purpose::FreePages { request_id: 1, status: AnswerStatus::Done };
        let pages = [PageRange::new(Pfn::from(FIRST), 8)];
        let buffer = guest.buffer(&message(purpose, Encoding::Ranges, &pages));
        let _ = guest.send(QueueKind::HostRequest, &[buffer]);
        assert_eq!(collector.summary().bytes, 0);
        assert_eq!(collector.answer().poisoned_bytes, 8 * PAGE);
    }
}

#[test]
fn part_of_a_page_of_hugetlb_is_not_initialized() {
    let setup = Setup {
        offered: Features::KNOWN,
        negotiated: PROPOSED,
        backing: Backing::Hugetlb2M,
        region_bytes: REGION_BYTES,
        ..Setup::default()
    };
    let regions = regions();
    let populate = ebb_guest_ram::Populate::Lazy;
    if let Err(error) = GuestRam::new(&regions, setup.backing, HugePages::Off, populate) {
        // The machine has no pool of huge pages.
        assert!(error.to_string().contains("nr_hugepages"), "{error}");
        return;
    }
    let mut guest = Guest::new(setup);
    guest.mark(guest.high_pages());
    let chain = [report(HIGH_START, 2 * MIB), report(HIGH_START + 2 * MIB, MIB)];
    assert_eq!(answer(&mut guest, QueueKind::Reporting, &chain), 0);
    assert_eq!(answer(&mut guest, QueueKind::Reporting, &chain[..1]), 2 * MIB as u32);
    assert_eq!(guest.unmarked(guest.high_pages()).len(), 512);
    // The balloon's pages are discarded with the last one of their huge page.
    let pfns: Vec<u32> = (HIGH + 512..HIGH + 1024).collect();
    assert_eq!(inflate(&mut guest, &pfns[..504], 63), [0; 63]);
    assert_eq!(inflate(&mut guest, &pfns[504..], 1), [0xff]);
    assert_eq!(guest.unmarked(guest.high_pages()).len(), 1024);
}

fn regions() -> [RegionSpec; 2] {
    [0, HIGH_START].map(|start| RegionSpec {
        start: GuestAddress(start),
        size_bytes: REGION_BYTES,
        host_node: None,
    })
}

/// What a guest's memory is.
#[derive(Clone, Copy, Debug)]
enum Memory {
    Backed(Backing),
    /// Mapped privately from a file in which no page is zero.
    Restored,
}

fn guest_in(memory: Memory, negotiated: Features) -> Guest {
    let backing = match memory {
        Memory::Backed(backing) => backing,
        Memory::Restored => Backing::Anonymous,
    };
    let setup = Setup {
        offered: Features::KNOWN,
        negotiated,
        backing,
        region_bytes: REGION_BYTES,
        ..Setup::default()
    };
    let mut guest = Guest::new(setup);
    if matches!(memory, Memory::Restored) {
        guest.mark(guest.low_pages());
        guest.mark(guest.high_pages());
        let file = File::from(memfd_create("ebb-initialized", MemfdFlags::CLOEXEC).unwrap());
        let image = guest.ram.save(&file, 0, &mut |_| {}).unwrap();
        let ram = GuestRam::restore(&regions(), HugePages::Off, file, 0, &image).unwrap();
        guest.ram = Arc::new(ram);
        let config = BalloonConfig { features: Features::KNOWN, ..BalloonConfig::default() };
        guest.balloon = Balloon::new(config, Arc::clone(&guest.ram)).unwrap();
        guest.activate();
    }
    guest
}

/// A step of a driver or of the device's owner.
#[derive(Clone, Debug)]
enum Step {
    /// Page and number of pages of each range; bytes by which start and length are off; whether the
    /// range is writable.
    Report(Vec<(u32, u32, u16, u16, bool)>),
    Inflate(Vec<u32>, usize),
    Deflate(Vec<u32>),
    Inhibit(bool),
    Poison(u32),
    Check(bool),
}

fn page() -> impl Strategy<Value = u32> {
    prop_oneof![
        8 => FIRST..REGION_PAGES,
        8 => HIGH..HIGH + REGION_PAGES,
        1 => REGION_PAGES - 20..REGION_PAGES + 20,
    ]
}

fn step() -> impl Strategy<Value = Step> {
    let off = || prop_oneof![30 => Just(0_u16), 1 => 1..5000_u16];
    let range = (page(), 1..40_u32, off(), off(), prop::bool::weighted(0.97));
    prop_oneof![
        6 => prop::collection::vec(range, 1..6).prop_map(Step::Report),
        6 => (prop::collection::vec(page(), 1..40), 0..7_usize)
            .prop_map(|(pfns, place)| Step::Inflate(pfns, place)),
        2 => prop::collection::vec(page(), 1..40).prop_map(Step::Deflate),
        1 => any::<bool>().prop_map(Step::Inhibit),
        1 => prop_oneof![Just(0), any::<u32>()].prop_map(Step::Poison),
        1 => any::<bool>().prop_map(Step::Check),
    ]
}

fn is_memory(pfn: u64) -> bool {
    pfn < u64::from(REGION_PAGES)
        || (u64::from(HIGH)..u64::from(HIGH + REGION_PAGES)).contains(&pfn)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    /// Whatever driver and owner do: what is answered as initialized reads as zeros, and what could
    /// be initialized is.
    #[test]
    fn only_zeros_are_answered_as_initialized(
        memory in prop_oneof![
            Just(Memory::Backed(Backing::Anonymous)),
            Just(Memory::Backed(Backing::Memfd)),
            Just(Memory::Restored),
        ],
        bits in any::<u64>(),
        steps in prop::collection::vec(step(), 1..20),
    ) {
        let proposed = Features::PROPOSED.0 | Features::ALL_BALLOON.0;
        let negotiated = Features(bits & proposed).with(Feature::PageReporting);
        let mut guest = guest_in(memory, negotiated);
        let mut inhibited: Option<InhibitGuard> = None;
        let mut poison = 0;
        for step in steps {
            guest.mark(guest.low_pages());
            guest.mark(guest.high_pages());
            let can = inhibited.is_none()
                && (poison == 0 || !negotiated.contains(Feature::PagePoison));
            match step {
                Step::Report(ranges) => {
                    let mut sound = negotiated.contains(Feature::DeviceInitReported) && can;
                    let chain: Vec<Buffer> = ranges
                        .iter()
                        .map(|(page, pages, start, length, writable)| Buffer {
                            address: u64::from(*page) * PAGE + u64::from(*start),
                            length: pages * PAGE as u32 + u32::from(*length),
                            writable: *writable,
                        })
                        .collect();
                    let mut named = Vec::new();
                    for buffer in &chain {
                        let end = buffer.address + u64::from(buffer.length);
                        let pages = buffer.address / PAGE..end.div_ceil(PAGE);
                        sound &= buffer.writable
                            && buffer.address % PAGE == 0
                            && end % PAGE == 0
                            && pages.clone().all(is_memory);
                        named.extend(pages);
                    }
                    let total: u32 = chain.iter().map(|buffer| buffer.length).sum();
                    let length = answer(&mut guest, QueueKind::Reporting, &chain);
                    prop_assert_eq!(length, if sound { total } else { 0 });
                    prop_assert!(length == 0 || named.iter().all(|pfn| is_zero(&guest, *pfn)));
                }
                Step::Inflate(pfns, place_bytes) => {
                    let has_bitmap = negotiated.contains(Feature::DeviceInitOnInflate);
                    let mut distinct = pfns.clone();
                    distinct.sort_unstable();
                    distinct.dedup();
                    let sound = can
                        && place_bytes > 0
                        && distinct.len() == pfns.len()
                        && pfns.iter().all(|pfn| is_memory(u64::from(*pfn)));
                    let bits = inflate(&mut guest, &pfns, place_bytes);
                    let room = if has_bitmap { place_bytes } else { 0 };
                    prop_assert_eq!(bits.len(), pfns.len().div_ceil(8).min(room));
                    for (bit, byte) in bits.iter().enumerate().flat_map(|(index, byte)| {
                        (0..8).map(move |bit| (index * 8 + bit, byte >> bit & 1))
                    }) {
                        let known = pfns.get(bit).is_some();
                        prop_assert_eq!(byte == 1, sound && known);
                        prop_assert!(byte == 0 || is_zero(&guest, u64::from(pfns[bit])));
                    }
                    // Pages that wait for their discard belong to the balloon.
                    guest.balloon.flush();
                }
                Step::Deflate(pfns) => {
                    let _ = guest.deflate(pfns);
                    let _ = guest.used(QueueKind::Deflate);
                }
                Step::Inhibit(on) => {
                    inhibited =
                        on.then(|| guest.ram.inhibit_discard(InhibitReason::BackgroundSnapshot));
                }
                Step::Poison(value) => {
                    poison = value;
                    guest.balloon.write_config(12, &value.to_le_bytes());
                }
                Step::Check(on) => guest.balloon.set_report_check(
                    if on { ReportCheck::Overwrite } else { ReportCheck::None },
                ),
            }
        }
    }
}
