//! The working set of restored memory: the parts of its file that are accessed in the first
//! seconds. Recorded once, and read ahead of the guest in all machines that start from a file which
//! is not in the page cache.

use std::fs::File;
use std::io;
use std::num::NonZeroU64;

use ebb_abi::Pfn;
use rustix::fs::{Advice, fadvise};
use thiserror::Error;

use crate::image::{Extent, merge_across_gaps};
use crate::overlay::Source;
use crate::{GuestRam, GuestRange};

/// Unit of a working set, in bytes. Where one page is accessed, Linux also maps its neighbours in a
/// block of this size that are in the page cache (mm/memory.c, `do_fault_around`): smaller units
/// would tell nothing more.
pub const WORKING_SET_BLOCK_BYTES: u64 = 64 << 10;

/// Largest number of extents of a working set; more are merged across the smallest gaps.
pub const MAX_WORKING_SET_EXTENTS: usize = 16 << 10;

/// Bytes of one system call. Of more, Linux reads only as much as the device's window for reading
/// ahead or its largest request, the larger of both (mm/readahead.c, `force_page_cache_ra`): at
/// least this, unless `read_ahead_kb` of the device is set lower than by default.
const READ_BYTES: NonZeroU64 = NonZeroU64::new(128 << 10).unwrap();

/// Pages of one look at /proc/self/pagemap: 512 KiB of entries.
const PAGES_PER_LOOK: u64 = 64 << 10;

/// Memory whose working set is not known.
#[derive(Debug, Error)]
pub enum WorkingSetError {
    /// It comes from no file.
    #[error("the memory was not restored from a file")]
    NotRestored,
    /// The kernel does not say which pages are mapped.
    #[error("/proc/self/pagemap cannot be read: {0}")]
    Pagemap(io::Error),
}

impl GuestRam {
    /// The parts of the file from which the memory was restored that were accessed since, in whole
    /// blocks of [`WORKING_SET_BLOCK_BYTES`] and in ascending order. Pages that were discarded since
    /// are not contained, whether they had been accessed or not. Takes some milliseconds for each
    /// gigabyte in the file.
    ///
    /// # Errors
    /// [`WorkingSetError`].
    pub fn working_set(&self) -> Result<Vec<Extent>, WorkingSetError> {
        let none = || WorkingSetError::Pagemap(io::ErrorKind::NotFound.into());
        let pagemap = self.pagemap.as_ref().ok_or_else(none);
        let mut parts: Vec<GuestRange> = Vec::new();
        {
            let extents = self.lock_overlay().filter(|_| self.is_restored());
            let extents = extents.ok_or(WorkingSetError::NotRestored)?;
            for region in self.regions() {
                let of_file = extents.mapped(region.pages());
                let of_file = of_file.filter(|(_, source)| matches!(source, Source::Snapshot));
                parts.extend(of_file.map(|(part, _)| part));
            }
        }
        // A page that is discarded meanwhile may be contained.
        let pagemap = pagemap?;
        let mut blocks = Blocks::default();
        for mut part in parts {
            while !part.is_empty() {
                let piece = GuestRange::new(part.start, part.pages.min(PAGES_PER_LOOK));
                part = GuestRange::new(piece.end(), part.pages - piece.pages);
                let Some(address) = self.host_address(piece) else { continue };
                let states = pagemap.read(address, piece.pages as usize);
                let states = states.map_err(WorkingSetError::Pagemap)?;
                for (page, state) in (piece.start.0..).zip(states) {
                    if state.is_in_memory() || state.is_private() {
                        blocks.add(self.ram_offset_bytes(Pfn(page)) / WORKING_SET_BLOCK_BYTES);
                    }
                }
            }
        }
        Ok(blocks.extents(self.size_bytes()))
    }
}

/// Runs of blocks, in ascending order.
#[derive(Debug, Default)]
struct Blocks(Vec<std::ops::Range<u64>>);

impl Blocks {
    /// Adds a block, not before the last one.
    fn add(&mut self, block: u64) {
        match self.0.last_mut() {
            Some(last) if block < last.end => {}
            Some(last) if block == last.end => last.end += 1,
            _ => self.0.push(block..block + 1),
        }
    }

    /// As extents of a memory of `ram_bytes`.
    fn extents(self, ram_bytes: u64) -> Vec<Extent> {
        let extent = |run: &std::ops::Range<u64>| {
            let offset_bytes = run.start * WORKING_SET_BLOCK_BYTES;
            let end_bytes = (run.end * WORKING_SET_BLOCK_BYTES).min(ram_bytes);
            Extent { offset_bytes, size_bytes: end_bytes - offset_bytes }
        };
        let mut extents = self.0.iter().map(extent).collect();
        merge_across_gaps(&mut extents, MAX_WORKING_SET_EXTENTS, |_, _| true);
        extents
    }
}

/// Has the kernel read parts of saved memory, which begins at `file_offset_bytes` of `file`, into
/// the page cache, one after the other, with large reads. Returns when the last reads have begun,
/// and nearly at once if everything is there already.
///
/// # Errors
/// Those of posix_fadvise(2).
pub fn read_ahead(file: &File, file_offset_bytes: u64, extents: &[Extent]) -> io::Result<()> {
    for extent in extents {
        let mut offset_bytes = extent.offset_bytes;
        // A size of 0 would mean all to the end of the file.
        while let Some(left_bytes) = NonZeroU64::new(extent.end_bytes() - offset_bytes) {
            let size_bytes = left_bytes.min(READ_BYTES);
            let in_file = file_offset_bytes.saturating_add(offset_bytes);
            fadvise(file, in_file, Some(size_bytes), Advice::WillNeed)?;
            offset_bytes += size_bytes.get();
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use ebb_abi::PAGE_SIZE_BYTES;

    use super::*;

    #[test]
    fn blocks_are_joined_and_end_with_the_memory() {
        let mut blocks = Blocks::default();
        for block in [0, 0, 1, 3, 3, 9] {
            blocks.add(block);
        }
        let ram_bytes = 9 * WORKING_SET_BLOCK_BYTES + PAGE_SIZE_BYTES;
        let extents: Vec<_> = blocks
            .extents(ram_bytes)
            .iter()
            .map(|extent| (extent.offset_bytes, extent.size_bytes))
            .collect();
        let block = WORKING_SET_BLOCK_BYTES;
        assert_eq!(extents, [(0, 2 * block), (3 * block, block), (9 * block, PAGE_SIZE_BYTES)]);
    }

    #[test]
    fn the_number_of_extents_is_bounded() {
        let mut blocks = Blocks::default();
        for block in 0..3 * MAX_WORKING_SET_EXTENTS as u64 {
            blocks.add(2 * block);
        }
        assert_eq!(blocks.extents(u64::MAX).len(), MAX_WORKING_SET_EXTENTS);
    }
}
