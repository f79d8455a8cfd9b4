use std::fs::File;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::sync::Arc;

use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::io::Errno;

use super::*;

const PAGE: usize = 4096;

fn page(byte: u8) -> Vec<u8> {
    vec![byte; PAGE]
}

fn allocate(memory: &mut StableMemory, node: Option<u32>, pages: u32) -> Vec<StableSlot> {
    let mut slots = Vec::new();
    memory.allocate(node, pages, &mut slots).unwrap();
    slots
}

#[test]
fn neighbours_are_allocated_together_and_read_back() {
    let sealed = |segments| StableMemory::sealed(segments, Vec::new());
    for make in [StableMemory::own as fn(_) -> _, sealed] {
        let segments = StableSegments::new();
        let mut memory = make(Arc::clone(&segments));
        let slots = allocate(&mut memory, None, 3);
        assert!(
            slots.windows(2).all(
                |pair| pair[0].segment == pair[1].segment && pair[0].index + 1 == pair[1].index
            )
        );
        memory.write(slots[0], &[page(1), page(2), page(3)].concat()).unwrap();
        for (slot, byte) in slots.iter().zip(1..) {
            let mut content = page(0);
            segments.read(*slot, &mut content).unwrap();
            assert_eq!(content, page(byte));
        }
        assert_eq!(memory.pages_in_use(), 3);
    }
}

#[test]
fn a_freed_own_slot_frees_its_memory_and_the_last_one_closes_the_segment() {
    let segments = StableSegments::new();
    let mut memory = StableMemory::own(Arc::clone(&segments));
    let slots = allocate(&mut memory, None, 2);
    memory.write(slots[0], &[page(1), page(2)].concat()).unwrap();
    let file = memory.reader(slots[0].segment).unwrap().0;
    let blocks = |file: &File| file.metadata().unwrap().blocks() * 512;
    assert_eq!(blocks(&file), 2 * PAGE as u64);
    assert_eq!(memory.free(slots[0]), Freed::Punched);
    assert_eq!(blocks(&file), PAGE as u64);
    assert_eq!(memory.free(slots[0]), Freed::Unknown);
    assert_eq!(memory.free(slots[1]), Freed::Segment(slots[1].segment));
    assert!(segments.file(slots[1].segment).is_none());
    assert_eq!(memory.pages_in_use(), 0);
}

#[test]
fn other_processes_cannot_change_a_sealed_segment() {
    let mut memory = StableMemory::sealed(StableSegments::new(), Vec::new());
    let slots = allocate(&mut memory, None, 1);
    memory.write(slots[0], &page(7)).unwrap();
    let (reader, pages) = memory.reader(slots[0].segment).unwrap();
    assert!(reader_refuses_changes(&reader));
    // Opening it for writing in /proc does not help.
    let path = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&reader));
    let writer = File::options().read(true).write(true).open(path).unwrap();
    assert_eq!(writer.write_at(&page(8), 0).unwrap_err().raw_os_error(), Some(libc::EPERM));
    assert_eq!(writer.set_len(0).unwrap_err().raw_os_error(), Some(libc::EPERM));
    // Another process uses it unchanged.
    let segments = StableSegments::new();
    segments.add(slots[0].segment, reader.try_clone().unwrap()).unwrap();
    assert_eq!(segments.file(slots[0].segment).map(|(_, pages)| pages), Some(pages));
    let mut content = page(0);
    segments.read(slots[0], &mut content).unwrap();
    assert_eq!(content, page(7));
    // The owner can still write.
    let more = allocate(&mut memory, None, 1);
    memory.write(more[0], &page(9)).unwrap();
    segments.read(more[0], &mut content).unwrap();
    assert_eq!(content, page(9));
}

fn reader_refuses_changes(reader: &File) -> bool {
    rustix::io::pwrite(reader, &[1], 0) == Err(Errno::BADF)
        && ftruncate(reader, 0) == Err(Errno::INVAL)
}

#[test]
fn free_slots_of_a_sealed_segment_are_used_before_another_one_is_made() {
    let mut memory = StableMemory::sealed(StableSegments::new(), Vec::new());
    let first = allocate(&mut memory, None, 1 << 13);
    assert!(first.iter().all(|slot| slot.segment == first[0].segment));
    for slot in &first[100..200] {
        assert_eq!(memory.free(*slot), Freed::Kept);
    }
    assert_eq!(memory.pages_kept(), 100);
    let second = allocate(&mut memory, None, 120);
    assert_eq!(&second[..100], &first[100..200]);
    assert!(second[100..].iter().all(|slot| slot.segment != first[0].segment));
}

#[test]
fn at_a_bound_single_free_slots_are_reused_and_nothing_else() {
    let all = Arc::new(StableBound::new(3 << 13));
    let new = |most_pages| {
        let own = Arc::new(StableBound::new(most_pages));
        StableMemory::sealed(StableSegments::new(), vec![own, Arc::clone(&all)])
    };
    let full = |memory: &mut StableMemory, pages| {
        let mut slots = Vec::new();
        let error = memory.allocate(None, pages, &mut slots).unwrap_err();
        assert!(matches!(error, StableError::Full) && slots.is_empty(), "{error}");
    };
    // Rounded up to two segments.
    let mut first = new((1 << 13) + 1);
    let slots = allocate(&mut first, None, 2 << 13);
    full(&mut first, 1);
    // Every tenth page is free: no pieces of 16.
    let free: Vec<StableSlot> = slots.iter().copied().step_by(10).collect();
    for slot in &free {
        assert_eq!(first.free(*slot), Freed::Kept);
    }
    full(&mut first, free.len() as u32 + 1);
    assert_eq!(first.pages_kept(), free.len() as u64, "a failure leaves nothing allocated");
    let mut again = allocate(&mut first, None, free.len() as u32);
    again.sort_unstable();
    assert_eq!(again, free);
    // One segment is left for all others together.
    let (mut second, mut third) = (new(2 << 13), new(1 << 13));
    let of_second = allocate(&mut second, None, 1 << 13);
    full(&mut second, 1);
    full(&mut third, 1);
    for slot in of_second {
        second.free(slot);
    }
    allocate(&mut third, None, 1);
    full(&mut second, 1);
    drop(first);
    allocate(&mut second, None, 1 << 13);
}

#[test]
fn each_node_has_its_own_segments() {
    let mut memory = StableMemory::own(StableSegments::new());
    let here = allocate(&mut memory, Some(0), 1);
    let anywhere = allocate(&mut memory, None, 1);
    assert_ne!(here[0].segment, anywhere[0].segment);
    assert_eq!((memory.node(here[0].segment), memory.node(anywhere[0].segment)), (Some(0), None));
    memory.write(here[0], &page(1)).unwrap();
    // The host does not have it any more.
    let gone = allocate(&mut memory, Some(999), 1);
    assert_eq!(memory.node(gone[0].segment), Some(999));
    memory.write(gone[0], &page(2)).unwrap();
    let mut content = page(0);
    memory.read(gone[0], &mut content).unwrap();
    assert_eq!(content, page(2));
}

#[test]
fn files_that_could_become_shorter_or_are_invalid_are_refused() {
    let segments = StableSegments::new();
    let unsealed = memfd_create("x", MemfdFlags::ALLOW_SEALING).unwrap();
    ftruncate(&unsealed, 4096).unwrap();
    let refused = |file: File| segments.add(5, file).unwrap_err().to_string();
    assert!(refused(File::from(unsealed)).contains("shorter"));
    assert!(refused(tempfile::tempfile().unwrap()).contains("cannot be used"));
    let mut memory = StableMemory::own(Arc::clone(&segments));
    let slot = allocate(&mut memory, None, 1)[0];
    let twice = memory.reader(slot.segment).unwrap().0.try_clone().unwrap();
    assert!(segments.add(slot.segment, twice).unwrap_err().to_string().contains("already"));
    let nowhere = StableSlot { segment: slot.segment, index: u32::MAX };
    assert!(matches!(segments.read(nowhere, &mut page(0)), Err(StableError::NoSlot { .. })));
    assert!(matches!(memory.write(nowhere, &page(0)), Err(StableError::NoSlot { .. })));
}
