//! What a machine's memory is used for, as a bar.
//!
//! The numbers come from a guest and can be any: each part takes at most what those before it have
//! left, so that the parts always add up to the machine's size.

use ebb_host_policy::Machine;

/// A use of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Part {
    /// What the guest cannot do without.
    InUse,
    /// Resident memory that it could give up: available, and not free.
    Cache,
    /// Free in the guest, and still held by the host.
    FreeHeld,
    /// Resident, but the guest has not said for what; or not even that is known.
    Unknown,
    /// Shared with other machines.
    Merged,
    /// Not resident: never used, or given back, or swapped out.
    Returned,
    /// In the balloon.
    Balloon,
}

impl Part {
    /// All parts, in their order in a bar.
    pub(super) const ALL: [Self; 7] = [
        Self::InUse,
        Self::Cache,
        Self::FreeHeld,
        Self::Unknown,
        Self::Merged,
        Self::Returned,
        Self::Balloon,
    ];

    /// What it looks like, so that a bar can be read without colours.
    pub(super) fn character(self) -> char {
        match self {
            Self::InUse => '#',
            Self::Cache => '+',
            Self::FreeHeld => '-',
            Self::Unknown => '?',
            Self::Merged => '=',
            Self::Returned => '.',
            Self::Balloon => 'o',
        }
    }

    /// Its name in the legend.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::InUse => "in use",
            Self::Cache => "cache",
            Self::FreeHeld => "free, held",
            Self::Unknown => "unknown",
            Self::Merged => "merged",
            Self::Returned => "returned",
            Self::Balloon => "balloon",
        }
    }
}

/// The sizes of a machine's parts in bytes, in the order of [`Part::ALL`]. Their sum is its size.
pub(super) fn parts(machine: &Machine, merged_bytes: u64) -> [u64; 7] {
    let mut left = machine.size_bytes;
    let mut take = |bytes: u64| {
        let taken = bytes.min(left);
        left -= taken;
        taken
    };
    let balloon = take(machine.ballooned_bytes());
    let merged = take(merged_bytes);
    let resident = machine.resident_bytes.map(&mut take);
    let rest = left;
    let said = machine.statistics.and_then(|said| Some((said.available_bytes?, said.free_bytes)));
    match (resident, said) {
        // Without resident memory there is nothing that could be divided.
        (None, _) => [0, 0, 0, rest, merged, 0, balloon],
        (Some(resident), None) => [0, 0, 0, resident, merged, rest, balloon],
        (Some(resident), Some((available, free))) => {
            // Merged memory is part of what the guest uses, and has its own place in the bar.
            let used = machine.outside_balloon_bytes().saturating_sub(available);
            let in_use = used.saturating_sub(merged).min(resident);
            let cache = available.saturating_sub(free.unwrap_or(0)).min(resident - in_use);
            [in_use, cache, resident - in_use - cache, 0, merged, rest, balloon]
        }
    }
}

/// Divides `width` cells by these sizes. Their sum is `width`, also without any size: then all are
/// of the fallback, an index.
pub(super) fn cells<const N: usize>(sizes: [u64; N], width: u16, fallback: usize) -> [u16; N] {
    let total: u128 = sizes.iter().map(|size| u128::from(*size)).sum();
    let mut cells = [0; N];
    if total == 0 {
        if let Some(cell) = cells.get_mut(fallback) {
            *cell = width;
        }
        return cells;
    }
    // Ends are rounded, not lengths: the last one is exact.
    let (mut sum, mut end) = (0, 0);
    for (cell, size) in cells.iter_mut().zip(sizes) {
        sum += u128::from(size);
        let next = (sum * u128::from(width) + total / 2) / total;
        let next = u16::try_from(next).unwrap_or(width);
        (*cell, end) = (next - end, next);
    }
    cells
}

#[cfg(test)]
mod tests {
    use ebb_host_policy::{Balloon, Means, Statistics};
    use proptest::prelude::*;

    use super::*;

    /// A machine that says this: its size, what is resident, in the balloon, available and free.
    fn machine(
        size_bytes: u64,
        resident_bytes: Option<u64>,
        balloon: u64,
        said: Option<(Option<u64>, Option<u64>)>,
    ) -> Machine {
        Machine {
            name: "a".to_owned(),
            size_bytes,
            resident_bytes,
            swapped_bytes: None,
            processor_ms: None,
            is_paused: false,
            balloon: Some(Balloon { target_bytes: balloon, actual_bytes: balloon }),
            statistics: said.map(|(available_bytes, free_bytes)| Statistics {
                taken_ms: 0,
                total_bytes: None,
                available_bytes,
                free_bytes,
                caches_bytes: None,
                major_faults: None,
                swap_out_bytes: None,
                oom_kills: None,
            }),
            means: Means::default(),
        }
    }

    #[test]
    fn a_guest_that_tells_the_truth() {
        // Of 100, 10 are in the balloon, 70 available (40 of them free), 65 resident.
        let honest = machine(100, Some(65), 10, Some((Some(70), Some(40))));
        assert_eq!(parts(&honest, 0), [20, 30, 15, 0, 0, 25, 10]);
        assert_eq!(parts(&honest, 5), [15, 30, 20, 0, 5, 20, 10]);
        assert_eq!(cells(parts(&honest, 0), 20, 3), [4, 6, 3, 0, 0, 5, 2]);
    }

    #[test]
    fn what_is_not_known_is_shown_as_such() {
        assert_eq!(parts(&machine(100, Some(60), 10, None), 0), [0, 0, 0, 60, 0, 30, 10]);
        assert_eq!(parts(&machine(100, None, 10, None), 0), [0, 0, 0, 90, 0, 0, 10]);
        let silent = machine(100, Some(60), 0, Some((None, Some(5))));
        assert_eq!(parts(&silent, 0), [0, 0, 0, 60, 0, 40, 0]);
        assert_eq!(cells(parts(&machine(0, Some(5), 7, None), 9), 8, 3), [0, 0, 0, 8, 0, 0, 0]);
    }

    #[test]
    fn every_part_has_its_own_character_and_name() {
        for (index, one) in Part::ALL.into_iter().enumerate() {
            for other in &Part::ALL[index + 1..] {
                assert_ne!(one.character(), other.character());
                assert_ne!(one.name(), other.name());
            }
        }
    }

    /// Any number, and those of guests that mean to do harm.
    fn number() -> impl Strategy<Value = u64> {
        prop_oneof![any::<u64>(), 0..10_u64, Just(u64::MAX), (0..64_u32).prop_map(|bit| 1 << bit)]
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..<_>::default() })]

        #[test]
        fn parts_add_up(
            size in number(),
            resident in proptest::option::of(number()),
            balloon in number(),
            said in proptest::option::of((
                proptest::option::of(number()),
                proptest::option::of(number()),
            )),
            merged in number(),
            width in any::<u16>(),
        ) {
            let parts = parts(&machine(size, resident, balloon, said), merged);
            let sum: u128 = parts.iter().map(|part| u128::from(*part)).sum();
            prop_assert_eq!(sum, u128::from(size));
            let cells = cells(parts, width, 3);
            let sum: u32 = cells.iter().map(|cell| u32::from(*cell)).sum();
            prop_assert_eq!(sum, u32::from(width));
            // No part that is there less than another has more cells, but for rounding.
            for (one, one_cells) in parts.iter().zip(cells) {
                for (other, other_cells) in parts.iter().zip(cells) {
                    prop_assert!(size == 0 || one < other || one_cells + 1 >= other_cells);
                }
            }
        }
    }
}
