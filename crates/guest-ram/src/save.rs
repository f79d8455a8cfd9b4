//! Writing guest memory to a sparse file.

use std::fs::File;
use std::io::{self, ErrorKind};
use std::os::unix::fs::FileExt;

use ebb_abi::{PAGE_SIZE_BYTES, Pfn};
use rustix::fs::{FallocateFlags, FileType, fallocate, fstat};
use vm_memory::{Bytes, GuestAddress};

use crate::image::{
    CHUNK_BYTES, ChunkSums, ExtentList, ImageRegion, RAM_IMAGE_VERSION, end_in_file, nonzero_runs,
};
use crate::populated::{Content, PopulatedRun};
use crate::{GuestRam, GuestRange, RamError, RamImage};

mod background;
mod unavailable;

pub use background::{BackgroundSave, PreparedSave};
pub use unavailable::BackgroundUnavailable;

/// Bytes copied at a time: they stay in the processor's cache while they are searched for zeros,
/// hashed and written.
const BUFFER_BYTES: u64 = 512 << 10;

impl GuestRam {
    /// Writes the memory to `file`, from `file_offset_bytes` (a multiple of 4096) on: pages that
    /// the host holds, in memory or in swap space, and that are not all zero. All others become
    /// holes. The file is extended to the size of the whole memory. Its former content there is
    /// discarded.
    ///
    /// The memory must not be written to concurrently: vCPUs and devices must be stopped.
    /// `progress` is called after each 64 MiB of guest memory with the number of bytes of
    /// [`size_bytes`](Self::size_bytes) that are done. Nothing is synchronized: a caller that
    /// relies on the file calls `fsync`, which can also report a full disk.
    ///
    /// Opens no file. System calls: `fstat`, `fallocate`, `ftruncate`, `pread64`, `lseek`,
    /// `mincore`, `pwrite64`, and those of heap allocation.
    ///
    /// # Errors
    /// [`RamError::DiskFull`]; [`RamError::WriteImage`] and [`RamError::ReadImage`] for other
    /// refusals; [`RamError::SaveOntoSource`] if the memory was restored from that file;
    /// [`RamError::Image`] for an invalid offset, or if the file that the memory was restored from
    /// was truncated. The file is then incomplete.
    pub fn save(
        &self,
        file: &File,
        file_offset_bytes: u64,
        progress: &mut dyn FnMut(u64),
    ) -> Result<RamImage, RamError> {
        self.save_unless(file, file_offset_bytes, progress, &|| false)
    }

    /// Like [`save`](Self::save). Gives up soon after `is_cancelled` returns true: it is called
    /// before each 512 KiB that are copied, and for each 64 MiB of guest memory.
    ///
    /// # Errors
    /// Also [`RamError::SaveCancelled`].
    pub fn save_unless(
        &self,
        file: &File,
        file_offset_bytes: u64,
        progress: &mut dyn FnMut(u64),
        is_cancelled: &dyn Fn() -> bool,
    ) -> Result<RamImage, RamError> {
        let output = Output::new(self, file, file_offset_bytes)?;
        let mut writer = Writer { output, is_cancelled };
        let mut buffer = vec![0; BUFFER_BYTES as usize];
        for start in (0..self.size_bytes()).step_by(CHUNK_BYTES as usize) {
            writer.write_chunk(start, &mut buffer)?;
            progress((start + CHUNK_BYTES).min(self.size_bytes()));
        }
        writer.output.finish()
    }

    /// Makes sure that unwritten parts read as zeros, and that the memory's own source stays
    /// unchanged.
    fn prepare_file(&self, file: &File, file_offset_bytes: u64) -> Result<(), RamError> {
        let stat = fstat(file).map_err(write_error(file_offset_bytes))?;
        if let Some(snapshot) = self.snapshot() {
            snapshot.check_is_not(&stat)?;
            if self.file_backed_bytes() > 0 {
                snapshot.check_length(self.size_bytes())?;
            }
        }
        if FileType::from_raw_mode(stat.st_mode).is_file()
            && stat.st_size as u64 > file_offset_bytes
        {
            let mode = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            fallocate(file, mode, file_offset_bytes, self.size_bytes())
                .map_err(write_error(file_offset_bytes))?;
        }
        Ok(())
    }

    /// The parts of the memory between two RAM offsets, at most one per region, each with its RAM
    /// offset.
    fn parts(&self, start: u64, end: u64) -> Vec<(GuestRange, u64)> {
        let mut region_start = 0;
        let mut parts = Vec::new();
        for region in self.regions() {
            let (from, to) = (start.max(region_start), end.min(region_start + region.size_bytes));
            if from < to {
                let first = Pfn(region.pages().start.0 + (from - region_start) / PAGE_SIZE_BYTES);
                parts.push((GuestRange::new(first, (to - from) / PAGE_SIZE_BYTES), from));
            }
            region_start += region.size_bytes;
        }
        parts
    }
}

/// The file of a save in progress.
struct Output<'a> {
    ram: &'a GuestRam,
    file: &'a File,
    file_offset_bytes: u64,
    end_bytes: u64,
    extents: ExtentList,
    sums: ChunkSums,
    /// Bytes that were noted.
    data_bytes: u64,
    /// Bytes that are in the file.
    stored_bytes: u64,
}

impl<'a> Output<'a> {
    /// Prepares `file` for the memory.
    fn new(ram: &'a GuestRam, file: &'a File, file_offset_bytes: u64) -> Result<Self, RamError> {
        let end_bytes = end_in_file(file_offset_bytes, ram.size_bytes())?;
        ram.prepare_file(file, file_offset_bytes)?;
        let (extents, sums) = (ExtentList::default(), ChunkSums::new());
        let (data_bytes, stored_bytes) = (0, 0);
        Ok(Self {
            ram,
            file,
            file_offset_bytes,
            end_bytes,
            extents,
            sums,
            data_bytes,
            stored_bytes,
        })
    }

    /// Writes pages to their place, the RAM offset `offset_bytes`. Data before `noted_bytes` was
    /// [noted](Self::note).
    fn store(&mut self, offset_bytes: u64, data: &[u8], noted_bytes: u64) -> Result<(), RamError> {
        self.file
            .write_all_at(data, self.file_offset_bytes + offset_bytes)
            .map_err(|source| self.refused(offset_bytes, noted_bytes, source))?;
        self.stored_bytes += data.len() as u64;
        Ok(())
    }

    /// Reads pages that were stored.
    fn load(&self, offset_bytes: u64, data: &mut [u8]) -> Result<(), RamError> {
        let offset_bytes = self.file_offset_bytes + offset_bytes;
        self.file
            .read_exact_at(data, offset_bytes)
            .map_err(|source| RamError::ReadImage { offset_bytes, source })
    }

    /// Notes in the image what is stored at a RAM offset, behind all that was noted before.
    fn note(&mut self, offset_bytes: u64, data: &[u8]) {
        self.sums.add(offset_bytes, data);
        self.extents.push(offset_bytes, data.len() as u64);
        self.data_bytes += data.len() as u64;
    }

    /// Completes the file.
    fn finish(self) -> Result<RamImage, RamError> {
        let write_error = write_error(self.file_offset_bytes);
        let stat = fstat(self.file).map_err(&write_error)?;
        if (stat.st_size as u64) < self.end_bytes {
            rustix::fs::ftruncate(self.file, self.end_bytes).map_err(&write_error)?;
        }
        let region = |region: &crate::Region| ImageRegion {
            start: region.start.0,
            size_bytes: region.size_bytes,
        };
        Ok(RamImage {
            version: RAM_IMAGE_VERSION,
            regions: self.ram.regions().iter().map(region).collect(),
            data_bytes: self.data_bytes,
            extents: self.extents.finish(),
            chunk_bytes: CHUNK_BYTES,
            checksums: self.sums.finish(self.ram.size_bytes()),
        })
    }

    /// The error of a write at a RAM offset.
    fn refused(&self, offset_bytes: u64, noted_bytes: u64, source: io::Error) -> RamError {
        match source.kind() {
            ErrorKind::StorageFull | ErrorKind::QuotaExceeded => {
                let rest_bytes = self.populated_bytes_from(noted_bytes);
                RamError::DiskFull {
                    written_bytes: self.stored_bytes,
                    needed_bytes: self.data_bytes + rest_bytes,
                    source,
                }
            }
            _ => {
                RamError::WriteImage { offset_bytes: self.file_offset_bytes + offset_bytes, source }
            }
        }
    }

    /// Maximum number of bytes that are still to be written from a RAM offset on.
    fn populated_bytes_from(&self, offset_bytes: u64) -> u64 {
        let chunks = (offset_bytes..self.ram.size_bytes()).step_by(CHUNK_BYTES as usize);
        let parts = chunks.flat_map(|start| self.ram.parts(start, start + CHUNK_BYTES));
        parts
            .map(|(part, _)| match self.ram.populated_runs(part) {
                Ok(runs) => runs.iter().map(|run| run.range.size_bytes()).sum(),
                Err(_) => part.size_bytes(),
            })
            .sum()
    }
}

/// A save of memory that is not written to.
struct Writer<'a> {
    output: Output<'a>,
    is_cancelled: &'a dyn Fn() -> bool,
}

impl Writer<'_> {
    /// Writes the chunk at a RAM offset.
    fn write_chunk(&mut self, start: u64, buffer: &mut [u8]) -> Result<(), RamError> {
        check_cancelled(self.is_cancelled)?;
        let ram = self.output.ram;
        for (part, part_offset) in ram.parts(start, start + CHUNK_BYTES) {
            let runs = ram.populated_runs(part).map_err(|source| RamError::Resident { source })?;
            for run in runs {
                let offset_bytes =
                    part_offset + (run.range.start.0 - part.start.0) * PAGE_SIZE_BYTES;
                self.write_run(run, offset_bytes, buffer)?;
            }
        }
        Ok(())
    }

    fn write_run(
        &mut self,
        run: PopulatedRun<'_>,
        offset_bytes: u64,
        buffer: &mut [u8],
    ) -> Result<(), RamError> {
        let mut done_bytes = 0;
        while done_bytes < run.range.size_bytes() {
            check_cancelled(self.is_cancelled)?;
            let size_bytes = (run.range.size_bytes() - done_bytes).min(buffer.len() as u64);
            let content = &mut buffer[..size_bytes as usize];
            match run.content {
                Content::Memory => {
                    copy_out(self.output.ram, run.range.start.address() + done_bytes, content)?;
                }
                Content::File(file, file_offset) => {
                    let offset_bytes = file_offset + done_bytes;
                    file.read_exact_at(content, offset_bytes)
                        .map_err(|source| RamError::ReadImage { offset_bytes, source })?;
                }
            }
            for data in nonzero_runs(content) {
                let data_offset = offset_bytes + done_bytes + data.start as u64;
                let data = &content[data];
                self.output.store(data_offset, data, data_offset)?;
                self.output.note(data_offset, data);
            }
            done_bytes += size_bytes;
        }
        Ok(())
    }
}

/// Copies guest memory from a guest-physical address on. The copy is volatile: it cannot change
/// between hashing and writing.
fn copy_out(ram: &GuestRam, address: u64, content: &mut [u8]) -> Result<(), RamError> {
    ram.memory()
        .read_slice(content, GuestAddress(address))
        .map_err(|error| RamError::Layout(error.to_string()))
}

fn check_cancelled(is_cancelled: &dyn Fn() -> bool) -> Result<(), RamError> {
    if is_cancelled() { Err(RamError::SaveCancelled) } else { Ok(()) }
}

fn write_error<E: Into<io::Error>>(offset_bytes: u64) -> impl Fn(E) -> RamError {
    move |error| RamError::WriteImage { offset_bytes, source: error.into() }
}

#[cfg(test)]
mod tests;
