//! Guest memory that starts from a file.
//!
//! The parts of the file that contain data are mapped privately: nothing is read before the guest
//! accesses it, and several machines restored from the same file share its pages in the page cache
//! until they write to them. All other memory is anonymous.
//!
//! Discarded pages of the file become ordinary memory, see [`overlay`](crate::overlay).
//!
//! Transparent huge pages are enabled in the anonymous parts only. In a private mapping of a file,
//! Linux allocates single pages on writes in any case, and `MADV_HUGEPAGE` would make the first
//! access to a page read 2 MiB.

use std::fs::File;

use ebb_abi::{PAGE_SIZE_BYTES, Pfn};

use crate::image::{Extent, MAX_EXTENTS, merge_across_gaps};
use crate::mapping::Mapping;
use crate::overlay::{Overlay, SnapshotFile, max_vmas};
use crate::region::{Backing, HugePages, RegionSpec};
use crate::{GuestRam, GuestRange, RamError, RamImage};

mod working_set;

pub use working_set::{
    MAX_WORKING_SET_EXTENTS, WORKING_SET_BLOCK_BYTES, WorkingSetError, read_ahead,
};

impl GuestRam {
    /// Creates memory with the content that `image` describes, from `file`, where it begins at
    /// `file_offset_bytes`. Its backing is [`Backing::Anonymous`]; the regions must be those that
    /// were saved, but may come from other nodes.
    ///
    /// Only the file's size is read now: pages are read when they are first accessed.
    /// [`RamImage::verify`] reads and compares all. Pages that are only read stay in the page
    /// cache, on whatever node that is; only copies come from the requested node.
    ///
    /// The file must not change as long as the memory lives. Pages that were not yet written to
    /// would show changes to it, and if it were truncated, an access to them would end the process
    /// with SIGBUS, as does a read error of the disk. Replacing it under its name (rename) or
    /// removing it is harmless. A process that can write to the file can write to the machine's
    /// memory.
    ///
    /// ```
    /// use ebb_guest_ram::{Backing, GuestRam, HugePages, Populate, RegionSpec};
    /// use vm_memory::{Bytes, GuestAddress};
    ///
    /// let regions = [RegionSpec { start: GuestAddress(0), size_bytes: 1 << 20, host_node: None }];
    /// let ram = GuestRam::new(&regions, Backing::Anonymous, HugePages::Off, Populate::Lazy)?;
    /// ram.memory().write_obj(42_u64, GuestAddress(4096))?;
    /// let file = tempfile::tempfile()?;
    /// let image = ram.save(&file, 0, &mut |_| {})?;
    ///
    /// let same = GuestRam::restore(&regions, HugePages::Off, file, 0, &image)?;
    /// assert_eq!(same.memory().read_obj::<u64>(GuestAddress(4096))?, 42);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// As for [`GuestRam::new`]; [`RamError::Image`] if the image is damaged, that of another
    /// machine, or longer than the file.
    pub fn restore(
        regions: &[RegionSpec],
        huge_pages: HugePages,
        file: File,
        file_offset_bytes: u64,
        image: &RamImage,
    ) -> Result<Self, RamError> {
        image.validate()?;
        image.validate_regions_are(regions)?;
        image.validate_file(&file, file_offset_bytes)?;
        // Each takes a VMA and leaves another one behind it; as many again are reserved for
        // discards.
        let max_runs = (max_vmas() / 4).min(MAX_EXTENTS as u64) as usize;
        let runs = file_runs(image, max_runs);

        let mappings = regions
            .iter()
            .map(|spec| Mapping::new(spec, Backing::Anonymous, huge_pages))
            .collect::<Result<Vec<_>, RamError>>()?;
        for run in &runs {
            let region = run.region;
            let offset_bytes = run.range.start.address() - regions[region].start.0;
            let size_bytes = run.range.size_bytes() as usize;
            mappings[region].map_privately(
                offset_bytes as usize,
                size_bytes,
                &file,
                file_offset_bytes + run.ram_offset_bytes,
            )?;
        }
        for (spec, mapping) in regions.iter().zip(&mappings) {
            mapping.set_file_policies(spec)?;
        }
        let ranges: Vec<_> = runs.iter().map(|run| run.range).collect();
        let snapshot = SnapshotFile { file, offset_bytes: file_offset_bytes };
        let overlay = Overlay::new(regions, huge_pages, Some((snapshot, &ranges)))?;
        Self::assemble(regions, mappings, Backing::Anonymous, huge_pages, Some(overlay))
    }

    /// Whether the memory was restored from a file ([`restore`](Self::restore)).
    pub fn is_restored(&self) -> bool {
        self.snapshot().is_some()
    }

    /// Bytes that are still mapped from the file that the memory was restored from; pages that the
    /// guest has written to count too, until they are discarded. 0 if it was not restored.
    pub fn file_backed_bytes(&self) -> u64 {
        self.lock_overlay().map_or(0, |extents| extents.snapshot_pages() * PAGE_SIZE_BYTES)
    }
}

/// A run of pages to be mapped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FileRun {
    /// Index of its region.
    pub(crate) region: usize,
    /// Guest pages.
    pub(crate) range: GuestRange,
    /// RAM offset of the first page, in bytes.
    pub(crate) ram_offset_bytes: u64,
}

/// The mappings of a validated image: its extents, split at boundaries of regions, and merged until
/// at most `max_runs` are left (or one per region).
pub(crate) fn file_runs(image: &RamImage, max_runs: usize) -> Vec<FileRun> {
    let mut region_end_bytes = 0;
    let ends: Vec<u64> = image
        .regions()
        .iter()
        .map(|region| {
            region_end_bytes += region.size_bytes;
            region_end_bytes
        })
        .collect();
    let region_at = |offset_bytes: u64| ends.partition_point(|end| *end <= offset_bytes);
    let mut parts = Vec::new();
    for extent in image.extents() {
        let mut start = extent.offset_bytes;
        while start < extent.end_bytes() {
            let end = extent.end_bytes().min(ends[region_at(start)]);
            parts.push(Extent { offset_bytes: start, size_bytes: end - start });
            start = end;
        }
    }
    let same_region = |left: &Extent, right: &Extent| {
        region_at(left.offset_bytes) == region_at(right.offset_bytes)
    };
    // Neighbours without a gap are always one.
    parts.dedup_by(|next, merged| {
        let one = merged.end_bytes() == next.offset_bytes && same_region(merged, next);
        if one {
            merged.size_bytes += next.size_bytes;
        }
        one
    });
    merge_across_gaps(&mut parts, max_runs, same_region);
    let run = |part: &Extent| {
        let region = region_at(part.offset_bytes);
        let spec = image.regions()[region];
        let offset_in_region = part.offset_bytes - (ends[region] - spec.size_bytes);
        FileRun {
            region,
            range: GuestRange::new(
                Pfn::containing(spec.start + offset_in_region),
                part.size_bytes / PAGE_SIZE_BYTES,
            ),
            ram_offset_bytes: part.offset_bytes,
        }
    };
    parts.iter().map(run).collect()
}

#[cfg(test)]
mod tests;
