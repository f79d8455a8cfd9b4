//! A driver for tests: requests on a ring in plain memory.

use ebb_guest_ram::GuestMemory;
use virtio_bindings::virtio_blk as blk;
use virtio_queue::{Queue, QueueT};
use vm_memory::{Bytes as _, GuestAddress};

use super::Block;
use crate::devices::virtio::VirtioDevice as _;

const DESCRIPTORS: u64 = 0x1000;
const AVAILABLE: u64 = 0x2000;
const USED: u64 = 0x3000;
/// Header and status of each request.
const HEADERS: u64 = 0x4000;
const DATA: u64 = 0x10_0000;
const SLOTS: u16 = 16;
/// Room for the data of each request.
pub(super) const SLOT_BYTES: u64 = 256 << 10;
const MEMORY_BYTES: usize = 8 << 20;
/// One that a device never writes.
const UNANSWERED: u8 = 0xee;

/// A driver, with up to 16 requests at a time.
pub(super) struct Driver {
    pub memory: GuestMemory,
    requests: u16,
    completed: u16,
}

/// A request that was put on the ring.
#[derive(Debug, Clone, Copy)]
pub(super) struct Slot(u16);

impl Driver {
    pub fn new() -> Self {
        let memory = GuestMemory::from_ranges(&[
            (GuestAddress(0), MEMORY_BYTES / 2),
            (GuestAddress(MEMORY_BYTES as u64 / 2), MEMORY_BYTES / 2),
        ]);
        Self { memory: memory.unwrap(), requests: 0, completed: 0 }
    }

    pub fn queue() -> Queue {
        let mut queue = Queue::new(super::QUEUE_SIZE).unwrap();
        queue.set_size(SLOTS * 4);
        queue.set_desc_table_address(Some(DESCRIPTORS as u32), None);
        queue.set_avail_ring_address(Some(AVAILABLE as u32), None);
        queue.set_used_ring_address(Some(USED as u32), None);
        queue.set_ready(true);
        queue
    }

    /// Puts a request on the ring, with its data in two pieces.
    pub fn submit(&mut self, kind: u32, sector: u64, data: &[u8]) -> Slot {
        let slot = self.requests % SLOTS;
        let header = HEADERS + u64::from(slot) * 32;
        let at = DATA + u64::from(slot) * SLOT_BYTES;
        self.memory.write_obj(kind, GuestAddress(header)).unwrap();
        self.memory.write_obj(sector, GuestAddress(header + 8)).unwrap();
        self.memory.write_obj(UNANSWERED, GuestAddress(header + 16)).unwrap();
        self.memory.write_slice(data, GuestAddress(at)).unwrap();
        let into = matches!(kind, blk::VIRTIO_BLK_T_IN | blk::VIRTIO_BLK_T_GET_ID);
        let flags = if into { 3_u16 } else { 1 };
        // Pieces need not be whole sectors.
        let first = (data.len() / 3) as u32;
        let chain = [
            (header, 16_u32, 1_u16),
            (at, first, flags),
            (at + u64::from(first), data.len() as u32 - first, flags),
            (header + 16, 1, 2),
        ];
        for (index, (address, length, flags)) in (slot * 4..).zip(chain) {
            let at = DESCRIPTORS + 16 * u64::from(index);
            self.memory.write_obj(address, GuestAddress(at)).unwrap();
            self.memory.write_obj(length, GuestAddress(at + 8)).unwrap();
            self.memory.write_obj(flags, GuestAddress(at + 12)).unwrap();
            self.memory.write_obj(index + 1, GuestAddress(at + 14)).unwrap();
        }
        let entry = u64::from(self.requests % (SLOTS * 4));
        self.memory.write_obj(slot * 4, GuestAddress(AVAILABLE + 4 + 2 * entry)).unwrap();
        self.requests = self.requests.wrapping_add(1);
        self.memory.write_obj(self.requests, GuestAddress(AVAILABLE + 2)).unwrap();
        Slot(slot)
    }

    /// Lets the device complete all requests.
    pub fn complete(&mut self, disk: &mut Block) {
        while disk.process_queue(0).more {}
        disk.finish_requests();
        while disk.process_queue(0).more {}
        disk.finish_requests();
        self.completed = self.memory.read_obj(GuestAddress(USED + 2)).unwrap();
        assert_eq!(self.completed, self.requests, "requests are left");
    }

    /// The status of a completed request.
    pub fn status(&self, slot: Slot) -> u32 {
        let status: u8 =
            self.memory.read_obj(GuestAddress(HEADERS + u64::from(slot.0) * 32 + 16)).unwrap();
        assert_ne!(status, UNANSWERED);
        u32::from(status)
    }

    /// The data of a completed request.
    pub fn data(&self, slot: Slot, bytes: usize) -> Vec<u8> {
        let mut data = vec![0; bytes];
        let at = DATA + u64::from(slot.0) * SLOT_BYTES;
        self.memory.read_slice(&mut data, GuestAddress(at)).unwrap();
        data
    }

    /// One request from beginning to end; returns its status.
    pub fn request(&mut self, disk: &mut Block, kind: u32, sector: u64, data: &[u8]) -> u32 {
        let slot = self.submit(kind, sector, data);
        self.complete(disk);
        self.status(slot)
    }
}

/// The payload of a request to discard or to write zeros: sector, sectors and flags of each range.
pub(super) fn ranges(ranges: &[(u64, u32, u32)]) -> Vec<u8> {
    let mut payload = Vec::new();
    for (sector, sectors, flags) in ranges {
        payload.extend(sector.to_le_bytes());
        payload.extend(sectors.to_le_bytes());
        payload.extend(flags.to_le_bytes());
    }
    payload
}
