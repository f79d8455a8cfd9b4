use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::*;
use crate::BrokenCowStats;

mod model;

fn range(start: u64, pages: u64) -> GuestRange {
    GuestRange::new(Pfn(start), pages)
}

fn slot(segment: u32, index: u32) -> StableSlot {
    StableSlot { segment, index }
}

/// Extents with a separate budget, of memory that is not tracked for writes.
fn restored(snapshot: &[GuestRange], regions: &[GuestRange], max_vmas: u64) -> FileExtents {
    let vmas = VmaBudget::with_bound(regions.to_vec(), max_vmas, Arc::default());
    FileExtents::new(snapshot, vmas)
}

/// Extents of memory without a snapshot that is tracked for writes.
fn tracked(regions: &[GuestRange], max_vmas: u64) -> FileExtents {
    let mut extents = restored(&[], regions, max_vmas);
    for region in regions {
        extents.note_tracked(*region);
    }
    extents
}

/// Parts of `range` that are mapped from the snapshot.
fn of_snapshot(extents: &FileExtents, range: GuestRange) -> Vec<GuestRange> {
    let mapped = extents.mapped(range).filter(|(_, source)| *source == Source::Snapshot);
    mapped.map(|(part, _)| part).collect()
}

fn released(extents: &mut FileExtents) -> Vec<StableSlot> {
    let mut released = Vec::new();
    extents.take_released(&mut released);
    released
}

#[test]
fn a_share_is_released_once() {
    let mut extents = tracked(&[range(0, 100)], 1000);
    extents.note_merged(range(10, 10), slot(1, 40));
    assert_eq!((extents.merged_pages(), extents.share_of(Pfn(12))), (10, Some(slot(1, 42))));
    assert_eq!(extents.note_broken(Pfn(12)), Some(slot(1, 42)));
    assert_eq!((extents.note_broken(Pfn(12)), extents.share_of(Pfn(12))), (None, None));
    assert!(extents.is_stable_mapped(Pfn(12)));
    extents.note_discarded(range(11, 3));
    assert_eq!(released(&mut extents), [slot(1, 41), slot(1, 43)]);
    assert_eq!(released(&mut extents), []);
    let mapped: Vec<_> = extents.stable_mapped(range(0, 100)).collect();
    assert_eq!(mapped, [(range(10, 1), slot(1, 40)), (range(14, 6), slot(1, 44))]);
    let mut unmerged = Vec::new();
    extents.note_unmerged(range(0, 16), &mut unmerged);
    assert_eq!(unmerged, [slot(1, 40), slot(1, 44), slot(1, 45)]);
    assert!(extents.is_stable_mapped(Pfn(14)) && extents.share_of(Pfn(14)).is_none());
    // Merged again: the pages mapped there release their shares.
    extents.note_merged(range(15, 2), slot(2, 0));
    assert_eq!(released(&mut extents), [slot(1, 46)]);
    extents.note_discarded(range(0, 100));
    assert_eq!(
        released(&mut extents),
        [slot(2, 0), slot(2, 1), slot(1, 47), slot(1, 48), slot(1, 49)]
    );
    assert_eq!((extents.merged_pages(), extents.vmas.count()), (0, 1));
}

#[test]
fn neighbours_with_neighbouring_slots_are_one_mapping() {
    let mut extents = tracked(&[range(0, 100), range(100, 100)], 1000);
    assert_eq!(extents.vmas.count(), 2);
    extents.note_merged(range(50, 10), slot(0, 0));
    assert_eq!(extents.vmas.count(), 4);
    extents.note_merged(range(60, 10), slot(0, 10));
    assert_eq!(extents.vmas.count(), 4);
    extents.note_merged(range(70, 10), slot(0, 30));
    extents.note_merged(range(80, 10), slot(1, 40));
    assert_eq!(extents.vmas.count(), 6);
    // On the right, but not across regions.
    extents.note_merged(range(20, 10), slot(2, 10));
    assert_eq!(extents.vmas.count(), 8);
    extents.note_merged(range(10, 10), slot(2, 0));
    assert_eq!(extents.vmas.count(), 8);
    extents.note_merged(range(100, 10), slot(1, 60));
    extents.note_merged(range(90, 10), slot(1, 50));
    assert_eq!(extents.vmas.count(), 8);
    let mapped: Vec<_> = extents.stable_mapped(range(0, 200)).map(|(part, _)| part).collect();
    assert_eq!(
        mapped,
        [range(10, 20), range(50, 20), range(70, 10), range(80, 20), range(100, 10)]
    );
}

#[test]
fn short_extents_leave_mappings_to_long_ones_and_those_to_discards() {
    let mut extents = tracked(&[range(0, 1 << 20)], 800);
    let merge = |extents: &mut FileExtents, pages: u64| {
        let mut merged = 0;
        for index in 0..2000 {
            let range = range((pages << 12) + index * 2 * pages + 1, pages);
            let first = slot(0, index as u32 * 100);
            if extents.may_map(range, first) {
                extents.note_merged(range, first);
                merged += 1;
            }
        }
        merged
    };
    assert_eq!((merge(&mut extents, 1), extents.vmas.count()), (149, 299));
    assert_eq!((merge(&mut extents, 7), extents.vmas.count()), (0, 299));
    assert_eq!((merge(&mut extents, 8), extents.vmas.count()), (150, 599));
    assert_eq!((merge(&mut extents, 64), extents.vmas.count()), (0, 599));
    // Without an additional mapping there is no bound: in place of others, and in continuation of
    // one.
    assert!(extents.may_map(range(4097, 1), slot(9, 9)));
    let end = (8 << 12) + 9;
    assert!(
        !extents.may_map(range(end, 1), slot(0, 9)) && extents.may_map(range(end, 1), slot(0, 8))
    );
    // Discards continue in the middle of a run until the last mappings, which are reserved for
    // whole huge pages.
    let huge = range(600 << 9, 512 * 300);
    extents.note_merged(huge, slot(1, 0));
    let mut discarded = 0;
    for page in (huge.start.0 + 1..huge.end().0).step_by(2) {
        match extents.judge(range(page, 1)) {
            Verdict::Replace => {
                extents.note_discarded(range(page, 1));
                discarded += 1;
            }
            verdict => assert_eq!(verdict, Verdict::Keep),
        }
    }
    // The last one takes only one boundary.
    assert_eq!((discarded, extents.vmas.count()), (50, 700));
    assert_eq!(extents.judge(range((700 << 9) + 1, 513)), Verdict::Replace);
    extents.note_discarded(range((700 << 9) + 1, 513));
    assert_eq!(extents.judge(range(0, 1 << 20)), Verdict::Replace);
    extents.note_discarded(range(0, 1 << 20));
    assert_eq!((extents.vmas.count(), extents.judge(range(0, 1 << 20))), (1, Verdict::Ordinary));
}

#[test]
fn reanonymized_pages_take_no_mappings_from_merged_ones() {
    let mut extents = tracked(&[range(0, 1 << 16)], 800);
    extents.note_merged(range(0, 1 << 16), slot(0, 0));
    let single = (0..1 << 16).step_by(10).map(|page| range(page + 5, 1));
    let mut reanonymized = 0;
    for page in single {
        if extents.may_reanonymize(page) {
            extents.note_reanonymized(page);
            reanonymized += 1;
        }
    }
    // A quarter of the share for merging. The last one, at the end of the run, took only one
    // boundary.
    assert_eq!((reanonymized, extents.vmas.count()), (75, 150));
    assert_eq!(
        extents.returns(),
        BrokenCowStats { brought_back_pages: 75, ..BrokenCowStats::default() }
    );
    // Changes without additional mappings: several in one, or the end of a run.
    assert!(extents.may_reanonymize(range(5, 11)) && !extents.may_reanonymize(range(7000, 1)));
    assert_eq!(released(&mut extents).len(), 75);
    // Merged again with the same pages as before, it is part of a run again, which the count does
    // not know for certain.
    extents.note_merged(range(5, 1), slot(0, 5));
    assert_eq!((extents.returns().remerged_pages, extents.vmas.count()), (1, 149));
    assert_eq!(extents.stable_mapped(range(0, 100)).next(), Some((range(0, 15), slot(0, 0))));
}

#[test]
fn memories_of_one_process_share_the_bound() {
    let of_process = Arc::<AtomicU64>::default();
    let all = [range(0, 1000)];
    let memory = |snapshot: &[GuestRange]| {
        let vmas = VmaBudget::with_bound(all.to_vec(), 40, Arc::clone(&of_process));
        let mut extents = FileExtents::new(snapshot, vmas);
        extents.note_tracked(all[0]);
        extents
    };
    let mut memories = [memory(&[]), memory(&[])];
    let mut merged = [0, 0];
    for place in 0..40_u32 {
        for (extents, merged) in memories.iter_mut().zip(&mut merged) {
            let place = range(u64::from(place) * 20 + 1, 10);
            if extents.may_map(place, slot(0, place.start.0 as u32)) {
                extents.note_merged(place, slot(0, place.start.0 as u32));
                *merged += 1;
            }
        }
    }
    assert_eq!((merged, of_process.load(Ordering::Relaxed)), ([7, 7], 28));
    let [first, mut second] = memories;
    drop(first);
    assert_eq!(of_process.load(Ordering::Relaxed), 14);
    assert!(second.may_map(range(900, 10), slot(0, 0)));
    // The VMAs of a restored memory count for others, and for its own discards.
    let snapshot: Vec<_> = (0..10).map(|index| range(index * 100 + 1, 50)).collect();
    let third = memory(&snapshot);
    assert_eq!(of_process.load(Ordering::Relaxed), 34);
    assert!(!second.may_map(range(900, 10), slot(0, 0)));
    assert_eq!(third.judge(range(20, 1)), Verdict::Keep);
    drop(third);
    second.note_discarded(range(0, 1000));
    assert_eq!(of_process.load(Ordering::Relaxed), 0);
}

#[test]
fn single_pages_of_a_snapshot_leave_vmas_to_huge_ones() {
    let all = range(0, 1 << 20);
    let mut extents = restored(&[all], &[all], 100);
    let mut replaced = 0;
    for page in (1..2000).step_by(2) {
        if extents.judge(range(page, 1)) == Verdict::Replace {
            extents.note_discarded(range(page, 1));
            replaced += 1;
        }
    }
    assert_eq!((replaced, extents.vmas.count()), (43, 87));
    assert_eq!(extents.judge(range(1, 1)), Verdict::Ordinary);
    // Next to anonymous memory, or a whole extent: no additional VMA.
    assert_eq!(extents.judge(range(2, 1)), Verdict::Replace);
    assert_eq!(extents.judge(range(85, 2)), Verdict::Replace);
    assert_eq!(extents.judge(range(86, 1)), Verdict::Replace);
    assert_eq!(extents.judge(range(87, 1)), Verdict::Keep);
    let mut huge = 0;
    for block in (10..1000).step_by(2) {
        let block = range(block * 512, 512);
        if extents.judge(block) == Verdict::Replace {
            extents.note_discarded(block);
            huge += 1;
        }
    }
    assert_eq!((huge, extents.vmas.count()), (6, 99));
    assert_eq!(extents.judge(all), Verdict::Replace);
    extents.note_discarded(all);
    assert_eq!((extents.snapshot_pages(), extents.judge(all)), (0, Verdict::Ordinary));
    assert!(extents.is_all_ordinary());
}

#[test]
fn regions_that_adjoin_stay_apart() {
    let regions = [range(0, 100), range(100, 100)];
    let mut extents = restored(&regions, &regions, 1000);
    extents.note_discarded(range(0, 100));
    assert_eq!(extents.judge(range(100, 50)), Verdict::Replace);
    extents.note_discarded(range(100, 100));
    assert_eq!((extents.snapshot_pages(), extents.vmas.count()), (0, 2));
}

#[test]
fn memory_from_a_discard_is_untracked_until_recorded() {
    let mut extents = tracked(&[range(0, 50), range(50, 50)], 1000);
    extents.note_merged(range(10, 80 - 40), slot(0, 0));
    extents.note_merged(range(50, 40), slot(0, 40));
    extents.note_discarded(range(20, 10));
    extents.note_discarded(range(30, 20));
    extents.note_discarded(range(50, 10));
    // Whole extents, but none across regions.
    assert_eq!(extents.untracked(range(25, 1)), [range(20, 30)]);
    assert_eq!(extents.untracked(range(0, 100)), [range(20, 30), range(50, 10)]);
    assert_eq!(extents.untracked(range(0, 20)), []);
    let before = extents.vmas.count();
    extents.note_tracked(range(22, 4));
    assert_eq!(extents.vmas.count(), before + 2);
    assert_eq!(extents.untracked(range(0, 50)), [range(20, 2), range(26, 24)]);
    // Merged memory is handled by the merging thread.
    extents.note_merged(range(26, 24), slot(3, 0));
    assert_eq!(extents.untracked(range(0, 50)), [range(20, 2)]);
    extents.note_tracked(range(0, 100));
    assert_eq!(extents.untracked(range(0, 100)), []);
}

#[test]
fn counting_replaces_the_assumed_starts() {
    let mut extents = tracked(&[range(10, 50), range(60, 40)], 64);
    extents.note_merged(range(20, 10), slot(0, 0));
    extents.note_discarded(range(20, 10));
    extents.note_tracked(range(0, 100));
    assert_eq!(extents.vmas.count(), 4);
    assert!(extents.vmas.is_recount_due());
    // A region's first page is not a boundary, and neither is one outside.
    extents.vmas.set_starts([5, 10, 42, 60, 100].map(Pfn));
    assert_eq!(extents.vmas.count(), 3);
    assert!(!extents.vmas.is_recount_due());
}
