//! Errors of saved guest memory.

use super::extents::{ImageRegion, MAX_EXTENTS, RAM_IMAGE_VERSION};

/// Saved guest memory, or its description, is invalid.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ImageError {
    /// Another version of the description.
    #[error(
        "saved memory has version {found}, this program reads version {RAM_IMAGE_VERSION}; use the \
         program that saved it"
    )]
    UnknownVersion {
        /// The version found.
        found: u32,
    },

    /// No regions, or more than any machine has.
    #[error("saved memory has {found} regions; its description is damaged")]
    RegionCount {
        /// Number of regions.
        found: usize,
    },

    /// An invalid region.
    #[error(
        "saved memory has a region at {start:#x} of {size_bytes} bytes that is empty, not aligned \
         to pages, or not behind its predecessor; its description is damaged"
    )]
    BadRegion {
        /// Guest-physical address.
        start: u64,
        /// Size in bytes.
        size_bytes: u64,
    },

    /// The memory of another machine.
    #[error(
        "saved memory has the regions {image}, and {asked} are requested; restore it with the \
         sizes with which it was saved"
    )]
    OtherRegions {
        /// Regions of the image.
        image: String,
        /// Requested regions.
        asked: String,
    },

    /// An invalid extent.
    #[error(
        "saved memory has an extent of {size_bytes} bytes at RAM offset {offset_bytes:#x} that \
         {problem}; its description is damaged"
    )]
    BadExtent {
        /// RAM offset.
        offset_bytes: u64,
        /// Size in bytes.
        size_bytes: u64,
        /// The problem.
        problem: &'static str,
    },

    /// More extents than are ever written.
    #[error(
        "saved memory has {found} extents, more than the {MAX_EXTENTS} that are ever written; its \
         description is damaged"
    )]
    TooManyExtents {
        /// Number of extents.
        found: usize,
    },

    /// The amount of data does not fit the extents.
    #[error(
        "saved memory claims {data_bytes} bytes of data in extents of {extent_bytes} bytes; its \
         description is damaged"
    )]
    DataBytes {
        /// Bytes claimed.
        data_bytes: u64,
        /// Sum of the extents, in bytes.
        extent_bytes: u64,
    },

    /// Wrong number of checksums, or not of chunks of [`CHUNK_BYTES`](super::CHUNK_BYTES).
    #[error("saved memory has {found} checksums and needs {expected}; its description is damaged")]
    ChecksumCount {
        /// Number of checksums.
        found: usize,
        /// Number of chunks.
        expected: u64,
    },

    /// The offset in the file is invalid.
    #[error(
        "saved memory cannot be at offset {file_offset_bytes:#x} of a file: that is not a multiple \
         of 4096 or is too large"
    )]
    BadFileOffset {
        /// Offset in the file, in bytes.
        file_offset_bytes: u64,
    },

    /// The file ends before the memory does.
    #[error(
        "the file with the saved memory has {file_bytes} bytes and needs {needed_bytes}: it was \
         cut short"
    )]
    FileTooShort {
        /// Size found, in bytes.
        file_bytes: u64,
        /// Size needed, in bytes.
        needed_bytes: u64,
    },

    /// The content differs from the saved one.
    #[error(
        "saved memory is damaged between RAM offsets {offset_bytes:#x} and {end_bytes:#x}: the \
         checksum differs; restore another copy"
    )]
    WrongChecksum {
        /// RAM offset of the chunk.
        offset_bytes: u64,
        /// RAM offset of its end.
        end_bytes: u64,
    },

    /// The file contains more or less data than was saved.
    #[error(
        "saved memory has {found_bytes} bytes of data and {data_bytes} were saved; its description \
         is damaged"
    )]
    WrongDataBytes {
        /// Bytes found.
        found_bytes: u64,
        /// Bytes that the description claims.
        data_bytes: u64,
    },
}

/// Regions for a message; a few suffice to see the difference.
pub(super) fn list(regions: &[ImageRegion]) -> String {
    const SHOWN: usize = 8;
    let mut text: Vec<_> = regions
        .iter()
        .take(SHOWN)
        .map(|region| format!("{:#x}+{:#x}", region.start, region.size_bytes))
        .collect();
    if regions.len() > SHOWN {
        text.push(format!("{} more", regions.len() - SHOWN));
    }
    text.join(", ")
}
