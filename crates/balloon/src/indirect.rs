//! Indirect descriptor tables, which a driver may only use after VIRTIO_RING_F_INDIRECT_DESC was
//! negotiated (virtio 1.3 section 2.7.5.3.1). No device here offers it.

use ebb_guest_ram::GuestMemory;
use virtio_queue::desc::split::Descriptor;
use virtio_queue::{Queue, QueueT};
use vm_memory::{Bytes, GuestAddress};

/// Whether the chain that begins at descriptor `head` of `queue` names an indirect table. The chain
/// itself would follow it.
///
/// The answer holds for a driver that leaves the chain alone while the device has it. The work for
/// any other driver's table is bounded all the same.
pub fn names_indirect_table(queue: &Queue, memory: &GuestMemory, head: u16) -> bool {
    let mut index = head;
    for _ in 0..queue.size() {
        if index >= queue.size() {
            return false;
        }
        let offset = u64::from(index) * size_of::<Descriptor>() as u64;
        let descriptor = queue
            .desc_table()
            .checked_add(offset)
            .and_then(|address| memory.read_obj::<Descriptor>(GuestAddress(address)).ok());
        match descriptor {
            Some(descriptor) if descriptor.refers_to_indirect_table() => return true,
            Some(descriptor) if descriptor.has_next() => index = descriptor.next(),
            _ => return false,
        }
    }
    false
}
