//! Stable pages: memory files whose pages are mapped, privately, in place of guest pages with the
//! same content.
//!
//! A file is called a *segment* and one of its pages a *slot*. [`StableMemory`] creates the files
//! and allocates slots; [`StableSegments`] is for a process that maps them: their descriptors, and
//! mappings to compare with. Both are in one process, or in two if several machines share their
//! stable pages through a third process.
//!
//! All pages of a segment are on one NUMA node, if requested, and it can never be made shorter: no
//! access to a mapping of it can fault beyond the file's end.

mod free_slots;
mod memory;
mod segments;

use std::io;

pub use memory::{Freed, StableBound, StableMemory};
pub(crate) use segments::Segment;
pub use segments::StableSegments;

/// Location of a stable page.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct StableSlot {
    /// Number of the segment.
    pub segment: u32,
    /// Number of the page within it.
    pub index: u32,
}

impl StableSlot {
    /// The slot `pages` behind this one, in the same segment.
    #[must_use]
    pub const fn offset(self, pages: u32) -> Self {
        Self { segment: self.segment, index: self.index + pages }
    }

    /// Whether `other` is the next page, so that both can be mapped at once.
    pub fn is_followed_by(self, other: Self) -> bool {
        self.segment == other.segment && self.index.checked_add(1) == Some(other.index)
    }
}

/// Errors of stable pages.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StableError {
    /// The bound is reached, and no slot is free.
    #[error("all memory for stable pages is in use")]
    Full,

    /// A memory file could not be created.
    #[error("cannot {action} a memory file for stable pages: {source}")]
    Create {
        /// The failed step.
        action: &'static str,
        /// The system error.
        source: io::Error,
    },

    /// A file could not be mapped for comparisons.
    #[error("cannot map segment {segment} of stable pages: {source}")]
    Map {
        /// Number of the segment.
        segment: u32,
        /// The system error.
        source: io::Error,
    },

    /// A file is not a valid segment.
    #[error("segment {segment} of stable pages cannot be used: {problem}")]
    Unfit {
        /// Number of the segment.
        segment: u32,
        /// The actual and the required property.
        problem: String,
    },

    /// There is no such stable page.
    #[error(
        "there is no stable page in segment {segment} at {index}",
        segment = slot.segment,
        index = slot.index
    )]
    NoSlot {
        /// The requested slot.
        slot: StableSlot,
    },

    /// Content could not be written.
    #[error(
        "cannot write a stable page in segment {segment}: {source}; is there enough memory on its \
         node?",
        segment = slot.segment
    )]
    Write {
        /// The first slot.
        slot: StableSlot,
        /// The system error.
        source: io::Error,
    },
}

impl From<StableError> for io::Error {
    /// Keeps the kind of the system error, if there is one.
    fn from(error: StableError) -> Self {
        let kind = match &error {
            StableError::Create { source, .. }
            | StableError::Map { source, .. }
            | StableError::Write { source, .. } => source.kind(),
            StableError::Full => io::ErrorKind::StorageFull,
            StableError::Unfit { .. } | StableError::NoSlot { .. } => io::ErrorKind::InvalidInput,
        };
        Self::new(kind, error)
    }
}

#[cfg(test)]
mod tests;
