use std::collections::BTreeSet;

use proptest::prelude::*;

use super::*;
use crate::{Backing, HugePages, Populate, RegionSpec};

const PAGE: u64 = PAGE_SIZE_BYTES;
const PAGES: u64 = 100;

/// Two regions that adjoin and one after a gap.
fn ram(backing: Backing) -> GuestRam {
    let region = |first: u64| RegionSpec {
        start: GuestAddress(first * PAGE),
        size_bytes: PAGES * PAGE,
        host_node: None,
    };
    GuestRam::new(
        &[region(0), region(PAGES), region(3 * PAGES)],
        backing,
        HugePages::Off,
        Populate::Lazy,
    )
    .unwrap()
}

fn range(start: u64, pages: u64) -> GuestRange {
    GuestRange::new(Pfn(start), pages)
}

fn held(ram: &GuestRam, range: GuestRange) -> Vec<GuestRange> {
    let mut held = Vec::new();
    ram.populated_ranges(range, &mut held).unwrap();
    held
}

fn pages(ranges: &[GuestRange]) -> BTreeSet<u64> {
    ranges.iter().flat_map(|range| range.start.0..range.end().0).collect()
}

fn any_range() -> impl Strategy<Value = GuestRange> {
    (0..2 * PAGES, 1..20_u64).prop_map(|(start, pages)| range(start, pages.min(2 * PAGES - start)))
}

#[derive(Clone, Debug)]
enum Step {
    Write(GuestRange, u8),
    Discard(GuestRange),
}

proptest! {
    #[test]
    fn written_pages_are_populated_and_read_as_written(
        backing in prop::sample::select(&[Backing::Anonymous, Backing::Memfd]),
        steps in prop::collection::vec(
            prop_oneof![
                3 => (any_range(), any::<u8>())
                    .prop_map(|(range, value)| Step::Write(range, value)),
                1 => any_range().prop_map(Step::Discard),
            ],
            1..20,
        ),
        asked in any_range(),
    ) {
        let ram = ram(backing);
        let mut model = vec![None; 2 * PAGES as usize];
        for step in steps {
            match step {
                Step::Write(range, value) => {
                    ram.write_pages(range, &vec![value; range.size_bytes() as usize]).unwrap();
                    model[range.start.0 as usize..range.end().0 as usize].fill(Some(value));
                }
                Step::Discard(range) => {
                    ram.discard(&[range]).unwrap();
                    model[range.start.0 as usize..range.end().0 as usize].fill(None);
                }
            }
        }
        let expected: BTreeSet<u64> =
            (asked.start.0..asked.end().0).filter(|page| model[*page as usize].is_some()).collect();
        let found = held(&ram, asked);
        prop_assert_eq!(pages(&found), expected);
        prop_assert!(found.is_sorted());
        let border = |pair: &[GuestRange]| {
            pair[0].end() != pair[1].start || pair[1].start == Pfn(PAGES)
        };
        prop_assert!(found.windows(2).all(border));
        for page in asked.start.0..asked.end().0 {
            prop_assert_eq!(held(&ram, range(page, 1)).len() == 1, model[page as usize].is_some());
        }
        let mut content = vec![1; asked.size_bytes() as usize];
        ram.read_pages(asked, &mut content).unwrap();
        for (page, content) in (asked.start.0..).zip(content.chunks(PAGE as usize)) {
            let value = model[page as usize].unwrap_or(0);
            prop_assert!(content.iter().all(|byte| *byte == value), "page {}", page);
        }
        // Reading has allocated no page of a file.
        if backing == Backing::Memfd {
            let all: BTreeSet<u64> =
                (0..2 * PAGES).filter(|page| model[*page as usize].is_some()).collect();
            prop_assert_eq!(pages(&held(&ram, range(0, 2 * PAGES))), all);
        }
    }
}

#[test]
fn ranges_that_are_not_guest_memory_are_refused() {
    let ram = ram(Backing::Anonymous);
    for outside in
        [range(2 * PAGES - 1, 2), range(2 * PAGES, 1), range(4 * PAGES - 1, 2), range(u64::MAX, 1)]
    {
        let mut content = vec![9; outside.size_bytes() as usize];
        let refused =
            |result| matches!(result, Err(RamError::OutsideRam { range }) if range == outside);
        assert!(refused(ram.populated_ranges(outside, &mut Vec::new())), "{outside}");
        assert!(refused(ram.read_pages(outside, &mut content)), "{outside}");
        assert!(refused(ram.write_pages(outside, &content)), "{outside}");
    }
    assert_eq!(held(&ram, range(0, 2 * PAGES)), []);
}

#[test]
fn earlier_entries_stay_in_the_list() {
    let ram = ram(Backing::Anonymous);
    ram.write_pages(range(1, 1), &[1; PAGE as usize]).unwrap();
    let mut held = vec![range(0, 1)];
    ram.populated_ranges(range(1, 5), &mut held).unwrap();
    assert_eq!(held, [range(0, 1), range(1, 1)]);
}

#[test]
fn content_of_the_snapshot_file_counts() {
    let origin = ram(Backing::Anonymous);
    origin.write_pages(range(3, 2), &[7; 2 * PAGE as usize]).unwrap();
    origin.write_pages(range(10, 1), &[8; PAGE as usize]).unwrap();
    let file = tempfile::tempfile().unwrap();
    let image = origin.save(&file, 0, &mut |_| {}).unwrap();
    let specs: Vec<_> = origin
        .regions()
        .iter()
        .map(|region| RegionSpec {
            start: region.start,
            size_bytes: region.size_bytes,
            host_node: None,
        })
        .collect();
    let restored = GuestRam::restore(&specs, HugePages::Off, file, 0, &image).unwrap();
    restored.write_pages(range(20, 1), &[9; PAGE as usize]).unwrap();
    restored.discard(&[range(4, 1)]).unwrap();
    assert_eq!(held(&restored, range(0, 2 * PAGES)), [range(3, 1), range(10, 1), range(20, 1)]);
    for (page, value) in [(3, 7), (4, 0), (10, 8), (20, 9), (21, 0)] {
        let mut content = [1; PAGE as usize];
        restored.read_pages(range(page, 1), &mut content).unwrap();
        assert_eq!(content, [value; PAGE as usize], "page {page}");
    }
}
