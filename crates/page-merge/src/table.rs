//! Hash table of 32-bit numbers with five bytes per cell. The hashes themselves are stored
//! elsewhere, once.

use crate::hash::PageHash;

/// Number of parts of the table, which grow independently, so that growing needs little memory and
/// time at once.
const PARTS: usize = 64;
/// Tag of a cell that was never used.
const EMPTY: u8 = 0;
/// Tag of a cell whose number was removed.
const DELETED: u8 = 1;
/// Minimum number of cells of a non-empty part.
const LEAST_CELLS: usize = 8;

/// Numbers by the hash of the items that they represent; several may have the same hash.
#[derive(Clone, Debug, Default)]
pub(crate) struct Table {
    parts: Vec<Part>,
    len: usize,
}

#[derive(Clone, Debug, Default)]
struct Part {
    tags: Box<[u8]>,
    numbers: Box<[u32]>,
    /// Cells with a number.
    used: usize,
    /// Cells with [`DELETED`].
    deleted: usize,
}

/// Some bits of the hash, so that few cells have to be followed to their items.
fn tag(hash: PageHash) -> u8 {
    ((hash.get() >> 32) % 254) as u8 + 2
}

fn part(hash: PageHash) -> usize {
    (hash.get() >> (PageHash::BITS - 6)) as usize % PARTS
}

impl Part {
    /// Cell at which the search for `hash` begins.
    fn home(&self, hash: PageHash) -> usize {
        (((hash.get() & 0xffff_ffff) * self.tags.len() as u64) >> 32) as usize
    }

    /// Cells from the home of `hash` on, up to the first empty one.
    fn find(&self, hash: PageHash, mut accept: impl FnMut(u32) -> bool) -> Option<usize> {
        let cells = self.tags.len();
        let (tag, mut cell) = (tag(hash), if cells == 0 { 0 } else { self.home(hash) });
        for _ in 0..cells {
            match self.tags[cell] {
                EMPTY => return None,
                found if found == tag && accept(self.numbers[cell]) => return Some(cell),
                _ => {}
            }
            cell = if cell + 1 == cells { 0 } else { cell + 1 };
        }
        None
    }

    fn put(&mut self, hash: PageHash, number: u32) {
        let cells = self.tags.len();
        let mut cell = self.home(hash);
        while self.tags[cell] > DELETED {
            cell = if cell + 1 == cells { 0 } else { cell + 1 };
        }
        self.deleted -= usize::from(self.tags[cell] == DELETED);
        self.used += 1;
        (self.tags[cell], self.numbers[cell]) = (tag(hash), number);
    }

    /// Makes room for `used` numbers, with seven tenths of the cells used.
    fn rebuild(&mut self, used: usize, hash_of: impl Fn(u32) -> PageHash) {
        let cells = if used == 0 { 0 } else { (used * 10 / 7 + 1).max(LEAST_CELLS) };
        let old = std::mem::replace(
            self,
            Self {
                tags: vec![EMPTY; cells].into_boxed_slice(),
                numbers: vec![0; cells].into_boxed_slice(),
                used: 0,
                deleted: 0,
            },
        );
        for (tag, number) in old.tags.into_iter().zip(old.numbers) {
            if tag > DELETED {
                self.put(hash_of(number), number);
            }
        }
    }
}

impl Table {
    /// How many numbers there are.
    #[cfg(test)]
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// The first number with this hash (and, rarely, another hash) that `accept` accepts.
    pub(crate) fn find(&self, hash: PageHash, mut accept: impl FnMut(u32) -> bool) -> Option<u32> {
        let part = self.parts.get(part(hash))?;
        part.find(hash, &mut accept).map(|cell| part.numbers[cell])
    }

    /// Inserts `number`. `hash_of` returns the hashes of numbers that are already there.
    pub(crate) fn insert(
        &mut self,
        hash: PageHash,
        number: u32,
        hash_of: impl Fn(u32) -> PageHash,
    ) {
        if self.parts.is_empty() {
            self.parts = vec![Part::default(); PARTS];
        }
        let part = &mut self.parts[part(hash)];
        if (part.used + part.deleted + 1) * 8 > part.tags.len() * 7 {
            part.rebuild(part.used + 1, hash_of);
        }
        part.put(hash, number);
        self.len += 1;
    }

    /// Removes `number`; returns `false` if it was not there under this hash.
    pub(crate) fn remove(
        &mut self,
        hash: PageHash,
        number: u32,
        hash_of: impl Fn(u32) -> PageHash,
    ) -> bool {
        let Some(part) = self.parts.get_mut(part(hash)) else { return false };
        let Some(cell) = part.find(hash, |found| found == number) else { return false };
        part.tags[cell] = DELETED;
        part.used -= 1;
        part.deleted += 1;
        self.len -= 1;
        if part.used * 20 < part.tags.len() * 7 && part.tags.len() > LEAST_CELLS {
            part.rebuild(part.used, hash_of);
        }
        true
    }

    /// Memory of the cells, in bytes.
    pub(crate) fn memory_bytes(&self) -> u64 {
        let cells: usize = self.parts.iter().map(|part| part.tags.len()).sum();
        (cells * (size_of::<u8>() + size_of::<u32>()) + self.parts.len() * size_of::<Part>()) as u64
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    /// A hash for a number: few different ones, so that numbers collide.
    fn hash_of(number: u32) -> PageHash {
        PageHash::new(u64::from(number % 97).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 9)
    }

    fn all_with(table: &Table, hash: PageHash) -> BTreeSet<u32> {
        let mut found = BTreeSet::new();
        table.find(hash, |number| {
            if hash_of(number) == hash {
                found.insert(number);
            }
            false
        });
        found
    }

    proptest! {
        #[test]
        fn contains_inserted_and_not_removed_numbers(
            steps in prop::collection::vec((any::<bool>(), 0_u32..400), 0..1500),
        ) {
            let mut table = Table::default();
            let mut model = BTreeSet::new();
            for (put, number) in steps {
                if put {
                    if model.insert(number) {
                        table.insert(hash_of(number), number, hash_of);
                    }
                } else {
                    let removed = table.remove(hash_of(number), number, hash_of);
                    prop_assert_eq!(removed, model.remove(&number));
                }
                prop_assert_eq!(table.len(), model.len());
            }
            for residue in 0..97 {
                let expected: BTreeSet<u32> =
                    model.iter().copied().filter(|number| number % 97 == residue).collect();
                prop_assert_eq!(all_with(&table, hash_of(residue)), expected);
            }
        }
    }

    #[test]
    fn takes_at_most_eight_bytes_a_number_and_shrinks() {
        let spread =
            |number: u32| PageHash::new(u64::from(number).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 8);
        let mut table = Table::default();
        for number in 0..200_000 {
            table.insert(spread(number), number, spread);
            if number > 20_000 {
                assert!(
                    table.memory_bytes() < 8 * u64::from(number),
                    "{} for {number}",
                    table.memory_bytes()
                );
            }
        }
        for number in 0..199_000 {
            assert!(table.remove(spread(number), number, spread));
        }
        assert!(table.memory_bytes() < 32_000, "{}", table.memory_bytes());
        assert_eq!(table.find(spread(199_500), |number| number == 199_500), Some(199_500));
    }
}
