use std::collections::BTreeSet;

use proptest::prelude::*;

use super::*;

fn range(start: u64, pages: u64) -> PageRange {
    PageRange::new(Pfn(start), pages)
}

/// Regions with a gap, adjoining ones, of odd sizes, and an empty one.
fn regions() -> Vec<PageRange> {
    vec![range(3, 70), range(100, 64), range(164, 1), range(165, 0), range(300, 201)]
}

fn pages(ranges: impl Iterator<Item = PageRange>) -> BTreeSet<u64> {
    ranges.flat_map(|range| range.start.0..range.end().0).collect()
}

fn all() -> BTreeSet<u64> {
    pages(regions().into_iter())
}

#[derive(Clone, Debug)]
enum Step {
    Insert(PageRange),
    Remove(PageRange),
    Words(u64, Vec<u64>),
    Union(Vec<PageRange>),
    Clear,
    Fill,
}

fn any_range() -> impl Strategy<Value = PageRange> {
    prop_oneof![
        10 => (0..520_u64, 0..200_u64).prop_map(|(start, pages)| range(start, pages)),
        1 => Just(range(u64::MAX - 3, 9)),
        1 => Just(range(0, u64::MAX)),
    ]
}

fn any_step() -> impl Strategy<Value = Step> {
    let ranges = || prop::collection::vec(any_range(), 0..6);
    let word = prop_oneof![Just(0), Just(u64::MAX), any::<u64>()];
    let first = prop_oneof![0..520_u64, Just(3), Just(100), Just(300), Just(364)];
    prop_oneof![
        4 => any_range().prop_map(Step::Insert),
        4 => any_range().prop_map(Step::Remove),
        2 => (first, prop::collection::vec(word, 0..5))
            .prop_map(|(first, words)| Step::Words(first, words)),
        2 => ranges().prop_map(Step::Union),
        1 => Just(Step::Clear),
        1 => Just(Step::Fill),
    ]
}

fn other_set(layout: &[PageRange], ranges: &[PageRange]) -> PageBitmap {
    let mut set = PageBitmap::new(layout);
    for range in ranges {
        set.insert(*range);
    }
    set
}

/// Applies a step to the set and to its model.
fn take(step: &Step, layout: &[PageRange], set: &mut PageBitmap, model: &mut BTreeSet<u64>) {
    let all = all();
    match step {
        Step::Insert(range) => {
            set.insert(*range);
            model.extend(all.iter().filter(|page| range.contains(Pfn(**page))));
        }
        Step::Remove(range) => {
            set.remove(*range);
            model.retain(|page| !range.contains(Pfn(*page)));
        }
        Step::Words(first, words) => {
            set.insert_words(Pfn(*first), words.iter().copied());
            let bit = |page: &&u64| {
                let index = page.checked_sub(*first)?;
                Some(words.get((index / 64) as usize)? >> (index % 64) & 1 == 1)
            };
            model.extend(all.iter().filter(|page| bit(page) == Some(true)));
        }
        Step::Union(ranges) => {
            let other = other_set(layout, ranges);
            set.union(&other);
            model.extend(pages(other.ranges()).intersection(&all));
        }
        Step::Clear => {
            set.clear();
            model.clear();
        }
        Step::Fill => {
            set.fill();
            model.extend(all);
        }
    }
}

proptest! {
    #[test]
    fn a_set_is_a_set(
        steps in prop::collection::vec((any_step(), any::<bool>()), 0..25),
        window in any_range(),
    ) {
        let mut set = PageBitmap::new(&regions());
        let mut model = BTreeSet::new();
        for (step, same_layout) in &steps {
            // A set of other regions, which contain all pages.
            let other_layout = [range(0, 120), range(120, 2000)];
            let layout = if *same_layout { regions() } else { other_layout.to_vec() };
            take(step, &layout, &mut set, &mut model);
            prop_assert_eq!(&pages(set.ranges()), &model, "after {:?}", step);
            prop_assert_eq!(set.count(), model.len() as u64);
            prop_assert_eq!(set.is_empty(), model.is_empty());
        }
        for page in 0..600 {
            prop_assert_eq!(set.contains(Pfn(page)), model.contains(&page), "page {}", page);
        }
        // Ranges ascend, are not empty, do not cross regions, and are as long as possible.
        let ranges: Vec<_> = set.ranges().collect();
        for found in &ranges {
            prop_assert!(!found.is_empty());
            prop_assert!(regions().iter().any(|region| region.intersection(*found) == *found));
        }
        for pair in ranges.windows(2) {
            let new_region = regions().iter().any(|region| region.start == pair[1].start);
            let touches = pair[0].end() == pair[1].start;
            prop_assert!(pair[0].end() < pair[1].start || (touches && new_region));
        }
        // The same for a part.
        let inside: BTreeSet<u64> =
            model.iter().copied().filter(|page| window.contains(Pfn(*page))).collect();
        prop_assert_eq!(&pages(set.ranges_in(window)), &inside);
        prop_assert_eq!(set.count_in(window), inside.len() as u64);
        prop_assert_eq!(set.next_range(window), set.ranges_in(window).next());
        // The same as bits. No list can be as long as the longest windows.
        let short = range(window.start.0, window.pages.min(400));
        for window in [short, range(300, 201), range(364, 70)] {
            let mut words = vec![u64::MAX; window.pages.div_ceil(64) as usize];
            let any = set.copy_words(window, &mut words);
            let mut copy = PageBitmap::new(&[window]);
            copy.insert_words(window.start, words.iter().copied());
            prop_assert_eq!(pages(copy.ranges()), pages(set.ranges_in(window)));
            prop_assert_eq!(any, words.iter().any(|word| *word != 0));
            let ones: u32 = words.iter().map(|word| word.count_ones()).sum();
            prop_assert_eq!(u64::from(ones), set.count_in(window));
        }
    }
}

#[test]
fn a_full_set_has_all_pages_and_no_other() {
    let set = PageBitmap::full(&regions());
    assert_eq!(pages(set.ranges()), all());
    assert_eq!(
        set.ranges().collect::<Vec<_>>(),
        [range(3, 70), range(100, 64), range(164, 1), range(300, 201)]
    );
    assert!(!set.contains(Pfn(73)) && !set.contains(Pfn(u64::MAX)));
}

#[test]
fn sets_of_the_same_pages_are_equal_whatever_their_history() {
    let mut one = PageBitmap::full(&regions());
    one.remove(range(0, 120));
    let mut other = PageBitmap::new(&regions());
    other.insert(range(120, 10_000));
    assert_eq!(one, other);
}

#[test]
#[should_panic(expected = "ascending order")]
fn regions_that_overlap_are_refused() {
    let _ = PageBitmap::new(&[range(0, 10), range(9, 10)]);
}
