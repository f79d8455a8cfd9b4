//! Stable pages: memory files whose pages are mapped, privately, in the place of guest pages with
//! the same content.
//!
//! A file is called a *segment* and one of its pages a *slot*. [`StableMemory`] makes the files and
//! says which slots are in use; [`StableSegments`] is what a process that maps them needs: their
//! descriptors, and mappings to compare with. Both are in one process, or in two if several
//! machines share their stable pages through a third process.
//!
//! A segment has all its pages on one NUMA node, if asked for, and can never be made shorter: no
//! access to a mapping of it can fault for lack of file.

mod free_slots;
mod memory;
mod segments;

use std::io;

pub use memory::{Freed, StableMemory};
pub(crate) use segments::Segment;
pub use segments::StableSegments;

/// The place of a stable page.
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

    /// Whether `other` is the page behind this one, so that both can be mapped in one go.
    pub fn is_followed_by(self, other: Self) -> bool {
        self.segment == other.segment && self.index.checked_add(1) == Some(other.index)
    }
}

/// What can go wrong with stable pages.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StableError {
    /// A memory file could not be made.
    #[error("cannot {action} a memory file for stable pages: {source}")]
    Create {
        /// The step that failed.
        action: &'static str,
        /// The system error.
        source: io::Error,
    },

    /// A memory file could not be bound to a node.
    #[error(
        "cannot bind stable pages to host node {node}: {source}; `ls /sys/devices/system/node` lists the nodes"
    )]
    BindNode {
        /// The node asked for.
        node: u32,
        /// The system error.
        source: io::Error,
    },

    /// A file could not be mapped to compare with.
    #[error("cannot map segment {segment} of stable pages: {source}")]
    Map {
        /// Number of the segment.
        segment: u32,
        /// The system error.
        source: io::Error,
    },

    /// A file is not what a segment must be.
    #[error("segment {segment} of stable pages cannot be used: {problem}")]
    Unfit {
        /// Number of the segment.
        segment: u32,
        /// What was found, and what must be.
        problem: String,
    },

    /// There is no such stable page.
    #[error("there is no stable page in segment {segment} at {index}", segment = slot.segment, index = slot.index)]
    NoSlot {
        /// The slot asked for.
        slot: StableSlot,
    },

    /// Content could not be written.
    #[error("cannot write a stable page in segment {segment}: {source}; is there enough memory on its node?", segment = slot.segment)]
    Write {
        /// The first slot.
        slot: StableSlot,
        /// The system error.
        source: io::Error,
    },
}

impl From<StableError> for io::Error {
    /// Keeps the kind of the system's answer, if there is one.
    fn from(error: StableError) -> Self {
        let kind = match &error {
            StableError::Create { source, .. }
            | StableError::BindNode { source, .. }
            | StableError::Map { source, .. }
            | StableError::Write { source, .. } => source.kind(),
            StableError::Unfit { .. } | StableError::NoSlot { .. } => io::ErrorKind::InvalidInput,
        };
        Self::new(kind, error)
    }
}

#[cfg(test)]
mod tests;
