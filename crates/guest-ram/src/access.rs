//! Whole pages: which ones are populated, and access to their content.

use std::io;
use std::os::unix::fs::FileExt;

use ebb_abi::{PAGE_SIZE_BYTES, Pfn};
use vm_memory::{Bytes, GuestAddress};

use crate::{Backing, GuestRam, GuestRange, RamError};

/// Pages examined at a time: the result of mincore(2) for 64 MiB takes 128 KiB.
const LOOK_PAGES: u64 = (64 << 20) / PAGE_SIZE_BYTES;

impl GuestRam {
    /// Adds to `populated` the parts of `range` for which the host holds content: in memory, in
    /// swap space, in the memory's file, or in the file that it was [restored](Self::restore) from.
    /// All other pages read as zeros, and reading them would make the host allocate some of them.
    ///
    /// The parts are in ascending order, as long as possible, and do not cross regions. If the
    /// memory is written to concurrently, a page is reported in its state at some moment of the
    /// call. If the host does not report single pages, all count as populated.
    ///
    /// Opens no file. System calls: `pread64`, `lseek`, `mincore`, and those of heap allocation.
    ///
    /// # Errors
    /// [`RamError::OutsideRam`] if not all of the range is guest memory, [`RamError::Resident`] if
    /// the host refuses to report it.
    pub fn populated_ranges(
        &self,
        range: GuestRange,
        populated: &mut Vec<GuestRange>,
    ) -> Result<(), RamError> {
        for part in self.parts_of(range)? {
            // Ranges of this part are not joined with earlier ones.
            let first_of_part = populated.len();
            for start in (part.start.0..part.end().0).step_by(LOOK_PAGES as usize) {
                let look = GuestRange::new(Pfn(start), LOOK_PAGES).intersection(part);
                let runs =
                    self.populated_runs(look).map_err(|source| RamError::Resident { source })?;
                for run in runs {
                    match populated[first_of_part..].last_mut() {
                        Some(last) if last.end() == run.range.start => {
                            last.pages += run.range.pages;
                        }
                        _ => populated.push(run.range),
                    }
                }
            }
        }
        Ok(())
    }

    /// Copies the pages of `range` into `content`. If the guest writes concurrently, some bytes are
    /// from before a write and others from after it, even within a page.
    ///
    /// Intended for pages that are [populated](Self::populated_ranges). Others are zeros, and
    /// anonymous memory gets an entry in its page tables for each. System calls: `pread64`.
    ///
    /// # Errors
    /// [`RamError::OutsideRam`] if not all of the range is guest memory; [`RamError::ReadPages`] if
    /// the memory's file cannot be read.
    ///
    /// # Panics
    /// If `content` has another size than the range.
    pub fn read_pages(&self, range: GuestRange, content: &mut [u8]) -> Result<(), RamError> {
        assert_eq!(content.len() as u64, range.size_bytes(), "a buffer of the size of {range}");
        let mut rest = content;
        for part in self.parts_of(range)? {
            let (content, behind) = rest.split_at_mut(part.size_bytes() as usize);
            rest = behind;
            // Reading a hole through a mapping would allocate a page, so files are read with system
            // calls.
            let file = self.piece(part).and_then(|piece| piece.file);
            let result = match file {
                Some((file, offset)) => file.read_exact_at(content, offset),
                None => self
                    .memory()
                    .read_slice(content, GuestAddress(part.start.address()))
                    .map_err(io::Error::other),
            };
            result.map_err(|source| RamError::ReadPages { range: part, source })?;
        }
        Ok(())
    }

    /// Replaces the content of the pages of `range`. Pages of a memfd are written to the file: for
    /// absent pages that takes half the time of page faults. System call: `pwrite64`.
    ///
    /// # Errors
    /// [`RamError::OutsideRam`] if not all of the range is guest memory, before anything is
    /// written; [`RamError::WritePages`] if the memory's file cannot be written, for example
    /// because the host has no memory left.
    ///
    /// # Panics
    /// If `content` has another size than the range.
    pub fn write_pages(&self, range: GuestRange, content: &[u8]) -> Result<(), RamError> {
        assert_eq!(content.len() as u64, range.size_bytes(), "content of the size of {range}");
        let mut rest = content;
        for part in self.parts_of(range)? {
            let (content, behind) = rest.split_at(part.size_bytes() as usize);
            rest = behind;
            self.write_part(part, content)
                .map_err(|source| RamError::WritePages { range: part, source })?;
        }
        Ok(())
    }

    /// Replaces the content of pages of one region.
    fn write_part(&self, part: GuestRange, content: &[u8]) -> io::Result<()> {
        match self.piece(part).and_then(|piece| piece.file) {
            // Huge page files cannot be written to.
            Some((file, offset)) if self.backing() == Backing::Memfd => {
                let result = file.write_all_at(content, offset);
                // Also after an error, since then a part has been written.
                self.note_changed(&[part]);
                result
            }
            _ => {
                let address = GuestAddress(part.start.address());
                self.memory().write_slice(content, address).map_err(io::Error::other)
            }
        }
    }

    /// The parts of a range, one per region, all of which must be guest memory.
    pub(crate) fn parts_of(
        &self,
        range: GuestRange,
    ) -> Result<impl Iterator<Item = GuestRange>, RamError> {
        let inside: u64 = self.clip(range).map(|part| part.pages).sum();
        if inside == range.pages {
            Ok(self.clip(range))
        } else {
            Err(RamError::OutsideRam { range })
        }
    }
}

#[cfg(test)]
mod tests;
