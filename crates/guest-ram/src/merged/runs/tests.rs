use proptest::prelude::*;

use super::*;

fn range(start: u64, pages: u64) -> GuestRange {
    GuestRange::new(Pfn(start), pages)
}

fn slot(segment: u32, index: u32) -> StableSlot {
    StableSlot { segment, index }
}

fn registry(regions: Vec<GuestRange>, max_mappings: u64) -> MergedRuns {
    MergedRuns::new(regions, max_mappings, Arc::default())
}

fn released(runs: &mut MergedRuns) -> Vec<StableSlot> {
    let mut released = Vec::new();
    runs.take_released(&mut released);
    released
}

#[test]
fn a_share_is_given_up_once() {
    let mut runs = registry(vec![range(0, 100)], 1000);
    runs.note_merged(range(10, 10), slot(1, 40));
    assert_eq!((runs.merged_pages(), runs.share_of(Pfn(12))), (10, Some(slot(1, 42))));
    assert_eq!(runs.note_broken(Pfn(12)), Some(slot(1, 42)));
    assert_eq!((runs.note_broken(Pfn(12)), runs.share_of(Pfn(12))), (None, None));
    assert!(runs.is_stable_mapped(Pfn(12)));
    runs.note_discarded(range(11, 3));
    assert_eq!(released(&mut runs), [slot(1, 41), slot(1, 43)]);
    assert_eq!(released(&mut runs), []);
    let mapped: Vec<_> = runs.stable_mapped(range(0, 100)).collect();
    assert_eq!(mapped, [(range(10, 1), slot(1, 40)), (range(14, 6), slot(1, 44))]);
    let mut unmerged = Vec::new();
    runs.note_unmerged(range(0, 16), &mut unmerged);
    assert_eq!(unmerged, [slot(1, 40), slot(1, 44), slot(1, 45)]);
    assert!(runs.is_stable_mapped(Pfn(14)) && runs.share_of(Pfn(14)).is_none());
    // Merged again: what is mapped there gives up its shares.
    runs.note_merged(range(15, 2), slot(2, 0));
    assert_eq!(released(&mut runs), [slot(1, 46)]);
    runs.note_discarded(range(0, 100));
    assert_eq!(
        released(&mut runs),
        [slot(2, 0), slot(2, 1), slot(1, 47), slot(1, 48), slot(1, 49)]
    );
    assert_eq!((runs.merged_pages(), runs.mappings()), (0, 1));
}

#[test]
fn neighbours_with_neighbouring_slots_are_one_mapping() {
    let mut runs = registry(vec![range(0, 100), range(100, 100)], 1000);
    assert_eq!(runs.mappings(), 2);
    runs.note_merged(range(50, 10), slot(0, 0));
    assert_eq!(runs.mappings(), 4);
    runs.note_merged(range(60, 10), slot(0, 10));
    assert_eq!(runs.mappings(), 4);
    runs.note_merged(range(70, 10), slot(0, 30));
    runs.note_merged(range(80, 10), slot(1, 40));
    assert_eq!(runs.mappings(), 6);
    // To the right, but not across regions.
    runs.note_merged(range(20, 10), slot(2, 10));
    assert_eq!(runs.mappings(), 8);
    runs.note_merged(range(10, 10), slot(2, 0));
    assert_eq!(runs.mappings(), 8);
    runs.note_merged(range(100, 10), slot(1, 60));
    runs.note_merged(range(90, 10), slot(1, 50));
    assert_eq!(runs.mappings(), 8);
    let mapped: Vec<_> = runs.stable_mapped(range(0, 200)).map(|(part, _)| part).collect();
    assert_eq!(
        mapped,
        [range(10, 20), range(50, 20), range(70, 10), range(80, 20), range(100, 10)]
    );
}

#[test]
fn short_runs_leave_mappings_to_long_ones_and_those_to_discards() {
    let mut runs = registry(vec![range(0, 1 << 20)], 800);
    let merge = |runs: &mut MergedRuns, pages: u64| {
        let mut merged = 0;
        for index in 0..2000 {
            let range = range((pages << 12) + index * 2 * pages + 1, pages);
            let first = slot(0, index as u32 * 100);
            if runs.may_map(range, first) {
                runs.note_merged(range, first);
                merged += 1;
            }
        }
        merged
    };
    assert_eq!((merge(&mut runs, 1), runs.mappings()), (149, 299));
    assert_eq!((merge(&mut runs, 7), runs.mappings()), (0, 299));
    assert_eq!((merge(&mut runs, 8), runs.mappings()), (150, 599));
    assert_eq!((merge(&mut runs, 64), runs.mappings()), (0, 599));
    // Where no mapping more is needed there is no bound: in the place of others, and in
    // continuation of one.
    assert!(runs.may_map(range(4097, 1), slot(9, 9)));
    let end = (8 << 12) + 9;
    assert!(!runs.may_map(range(end, 1), slot(0, 9)) && runs.may_map(range(end, 1), slot(0, 8)));
    // Discards go on in the middle of a run until the last mappings, which are for whole huge
    // pages.
    let huge = range(600 << 9, 512 * 300);
    runs.note_merged(huge, slot(1, 0));
    let mut discarded = 0;
    for page in (huge.start.0 + 1..huge.end().0).step_by(2) {
        match runs.judge(range(page, 1)) {
            Verdict::Replace => {
                runs.note_discarded(range(page, 1));
                discarded += 1;
            }
            verdict => assert_eq!(verdict, Verdict::Keep),
        }
    }
    // The last one takes one border only.
    assert_eq!((discarded, runs.mappings()), (50, 700));
    assert_eq!(runs.judge(range((700 << 9) + 1, 513)), Verdict::Replace);
    runs.note_discarded(range((700 << 9) + 1, 513));
    assert_eq!(runs.judge(range(0, 1 << 20)), Verdict::Replace);
    runs.note_discarded(range(0, 1 << 20));
    assert_eq!((runs.mappings(), runs.judge(range(0, 1 << 20))), (1, Verdict::Ordinary));
}

#[test]
fn what_is_brought_back_takes_no_mappings_from_what_is_merged() {
    let mut runs = registry(vec![range(0, 1 << 16)], 800);
    runs.note_merged(range(0, 1 << 16), slot(0, 0));
    let single = (0..1 << 16).step_by(10).map(|page| range(page + 5, 1));
    let mut brought_back = 0;
    for page in single {
        if runs.may_bring_back(page) {
            runs.note_brought_back(page);
            brought_back += 1;
        }
    }
    // A quarter of what is for merging. The last one, at the end of the run, took one border only.
    assert_eq!((brought_back, runs.mappings()), (75, 150));
    assert_eq!(runs.returns(), Returns { brought_back_pages: 75, ..Returns::default() });
    // What needs no mapping more: several in one, or the end of a run.
    assert!(runs.may_bring_back(range(5, 11)) && !runs.may_bring_back(range(7000, 1)));
    assert_eq!(released(&mut runs).len(), 75);
    // Merged again with the same pages as before, it is part of a run again, which the count does
    // not know for sure.
    runs.note_merged(range(5, 1), slot(0, 5));
    assert_eq!((runs.returns().remerged_pages, runs.mappings()), (1, 149));
    assert_eq!(runs.stable_mapped(range(0, 100)).next(), Some((range(0, 15), slot(0, 0))));
}

#[test]
fn mappings_that_others_take_count() {
    let mut runs = registry(vec![range(0, 100)], 40);
    assert!(runs.may_map(range(10, 10), slot(0, 0)));
    runs.set_other_mappings(30);
    assert!(!runs.may_map(range(10, 10), slot(0, 0)));
}

#[test]
fn memories_of_one_process_share_the_bound() {
    let of_process = Arc::<AtomicU64>::default();
    let mut runs =
        [0, 1].map(|_| MergedRuns::new(vec![range(0, 1000)], 40, Arc::clone(&of_process)));
    let mut merged = [0, 0];
    for place in 0..40_u32 {
        for (runs, merged) in runs.iter_mut().zip(&mut merged) {
            let place = range(u64::from(place) * 20 + 1, 10);
            if runs.may_map(place, slot(0, place.start.0 as u32)) {
                runs.note_merged(place, slot(0, place.start.0 as u32));
                *merged += 1;
            }
        }
    }
    assert_eq!((merged, of_process.load(Ordering::Relaxed)), ([7, 7], 28));
    let [first, mut second] = runs;
    drop(first);
    assert_eq!(of_process.load(Ordering::Relaxed), 14);
    assert!(second.may_map(range(900, 10), slot(0, 0)));
    second.note_discarded(range(0, 1000));
    assert_eq!(of_process.load(Ordering::Relaxed), 0);
}

#[test]
fn what_a_discard_has_put_there_is_untracked_until_told() {
    let mut runs = registry(vec![range(0, 50), range(50, 50)], 1000);
    runs.note_merged(range(10, 80 - 40), slot(0, 0));
    runs.note_merged(range(50, 40), slot(0, 40));
    runs.note_discarded(range(20, 10));
    runs.note_discarded(range(30, 20));
    runs.note_discarded(range(50, 10));
    // Whole runs, but none across regions.
    assert_eq!(runs.untracked(range(25, 1)), [range(20, 30)]);
    assert_eq!(runs.untracked(range(0, 100)), [range(20, 30), range(50, 10)]);
    assert_eq!(runs.untracked(range(0, 20)), []);
    let before = runs.mappings();
    runs.note_tracked(range(22, 4));
    assert_eq!(runs.mappings(), before + 2);
    assert_eq!(runs.untracked(range(0, 50)), [range(20, 2), range(26, 24)]);
    // Merged memory is the merging thread's own business.
    runs.note_merged(range(26, 24), slot(3, 0));
    assert_eq!(runs.untracked(range(0, 50)), [range(20, 2)]);
    runs.note_tracked(range(0, 100));
    assert_eq!(runs.untracked(range(0, 100)), []);
}

#[test]
fn counting_replaces_what_was_assumed() {
    let mut runs = registry(vec![range(10, 50), range(60, 40)], 64);
    runs.note_merged(range(20, 10), slot(0, 0));
    runs.note_discarded(range(20, 10));
    runs.note_tracked(range(0, 100));
    assert_eq!(runs.mappings(), 4);
    assert!(runs.is_recount_due());
    // A region's first page is no border, and neither is one outside.
    runs.set_borders([5, 10, 42, 60, 100].map(Pfn));
    assert_eq!(runs.mappings(), 3);
    assert!(!runs.is_recount_due());
}

/// The plainest model: each page by itself.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Page {
    mapped: Option<StableSlot>,
    shares: bool,
    untracked: bool,
    moved: bool,
    brought_back: bool,
    /// Number of the mapping that it lies in. The kernel's least generous joining: each mapping
    /// gets a page of its own as soon as it is made, so that only a new one is ever joined with a
    /// neighbour, and with one only.
    mapping: u64,
}

#[derive(Clone, Debug)]
enum Step {
    Merge { start: u64, pages: u64, first: StableSlot },
    Break { page: u64 },
    Discard { start: u64, pages: u64 },
    Unmerge { start: u64, pages: u64 },
    Moved { start: u64, pages: u64 },
    BringBack { start: u64, pages: u64 },
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
            let Step::Discard { start, pages } = within_region(start, pages) else { unreachable!() };
            Step::Merge { start, pages, first: slot(start, kind) }
        }),
        2 => (0..PAGES).prop_map(|page| Step::Break { page }),
        3 => place().prop_map(|(start, pages)| within_region(start, pages)),
        1 => place().prop_map(|(start, pages)| Step::Unmerge { start, pages }),
        1 => place().prop_map(|(start, pages)| {
            let Step::Discard { start, pages } = within_region(start, pages) else { unreachable!() };
            Step::Moved { start, pages }
        }),
        2 => place().prop_map(|(start, pages)| {
            let Step::Discard { start, pages } = within_region(start, pages) else { unreachable!() };
            Step::BringBack { start, pages }
        }),
        1 => place().prop_map(|(start, pages)| Step::Empty { start, pages }),
        2 => place().prop_map(|(start, pages)| {
            let Step::Discard { start, pages } = within_region(start, pages) else { unreachable!() };
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

struct Model {
    pages: Vec<Page>,
    next_mapping: u64,
    released: Vec<StableSlot>,
    returns: Returns,
}

impl Model {
    fn new() -> Self {
        let region = |page: u64| u64::from(page >= REGIONS[1].0);
        let pages =
            (0..PAGES).map(|page| Page { mapping: region(page), ..Page::default() }).collect();
        Self { pages, next_mapping: 2, released: Vec::new(), returns: Returns::default() }
    }

    /// Takes shares away; returns their slots in the pages' order.
    fn release(&mut self, start: u64, pages: u64) -> Vec<StableSlot> {
        let pages = &mut self.pages[start as usize..(start + pages).min(PAGES) as usize];
        let release =
            |page: &mut Page| std::mem::take(&mut page.shares).then_some(page.mapped).flatten();
        pages.iter_mut().filter_map(release).collect()
    }

    fn replace(&mut self, start: u64, pages: u64, first: Option<StableSlot>) {
        self.split_at(start);
        self.split_at(start + pages);
        let mapping = self.next_mapping;
        self.next_mapping += 1;
        for index in 0..pages {
            let mapped = first.map(|first| first.offset(index as u32));
            let page = Page {
                mapped,
                shares: mapped.is_some(),
                untracked: mapped.is_none(),
                mapping,
                ..Page::default()
            };
            let before = std::mem::replace(&mut self.pages[(start + index) as usize], page);
            self.returns.remerged_pages += u64::from(before.brought_back && mapped.is_some());
        }
        let joins = |left: u64, right: u64| {
            let same_region =
                REGIONS.iter().any(|(first, size)| *first < right && right < first + size);
            same_region && {
                let (left, right) = (self.pages[left as usize], self.pages[right as usize]);
                match (left.mapped, right.mapped) {
                    (Some(left), Some(right)) => {
                        left.segment == right.segment && left.index + 1 == right.index
                    }
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
            let brought_back = place.brought_back;
            *place =
                Page { untracked: true, moved: true, brought_back, mapping, ..Page::default() };
        }
    }

    /// The same for pages that were merged and written to, or are around such.
    fn bring_back(&mut self, start: u64, pages: u64) {
        for page in &mut self.pages[start as usize..(start + pages) as usize] {
            page.brought_back |= page.mapped.is_some();
            self.returns.brought_back_pages += u64::from(page.mapped.is_some());
        }
        self.move_here(start, pages);
    }

    /// Makes the pages behind `border` another mapping than those before it.
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

fn check(runs: &MergedRuns, model: &Model) -> Result<(), TestCaseError> {
    let everything = range(0, PAGES);
    let mut end = 0;
    for (part, first) in runs.stable_mapped(everything) {
        prop_assert!(part.start.0 >= end && !part.is_empty(), "runs overlap");
        prop_assert!(
            REGIONS.iter().any(|region| range(region.0, region.1).intersection(part) == part)
        );
        end = part.end().0;
        for index in 0..part.pages {
            let page = model.pages[(part.start.0 + index) as usize];
            prop_assert_eq!(page.mapped, Some(first.offset(index as u32)));
        }
    }
    let mut untracked = vec![false; PAGES as usize];
    for part in runs.untracked(everything) {
        untracked[part.start.0 as usize..part.end().0 as usize].fill(true);
    }
    for (number, page) in model.pages.iter().enumerate() {
        let pfn = Pfn(number as u64);
        prop_assert_eq!(runs.is_stable_mapped(pfn), page.mapped.is_some());
        prop_assert_eq!(runs.share_of(pfn), page.mapped.filter(|_| page.shares));
        prop_assert_eq!(untracked[number], page.untracked, "page {}", number);
    }
    prop_assert_eq!(
        runs.merged_pages(),
        model.pages.iter().filter(|page| page.shares).count() as u64
    );
    prop_assert_eq!(runs.returns(), model.returns);
    prop_assert!(model.mappings() <= runs.mappings(), "{} > {}", model.mappings(), runs.mappings());
    Ok(())
}

proptest! {
    #[test]
    fn it_says_what_a_page_by_page_model_says(
        steps in prop::collection::vec(step(), 1..80),
        max_mappings in 20..80_u64,
    ) {
        let regions = REGIONS.iter().map(|(first, size)| range(*first, *size)).collect();
        let mut runs = registry(regions, max_mappings);
        let mut model = Model::new();
        for step in steps {
            match step {
                Step::Merge { start, pages, first } => {
                    if !runs.may_map(range(start, pages), first) {
                        prop_assert!(runs.mappings() + 2 > (max_mappings - max_mappings / 4) / 2);
                        continue;
                    }
                    runs.note_merged(range(start, pages), first);
                    let released = model.release(start, pages);
                    model.released.extend(released);
                    model.replace(start, pages, Some(first));
                }
                Step::Break { page } => {
                    let expected = model.release(page, 1).first().copied();
                    prop_assert_eq!(runs.note_broken(Pfn(page)), expected);
                }
                Step::Discard { start, pages } => {
                    let stable = model.pages[start as usize..(start + pages) as usize]
                        .iter()
                        .any(|page| page.mapped.is_some());
                    match runs.judge(range(start, pages)) {
                        Verdict::Ordinary => prop_assert!(!stable),
                        Verdict::Keep => {
                            prop_assert!(stable && runs.mappings() + 2 > max_mappings - max_mappings / 8);
                        }
                        Verdict::Replace => {
                            prop_assert!(stable);
                            runs.note_discarded(range(start, pages));
                            let released = model.release(start, pages);
                            model.released.extend(released);
                            model.replace(start, pages, None);
                        }
                    }
                }
                Step::Unmerge { start, pages } => {
                    let mut released = Vec::new();
                    runs.note_unmerged(range(start, pages), &mut released);
                    prop_assert_eq!(released, model.release(start, pages));
                }
                Step::Moved { start, pages } => {
                    let mut released = Vec::new();
                    runs.note_moved_here(range(start, pages), &mut released);
                    prop_assert_eq!(released, model.release(start, pages));
                    model.move_here(start, pages);
                }
                Step::BringBack { start, pages } => {
                    if !runs.may_bring_back(range(start, pages)) {
                        prop_assert!(runs.mappings() + 2 > (max_mappings - max_mappings / 4) / 4);
                        continue;
                    }
                    runs.note_brought_back(range(start, pages));
                    let released = model.release(start, pages);
                    model.released.extend(released);
                    model.bring_back(start, pages);
                }
                Step::Join { start, pages } => {
                    if runs.stable_mapped(range(start, pages)).next().is_some() {
                        continue;
                    }
                    let mappings = runs.mappings_in(range(start, pages));
                    let (Some(first), Some(last)) = (mappings.first(), mappings.last()) else { continue };
                    let (start, end) = (first.start.0, last.end().0);
                    // Neighbours, each of which is within one mapping.
                    let of = |page: u64| model.pages.get(page as usize).map(|page| page.mapping);
                    prop_assert!(mappings.windows(2).all(|pair| pair[0].end() == pair[1].start));
                    for mapping in &mappings {
                        let inside = mapping.start.0..mapping.end().0;
                        prop_assert!(inside.into_iter().all(|page| of(page) == of(mapping.start.0)));
                    }
                    let (before, joined) = (runs.mappings(), runs.returns().joined_mappings);
                    runs.note_joined(range(start, end - start));
                    model.move_here(start, end - start);
                    prop_assert_eq!(runs.mappings() + mappings.len() as u64, before + 1);
                    model.returns.joined_mappings = joined + mappings.len() as u64 - 1;
                }
                Step::Empty { start, pages } => {
                    runs.note_emptied(range(start, pages));
                    let end = (start + pages).min(PAGES);
                    model.pages[start as usize..end as usize]
                        .iter_mut()
                        .for_each(|page| page.brought_back = false);
                }
                Step::Track { start, pages } => {
                    runs.note_tracked(range(start, pages));
                    model.track(start, pages);
                }
                Step::Take => {
                    prop_assert_eq!(released(&mut runs), std::mem::take(&mut model.released));
                }
            }
            check(&runs, &model)?;
        }
        prop_assert_eq!(released(&mut runs), model.released);
    }
}
