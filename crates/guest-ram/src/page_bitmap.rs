//! A set of pages of guest memory.

use ebb_abi::{PageRange, Pfn};

use bits::Bits;

mod bits;

/// A set of pages of guest memory: a bit for each page, so that its size does not depend on its
/// content.
///
/// It never contains pages outside the regions for which it was created: inserting them has no
/// effect.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PageBitmap {
    /// In ascending order.
    regions: Vec<Region>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Region {
    pages: PageRange,
    bits: Bits,
}

impl PageBitmap {
    /// An empty set of pages of these regions. They must be in ascending order and must not
    /// overlap; they may adjoin.
    ///
    /// # Panics
    /// If the regions violate this.
    pub fn new(regions: &[PageRange]) -> Self {
        assert!(
            regions.windows(2).all(|pair| pair[0].end() <= pair[1].start),
            "regions of pages must be in ascending order and must not overlap"
        );
        let region = |&pages: &PageRange| Region { pages, bits: Bits::new(pages.pages) };
        Self { regions: regions.iter().map(region).collect() }
    }

    /// The set of all pages of these regions.
    ///
    /// # Panics
    /// As [`new`](Self::new).
    pub fn full(regions: &[PageRange]) -> Self {
        let mut set = Self::new(regions);
        set.fill();
        set
    }

    /// The regions whose pages the set can contain.
    pub fn regions(&self) -> impl Iterator<Item = PageRange> {
        self.regions.iter().map(|region| region.pages)
    }

    /// Adds the pages of the range that are in one of the regions.
    pub fn insert(&mut self, range: PageRange) {
        self.for_each_part(range, Bits::set);
    }

    /// Removes pages.
    pub fn remove(&mut self, range: PageRange) {
        self.for_each_part(range, Bits::clear);
    }

    /// Adds pages by their bits: the lowest bit of the first word is page `first`. Pages outside of
    /// the regions are ignored.
    ///
    /// Fastest if `first` is a multiple of 64 pages behind the start of its region, as with the
    /// dirty bitmap of a memory slot.
    pub fn insert_words(&mut self, first: Pfn, words: impl IntoIterator<Item = u64>) {
        let mut start = first.0;
        for word in words {
            if word != 0 {
                self.insert_word(start, word);
            }
            start = start.saturating_add(64);
        }
    }

    fn insert_word(&mut self, start: u64, word: u64) {
        let index = self.first_region(Pfn(start));
        let whole = self.regions.get_mut(index).filter(|region| {
            start >= region.pages.start.0
                && (start - region.pages.start.0).is_multiple_of(64)
                && start.saturating_add(64) <= region.pages.end().0
        });
        if let Some(region) = whole {
            region.bits.set_word((start - region.pages.start.0) / 64, word);
            return;
        }
        let mut rest = word;
        while rest != 0 {
            let bit = u64::from(rest.trailing_zeros());
            self.insert(PageRange::new(Pfn(start.saturating_add(bit)), 1));
            rest &= rest - 1;
        }
    }

    /// Replaces `words` by bits that indicate which pages of `window` are in the set, the lowest
    /// bit of the first word being its first page; bits behind its last page are 0. Returns whether
    /// any bit is 1.
    ///
    /// Fastest if `window` lies in one region and begins a multiple of 64 pages behind its start.
    ///
    /// # Panics
    /// If the number of words differs from that of the window.
    pub fn copy_words(&self, window: PageRange, words: &mut [u64]) -> bool {
        assert_eq!(words.len() as u64, window.pages.div_ceil(64), "words for {window}");
        let region = self.regions.get(self.first_region(window.start)).filter(|region| {
            window.intersection(region.pages) == window
                && (window.start.0 - region.pages.start.0).is_multiple_of(64)
        });
        if let Some(region) = region {
            let (first, end) = region.bits_of(window);
            return region.bits.copy_words(first, end, words);
        }
        let mut bits = Bits::new(window.pages);
        for found in self.ranges_in(window) {
            let first = found.start.0 - window.start.0;
            bits.set(first, first + found.pages);
        }
        bits.copy_words(0, window.pages, words)
    }

    /// Whether the page is in the set.
    pub fn contains(&self, page: Pfn) -> bool {
        self.regions.get(self.first_region(page)).is_some_and(|region| {
            region.pages.contains(page) && region.bits.get(page.0 - region.pages.start.0)
        })
    }

    /// Number of pages in the set.
    pub fn count(&self) -> u64 {
        self.regions.iter().map(|region| region.bits.count(0, region.pages.pages)).sum()
    }

    /// Number of pages of `range` that are in the set.
    pub fn count_in(&self, range: PageRange) -> u64 {
        let inside = self.regions[self.first_region(range.start)..]
            .iter()
            .take_while(|region| region.pages.start < range.end());
        inside
            .map(|region| {
                let (first, end) = region.bits_of(range);
                region.bits.count(first, end)
            })
            .sum()
    }

    /// Whether no page is in the set.
    pub fn is_empty(&self) -> bool {
        self.regions.iter().all(|region| region.bits.is_clear())
    }

    /// The first run of pages of the set inside `within`: as long as possible, up to the end of its
    /// region.
    pub fn next_range(&self, within: PageRange) -> Option<PageRange> {
        self.regions[self.first_region(within.start)..]
            .iter()
            .take_while(|region| region.pages.start < within.end())
            .find_map(|region| {
                let (first, end) = region.bits_of(within);
                let (start, end) = region.bits.next_run(first, end)?;
                Some(PageRange::new(Pfn(region.pages.start.0 + start), end - start))
            })
    }

    /// The pages inside `within` as ranges in ascending order; a range that crosses regions is
    /// split.
    pub fn ranges_in(&self, within: PageRange) -> impl Iterator<Item = PageRange> {
        let mut rest = within;
        std::iter::from_fn(move || {
            let found = self.next_range(rest)?;
            rest = PageRange::new(found.end(), rest.end().0 - found.end().0);
            Some(found)
        })
    }

    /// The pages as ranges in ascending order; a range that crosses regions is split.
    pub fn ranges(&self) -> impl Iterator<Item = PageRange> {
        self.ranges_in(PageRange::new(Pfn(0), u64::MAX))
    }

    /// Adds the pages of another set.
    pub fn union(&mut self, other: &Self) {
        if !self.regions().eq(other.regions()) {
            other.ranges().for_each(|range| self.insert(range));
            return;
        }
        for (own, others) in self.regions.iter_mut().zip(&other.regions) {
            own.bits.add(&others.bits);
        }
    }

    /// Removes all pages.
    pub fn clear(&mut self) {
        self.for_each_part(PageRange::new(Pfn(0), u64::MAX), Bits::clear);
    }

    /// Adds all pages of the regions.
    pub fn fill(&mut self) {
        self.for_each_part(PageRange::new(Pfn(0), u64::MAX), Bits::set);
    }

    /// Index of the first region that does not end at or before `page`.
    fn first_region(&self, page: Pfn) -> usize {
        self.regions.partition_point(|region| region.pages.end() <= page)
    }

    /// Calls `change` for each region that `range` overlaps, with the first of its bits and the one
    /// behind the last.
    fn for_each_part(&mut self, range: PageRange, change: impl Fn(&mut Bits, u64, u64)) {
        let index = self.first_region(range.start);
        for region in &mut self.regions[index..] {
            if region.pages.start >= range.end() {
                break;
            }
            let (first, end) = region.bits_of(range);
            change(&mut region.bits, first, end);
        }
    }
}

impl Region {
    /// Number of the first bit of the region's pages in `range`, and of the bit behind the last.
    fn bits_of(&self, range: PageRange) -> (u64, u64) {
        let inside = self.pages.intersection(range);
        if inside.is_empty() {
            return (0, 0);
        }
        let first = inside.start.0 - self.pages.start.0;
        (first, first + inside.pages)
    }
}

#[cfg(test)]
mod tests;
