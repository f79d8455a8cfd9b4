//! A driver for tests, benchmarks and fuzz targets that operates the device over real rings in real
//! guest memory.
//!
//! virtio-queue's `MockSplitQueue` is unsuitable: its used ring overlaps the second half of its
//! available ring (it takes the ring's end as its number of entries, not bytes).

#![allow(clippy::expect_used, reason = "a driver for tests should fail loudly")]
#![allow(clippy::missing_panics_doc, reason = "it panics whenever the device misbehaves")]

mod messages;

use std::sync::Arc;

use ebb_abi::balloon::{Features, MAX_QUEUES, Numbering, QueueKind, QueueSet};
use ebb_abi::{PAGE_SIZE_BYTES, PageRange, Pfn};
use ebb_guest_ram::{Backing, GuestRam, HugePages, Populate, RegionSpec};
use virtio_queue::{Queue, QueueT};
use vm_memory::{Bytes, GuestAddress};

pub use messages::message;

use crate::{Balloon, BalloonConfig, Progress};

/// Entries of each queue.
pub const QUEUE_SIZE: u16 = 128;

/// Size of each of the two regions of guest memory, in bytes.
pub const REGION_BYTES: u64 = 16 << 20;

/// Where the second region starts: above 4 GiB, as on a PC.
pub const HIGH_START: u64 = 4 << 30;

/// Rings and buffers are below this address; the rest of memory is available to tests.
pub const DRIVER_BYTES: u64 = 2 << 20;

/// Maximum number of `process_queue` calls that a full ring can need after one kick, with a margin.
pub const MAX_ROUNDS: usize = 4 * QUEUE_SIZE as usize;

const RING_BYTES: u64 = 0x1_0000;
const AVAILABLE_OFFSET: u64 = 0x1000;
const USED_OFFSET: u64 = 0x2000;
const BUFFERS: u64 = 0x10_0000;

const FLAG_NEXT: u16 = 1;
const FLAG_WRITE: u16 = 2;

const _: () = assert!(MAX_QUEUES as u64 * RING_BYTES <= BUFFERS);

/// A descriptor of a chain.
#[derive(Clone, Copy, Debug)]
pub struct Buffer {
    /// Guest-physical address.
    pub address: u64,
    /// Length in bytes.
    pub length: u32,
    /// Whether the device may write to it.
    pub writable: bool,
}

/// Setup of a test guest.
#[derive(Clone, Copy, Debug)]
pub struct Setup {
    /// Offered features.
    pub offered: Features,
    /// Accepted features.
    pub negotiated: Features,
    /// How the driver numbers the queues.
    pub numbering: Numbering,
    /// Backing of guest memory.
    pub backing: Backing,
    /// Size of each of the two regions, in bytes.
    pub region_bytes: u64,
    /// Whether the host may use transparent huge pages.
    pub huge_pages: HugePages,
    /// When huge pages are discarded.
    pub discards: Discards,
}

impl Default for Setup {
    fn default() -> Self {
        Self {
            offered: Features::ALL_BALLOON,
            negotiated: Features::ALL_BALLOON,
            numbering: Numbering::DenseNegotiated,
            backing: Backing::Anonymous,
            region_bytes: REGION_BYTES,
            huge_pages: HugePages::Off,
            discards: Discards::AfterEachBuffer,
        }
    }
}

/// When whole huge pages of the balloon are discarded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Discards {
    /// More often than an owner must, so that tests of a few pages see their discards.
    AfterEachBuffer,
    /// As a device owner does.
    WhenDue,
}

/// The driver's view of a ring.
#[derive(Clone, Copy, Debug, Default)]
struct Ring {
    base: u64,
    next_descriptor: u16,
    available: u16,
    used: u16,
}

/// A guest with a driver, and its device.
#[derive(Debug)]
pub struct Guest {
    /// Guest memory.
    pub ram: Arc<GuestRam>,
    /// The device.
    pub balloon: Balloon,
    setup: Setup,
    rings: [Ring; MAX_QUEUES],
    next_buffer: u64,
}

impl Guest {
    /// Creates a guest whose driver has activated the device.
    pub fn new(setup: Setup) -> Self {
        let region = |start| RegionSpec {
            start: GuestAddress(start),
            size_bytes: setup.region_bytes,
            host_node: None,
        };
        let regions = [region(0), region(HIGH_START)];
        let ram = GuestRam::new(&regions, setup.backing, setup.huge_pages, Populate::Lazy)
            .expect("guest memory");
        let ram = Arc::new(ram);
        let config = BalloonConfig { features: setup.offered, ..BalloonConfig::default() };
        let balloon = Balloon::new(config, Arc::clone(&ram)).expect("a balloon");
        let mut guest = Self {
            ram,
            balloon,
            setup,
            rings: [Ring::default(); MAX_QUEUES],
            next_buffer: BUFFERS,
        };
        guest.activate();
        guest
    }

    /// A guest that accepted all features.
    pub fn with_all_features() -> Self {
        Self::new(Setup::default())
    }

    /// A guest that accepted only these features.
    pub fn with_features(negotiated: Features) -> Self {
        Self::new(Setup { negotiated, ..Setup::default() })
    }

    /// Sets up the driver's queues and activates the device, as when the driver is loaded.
    pub fn activate(&mut self) {
        let queues = self.fresh_queues();
        self.balloon.activate(self.setup.negotiated.0, queues).expect("activation");
    }

    /// The queues of a driver that was just loaded.
    pub fn fresh_queues(&mut self) -> Vec<Queue> {
        let offered = QueueSet::of(self.setup.offered);
        let negotiated = QueueSet::of(self.setup.negotiated);
        let mut queues: Vec<_> =
            (0..MAX_QUEUES).map(|_| Queue::new(QUEUE_SIZE).expect("a queue")).collect();
        for kind in negotiated.iter() {
            let base = kind as u64 * RING_BYTES;
            self.rings[kind as usize] = Ring { base, ..Ring::default() };
            self.write(base + AVAILABLE_OFFSET, &[0; 4]);
            self.write(base + USED_OFFSET, &[0; 4]);
            let queue = &mut queues[self.setup.numbering.index(kind, offered, negotiated)];
            queue.set_desc_table_address(Some(base as u32), None);
            queue.set_avail_ring_address(Some((base + AVAILABLE_OFFSET) as u32), None);
            queue.set_used_ring_address(Some((base + USED_OFFSET) as u32), None);
            queue.set_ready(true);
        }
        queues
    }

    /// Writes into guest memory.
    pub fn write(&self, address: u64, bytes: &[u8]) {
        self.ram.memory().write_slice(bytes, GuestAddress(address)).expect("an address in memory");
    }

    /// Reads a 16-bit number from guest memory.
    pub fn read_u16(&self, address: u64) -> u16 {
        self.ram.memory().read_obj(GuestAddress(address)).expect("an address in memory")
    }

    /// Writes bytes into the driver's part of memory; old buffers are eventually overwritten.
    pub fn buffer(&mut self, bytes: &[u8]) -> Buffer {
        if self.next_buffer + bytes.len() as u64 > DRIVER_BYTES {
            self.next_buffer = BUFFERS;
        }
        let address = self.next_buffer;
        // An odd distance: buffers need no alignment.
        self.next_buffer += bytes.len() as u64 + 1;
        self.write(address, bytes);
        Buffer { address, length: bytes.len() as u32, writable: false }
    }

    /// A buffer of page frame numbers.
    pub fn pfns(&mut self, pfns: impl IntoIterator<Item = u32>) -> Buffer {
        let bytes: Vec<u8> = pfns.into_iter().flat_map(u32::to_le_bytes).collect();
        self.buffer(&bytes)
    }

    /// Makes a chain available; returns its head.
    pub fn offer(&mut self, kind: QueueKind, chain: &[Buffer]) -> u16 {
        let head = self.rings[kind as usize].next_descriptor;
        for (position, buffer) in chain.iter().enumerate() {
            let index = (head + position as u16) % QUEUE_SIZE;
            let next = if position + 1 < chain.len() { FLAG_NEXT } else { 0 };
            let flags = next | if buffer.writable { FLAG_WRITE } else { 0 };
            self.store_descriptor(
                kind,
                index,
                buffer.address,
                buffer.length,
                flags,
                (index + 1) % QUEUE_SIZE,
            );
        }
        self.rings[kind as usize].next_descriptor = (head + chain.len() as u16) % QUEUE_SIZE;
        self.publish(kind, head);
        head
    }

    /// Writes a descriptor, valid or not.
    pub fn store_descriptor(
        &self,
        kind: QueueKind,
        index: u16,
        address: u64,
        length: u32,
        flags: u16,
        next: u16,
    ) {
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&address.to_le_bytes());
        bytes[8..12].copy_from_slice(&length.to_le_bytes());
        bytes[12..14].copy_from_slice(&flags.to_le_bytes());
        bytes[14..].copy_from_slice(&next.to_le_bytes());
        self.write(self.rings[kind as usize].base + 16 * u64::from(index % QUEUE_SIZE), &bytes);
    }

    /// Makes a head available, valid or not.
    pub fn publish(&mut self, kind: QueueKind, head: u16) {
        let ring = &mut self.rings[kind as usize];
        let entry = ring.base + AVAILABLE_OFFSET + 4 + 2 * u64::from(ring.available % QUEUE_SIZE);
        ring.available = ring.available.wrapping_add(1);
        let index = ring.available;
        self.write(entry, &head.to_le_bytes());
        self.set_available_index(kind, index);
    }

    /// Sets the available ring's index, valid or not.
    pub fn set_available_index(&self, kind: QueueKind, index: u16) {
        self.write(self.rings[kind as usize].base + AVAILABLE_OFFSET + 2, &index.to_le_bytes());
    }

    /// Transport index of a queue.
    pub fn index(&self, kind: QueueKind) -> usize {
        let (offered, negotiated) =
            (QueueSet::of(self.setup.offered), QueueSet::of(self.setup.negotiated));
        self.setup.numbering.index(kind, offered, negotiated)
    }

    /// Kicks a queue and acts as the device's owner, apart from the flush. Panics if the device
    /// does not finish.
    pub fn kick(&mut self, kind: QueueKind) -> Progress {
        let index = self.index(kind);
        let mut all = Progress::default();
        for _ in 0..MAX_ROUNDS {
            let progress = self.balloon.process_queue(index);
            all.interrupt |= progress.interrupt;
            if progress.due || self.setup.discards == Discards::AfterEachBuffer {
                self.balloon.discarder().discard_due();
            }
            all.pending = self.balloon.discarder().pending_bytes() > 0;
            if !progress.more {
                return all;
            }
        }
        panic!("the {} queue never becomes idle", kind.name());
    }

    /// Makes a chain available and kicks.
    pub fn send(&mut self, kind: QueueKind, chain: &[Buffer]) -> Progress {
        self.offer(kind, chain);
        self.kick(kind)
    }

    /// Inflates by these pages in one buffer.
    pub fn inflate(&mut self, pfns: impl IntoIterator<Item = u32>) -> Progress {
        let buffer = self.pfns(pfns);
        self.send(QueueKind::Inflate, &[buffer])
    }

    /// Deflates by these pages in one buffer.
    pub fn deflate(&mut self, pfns: impl IntoIterator<Item = u32>) -> Progress {
        let buffer = self.pfns(pfns);
        self.send(QueueKind::Deflate, &[buffer])
    }

    /// Address of the used ring's index, for a thread that watches it.
    pub fn used_index_address(&self, kind: QueueKind) -> u64 {
        self.rings[kind as usize].base + USED_OFFSET + 2
    }

    /// Heads that the device has returned since the last call.
    pub fn used(&mut self, kind: QueueKind) -> Vec<u32> {
        self.used_with_lengths(kind).into_iter().map(|(head, _)| head).collect()
    }

    /// Heads that the device has returned since the last call, with the reported number of bytes
    /// written.
    pub fn used_with_lengths(&mut self, kind: QueueKind) -> Vec<(u32, u32)> {
        let ring = self.rings[kind as usize];
        let index = self.read_u16(self.used_index_address(kind));
        let count = index.wrapping_sub(ring.used);
        let heads = (0..count).map(|position| {
            let entry = u64::from(ring.used.wrapping_add(position) % QUEUE_SIZE);
            let address = GuestAddress(ring.base + USED_OFFSET + 4 + 8 * entry);
            let entry = self.ram.memory().read_obj::<u64>(address).expect("a used ring in memory");
            (entry as u32, (entry >> 32) as u32)
        });
        let heads = heads.collect();
        self.rings[kind as usize].used = index;
        heads
    }

    /// Writes a mark into pages.
    pub fn mark(&self, pages: PageRange) {
        for pfn in pages.start.0..pages.end().0 {
            self.write(Pfn(pfn).address(), &[0xa5]);
        }
    }

    /// The pages whose mark is gone.
    pub fn unmarked(&self, pages: PageRange) -> Vec<u64> {
        let mark = |pfn: &u64| {
            self.ram
                .memory()
                .read_obj::<u8>(GuestAddress(Pfn(*pfn).address()))
                .expect("a page in memory")
        };
        (pages.start.0..pages.end().0).filter(|pfn| mark(pfn) != 0xa5).collect()
    }

    /// The pages of the first region that tests may use.
    pub fn low_pages(&self) -> PageRange {
        let first = DRIVER_BYTES / PAGE_SIZE_BYTES;
        PageRange::new(Pfn(first), self.setup.region_bytes / PAGE_SIZE_BYTES - first)
    }

    /// The pages of the second region.
    pub fn high_pages(&self) -> PageRange {
        PageRange::new(Pfn::containing(HIGH_START), self.setup.region_bytes / PAGE_SIZE_BYTES)
    }
}
