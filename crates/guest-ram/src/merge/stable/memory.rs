//! Creation of stable pages.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use ebb_abi::PAGE_SIZE_BYTES;
use rustix::fs::{
    FallocateFlags, MemfdFlags, SealFlags, fallocate, fcntl_add_seals, ftruncate, memfd_create,
};
use rustix::mm::{Advice, madvise};

use super::free_slots::FreeSlots;
use super::segments::{Access, FileMapping};
use super::{StableError, StableSegments, StableSlot};
use crate::mapping::prefer_node;
use crate::resident::STABLE_FILE_NAME;

const PAGE: usize = PAGE_SIZE_BYTES as usize;

/// Pages of a segment for this process only: 1 GiB, of which only slots in use take memory.
const OWN_PAGES: u32 = 1 << 18;

/// Pages of a sealed segment: 32 MiB. Its free slots keep their memory until all of it is free.
const SEALED_PAGES: u32 = 1 << 13;

/// Minimum size of the pieces in which a sealed segment's free slots are allocated; below it, a new
/// segment is created, if it may be.
const MIN_PIECE_PAGES: u32 = 16;

/// Users of the files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Sharing {
    /// This process only.
    Own,
    /// Also other processes, with read-only access.
    Sealed,
}

/// Result of freeing a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Freed {
    /// It keeps its memory until it is reused.
    Kept,
    /// Its memory was freed.
    Punched,
    /// It was the last slot in use of this segment, which is closed. Processes that map it should
    /// remove it.
    Segment(u32),
    /// It was not in use.
    Unknown,
}

/// A bound on the sealed segments of one [`StableMemory`], or of several together. All of their
/// pages count: free ones keep their memory.
#[derive(Debug)]
pub struct StableBound {
    most_segments: u64,
    segments: AtomicU64,
}

impl StableBound {
    /// At most this many pages, rounded up to whole segments of 32 MiB.
    pub fn new(most_pages: u64) -> Self {
        let most_segments = most_pages.div_ceil(SEALED_PAGES.into());
        Self { most_segments, segments: AtomicU64::new(0) }
    }

    fn take(&self) -> bool {
        // Relaxed: nothing but the number depends on it.
        let next = |segments| (segments < self.most_segments).then_some(segments + 1);
        self.segments.fetch_update(Ordering::Relaxed, Ordering::Relaxed, next).is_ok()
    }
}

/// A segment's part of several bounds; dropping it returns them.
#[derive(Debug, Default)]
struct Taken(Vec<Arc<StableBound>>);

impl Taken {
    /// Nothing is taken unless all bounds permit it.
    fn of(bounds: &[Arc<StableBound>]) -> Option<Self> {
        let mut taken = Self::default();
        for bound in bounds {
            if !bound.take() {
                return None;
            }
            taken.0.push(Arc::clone(bound));
        }
        Some(taken)
    }
}

impl Drop for Taken {
    fn drop(&mut self) {
        for bound in &self.0 {
            bound.segments.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

/// The files of stable pages and the allocation of their slots.
#[derive(Debug)]
pub struct StableMemory {
    sharing: Sharing,
    bounds: Vec<Arc<StableBound>>,
    shared_with: Arc<StableSegments>,
    segments: BTreeMap<u32, OwnedSegment>,
    next_segment: u32,
    in_use: u64,
}

#[derive(Debug)]
struct OwnedSegment {
    file: File,
    mapping: FileMapping,
    node: Option<u32>,
    slots: FreeSlots,
    _taken: Taken,
}

impl StableMemory {
    /// Size of a file that the machines of this process share, in bytes.
    pub const OWN_SEGMENT_BYTES: u64 = OWN_PAGES as u64 * PAGE as u64;

    /// Number of pages of a sealed file, all of which may keep memory.
    pub const SEALED_SEGMENT_PAGES: u64 = SEALED_PAGES as u64;

    /// For the machines of this process. Each created segment is added to `segments`.
    pub fn own(segments: Arc<StableSegments>) -> Self {
        Self::new(Sharing::Own, Vec::new(), segments)
    }

    /// For other processes: a process that gets a segment's [`reader`](Self::reader) cannot change
    /// the stable pages. The price is that the memory of a single free slot cannot be freed, not
    /// even by the owner (Linux mm/shmem.c, `shmem_fallocate`, refuses holes under
    /// F_SEAL_FUTURE_WRITE): it waits for reuse.
    ///
    /// Each created segment is added to `segments`, for the owner's own comparisons. At one of the
    /// `bounds` none is created any more, and free slots are reused one by one.
    pub fn sealed(segments: Arc<StableSegments>, bounds: Vec<Arc<StableBound>>) -> Self {
        Self::new(Sharing::Sealed, bounds, segments)
    }

    fn new(
        sharing: Sharing,
        bounds: Vec<Arc<StableBound>>,
        shared_with: Arc<StableSegments>,
    ) -> Self {
        Self { sharing, bounds, shared_with, segments: BTreeMap::new(), next_segment: 0, in_use: 0 }
    }

    /// Appends `pages` slots for `node`, whose memory they have as far as it has some, neighbours as
    /// far as possible. They must be [written](Self::write) before they are announced.
    ///
    /// # Errors
    /// [`StableError::Full`], [`StableError::Create`], [`StableError::Map`]: another segment is
    /// needed and cannot be created. Then no slot was allocated.
    pub fn allocate(
        &mut self,
        node: Option<u32>,
        pages: u32,
        slots: &mut Vec<StableSlot>,
    ) -> Result<(), StableError> {
        let before = slots.len();
        let mut left = pages;
        while left > 0 {
            let mut taken =
                self.take(node, left, MIN_PIECE_PAGES).map_or_else(|| self.grow(node, left), Ok);
            if matches!(taken, Err(StableError::Full)) {
                taken = self.take(node, left, 1).ok_or(StableError::Full);
            }
            match taken {
                Ok((first, count)) => {
                    slots.extend((0..count).map(|slot| first.offset(slot)));
                    self.in_use += u64::from(count);
                    left -= count;
                }
                Err(error) => {
                    for slot in slots.drain(before..) {
                        self.free(slot);
                    }
                    return Err(error);
                }
            }
        }
        Ok(())
    }

    /// Allocates up to `pages` neighbours from the existing segments; if not all of them, at least
    /// `fewest`.
    fn take(&mut self, node: Option<u32>, pages: u32, fewest: u32) -> Option<(StableSlot, u32)> {
        let mut of_node = self.segments.iter_mut().filter(|(_, segment)| segment.node == node);
        let whole = of_node.find_map(|(&number, segment)| {
            let index = segment.slots.take(pages)?;
            Some((StableSlot { segment: number, index }, pages))
        });
        if whole.is_some() || self.sharing == Sharing::Own {
            return whole;
        }
        let longest = self.segments.iter_mut().filter(|(_, segment)| segment.node == node);
        let (&number, segment) = longest.max_by_key(|(_, segment)| segment.slots.longest())?;
        let count = segment.slots.longest();
        (count >= fewest)
            .then(|| segment.slots.take(count))
            .flatten()
            .map(|index| (StableSlot { segment: number, index }, count))
    }

    /// Creates another segment, and allocates up to `pages` slots from it.
    fn grow(&mut self, node: Option<u32>, pages: u32) -> Result<(StableSlot, u32), StableError> {
        let number = self.next_segment;
        let taken = Taken::of(&self.bounds).ok_or(StableError::Full)?;
        let mut segment = OwnedSegment::new(self.sharing, number, node, taken)?;
        let count = pages.min(segment.slots.free());
        self.shared_with.add(number, segment.reader(self.sharing)?)?;
        // A segment without a slot in use has as many neighbours as slots.
        let index = segment.slots.take(count).unwrap_or_default();
        self.segments.insert(number, segment);
        self.next_segment = number.wrapping_add(1);
        Ok((StableSlot { segment: number, index }, count))
    }

    /// Writes pages into neighbouring slots from `first` on, which must be allocated and not
    /// announced yet.
    ///
    /// # Errors
    /// [`StableError::NoSlot`]; [`StableError::Write`] if the host has no memory for them, possibly
    /// after some were written.
    ///
    /// # Panics
    /// If `contents` are not whole pages.
    pub fn write(&self, first: StableSlot, contents: &[u8]) -> Result<(), StableError> {
        assert!(contents.len().is_multiple_of(PAGE), "whole pages");
        let no_slot = StableError::NoSlot { slot: first };
        let Some(segment) = self.segments.get(&first.segment) else { return Err(no_slot) };
        let offset = first.index as usize * PAGE;
        if offset + contents.len() > segment.mapping.size_bytes {
            return Err(no_slot);
        }
        let written = match self.sharing {
            Sharing::Own => segment.file.write_all_at(contents, offset as u64),
            Sharing::Sealed => segment.populate(offset, contents.len()).map(|()| {
                segment.write_through_mapping(offset, contents);
            }),
        };
        written.map_err(|source| StableError::Write { slot: first, source })
    }

    /// Frees a slot that is not mapped and will not be mapped: its content changes when it is
    /// reused.
    pub fn free(&mut self, slot: StableSlot) -> Freed {
        let Some(segment) = self.segments.get_mut(&slot.segment) else { return Freed::Unknown };
        if !segment.slots.give_back(slot.index) {
            return Freed::Unknown;
        }
        self.in_use -= 1;
        if segment.slots.is_all_free() {
            self.segments.remove(&slot.segment);
            self.shared_with.remove(slot.segment);
            return Freed::Segment(slot.segment);
        }
        match self.sharing {
            Sharing::Own => segment.punch(slot.index),
            Sharing::Sealed => Freed::Kept,
        }
    }

    /// The memory file of a segment for another process, and its number of pages; `None` if there
    /// is no such segment. A sealed segment's file is open for reading only.
    pub fn reader(&self, segment: u32) -> Option<(Arc<File>, u32)> {
        self.shared_with.file(segment)
    }

    /// Copies a stable page, whose slot must be allocated, into `content`.
    ///
    /// # Errors
    /// [`StableError::NoSlot`]
    pub fn read(&self, slot: StableSlot, content: &mut [u8]) -> Result<(), StableError> {
        self.shared_with.read(slot, content)
    }

    /// Numbers of the segments.
    pub fn segments(&self) -> impl Iterator<Item = u32> {
        self.segments.keys().copied()
    }

    /// The node that a segment is for.
    pub fn node(&self, segment: u32) -> Option<u32> {
        self.segments.get(&segment)?.node
    }

    /// Number of slots in use.
    pub fn pages_in_use(&self) -> u64 {
        self.in_use
    }

    /// Number of free slots that may still have memory.
    pub fn pages_kept(&self) -> u64 {
        match self.sharing {
            Sharing::Own => 0,
            Sharing::Sealed => {
                self.segments.values().map(|segment| u64::from(segment.slots.free())).sum()
            }
        }
    }
}

impl Drop for StableMemory {
    /// The stable pages of a dropped store are no longer compared with. Mappings stay.
    fn drop(&mut self) {
        for segment in self.segments.keys() {
            self.shared_with.remove(*segment);
        }
    }
}

impl OwnedSegment {
    fn new(
        sharing: Sharing,
        number: u32,
        node: Option<u32>,
        taken: Taken,
    ) -> Result<Self, StableError> {
        let create = |action| {
            move |error: rustix::io::Errno| StableError::Create { action, source: error.into() }
        };
        let pages = match sharing {
            Sharing::Own => OWN_PAGES,
            Sharing::Sealed => SEALED_PAGES,
        };
        let size_bytes = pages as usize * PAGE;
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = File::from(memfd_create(STABLE_FILE_NAME, flags).map_err(create("create"))?);
        ftruncate(&file, size_bytes as u64).map_err(create("size"))?;
        // Before the seal, which forbids further mappings for writing.
        let mapping = FileMapping::new(&file, size_bytes, Access::Write)
            .map_err(|source| StableError::Map { segment: number, source })?;
        let mut seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
        if sharing == Sharing::Sealed {
            seals |= SealFlags::FUTURE_WRITE;
        }
        fcntl_add_seals(&file, seals).map_err(create("seal"))?;
        if let Some(node) = node {
            // The policy of a shared mapping is the file's: it also holds for pages that are
            // allocated by write(2). Where only one node could have them, the kernel would end
            // processes when it is full. A node that has gone, or that this process may not use
            // (cpuset), is one without memory.
            if let Err(error) = prefer_node(mapping.address, size_bytes, node) {
                tracing::debug!("stable pages of node {node} are on other nodes: {error}");
            }
        }
        Ok(Self { file, mapping, node, slots: FreeSlots::new(pages), _taken: taken })
    }

    fn reader(&self, sharing: Sharing) -> Result<File, StableError> {
        let copy = match sharing {
            Sharing::Own => self.file.try_clone(),
            Sharing::Sealed => File::open(format!("/proc/self/fd/{}", self.file.as_raw_fd())),
        };
        copy.map_err(|source| StableError::Create { action: "reopen", source })
    }

    /// Makes the memory of a range, whole pages: a write to a mapping without memory for it would
    /// end the process (SIGBUS), and each first write would be a fault of its own.
    fn populate(&self, offset: usize, size_bytes: usize) -> io::Result<()> {
        let address = (self.mapping.address + offset) as *mut _;
        // SAFETY: the caller has checked that the range lies within the mapping, which belongs to
        // this segment; the advice (Linux 5.14) changes no content.
        rustix::io::retry_on_intr(|| unsafe {
            madvise(address, size_bytes, Advice::LinuxPopulateWrite)
        })
        .map_err(io::Error::from)
    }

    fn write_through_mapping(&self, offset: usize, contents: &[u8]) {
        let address = (self.mapping.address + offset) as *mut u8;
        // SAFETY: the caller has checked that the range lies within the mapping, which belongs to
        // this segment. Nothing relies on the content of a slot that is not yet announced, and no
        // Rust reference to it exists.
        unsafe { ptr::copy_nonoverlapping(contents.as_ptr(), address, contents.len()) };
    }

    fn punch(&self, index: u32) -> Freed {
        let mode = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        match fallocate(&self.file, mode, u64::from(index) * PAGE_SIZE_BYTES, PAGE_SIZE_BYTES) {
            Ok(()) => Freed::Punched,
            Err(error) => {
                tracing::debug!(
                    "an unused stable page keeps its memory: {}",
                    io::Error::from(error)
                );
                Freed::Kept
            }
        }
    }
}
