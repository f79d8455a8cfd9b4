//! The memory files of a real broker, and the nodes that they can be on.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;

use ebb_guest_ram::merge::Freed;
use ebb_guest_ram::{StableError, StableMemory, StableSegments, StableSlot};

use crate::memory::Node;
use crate::store::Slot;

use super::ledger::Pages;

/// Sealed memory files.
#[derive(Debug)]
pub(super) struct SealedPages {
    memory: StableMemory,
    segments: Arc<StableSegments>,
    /// For clients: a descriptor for reading of each segment, opened with it, and its number of
    /// pages. A segment that could not be handed out when somebody is to share its pages would cost
    /// him the connection.
    readers: BTreeMap<u32, (Arc<OwnedFd>, u32)>,
}

impl SealedPages {
    pub(super) fn new() -> Self {
        let segments = StableSegments::new();
        Self {
            memory: StableMemory::sealed(Arc::clone(&segments)),
            segments,
            readers: BTreeMap::new(),
        }
    }

    /// A segment for another process: a descriptor for reading, and its number of pages.
    pub(super) fn reader(&self, segment: u32) -> Option<(Arc<OwnedFd>, u32)> {
        self.readers.get(&segment).cloned()
    }

    fn open_reader(&mut self, segment: u32) -> io::Result<()> {
        if !self.readers.contains_key(&segment) {
            let (descriptor, pages) = self.memory.reader(segment).map_err(to_io)?;
            self.readers.insert(segment, (Arc::new(descriptor), pages));
        }
        Ok(())
    }

    /// Number of segments.
    pub(super) fn segments(&self) -> usize {
        self.memory.segments().count()
    }
}

impl Pages for SealedPages {
    fn allocate(&mut self, node: Node, pages: usize, slots: &mut Vec<Slot>) -> io::Result<()> {
        let node = (node != Node::ANY).then_some(node.0);
        let mut found = Vec::with_capacity(pages);
        self.memory.allocate(node, pages as u32, &mut found).map_err(to_io)?;
        let found = found.into_iter().map(|StableSlot { segment, index }| Slot { segment, index });
        let found: Vec<Slot> = found.collect();
        for run in found.chunk_by(|a, b| a.segment == b.segment) {
            if let Err(error) = self.open_reader(run[0].segment) {
                for slot in found {
                    self.free(slot);
                }
                return Err(error);
            }
        }
        slots.extend(found);
        Ok(())
    }

    fn write(&mut self, first: Slot, contents: &[u8]) -> io::Result<()> {
        self.memory.write(stable(first), contents).map_err(to_io)
    }

    fn read(&self, slot: Slot, content: &mut [u8]) -> io::Result<()> {
        self.segments.read(stable(slot), content).map_err(to_io)
    }

    fn free(&mut self, slot: Slot) -> Option<u32> {
        match self.memory.free(stable(slot)) {
            Freed::Segment(number) => {
                self.readers.remove(&number);
                Some(number)
            }
            Freed::Kept | Freed::Punched | Freed::Unknown => None,
        }
    }

    fn capacity(&self) -> u64 {
        self.memory.pages_in_use() + self.memory.pages_kept()
    }
}

/// What a client does with the segments that it gets.
pub trait SegmentUser {
    /// A segment that answers will speak of.
    fn add(&mut self, number: u32, file: File) -> io::Result<()>;
    /// A segment that nobody shares any more.
    fn remove(&mut self, number: u32);
}

impl SegmentUser for Arc<StableSegments> {
    fn add(&mut self, number: u32, file: File) -> io::Result<()> {
        StableSegments::add(self, number, file).map_err(to_io)
    }

    fn remove(&mut self, number: u32) {
        StableSegments::remove(self, number);
    }
}

fn stable(slot: Slot) -> StableSlot {
    StableSlot { segment: slot.segment, index: slot.index }
}

fn to_io(error: StableError) -> io::Error {
    let source = match &error {
        StableError::Create { source, .. }
        | StableError::BindNode { source, .. }
        | StableError::Map { source, .. }
        | StableError::Write { source, .. } => Some(source.kind()),
        _ => None,
    };
    io::Error::new(source.unwrap_or(io::ErrorKind::Other), error)
}

/// The nodes of this host that have memory; node 0 if the kernel does not say.
pub(super) fn host_nodes() -> Vec<u32> {
    let folder = Path::new("/sys/devices/system/node");
    let list = std::fs::read_to_string(folder.join("has_memory"));
    let nodes = list.ok().and_then(|list| parse_list(list.trim())).unwrap_or_default();
    if nodes.is_empty() { vec![0] } else { nodes }
}

/// `0-2,5` as Linux writes it (Documentation/admin-guide/cputopology.rst).
fn parse_list(list: &str) -> Option<Vec<u32>> {
    let mut nodes = Vec::new();
    for part in list.split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last): (u32, u32) = (first.parse().ok()?, last.parse().ok()?);
        if last > 1023 {
            return None;
        }
        nodes.extend(first..=last);
    }
    Some(nodes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_of_nodes_are_read() {
        assert_eq!(parse_list("0"), Some(vec![0]));
        assert_eq!(parse_list("0-2,5"), Some(vec![0, 1, 2, 5]));
        for bad in ["", "a", "0-", "0-4294967295"] {
            assert_eq!(parse_list(bad), None, "{bad}");
        }
        assert!(host_nodes().contains(&0));
    }

    #[test]
    fn a_node_that_does_not_exist_is_refused_by_name() {
        let mut pages = SealedPages::new();
        let mut slots = Vec::new();
        let error = pages.allocate(Node(777), 1, &mut slots).unwrap_err();
        assert!(error.to_string().contains("777"), "{error}");
        assert!(slots.is_empty());
        assert_eq!((pages.capacity(), pages.segments()), (0, 0));
    }
}
