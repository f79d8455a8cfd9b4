//! Guest memory as a whole.

use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use ebb_abi::{PAGE_SIZE_BYTES, Pfn};
use vm_memory::{GuestAddress, GuestRegionMmap, MmapRegion};

use crate::discard::{DiscardMethod, DiscardOutcome, Discarder, Piece};
use crate::inhibit::{DiscardPermission, InhibitGuard, InhibitReason, Inhibitors};
use crate::mapping::Mapping;
#[cfg(feature = "merge")]
use crate::merge::Merging;
use crate::overlay::{FileExtents, Overlay, SnapshotFile, Source};
use crate::pagemap::Pagemap;
use crate::partial_huge::{PartialHugePages, Tenure};
use crate::region::{Backing, HugePages, Populate, Region, RegionSpec};
use crate::resident::{Meter, ProcessResidency, Residency};
use crate::uffd::Userfaultfd;
use crate::{GuestMemory, GuestRange, RamError, WriteLog, collapse, populate};

/// The memory of a virtual machine.
#[derive(Debug)]
pub struct GuestRam {
    memory: GuestMemory,
    regions: Vec<Region>,
    pub(crate) mappings: Vec<Mapping>,
    backing: Backing,
    discarder: Discarder,
    inhibitors: Arc<Inhibitors>,
    /// Only for backings that can only discard whole huge pages.
    partial_huge: Option<Mutex<PartialHugePages>>,
    meter: Meter,
    pub(crate) pagemap: Option<Pagemap>,
    huge_pages: HugePages,
    /// Whether the host had huge pages switched on when this memory was mapped.
    pub(crate) huge_allowed: bool,
    /// Once this memory may be saved while it is in use.
    pub(crate) protection: OnceLock<Mutex<Userfaultfd>>,
    /// For restored memory, and once pages may be merged.
    pub(crate) overlay: OnceLock<Overlay>,
    /// Once this process may merge pages.
    #[cfg(feature = "merge")]
    pub(crate) merging: OnceLock<Merging>,
}

impl GuestRam {
    /// Maps guest memory. `regions` must be in ascending order; they may adjoin.
    ///
    /// # Errors
    /// [`RamError`]: regions that overlap or are not aligned to the backing's pages, too few huge
    /// pages, an unknown host node, not enough memory.
    pub fn new(
        regions: &[RegionSpec],
        backing: Backing,
        huge_pages: HugePages,
        populate: Populate,
    ) -> Result<Self, RamError> {
        check(regions, backing)?;
        if populate == Populate::Prealloc {
            Self::check_populate(regions, backing)?;
        }
        let mappings = regions
            .iter()
            .map(|spec| Mapping::new(spec, backing, huge_pages))
            .collect::<Result<Vec<_>, _>>()?;
        if populate == Populate::Prealloc {
            mappings.iter().try_for_each(|mapping| populate::populate(mapping, &|| false))?;
        }
        Self::assemble(regions, mappings, backing, huge_pages, None)
    }

    /// Refuses more memory than the host has: it could not be allocated in advance.
    ///
    /// # Errors
    /// [`RamError::LargerThanHost`]
    pub fn check_populate(regions: &[RegionSpec], backing: Backing) -> Result<(), RamError> {
        populate::check_possible(regions.iter().map(|spec| spec.size_bytes).sum(), backing)
    }

    /// Allocates all memory, as [`Populate::Prealloc`] does, until `is_cancelled`.
    ///
    /// # Errors
    /// [`RamError::LargerThanHost`], [`RamError::Populate`] if the host cannot allocate a page,
    /// [`RamError::PopulateCancelled`].
    pub fn populate(&self, is_cancelled: &(dyn Fn() -> bool + Sync)) -> Result<(), RamError> {
        populate::check_possible(self.size_bytes(), self.backing)?;
        self.mappings.iter().try_for_each(|mapping| populate::populate(mapping, is_cancelled))
    }

    /// Assembles mapped regions.
    pub(crate) fn assemble(
        regions: &[RegionSpec],
        mappings: Vec<Mapping>,
        backing: Backing,
        huge_pages: HugePages,
        overlay: Option<Overlay>,
    ) -> Result<Self, RamError> {
        let memory = regions
            .iter()
            .zip(&mappings)
            .map(|(spec, mapping)| region_of(spec, mapping))
            .collect::<Result<Vec<_>, _>>()?;
        let memory = GuestMemory::from_regions(memory)
            .map_err(|error| RamError::Layout(error.to_string()))?;
        let partial_huge = (backing == Backing::Hugetlb2M).then(|| {
            let pages: Vec<GuestRange> = regions.iter().map(RegionSpec::pages).collect();
            Mutex::new(PartialHugePages::new(&pages))
        });
        let regions = regions
            .iter()
            .zip(&mappings)
            .map(|(spec, mapping)| Region {
                start: spec.start,
                size_bytes: spec.size_bytes,
                host_address: mapping.address() as u64,
                host_node: spec.host_node,
            })
            .collect();
        Ok(Self {
            memory,
            regions,
            mappings,
            backing,
            discarder: Discarder::probe(),
            inhibitors: Arc::default(),
            partial_huge,
            meter: Meter::new(),
            pagemap: Pagemap::open(),
            huge_pages,
            huge_allowed: collapse::allowed_by_host(),
            protection: OnceLock::new(),
            overlay: overlay.map_or_else(OnceLock::new, OnceLock::from),
            #[cfg(feature = "merge")]
            merging: OnceLock::new(),
        })
    }

    /// The same memory, discarded one range per system call, for comparing benchmarks.
    #[doc(hidden)]
    #[must_use]
    pub fn with_single_discards(mut self) -> Self {
        self.discarder = Discarder::single();
        self
    }

    /// Access to the memory's content.
    pub fn memory(&self) -> &GuestMemory {
        &self.memory
    }

    /// The regions in ascending order.
    pub fn regions(&self) -> &[Region] {
        &self.regions
    }

    /// Pages of the regions, in ascending order; the regions of a
    /// [`PageBitmap`](crate::PageBitmap).
    pub fn page_ranges(&self) -> Vec<GuestRange> {
        self.regions.iter().map(Region::pages).collect()
    }

    /// The memory's backing.
    pub fn backing(&self) -> Backing {
        self.backing
    }

    /// Whether huge pages were requested from the host.
    pub fn huge_pages(&self) -> HugePages {
        self.huge_pages
    }

    /// Size of all regions in bytes.
    pub fn size_bytes(&self) -> u64 {
        self.regions.iter().map(|region| region.size_bytes).sum()
    }

    /// How ranges are discarded.
    pub fn discard_method(&self) -> DiscardMethod {
        match self.backing {
            Backing::Memfd | Backing::Hugetlb2M => DiscardMethod::PunchHole,
            Backing::Anonymous if self.discarder.is_vectored() => DiscardMethod::Vectored,
            Backing::Anonymous => DiscardMethod::Single,
        }
    }

    /// The parts of `range` that are guest memory, in ascending order, at most one per region.
    pub fn clip(&self, range: GuestRange) -> impl Iterator<Item = GuestRange> {
        let first = self.regions.partition_point(|region| region.pages().end() <= range.start);
        self.regions[first..]
            .iter()
            .map(move |region| region.pages().intersection(range))
            .take_while(|part| !part.is_empty())
    }

    /// Discards pages, returning them to the host; they read as zeros afterwards. The guest may use
    /// them again as soon as this returns, as with page reporting.
    ///
    /// Some pages may be left unchanged, and are counted as deferred: with [`Backing::Hugetlb2M`]
    /// those whose huge page is neither part of this call nor in the balloon, and in
    /// [restored](Self::restore) and in merged memory those in the middle of a part of a file that
    /// cannot be split any more, because the process may have no more mappings. Leaving a page
    /// unchanged is always correct: a guest that expects zeros or a pattern in its free pages
    /// (Linux with `init_on_free` or page poisoning) has written them itself. Memory that is
    /// discarded as a whole is never left unchanged.
    ///
    /// # Errors
    /// [`RamError::OutsideRam`] before anything is discarded; [`RamError::Discard`] if the host
    /// refuses, after which earlier ranges have been discarded.
    pub fn discard(&self, ranges: &[GuestRange]) -> Result<DiscardOutcome, RamError> {
        self.discard_with(ranges, Tenure::Momentary)
    }

    /// As [`discard`](Self::discard), for pages in a balloon: the guest does not use them until
    /// [`reclaim`](Self::reclaim).
    ///
    /// With [`Backing::Hugetlb2M`], pages whose huge page is not complete are recorded and
    /// discarded once it is.
    pub fn discard_ballooned(&self, ranges: &[GuestRange]) -> Result<DiscardOutcome, RamError> {
        self.discard_with(ranges, Tenure::Ballooned)
    }

    fn discard_with(
        &self,
        ranges: &[GuestRange],
        tenure: Tenure,
    ) -> Result<DiscardOutcome, RamError> {
        for range in ranges {
            self.parts_of(*range).map(drop)?;
        }
        let Some(_permission) = self.discard_permission() else {
            let inhibited_bytes = ranges.iter().map(|range| range.size_bytes()).sum();
            return Ok(DiscardOutcome { inhibited_bytes, ..DiscardOutcome::default() });
        };
        let Some(partial_huge) = &self.partial_huge else {
            return self.discard_pieces(ranges);
        };
        // Held until the pages are discarded: a concurrent reclaim must wait.
        let mut partial_huge = partial_huge.lock().unwrap_or_else(PoisonError::into_inner);
        let plan = partial_huge.plan(ranges, tenure);
        let mut outcome = self.discard_pieces(&plan.whole)?;
        outcome.deferred_bytes += plan.deferred_pages * PAGE_SIZE_BYTES;
        Ok(outcome)
    }

    /// Permission to discard pages that others may access without this process's page tables;
    /// `None` while discards are inhibited.
    pub(crate) fn discard_permission(&self) -> Option<DiscardPermission<'_>> {
        self.inhibitors.permission()
    }

    fn discard_pieces(&self, ranges: &[GuestRange]) -> Result<DiscardOutcome, RamError> {
        let outcome = self.discard_unnoted(ranges);
        // Log after discarding: logged earlier, a concurrent reader could clear the mark while the
        // old content is still there. In case of an error too, since then some pages are gone.
        self.note_changed(ranges);
        outcome
    }

    fn discard_unnoted(&self, ranges: &[GuestRange]) -> Result<DiscardOutcome, RamError> {
        let mut pieces: Vec<Piece<'_>> = ranges
            .iter()
            .flat_map(|range| self.clip(*range))
            .filter_map(|part| self.piece(part))
            .collect();
        let mut outcome = DiscardOutcome::default();
        // Held until all pages are discarded, whether or not they are mapped from a file: a page
        // that is being merged would be moved back.
        let mut locked = self.overlay.get().map(|overlay| (overlay, overlay.lock()));
        if let Some((overlay, extents)) = &mut locked {
            // SAFETY: every piece was clipped to a region's bounds, and its content may vanish
            // since its pages are to be discarded.
            outcome += unsafe { overlay.replace(extents, &mut pieces) }?;
        }
        // SAFETY: every piece was clipped to a region's bounds, and the region's mapping lives as
        // long as `self`. vm-memory provides raw pointers and volatile slices only, so no Rust
        // reference to guest memory exists.
        outcome += unsafe { self.discarder.discard(&pieces) }?;
        Ok(outcome)
    }

    /// The file that the memory was restored from.
    pub(crate) fn snapshot(&self) -> Option<&SnapshotFile> {
        self.overlay.get()?.snapshot()
    }

    pub(crate) fn inhibitors(&self) -> &Inhibitors {
        &self.inhibitors
    }

    pub(crate) fn meter(&self) -> &Meter {
        &self.meter
    }

    /// Keeps pages from being merged and discarded while the result lives; `None` if no page of
    /// this memory is ever mapped from a file.
    pub(crate) fn lock_overlay(&self) -> Option<MutexGuard<'_, FileExtents>> {
        self.overlay.get().map(Overlay::lock)
    }

    /// The parts of a range that are mapped from files, in ascending order. Apart from private
    /// copies their content is not this memory's own.
    pub(crate) fn file_mapped(&self, range: GuestRange) -> Vec<(GuestRange, Source)> {
        self.lock_overlay().map_or(Vec::new(), |extents| extents.mapped(range).collect())
    }

    /// Location of a range within one region.
    pub(crate) fn piece(&self, range: GuestRange) -> Option<Piece<'_>> {
        let index = self.regions.iter().position(|region| region.pages().contains(range.start))?;
        let (region, mapping) = (&self.regions[index], &self.mappings[index]);
        let offset = range.start.address() - region.start.0;
        Some(Piece {
            region: index,
            range,
            address: mapping.address() + offset as usize,
            file: mapping.file().map(|file| (file, offset)),
        })
    }

    /// RAM offset of a page: its offset in memory if the regions adjoined, in bytes.
    pub(crate) fn ram_offset_bytes(&self, pfn: Pfn) -> u64 {
        let mut before_bytes = 0;
        for region in &self.regions {
            if region.pages().contains(pfn) {
                return before_bytes + (pfn.address() - region.start.0);
            }
            before_bytes += region.size_bytes;
        }
        before_bytes
    }

    /// Host address of a range that lies within one region.
    pub(crate) fn host_address(&self, range: GuestRange) -> Option<usize> {
        self.piece(range).map(|piece| piece.address)
    }

    /// The guest uses these pages again: they are no longer in the balloon. Parts outside guest
    /// memory are ignored.
    pub fn reclaim(&self, ranges: &[GuestRange]) {
        if let Some(partial_huge) = &self.partial_huge {
            let mut partial_huge = partial_huge.lock().unwrap_or_else(PoisonError::into_inner);
            for range in ranges {
                partial_huge.reclaim(*range);
            }
        }
    }

    /// The guest uses all pages again, for example because it was reset.
    pub fn reclaim_all(&self) {
        self.reclaim(&[GuestRange::new(Pfn(0), u64::MAX)]);
    }

    /// Inhibits discards of all memory as long as the guard lives. No discard is in progress when
    /// this returns. Reanonymizing, which would replace pages as well, is inhibited, too.
    pub fn inhibit_discard(&self, reason: InhibitReason) -> InhibitGuard {
        self.inhibitors.add(reason)
    }

    /// Reasons why nothing is discarded at present; empty if discards work.
    pub fn inhibit_reasons(&self) -> Vec<InhibitReason> {
        self.inhibitors.reasons()
    }

    /// Bytes of guest memory that the host holds in memory. Pages that were swapped out do not
    /// count, except with the file backings, which report only how much is allocated to the file.
    /// Pages that restored memory shares with the page cache, and merged pages, do not count
    /// either.
    ///
    /// # Errors
    /// [`RamError::Resident`] if the host does not report it.
    pub fn resident_bytes(&self) -> Result<u64, RamError> {
        Ok(self.residency()?.private_bytes)
    }

    /// As [`resident_bytes`](Self::resident_bytes), with the pages shared with others.
    ///
    /// # Errors
    /// [`RamError::Resident`] if the host does not report it.
    pub fn residency(&self) -> Result<Residency, RamError> {
        self.meter.residency(&self.mappings).map_err(|source| RamError::Resident { source })
    }

    /// As [`residency`](Self::residency), with the other memory of the process.
    ///
    /// # Errors
    /// [`RamError::Resident`] if the host does not report it.
    pub fn process_residency(&self) -> Result<ProcessResidency, RamError> {
        self.meter.process_residency(&self.mappings).map_err(|source| RamError::Resident { source })
    }

    /// From now on pages merged by the kernel are counted separately.
    pub(crate) fn count_kernel_merged(&self) {
        self.meter.count_kernel_merged();
    }
}

impl Drop for GuestRam {
    /// Unmaps the memory, except regions to which a handle of vm-memory is left, which can be
    /// cloned: those stay mapped, since an access through such a handle must not hit unrelated
    /// memory.
    fn drop(&mut self) {
        let mut memory = std::mem::take(&mut self.memory);
        for (region, mapping) in self.regions.iter().zip(self.mappings.drain(..)) {
            let Ok((rest, handle)) = memory.remove_region(region.start, region.size_bytes) else {
                mapping.leak();
                continue;
            };
            memory = rest;
            let unique = Arc::try_unwrap(handle).is_ok_and(|region| {
                let inner = region.get_mmap();
                drop(region);
                Arc::into_inner(inner).is_some()
            });
            if !unique {
                tracing::warn!(
                    "guest memory at {:#x} is still in use and stays mapped",
                    region.start.0
                );
                mapping.leak();
            }
        }
    }
}

fn region_of(spec: &RegionSpec, mapping: &Mapping) -> Result<GuestRegionMmap<WriteLog>, RamError> {
    let (flags, protection) = (libc::MAP_NORESERVE, libc::PROT_READ | libc::PROT_WRITE);
    let address = mapping.address() as *mut u8;
    // SAFETY: the address and size are those of a live mapping. `GuestRam` owns it and unmaps it
    // only when no handle to this region is left.
    let region = unsafe { MmapRegion::build_raw(address, mapping.size_bytes(), protection, flags) }
        .map_err(|error| RamError::Layout(error.to_string()))?;
    GuestRegionMmap::new(region, spec.start)
        .ok_or(RamError::OverlappingRegion { start: spec.start.0, size_bytes: spec.size_bytes })
}

/// Checks a request before anything is mapped.
pub(crate) fn check(regions: &[RegionSpec], backing: Backing) -> Result<(), RamError> {
    if regions.is_empty() {
        return Err(RamError::NoRegions);
    }
    let unit_bytes = backing.unit_bytes();
    let mut previous_end = 0;
    for RegionSpec { start: GuestAddress(start), size_bytes, .. } in regions.iter().copied() {
        if size_bytes == 0
            || !start.is_multiple_of(unit_bytes)
            || !size_bytes.is_multiple_of(unit_bytes)
        {
            return Err(RamError::UnalignedRegion { start, size_bytes, unit_bytes });
        }
        let end = start.checked_add(size_bytes).filter(|_| start >= previous_end);
        previous_end = end.ok_or(RamError::OverlappingRegion { start, size_bytes })?;
    }
    Ok(())
}

#[cfg(test)]
mod tests;
