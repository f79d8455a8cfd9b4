//! Making a memory's pages mergeable.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use ebb_abi::{HUGE_PAGE_SIZE_BYTES, HUGE_PAGE_SIZE_PAGES, PAGE_SIZE_BYTES};
use vm_memory::GuestAddress;

use super::scan::PageScan;
use super::uffd::{Userfaultfd, Watch};
use super::{MergeUnavailable, StableSegments};
use crate::mapping::Mapping;
use crate::{Backing, GuestRam, GuestRange, HugePages, RegionSpec};

/// What `vm.max_map_count` must be at least: half of it is for guest memory, and what is less would
/// soon be used up.
const MIN_MAP_COUNT: u64 = 4096;

/// What is needed to merge a memory's pages, opened when the process could still open everything.
#[derive(Debug)]
pub struct Merging {
    pub(super) uffd: Userfaultfd,
    /// With this one writers wait.
    pub(super) waiting: Userfaultfd,
    pub(super) segments: Arc<StableSegments>,
    /// Where pages are while they are compared: as large as a huge page, and as aligned.
    pub(super) staging: Mapping,
    in_use: AtomicBool,
}

impl GuestRam {
    /// Lets the pages of this memory be merged, with stable pages out of `segments`: from now on
    /// the kernel keeps track of which pages are written to. To be called before the guest runs,
    /// and while files can be opened; a [`MergeSession`](super::MergeSession) then does the work.
    ///
    /// # Errors
    /// [`MergeUnavailable`]: the memory works as before then.
    pub fn enable_merging(&self, segments: Arc<StableSegments>) -> Result<(), MergeUnavailable> {
        if self.merging.get().is_some() {
            return Err(MergeUnavailable::Enabled);
        }
        if self.backing() != Backing::Anonymous {
            return Err(MergeUnavailable::Backing { backing: self.backing() });
        }
        check_map_count()?;
        self.check_unlocked()?;
        let uffd = Userfaultfd::open()?;
        let waiting = Userfaultfd::open_waiting()?;
        PageScan::open(1)?;
        let spec = RegionSpec {
            start: GuestAddress(0),
            size_bytes: HUGE_PAGE_SIZE_BYTES,
            host_node: None,
        };
        let staging = Mapping::new(&spec, Backing::Anonymous, HugePages::Off)?;
        self.note_merges()?;
        let merging = Merging { uffd, waiting, segments, staging, in_use: AtomicBool::new(false) };
        // The destination of a move must be watched (Linux mm/userfaultfd.c,
        // `validate_move_areas`).
        merging.watch_writes(merging.staging.address(), merging.staging.size_bytes())?;
        for range in self.anonymous_ranges() {
            let Some(address) = self.host_address(range) else { continue };
            merging.watch_writes(address, range.size_bytes() as usize)?;
        }
        self.merging.set(merging).map_err(|_| MergeUnavailable::Enabled)
    }

    /// What [`enable_merging`](Self::enable_merging) has prepared.
    pub fn merging(&self) -> Option<&Merging> {
        self.merging.get()
    }

    /// What is not mapped from a file.
    fn anonymous_ranges(&self) -> Vec<GuestRange> {
        let mut ranges = Vec::new();
        for region in self.page_ranges() {
            let mut rest = region;
            for part in
                self.restored.as_ref().map_or(Vec::new(), |restored| restored.file_backed(region))
            {
                ranges.push(GuestRange::new(rest.start, part.start.0 - rest.start.0));
                rest = GuestRange::new(part.end(), region.end().0 - part.end().0);
            }
            ranges.push(rest);
        }
        ranges.retain(|range| !range.is_empty());
        ranges
    }

    /// Locked memory cannot be moved to where it is not locked, and who locks it does not want to
    /// wait for its pages.
    fn check_unlocked(&self) -> Result<(), MergeUnavailable> {
        let path = "/proc/self/smaps";
        let smaps = std::fs::read_to_string(path)
            .map_err(|source| MergeUnavailable::Proc { path, source })?;
        let regions = self.regions().iter().map(|region| (region.host_address, region.size_bytes));
        let regions: Vec<(u64, u64)> = regions.collect();
        if is_locked(&smaps, &regions) { Err(MergeUnavailable::Locked) } else { Ok(()) }
    }
}

/// Whether a mapping in an smaps text that overlaps one of `ranges` (address, size in bytes) is
/// locked.
fn is_locked(smaps: &str, ranges: &[(u64, u64)]) -> bool {
    let mut counts = false;
    smaps.lines().any(|line| {
        if let Some(flags) = line.strip_prefix("VmFlags:") {
            return counts && flags.split_whitespace().any(|flag| flag == "lo");
        }
        let bounds = line.split_once(' ').and_then(|(bounds, _)| bounds.split_once('-'));
        let number = |text| u64::from_str_radix(text, 16).ok();
        if let Some((start, end)) =
            bounds.and_then(|(start, end)| Some((number(start)?, number(end)?)))
        {
            counts = ranges.iter().any(|(address, size)| start < address + size && *address < end);
        }
        false
    })
}

fn check_map_count() -> Result<(), MergeUnavailable> {
    let path = "/proc/sys/vm/max_map_count";
    let text =
        std::fs::read_to_string(path).map_err(|source| MergeUnavailable::Proc { path, source })?;
    match text.trim().parse() {
        Ok(found) if found < MIN_MAP_COUNT => {
            Err(MergeUnavailable::TooFewMappings { found, needed: MIN_MAP_COUNT })
        }
        // What cannot be understood is checked by the kernel with each mapping.
        _ => Ok(()),
    }
}

impl Merging {
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

    /// As [`watch_writes`](Self::watch_writes), later on.
    pub(super) fn watch_writes_again(&self, address: usize, size_bytes: usize) -> io::Result<()> {
        // SAFETY: who is watched for writes only never waits.
        unsafe { self.uffd.watch(address, size_bytes, Watch::Writes) }
    }

    /// Takes the right to merge; false if somebody else has it.
    pub(super) fn take(&self) -> bool {
        // Acquire: what the last one did with the staging area is done.
        !self.in_use.swap(true, Ordering::Acquire)
    }

    /// Gives it back.
    pub(super) fn give_back(&self) {
        self.in_use.store(false, Ordering::Release);
    }

    /// Where a page is while it is away from the guest: at the same place within a huge page.
    pub(super) fn staging_address(&self, page: ebb_abi::Pfn) -> usize {
        self.staging.address() + (page.0 % HUGE_PAGE_SIZE_PAGES * PAGE_SIZE_BYTES) as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn locked_mappings_are_found_by_their_flags() {
        let text = "7f0000000000-7f0000200000 rw-p 00000000 00:00 0 \nSize: 4 kB\nVmFlags: rd wr mr mw me ac sd \n\
                    7f0000200000-7f0000400000 rw-p 00000000 00:00 0 [x]\nVmFlags: rd wr lo ac \n";
        assert!(is_locked(text, &[(0x7f00_0020_0000, 0x1000)]));
        assert!(!is_locked(text, &[(0x7f00_0000_0000, 0x20_0000), (0x7f00_0040_0000, 0x1000)]));
    }
}
