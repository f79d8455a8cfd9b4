//! The record of each stable page: eight bytes, in chunks of neighbouring slots.

use std::collections::HashMap;

use ebb_guest_ram::StableSlot;

use crate::{hash::PageHash, memory::Node};

/// Slots of a chunk.
const CHUNK: u32 = 512;
/// The highest of the 16 bits above the hash.
const RETIRED: u64 = 1 << 63;

/// Content and references of a stable page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Entry(u64);

impl Entry {
    /// No stable page.
    const NONE: Self = Self(0);

    pub(super) fn new(hash: PageHash, references: u16) -> Self {
        Self(hash.get()).with_references(references)
    }

    pub(super) fn hash(self) -> PageHash {
        PageHash::new(self.0)
    }

    /// Shares and reservations; never 0 for a stable page.
    pub(super) fn references(self) -> u16 {
        (self.0 >> PageHash::BITS) as u16 & 0x7fff
    }

    #[must_use]
    pub(super) fn with_references(self, references: u16) -> Self {
        Self(
            (self.0 & (RETIRED | ((1 << PageHash::BITS) - 1)))
                | (u64::from(references & 0x7fff) << PageHash::BITS),
        )
    }

    /// Whether it gets no more sharers.
    pub(super) fn is_retired(self) -> bool {
        self.0 & RETIRED != 0
    }

    #[must_use]
    pub(super) fn retired(self) -> Self {
        Self(self.0 | RETIRED)
    }
}

#[derive(Clone, Debug)]
struct Chunk {
    segment: u32,
    /// Index of the chunk's first slot.
    first: u32,
    node: Node,
    used: u32,
    entries: Box<[Entry]>,
}

/// Entries by slot, and by a 32-bit number that represents a slot.
#[derive(Clone, Debug, Default)]
pub(super) struct Entries {
    chunks: Vec<Option<Chunk>>,
    free: Vec<u32>,
    places: HashMap<(u32, u32), u32>,
    len: u64,
}

impl Entries {
    /// Number of stable pages.
    pub(super) fn len(&self) -> u64 {
        self.len
    }

    /// The number of a slot with a stable page.
    pub(super) fn number(&self, slot: StableSlot) -> Option<u32> {
        let chunk = self.places.get(&(slot.segment, slot.index / CHUNK))?;
        let number = chunk * CHUNK + slot.index % CHUNK;
        (self.get(number) != Entry::NONE).then_some(number)
    }

    fn chunk(&self, number: u32) -> Option<&Chunk> {
        self.chunks.get((number / CHUNK) as usize)?.as_ref()
    }

    pub(super) fn get(&self, number: u32) -> Entry {
        self.chunk(number).map_or(Entry::NONE, |chunk| chunk.entries[(number % CHUNK) as usize])
    }

    /// The node whose index the stable page is in.
    pub(super) fn node(&self, number: u32) -> Node {
        self.chunk(number).map_or(Node::ANY, |chunk| chunk.node)
    }

    /// The slot that a number represents.
    pub(super) fn slot(&self, number: u32) -> StableSlot {
        let (segment, first) =
            self.chunk(number).map_or((0, 0), |chunk| (chunk.segment, chunk.first));
        StableSlot { segment, index: first + number % CHUNK }
    }

    pub(super) fn set(&mut self, number: u32, entry: Entry) {
        if let Some(chunk) = self.chunks.get_mut((number / CHUNK) as usize).and_then(Option::as_mut)
        {
            chunk.entries[(number % CHUNK) as usize] = entry;
        }
    }

    /// Adds a stable page. All slots of a segment are of one node.
    pub(super) fn add(&mut self, slot: StableSlot, node: Node, entry: Entry) -> u32 {
        let key = (slot.segment, slot.index / CHUNK);
        let place = self.places.get(&key).copied().unwrap_or_else(|| {
            let chunk = Chunk {
                segment: slot.segment,
                first: slot.index / CHUNK * CHUNK,
                node,
                used: 0,
                entries: vec![Entry::NONE; CHUNK as usize].into_boxed_slice(),
            };
            let place = self.free.pop().unwrap_or(self.chunks.len() as u32);
            match self.chunks.get_mut(place as usize) {
                Some(free) => *free = Some(chunk),
                None => self.chunks.push(Some(chunk)),
            }
            self.places.insert(key, place);
            place
        });
        if let Some(chunk) = self.chunks[place as usize].as_mut() {
            chunk.used += 1;
        }
        self.len += 1;
        let number = place * CHUNK + slot.index % CHUNK;
        self.set(number, entry);
        number
    }

    /// Removes a stable page.
    pub(super) fn remove(&mut self, number: u32) {
        self.set(number, Entry::NONE);
        self.len -= 1;
        let place = number / CHUNK;
        let Some(chunk) = self.chunks.get_mut(place as usize).and_then(Option::as_mut) else {
            return;
        };
        chunk.used -= 1;
        if chunk.used == 0 {
            self.places.remove(&(chunk.segment, chunk.first / CHUNK));
            self.chunks[place as usize] = None;
            self.free.push(place);
        }
    }

    /// All stable pages.
    #[cfg(test)]
    pub(super) fn iter(&self) -> impl Iterator<Item = Entry> + '_ {
        let chunks = self.chunks.iter().flatten();
        chunks.flat_map(|chunk| &chunk.entries).copied().filter(|entry| *entry != Entry::NONE)
    }

    /// Memory used, in bytes.
    pub(super) fn memory_bytes(&self) -> u64 {
        let chunk_bytes = CHUNK as usize * size_of::<Entry>();
        let chunks = self.chunks.len() - self.free.len();
        (chunks * chunk_bytes
            + self.chunks.capacity() * size_of::<Option<Chunk>>()
            + self.places.capacity() * size_of::<((u32, u32), u32)>()) as u64
    }
}
