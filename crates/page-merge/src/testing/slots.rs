//! Simulated memory files for stable pages.

use std::{collections::BTreeMap, io};

use ebb_abi::PAGE_SIZE_BYTES;
use ebb_guest_ram::StableSlot;

use super::world::{SimSlot, World};
use crate::{Node, Slots};

/// Memory files of one store: one for each node.
#[derive(Debug)]
pub struct SimSlots {
    world: World,
    /// Number of the store's first file.
    first_segment: u32,
    nodes: Vec<Node>,
    next: BTreeMap<u32, u32>,
}

impl World {
    /// Memory files for a store, identified by `number`.
    pub fn slots(&self, number: u32) -> SimSlots {
        SimSlots {
            world: self.clone(),
            first_segment: number * 1000,
            nodes: Vec::new(),
            next: BTreeMap::new(),
        }
    }
}

impl SimSlots {
    fn segment(&mut self, node: Node) -> u32 {
        let place = self.nodes.iter().position(|known| *known == node).unwrap_or_else(|| {
            self.nodes.push(node);
            self.nodes.len() - 1
        });
        self.first_segment + place as u32
    }
}

impl Slots for SimSlots {
    fn allocate(
        &mut self,
        node: Node,
        pages: usize,
        slots: &mut Vec<StableSlot>,
    ) -> io::Result<()> {
        let segment = self.segment(node);
        let mut inner = self.world.lock();
        if inner.no_room {
            return Err(io::ErrorKind::StorageFull.into());
        }
        // Fresh slots while there are any, then the holes: both occur in tests of a few hundred
        // pages.
        let next = self.next.entry(segment).or_default();
        while slots.len() < pages {
            *next = (*next + 1) % 100_000_000;
            let slot = StableSlot { segment, index: *next };
            let node = if node == Node::ANY { Node(0) } else { node };
            inner.slots.entry(slot).or_insert_with(|| {
                slots.push(slot);
                SimSlot { content: None, node, mapped: 0 }
            });
        }
        Ok(())
    }

    fn write(&mut self, first: StableSlot, contents: &[u8]) -> io::Result<()> {
        let mut inner = self.world.lock();
        if inner.no_room {
            return Err(io::ErrorKind::StorageFull.into());
        }
        for (number, content) in (0..).zip(contents.chunks(PAGE_SIZE_BYTES as usize)) {
            let slot = StableSlot { index: first.index + number, ..first };
            let Some(stable) = inner.slots.get_mut(&slot) else {
                panic!("{slot:?} is not allocated")
            };
            assert_eq!(stable.mapped, 0, "{slot:?} is mapped and must not change");
            let mut word = [0; 8];
            word.copy_from_slice(&content[..8]);
            stable.content = Some(u64::from_le_bytes(word));
            inner.published += 1;
        }
        Ok(())
    }

    fn read(&self, slot: StableSlot, content: &mut [u8]) -> io::Result<()> {
        match self.world.lock().slots.get(&slot).and_then(|stable| stable.content) {
            Some(number) => {
                content.copy_from_slice(&number.to_le_bytes().repeat(content.len() / 8));
            }
            None => panic!("{slot:?} is no stable page"),
        }
        Ok(())
    }

    fn free(&mut self, slot: StableSlot) -> Option<u32> {
        match self.world.lock().slots.remove(&slot) {
            Some(stable) => assert_eq!(stable.mapped, 0, "{slot:?} was freed while it was mapped"),
            None => panic!("{slot:?} was freed twice"),
        }
        None
    }
}
