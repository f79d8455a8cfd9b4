//! The parts of saved memory: regions, and extents with data, in lists of bounded length.

use serde::{Deserialize, Serialize};

/// Version of [`RamImage`](super::RamImage) that this crate writes, and the only one that it reads.
pub const RAM_IMAGE_VERSION: u32 = 1;

/// Bytes of guest memory that share a checksum: small enough to locate damage and to verify
/// in pieces, large enough that the checksums of a terabyte fit into some hundred kilobytes.
pub const CHUNK_BYTES: u64 = 64 << 20;

/// Maximum number of extents; further ones are merged across the smallest gaps. Each becomes a
/// mapping of the restored memory with another one behind it, and a process has 65530 by default
/// (`vm.max_map_count`).
pub const MAX_EXTENTS: usize = 4096;

/// A saved region.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ImageRegion {
    /// Guest-physical address of the first byte.
    pub start: u64,
    /// Size in bytes.
    pub size_bytes: u64,
}

/// A part of the memory with data; all others read as zeros.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Extent {
    /// RAM offset of the first byte.
    pub offset_bytes: u64,
    /// Size in bytes.
    pub size_bytes: u64,
}

impl Extent {
    /// RAM offset of the byte behind the last one; saturates.
    pub const fn end_bytes(&self) -> u64 {
        self.offset_bytes.saturating_add(self.size_bytes)
    }
}

/// Collects extents in ascending order.
#[derive(Debug, Default)]
pub(crate) struct ExtentList {
    extents: Vec<Extent>,
}

impl ExtentList {
    /// Adds data behind all data added before.
    pub(crate) fn push(&mut self, offset_bytes: u64, size_bytes: u64) {
        match self.extents.last_mut() {
            Some(last) if last.end_bytes() == offset_bytes => last.size_bytes += size_bytes,
            _ => self.extents.push(Extent { offset_bytes, size_bytes }),
        }
        // A larger bound in between, so that the choice of gaps is good and its cost small.
        if self.extents.len() >= 4 * MAX_EXTENTS {
            merge_across_gaps(&mut self.extents, 2 * MAX_EXTENTS, |_, _| true);
        }
    }

    /// At most [`MAX_EXTENTS`] extents that cover all added data.
    pub(crate) fn finish(mut self) -> Vec<Extent> {
        merge_across_gaps(&mut self.extents, MAX_EXTENTS, |_, _| true);
        self.extents
    }
}

/// Merges neighbours for which `mergeable` holds until at most `limit` extents are left, those with
/// the smallest gaps first. `extents` are in ascending order.
pub(crate) fn merge_across_gaps(
    extents: &mut Vec<Extent>,
    limit: usize,
    mergeable: impl Fn(&Extent, &Extent) -> bool,
) {
    let excess = extents.len().saturating_sub(limit);
    if excess == 0 {
        return;
    }
    let mut gaps: Vec<(u64, usize)> = extents
        .windows(2)
        .enumerate()
        .filter(|(_, pair)| mergeable(&pair[0], &pair[1]))
        .map(|(index, pair)| (pair[1].offset_bytes - pair[0].end_bytes(), index + 1))
        .collect();
    if excess < gaps.len() {
        gaps.select_nth_unstable(excess);
        gaps.truncate(excess);
    }
    let mut vanish = vec![false; extents.len()];
    for (_, index) in gaps {
        vanish[index] = true;
    }
    let mut index = 0;
    extents.dedup_by(|next, merged| {
        index += 1;
        if vanish[index] {
            merged.size_bytes = next.end_bytes() - merged.offset_bytes;
        }
        vanish[index]
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn extents() -> impl Strategy<Value = Vec<Extent>> {
        prop::collection::vec((0..9_u64, 1..9_u64), 0..40).prop_map(|steps| {
            let mut end = 0;
            steps
                .into_iter()
                .map(|(gap, size)| {
                    let extent = Extent { offset_bytes: end + gap, size_bytes: size };
                    end = extent.end_bytes();
                    extent
                })
                .collect()
        })
    }

    fn gaps(extents: &[Extent]) -> Vec<u64> {
        extents.windows(2).map(|pair| pair[1].offset_bytes - pair[0].end_bytes()).collect()
    }

    proptest! {
        #[test]
        fn the_smallest_gaps_vanish_and_no_more_than_needed(
            before in extents(),
            limit in 1..40_usize,
        ) {
            let mut after = before.clone();
            merge_across_gaps(&mut after, limit, |_, _| true);
            prop_assert_eq!(after.len(), before.len().min(limit));
            let mut expected = gaps(&before);
            expected.sort_unstable();
            let excess = before.len().saturating_sub(limit);
            let mut left = gaps(&after);
            left.sort_unstable();
            prop_assert_eq!(left, expected.split_off(excess.min(expected.len())));
            for extent in &before {
                prop_assert!(after.iter().any(|merged| merged.offset_bytes <= extent.offset_bytes
                    && extent.end_bytes() <= merged.end_bytes()));
            }
        }

        #[test]
        fn borders_are_never_crossed(
            before in extents(),
            limit in 1..40_usize,
            border in 0..300_u64,
        ) {
            let mut after = before.clone();
            let same_side = |left: &Extent, right: &Extent| {
                (left.offset_bytes < border) == (right.offset_bytes < border)
            };
            merge_across_gaps(&mut after, limit, same_side);
            prop_assert!(after.len() <= limit.max(2));
            for extent in &before {
                prop_assert!(after.iter().any(|merged| merged.offset_bytes <= extent.offset_bytes
                    && extent.end_bytes() <= merged.end_bytes()
                    && same_side(merged, extent)));
            }
        }
    }

    #[test]
    fn a_list_keeps_its_bound_and_covers_everything() {
        let mut list = ExtentList::default();
        let pushed: Vec<_> =
            (0..50_000_u64).map(|index| index * 3 * 4096 + index / 25_000 * (1 << 30)).collect();
        for offset in &pushed {
            list.push(*offset, 4096);
            list.push(*offset + 4096, 4096);
        }
        let extents = list.finish();
        assert_eq!(extents.len(), MAX_EXTENTS);
        assert!(extents.windows(2).all(|pair| pair[0].end_bytes() < pair[1].offset_bytes));
        // The large gap in the middle is one of the remaining ones.
        assert!(extents.iter().all(|extent| extent.size_bytes < 1 << 30));
        let mut covering = extents.iter().peekable();
        for offset in pushed {
            while covering.next_if(|extent| extent.end_bytes() <= offset).is_some() {}
            assert!(covering.peek().is_some_and(|extent| extent.offset_bytes <= offset));
        }
    }
}
