//! The disk and the entropy device as drivers use and misuse them, on rings in plain memory.

use std::io::Write;

use ebb_abi::Pfn;
use ebb_guest_ram::{Backing, GuestMemory, GuestRam, HugePages, PageBitmap, Populate, RegionSpec};
use proptest::prelude::*;
use virtio_bindings::virtio_blk as blk;
use virtio_queue::{Queue, QueueT};
use vm_memory::{Bytes, GuestAddress};

use super::block::{Block, DiskLock};
use super::rng::Rng;
use super::{VirtioDevice, Work};
use crate::config::{DiskConfig, RateLimits, Switch};

const MEMORY_BYTES: u64 = 1 << 20;
const RING_SIZE: u16 = 16;
const DESCRIPTORS: u64 = 0x1000;
const AVAILABLE: u64 = 0x2000;
const USED: u64 = 0x3000;
const DATA: u64 = 0x10000;
const DISK_SECTORS: usize = 8;

const NEXT: u16 = 1;
const WRITE: u16 = 2;

/// One descriptor (virtio 1.3 section 2.7.5).
#[derive(Debug, Clone, Copy)]
struct Descriptor {
    address: u64,
    length: u32,
    flags: u16,
    next: u16,
}

fn memory(descriptors: &[Descriptor], heads: &[u16]) -> GuestMemory {
    let memory = GuestMemory::from_ranges(&[(GuestAddress(0), MEMORY_BYTES as usize)]).unwrap();
    for (index, descriptor) in descriptors.iter().enumerate() {
        let mut bytes = descriptor.address.to_le_bytes().to_vec();
        bytes.extend(descriptor.length.to_le_bytes());
        bytes.extend(descriptor.flags.to_le_bytes());
        bytes.extend(descriptor.next.to_le_bytes());
        memory.write_slice(&bytes, GuestAddress(DESCRIPTORS + 16 * index as u64)).unwrap();
    }
    memory.write_obj(heads.len() as u16, GuestAddress(AVAILABLE + 2)).unwrap();
    for (index, head) in heads.iter().enumerate() {
        memory.write_obj(*head, GuestAddress(AVAILABLE + 4 + 2 * index as u64)).unwrap();
    }
    memory
}

fn queue() -> Queue {
    let mut queue = Queue::new(128).unwrap();
    queue.set_size(RING_SIZE);
    queue.set_desc_table_address(Some(DESCRIPTORS as u32), None);
    queue.set_avail_ring_address(Some(AVAILABLE as u32), None);
    queue.set_used_ring_address(Some(USED as u32), None);
    queue.set_ready(true);
    queue
}

/// Lets the device work until it is idle; panics if it never is.
fn drive(device: &mut impl VirtioDevice) -> Work {
    device.activate(0, vec![queue()]).unwrap();
    let mut all = Work::default();
    for _ in 0..64 {
        let work = device.process_queue(0);
        all.interrupt |= work.interrupt;
        if !work.more {
            return all;
        }
    }
    panic!("the device never becomes idle");
}

fn image() -> tempfile::NamedTempFile {
    let mut image = tempfile::NamedTempFile::new().unwrap();
    for sector in 0..DISK_SECTORS {
        image.write_all(&[sector as u8 + 1; 512]).unwrap();
    }
    image
}

fn disk(image: &tempfile::NamedTempFile, readonly: Switch, memory: &GuestMemory) -> Block {
    let config = DiskConfig { path: image.path().to_owned(), readonly, ..DiskConfig::default() };
    Block::open(&config, 0, memory.clone(), DiskLock::Now).unwrap()
}

fn entropy(memory: GuestMemory) -> Rng {
    Rng::new(memory, RateLimits::default())
}

/// A request of a header, `length` bytes of data and a status byte.
fn request(kind: u32, sector: u64, length: u32) -> GuestMemory {
    let data_flags = if kind == blk::VIRTIO_BLK_T_OUT { NEXT } else { NEXT | WRITE };
    let memory = memory(
        &[
            Descriptor { address: DATA, length: 16, flags: NEXT, next: 1 },
            Descriptor { address: DATA + 0x1000, length, flags: data_flags, next: 2 },
            Descriptor { address: DATA + 0x100, length: 1, flags: WRITE, next: 0 },
        ],
        &[0],
    );
    memory.write_obj(kind, GuestAddress(DATA)).unwrap();
    memory.write_obj(sector, GuestAddress(DATA + 8)).unwrap();
    memory.write_obj(0xaau8, GuestAddress(DATA + 0x100)).unwrap();
    memory
}

fn status(memory: &GuestMemory) -> u32 {
    u32::from(memory.read_obj::<u8>(GuestAddress(DATA + 0x100)).unwrap())
}

#[test]
fn sectors_are_read_and_written() {
    let image = image();
    let memory = request(blk::VIRTIO_BLK_T_IN, 2, 1024);
    assert!(drive(&mut disk(&image, Switch::Off, &memory)).interrupt);
    assert_eq!(status(&memory), blk::VIRTIO_BLK_S_OK);
    assert_eq!(memory.read_obj::<u8>(GuestAddress(DATA + 0x1000)).unwrap(), 3);
    assert_eq!(memory.read_obj::<u8>(GuestAddress(DATA + 0x1000 + 1023)).unwrap(), 4);
    assert_eq!(memory.read_obj::<u32>(GuestAddress(USED + 8)).unwrap(), 1025);

    let memory = request(blk::VIRTIO_BLK_T_OUT, 7, 512);
    memory.write_slice(&[9; 512], GuestAddress(DATA + 0x1000)).unwrap();
    drive(&mut disk(&image, Switch::Off, &memory));
    assert_eq!(status(&memory), blk::VIRTIO_BLK_S_OK);
    assert_eq!(std::fs::read(image.path()).unwrap()[7 * 512..], [9; 512]);
}

/// Pages missing from the dirty log do not reach the destination of a migration.
#[test]
fn pages_written_by_devices_are_logged() {
    let image = image();
    let read = || request(blk::VIRTIO_BLK_T_IN, 0, 4096);
    let random = || {
        memory(&[Descriptor { address: DATA + 0xff0, length: 4096, flags: WRITE, next: 0 }], &[0])
    };
    let written = |requested: GuestMemory, work: &dyn Fn(&GuestMemory) -> Work| {
        let region =
            RegionSpec { start: GuestAddress(0), size_bytes: MEMORY_BYTES, host_node: None };
        let ram =
            GuestRam::new(&[region], Backing::Anonymous, HugePages::Off, Populate::Lazy).unwrap();
        let content = |memory: &GuestMemory| {
            let mut content = vec![0_u8; MEMORY_BYTES as usize];
            memory.read_slice(&mut content, GuestAddress(0)).unwrap();
            content
        };
        let before = content(&requested);
        ram.memory().write_slice(&before, GuestAddress(0)).unwrap();
        ram.start_write_log().unwrap();
        assert!(work(ram.memory()).interrupt);
        let mut logged = PageBitmap::new(&ram.page_ranges());
        ram.take_write_log(&mut logged);
        let after = content(ram.memory());
        let changed: Vec<u64> = (0..MEMORY_BYTES)
            .filter(|address| before[*address as usize] != after[*address as usize])
            .collect();
        let missing: Vec<_> =
            changed.iter().filter(|address| !logged.contains(Pfn::containing(**address))).collect();
        assert!(missing.is_empty(), "{missing:#x?}");
        logged.ranges().flat_map(|range| range.start.0..range.end().0).collect::<Vec<_>>()
    };
    // Used ring, status byte, data.
    let disk_pages = written(read(), &|memory| drive(&mut disk(&image, Switch::Off, memory)));
    assert_eq!(disk_pages, [0x3, 0x10, 0x11]);
    let random_pages = written(random(), &|memory| drive(&mut entropy(memory.clone())));
    assert_eq!(random_pages, [0x3, 0x10, 0x11]);
}

#[test]
fn invalid_requests_are_answered_with_an_error() {
    let image = image();
    let before = std::fs::read(image.path()).unwrap();
    let cases = [
        (blk::VIRTIO_BLK_T_IN, 8, 512, blk::VIRTIO_BLK_S_IOERR),
        (blk::VIRTIO_BLK_T_IN, u64::MAX, 512, blk::VIRTIO_BLK_S_IOERR),
        (blk::VIRTIO_BLK_T_IN, 0, 100, blk::VIRTIO_BLK_S_IOERR),
        (blk::VIRTIO_BLK_T_OUT, 7, 1024, blk::VIRTIO_BLK_S_IOERR),
        (77, 0, 512, blk::VIRTIO_BLK_S_UNSUPP),
    ];
    for (kind, sector, length, expected) in cases {
        let memory = request(kind, sector, length);
        drive(&mut disk(&image, Switch::Off, &memory));
        assert_eq!(status(&memory), expected, "{kind} {sector} {length}");
    }
    let memory = request(blk::VIRTIO_BLK_T_OUT, 0, 512);
    drive(&mut disk(&image, Switch::On, &memory));
    assert_eq!(status(&memory), blk::VIRTIO_BLK_S_IOERR);
    assert_eq!(std::fs::read(image.path()).unwrap(), before);
}

#[test]
fn a_disk_has_one_writer() {
    let image = image();
    let memory = request(blk::VIRTIO_BLK_T_IN, 0, 512);
    let first = disk(&image, Switch::Off, &memory);
    let config =
        DiskConfig { path: image.path().to_owned(), readonly: Switch::On, ..DiskConfig::default() };
    let error = Block::open(&config, 1, memory.clone(), DiskLock::Now).err().unwrap().to_string();
    assert!(error.contains("in use"), "{error}");
    drop(first);
    let _readers = [disk(&image, Switch::On, &memory), disk(&image, Switch::On, &memory)];
}

#[test]
fn entropy_fills_writable_buffers() {
    let memory = memory(&[Descriptor { address: DATA, length: 64, flags: WRITE, next: 0 }], &[0]);
    assert!(drive(&mut entropy(memory.clone())).interrupt);
    assert_eq!(memory.read_obj::<u32>(GuestAddress(USED + 8)).unwrap(), 64);
    let mut bytes = [0; 64];
    memory.read_slice(&mut bytes, GuestAddress(DATA)).unwrap();
    assert_ne!(bytes, [0; 64]);
}

#[test]
fn limited_entropy_stays_in_the_queue() {
    let buffer = Descriptor { address: DATA, length: 64, flags: WRITE, next: 0 };
    let memory = memory(&[buffer], &[0, 0, 0]);
    let limits =
        RateLimits { bandwidth: Some(1), bandwidth_burst: Some(128), ..RateLimits::default() };
    let mut device = Rng::new(memory.clone(), limits);
    assert!(drive(&mut device).interrupt);
    assert_eq!(memory.read_obj::<u16>(GuestAddress(USED + 2)).unwrap(), 2);
    assert_eq!(device.queue_states()[0].next_avail, 2);
    assert_eq!(device.throttle().unwrap().delayed(), 1);
}

/// Virtio 1.3 section 2.7.5.3.1.
#[test]
fn indirect_tables_are_returned_unread() {
    const INDIRECT: u16 = 4;
    let table = DATA + 0x2000;
    let chain = |memory: &GuestMemory, entries: &[Descriptor]| {
        for (index, entry) in entries.iter().enumerate() {
            let at = table + 16 * index as u64;
            memory.write_obj(entry.address, GuestAddress(at)).unwrap();
            memory.write_obj(entry.length, GuestAddress(at + 8)).unwrap();
            memory.write_obj(entry.flags, GuestAddress(at + 12)).unwrap();
            memory.write_obj(entry.next, GuestAddress(at + 14)).unwrap();
        }
    };
    let head = |entries: u32| Descriptor {
        address: table,
        length: 16 * entries,
        flags: INDIRECT,
        next: 0,
    };
    let image = image();
    let requested = memory(&[head(3)], &[0]);
    chain(
        &requested,
        &[
            Descriptor { address: DATA, length: 16, flags: NEXT, next: 1 },
            Descriptor { address: DATA + 0x1000, length: 512, flags: NEXT | WRITE, next: 2 },
            Descriptor { address: DATA + 0x100, length: 1, flags: WRITE, next: 0 },
        ],
    );
    requested.write_obj(0xaa_u8, GuestAddress(DATA + 0x100)).unwrap();
    assert!(drive(&mut disk(&image, Switch::Off, &requested)).interrupt);
    assert_eq!(status(&requested), 0xaa);
    assert_eq!(requested.read_obj::<u32>(GuestAddress(USED + 8)).unwrap(), 0);

    let requested = memory(&[head(1)], &[0]);
    chain(&requested, &[Descriptor { address: DATA, length: 64, flags: WRITE, next: 0 }]);
    assert!(drive(&mut entropy(requested.clone())).interrupt);
    assert_eq!(requested.read_obj::<u32>(GuestAddress(USED + 8)).unwrap(), 0);
    assert_eq!(requested.read_obj::<u64>(GuestAddress(DATA)).unwrap(), 0);
}

fn descriptor() -> impl Strategy<Value = Descriptor> {
    let address = prop_oneof![0..MEMORY_BYTES + 0x2000, any::<u64>()];
    let length = prop_oneof![0u32..2048, any::<u32>()];
    (address, length, 0u16..8, 0..RING_SIZE + 2)
        .prop_map(|(address, length, flags, next)| Descriptor { address, length, flags, next })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn no_ring_stops_a_device_or_makes_a_disk_grow(
        descriptors in prop::collection::vec(descriptor(), 1..RING_SIZE as usize),
        heads in prop::collection::vec(0..RING_SIZE + 2, 0..RING_SIZE as usize),
    ) {
        let image = image();
        drive(&mut disk(&image, Switch::Off, &memory(&descriptors, &heads)));
        prop_assert_eq!(image.as_file().metadata().unwrap().len(), (DISK_SECTORS * 512) as u64);
        drive(&mut entropy(memory(&descriptors, &heads)));
    }
}
