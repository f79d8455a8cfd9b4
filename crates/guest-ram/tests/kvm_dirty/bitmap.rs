use std::collections::BTreeSet;

use ebb_abi::Pfn;
use ebb_guest_ram::GuestRange;
use ebb_guest_ram::kvm_dirty::{DirtyBitmap, DirtyLogError};
use proptest::prelude::*;

use crate::guest::{Guest, REGIONS, Stop, kvm, numbers};

fn range(start: u64, pages: u64) -> GuestRange {
    GuestRange::new(Pfn(start), pages)
}

pub fn log(guest: &Guest) -> DirtyBitmap<'_> {
    // SAFETY: the guest has its memory in slots numbered by the regions' indexes, and drops its
    // machine before its memory.
    unsafe { DirtyBitmap::new(&guest.vm, &guest.ram) }.unwrap()
}

fn found(guest: &Guest, log: &DirtyBitmap<'_>) -> Vec<u64> {
    let mut pages = guest.no_pages();
    log.get(&mut pages).unwrap();
    numbers(&pages)
}

#[test]
fn writes_of_the_guest_while_the_log_is_on_are_found() {
    let Some(kvm) = kvm() else { return };
    let guest = Guest::new(&kvm, |_| ());
    assert_eq!(guest.write(10, 1, 5), Stop::Done);
    let mut log = log(&guest);
    log.enable().unwrap();
    assert!(found(&guest, &log).is_empty());
    // Pages that had been written to before, and others; the boundary between two slots; the last
    // page.
    for (first, step, count) in [(12, 1, 3), (68, 1, 4), (4100, 64, 3), (6095, 1, 1)] {
        assert_eq!(guest.write(first, step, count), Stop::Done);
    }
    let expected = [12, 13, 14, 68, 69, 70, 71, 4100, 4164, 4228, 6095];
    assert_eq!(found(&guest, &log), expected);
    // They stay dirty until they are cleared.
    assert_eq!(found(&guest, &log), expected);
}

#[test]
fn pages_are_cleared_exactly() {
    let Some(kvm) = kvm() else { return };
    let guest = Guest::new(&kvm, |_| ());
    let mut log = log(&guest);
    log.enable().unwrap();
    assert_eq!(guest.write(60, 1, 20), Stop::Done);
    log.clear(range(65, 8)).unwrap();
    let expected: Vec<u64> = (60..65).chain(73..80).collect();
    assert_eq!(found(&guest, &log), expected);
    // A write after clearing is found.
    assert_eq!(guest.write(66, 1, 1), Stop::Done);
    assert_eq!(found(&guest, &log), [60, 61, 62, 63, 64, 66, 73, 74, 75, 76, 77, 78, 79]);
    log.clear(range(0, 200)).unwrap();
    assert!(found(&guest, &log).is_empty());
}

#[test]
fn logging_starts_with_clean_pages() {
    let Some(kvm) = kvm() else { return };
    let guest = Guest::new(&kvm, |_| ());
    let mut log = log(&guest);
    let off = |log: &DirtyBitmap<'_>| {
        matches!(log.get(&mut guest.no_pages()), Err(DirtyLogError::Refused { source, .. })
            if source.errno() == libc::ENOENT)
    };
    assert!(off(&log));
    log.enable().unwrap();
    assert_eq!(guest.write(20, 1, 2), Stop::Done);
    // Pages found earlier are kept.
    log.enable().unwrap();
    assert_eq!(found(&guest, &log), [20, 21]);
    log.disable().unwrap();
    assert!(off(&log));
    log.disable().unwrap();
    assert_eq!(guest.write(30, 1, 2), Stop::Done);
    log.enable().unwrap();
    assert!(found(&guest, &log).is_empty());
    assert_eq!(guest.write(31, 1, 2), Stop::Done);
    assert_eq!(found(&guest, &log), [31, 32]);
    drop(log);
    assert_eq!(guest.vm.get_dirty_log(0, 4096).unwrap_err().errno(), libc::ENOENT);
}

#[test]
fn pages_outside_of_guest_memory_are_refused() {
    let Some(kvm) = kvm() else { return };
    let guest = Guest::new(&kvm, |_| ());
    let mut log = log(&guest);
    log.enable().unwrap();
    for outside in [range(199, 2), range(200, 1), range(6095, 2)] {
        let result = log.clear(outside);
        assert!(
            matches!(result, Err(DirtyLogError::OutsideRam { range }) if range == outside),
            "{result:?}"
        );
    }
}

#[derive(Clone, Debug)]
enum Step {
    Write(u64, u64),
    Clear(GuestRange),
    ClearAll(Vec<GuestRange>),
}

/// A part of a region.
fn any_range() -> impl Strategy<Value = GuestRange> {
    prop::sample::select(&REGIONS).prop_flat_map(|(first, pages)| {
        (0..pages, 1..150_u64)
            .prop_map(move |(start, count)| range(first + start, count.min(pages - start)))
    })
}

fn any_step() -> impl Strategy<Value = Step> {
    prop_oneof![
        // Page 0 contains the program, which no write may change.
        3 => any_range().prop_map(|range| {
            let first = range.start.0.max(1);
            Step::Write(first, range.end().0.saturating_sub(first))
        }),
        2 => any_range().prop_map(Step::Clear),
        1 => prop::collection::vec(any_range(), 0..8).prop_map(Step::ClearAll),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn the_log_contains_pages_written_and_not_cleared(
        steps in prop::collection::vec(any_step(), 1..12),
    ) {
        let Some(kvm) = kvm() else { return Ok(()) };
        let guest = Guest::new(&kvm, |_| ());
        let mut log = log(&guest);
        log.enable().unwrap();
        let mut model = BTreeSet::new();
        for step in steps {
            match &step {
                Step::Write(_, 0) => {}
                Step::Write(first, count) => {
                    prop_assert_eq!(guest.write(*first, 1, *count), Stop::Done);
                    model.extend(*first..first + count);
                }
                Step::Clear(range) => {
                    log.clear(*range).unwrap();
                    model.retain(|page| !range.contains(Pfn(*page)));
                }
                Step::ClearAll(ranges) => {
                    let mut pages = guest.no_pages();
                    for range in ranges {
                        pages.insert(*range);
                    }
                    log.clear_all(&pages).unwrap();
                    model.retain(|page| !pages.contains(Pfn(*page)));
                }
            }
            let expected: Vec<u64> = model.iter().copied().collect();
            prop_assert_eq!(found(&guest, &log), expected, "after {:?}", step);
        }
    }
}
