//! The files of stable pages in a process that maps them.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::fs::File;
use std::io;
use std::ptr;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock};

use ebb_abi::PAGE_SIZE_BYTES;
use rustix::fs::{SealFlags, fcntl_get_seals, fstat};
use rustix::mm::{Advice, MapFlags, MremapFlags, ProtFlags, madvise, mmap, mremap_fixed, munmap};

use super::{StableError, StableSlot};
use crate::mapping::{abort_unless_mapped, bind_to_node};

const PAGE: usize = PAGE_SIZE_BYTES as usize;

/// Segments by number. Shared between threads that add and remove segments and threads that map
/// them.
#[derive(Debug, Default)]
pub struct StableSegments {
    segments: RwLock<BTreeMap<u32, Arc<Segment>>>,
    /// Higher than the number of any segment that there has been.
    next: AtomicU32,
}

impl StableSegments {
    /// Creates an empty set.
    pub fn new() -> Arc<Self> {
        Arc::default()
    }

    /// A number for another segment, higher than all that there have been; `None` if there are no
    /// more.
    pub fn next_number(&self) -> Option<u32> {
        // Relaxed: nothing but the number depends on it.
        Some(self.next.load(Ordering::Relaxed)).filter(|number| *number < u32::MAX)
    }

    /// Adds a memory file as segment `segment`. It may be open for reading only.
    ///
    /// # Errors
    /// [`StableError::Unfit`] if the segment exists already, or if the file's size is not a number
    /// of pages or can be reduced; [`StableError::Map`] if it cannot be mapped.
    pub fn add(&self, segment: u32, file: File) -> Result<(), StableError> {
        let new = Segment::new(segment, file)?;
        let mut segments = self.segments.write().unwrap_or_else(PoisonError::into_inner);
        if segments.contains_key(&segment) {
            return Err(StableError::Unfit {
                segment,
                problem: "a segment with this number exists already".into(),
            });
        }
        segments.insert(segment, Arc::new(new));
        self.next.fetch_max(segment.saturating_add(1), Ordering::Relaxed);
        Ok(())
    }

    /// Removes a segment; returns false if there was none. Its mappings in guest memory are
    /// unaffected.
    pub fn remove(&self, segment: u32) -> bool {
        self.segments.write().unwrap_or_else(PoisonError::into_inner).remove(&segment).is_some()
    }

    /// The memory file of a segment as it was added, for another process, and its number of pages;
    /// `None` if there is no such segment.
    pub fn file(&self, segment: u32) -> Option<(Arc<File>, u32)> {
        self.get(segment).map(|segment| (Arc::clone(&segment.file), segment.pages))
    }

    /// Copies a stable page, whose slot must be allocated, into `content`.
    ///
    /// # Errors
    /// [`StableError::NoSlot`]
    ///
    /// # Panics
    /// If `content` is not one page.
    pub fn read(&self, slot: StableSlot, content: &mut [u8]) -> Result<(), StableError> {
        assert_eq!(content.len(), PAGE, "a buffer of one page");
        let segment = self.get(slot.segment).ok_or(StableError::NoSlot { slot })?;
        let address = segment.address(slot.index, 1).ok_or(StableError::NoSlot { slot })?;
        // SAFETY: the page is in the segment's mapping, which `segment` keeps alive. The buffer is
        // as long, and the two cannot overlap since the mapping is private to this code.
        unsafe { ptr::copy_nonoverlapping(address as *const u8, content.as_mut_ptr(), PAGE) };
        Ok(())
    }

    /// A segment, which stays mapped as long as the result lives.
    pub(crate) fn get(&self, segment: u32) -> Option<Arc<Segment>> {
        self.segments.read().unwrap_or_else(PoisonError::into_inner).get(&segment).cloned()
    }
}

/// A segment, mapped for reading.
#[derive(Debug)]
pub(crate) struct Segment {
    file: Arc<File>,
    pages: u32,
    mapping: FileMapping,
    /// Private mappings of the whole file that are never touched, with the policies of guest memory
    /// that is bound to a node, or to none: a piece that is moved elsewhere has them from the
    /// beginning.
    templates: Mutex<BTreeMap<Option<u32>, FileMapping>>,
}

impl Segment {
    fn new(segment: u32, file: File) -> Result<Self, StableError> {
        let unfit = |problem: String| StableError::Unfit { segment, problem };
        let size_bytes = fstat(&file).map_err(|error| unfit(error.to_string()))?.st_size as u64;
        let seals = fcntl_get_seals(&file).map_err(|_| unfit("it is not a memory file".into()))?;
        if !seals.contains(SealFlags::SHRINK) {
            return Err(unfit("it can be made shorter; a seal must forbid that".into()));
        }
        let pages = u32::try_from(size_bytes / PAGE_SIZE_BYTES)
            .ok()
            .filter(|pages| *pages > 0 && size_bytes.is_multiple_of(PAGE_SIZE_BYTES))
            .ok_or_else(|| unfit(format!("{size_bytes} bytes are not a valid number of pages")))?;
        let mapping = FileMapping::new(&file, size_bytes as usize, Access::Read)
            .map_err(|source| StableError::Map { segment, source })?;
        Ok(Self { file: Arc::new(file), pages, mapping, templates: Mutex::default() })
    }

    /// Address at which `pages` slots from `index` on are mapped for reading; `None` if not all of
    /// them are in the segment.
    pub(crate) fn address(&self, index: u32, pages: u32) -> Option<usize> {
        let end = index.checked_add(pages)?;
        (end <= self.pages).then(|| self.mapping.address + index as usize * PAGE)
    }

    /// Maps `pages` slots from `index` on privately over guest memory that is bound to `node`;
    /// copies made by writes are allocated there.
    ///
    /// # Errors
    /// The kernel's error; guest memory is unchanged then. If it were lost, the process ends.
    ///
    /// # Safety
    /// `address` must be guest memory of that length, and nothing may rely on its content.
    pub(crate) unsafe fn map_over(
        &self,
        index: u32,
        pages: u32,
        address: usize,
        node: Option<u32>,
    ) -> io::Result<()> {
        if self.address(index, pages).is_none() {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let mut templates = self.templates.lock().unwrap_or_else(PoisonError::into_inner);
        let template = match templates.entry(node) {
            Entry::Occupied(entry) => entry.into_mut(),
            Entry::Vacant(entry) => {
                let template =
                    FileMapping::new(&self.file, self.pages as usize * PAGE, Access::Private)?;
                if let Some(node) = node {
                    bind_to_node(template.address, template.size_bytes, node)?;
                }
                entry.insert(template)
            }
        };
        let (from, to) = (template.address + index as usize * PAGE, address as *mut _);
        let size_bytes = pages as usize * PAGE;
        let flags = MremapFlags::MAYMOVE | MremapFlags::DONTUNMAP;
        // SAFETY: MREMAP_DONTUNMAP leaves the template in place, of which the piece is a part, as
        // was checked. It replaces guest memory on whose content nothing relies, as the caller
        // guarantees.
        let result = unsafe { mremap_fixed(from as *mut _, size_bytes, size_bytes, flags, to) };
        result.map(drop).map_err(|error| {
            abort_unless_mapped(to, size_bytes, error);
            error.into()
        })
    }
}

/// Purpose of a mapping.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Access {
    /// Reading the file.
    Read,
    /// Changing the file.
    Write,
    /// Making private copies on writes.
    Private,
}

/// A mapping of a whole file, whose size cannot be reduced; unmapped when dropped.
#[derive(Debug)]
pub(super) struct FileMapping {
    pub(super) address: usize,
    pub(super) size_bytes: usize,
}

impl FileMapping {
    pub(super) fn new(file: &File, size_bytes: usize, access: Access) -> io::Result<Self> {
        let (protection, sharing) = match access {
            Access::Read => (ProtFlags::READ, MapFlags::SHARED),
            Access::Write => (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED),
            Access::Private => (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE),
        };
        let flags = sharing | MapFlags::NORESERVE;
        // SAFETY: without MAP_FIXED the kernel chooses a free place, so no existing mapping is
        // touched.
        let address = unsafe { mmap(ptr::null_mut(), size_bytes, protection, flags, file, 0) }?;
        let mapping = Self { address: address as usize, size_bytes };
        // SAFETY: the range is the new mapping's own; the advice only keeps it out of core dumps.
        if let Err(error) = unsafe { madvise(address, size_bytes, Advice::LinuxDontDump) } {
            tracing::debug!("stable pages will be part of core dumps: {error}");
        }
        Ok(mapping)
    }
}

impl Drop for FileMapping {
    fn drop(&mut self) {
        // SAFETY: the mapping owns this range, and no address of it is kept longer than it lives.
        if let Err(error) = unsafe { munmap(self.address as *mut _, self.size_bytes) } {
            tracing::error!("cannot unmap stable pages at {:#x}: {error}", self.address);
        }
    }
}
