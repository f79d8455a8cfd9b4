//! The disk's caches and limits; its requests are tested with those of other devices.

use std::fs::OpenOptions;
use std::io::{Seek as _, SeekFrom, Write as _};
use std::os::unix::fs::MetadataExt as _;

use rustix::mm::{MapFlags, ProtFlags};
use virtio_queue::QueueT;
use vm_memory::{Bytes, GuestAddress};

use super::driver::Driver;
use super::image::Image;
use super::raw::Raw;
use super::*;
use crate::config::RateLimits;
use std::os::unix::fs::FileExt as _;
use std::path::Path;

const FLUSH: u64 = 1 << blk::VIRTIO_BLK_F_FLUSH;
const RING: u16 = 64;
const DESCRIPTORS: u64 = 0x1000;
const AVAILABLE: u64 = 0x2000;
const USED: u64 = 0x3000;
const HEADER: u64 = 0x4000;
const STATUS: u64 = 0x5000;
const DATA: u64 = 0x10000;
const MEMORY_BYTES: usize = 1 << 20;

fn open(path: &Path, memory: &GuestMemory) -> Result<Block, DiskError> {
    open_limited(path, memory, RateLimits::default())
}

fn open_limited(path: &Path, memory: &GuestMemory, limits: RateLimits) -> Result<Block, DiskError> {
    let config = DiskConfig { path: path.to_owned(), limits, ..DiskConfig::default() };
    Block::open(&config, 0, memory.clone(), DiskLock::Later)
}

/// `count` requests of `kind`, each with `length` bytes of data at the disk's beginning.
fn requests(kind: u32, length: u32, count: u16) -> (GuestMemory, Queue) {
    let memory = GuestMemory::from_ranges(&[(GuestAddress(0), MEMORY_BYTES)]).unwrap();
    let data_flags = if kind == blk::VIRTIO_BLK_T_IN { 3 } else { 1 };
    memory.write_obj(kind, GuestAddress(HEADER)).unwrap();
    memory.write_obj(0_u64, GuestAddress(HEADER + 8)).unwrap();
    for request in 0..count {
        let first = request * 3;
        let chain =
            [(HEADER, 16, 1_u16), (DATA, length, data_flags), (STATUS + u64::from(request), 1, 2)];
        for (index, (address, length, flags)) in (first..).zip(chain) {
            let at = DESCRIPTORS + 16 * u64::from(index);
            memory.write_obj(address, GuestAddress(at)).unwrap();
            memory.write_obj(length, GuestAddress(at + 8)).unwrap();
            memory.write_obj(flags, GuestAddress(at + 12)).unwrap();
            memory.write_obj(index + 1, GuestAddress(at + 14)).unwrap();
        }
        memory.write_obj(0xff_u8, GuestAddress(STATUS + u64::from(request))).unwrap();
        memory.write_obj(first, GuestAddress(AVAILABLE + 4 + 2 * u64::from(request))).unwrap();
    }
    memory.write_obj(count, GuestAddress(AVAILABLE + 2)).unwrap();
    let mut queue = Queue::new(QUEUE_SIZE).unwrap();
    queue.set_size(RING);
    queue.set_desc_table_address(Some(DESCRIPTORS as u32), None);
    queue.set_avail_ring_address(Some(AVAILABLE as u32), None);
    queue.set_used_ring_address(Some(USED as u32), None);
    queue.set_ready(true);
    (memory, queue)
}

fn completed(memory: &GuestMemory) -> u16 {
    memory.read_obj(GuestAddress(USED + 2)).unwrap()
}

/// /dev/zero takes writes and cannot be synced: a request fails if and only if it syncs.
#[test]
fn writes_of_a_driver_that_cannot_flush_are_synced() {
    for (features, expected) in [(FLUSH, blk::VIRTIO_BLK_S_OK), (0, blk::VIRTIO_BLK_S_IOERR)] {
        let (memory, queue) = requests(blk::VIRTIO_BLK_T_OUT, 512, 1);
        let image = tempfile::NamedTempFile::new().unwrap();
        image.as_file().set_len(4096).unwrap();
        let mut disk = open(image.path(), &memory).unwrap();
        let zero = OpenOptions::new().read(true).write(true).open("/dev/zero").unwrap();
        let image = Image::Raw(Raw::new(zero));
        disk.disk = Arc::new(Disk::new(image, memory.clone(), 8, 0));
        disk.activate(features, vec![queue]).unwrap();
        disk.process_queue(0);
        let status: u8 = memory.read_obj(GuestAddress(STATUS)).unwrap();
        assert_eq!(u32::from(status), expected, "features {features:#x}");
    }
}

#[test]
fn a_call_ends_after_a_flush_and_after_some_mebibytes() {
    let image = tempfile::NamedTempFile::new().unwrap();
    image.as_file().set_len(1 << 20).unwrap();
    let cases = [
        (blk::VIRTIO_BLK_T_IN, 4096, 16, "small requests"),
        (blk::VIRTIO_BLK_T_FLUSH, 0, 1, "flushes"),
        (blk::VIRTIO_BLK_T_IN, 512 << 10, 8, "large requests"),
    ];
    for (kind, length, expected, what) in cases {
        let (memory, queue) = requests(kind, length, 18);
        let mut disk = open(image.path(), &memory).unwrap();
        disk.activate(FLUSH, vec![queue]).unwrap();
        assert!(disk.process_queue(0).more);
        assert_eq!(completed(&memory), expected, "{what}");
        while disk.process_queue(0).more {}
        assert_eq!(completed(&memory), 18, "{what}");
    }
}

/// A request that must wait stays in the queue, as part of what a snapshot saves, and a reset by
/// the driver fills no bucket.
#[test]
fn a_limited_disk_leaves_requests_in_the_queue() {
    let image = tempfile::NamedTempFile::new().unwrap();
    image.as_file().set_len(1 << 20).unwrap();
    let limits =
        RateLimits { bandwidth: Some(1), bandwidth_burst: Some(2 * 4096), ..RateLimits::default() };
    let (memory, queue) = requests(blk::VIRTIO_BLK_T_IN, 4096, 5);
    let mut disk = open_limited(image.path(), &memory, limits).unwrap();
    disk.activate(FLUSH, vec![queue]).unwrap();
    let work = disk.process_queue(0);
    assert!(work.interrupt && !work.more);
    assert_eq!(completed(&memory), 2);
    assert_eq!(disk.queue_states()[0].next_avail, 2);
    assert_eq!(disk.throttle.delayed(), 1);
    assert!(disk.throttle.resume_at().is_some());

    let state = disk.queue_states().remove(0);
    disk.reset();
    disk.activate(FLUSH, vec![Queue::try_from(state).unwrap()]).unwrap();
    disk.process_queue(0);
    assert_eq!(completed(&memory), 2);

    disk.throttle.set(RateLimits::default(), Instant::now());
    while disk.process_queue(0).more {}
    assert_eq!(completed(&memory), 5);
}

#[test]
fn a_request_above_the_burst_is_served() {
    let image = tempfile::NamedTempFile::new().unwrap();
    image.as_file().set_len(1 << 20).unwrap();
    let limits = RateLimits { bandwidth: Some(1), ..RateLimits::default() };
    let (memory, queue) = requests(blk::VIRTIO_BLK_T_IN, 4096, 2);
    let mut disk = open_limited(image.path(), &memory, limits).unwrap();
    disk.activate(FLUSH, vec![queue]).unwrap();
    disk.process_queue(0);
    assert_eq!(completed(&memory), 1);
}

/// The largest request that the configuration allows.
#[test]
fn the_largest_request_is_served() {
    let memory = GuestMemory::from_ranges(&[(GuestAddress(0), MEMORY_BYTES)]).unwrap();
    let image = tempfile::NamedTempFile::new().unwrap();
    image.as_file().set_len(MAX_TRANSFER_BYTES + 512).unwrap();
    let disk = open(image.path(), &memory).unwrap();
    let mut config = [0; 16];
    disk.read_config(0, &mut config);
    let number = |at: usize| u32::from_le_bytes(config[at..at + 4].try_into().unwrap());
    assert_ne!(disk.features() & 1 << blk::VIRTIO_BLK_F_SIZE_MAX, 0);
    let largest = u64::from(number(8)) * u64::from(number(12));
    assert_eq!(MAX_TRANSFER_BYTES, largest);
}

/// A failed write-back is reported once for each open file, which also has its own position.
#[test]
fn writing_back_early_uses_an_open_file_of_its_own() {
    let image = tempfile::NamedTempFile::new().unwrap();
    image.as_file().set_len(4096).unwrap();
    let memory = GuestMemory::from_ranges(&[(GuestAddress(0), MEMORY_BYTES)]).unwrap();
    let disk = open(image.path(), &memory).unwrap();
    let mut early = disk.written_file().unwrap().unwrap();
    early.sync_data().unwrap();
    early.seek(SeekFrom::Start(7)).unwrap();
    assert_ne!(disk.disk.image.file().stream_position().unwrap(), 7);
    assert_eq!(early.metadata().unwrap().ino(), disk.disk.image.file().metadata().unwrap().ino());
    let config =
        DiskConfig { path: image.path().to_owned(), readonly: Switch::On, ..DiskConfig::default() };
    let disk = Block::open(&config, 0, memory, DiskLock::Later).unwrap();
    assert!(disk.written_file().unwrap().is_none());
}

/// A host that had read from a shared disk must not use these pages after another has written.
#[test]
fn an_acquired_disk_is_read_again() {
    const BYTES: usize = 16 << 10;
    // /tmp may be in memory, where pages cannot be dropped.
    let image = tempfile::NamedTempFile::new_in(env!("CARGO_MANIFEST_DIR")).unwrap();
    image.as_file().write_all(&[7; BYTES]).unwrap();
    image.as_file().sync_all().unwrap();
    let memory = GuestMemory::from_ranges(&[(GuestAddress(0), MEMORY_BYTES)]).unwrap();
    let mut disk = open(image.path(), &memory).unwrap();
    disk.disk.image.file().read_exact_at(&mut [0; BYTES], 0).unwrap();
    assert!(cached_pages(&image) > 0);
    disk.acquire_exclusive().unwrap();
    assert_eq!(cached_pages(&image), 0);
}

fn cached_pages(image: &tempfile::NamedTempFile) -> usize {
    let bytes = image.as_file().metadata().unwrap().len() as usize;
    let mut resident = vec![0_u8; bytes.div_ceil(4096)];
    let null = std::ptr::null_mut();
    // SAFETY: a fresh mapping replaces none, and its memory is never accessed.
    let at = unsafe {
        rustix::mm::mmap(null, bytes, ProtFlags::READ, MapFlags::SHARED, image.as_file(), 0)
    };
    let at = at.unwrap();
    // SAFETY: the vector has an entry for each page of the mapping.
    assert_eq!(unsafe { libc::mincore(at, bytes, resident.as_mut_ptr()) }, 0);
    // SAFETY: the mapping is this function's own.
    unsafe { rustix::mm::munmap(at, bytes) }.unwrap();
    resident.iter().filter(|page| **page & 1 != 0).count()
}

/// The driver is interrupted when the request that it waits for is done, and notifies the device of
/// the next one that it has not taken.
#[test]
fn a_driver_names_the_request_that_it_waits_for() {
    let image = tempfile::NamedTempFile::new().unwrap();
    image.as_file().set_len(4096).unwrap();
    for (waits_for, interrupted) in [(2_u16, true), (3, false)] {
        let (memory, queue) = requests(blk::VIRTIO_BLK_T_IN, 512, 3);
        let at = AVAILABLE + 4 + 2 * u64::from(RING);
        memory.write_obj(waits_for, GuestAddress(at)).unwrap();
        let mut disk = open(image.path(), &memory).unwrap();
        disk.activate(FLUSH | 1 << VIRTIO_RING_F_EVENT_IDX, vec![queue]).unwrap();
        let work = disk.process_queue(0);
        assert_eq!(completed(&memory), 3);
        assert_eq!((work.interrupt, work.served), (interrupted, true), "{waits_for}");
        let next: u16 = memory.read_obj(GuestAddress(USED + 4 + 8 * u64::from(RING))).unwrap();
        assert_eq!(next, 3);
    }
}

/// An indirect table may be as long as the queue; a longer one is returned unread.
#[test]
fn an_indirect_table_is_no_longer_than_the_queue() {
    const TABLE: u64 = 0x8000;
    let image = tempfile::NamedTempFile::new().unwrap();
    image.as_file().set_len(1 << 20).unwrap();
    for (descriptors, status) in [(QUEUE_SIZE, 0), (QUEUE_SIZE + 1, 0xff_u8)] {
        let (memory, queue) = requests(blk::VIRTIO_BLK_T_IN, 512, 1);
        let last = descriptors - 1;
        for index in 0..descriptors {
            let (address, length, flags) = match index {
                0 => (HEADER, 16_u32, 1_u16),
                _ if index == last => (STATUS, 1, 2),
                _ => (DATA + 512 * u64::from(index), 512, 3),
            };
            let at = TABLE + 16 * u64::from(index);
            memory.write_obj(address, GuestAddress(at)).unwrap();
            memory.write_obj(length, GuestAddress(at + 8)).unwrap();
            memory.write_obj(flags, GuestAddress(at + 12)).unwrap();
            memory.write_obj(index + 1, GuestAddress(at + 14)).unwrap();
        }
        memory.write_obj(TABLE, GuestAddress(DESCRIPTORS)).unwrap();
        memory.write_obj(16 * u32::from(descriptors), GuestAddress(DESCRIPTORS + 8)).unwrap();
        memory.write_obj(4_u16, GuestAddress(DESCRIPTORS + 12)).unwrap();
        let mut disk = open(image.path(), &memory).unwrap();
        disk.activate(FLUSH | 1 << VIRTIO_RING_F_INDIRECT_DESC, vec![queue]).unwrap();
        disk.process_queue(0);
        assert_eq!(completed(&memory), 1);
        let found: u8 = memory.read_obj(GuestAddress(STATUS)).unwrap();
        assert_eq!(found, status, "{descriptors}");
    }
}

/// Opens an image as a client or the companion does.
fn files(path: &Path) -> Vec<File> {
    let writable = OpenOptions::new().read(true).write(true).open(path).unwrap();
    vec![writable, File::open(path).unwrap()]
}

#[test]
fn another_image_takes_the_place_of_the_first_one() {
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name);
    for (name, bytes) in [("a", 8192), ("b", 4096), ("odd", 700), ("large", (64 << 30) + 512)] {
        File::create(path(name)).unwrap().set_len(bytes).unwrap();
    }
    let mut driver = Driver::new();
    let config = DiskConfig { path: path("a"), ..DiskConfig::default() };
    let mut disk = Block::open(&config, 0, driver.memory.clone(), DiskLock::Now).unwrap();
    let exit = Arc::new(ExitSignal::new().unwrap());
    disk.start_threads("disk0", &Filters::new(Switch::Off).unwrap(), &exit).unwrap();
    disk.activate(FLUSH, vec![Driver::queue()]).unwrap();
    assert_eq!(driver.request(&mut disk, blk::VIRTIO_BLK_T_OUT, 0, &[7; 512]), 0);

    let problem = |disk: &mut Block, name: &str, files: Vec<File>| {
        disk.replace(&path(name), files).unwrap_err().to_string()
    };
    let other = Block::open(
        &DiskConfig { path: path("b"), ..DiskConfig::default() },
        1,
        driver.memory.clone(),
        DiskLock::Now,
    );
    assert!(problem(&mut disk, "b", files(&path("b"))).contains("in use by another process"));
    drop(other);
    assert!(problem(&mut disk, "odd", files(&path("odd"))).contains("not a multiple of 512"));
    assert!(problem(&mut disk, "large", files(&path("large"))).contains("has provided for"));
    let reading = || File::open(path("b")).unwrap();
    assert!(problem(&mut disk, "b", vec![reading()]).contains("two open files"));
    assert!(problem(&mut disk, "b", vec![reading(), reading()]).contains("open for writing"));
    let mixed = vec![files(&path("b")).remove(0), File::open(path("a")).unwrap()];
    assert!(problem(&mut disk, "b", mixed).contains("not the same"));
    let folder = vec![File::open(directory.path()).unwrap(), reading()];
    assert!(problem(&mut disk, "b", folder).contains("neither a file nor a block device"));
    assert_eq!((disk.disk_bytes(), disk.base_path()), (Some(8192), &*path("a")));

    disk.replace(&path("b"), files(&path("b"))).unwrap();
    assert_eq!((disk.disk_bytes(), disk.base_path()), (Some(4096), &*path("b")));
    assert_eq!(driver.request(&mut disk, blk::VIRTIO_BLK_T_OUT, 1, &[8; 512]), 0);
    assert_ne!(driver.request(&mut disk, blk::VIRTIO_BLK_T_IN, 8, &[0; 512]), 0);
    assert_eq!(disk.info().requests.writes, 2);
    let content = |name: &str| std::fs::read(path(name)).unwrap();
    assert!(content("a")[..512] == [7; 512] && content("a")[512..1024] == [0; 512]);
    assert!(content("b")[..512] == [0; 512] && content("b")[512..1024] == [8; 512]);
    assert!(disk.written_file().unwrap().is_some());
    // The lock of the first image is free, and that of the second one is not.
    let lock_of = |name: &str| lock(&reading_of(&path(name)), &path(name), Switch::Off);
    lock_of("a").unwrap();
    lock_of("b").unwrap_err();

    // Its own image has another size: smaller ones are accepted too.
    File::options().write(true).open(path("b")).unwrap().set_len(2048).unwrap();
    disk.replace(&path("b"), files(&path("b"))).unwrap();
    assert_eq!(disk.disk_bytes(), Some(2048));
}

fn reading_of(path: &Path) -> File {
    File::open(path).unwrap()
}

#[test]
fn images_of_some_disks_stay() {
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name);
    for name in ["base", "other"] {
        File::create(path(name)).unwrap().set_len(1 << 20).unwrap();
    }
    let memory = Driver::new().memory;
    let config =
        DiskConfig { path: path("base"), overlay: Some(path("overlay")), ..DiskConfig::default() };
    let mut disk = Block::open(&config, 0, memory.clone(), DiskLock::Now).unwrap();
    let error = disk.replace(&path("other"), files(&path("other"))).unwrap_err();
    assert!(error.to_string().contains("overlay"), "{error}");
    // An image of another format, and one that is only read.
    let config = DiskConfig {
        path: path("overlay"),
        format: DiskFormat::Qcow2,
        readonly: Switch::On,
        ..DiskConfig::default()
    };
    drop(disk);
    let Err(error) = Block::open(&config, 0, memory.clone(), DiskLock::Now) else {
        panic!("an overlay without its base")
    };
    assert!(error.to_string().contains("cannot use the qcow2 image"), "{error}");
    let config = DiskConfig { path: path("base"), readonly: Switch::On, ..DiskConfig::default() };
    let mut disk = Block::open(&config, 0, memory, DiskLock::Now).unwrap();
    disk.replace(&path("other"), files(&path("other"))).unwrap_err();
    disk.replace(&path("other"), vec![reading_of(&path("other"))]).unwrap();
    assert!(disk.written_file().unwrap().is_none());
}
