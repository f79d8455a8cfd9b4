//! The free slots of a memory file, from which neighbours can be allocated together.

use std::collections::{BTreeMap, BTreeSet};

/// Free slots of one file, as runs that neither overlap nor adjoin.
#[derive(Debug)]
pub(super) struct FreeSlots {
    /// First slot of a run, and its length.
    runs: BTreeMap<u32, u32>,
    /// The same as (length, first slot), to find the smallest run that fits at once.
    by_length: BTreeSet<(u32, u32)>,
    free: u32,
    size: u32,
}

impl FreeSlots {
    /// `size` slots, all free.
    pub(super) fn new(size: u32) -> Self {
        let mut slots =
            Self { runs: BTreeMap::new(), by_length: BTreeSet::new(), free: size, size };
        slots.insert(0, size);
        slots
    }

    /// Number of free slots.
    pub(super) fn free(&self) -> u32 {
        self.free
    }

    /// Whether no slot is in use.
    pub(super) fn is_all_free(&self) -> bool {
        self.free == self.size
    }

    /// Allocates `count` neighbouring slots from the smallest run that fits; returns the first one.
    pub(super) fn take(&mut self, count: u32) -> Option<u32> {
        let (length, start) = *self.by_length.range((count, 0)..).next()?;
        self.remove(start, length);
        self.insert(start + count, length - count);
        self.free -= count;
        Some(start)
    }

    /// Length of the longest run.
    pub(super) fn longest(&self) -> u32 {
        self.by_length.last().map_or(0, |(length, _)| *length)
    }

    /// Frees a slot; returns false if it is already free, or does not exist.
    pub(super) fn give_back(&mut self, slot: u32) -> bool {
        let before = self.runs.range(..=slot).next_back().map(|(start, length)| (*start, *length));
        if slot >= self.size || before.is_some_and(|(start, length)| slot < start + length) {
            return false;
        }
        let mut run = (slot, 1);
        if let Some((start, length)) = before.filter(|(start, length)| start + length == slot) {
            self.remove(start, length);
            run = (start, length + 1);
        }
        if let Some(length) = self.runs.get(&(slot + 1)).copied() {
            self.remove(slot + 1, length);
            run.1 += length;
        }
        self.insert(run.0, run.1);
        self.free += 1;
        true
    }

    fn insert(&mut self, start: u32, length: u32) {
        if length > 0 {
            self.runs.insert(start, length);
            self.by_length.insert((length, start));
        }
    }

    fn remove(&mut self, start: u32, length: u32) {
        self.runs.remove(&start);
        self.by_length.remove(&(length, start));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_smallest_run_that_fits_is_taken() {
        let mut slots = FreeSlots::new(100);
        assert_eq!(slots.take(60), Some(0));
        for slot in (10..13).chain(20..25) {
            assert!(slots.give_back(slot));
        }
        assert_eq!(slots.take(4), Some(20));
        assert_eq!(slots.take(3), Some(10));
        assert_eq!(slots.take(41), None);
        assert_eq!((slots.longest(), slots.free()), (40, 41));
        assert!(!slots.give_back(24) && !slots.give_back(100), "free already, and not there");
    }

    proptest! {
        /// The model is one flag per slot.
        #[test]
        fn no_slot_is_allocated_twice_and_none_is_lost(
            steps in prop::collection::vec((any::<bool>(), 1..40_u32), 1..200),
        ) {
            let mut slots = FreeSlots::new(128);
            let mut in_use = [false; 128];
            for (take, number) in steps {
                if take {
                    let free_runs = in_use.chunk_by(PartialEq::eq).filter(|run| !run[0]);
                    let longest = free_runs.map(<[bool]>::len).max();
                    prop_assert_eq!(slots.longest() as usize, longest.unwrap_or(0));
                    match slots.take(number) {
                        Some(first) => {
                            let run = &mut in_use[first as usize..(first + number) as usize];
                            prop_assert!(run.iter().all(|used| !used));
                            run.fill(true);
                        }
                        None => prop_assert!(longest.unwrap_or(0) < number as usize),
                    }
                } else {
                    for slot in (number..128).step_by(7) {
                        prop_assert_eq!(slots.give_back(slot), in_use[slot as usize]);
                        in_use[slot as usize] = false;
                    }
                }
                let free = in_use.iter().filter(|used| !**used).count();
                prop_assert_eq!(slots.free() as usize, free);
                prop_assert_eq!(slots.is_all_free(), !in_use.contains(&true));
            }
        }
    }
}
