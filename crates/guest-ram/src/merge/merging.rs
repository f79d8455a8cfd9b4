//! Resources of a process for merging pages.

use std::fs::File;
use std::io::{self, Read, Seek};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use ebb_abi::{HUGE_PAGE_SIZE_BYTES, HUGE_PAGE_SIZE_PAGES, PAGE_SIZE_BYTES, Pfn};
use vm_memory::GuestAddress;

use super::scratch::Scratch;
use super::{MergeUnavailable, StableSegments};
use crate::mapping::Mapping;
use crate::overlay::FileExtents;
use crate::uffd::{Userfaultfd, Watch};
use crate::{Backing, HugePages, Region, RegionSpec};

/// What merging needs of the system besides /proc/self/pagemap.
#[derive(Debug, Default)]
pub struct MergeFiles {
    /// /dev/userfaultfd; `None` if the process may open it, or has a right that replaces it.
    pub userfaultfd: Option<File>,
    /// /proc/self/maps: the number of mappings is estimated without it.
    pub maps: Option<File>,
    /// Number of the host's node with memory, if there is only one.
    pub only_node: Option<u32>,
}

impl MergeFiles {
    /// Opens what there is.
    pub fn open() -> Self {
        let maps = File::open("/proc/self/maps")
            .inspect_err(|error| tracing::debug!("/proc/self/maps cannot be read: {error}"));
        Self { userfaultfd: None, maps: maps.ok(), only_node: only_node() }
    }
}

/// Number of the host's node with memory, if there is only one. Opens a file in /sys.
pub fn only_node() -> Option<u32> {
    // A list like "0-3,5" names more than one.
    std::fs::read_to_string("/sys/devices/system/node/has_memory").ok()?.trim().parse().ok()
}

/// Whether other processes may have the same pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ancestry {
    /// No.
    None,
    /// The process was forked with the memory. Pages that it shares with others are not merged: the
    /// host would save nothing.
    Forked,
}

/// Resources for merging a memory's pages, opened while the process can still open everything.
#[derive(Debug)]
pub struct Merging {
    pub(super) uffd: Userfaultfd,
    /// Userfaultfd for which writers block.
    pub(super) waiting: Userfaultfd,
    pub(super) segments: Arc<StableSegments>,
    /// Staging area for pages that are being compared: of the size and alignment of a huge page.
    pub(super) staging: Mapping,
    pub(super) scratch: Scratch,
    /// Kept open: a monitor may have no access to /proc later on.
    maps: Option<Mutex<File>>,
    pub(super) only_node: Option<u32>,
    pub(super) ancestry: Ancestry,
    in_use: AtomicBool,
}

impl Merging {
    /// Creates the resources for memory of these regions.
    ///
    /// # Errors
    /// [`MergeUnavailable`]
    pub(super) fn new(
        regions: &[RegionSpec],
        huge_pages: HugePages,
        segments: Arc<StableSegments>,
        files: MergeFiles,
        ancestry: Ancestry,
    ) -> Result<Self, MergeUnavailable> {
        let MergeFiles { userfaultfd: device, maps, only_node } = files;
        let uffd = Userfaultfd::open(device.as_ref())?;
        let waiting = Userfaultfd::open_waiting(device.as_ref())?;
        let spec = RegionSpec {
            start: GuestAddress(0),
            size_bytes: HUGE_PAGE_SIZE_BYTES,
            host_node: None,
        };
        let staging = Mapping::new(&spec, Backing::Anonymous, HugePages::Off)?;
        let scratch = Scratch::new(regions, huge_pages)?;
        let merging = Self {
            uffd,
            waiting,
            segments,
            staging,
            scratch,
            maps: maps.map(Mutex::new),
            only_node,
            ancestry,
            in_use: AtomicBool::new(false),
        };
        // The destination of a move must be watched (Linux mm/userfaultfd.c,
        // `validate_move_areas`).
        merging.watch_writes(merging.staging.address(), merging.staging.size_bytes())?;
        Ok(merging)
    }

    /// Watches memory for writes.
    pub(super) fn watch_writes(
        &self,
        address: usize,
        size_bytes: usize,
    ) -> Result<(), MergeUnavailable> {
        self.watch_writes_again(address, size_bytes).map_err(|source| MergeUnavailable::Refused {
            action: "track writes to guest memory",
            source,
        })
    }

    /// As [`watch_writes`](Self::watch_writes), for memory that was watched before.
    pub(super) fn watch_writes_again(&self, address: usize, size_bytes: usize) -> io::Result<()> {
        // SAFETY: an access to memory that is watched for writes only never blocks.
        unsafe { self.uffd.watch(address, size_bytes, Watch::Writes) }
    }

    /// Whether `may` permits; if not, and if the cause may be VMAs that have disappeared since they
    /// were counted, the actual ones are read and `may` is called again.
    pub(super) fn may(
        &self,
        regions: &[Region],
        extents: &mut FileExtents,
        may: impl Fn(&FileExtents) -> bool,
    ) -> bool {
        if may(extents) {
            return true;
        }
        if !extents.vmas.is_recount_due() {
            return false;
        }
        match self.maps.as_ref().map(|maps| vma_starts(maps, regions)) {
            Some(Ok(starts)) => extents.vmas.set_starts(starts),
            Some(Err(error)) => tracing::debug!("/proc/self/maps cannot be read: {error}"),
            None => {}
        }
        may(extents)
    }

    /// Acquires the right to merge; returns false if another session has it.
    pub(super) fn take(&self) -> bool {
        // Acquire: the former session's use of the staging area is complete.
        !self.in_use.swap(true, Ordering::Acquire)
    }

    /// Releases the right to merge.
    pub(super) fn give_back(&self) {
        self.in_use.store(false, Ordering::Release);
    }

    /// Address of a page while it is moved away: at the same offset within a huge page.
    pub(super) fn staging_address(&self, page: Pfn) -> usize {
        self.staging.address() + (page.0 % HUGE_PAGE_SIZE_PAGES * PAGE_SIZE_BYTES) as usize
    }
}

/// First pages of the VMAs of guest memory. System calls: `lseek`, `read`.
pub(crate) fn vma_starts(maps: &Mutex<File>, regions: &[Region]) -> io::Result<Vec<Pfn>> {
    let mut text = String::new();
    let mut file = maps.lock().unwrap_or_else(PoisonError::into_inner);
    file.rewind()?;
    // Limited, since otherwise the standard library asks for the size of the file first.
    (&mut *file).take(u64::MAX).read_to_string(&mut text)?;
    let starts =
        text.lines().filter_map(|line| u64::from_str_radix(line.split_once('-')?.0, 16).ok());
    let pages = starts.filter_map(|address| {
        let region = regions.iter().find(|region| {
            (region.host_address..region.host_address + region.size_bytes).contains(&address)
        })?;
        Some(Pfn(region.pages().start.0 + (address - region.host_address) / PAGE_SIZE_BYTES))
    });
    Ok(pages.collect())
}
