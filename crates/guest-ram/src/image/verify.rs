//! Comparing saved memory with its checksums.

use std::fs::File;
use std::os::unix::fs::FileExt;

use super::{CHUNK_BYTES, ChunkHasher, ImageError, RamImage, nonzero_runs};
use crate::RamError;
use crate::holes::data_segments;

/// Bytes read at a time; they stay in the processor's cache.
const BUFFER_BYTES: usize = 512 << 10;

impl RamImage {
    /// Reads all memory that was saved to `file` from `file_offset_bytes` on, and compares it with
    /// the checksums. `progress` is called after each chunk with the number of bytes of
    /// [`ram_bytes`](Self::ram_bytes) that are done.
    ///
    /// Data outside of the extents is not examined, since it is not used.
    ///
    /// # Errors
    /// [`RamError::Image`] if it differs from the saved memory, [`RamError::ReadImage`] if it
    /// cannot be read.
    pub fn verify(
        &self,
        file: &File,
        file_offset_bytes: u64,
        progress: &mut dyn FnMut(u64),
    ) -> Result<(), RamError> {
        self.validate()?;
        self.validate_file(file, file_offset_bytes)?;
        let ram_bytes = self.ram_bytes();
        let mut buffer = vec![0; BUFFER_BYTES];
        let mut found_bytes = 0;
        let mut extents = self.extents();
        for (index, checksum) in self.checksums.iter().enumerate() {
            let start = index as u64 * CHUNK_BYTES;
            let end = (start + CHUNK_BYTES).min(ram_bytes);
            let mut hasher = ChunkHasher::new();
            let past = extents.partition_point(|extent| extent.end_bytes() <= start);
            extents = &extents[past..];
            for extent in extents.iter().take_while(|extent| extent.offset_bytes < end) {
                let part = extent.offset_bytes.max(start)..extent.end_bytes().min(end);
                hash_part(file, file_offset_bytes, part, &mut buffer, &mut hasher)?;
            }
            if hasher.finish() != *checksum {
                return Err(
                    ImageError::WrongChecksum { offset_bytes: start, end_bytes: end }.into()
                );
            }
            found_bytes += hasher.data_bytes();
            progress(end);
        }
        if found_bytes != self.data_bytes {
            return Err(
                ImageError::WrongDataBytes { found_bytes, data_bytes: self.data_bytes }.into()
            );
        }
        Ok(())
    }
}

/// Adds the data of a part, given by RAM offsets, to a checksum.
fn hash_part(
    file: &File,
    file_offset_bytes: u64,
    part: std::ops::Range<u64>,
    buffer: &mut [u8],
    hasher: &mut ChunkHasher,
) -> Result<(), RamError> {
    let read_error = |offset_bytes| move |source| RamError::ReadImage { offset_bytes, source };
    let in_file = file_offset_bytes + part.start..file_offset_bytes + part.end;
    let segments =
        data_segments(file, in_file).map_err(read_error(file_offset_bytes + part.start))?;
    for segment in segments {
        let mut next = segment.start;
        while next < segment.end {
            let size_bytes = (segment.end - next).min(buffer.len() as u64) as usize;
            let content = &mut buffer[..size_bytes];
            file.read_exact_at(content, next).map_err(read_error(next))?;
            for run in nonzero_runs(content) {
                hasher.add(next + run.start as u64 - file_offset_bytes, &content[run]);
            }
            next += size_bytes as u64;
        }
    }
    Ok(())
}
