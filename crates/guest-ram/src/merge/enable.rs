//! Enables merging of a memory's pages.

use std::io::ErrorKind;
use std::sync::Arc;

use ebb_abi::PAGE_SIZE_BYTES;

use super::merging::{Ancestry, MergeFiles, Merging};
use super::scan::PageScan;
use super::{MergeUnavailable, StableSegments};
use crate::overlay::{BrokenCowStats, Overlay};
use crate::ranges::gaps;
use crate::{Backing, GuestRam, GuestRange, RamError, Region, RegionSpec};

/// Minimum value of `vm.max_map_count`: half of it is for guest memory, and fewer mappings would
/// soon be used up.
const MIN_MAP_COUNT: u64 = 4096;

impl GuestRam {
    /// Enables merging of this memory's pages, with stable pages from `segments`: from now on the
    /// kernel tracks which pages are written to. Must be called before the guest runs, and while
    /// files can be opened; a [`MergeSession`](super::MergeSession) then does the work.
    ///
    /// # Errors
    /// [`MergeUnavailable`]: the memory works as before then.
    pub fn enable_merging(&self, segments: Arc<StableSegments>) -> Result<(), MergeUnavailable> {
        self.check_mergeable()?;
        check_swap()?;
        check_map_count()?;
        self.check_unlocked()?;
        self.enable(segments, MergeFiles::open(), Ancestry::None)
    }

    /// The same in a process that was forked with the memory (fork(2)) and cannot open files. Pages
    /// that it still shares with other processes are left as they are.
    ///
    /// # Errors
    /// [`MergeUnavailable`]
    pub fn enable_merging_in_fork(
        &self,
        segments: Arc<StableSegments>,
        files: MergeFiles,
    ) -> Result<(), MergeUnavailable> {
        self.check_mergeable()?;
        // Locks of memory are not inherited (mlock(2)).
        self.enable(segments, files, Ancestry::Forked)
    }

    fn check_mergeable(&self) -> Result<(), MergeUnavailable> {
        if self.merging.get().is_some() {
            return Err(MergeUnavailable::Enabled);
        }
        if self.backing() != Backing::Anonymous {
            return Err(MergeUnavailable::Backing { backing: self.backing() });
        }
        self.page_scan(1).map(drop)
    }

    /// Queries about the memory's pages, with at most `max_runs` runs of pages in an answer.
    pub(super) fn page_scan(&self, max_runs: usize) -> Result<PageScan, MergeUnavailable> {
        let path = "/proc/self/pagemap";
        let unreadable = || MergeUnavailable::Proc { path, source: ErrorKind::NotFound.into() };
        PageScan::new(self.pagemap.as_ref().ok_or_else(unreadable)?, max_runs)
    }

    fn enable(
        &self,
        segments: Arc<StableSegments>,
        files: MergeFiles,
        ancestry: Ancestry,
    ) -> Result<(), MergeUnavailable> {
        let specs: Vec<RegionSpec> = self.regions().iter().map(Region::spec).collect();
        let merging = Merging::new(&specs, self.huge_pages(), segments, files, ancestry)?;
        let overlay = self.overlay_for_merging()?;
        for range in self.anonymous_ranges() {
            let Some(address) = self.host_address(range) else { continue };
            merging.watch_writes(address, range.size_bytes() as usize)?;
            overlay.lock().note_tracked(range);
        }
        self.merging.set(merging).map_err(|_| MergeUnavailable::Enabled)
    }

    /// The state prepared by [`enable_merging`](Self::enable_merging).
    pub fn merging(&self) -> Option<&Merging> {
        self.merging.get()
    }

    /// Bytes of guest memory for which a stable page is mapped, as far as writes to them have been
    /// detected.
    pub fn merged_bytes(&self) -> u64 {
        self.lock_overlay().map_or(0, |extents| extents.merged_pages() * PAGE_SIZE_BYTES)
    }

    /// Maximum number of VMAs of guest memory beyond one per region: because pages are merged, or
    /// mapped from the file that the memory was restored from.
    pub fn merged_mappings(&self) -> u64 {
        self.lock_overlay().map_or(0, |extents| extents.vmas.own())
    }

    /// Statistics of merged pages that were written to.
    pub fn broken_cow_stats(&self) -> BrokenCowStats {
        self.lock_overlay().map_or_else(BrokenCowStats::default, |extents| extents.returns())
    }

    /// Prepares the memory for merging; from now on discards exclude merges. No effect the second
    /// time.
    ///
    /// # Errors
    /// [`RamError::NotMergeable`]; else as for [`GuestRam::new`].
    pub(crate) fn overlay_for_merging(&self) -> Result<&Overlay, RamError> {
        if self.backing() != Backing::Anonymous {
            return Err(RamError::NotMergeable { backing: self.backing() });
        }
        if let Some(overlay) = self.overlay.get() {
            return Ok(overlay);
        }
        let specs: Vec<RegionSpec> = self.regions().iter().map(Region::spec).collect();
        let overlay = Overlay::new(&specs, self.huge_pages(), None)?;
        // Another thread may have been faster.
        Ok(self.overlay.get_or_init(|| overlay))
    }

    /// The parts that are not mapped from a file.
    fn anonymous_ranges(&self) -> Vec<GuestRange> {
        let in_region = |region: GuestRange| {
            let mapped: Vec<_> = self.file_mapped(region).iter().map(|(part, _)| *part).collect();
            gaps(region, &mapped).collect::<Vec<_>>()
        };
        self.page_ranges().into_iter().flat_map(in_region).collect()
    }

    /// Locked memory cannot be moved to where it is not locked, and its accesses must not block.
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

/// Refuses a kernel that may crash when pages are moved while they are swapped, if there is swap.
fn check_swap() -> Result<(), MergeUnavailable> {
    let release = rustix::system::uname().release().to_string_lossy().into_owned();
    if moves_swapped_pages(&release) || rustix::system::sysinfo().totalswap == 0 {
        Ok(())
    } else {
        Err(MergeUnavailable::Swap { release })
    }
}

/// Whether the kernel of this release moves pages correctly that are in the swap cache
/// (`mm/userfaultfd.c`, `move_swap_pte`): CVE-2025-38242 names the versions. A release that has no
/// such numbers counts as new.
fn moves_swapped_pages(release: &str) -> bool {
    let mut numbers = release.split(|byte: char| !byte.is_ascii_digit()).map(str::parse::<u32>);
    let mut next = || numbers.next().and_then(Result::ok);
    match (next(), next(), next().unwrap_or(0)) {
        (Some(6), Some(12), patch) => patch >= 37,
        (Some(6), Some(15), patch) => patch >= 5,
        (Some(major), Some(minor), _) => (major, minor) >= (6, 16),
        _ => true,
    }
}

fn check_map_count() -> Result<(), MergeUnavailable> {
    let path = "/proc/sys/vm/max_map_count";
    let text =
        std::fs::read_to_string(path).map_err(|source| MergeUnavailable::Proc { path, source })?;
    match text.trim().parse() {
        Ok(found) if found < MIN_MAP_COUNT => {
            Err(MergeUnavailable::TooFewMappings { found, needed: MIN_MAP_COUNT })
        }
        // An unintelligible text: the kernel checks each mapping itself.
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernels_that_move_swapped_pages_are_known_by_their_release() {
        for release in ["6.12.37", "6.12.95+deb12-cloud-amd64", "6.15.5", "6.16.0-1", "6.18", "7.0"]
        {
            assert!(moves_swapped_pages(release), "{release}");
        }
        for release in ["6.8.0-45-generic", "6.11.11", "6.12.36+deb12-amd64", "6.14.11", "6.15"] {
            assert!(!moves_swapped_pages(release), "{release}");
        }
    }

    #[test]
    fn locked_mappings_are_found_by_their_flags() {
        let text = "7f0000000000-7f0000200000 rw-p 00000000 00:00 0 \nSize: 4 kB\n\
                    VmFlags: rd wr mr mw me ac sd \n\
                    7f0000200000-7f0000400000 rw-p 00000000 00:00 0 [x]\n\
                    VmFlags: rd wr lo ac \n";
        assert!(is_locked(text, &[(0x7f00_0020_0000, 0x1000)]));
        assert!(!is_locked(text, &[(0x7f00_0000_0000, 0x20_0000), (0x7f00_0040_0000, 0x1000)]));
    }
}
