use std::collections::BTreeSet;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::atomic::Ordering;
use std::sync::mpsc;

use ebb_abi::{PAGE_SIZE_BYTES, Pfn};
use proptest::prelude::*;
use vm_memory::{Bytes, GuestAddress, ReadVolatile, VolatileMemory};

use super::*;
use crate::{Backing, HugePages, InhibitReason, Populate, RegionSpec};

const PAGE: u64 = PAGE_SIZE_BYTES;
/// Pages of each of two regions that adjoin, and of one after a gap.
const REGION_PAGES: u64 = 80;

fn ram(backing: Backing) -> GuestRam {
    let region = |first: u64| RegionSpec {
        start: GuestAddress(first * PAGE),
        size_bytes: REGION_PAGES * PAGE,
        host_node: None,
    };
    let specs = [region(0), region(REGION_PAGES), region(3 * REGION_PAGES)];
    GuestRam::new(&specs, backing, HugePages::Off, Populate::Lazy).unwrap()
}

fn taken(ram: &GuestRam) -> BTreeSet<u64> {
    let mut set = PageBitmap::new(&ram.page_ranges());
    ram.take_write_log(&mut set);
    set.ranges().flat_map(|range| range.start.0..range.end().0).collect()
}

/// A write through one of vm-memory's interfaces.
#[derive(Clone, Copy, Debug)]
enum Way {
    Slice,
    Object,
    Store,
    Volatile,
    File,
    VolatileSlice,
}

const WAYS: [Way; 6] =
    [Way::Slice, Way::Object, Way::Store, Way::Volatile, Way::File, Way::VolatileSlice];

/// Writes `size_bytes` bytes, or fewer if the interface writes a fixed number; returns how many.
/// `None` if they do not fit.
fn write(ram: &GuestRam, way: Way, address: u64, size_bytes: usize) -> Option<usize> {
    let content = vec![7; size_bytes];
    let memory = ram.memory();
    let at = GuestAddress(address);
    match way {
        Way::Slice => memory.write_slice(&content, at).ok().map(|()| size_bytes),
        Way::Object => memory.write_obj(7_u64, at).ok().map(|()| 8),
        Way::Store => {
            memory.store(7_u16, GuestAddress(address & !1), Ordering::Release).ok().map(|()| 1)
        }
        Way::Volatile => memory
            .read_exact_volatile_from(at, &mut &content[..], size_bytes)
            .ok()
            .map(|()| size_bytes),
        Way::File => {
            let mut file = tempfile::tempfile().unwrap();
            file.write_all_at(&content, 0).unwrap();
            let file: &mut File = &mut file;
            memory.read_exact_volatile_from(at, file, size_bytes).ok().map(|()| size_bytes)
        }
        Way::VolatileSlice => {
            let slice = memory.get_slice(at, size_bytes).ok()?;
            // In two parts, so that slices of slices are covered.
            let (left, right) = slice.split_at(size_bytes / 2).unwrap();
            left.copy_from(&content[..size_bytes / 2]);
            (&content[size_bytes / 2..])
                .read_exact_volatile(&mut right.get_slice(0, right.len()).unwrap())
                .unwrap();
            Some(size_bytes)
        }
    }
}

proptest! {
    #[test]
    fn every_write_is_found_while_the_log_is_on_and_none_while_it_is_off(
        steps in prop::collection::vec(
            prop_oneof![
                9 => (prop::sample::select(&WAYS), 0..5 * REGION_PAGES * PAGE, 1..9000_usize)
                    .prop_map(Some),
                1 => Just(None),
            ],
            1..30,
        ),
    ) {
        let ram = ram(Backing::Anonymous);
        let mut model = BTreeSet::new();
        let mut on = false;
        for step in steps {
            match step {
                None if on => {
                    ram.stop_write_log();
                    on = false;
                }
                None => {
                    ram.start_write_log().unwrap();
                    model.clear();
                    on = true;
                }
                Some((way, address, size_bytes)) => {
                    let written = write(&ram, way, address, size_bytes);
                    if let (true, Some(written)) = (on, written) {
                        model.extend(address / PAGE..=(address + written as u64 - 1) / PAGE);
                    } else if written.is_none() {
                        // A part before the end of a region may have been written.
                        prop_assert!(taken(&ram).is_superset(&model));
                        model.clear();
                    }
                }
            }
            prop_assert_eq!(ram.is_write_log_on(), on);
        }
        prop_assert_eq!(taken(&ram), model);
        prop_assert!(taken(&ram).is_empty());
    }

    #[test]
    fn discards_are_found(
        backing in prop::sample::select(&[Backing::Anonymous, Backing::Memfd]),
        ranges in prop::collection::vec((0..REGION_PAGES * 2, 0..40_u64), 1..6),
        held in any::<bool>(),
    ) {
        let ram = ram(backing);
        let ranges: Vec<_> = ranges
            .into_iter()
            .map(|(start, pages)| GuestRange::new(Pfn(start), pages.min(2 * REGION_PAGES - start)))
            .collect();
        let discard = || if held { ram.discard_ballooned(&ranges) } else { ram.discard(&ranges) };
        discard().unwrap();
        prop_assert!(taken(&ram).is_empty());
        ram.start_write_log().unwrap();
        discard().unwrap();
        let expected: BTreeSet<u64> =
            ranges.iter().flat_map(|range| range.start.0..range.end().0).collect();
        prop_assert_eq!(taken(&ram), expected);
    }
}

#[test]
fn pages_that_were_not_discarded_are_not_found() {
    let ram = ram(Backing::Anonymous);
    ram.start_write_log().unwrap();
    let _guard = ram.inhibit_discard(InhibitReason::Operator);
    ram.discard(&[GuestRange::new(Pfn(0), 2)]).unwrap();
    assert_eq!(taken(&ram), BTreeSet::new());
}

#[test]
fn discarded_zero_pages_are_found() {
    let ram = ram(Backing::Anonymous);
    let zeros = vec![0; (2 * REGION_PAGES * PAGE) as usize];
    ram.memory().write_slice(&zeros, GuestAddress(0)).unwrap();
    ram.start_write_log().unwrap();
    let scan = ram.discard_zeros(GuestRange::new(Pfn(0), 2 * REGION_PAGES)).unwrap();
    assert_eq!(scan.returned_bytes, 2 * REGION_PAGES * PAGE);
    assert_eq!(taken(&ram), (0..2 * REGION_PAGES).collect());
}

#[test]
fn writes_of_whole_pages_are_found() {
    for backing in [Backing::Anonymous, Backing::Memfd] {
        let ram = ram(backing);
        ram.start_write_log().unwrap();
        ram.write_pages(GuestRange::new(Pfn(79), 2), &[1; 2 * PAGE as usize]).unwrap();
        assert_eq!(taken(&ram), [79, 80].into());
    }
}

#[test]
fn reads_are_not_found() {
    let ram = ram(Backing::Anonymous);
    ram.start_write_log().unwrap();
    let mut buffer = [0; 5000];
    ram.memory().read_slice(&mut buffer, GuestAddress(100)).unwrap();
    let _: u64 = ram.memory().read_obj(GuestAddress(0)).unwrap();
    ram.read_pages(GuestRange::new(Pfn(0), 1), &mut [0; PAGE as usize]).unwrap();
    let _: u16 = ram.memory().load(GuestAddress(0), Ordering::Acquire).unwrap();
    let mut file = tempfile::tempfile().unwrap();
    ram.memory().write_all_volatile_to(GuestAddress(0), &mut file, 9000).unwrap();
    assert_eq!(taken(&ram), BTreeSet::new());
}

#[test]
fn the_log_reports_logged_pages() {
    let ram = ram(Backing::Anonymous);
    ram.start_write_log().unwrap();
    ram.memory().write_obj(1_u8, GuestAddress(70 * PAGE)).unwrap();
    let log = ram.logs().next().unwrap();
    assert!(
        log.dirty_at(70 * PAGE as usize + 4095)
            && log.slice_at(69 * PAGE as usize).dirty_at(PAGE as usize)
    );
    assert!(!log.dirty_at(69 * PAGE as usize) && !log.dirty_at(1 << 40));
}

#[test]
fn invalid_ranges_are_clipped_to_the_region() {
    let ram = ram(Backing::Anonymous);
    ram.start_write_log().unwrap();
    let log = ram.logs().next().unwrap();
    log.mark_dirty((REGION_PAGES * PAGE) as usize - 1, usize::MAX);
    log.mark_dirty(usize::MAX - 10, 100);
    log.mark_dirty(0, 0);
    assert_eq!(taken(&ram), [REGION_PAGES - 1].into());
}

/// A thread's write before a call must be in the page once the call has found its bit: a migration
/// depends on this order.
#[test]
fn found_pages_contain_the_writes_of_other_threads() {
    const WRITES: u64 = 20_000;
    let ram = ram(Backing::Anonymous);
    ram.start_write_log().unwrap();
    let page = GuestAddress(5 * PAGE);
    let (done, is_done) = mpsc::channel();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for value in 1..=WRITES {
                ram.memory().write_obj(value, page).unwrap();
            }
            done.send(()).unwrap();
        });
        // A copy that is renewed whenever the log reports the page, as in a migration.
        let mut copy = 0_u64;
        loop {
            let last_look = is_done.try_recv().is_ok();
            if taken(&ram).contains(&5) {
                copy = ram.memory().read_obj(page).unwrap();
            }
            if last_look {
                break;
            }
        }
        assert_eq!(copy, WRITES);
    });
}
