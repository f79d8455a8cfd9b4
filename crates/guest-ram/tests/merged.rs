//! Memory whose pages are merged all the time, while others write to it, discard it and scan it.

#![allow(clippy::unwrap_used, reason = "a test")]

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Barrier};
use std::thread::ScopedJoinHandle;

use ebb_abi::Pfn;
use ebb_guest_ram::merge::{MergeOutcome, MergeTarget};
use ebb_guest_ram::testing::TestMerger;
use ebb_guest_ram::{
    Backing, GuestRam, GuestRange, HugePages, MergeSession, Populate, RegionSpec, StableMemory,
    StableSegments,
};
use vm_memory::{Bytes, GuestAddress};

const PAGE: u64 = 4096;
const PAGES: u64 = 1024;

fn range(start: u64, pages: u64) -> GuestRange {
    GuestRange::new(Pfn(start), pages)
}

fn specs() -> [RegionSpec; 1] {
    [RegionSpec { start: GuestAddress(0), size_bytes: PAGES * PAGE, host_node: None }]
}

/// Memory and its merger; `None` where merging is impossible.
fn merging(ram: GuestRam) -> Option<(Arc<GuestRam>, TestMerger)> {
    let ram = Arc::new(ram);
    match TestMerger::new(&ram) {
        Ok(merger) => Some((ram, merger)),
        Err(error) => {
            println!("not tested: {error}");
            None
        }
    }
}

fn anonymous() -> GuestRam {
    with_huge_pages(HugePages::Off)
}

fn with_huge_pages(huge_pages: HugePages) -> GuestRam {
    GuestRam::new(&specs(), Backing::Anonymous, huge_pages, Populate::Lazy).unwrap()
}

/// Whether each word of a page has this value.
fn holds(ram: &GuestRam, page: u64, value: u8) -> bool {
    let mut content = [0xff; PAGE as usize];
    ram.read_pages(range(page, 1), &mut content).unwrap();
    content == [value; PAGE as usize]
}

struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % bound
    }
}

/// Two threads with their own pages, which know the expected content of these, and one that merges
/// all and occasionally unmerges it.
fn live_while_merged(ram: &GuestRam, merger: &mut TestMerger, steps: u64) -> (u64, u64) {
    const THREADS: u64 = 2;
    /// Number of neighbouring pages of one thread.
    const ROW: u64 = 16;
    let discarded = AtomicU64::new(0);
    let mut merged = 0;
    for row in (0..PAGES).step_by(ROW as usize) {
        ram.write_pages(range(row, ROW), &vec![7; (ROW * PAGE) as usize]).unwrap();
    }
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..THREADS)
            .map(|thread| {
                let discarded = &discarded;
                scope.spawn(move || {
                    let mut random = Random(thread + 1);
                    let rows = PAGES / ROW / THREADS;
                    let mut model = vec![7_u8; (rows * ROW) as usize];
                    let pfn = |index: u64| index / ROW * ROW * THREADS + thread * ROW + index % ROW;
                    for step in 0..steps {
                        let row = random.below(rows);
                        let first = random.below(ROW);
                        let pages = 1 + random.below(ROW - first);
                        let index = row * ROW + first;
                        let place = range(pfn(index), pages);
                        let own = &mut model[index as usize..(index + pages) as usize];
                        if random.below(2) == 0 {
                            assert_eq!(ram.discard(&[place]).unwrap().deferred_bytes, 0);
                            discarded.fetch_add(pages, Ordering::Relaxed);
                            own.fill(0);
                        } else {
                            // Few values, so that many pages are equal.
                            let value = random.below(4) as u8;
                            let content = vec![value; place.size_bytes() as usize];
                            ram.write_pages(place, &content).unwrap();
                            own.fill(value);
                        }
                        for (offset, value) in own.iter().enumerate() {
                            let page = place.start.0 + offset as u64;
                            assert!(
                                holds(ram, page, *value),
                                "page {page} is not {value} in step {step}"
                            );
                        }
                    }
                    for (index, value) in model.iter().enumerate() {
                        let page = pfn(index as u64);
                        assert!(holds(ram, page, *value), "page {page} is not {value} in the end");
                    }
                })
            })
            .collect();
        let mut random = Random(99);
        while !threads.iter().all(ScopedJoinHandle::is_finished) {
            merged += merger.merge(range(0, PAGES)).unwrap();
            if random.below(3) == 0 {
                let first = random.below(PAGES);
                merger.unmerge(range(first, PAGES - first)).unwrap();
            }
        }
    });
    (merged, discarded.into_inner())
}

#[test]
fn a_page_is_as_written_or_zero_during_merges_and_discards() {
    let Some((ram, mut merger)) = merging(anonymous()) else { return };
    let (merged, discarded) = live_while_merged(&ram, &mut merger, 20_000);
    assert!(merged > 1000 && discarded > 20_000, "{merged} pages merged, {discarded} discarded");
    // Every share is accounted for.
    ram.discard(&[range(0, PAGES)]).unwrap();
    assert_eq!((merger.release(), ram.merged_bytes(), ram.resident_bytes().unwrap()), (0, 0, 0));
}

#[test]
fn huge_pages_are_split_and_rebuilt_while_pages_are_merged() {
    let ram = with_huge_pages(HugePages::On).with_single_discards();
    let Some((ram, mut merger)) = merging(ram) else { return };
    let (merged, discarded) = live_while_merged(&ram, &mut merger, 3000);
    assert!(merged > 100 && discarded > 3000, "{merged} pages merged, {discarded} discarded");
    // All of it new, in huge pages where available, and all equal.
    for round in 1..4_u8 {
        ram.discard(&[range(0, PAGES)]).unwrap();
        ram.write_pages(range(0, PAGES), &vec![round; (PAGES * PAGE) as usize]).unwrap();
        assert_eq!(merger.merge(range(0, PAGES)).unwrap(), PAGES);
        assert_eq!((merger.release(), ram.resident_bytes().unwrap()), (PAGES, 0));
        assert!((0..PAGES).all(|page| holds(&ram, page, round)));
    }
}

#[test]
fn restored_memory_is_merged_while_its_file_is_replaced_page_by_page() {
    let origin = anonymous();
    origin.write_pages(range(0, PAGES), &vec![3; (PAGES * PAGE) as usize]).unwrap();
    let file = tempfile::tempfile().unwrap();
    let image = origin.save(&file, 0, &mut |_| {}).unwrap();
    let restored = GuestRam::restore(&specs(), HugePages::Off, file, 0, &image).unwrap();
    let Some((ram, mut merger)) = merging(restored) else { return };
    let (merged, discarded) = live_while_merged(&ram, &mut merger, 5000);
    assert!(merged > 100 && discarded > 5000, "{merged} pages merged, {discarded} discarded");
    ram.discard(&[range(0, PAGES)]).unwrap();
    assert_eq!((merger.release(), ram.merged_bytes(), ram.resident_bytes().unwrap()), (0, 0, 0));
}

#[test]
fn a_snapshot_of_merged_memory_equals_that_of_the_same_memory_unmerged() {
    let Some((ram, mut merger)) = merging(anonymous()) else { return };
    for page in 0..PAGES / 2 {
        let content = [(page / 3 % 100) as u8 + 1; PAGE as usize];
        ram.memory().write_slice(&content, GuestAddress(page * 2 * PAGE)).unwrap();
    }
    let save = || {
        let file = tempfile::tempfile().unwrap();
        let image = ram.save(&file, 0, &mut |_| {}).unwrap();
        image.verify(&file, 0, &mut |_| {}).unwrap();
        (file, image)
    };
    let (_, plain) = save();
    assert_eq!(merger.merge(range(0, PAGES)).unwrap(), PAGES / 2);
    let (file, merged) = save();
    assert_eq!((&merged, merged.data_bytes()), (&plain, PAGES / 2 * PAGE));
    assert_eq!((ram.resident_bytes().unwrap(), ram.merged_bytes()), (0, PAGES / 2 * PAGE));
    let mut held = Vec::new();
    ram.populated_ranges(range(0, PAGES), &mut held).unwrap();
    assert_eq!(held.len() as u64, PAGES / 2);
    // None of it has been touched and is zero.
    assert_eq!(ram.discard_zeros(range(0, PAGES)).unwrap().returned_bytes, 0);
    assert_eq!(merger.release(), PAGES / 2);

    assert_eq!(merger.unmerge(range(0, PAGES)).unwrap(), 0);
    assert_eq!((ram.resident_bytes().unwrap(), ram.merged_bytes()), (PAGES / 2 * PAGE, 0));
    assert_eq!(save().1, plain);
    let restored = GuestRam::restore(&specs(), HugePages::Off, file, 0, &merged).unwrap();
    assert!((0..PAGES).all(|page| {
        let value = if page % 2 == 0 { (page / 2 / 3 % 100) as u8 + 1 } else { 0 };
        holds(&restored, page, value) && holds(&ram, page, value)
    }));
}

/// Ends a loop, also when a test fails.
struct End<'a>(&'a AtomicBool);

impl Drop for End<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

#[test]
fn pages_moved_away_for_comparison_are_not_overlooked() {
    let ram = Arc::new(anonymous());
    let segments = StableSegments::new();
    let mut stable = StableMemory::own(Arc::clone(&segments));
    if let Err(error) = ram.enable_merging(segments) {
        println!("not tested: {error}");
        return;
    }
    let mut session = MergeSession::new(Arc::clone(&ram)).unwrap();
    ram.write_pages(range(0, 512), &vec![1; 512 * PAGE as usize]).unwrap();
    // Other content, so that all pages are moved away and back each time.
    let mut slots = Vec::new();
    stable.allocate(None, 1, &mut slots).unwrap();
    stable.write(slots[0], &[2; PAGE as usize]).unwrap();
    let targets: Vec<_> = (0..512).map(|page| (Pfn(page), MergeTarget::Slot(slots[0]))).collect();
    let over = AtomicBool::new(false);
    let replaced = std::thread::scope(|scope| {
        let end = End(&over);
        let merger = scope.spawn(|| {
            let mut outcomes = Vec::new();
            while !over.load(Ordering::Relaxed) {
                session.replace(&targets, &mut outcomes).unwrap();
            }
            assert!(outcomes.iter().all(|outcome| *outcome == MergeOutcome::Different));
            outcomes.len()
        });
        let mut held = Vec::new();
        let mut random = Random(3);
        for look in 0..2000 {
            // At any moment, not only when the other thread has just finished.
            (0..random.below(5000)).for_each(|_| std::hint::spin_loop());
            held.clear();
            ram.populated_ranges(range(0, PAGES), &mut held).unwrap();
            assert_eq!(held, [range(0, 512)], "look {look}");
            // A failure of the other thread surfaces when it is joined.
            if merger.is_finished() {
                break;
            }
        }
        let file = tempfile::tempfile().unwrap();
        let image = ram.save(&file, 0, &mut |_| {}).unwrap();
        assert_eq!(image.data_bytes(), 512 * PAGE);
        drop(end);
        merger.join().unwrap()
    });
    assert!(replaced > 512, "{replaced}");
    assert!((0..512).all(|page| holds(&ram, page, 1)));
}

#[test]
fn pages_from_a_discard_are_merged_again() {
    let Some((ram, mut merger)) = merging(anonymous()) else { return };
    for round in 0..5_u8 {
        for page in 0..PAGES {
            ram.write_pages(range(page, 1), &[round + 1; PAGE as usize]).unwrap();
        }
        assert_eq!(merger.merge(range(0, PAGES)).unwrap(), PAGES, "round {round}");
        assert_eq!((merger.release(), ram.resident_bytes().unwrap()), (PAGES, 0));
        let ranges: Vec<_> = (0..PAGES).step_by(64).map(|page| range(page, 64)).collect();
        assert_eq!(ram.discard_ballooned(&ranges).unwrap().bytes, PAGES * PAGE);
        assert_eq!(merger.release(), 0);
        assert!((0..PAGES).all(|page| holds(&ram, page, 0)));
    }
}

#[test]
fn unmerged_pages_are_like_all_others_and_merged_again() {
    let Some((ram, mut merger)) = merging(anonymous()) else { return };
    let value = |page: u64| (page / 3 % 100) as u8 + 1;
    for page in 0..PAGES {
        ram.write_pages(range(page, 1), &[value(page); PAGE as usize]).unwrap();
    }
    for round in 0..3 {
        assert_eq!(merger.merge(range(0, PAGES)).unwrap(), PAGES, "round {round}");
        assert_eq!(ram.resident_bytes().unwrap(), 0);
        assert_eq!(merger.unmerge(range(100, 300)).unwrap(), PAGES - 300);
        assert_eq!(merger.unmerge(range(0, PAGES)).unwrap(), 0);
        assert_eq!((ram.resident_bytes().unwrap(), ram.merged_bytes()), (PAGES * PAGE, 0));
        assert!((0..PAGES).all(|page| holds(&ram, page, value(page))));
    }
    // Pages with a private copy stay in place, with their content.
    assert_eq!(merger.merge(range(0, PAGES)).unwrap(), PAGES);
    for page in (0..PAGES).step_by(10) {
        ram.write_pages(range(page, 1), &[200; PAGE as usize]).unwrap();
    }
    assert_eq!(merger.unmerge(range(0, PAGES)).unwrap(), 0);
    assert!((0..PAGES).all(|page| holds(
        &ram,
        page,
        if page % 10 == 0 { 200 } else { value(page) }
    )));
    let outcome = ram.discard(&[range(0, PAGES)]).unwrap();
    assert_eq!((outcome.bytes, ram.resident_bytes().unwrap()), (PAGES * PAGE, 0));
    assert!((0..PAGES).all(|page| holds(&ram, page, 0)));
}

#[test]
fn writes_to_pages_that_are_being_unmerged_are_not_lost() {
    let Some((ram, mut merger)) = merging(anonymous()) else { return };
    let word = |page: u64, offset: u64| GuestAddress(page * PAGE + offset);
    let mut random = Random(4);
    for round in 1..=40_u64 {
        // Each different, so that a run is as long as a huge page, and takes its time.
        for page in 0..PAGES {
            ram.memory().write_obj(page + 1, word(page, 0)).unwrap();
        }
        assert_eq!(merger.merge(range(0, PAGES)).unwrap(), PAGES);
        let start = Barrier::new(2);
        let mut pages: Vec<u64> = (0..PAGES).collect();
        (1..PAGES).for_each(|last| pages.swap(last as usize, random.below(last + 1) as usize));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                start.wait();
                for page in &pages {
                    ram.memory().write_obj(round, word(*page, 8)).unwrap();
                }
            });
            start.wait();
            assert_eq!(merger.unmerge(range(0, PAGES)).unwrap(), 0);
        });
        for page in 0..PAGES {
            let words =
                [0, 8].map(|offset| ram.memory().read_obj::<u64>(word(page, offset)).unwrap());
            assert_eq!(words, [page + 1, round], "page {page}");
        }
        ram.discard(&[range(0, PAGES)]).unwrap();
    }
}

#[test]
fn the_real_number_of_mappings_stays_within_the_count() {
    let Some((ram, mut merger)) = merging(anonymous()) else { return };
    let region = ram.regions()[0];
    let real = || {
        let text = std::fs::read_to_string("/proc/self/maps").unwrap();
        let inside = |line: &&str| {
            let start =
                line.split_once('-').and_then(|(start, _)| u64::from_str_radix(start, 16).ok());
            start.is_some_and(|start| {
                (region.host_address..region.host_address + region.size_bytes).contains(&start)
            })
        };
        text.lines().filter(inside).count() as u64
    };
    let mut random = Random(9);
    for step in 0..300 {
        let first = random.below(PAGES);
        let place = range(first, 1 + random.below(40).min(PAGES - first - 1));
        match random.below(4) {
            0 => drop(ram.discard(&[place]).unwrap()),
            1 => {
                for page in place.start.0..place.end().0 {
                    ram.write_pages(range(page, 1), &[page as u8 | 1; PAGE as usize]).unwrap();
                }
            }
            2 => drop(merger.merge(place).unwrap()),
            _ => {
                let content = vec![random.below(9) as u8; place.size_bytes() as usize];
                ram.write_pages(place, &content).unwrap();
            }
        }
        let counted = ram.merged_mappings() + 1;
        assert!(real() <= counted, "{} mappings, {counted} counted in step {step}", real());
    }
    assert!(ram.merged_mappings() > 20);
}

/// Set for the process in which mappings are used up.
const NO_MAPPINGS: &str = "EBB_TEST_WITHOUT_MAPPINGS";

#[test]
fn without_mappings_small_discards_are_deferred_and_nothing_is_merged() {
    if std::env::var_os(NO_MAPPINGS).is_some() {
        return in_a_process_without_mappings();
    }
    // In a separate process: other tests would have no mappings meanwhile.
    let name = "without_mappings_small_discards_are_deferred_and_nothing_is_merged";
    let output = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", name, "--test-threads=1", "--nocapture"])
        .env(NO_MAPPINGS, "1")
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert!(String::from_utf8_lossy(&output.stdout).contains("1 passed"));
}

fn in_a_process_without_mappings() {
    use rustix::mm::{MapFlags, MprotectFlags, ProtFlags, mmap_anonymous, mprotect, munmap};

    let Some((ram, mut merger)) = merging(anonymous()) else { return };
    ram.write_pages(range(0, PAGES), &vec![5; (PAGES * PAGE) as usize]).unwrap();
    for page in 0..PAGES {
        ram.memory().write_obj(page, GuestAddress(page * PAGE)).unwrap();
    }
    assert_eq!(merger.merge(range(0, 512)).unwrap(), 512);
    let size_bytes = 1 << 30;
    // SAFETY: without MAP_FIXED the kernel chooses a free place.
    let filler = unsafe {
        mmap_anonymous(std::ptr::null_mut(), size_bytes, ProtFlags::empty(), MapFlags::PRIVATE)
    }
    .unwrap();
    let mut pages = (0..size_bytes).step_by(2 * PAGE as usize);
    // SAFETY: the pages belong to the filler, and are not used.
    let refused = pages.any(|offset| unsafe {
        mprotect(filler.wrapping_byte_add(offset), PAGE as usize, MprotectFlags::READ).is_err()
    });
    assert!(refused, "this process may have more mappings than 1 GiB has pages");

    let first = |page: u64| ram.memory().read_obj::<u64>(GuestAddress(page * PAGE)).unwrap();
    // In the middle of merged pages, and of both kinds.
    let outcome = ram.discard(&[range(100, 50), range(500, 30)]).unwrap();
    assert_eq!((outcome.bytes, outcome.deferred_bytes), (18 * PAGE, 62 * PAGE));
    assert!((0..512).all(|page| first(page) == page) && (512..530).all(|page| first(page) == 0));
    let outcome = merger.merge(range(600, 100)).unwrap();
    assert_eq!(outcome, 0);
    assert!((530..PAGES).all(|page| first(page) == page));

    // SAFETY: the filler is no longer used.
    unsafe { munmap(filler, size_bytes) }.unwrap();
    assert_eq!(ram.discard(&[range(100, 50), range(500, 30)]).unwrap().bytes, 80 * PAGE);
    assert!((100..150).all(|page| first(page) == 0));
    assert_eq!(merger.merge(range(600, 100)).unwrap(), 100);
    assert!((530..PAGES).all(|page| first(page) == page));
}
