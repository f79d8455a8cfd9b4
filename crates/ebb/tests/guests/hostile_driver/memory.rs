//! Pages with known guest-physical addresses: one per queue for its rings, one for descriptor
//! tables, and a huge page whose parts are given to the device and discarded.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::ptr::NonNull;

use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mlock, mmap_anonymous};

use super::USED_OFFSET;

/// Size of a page in bytes.
pub const PAGE_BYTES: usize = 4096;
/// Size of a huge page in bytes.
pub const HUGE_BYTES: usize = 2 << 20;
/// Offset in the huge page of the page that the device writes to.
const WRITTEN_OFFSET: usize = HUGE_BYTES - PAGE_BYTES;
/// Maximum number of attempts to allocate a huge page, which may fail in a small guest.
const ATTEMPTS: usize = 16;

/// Locked memory, which is never freed.
#[derive(Clone, Copy)]
struct Area {
    start: NonNull<u8>,
    bytes: usize,
    /// Guest-physical address of the start.
    address: u64,
}

impl Area {
    fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: the area is mapped and readable until the process ends, and accessed only through
        // this value. The device writes used rings and zeroes pages at any time, unknown to the
        // compiler; memory safety does not depend on the values read here, and rings are read with
        // volatile accesses.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.bytes) }
    }
}

/// All memory of the driver.
pub struct Memory {
    rings: Vec<Area>,
    table: Area,
    prey: Area,
}

impl Memory {
    /// Allocates memory for `queues` queues.
    pub fn allocate(queues: usize) -> Result<Self, String> {
        // Locked pages are not swapped, but compaction may move them unless it is disabled.
        fs::write("/proc/sys/vm/compact_unevictable_allowed", "0")
            .map_err(|error| format!("compaction: {error}"))?;
        // Linux disables huge pages in small guests (mm/huge_memory.c, hugepage_init).
        fs::write("/sys/kernel/mm/transparent_hugepage/enabled", "madvise")
            .map_err(|error| format!("huge pages: {error}"))?;
        let rings = (0..queues).map(|_| page()).collect::<Result<_, _>>()?;
        Ok(Self { rings, table: page()?, prey: huge_page()? })
    }

    /// The page of a queue's rings.
    pub fn ring_mut(&mut self, queue: usize) -> &mut [u8] {
        self.rings[queue].bytes_mut()
    }

    /// Its guest-physical address.
    pub fn ring_address(&self, queue: usize) -> u64 {
        self.rings[queue].address
    }

    /// The index of a queue's used ring, which the device writes.
    pub fn used_index(&self, queue: usize) -> u16 {
        // A page is aligned for any integer.
        let words: NonNull<u16> = self.rings[queue].start.cast();
        // SAFETY: the index lies inside the ring's page.
        let index = unsafe { words.add(USED_OFFSET / 2 + 1) };
        // SAFETY: the page is mapped until the process ends.
        unsafe { index.read_volatile() }
    }

    /// A page for indirect descriptor tables.
    pub fn table_mut(&mut self) -> (&mut [u8], u64) {
        let address = self.table.address;
        (self.table.bytes_mut(), address)
    }

    /// Guest-physical address of the huge page.
    pub fn prey(&self) -> u64 {
        self.prey.address
    }

    /// First page frame of the huge page.
    pub fn prey_frame(&self) -> u32 {
        (self.prey.address / PAGE_BYTES as u64) as u32
    }

    /// Address that the device may write to: the huge page's last page, which is never used as
    /// input. The device's output there would be page frame numbers of the guest's first memory.
    pub fn written_by_device(&self) -> u64 {
        self.prey.address + WRITTEN_OFFSET as u64
    }

    /// The number of the request that the device wrote there; 0 if none.
    pub fn request_id(&mut self) -> u64 {
        let bytes = &self.prey.bytes_mut()[WRITTEN_OFFSET + 8..];
        bytes.first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes))
    }

    /// The huge page's content.
    pub fn prey_mut(&mut self) -> &mut [u8] {
        self.prey.bytes_mut()
    }

    /// Writes 32-bit words into the huge page.
    pub fn write_words(&mut self, offset: usize, words: impl IntoIterator<Item = u32>) {
        let bytes = &mut self.prey.bytes_mut()[offset..];
        for (place, word) in bytes.chunks_exact_mut(4).zip(words) {
            place.copy_from_slice(&word.to_le_bytes());
        }
    }
}

fn map(bytes: usize) -> Result<NonNull<u8>, String> {
    let protection = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: the kernel chooses an unused address.
    let mapped =
        unsafe { mmap_anonymous(std::ptr::null_mut(), bytes, protection, MapFlags::PRIVATE) };
    let start = mapped.map_err(|error| format!("{bytes} bytes: {error}"))?;
    NonNull::new(start.cast()).ok_or_else(|| "mapped at 0".to_owned())
}

fn lock(start: NonNull<u8>, bytes: usize) -> Result<(), String> {
    // SAFETY: locking changes no content; the range is a mapping of this process.
    unsafe { mlock(start.as_ptr().cast(), bytes) }
        .map_err(|error| format!("cannot lock {bytes} bytes: {error}"))
}

fn page() -> Result<Area, String> {
    let start = map(PAGE_BYTES)?;
    lock(start, PAGE_BYTES)?;
    let address = physical(start)?;
    Ok(Area { start, bytes: PAGE_BYTES, address })
}

fn huge_page() -> Result<Area, String> {
    for _ in 0..ATTEMPTS {
        let start = map(2 * HUGE_BYTES)?;
        let offset = start.as_ptr().align_offset(HUGE_BYTES);
        // SAFETY: an offset below 2 MiB is inside the mapping of 4 MiB.
        let aligned = unsafe { start.add(offset) };
        // SAFETY: this advice changes no content; the range is a mapping of this process.
        unsafe { madvise(aligned.as_ptr().cast(), HUGE_BYTES, Advice::LinuxHugepage) }
            .map_err(|error| format!("MADV_HUGEPAGE: {error}"))?;
        lock(aligned, HUGE_BYTES)?;
        let first = physical(aligned)?;
        // SAFETY: the last page of the huge page is inside the mapping.
        let last = physical(unsafe { aligned.add(HUGE_BYTES - PAGE_BYTES) })?;
        if first.is_multiple_of(HUGE_BYTES as u64)
            && last - first == (HUGE_BYTES - PAGE_BYTES) as u64
        {
            return Ok(Area { start: aligned, bytes: HUGE_BYTES, address: first });
        }
    }
    Err("the guest has no huge page".to_owned())
}

/// Guest-physical address of a locked page (Linux Documentation/admin-guide/mm/pagemap.rst).
fn physical(start: NonNull<u8>) -> Result<u64, String> {
    let page = start.as_ptr() as u64 / PAGE_BYTES as u64;
    let mut entry = [0; 8];
    let file = File::open("/proc/self/pagemap").map_err(|error| format!("pagemap: {error}"))?;
    file.read_exact_at(&mut entry, page * 8).map_err(|error| format!("pagemap: {error}"))?;
    let entry = u64::from_le_bytes(entry);
    let frame = entry & ((1 << 55) - 1);
    if entry >> 63 == 0 || frame == 0 {
        return Err(format!("page {page:#x} has no frame: {entry:#x}"));
    }
    Ok(frame * PAGE_BYTES as u64)
}
