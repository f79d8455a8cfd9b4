//! Buffers that become used together, and the driver's wish to be interrupted (virtio 1.3 section
//! 2.7).

use std::sync::atomic::{Ordering, fence};

use ebb_guest_ram::GuestMemory;
use virtio_bindings::virtio_ring::VRING_AVAIL_F_NO_INTERRUPT;
use virtio_queue::{Queue, QueueT};
use vm_memory::{Bytes, GuestAddress};

/// A buffer to return: its first descriptor, and the bytes written to it.
pub(in crate::devices::virtio) type Used = (u16, u32);

/// The used ring lies outside of guest memory.
#[derive(Debug)]
pub(in crate::devices::virtio) struct Unwritable;

/// Makes buffers used. The driver sees all of them or none: those of one frame must not be found
/// one by one (section 5.1.6.4).
pub(in crate::devices::virtio) fn publish(
    queue: &mut Queue,
    memory: &GuestMemory,
    buffers: &[Used],
) -> Result<(), Unwritable> {
    if buffers.is_empty() {
        return Ok(());
    }
    let at = |offset: u64| queue.used_ring().checked_add(offset).map(GuestAddress);
    let mut next = queue.next_used();
    for (head, length) in buffers {
        let element = [u32::from(*head).to_le_bytes(), length.to_le_bytes()].concat();
        let index = u64::from(next % queue.size().max(1));
        let address = at(4 + 8 * index).ok_or(Unwritable)?;
        memory.write_slice(&element, address).map_err(|_| Unwritable)?;
        next = next.wrapping_add(1);
    }
    let index = at(2).ok_or(Unwritable)?;
    memory.store(next.to_le(), index, Ordering::Release).map_err(|_| Unwritable)?;
    queue.set_next_used(next);
    Ok(())
}

/// Whether the driver must be interrupted for the buffers used since position `before`.
pub(in crate::devices::virtio) fn wants_interrupt(
    queue: &Queue,
    memory: &GuestMemory,
    before: u16,
) -> bool {
    let now = queue.next_used();
    if now == before {
        return false;
    }
    // The used index must be visible before the driver's wish is read (section 2.7.7.2, 2.7.10).
    fence(Ordering::SeqCst);
    let load = |offset: u64| {
        let address = GuestAddress(queue.avail_ring().checked_add(offset)?);
        memory.load::<u16>(address, Ordering::Relaxed).ok().map(u16::from_le)
    };
    if queue.event_idx_enabled() {
        let event = load(4 + 2 * u64::from(queue.size()));
        let passed =
            |event: u16| now.wrapping_sub(event).wrapping_sub(1) < now.wrapping_sub(before);
        event.is_none_or(passed)
    } else {
        load(0).is_none_or(|flags| u32::from(flags) & VRING_AVAIL_F_NO_INTERRUPT == 0)
    }
}

/// The next buffer; `None` if there is none, and then the driver notifies the device of one.
pub(in crate::devices::virtio) fn pop<'a>(
    queue: &mut Queue,
    memory: &'a GuestMemory,
) -> Option<virtio_queue::DescriptorChain<&'a GuestMemory>> {
    queue.pop_descriptor_chain(memory).or_else(|| {
        // One may have come just before notifications were enabled.
        let more = queue.enable_notification(memory).unwrap_or(false);
        if more { queue.pop_descriptor_chain(memory) } else { None }
    })
}

/// Makes the last `count` buffers that were taken available again.
pub(in crate::devices::virtio) fn unpop(queue: &mut Queue, count: usize) {
    queue.set_next_avail(queue.next_avail().wrapping_sub(count as u16));
}

#[cfg(test)]
mod tests {
    use super::*;

    fn queue() -> (GuestMemory, Queue) {
        let memory = GuestMemory::from_ranges(&[(GuestAddress(0), 1 << 16)]).unwrap();
        let mut queue = Queue::new(8).unwrap();
        queue.set_avail_ring_address(Some(0x1000), None);
        queue.set_used_ring_address(Some(0x2000), None);
        (memory, queue)
    }

    #[test]
    fn an_interrupt_is_due_if_the_event_is_among_the_used_buffers() {
        let (memory, mut queue) = queue();
        queue.set_event_idx(true);
        queue.set_next_used(0xfffe);
        publish(&mut queue, &memory, &[(1, 5), (2, 6), (3, 7)]).unwrap();
        assert_eq!(queue.next_used(), 1);
        let index: u16 = memory.read_obj(GuestAddress(0x2002)).unwrap();
        assert_eq!(index, 1);
        for (event, wanted) in
            [(0xfffd_u16, false), (0xfffe, true), (0xffff, true), (0, true), (1, false), (9, false)]
        {
            memory.write_obj(event, GuestAddress(0x1000 + 4 + 16)).unwrap();
            assert_eq!(wants_interrupt(&queue, &memory, 0xfffe), wanted, "{event:#x}");
        }
        assert!(!wants_interrupt(&queue, &memory, 1));
        let element: u64 = memory.read_obj(GuestAddress(0x2004)).unwrap();
        assert_eq!(element, 7 << 32 | 3);
    }

    #[test]
    fn without_event_index_a_flag_decides() {
        let (memory, mut queue) = queue();
        publish(&mut queue, &memory, &[(0, 0)]).unwrap();
        assert!(wants_interrupt(&queue, &memory, 0));
        memory.write_obj(1_u16, GuestAddress(0x1000)).unwrap();
        assert!(!wants_interrupt(&queue, &memory, 0));
    }

    #[test]
    fn a_used_ring_outside_of_memory_is_an_error() {
        let (memory, mut queue) = queue();
        queue.set_used_ring_address(Some(0xfff0_0000), None);
        publish(&mut queue, &memory, &[(0, 0)]).unwrap_err();
    }
}
