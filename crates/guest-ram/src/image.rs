//! The format of saved guest memory.
//!
//! The file contains the regions one after the other, from some offset on: the byte of guest memory
//! with *RAM offset* `n` (its offset in its region plus the sizes of all regions before) is the
//! file's byte `offset + n`. Pages of zeros are not written; where the file system supports holes,
//! they take no space. [`RamImage`] describes which parts must be mapped and their content; the
//! writer of the file stores it next to the file.

use std::fs::File;

use ebb_abi::PAGE_SIZE_BYTES;
use serde::{Deserialize, Serialize};

use crate::{RamError, RegionSpec};

mod checksum;
mod error;
mod extents;
mod verify;

pub use error::ImageError;
pub use extents::{CHUNK_BYTES, Extent, ImageRegion, MAX_EXTENTS, RAM_IMAGE_VERSION};

pub(crate) use checksum::{ChunkHasher, ChunkSums, nonzero_runs};
pub(crate) use extents::{ExtentList, merge_across_gaps};

/// Maximum number of regions; no machine has more.
const MAX_REGIONS: usize = 1024;

/// The description of saved guest memory, stored with it. Offsets and sizes are in bytes.
///
/// A description that was read from a file is untrusted: [`validate`](Self::validate) finds invalid
/// ones, and everything in this crate that takes an image calls it first.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RamImage {
    pub(crate) version: u32,
    pub(crate) regions: Vec<ImageRegion>,
    pub(crate) data_bytes: u64,
    pub(crate) extents: Vec<Extent>,
    pub(crate) chunk_bytes: u64,
    pub(crate) checksums: Vec<u64>,
}

impl RamImage {
    /// The saved regions, in ascending order of guest-physical address.
    pub fn regions(&self) -> &[ImageRegion] {
        &self.regions
    }

    /// Size of all regions in bytes: the image's size in its file, holes included.
    pub fn ram_bytes(&self) -> u64 {
        self.regions.iter().fold(0, |sum, region| sum.saturating_add(region.size_bytes))
    }

    /// Bytes of the pages that are not all zero, which were written.
    pub fn data_bytes(&self) -> u64 {
        self.data_bytes
    }

    /// The parts that contain data, in ascending order. Together they can be larger than
    /// [`data_bytes`](Self::data_bytes), since their number is bounded: the gap between two parts
    /// that were merged is a hole in the file and reads as zeros.
    pub fn extents(&self) -> &[Extent] {
        &self.extents
    }

    /// Checks that the image is consistent. Cheap: the memory's content is not examined.
    ///
    /// # Errors
    /// The first problem found.
    pub fn validate(&self) -> Result<(), ImageError> {
        if self.version != RAM_IMAGE_VERSION {
            return Err(ImageError::UnknownVersion { found: self.version });
        }
        let ram_bytes = self.validate_regions()?;
        if self.extents.len() > MAX_EXTENTS {
            return Err(ImageError::TooManyExtents { found: self.extents.len() });
        }
        let mut previous_end = 0;
        let mut extent_bytes = 0;
        for &Extent { offset_bytes, size_bytes } in &self.extents {
            let bad = |problem| ImageError::BadExtent { offset_bytes, size_bytes, problem };
            if !offset_bytes.is_multiple_of(PAGE_SIZE_BYTES)
                || !size_bytes.is_multiple_of(PAGE_SIZE_BYTES)
            {
                return Err(bad("does not consist of whole pages"));
            }
            if size_bytes == 0 {
                return Err(bad("is empty"));
            }
            if offset_bytes < previous_end {
                return Err(bad("overlaps its predecessor or lies before it"));
            }
            previous_end = offset_bytes
                .checked_add(size_bytes)
                .filter(|end| *end <= ram_bytes)
                .ok_or(bad("lies outside of the memory"))?;
            extent_bytes += size_bytes;
        }
        if self.data_bytes > extent_bytes || !self.data_bytes.is_multiple_of(PAGE_SIZE_BYTES) {
            return Err(ImageError::DataBytes { data_bytes: self.data_bytes, extent_bytes });
        }
        let chunks = ram_bytes.div_ceil(CHUNK_BYTES);
        if self.chunk_bytes != CHUNK_BYTES || self.checksums.len() as u64 != chunks {
            return Err(ImageError::ChecksumCount {
                found: self.checksums.len(),
                expected: chunks,
            });
        }
        Ok(())
    }

    /// Checks the regions; returns the sum of their sizes.
    fn validate_regions(&self) -> Result<u64, ImageError> {
        if self.regions.is_empty() || self.regions.len() > MAX_REGIONS {
            return Err(ImageError::RegionCount { found: self.regions.len() });
        }
        let mut previous_end = 0;
        let mut ram_bytes = 0_u64;
        for &ImageRegion { start, size_bytes } in &self.regions {
            let aligned =
                start.is_multiple_of(PAGE_SIZE_BYTES) && size_bytes.is_multiple_of(PAGE_SIZE_BYTES);
            let end = start
                .checked_add(size_bytes)
                .filter(|_| aligned && size_bytes > 0 && start >= previous_end);
            previous_end = end.ok_or(ImageError::BadRegion { start, size_bytes })?;
            // No overflow: the regions do not overlap.
            ram_bytes += size_bytes;
        }
        Ok(ram_bytes)
    }

    /// Checks that the image has the requested regions. Their host nodes may differ.
    ///
    /// # Errors
    /// [`ImageError::OtherRegions`].
    pub fn validate_regions_are(&self, regions: &[RegionSpec]) -> Result<(), ImageError> {
        let asked: Vec<_> = regions
            .iter()
            .map(|spec| ImageRegion { start: spec.start.0, size_bytes: spec.size_bytes })
            .collect();
        if asked == self.regions {
            Ok(())
        } else {
            Err(ImageError::OtherRegions {
                image: error::list(&self.regions),
                asked: error::list(&asked),
            })
        }
    }

    /// Checks that `file` is long enough to contain the memory from `file_offset_bytes` on, and
    /// that it can be mapped from there.
    ///
    /// # Errors
    /// [`RamError::Image`], or [`RamError::ReadImage`] if the file's size cannot be determined.
    pub fn validate_file(&self, file: &File, file_offset_bytes: u64) -> Result<(), RamError> {
        let needed_bytes = end_in_file(file_offset_bytes, self.ram_bytes())?;
        let file_bytes = rustix::fs::fstat(file)
            .map_err(|error| RamError::ReadImage {
                offset_bytes: file_offset_bytes,
                source: error.into(),
            })?
            .st_size as u64;
        if file_bytes < needed_bytes {
            return Err(ImageError::FileTooShort { file_bytes, needed_bytes }.into());
        }
        Ok(())
    }
}

/// End of the memory in its file; checks that it can be mapped.
pub(crate) fn end_in_file(file_offset_bytes: u64, ram_bytes: u64) -> Result<u64, ImageError> {
    file_offset_bytes
        .checked_add(ram_bytes)
        .filter(|end| {
            file_offset_bytes.is_multiple_of(PAGE_SIZE_BYTES) && i64::try_from(*end).is_ok()
        })
        .ok_or(ImageError::BadFileOffset { file_offset_bytes })
}

#[cfg(test)]
mod tests;
