//! Simulated memory files that detect violations of their invariants.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;

use super::*;

/// Slots by number: their contents, while allocated.
#[derive(Debug, Default)]
pub(super) struct Files {
    pub(super) contents: BTreeMap<StableSlot, Option<Vec<u8>>>,
    pub(super) fail_next: bool,
}

/// Small segments whose slots are reused as soon as they are free, so that a defect shows
/// immediately.
#[derive(Clone, Debug)]
pub(super) struct SimPages {
    pub(super) files: Rc<RefCell<Files>>,
    segment_slots: u32,
}

impl SimPages {
    pub(super) fn new(segment_slots: u32) -> Self {
        Self { files: Rc::default(), segment_slots }
    }

    /// Content of a slot as seen by a process that has it mapped; it survives the end of its use.
    pub(super) fn content(&self, slot: StableSlot) -> Option<Vec<u8>> {
        self.files.borrow().contents.get(&slot).cloned().flatten()
    }

    pub(super) fn in_use(&self) -> usize {
        self.files.borrow().contents.values().flatten().count()
    }
}

impl Slots for SimPages {
    fn allocate(
        &mut self,
        node: Node,
        pages: usize,
        slots: &mut Vec<StableSlot>,
    ) -> io::Result<()> {
        let mut files = self.files.borrow_mut();
        if std::mem::take(&mut files.fail_next) {
            return Err(io::ErrorKind::OutOfMemory.into());
        }
        // Each node's segments have their own numbers.
        let base = node.0.wrapping_mul(1000);
        let all =
            (0..).flat_map(|segment| (0..self.segment_slots).map(move |index| (segment, index)));
        for (segment, index) in all {
            let slot = StableSlot { segment: base + segment, index };
            if slots.len() == pages {
                return Ok(());
            }
            if files.contents.get(&slot).is_none_or(Option::is_none) {
                files.contents.insert(slot, Some(Vec::new()));
                slots.push(slot);
            }
        }
        Ok(())
    }

    fn write(&mut self, first: StableSlot, contents: &[u8]) -> io::Result<()> {
        let mut files = self.files.borrow_mut();
        for (index, page) in (first.index..).zip(contents.chunks_exact(PAGE)) {
            let slot = StableSlot { segment: first.segment, index };
            let content = files.contents.get_mut(&slot).and_then(Option::as_mut);
            *content.expect("only allocated slots are written to") = page.to_vec();
        }
        Ok(())
    }

    fn read(&self, slot: StableSlot, content: &mut [u8]) -> io::Result<()> {
        content.copy_from_slice(&self.content(slot).expect("only stable pages are read"));
        Ok(())
    }

    fn free(&mut self, slot: StableSlot) -> Option<u32> {
        let mut files = self.files.borrow_mut();
        let content = files.contents.get_mut(&slot).expect("a slot that was allocated");
        content.take().expect("a slot is freed once");
        let of_segment = files.contents.iter().filter(|(other, _)| other.segment == slot.segment);
        let empty = of_segment.clone().all(|(_, content)| content.is_none());
        empty.then_some(slot.segment)
    }
}

impl<T: Slots> Ledger<T> {
    /// Recounts everything.
    pub(super) fn check(&self) {
        let mut counts: BTreeMap<Node, NodeCounts> =
            self.nodes.keys().map(|&node| (node, NodeCounts::default())).collect();
        for slot in self.publishers.keys() {
            counts.get_mut(&self.stable.node(*slot).unwrap()).expect("a node").pages += 1;
        }
        assert_eq!(self.stable.len(), self.publishers.len() as u64);
        let mut holds: HashMap<StableSlot, u32> = HashMap::new();
        for (slot, hold) in self.members.values().flat_map(|member| &member.holds) {
            let count = counts.get_mut(&self.stable.node(*slot).unwrap()).expect("a node");
            count.shares += u64::from(hold.shared);
            count.reservations += u64::from(hold.reserved);
            *holds.entry(*slot).or_default() += hold.shared + hold.reserved;
        }
        for slot in self.publishers.keys() {
            let references = self.stable.references(*slot);
            assert!(references > 0 && holds.get(slot) == Some(&references), "{slot:?}");
        }
        self.stable.check();
        for (number, member) in &self.members {
            let publisher = Publisher { member: *number, joined: member.joined };
            let published = self.publishers.values().filter(|who| **who == publisher).count();
            assert_eq!(member.published, published as u64);
        }
        for (node, count) in &mut counts {
            count.remembered_hashes = self.nodes[node].interest.len() as u64;
        }
        assert_eq!(self.counts(), counts);
    }
}

/// A page whose content encodes a number.
pub(super) fn page(number: u8) -> Vec<u8> {
    let mut page = vec![0x5a; PAGE];
    page[17] = number;
    page
}

pub(super) fn hasher() -> PageHasher {
    PageHasher::new(&crate::Secret([3; 32]))
}

pub(super) fn hash(number: u8) -> PageHash {
    hasher().hash(&page(number))
}
