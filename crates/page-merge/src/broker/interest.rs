//! Hashes that clients have queried and that have no stable page: eight bytes each, with a limit
//! for each client.

use std::collections::BTreeMap;
use std::hash::{BuildHasher, RandomState};

use crate::hash::PageHash;

/// Minimum size of a part of a table.
const LEAST_PLACES: usize = 8;

/// Number of parts of a large table. Each grows and drops entries on its own, so that clients do
/// not wait while a whole table is moved.
const PARTS: usize = 256;

/// Minimum of a client's limit in a part; below it, the table has only one part.
const LEAST_PART_LIMIT: u32 = 16;

/// A client within one table. Numbers are reused after a client has been removed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Asker(pub(super) u16);

impl Asker {
    /// One more than the largest number.
    pub(super) const LIMIT: u16 = (1 << 15) - 1;
}

/// A cell that has never been used.
const EMPTY: u64 = 0;

/// A cell whose entry was removed: searches must continue behind it.
const REMOVED: u64 = u64::MAX;

/// Bits above the hash: a bit for the half, and the client's number plus one, so that no entry
/// equals [`EMPTY`] or [`REMOVED`].
const HALF: u64 = 1 << 63;

/// Hashes and the clients that queried them.
///
/// A client's hashes are in two halves. When the newer one is full, the older one is dropped: a
/// hash is remembered at least until its client has queried half its limit of others. In a table of
/// many parts this holds for each part, among which hashes are spread evenly.
#[derive(Debug)]
#[cfg_attr(test, derive(Clone))]
pub(super) struct Interest {
    parts: Box<[Part]>,
    /// Clients choose the hashes; they must not choose the cells.
    keys: RandomState,
}

/// An open-addressing table.
#[derive(Debug)]
#[cfg_attr(test, derive(Clone))]
struct Part {
    places: Vec<u64>,
    /// Cells that are not [`EMPTY`].
    used: usize,
    live: usize,
    clients: BTreeMap<Asker, Halves>,
}

/// Number of remembered hashes of a client.
#[derive(Clone, Copy, Debug, Default)]
struct Halves {
    newer: u32,
    older: u32,
    /// The bit of the newer half.
    bit: u64,
}

/// Earlier queries of a hash.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Before {
    /// By no other client.
    NoOther,
    /// By another client.
    Another,
}

impl Interest {
    /// An empty table. A client's limit will be `limit` or less.
    pub(super) fn new(limit: u32) -> Self {
        let parts = if limit / LEAST_PART_LIMIT >= PARTS as u32 { PARTS } else { 1 };
        Self { parts: (0..parts).map(|_| Part::new()).collect(), keys: RandomState::new() }
    }

    /// Records that `asker` queried `hash`, dropping its oldest queries beyond `limit` hashes.
    pub(super) fn ask(&mut self, hash: PageHash, asker: Asker, limit: u32) -> Before {
        let limit = limit / self.parts.len() as u32;
        let (part, spread) = self.find(hash);
        part.make_room(asker, limit, spread);
        part.ask(hash, asker, spread.of(hash))
    }

    /// Removes a hash, and appends the clients that queried it.
    pub(super) fn take(&mut self, hash: PageHash, askers: &mut Vec<Asker>) {
        let (part, spread) = self.find(hash);
        part.take(hash, spread.of(hash), askers);
    }

    /// Removes a client.
    pub(super) fn forget(&mut self, asker: Asker) {
        let spread = Spread(&self.keys);
        self.parts.iter_mut().for_each(|part| part.forget(asker, spread));
    }

    /// Number of hashes, counted once for each client that queried them.
    pub(super) fn len(&self) -> usize {
        self.parts.iter().map(|part| part.live).sum()
    }

    /// Memory of the table, in bytes.
    #[cfg(test)]
    fn bytes(&self) -> usize {
        self.parts.iter().map(|part| part.places.len() * size_of::<u64>()).sum()
    }

    /// The part of a hash.
    fn find(&mut self, hash: PageHash) -> (&mut Part, Spread<'_>) {
        let spread = Spread(&self.keys);
        // The upper bits; the lower ones select the cell in the part.
        let number = (spread.of(hash) >> 32) as usize % self.parts.len();
        (&mut self.parts[number], spread)
    }
}

/// Maps hashes to cells.
#[derive(Clone, Copy)]
struct Spread<'a>(&'a RandomState);

impl Spread<'_> {
    fn of(self, hash: PageHash) -> u64 {
        self.0.hash_one(hash.get())
    }
}

impl Part {
    fn new() -> Self {
        Self { places: vec![EMPTY; LEAST_PLACES], used: 0, live: 0, clients: BTreeMap::new() }
    }

    fn ask(&mut self, hash: PageHash, asker: Asker, first: u64) -> Before {
        let mut before = Before::NoOther;
        let mut free = None;
        let mut own = None;
        for place in self.chain(first) {
            match self.places[place] {
                EMPTY => {
                    free = free.or(Some(place));
                    break;
                }
                REMOVED => free = free.or(Some(place)),
                entry if hash_of(entry) != hash.get() => {}
                entry if asker_of(entry) == asker => own = Some(place),
                _ => before = Before::Another,
            }
        }
        let halves = self.clients.entry(asker).or_default();
        let entry = halves.bit | u64::from(asker.0 + 1) << PageHash::BITS | hash.get();
        if let Some(place) = own {
            if self.places[place] != entry {
                halves.older -= 1;
                halves.newer += 1;
                self.places[place] = entry;
            }
        } else if let Some(place) = free {
            halves.newer += 1;
            self.live += 1;
            self.used += usize::from(self.places[place] == EMPTY);
            self.places[place] = entry;
        }
        before
    }

    fn take(&mut self, hash: PageHash, first: u64, askers: &mut Vec<Asker>) {
        for place in self.chain(first) {
            match self.places[place] {
                EMPTY => break,
                REMOVED => {}
                entry if hash_of(entry) == hash.get() => {
                    askers.push(asker_of(entry));
                    self.remove(place);
                }
                _ => {}
            }
        }
    }

    fn forget(&mut self, asker: Asker, spread: Spread<'_>) {
        let Some(halves) = self.clients.remove(&asker) else { return };
        for entry in
            self.places.iter_mut().filter(|entry| is_live(**entry) && asker_of(**entry) == asker)
        {
            *entry = REMOVED;
        }
        self.live -= (halves.newer + halves.older) as usize;
        // Few entries are left to move then.
        if self.live * 8 < self.places.len() {
            self.rebuild(spread, |_| true);
        }
    }

    /// The candidate cells of a hash, in order, from the first one.
    fn chain(&self, first: u64) -> impl Iterator<Item = usize> + use<> {
        let mask = self.places.len() - 1;
        (0..=mask).map(move |step| (first as usize).wrapping_add(step) & mask)
    }

    fn remove(&mut self, place: usize) {
        let entry = std::mem::replace(&mut self.places[place], REMOVED);
        self.live -= 1;
        if let Some(halves) = self.clients.get_mut(&asker_of(entry)) {
            if entry & HALF == halves.bit {
                halves.newer -= 1;
            } else {
                halves.older -= 1;
            }
        }
    }

    fn make_room(&mut self, asker: Asker, limit: u32, spread: Spread<'_>) {
        let halves = self.clients.entry(asker).or_default();
        if halves.newer >= (limit / 2).max(1) {
            let old = halves.bit ^ HALF;
            let any = halves.older > 0;
            *halves = Halves { newer: 0, older: halves.newer, bit: old };
            if any {
                self.rebuild(spread, |entry| asker_of(entry) != asker || entry & HALF != old);
            }
        }
        // A quarter stays free to keep chains short.
        if (self.used + 1) * 4 > self.places.len() * 3 {
            self.rebuild(spread, |_| true);
        }
    }

    /// Rebuilds the table at the right size with the entries that `keep` accepts.
    fn rebuild(&mut self, spread: Spread<'_>, keep: impl Fn(u64) -> bool) {
        let keep = |entry: u64| is_live(entry) && keep(entry);
        let live = self.places.iter().filter(|&&entry| keep(entry)).count();
        let size = ((live + 1) * 2).next_power_of_two().max(LEAST_PLACES);
        let old = std::mem::replace(&mut self.places, vec![EMPTY; size]);
        for entry in old.into_iter().filter(|&entry| keep(entry)) {
            let mut chain = self.chain(spread.of(PageHash::new(entry)));
            if let Some(place) = chain.find(|&place| self.places[place] == EMPTY) {
                self.places[place] = entry;
            }
        }
        (self.live, self.used) = (live, live);
    }
}

fn is_live(entry: u64) -> bool {
    entry != EMPTY && entry != REMOVED
}

fn hash_of(entry: u64) -> u64 {
    PageHash::new(entry).get()
}

fn asker_of(entry: u64) -> Asker {
    Asker(((entry & !HALF) >> PageHash::BITS) as u16 - 1)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    const LIMIT: u32 = 1000;

    #[derive(Clone, Copy, Debug)]
    enum Step {
        Ask(u64, u16),
        Take(u64),
        Forget(u16),
    }

    fn step() -> impl Strategy<Value = Step> {
        let client = prop::sample::select(vec![0_u16, 1, 2, Asker::LIMIT - 1]);
        // Hashes of all ones and of all zeros are ordinary values.
        let hash = prop_oneof![0..40_u64, Just(PageHash::new(u64::MAX).get())];
        prop_oneof![
            20 => (hash.clone(), client.clone()).prop_map(|(hash, client)| Step::Ask(hash, client)),
            5 => hash.prop_map(Step::Take),
            1 => client.prop_map(Step::Forget),
        ]
    }

    proptest! {
        #[test]
        fn without_reaching_the_limit_it_is_a_set(steps in prop::collection::vec(step(), 0..400)) {
            let mut asked = Interest::new(LIMIT);
            let mut model = BTreeSet::new();
            for step in steps {
                match step {
                    Step::Ask(hash, client) => {
                        let others = model.iter().any(|&(h, c)| h == hash && c != client);
                        let expected = if others { Before::Another } else { Before::NoOther };
                        let before = asked.ask(PageHash::new(hash), Asker(client), LIMIT);
                        prop_assert_eq!(before, expected);
                        model.insert((hash, client));
                    }
                    Step::Take(hash) => {
                        let mut askers = Vec::new();
                        asked.take(PageHash::new(hash), &mut askers);
                        askers.sort();
                        let expected: Vec<_> = model
                            .iter()
                            .filter(|(h, _)| *h == hash)
                            .map(|&(_, c)| Asker(c))
                            .collect();
                        prop_assert_eq!(askers, expected);
                        model.retain(|(h, _)| *h != hash);
                    }
                    Step::Forget(client) => {
                        asked.forget(Asker(client));
                        model.retain(|(_, c)| *c != client);
                    }
                }
                prop_assert_eq!(asked.len(), model.len());
            }
        }
    }

    #[test]
    fn the_oldest_are_dropped_and_memory_stays_bounded() {
        let mut asked = Interest::new(LIMIT);
        let (flooding, other) = (Asker(0), Asker(1));
        asked.ask(PageHash::new(1 << 40), other, LIMIT);
        for hash in 0..100_000 {
            asked.ask(PageHash::new(hash), flooding, LIMIT);
            assert!(asked.len() <= 1001);
        }
        assert!(asked.bytes() <= 4096 * 8, "{} bytes", asked.bytes());
        // The last half of its limit is remembered, the first hashes are not, and other clients
        // lose nothing.
        assert_eq!(asked.ask(PageHash::new(99_501), other, LIMIT), Before::Another);
        assert_eq!(asked.ask(PageHash::new(5), other, LIMIT), Before::NoOther);
        assert_eq!(asked.ask(PageHash::new(1 << 40), flooding, LIMIT), Before::Another);
        asked.forget(flooding);
        assert_eq!(asked.len(), 3);
        assert_eq!(asked.bytes(), LEAST_PLACES * 8);
    }
    #[test]
    fn a_large_table_drops_entries_part_by_part() {
        let limit = 1 << 16;
        let mut asked = Interest::new(limit);
        let (flooding, other) = (Asker(0), Asker(1));
        let hash = |number: u64| PageHash::new(number.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 16);
        for number in 0..4 * u64::from(limit) {
            asked.ask(hash(number), flooding, limit);
            assert!(asked.len() <= limit as usize, "{} after {number}", asked.len());
        }
        assert_eq!(asked.parts.len(), PARTS);
        // Each part moves a small piece of the whole when it grows.
        assert!(asked.parts.iter().all(|part| part.places.len() <= 1024));
        assert!(asked.len() >= limit as usize / 3, "{}", asked.len());
        // A quarter of the limit back is remembered in every part.
        for number in (4 * u64::from(limit) - u64::from(limit) / 4)..4 * u64::from(limit) {
            assert_eq!(asked.ask(hash(number), other, limit), Before::Another);
        }
        let mut askers = Vec::new();
        asked.take(hash(4 * u64::from(limit) - 1), &mut askers);
        askers.sort();
        assert_eq!(askers, [flooding, other]);
        asked.forget(flooding);
        assert_eq!(asked.len(), limit as usize / 4 - 1);
        asked.forget(other);
        assert_eq!((asked.len(), asked.bytes()), (0, PARTS * LEAST_PLACES * 8));
    }
}
