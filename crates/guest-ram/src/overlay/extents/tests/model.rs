//! The extents compared with plain models, step by step.

use std::collections::BTreeSet;

use ebb_abi::Pfn;
use proptest::prelude::*;

use super::super::{FileExtents, Source, Verdict};
use super::{of_snapshot, range, released, restored, slot};
use crate::merge::StableSlot;
use crate::{BrokenCowStats, GuestRange};

/// The simplest model: each page separately.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Page {
    mapped: Option<Source>,
    shares: bool,
    untracked: bool,
    moved: bool,
    reanonymized: bool,
    /// Number of its mapping. The kernel's least generous joining: each mapping gets a private page
    /// as soon as it is made, so that only a new one is ever joined with a neighbour, and with only
    /// one.
    mapping: u64,
}

impl Page {
    fn stable(&self) -> Option<StableSlot> {
        match self.mapped {
            Some(Source::Stable(slot)) => Some(slot),
            Some(Source::Snapshot) | None => None,
        }
    }
}

#[derive(Clone, Debug)]
enum Step {
    Merge { start: u64, pages: u64, first: StableSlot },
    Break { page: u64 },
    Discard { start: u64, pages: u64 },
    Unmerge { start: u64, pages: u64 },
    Moved { start: u64, pages: u64 },
    Reanonymize { start: u64, pages: u64 },
    Empty { start: u64, pages: u64 },
    Join { start: u64, pages: u64 },
    Track { start: u64, pages: u64 },
    Take,
}

const PAGES: u64 = 200;
const REGIONS: [(u64, u64); 2] = [(0, 120), (120, 80)];

fn step() -> impl Strategy<Value = Step> {
    let place = || (0..PAGES, 1..30_u64);
    // Few slots, so that many neighbours have neighbouring ones: those that match the page's
    // number.
    let slot = |start: u64, kind: u32| slot(kind / 2, start as u32 + 1000 * (kind % 2));
    prop_oneof![
        5 => (place(), 0..4_u32).prop_map(move |((start, pages), kind)| {
            let Step::Discard { start, pages } = within_region(start, pages) else {
                unreachable!()
            };
            Step::Merge { start, pages, first: slot(start, kind) }
        }),
        2 => (0..PAGES).prop_map(|page| Step::Break { page }),
        3 => place().prop_map(|(start, pages)| within_region(start, pages)),
        1 => place().prop_map(|(start, pages)| Step::Unmerge { start, pages }),
        1 => place().prop_map(|(start, pages)| {
            let Step::Discard { start, pages } = within_region(start, pages) else {
                unreachable!()
            };
            Step::Moved { start, pages }
        }),
        2 => place().prop_map(|(start, pages)| {
            let Step::Discard { start, pages } = within_region(start, pages) else {
                unreachable!()
            };
            Step::Reanonymize { start, pages }
        }),
        1 => place().prop_map(|(start, pages)| Step::Empty { start, pages }),
        2 => place().prop_map(|(start, pages)| {
            let Step::Discard { start, pages } = within_region(start, pages) else {
                unreachable!()
            };
            Step::Join { start, pages }
        }),
        2 => place().prop_map(|(start, pages)| Step::Track { start, pages }),
        1 => Just(Step::Take),
    ]
}

fn within_region(start: u64, pages: u64) -> Step {
    let region = REGIONS.iter().find(|(first, size)| start < first + size).unwrap();
    Step::Discard { start, pages: pages.min(region.0 + region.1 - start) }
}

/// Pages of a snapshot: none, or some extents.
fn snapshot() -> impl Strategy<Value = Vec<GuestRange>> {
    prop::collection::vec((0..20_u64, 1..30_u64), 0..6).prop_map(|extents| {
        let mut end = 0;
        let extents = extents.into_iter().map(|(gap, pages)| {
            let extent = range(end + gap + 1, pages);
            end = extent.end().0;
            extent
        });
        let cut = |extent| REGIONS.map(|(first, size)| range(first, size).intersection(extent));
        extents.flat_map(cut).filter(|part| !part.is_empty()).collect()
    })
}

struct Model {
    pages: Vec<Page>,
    next_mapping: u64,
    released: Vec<StableSlot>,
    returns: BrokenCowStats,
}

impl Model {
    /// With pages of a snapshot, of memory that is tracked or not.
    fn new(snapshot: &[GuestRange], untracked: bool) -> Self {
        let region = |page: u64| u64::from(page >= REGIONS[1].0);
        let page = |page| Page { mapping: region(page), untracked, ..Page::default() };
        let pages = (0..PAGES).map(page).collect();
        let mut model = Self {
            pages,
            next_mapping: 2,
            released: Vec::new(),
            returns: BrokenCowStats::default(),
        };
        for range in snapshot {
            model.split_at(range.start.0);
            model.split_at(range.end().0);
            for page in &mut model.pages[range.start.0 as usize..range.end().0 as usize] {
                (page.mapped, page.untracked) = (Some(Source::Snapshot), false);
            }
        }
        model
    }

    /// Releases shares; returns their slots in the pages' order.
    fn release(&mut self, start: u64, pages: u64) -> Vec<StableSlot> {
        let pages = &mut self.pages[start as usize..(start + pages).min(PAGES) as usize];
        let release = |page: &mut Page| page.stable().filter(|_| std::mem::take(&mut page.shares));
        pages.iter_mut().filter_map(release).collect()
    }

    fn replace(&mut self, start: u64, pages: u64, first: Option<StableSlot>) {
        self.split_at(start);
        self.split_at(start + pages);
        let mapping = self.next_mapping;
        self.next_mapping += 1;
        for index in 0..pages {
            let mapped = first.map(|first| Source::Stable(first.offset(index as u32)));
            let page = Page {
                mapped,
                shares: mapped.is_some(),
                untracked: mapped.is_none(),
                mapping,
                ..Page::default()
            };
            let before = std::mem::replace(&mut self.pages[(start + index) as usize], page);
            self.returns.remerged_pages += u64::from(before.reanonymized && mapped.is_some());
        }
        let joins = |left: u64, right: u64| {
            let same_region =
                REGIONS.iter().any(|(first, size)| *first < right && right < first + size);
            same_region && {
                let (left, right) = (self.pages[left as usize], self.pages[right as usize]);
                match (left.mapped, right.mapped) {
                    (Some(left @ Source::Stable(_)), Some(right)) => left.offset(1) == right,
                    (None, None) => {
                        left.untracked && right.untracked && !left.moved && !right.moved
                    }
                    _ => false,
                }
            }
        };
        let end = start + pages;
        let joined = if start > 0 && joins(start - 1, start) {
            self.pages[start as usize - 1].mapping
        } else if end < PAGES && joins(end - 1, end) {
            self.pages[end as usize].mapping
        } else {
            return;
        };
        self.pages[start as usize..end as usize].iter_mut().for_each(|page| page.mapping = joined);
    }

    /// Anonymous memory that is not joined with anything.
    fn move_here(&mut self, start: u64, pages: u64) {
        self.split_at(start);
        self.split_at(start + pages);
        let mapping = self.next_mapping;
        self.next_mapping += 1;
        for place in &mut self.pages[start as usize..(start + pages) as usize] {
            let reanonymized = place.reanonymized;
            *place =
                Page { untracked: true, moved: true, reanonymized, mapping, ..Page::default() };
        }
    }

    /// The same for pages that were merged and written to, or adjoin such pages.
    fn reanonymize(&mut self, start: u64, pages: u64) {
        for page in &mut self.pages[start as usize..(start + pages) as usize] {
            page.reanonymized |= page.stable().is_some();
            self.returns.brought_back_pages += u64::from(page.stable().is_some());
        }
        self.move_here(start, pages);
    }

    /// Splits the mapping at `border`.
    fn split_at(&mut self, border: u64) {
        let Some(before) = border.checked_sub(1).map(|page| self.pages[page as usize].mapping)
        else {
            return;
        };
        let mapping = self.next_mapping;
        self.next_mapping += 1;
        let behind = &mut self.pages[border as usize..];
        behind
            .iter_mut()
            .take_while(|page| page.mapping == before)
            .for_each(|page| page.mapping = mapping);
    }

    fn track(&mut self, start: u64, pages: u64) {
        let end = (start + pages).min(PAGES);
        for edge in [start, end] {
            let cut = edge > 0 && edge < PAGES && self.pages[edge as usize].untracked;
            if cut && self.pages[edge as usize - 1].untracked {
                self.split_at(edge);
            }
        }
        self.pages[start as usize..end as usize].iter_mut().for_each(|page| page.untracked = false);
    }

    fn mappings(&self) -> u64 {
        self.pages.chunk_by(|left, right| left.mapping == right.mapping).count() as u64
    }
}

fn check(extents: &FileExtents, model: &Model) -> Result<(), TestCaseError> {
    let everything = range(0, PAGES);
    let mut end = 0;
    for (part, first) in extents.mapped(everything) {
        prop_assert!(part.start.0 >= end && !part.is_empty(), "extents overlap");
        prop_assert!(
            REGIONS.iter().any(|region| range(region.0, region.1).intersection(part) == part)
        );
        end = part.end().0;
        for index in 0..part.pages {
            let page = model.pages[(part.start.0 + index) as usize];
            prop_assert_eq!(page.mapped, Some(first.offset(index)));
        }
    }
    let mut untracked = vec![false; PAGES as usize];
    for part in extents.untracked(everything) {
        untracked[part.start.0 as usize..part.end().0 as usize].fill(true);
    }
    for (number, page) in model.pages.iter().enumerate() {
        let pfn = Pfn(number as u64);
        prop_assert_eq!(extents.extent_at(pfn.0).is_some(), page.mapped.is_some());
        prop_assert_eq!(extents.is_stable_mapped(pfn), page.stable().is_some());
        prop_assert_eq!(extents.share_of(pfn), page.stable().filter(|_| page.shares));
        prop_assert_eq!(untracked[number], page.untracked, "page {}", number);
    }
    prop_assert_eq!(
        extents.merged_pages(),
        model.pages.iter().filter(|page| page.shares).count() as u64
    );
    let of_snapshot = |page: &&Page| page.mapped == Some(Source::Snapshot);
    prop_assert_eq!(
        extents.snapshot_pages(),
        model.pages.iter().filter(of_snapshot).count() as u64
    );
    prop_assert_eq!(extents.returns(), model.returns);
    prop_assert!(
        model.mappings() <= extents.vmas.count(),
        "{} > {}",
        model.mappings(),
        extents.vmas.count()
    );
    Ok(())
}

proptest! {
    #[test]
    fn extents_match_a_page_by_page_model(
        steps in prop::collection::vec(step(), 1..80),
        snapshot in snapshot(),
        is_tracked: bool,
        max_vmas in 20..80_u64,
    ) {
        let regions = REGIONS.map(|(first, size)| range(first, size));
        let mut extents = restored(&snapshot, &regions, max_vmas);
        let mut model = Model::new(&snapshot, !is_tracked);
        if is_tracked {
            for region in regions {
                extents.note_tracked(region);
            }
        }
        check(&extents, &model)?;
        for step in steps {
            match step {
                Step::Merge { start, pages, first } => {
                    if !extents.may_map(range(start, pages), first) {
                        prop_assert!(extents.vmas.count() + 2 > max_vmas * 6 / 16);
                        continue;
                    }
                    extents.note_merged(range(start, pages), first);
                    let released = model.release(start, pages);
                    model.released.extend(released);
                    model.replace(start, pages, Some(first));
                }
                Step::Break { page } => {
                    let expected = model.release(page, 1).first().copied();
                    prop_assert_eq!(extents.note_broken(Pfn(page)), expected);
                }
                Step::Discard { start, pages } => {
                    let mapped = model.pages[start as usize..(start + pages) as usize]
                        .iter()
                        .any(|page| page.mapped.is_some());
                    match extents.judge(range(start, pages)) {
                        Verdict::Ordinary => prop_assert!(!mapped),
                        Verdict::Keep => {
                            prop_assert!(mapped && extents.vmas.count() + 2 > max_vmas * 14 / 16);
                        }
                        Verdict::Replace => {
                            prop_assert!(mapped);
                            extents.note_discarded(range(start, pages));
                            let released = model.release(start, pages);
                            model.released.extend(released);
                            model.replace(start, pages, None);
                        }
                    }
                }
                Step::Unmerge { start, pages } => {
                    let mut released = Vec::new();
                    extents.note_unmerged(range(start, pages), &mut released);
                    prop_assert_eq!(released, model.release(start, pages));
                }
                Step::Moved { start, pages } => {
                    let mut released = Vec::new();
                    extents.note_moved_here(range(start, pages), &mut released);
                    prop_assert_eq!(released, model.release(start, pages));
                    model.move_here(start, pages);
                }
                Step::Reanonymize { start, pages } => {
                    if !extents.may_reanonymize(range(start, pages)) {
                        prop_assert!(extents.vmas.count() + 2 > max_vmas * 3 / 16);
                        continue;
                    }
                    extents.note_reanonymized(range(start, pages));
                    let released = model.release(start, pages);
                    model.released.extend(released);
                    model.reanonymize(start, pages);
                }
                Step::Join { start, pages } => {
                    if extents.mapped(range(start, pages)).next().is_some() {
                        continue;
                    }
                    let mappings = extents.vmas.within(range(start, pages));
                    let (Some(first), Some(last)) = (mappings.first(), mappings.last()) else {
                        continue;
                    };
                    let (start, end) = (first.start.0, last.end().0);
                    // Neighbours, each of which is within one mapping.
                    let of = |page: u64| model.pages.get(page as usize).map(|page| page.mapping);
                    prop_assert!(mappings.windows(2).all(|pair| pair[0].end() == pair[1].start));
                    for mapping in &mappings {
                        let inside = mapping.start.0..mapping.end().0;
                        let first = of(mapping.start.0);
                        prop_assert!(inside.into_iter().all(|page| of(page) == first));
                    }
                    let before = extents.vmas.count();
                    let joined = extents.returns().joined_mappings;
                    extents.note_coalesced(range(start, end - start));
                    model.move_here(start, end - start);
                    prop_assert_eq!(extents.vmas.count() + mappings.len() as u64, before + 1);
                    model.returns.joined_mappings = joined + mappings.len() as u64 - 1;
                }
                Step::Empty { start, pages } => {
                    extents.note_emptied(range(start, pages));
                    let end = (start + pages).min(PAGES);
                    model.pages[start as usize..end as usize]
                        .iter_mut()
                        .for_each(|page| page.reanonymized = false);
                }
                Step::Track { start, pages } => {
                    extents.note_tracked(range(start, pages));
                    model.track(start, pages);
                }
                Step::Take => {
                    prop_assert_eq!(released(&mut extents), std::mem::take(&mut model.released));
                }
            }
            check(&extents, &model)?;
        }
        prop_assert_eq!(released(&mut extents), model.released);
    }

    /// The model: a set of pages, and VMAs counted with the kernel's least generous joining.
    #[test]
    fn extents_of_a_snapshot_are_the_remaining_pages_and_vmas_stay_within_their_bound(
        initial in prop::collection::vec((1..40_u64, 1..40_u64), 1..10),
        steps in prop::collection::vec((0..400_u64, 1..60_u64), 0..60),
        max_vmas in 20..60_u64,
    ) {
        let region = range(0, 500);
        let mut end = 0;
        let mut snapshot = Vec::new();
        for (gap, pages) in initial {
            let extent = range(end + gap, pages);
            end = extent.end().0;
            snapshot.push(extent.intersection(region));
        }
        snapshot.retain(|extent| !extent.is_empty());
        let mut extents = restored(&snapshot, &[region], max_vmas);
        let mut model: BTreeSet<u64> =
            snapshot.iter().flat_map(|extent| extent.start.0..extent.end().0).collect();
        // First page of each VMA but the first.
        let mut starts: BTreeSet<u64> =
            (1..500).filter(|page| model.contains(page) != model.contains(&(page - 1))).collect();
        let bound = max_vmas.max(extents.vmas.count());
        for (start, pages) in steps {
            let asked = range(start, pages);
            let end = asked.end().0;
            let of_file: Vec<u64> = (start..end).filter(|page| model.contains(page)).collect();
            match extents.judge(asked) {
                Verdict::Ordinary => prop_assert_eq!(of_file.len(), 0),
                Verdict::Keep => prop_assert_eq!(of_file.len() as u64, pages),
                Verdict::Replace => {
                    prop_assert!(!of_file.is_empty());
                    extents.note_discarded(asked);
                    model.retain(|page| !asked.contains(Pfn(*page)));
                    starts.retain(|edge| *edge <= start || *edge > end);
                    starts.extend([start, end].into_iter().filter(|edge| (1..500).contains(edge)));
                    // Joined on the left, otherwise on the right.
                    if start > 0 && !model.contains(&(start - 1)) {
                        starts.remove(&start);
                    } else if !model.contains(&end) {
                        starts.remove(&end);
                    }
                }
            }
            let left: BTreeSet<u64> = of_snapshot(&extents, region)
                .iter()
                .flat_map(|part| part.start.0..part.end().0)
                .collect();
            prop_assert_eq!(&left, &model);
            prop_assert_eq!(extents.snapshot_pages(), model.len() as u64);
            prop_assert!((starts.len() as u64) < extents.vmas.count());
            prop_assert!(extents.vmas.count() <= bound);
        }
    }
}
