//! The core over memory of this process, on the kernel that runs the tests.

use std::sync::Arc;

use ebb_guest_ram::{
    Backing, GuestRam, HugePages, MergeSession, MergeUnavailable, Populate, RegionSpec,
    StableMemory, StableSegments,
};
use vm_memory::{Bytes, GuestAddress};

use crate::{Merger, Run, Secret, Settings, StablePages, Statistics};

const PAGES: u64 = 1024;
const PAGE: usize = 4096;

/// Two halves with the same content, of each page `of(page)` in all its bytes.
fn ram(
    segments: &Arc<StableSegments>,
    of: impl Fn(u64) -> u8,
) -> Result<Arc<GuestRam>, MergeUnavailable> {
    let spec =
        RegionSpec { start: GuestAddress(0), size_bytes: 2 * PAGES * PAGE as u64, host_node: None };
    let ram = GuestRam::new(&[spec], Backing::Anonymous, HugePages::Off, Populate::Lazy)?;
    ram.enable_merging(Arc::clone(segments))?;
    for page in 0..2 * PAGES {
        write(&ram, page, of(page % PAGES));
    }
    Ok(Arc::new(ram))
}

fn write(ram: &GuestRam, page: u64, byte: u8) {
    ram.memory().write_slice(&[byte; PAGE], GuestAddress(page * PAGE as u64)).unwrap();
}

fn is_full_of(ram: &GuestRam, page: u64, byte: u8) -> bool {
    let mut content = [0; PAGE];
    ram.memory().read_slice(&mut content, GuestAddress(page * PAGE as u64)).unwrap();
    content == [byte; PAGE]
}

type Own = Merger<MergeSession, StablePages<StableMemory>>;

fn merger(ram: &Arc<GuestRam>, segments: Arc<StableSegments>, settings: Settings) -> Own {
    let memory = MergeSession::new(Arc::clone(ram)).unwrap();
    let store = StablePages::new(StableMemory::own(segments));
    Merger::new(memory, store, Secret([5; 32]), settings).unwrap()
}

fn passes(merger: &mut Own, passes: u32) -> Statistics {
    for _ in 0..passes {
        while !merger.scan(256).finished_pass {}
    }
    merger.statistics()
}

#[test]
fn equal_pages_are_shared_and_writes_are_kept() {
    let segments = StableSegments::new();
    // A quarter of zeros, and three other contents.
    let of = |page: u64| (page / 64 % 4) as u8;
    let ram = match ram(&segments, of) {
        Err(error @ MergeUnavailable::OldKernel { .. }) => {
            eprintln!("not tested: {error}");
            return;
        }
        ram => ram.unwrap(),
    };
    let settings = Settings {
        run: Run::Merge,
        clean_passes: 1,
        max_page_sharing: 4096,
        ..Settings::default()
    };
    let mut merger = merger(&ram, segments, settings);
    let statistics = passes(&mut merger, 6);
    assert_eq!(statistics.memory_errors, 0);
    let merged = statistics.pages_shared + statistics.pages_sharing;
    assert!(merged > 2 * PAGES * 3 / 4 - 64, "{statistics:?}");
    let resident = ram.resident_bytes().unwrap();
    assert!(resident < 2 * PAGES * PAGE as u64 / 4, "{resident} bytes: {statistics:?}");
    assert!((0..2 * PAGES).all(|page| is_full_of(&ram, page, of(page % PAGES))));
    // One writes; the other does not see it, and the share is released.
    (64..96).for_each(|page| write(&ram, page, 77));
    let later = passes(&mut merger, 1);
    assert!(later.pages_sharing + 32 <= statistics.pages_sharing, "{later:?}");
    assert!(
        (64..96).all(|page| is_full_of(&ram, page, 77) && is_full_of(&ram, PAGES + page, of(page)))
    );
}

/// Half of the pages of one half are written to, and later get their old content again.
#[test]
fn pages_with_restored_content_are_shared_again() {
    let segments = StableSegments::new();
    let of = |page: u64| (page % 200) as u8 + 1;
    let ram = match ram(&segments, of) {
        Err(error @ MergeUnavailable::OldKernel { .. }) => {
            eprintln!("not tested: {error}");
            return;
        }
        ram => ram.unwrap(),
    };
    let settings =
        Settings { run: Run::Merge, clean_passes: 1, smart_scan: false, ..Settings::default() };
    let mut merger = merger(&ram, segments, settings);
    let before = passes(&mut merger, 6);
    let mappings = mappings_of(&ram);
    let mut written: Vec<u64> = (0..PAGES / 2).collect();
    written.extend((PAGES / 2..PAGES).step_by(16));
    let mut broken = before.broken_pages;
    for round in 0..3 {
        for page in &written {
            write(&ram, *page, 255);
            write(&ram, *page, of(*page));
        }
        broken += written.len() as u64;
        let found = passes(&mut merger, 1);
        assert!(
            found.pages_sharing + written.len() as u64 <= before.pages_sharing + 1,
            "{found:?}"
        );
        let after = passes(&mut merger, 20);
        assert_eq!(
            (after.pages_shared, after.pages_sharing),
            (before.pages_shared, before.pages_sharing)
        );
        assert_eq!(after.merged_pages, before.merged_pages, "round {round}");
        assert_eq!(
            (after.broken_pages, after.brought_back_pages, after.remerged_pages),
            (broken, broken, broken)
        );
        assert!((0..PAGES).all(|page| is_full_of(&ram, page, of(page))));
    }
    assert_eq!(mappings_of(&ram), mappings);
    assert_eq!(ram.resident_bytes().unwrap(), 0);
}

/// Number of mappings that guest memory consists of.
fn mappings_of(ram: &GuestRam) -> usize {
    let region = ram.regions()[0];
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let starts =
        maps.lines().filter_map(|line| u64::from_str_radix(line.split_once('-')?.0, 16).ok());
    starts
        .filter(|start| {
            (region.host_address..region.host_address + region.size_bytes).contains(start)
        })
        .count()
}
