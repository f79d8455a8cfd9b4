//! Merged memory as mapped by the kernel. Pages are merged here by a plain mapping, while they are
//! not written to.

use std::os::unix::fs::FileExt;

use ebb_abi::{PAGE_SIZE_BYTES, Pfn};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::mm::{Advice, madvise};
use vm_memory::{Bytes, GuestAddress};

use super::*;
use crate::merge::STABLE_FILE_NAME;
use crate::merge::merging::vma_starts;
use crate::merge::scratch::Scratch;
use crate::{Backing, GuestRam, Populate, RamImage, Residency, StableSlot};

const PAGE: u64 = PAGE_SIZE_BYTES;
const MIB: u64 = 1 << 20;
/// Pages of each of the two regions.
const REGION: u64 = 2048;
/// First page of the second region.
const SECOND: u64 = 1 << 20;

fn range(start: u64, pages: u64) -> GuestRange {
    GuestRange::new(Pfn(start), pages)
}

fn specs() -> [RegionSpec; 2] {
    [0, SECOND * PAGE].map(|start| RegionSpec {
        start: GuestAddress(start),
        size_bytes: REGION * PAGE,
        host_node: None,
    })
}

fn ram(huge_pages: HugePages) -> GuestRam {
    let ram = GuestRam::new(&specs(), Backing::Anonymous, huge_pages, Populate::Lazy).unwrap();
    ram.overlay_for_merging().unwrap();
    ram
}

/// A segment of stable pages.
struct Segment {
    file: File,
    next: u32,
}

impl Segment {
    fn new() -> Self {
        let file = File::from(memfd_create(STABLE_FILE_NAME, MemfdFlags::CLOEXEC).unwrap());
        ftruncate(&file, 64 * MIB).unwrap();
        Self { file, next: 0 }
    }

    /// Merges pages with new stable pages of the same content. They must not be written to
    /// concurrently.
    fn merge(&mut self, ram: &GuestRam, range: GuestRange) -> StableSlot {
        let mut content = vec![0; range.size_bytes() as usize];
        ram.read_pages(range, &mut content).unwrap();
        let first = StableSlot { segment: 0, index: self.next };
        self.next += range.pages as u32;
        self.file.write_all_at(&content, u64::from(first.index) * PAGE).unwrap();
        self.map(ram, range, first);
        first
    }

    /// Maps stable pages in place of others.
    fn map(&self, ram: &GuestRam, range: GuestRange, first: StableSlot) {
        let mut extents = ram.overlay_for_merging().unwrap().lock();
        let region =
            ram.regions().iter().position(|region| region.pages().contains(range.start)).unwrap();
        let offset = (range.start.address() - ram.regions()[region].start.0) as usize;
        let size_bytes = range.size_bytes() as usize;
        ram.mappings[region]
            .map_privately(offset, size_bytes, &self.file, u64::from(first.index) * PAGE)
            .unwrap();
        let address = (ram.mappings[region].address() + offset) as *mut _;
        // SAFETY: the range was mapped above; the advice changes no content.
        unsafe { madvise(address, size_bytes, Advice::LinuxDontDump) }.unwrap();
        extents.note_merged(range, first);
    }
}

/// The content of a page.
fn value(page: u64) -> u8 {
    (page % 250) as u8 + 1
}

fn fill(ram: &GuestRam, range: GuestRange) {
    for page in range.start.0..range.end().0 {
        ram.memory().write_slice(&[value(page); PAGE as usize], GuestAddress(page * PAGE)).unwrap();
    }
}

fn read(ram: &GuestRam, page: u64) -> u8 {
    let mut content = [0; PAGE as usize];
    ram.memory().read_slice(&mut content, GuestAddress(page * PAGE)).unwrap();
    assert!(content.iter().all(|byte| *byte == content[0]));
    content[0]
}

fn released(ram: &GuestRam) -> Vec<StableSlot> {
    let mut released = Vec::new();
    ram.lock_overlay().unwrap().take_released(&mut released);
    released
}

fn all() -> [GuestRange; 2] {
    [range(0, REGION), range(SECOND, REGION)]
}

/// First addresses and flags of the mappings in guest memory.
fn mappings(ram: &GuestRam) -> Vec<(u64, Vec<String>)> {
    let text = std::fs::read_to_string("/proc/self/smaps").unwrap();
    let mut found = Vec::new();
    let mut start = None;
    for line in text.lines() {
        if let Some(flags) = line.strip_prefix("VmFlags:") {
            found.extend(start.take().map(|start| {
                let mut flags: Vec<_> = flags.split_ascii_whitespace().map(str::to_owned).collect();
                flags.retain(|flag| flag != "sd");
                (start, flags)
            }));
        } else if let Some((first, _)) = line.split_once('-') {
            let inside = |address: &u64| {
                ram.regions().iter().any(|region| {
                    (region.host_address..region.host_address + region.size_bytes).contains(address)
                })
            };
            start = u64::from_str_radix(first, 16).ok().filter(inside).or(start);
        }
    }
    found
}

fn counted(ram: &GuestRam) -> u64 {
    ram.lock_overlay().unwrap().vmas.count()
}

/// Reads the actual VMAs.
fn recount(ram: &GuestRam) {
    let maps = Mutex::new(File::open("/proc/self/maps").unwrap());
    let starts = vma_starts(&maps, ram.regions()).unwrap();
    ram.lock_overlay().unwrap().vmas.set_starts(starts);
}

#[test]
fn a_discarded_page_never_shows_the_stable_page() {
    for single in [false, true] {
        let mut ram = ram(HugePages::Off);
        if single {
            ram = ram.with_single_discards();
        }
        let mut segment = Segment::new();
        fill(&ram, range(0, 100));
        let first = segment.merge(&ram, range(10, 50));
        // Written to since: a copy in front of the stable page.
        fill(&ram, range(20, 2));
        assert_eq!(ram.merged_bytes(), 50 * PAGE);
        // Unmerged pages, merged ones, copies; a range of merged ones; one of others.
        let ranges = [range(5, 20), range(40, 4), range(80, 2)];
        let outcome = ram.discard(&ranges).unwrap();
        assert_eq!((outcome.bytes, outcome.ranges, outcome.deferred_bytes), (26 * PAGE, 3, 0));
        let expected: Vec<_> = (0..15).chain(30..34).map(|index| first.offset(index)).collect();
        assert_eq!(released(&ram), expected);
        assert_eq!(ram.merged_bytes(), 31 * PAGE);
        for round in 0..2 {
            for page in 0..100 {
                let gone = ranges.iter().any(|range| range.contains(Pfn(page)));
                assert_eq!(
                    read(&ram, page),
                    if gone { 0 } else { value(page) },
                    "page {page}, round {round}"
                );
            }
            for range in ranges {
                fill(&ram, range);
            }
            // The second time most of it is ordinary memory.
            assert_eq!(ram.discard_ballooned(&ranges).unwrap().bytes, 26 * PAGE);
        }
        assert_eq!(released(&ram), []);
    }
}

#[test]
fn a_copy_without_a_share_is_not_discarded_by_dontneed() {
    let ram = ram(HugePages::Off);
    let mut segment = Segment::new();
    fill(&ram, range(0, 20));
    let first = segment.merge(&ram, range(0, 20));
    ram.memory().write_slice(&[99; PAGE as usize], GuestAddress(7 * PAGE)).unwrap();
    assert_eq!(ram.lock_overlay().unwrap().note_broken(Pfn(7)), Some(first.offset(7)));
    ram.discard(&[range(7, 1)]).unwrap();
    assert_eq!((read(&ram, 7), read(&ram, 6), released(&ram)), (0, value(6), vec![]));
}

#[test]
fn after_a_reboot_nothing_is_merged() {
    let ram = ram(HugePages::On);
    let mut segment = Segment::new();
    for range in all() {
        fill(&ram, range);
    }
    for start in (0..REGION).step_by(16) {
        segment.merge(&ram, range(start + 3, 8));
    }
    segment.merge(&ram, range(SECOND, REGION));
    fill(&ram, range(SECOND + 100, 100));
    let whole: Vec<_> = all().to_vec();
    let outcome = ram.discard(&whole).unwrap();
    assert_eq!(
        (outcome.bytes, outcome.syscalls, outcome.deferred_bytes),
        (2 * REGION * PAGE, 2, 0)
    );
    assert_eq!(released(&ram).len() as u64, REGION / 2 + REGION);
    assert_eq!((ram.merged_bytes(), ram.merged_mappings(), mappings(&ram).len()), (0, 0, 2));
    assert_eq!(ram.residency().unwrap(), Residency::default());
    assert!(
        all().iter().all(|range| (range.start.0..range.end().0).all(|page| read(&ram, page) == 0))
    );
}

#[test]
fn memory_that_replaces_merged_pages_is_like_all_other_memory() {
    let specs = specs().map(|spec| RegionSpec { host_node: Some(0), ..spec });
    for huge_pages in [HugePages::On, HugePages::Off] {
        let ram = GuestRam::new(&specs, Backing::Anonymous, huge_pages, Populate::Lazy).unwrap();
        ram.overlay_for_merging().unwrap();
        let flags = mappings(&ram)[0].1.clone();
        fill(&ram, range(0, 512));
        Segment::new().merge(&ram, range(16, 64));
        ram.discard(&[range(32, 8)]).unwrap();
        let address = ram.regions()[0].host_address + 32 * PAGE;
        let replaced = mappings(&ram).into_iter().find(|(start, _)| *start == address).unwrap();
        assert_eq!(replaced.1, flags);
        let policies = std::fs::read_to_string("/proc/self/numa_maps").unwrap_or_default();
        let line = policies.lines().find(|line| line.starts_with(&format!("{address:x} ")));
        assert!(
            policies.is_empty() || line.is_some_and(|line| line.contains("bind:0")),
            "{line:?}"
        );
    }
}

#[test]
fn merged_pages_are_counted_separately() {
    let ram = ram(HugePages::Off);
    let mut segment = Segment::new();
    fill(&ram, range(0, 100));
    segment.merge(&ram, range(0, 60));
    let residency = ram.residency().unwrap();
    assert_eq!((residency.private_bytes, residency.file_bytes), (40 * PAGE, 0));
    // Only accessed pages are mapped.
    (0..60).for_each(|page| assert_eq!(read(&ram, page), value(page)));
    fill(&ram, range(10, 5));
    let residency = ram.residency().unwrap();
    assert_eq!(
        residency,
        Residency { private_bytes: 45 * PAGE, file_bytes: 0, merged_bytes: 55 * PAGE }
    );
    assert_eq!(ram.resident_bytes().unwrap(), 45 * PAGE);
}

#[test]
fn merged_pages_are_populated_and_readable() {
    let ram = ram(HugePages::Off);
    let mut segment = Segment::new();
    fill(&ram, range(10, 10));
    fill(&ram, range(30, 10));
    segment.merge(&ram, range(32, 4));
    segment.merge(&ram, range(36, 4));
    fill(&ram, range(33, 1));
    ram.discard(&[range(38, 1)]).unwrap();
    let mut held = Vec::new();
    ram.populated_ranges(range(0, REGION), &mut held).unwrap();
    assert_eq!(held, [range(10, 10), range(30, 8), range(39, 1)]);
    held.clear();
    ram.populated_ranges(range(36, 1), &mut held).unwrap();
    ram.populated_ranges(range(38, 1), &mut held).unwrap();
    assert_eq!(held, [range(36, 1)]);
    let mut content = vec![0; 10 * PAGE as usize];
    ram.read_pages(range(30, 10), &mut content).unwrap();
    for (page, content) in (30..40).zip(content.chunks(PAGE as usize)) {
        let expected = if page == 38 { 0 } else { value(page) };
        assert!(content.iter().all(|byte| *byte == expected), "page {page}");
    }
    // Written over, as by a device.
    ram.write_pages(range(36, 1), &[77; PAGE as usize]).unwrap();
    assert_eq!((read(&ram, 36), read(&ram, 37)), (77, value(37)));
    assert_eq!(ram.merged_bytes(), 7 * PAGE);
}

fn save(ram: &GuestRam) -> (File, RamImage) {
    let file = tempfile::tempfile().unwrap();
    let image = ram.save(&file, 0, &mut |_| {}).unwrap();
    image.verify(&file, 0, &mut |_| {}).unwrap();
    (file, image)
}

fn bytes(file: &File) -> Vec<u8> {
    let mut bytes = vec![0; file.metadata().unwrap().len() as usize];
    file.read_exact_at(&mut bytes, 0).unwrap();
    bytes
}

#[test]
fn saved_merged_memory_equals_unmerged_memory() {
    let ram = ram(HugePages::On);
    let mut segment = Segment::new();
    fill(&ram, range(0, 600));
    fill(&ram, range(SECOND + 5, 100));
    let plain = save(&ram);
    for (start, pages) in [(0, 512), (520, 1), (530, 1), (SECOND + 20, 64)] {
        segment.merge(&ram, range(start, pages));
    }
    // Copies of a stable page, with the same content.
    fill(&ram, range(100, 20));
    let merged = save(&ram);
    assert_eq!(merged.1, plain.1);
    assert!(bytes(&merged.0) == bytes(&plain.0));
    assert_eq!(merged.1.data_bytes(), 700 * PAGE);

    // The restored memory can be merged itself as far as it is not the file's.
    let restored = GuestRam::restore(&specs(), HugePages::On, merged.0, 0, &merged.1).unwrap();
    restored.overlay_for_merging().unwrap();
    fill(&restored, range(1000, 50));
    segment.merge(&restored, range(1000, 50));
    restored.discard(&[range(90, 20)]).unwrap();
    fill(&restored, range(95, 10));
    segment.merge(&restored, range(95, 10));
    let again = save(&restored);
    assert_eq!(again.1.data_bytes(), (700 + 50 - 10) * PAGE);
    // Pages of the file, merged ones and discarded ones, in one piece.
    assert_eq!(restored.discard(&[range(80, 40)]).unwrap().bytes, 40 * PAGE);
    assert_eq!((released(&restored).len(), restored.merged_bytes()), (10, 50 * PAGE));
    for page in 0..600 {
        assert_eq!(read(&restored, page), if (80..120).contains(&page) { 0 } else { value(page) });
    }
    let before = counted(&restored);
    recount(&restored);
    assert!(counted(&restored) <= before);
    assert_eq!(mappings(&restored).len() as u64, counted(&restored));
}

#[test]
fn a_trim_discards_zero_copies_and_keeps_stable_pages() {
    let ram = ram(HugePages::Off);
    let mut segment = Segment::new();
    let zero = |first: u64, pages: u64| {
        ram.memory()
            .write_slice(&vec![0; (pages * PAGE) as usize], GuestAddress(first * PAGE))
            .unwrap();
    };
    fill(&ram, range(0, 512));
    // A stable page of zeros, which must stay.
    zero(400, 100);
    segment.merge(&ram, range(0, 512));
    (0..512).for_each(|page| {
        assert_eq!(read(&ram, page), if (400..500).contains(&page) { 0 } else { value(page) });
    });
    assert_eq!(ram.discard_zeros(range(0, 512)).unwrap(), crate::ZeroScan::default());
    // Copies: a long run of zeros, and a short one.
    zero(100, 100);
    zero(300, 15);
    let scan = ram.discard_zeros(range(0, 512)).unwrap();
    assert_eq!((scan.scanned_bytes, scan.returned_bytes), (115 * PAGE, 100 * PAGE));
    assert_eq!(ram.resident_bytes().unwrap(), 15 * PAGE);
    assert_eq!(released(&ram).len(), 100);
    for page in 0..512 {
        let zero = [100..200, 300..315, 400..500].iter().any(|zeros| zeros.contains(&page));
        assert_eq!(read(&ram, page), if zero { 0 } else { value(page) });
    }
}

#[test]
fn every_other_page_does_not_exhaust_the_mappings() {
    let ram = ram(HugePages::Off);
    let mut segment = Segment::new();
    fill(&ram, range(0, REGION));
    segment.merge(&ram, range(0, REGION));
    ram.lock_overlay().unwrap().vmas.set_own_bound(160);
    let ranges: Vec<_> = (0..REGION).step_by(2).map(|page| range(page, 1)).collect();
    let outcome = ram.discard(&ranges).unwrap();
    assert_eq!(outcome.bytes + outcome.deferred_bytes, REGION / 2 * PAGE);
    assert!(outcome.bytes > 60 * PAGE && outcome.deferred_bytes > 800 * PAGE, "{outcome:?}");
    assert!(mappings(&ram).len() <= 140);
    // Deferred pages are unchanged, the rest is zero.
    let mut zeros = 0;
    for page in 0..REGION {
        match read(&ram, page) {
            0 => zeros += 1,
            other => assert_eq!(other, value(page)),
        }
    }
    assert_eq!(zeros * PAGE, outcome.bytes);
    // A piece of both kinds: ordinary pages are discarded, merged ones stay.
    fill(&ram, range(SECOND, 100));
    assert_eq!(ram.discard(&[range(SECOND, 100)]).unwrap().bytes, 100 * PAGE);
    // Whole huge pages are still discarded, and so is the whole memory at once.
    assert_eq!(ram.discard(&[range(1023, 513)]).unwrap().deferred_bytes, 0);
    assert_eq!(ram.discard(&all()).unwrap().bytes, 2 * REGION * PAGE);
    assert_eq!((ram.merged_bytes(), mappings(&ram).len()), (0, 2));
}

#[test]
fn without_mappings_ordinary_pages_are_discarded_and_merged_ones_stay() {
    let ram = ram(HugePages::Off);
    let mut segment = Segment::new();
    fill(&ram, range(0, 300));
    segment.merge(&ram, range(100, 100));
    let mut extents = ram.lock_overlay().unwrap();
    extents.vmas.set_own_bound(1);
    // Memory that is tracked for writes is not joined with memory from a discard.
    extents.note_tracked(range(0, 100));
    drop(extents);
    // One boundary is removed, and two would be added.
    let outcome = ram.discard(&[range(50, 100)]).unwrap();
    assert_eq!((outcome.bytes, outcome.deferred_bytes), (50 * PAGE, 50 * PAGE));
    for page in 0..300 {
        assert_eq!(read(&ram, page), if (50..100).contains(&page) { 0 } else { value(page) });
    }
    assert_eq!((released(&ram), mappings(&ram).len()), (vec![], 4));
}

#[test]
fn the_real_number_of_mappings_stays_within_the_count() {
    let ram = ram(HugePages::Off);
    let mut segment = Segment::new();
    fill(&ram, range(0, REGION));
    // A fixed sequence of unordered places.
    let mut place = 1_u64;
    for step in 0..400 {
        place = place * 48_271 % 0x7fff_ffff;
        let start = place % REGION;
        let part = range(start, (place % 37 + 1).min(REGION - start));
        match place / 37 % 4 {
            0 => drop(ram.discard(&[part]).unwrap()),
            // Occasionally, slots that follow those of the preceding pages.
            1 if start > 0 && ram.lock_overlay().unwrap().is_stable_mapped(Pfn(start - 1)) => {
                let before = ram
                    .lock_overlay()
                    .unwrap()
                    .stable_mapped(range(start - 1, 1))
                    .next()
                    .unwrap()
                    .1;
                let part = range(start, part.pages.min(u64::from(segment.next - before.index - 1)));
                if !part.is_empty() {
                    segment.map(&ram, part, before.offset(1));
                }
            }
            _ => drop(segment.merge(&ram, part)),
        }
        let (real, counted) = (mappings(&ram).len() as u64, counted(&ram));
        assert!(real <= counted, "{real} mappings, {counted} counted, step {step}");
        // Private pages everywhere, so that neighbours cannot be joined later.
        for page in part.start.0..part.end().0 {
            ram.memory().write_obj(1_u8, GuestAddress(page * PAGE)).unwrap();
        }
        if step % 100 == 99 {
            recount(&ram);
            assert_eq!(mappings(&ram).len() as u64, self::counted(&ram));
        }
    }
    assert!(counted(&ram) > 100);
}

#[test]
fn memory_of_files_is_not_merged() {
    let ram = GuestRam::new(&specs(), Backing::Memfd, HugePages::Off, Populate::Lazy).unwrap();
    let error = ram.overlay_for_merging().unwrap_err();
    assert!(matches!(error, RamError::NotMergeable { backing: Backing::Memfd }), "{error}");
    assert_eq!((ram.merged_bytes(), ram.merged_mappings()), (0, 0));
}

#[test]
fn a_copy_takes_the_place_of_merged_pages() {
    let ram = ram(HugePages::Off);
    let mut segment = Segment::new();
    fill(&ram, range(0, 100));
    let first = segment.merge(&ram, range(10, 20));
    let scratch = Scratch::new(&specs(), HugePages::Off).unwrap();
    let mut extents = ram.lock_overlay().unwrap();
    for region in all() {
        extents.note_tracked(region);
    }
    let mut released = Vec::new();
    let piece = ram.piece(range(12, 4)).unwrap();
    let write = |content: *mut u8| {
        // SAFETY: the content of four pages, in the scratch area.
        unsafe { content.write_bytes(99, 4 * PAGE as usize) };
        Ok(())
    };
    // SAFETY: the piece belongs to this memory, and the test does not rely on its content.
    unsafe { scratch.put_copy(&piece, write) }.unwrap();
    extents.note_moved_here(range(12, 4), &mut released);
    assert_eq!(released, [2, 3, 4, 5].map(|index| first.offset(index)));
    assert_eq!(extents.untracked(range(0, HUGE_PAGE_SIZE_PAGES)), [range(12, 4)]);
    let refused = |_: *mut u8| Err(io::ErrorKind::NotFound.into());
    let piece = ram.piece(range(18, 4)).unwrap();
    // SAFETY: nothing is replaced.
    let result = unsafe { scratch.put_copy(&piece, refused) };
    assert_eq!(result.unwrap_err().kind(), io::ErrorKind::NotFound);
    drop(extents);
    assert_eq!((read(&ram, 11), read(&ram, 12), read(&ram, 15), read(&ram, 16)), (12, 99, 99, 17));
    assert_eq!(read(&ram, 18), value(18));
    // From now on it is ordinary memory.
    ram.discard(&[range(12, 2)]).unwrap();
    assert_eq!((read(&ram, 13), read(&ram, 14)), (0, 99));
    assert_eq!(mappings(&ram).len() as u64, 6);
}

#[test]
fn threads_discard_while_others_write() {
    let ram = ram(HugePages::Off);
    fill(&ram, range(0, REGION));
    Segment::new().merge(&ram, range(0, REGION));
    std::thread::scope(|scope| {
        // Two that discard even blocks of 16 pages, in different sizes and from different ends,
        // each page twice.
        for backwards in [false, true] {
            let ram = &ram;
            scope.spawn(move || {
                for step in 0..64 {
                    let block = if backwards { 63 - step } else { step } * 2;
                    let block = range(block * 16, 16);
                    let halves = [range(block.start.0, 8), range(block.start.0 + 8, 8)];
                    ram.discard(if backwards { &halves } else { std::slice::from_ref(&block) })
                        .unwrap();
                }
            });
        }
        // One that writes to odd blocks, like a vCPU.
        scope.spawn(|| {
            for round in 0..4_u8 {
                for page in (0..REGION).filter(|page| page / 16 % 2 == 1) {
                    ram.memory().write_obj(round, GuestAddress(page * PAGE + 8)).unwrap();
                }
            }
        });
    });
    for page in 0..REGION {
        let (expected, written) = if page / 16 % 2 == 1 { (value(page), 3) } else { (0, 0) };
        let byte =
            |offset| ram.memory().read_obj::<u8>(GuestAddress(page * PAGE + offset)).unwrap();
        assert_eq!((byte(0), byte(8)), (expected, written));
    }
    assert_eq!(released(&ram).len() as u64, REGION / 2);
}
