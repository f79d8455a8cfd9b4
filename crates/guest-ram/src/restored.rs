//! Guest memory that starts from a file.
//!
//! The parts of the file that hold data are mapped privately: nothing is read before the guest
//! touches it, and several machines that start from the same file share its pages in the page cache
//! until they write to them. Everything else is anonymous memory.
//!
//! `MADV_DONTNEED` on a private mapping of a file brings back the file's content, which is neither
//! zero nor what the guest had there. So a page that is discarded for the first time is replaced by
//! anonymous memory, and from then on is like all other memory. [`FileRuns`] knows which pages
//! still are the file's.
//!
//! The replacement is a piece of a [template](crate::templates).
//!
//! Transparent huge pages are asked for in the anonymous parts only. In a private mapping of a
//! file, Linux allocates single pages on writes in any case, and `MADV_HUGEPAGE` would make the
//! first touch of a page read 2 MiB.

use std::fs::File;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use ebb_abi::{PAGE_SIZE_BYTES, Pfn};
use rustix::fs::{Stat, fstat};

use crate::discard::{DiscardOutcome, Piece};
use crate::image::{Extent, MAX_EXTENTS, merge_across_gaps};
use crate::mapping::Mapping;
use crate::region::{Backing, HugePages, RegionSpec};
use crate::templates::{Templates, max_mappings};
use crate::{GuestRam, GuestRange, ImageError, RamError, RamImage};
use runs::{FileRuns, Verdict};

mod runs;

/// What is special about memory that was restored.
#[derive(Debug)]
pub(crate) struct Restored {
    file: File,
    file_offset_bytes: u64,
    runs: Mutex<FileRuns>,
    /// Pages in `runs`, so that discards need not lock once there are none.
    file_pages: AtomicU64,
    templates: Templates,
}

impl GuestRam {
    /// Memory with the content that `image` describes, from `file`, where it lies from
    /// `file_offset_bytes` on. Its backing is [`Backing::Anonymous`]; the regions must be those
    /// that were saved, but may come from other nodes.
    ///
    /// Nothing is read now, apart from the file's size: pages are read when they are first touched.
    /// [`RamImage::verify`] reads and compares all. Pages that are only read stay in the page
    /// cache, wherever that has them; only copies come from the node asked for.
    ///
    /// The file must stay as it is as long as the memory lives. Pages that were not yet written to
    /// would show changes to it, and if it were cut short, an access to them would end the process
    /// with SIGBUS; after a read error of the disk too. Replacing it under its name (rename) or
    /// removing it is harmless. Who can write to the file can write to the machine's memory.
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
        let max_mappings = max_mappings();
        // Each takes a mapping and leaves another one behind it; as many again are left for
        // discards.
        let max_runs = (max_mappings / 4).min(MAX_EXTENTS as u64) as usize;
        let runs = file_runs(image, max_runs);

        let mappings = regions
            .iter()
            .map(|spec| Mapping::new(spec, Backing::Anonymous, huge_pages))
            .collect::<Result<Vec<_>, RamError>>()?;
        let pages: Vec<GuestRange> = regions
            .iter()
            .map(|spec| {
                GuestRange::new(Pfn::containing(spec.start.0), spec.size_bytes / PAGE_SIZE_BYTES)
            })
            .collect();
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
        let runs = FileRuns::new(&ranges, pages, max_mappings);
        let restored = Restored {
            file,
            file_offset_bytes,
            file_pages: AtomicU64::new(runs.pages()),
            runs: Mutex::new(runs),
            templates: Templates::new(regions, huge_pages)?,
        };
        Self::assemble(regions, mappings, Backing::Anonymous, huge_pages, Some(restored))
    }

    /// Whether the memory came from a file ([`restore`](Self::restore)).
    pub fn is_restored(&self) -> bool {
        self.restored.is_some()
    }

    /// Bytes that are still mapped from the file that the memory was restored from; pages that the
    /// guest has written to since count too, until they are discarded. 0 if it was not restored.
    pub fn file_backed_bytes(&self) -> u64 {
        self.restored
            .as_ref()
            .map_or(0, |restored| restored.file_pages.load(Ordering::Acquire) * PAGE_SIZE_BYTES)
    }
}

impl Restored {
    /// The parts of `range` that are the file's.
    pub(crate) fn file_backed(&self, range: GuestRange) -> Vec<GuestRange> {
        if self.is_anonymous() { Vec::new() } else { self.lock().intersection(range).collect() }
    }

    /// Where the byte at a RAM offset is in the file.
    pub(crate) fn in_file(&self, ram_offset_bytes: u64) -> (&File, u64) {
        (&self.file, self.file_offset_bytes + ram_offset_bytes)
    }

    /// Checks that the memory can be saved to the file `target`: it must be another one than its
    /// source, which must still be as long as it was. What is missing would look like a hole.
    pub(crate) fn check_target(&self, target: &Stat, ram_bytes: u64) -> Result<(), RamError> {
        let own = fstat(&self.file).map_err(|error| RamError::ReadImage {
            offset_bytes: self.file_offset_bytes,
            source: error.into(),
        })?;
        if (own.st_dev, own.st_ino) == (target.st_dev, target.st_ino) {
            return Err(RamError::SaveOntoSource);
        }
        let (file_bytes, needed_bytes) = (own.st_size as u64, self.file_offset_bytes + ram_bytes);
        if file_bytes < needed_bytes && !self.is_anonymous() {
            return Err(ImageError::FileTooShort { file_bytes, needed_bytes }.into());
        }
        Ok(())
    }

    /// Makes `pieces` read as zeros as far as they have pages of the file, by replacing them. What
    /// is left for an ordinary discard stays in `pieces`. Pages for which no mappings are left stay
    /// as they are and are counted as deferred. `other_mappings` is how many mappings guest memory
    /// takes for other reasons. `replaced` gets what was replaced, in case of an error too.
    ///
    /// # Safety
    /// Each piece must lie within one of the mappings that this was made with, and nobody may rely
    /// on its content.
    pub(crate) unsafe fn replace(
        &self,
        pieces: &mut Vec<Piece<'_>>,
        other_mappings: u64,
        replaced: &mut Vec<GuestRange>,
    ) -> Result<DiscardOutcome, RamError> {
        let mut outcome = DiscardOutcome::default();
        // Pages never become the file's again, so what is anonymous now stays so without the lock.
        if self.is_anonymous() {
            return Ok(outcome);
        }
        let mut runs = self.lock();
        runs.set_other_mappings(other_mappings);
        let mut result = Ok(());
        pieces.retain(|piece| {
            if result.is_err() {
                return true;
            }
            match runs.judge(piece.range) {
                Verdict::Anonymous => return true,
                Verdict::Keep => outcome.deferred_bytes += piece.range.size_bytes(),
                Verdict::Replace => {
                    outcome.ranges += 1;
                    let done = |part: GuestRange| {
                        runs.remove(part);
                        replaced.push(part);
                        outcome.bytes += part.size_bytes();
                        outcome.syscalls += 1;
                    };
                    // SAFETY: the caller vouches for the piece.
                    result = unsafe { self.templates.put_over(piece, done) };
                }
            }
            false
        });
        self.file_pages.store(runs.pages(), Ordering::Release);
        result.map(|()| outcome)
    }

    /// Number of mappings that guest memory takes at most.
    pub(crate) fn mappings(&self) -> u64 {
        self.lock().mappings()
    }

    /// What replaces pages of the file.
    pub(crate) fn templates(&self) -> &Templates {
        &self.templates
    }

    fn is_anonymous(&self) -> bool {
        // Acquire: whoever sees that no page is the file's any more must also see the memory that
        // replaced it.
        self.file_pages.load(Ordering::Acquire) == 0
    }

    fn lock(&self) -> MutexGuard<'_, FileRuns> {
        self.runs.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A run of pages that is to be mapped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FileRun {
    /// Number of the region that it lies in.
    pub(crate) region: usize,
    /// Guest pages.
    pub(crate) range: GuestRange,
    /// RAM offset of the first page, in bytes.
    pub(crate) ram_offset_bytes: u64,
}

/// What must be mapped for an image that has been validated: its extents, cut at borders of
/// regions, and merged until at most `max_runs` are left (or one a region).
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
    // Neighbours without a gap are one in any case.
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
