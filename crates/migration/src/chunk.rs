//! Splits the pages of a chunk by memory region.

use ebb_abi::PageRange;

/// Splits ranges into one slice per region. They must be in ascending order, and none may cross a
/// region's border.
pub(crate) fn by_region<'p>(
    regions: &'p [PageRange],
    pages: &'p [PageRange],
) -> impl Iterator<Item = &'p [PageRange]> {
    let mut rest = pages;
    std::iter::from_fn(move || {
        let first = rest.first()?;
        let region = regions.iter().find(|region| region.contains(first.start));
        let end = region.map_or(first.end(), |region| region.end());
        let (here, behind) = rest.split_at(rest.partition_point(|range| range.start < end).max(1));
        rest = behind;
        Some(here)
    })
}

/// The range from the start of the first range to the end of the last.
pub(crate) fn span(pages: &[PageRange]) -> PageRange {
    match pages {
        [first, .., last] => PageRange::new(first.start, last.end().0 - first.start.0),
        [only] => *only,
        [] => PageRange::default(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ebb_abi::Pfn;

    fn range(start: u64, pages: u64) -> PageRange {
        PageRange::new(Pfn(start), pages)
    }

    #[test]
    fn ranges_stay_together_within_a_region() {
        let regions = [range(0, 8), range(8, 8), range(32, 8)];
        let pages = [range(1, 2), range(7, 1), range(8, 3), range(33, 1), range(39, 1)];
        let parts: Vec<_> = by_region(&regions, &pages).collect();
        assert_eq!(parts, [&pages[..2], &pages[2..3], &pages[3..]]);
        let spans: Vec<_> = parts.into_iter().map(span).collect();
        assert_eq!(spans, [range(1, 7), range(8, 3), range(33, 7)]);
        assert_eq!(by_region(&regions, &[]).count(), 0);
    }
}
