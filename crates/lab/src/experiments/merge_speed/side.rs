//! Common interface of the sides that merge.

use ebb_guest_ram::GuestRam;

use super::memory::Arena;
use crate::LabError;

/// Condition for the end of merging.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Until {
    /// This number of pages was scanned.
    Covered(u64),
    /// This number of further passes over all memory has ended.
    Passes(u64),
    /// This number of pages was freed by merging, or six passes were in vain.
    Freed(u64),
}

/// Number of passes after which no more merging is expected: the first one sees pages for the first
/// time, the second finds that they have not changed, the third merges those that the second did
/// not.
pub(super) const PASSES_IN_VAIN: u64 = 6;

/// Amount and cost of work.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Work {
    /// Processor time of the thread that merges, ns.
    pub(super) cpu_ns: u64,
    /// Elapsed time, ns.
    pub(super) wall_ns: u64,
    /// Number of scanned pages, including those that were skipped.
    pub(super) pages: u64,
}

impl Work {
    /// `count` per second of processor time.
    pub(super) fn per_cpu_s(&self, count: u64) -> Option<f64> {
        (self.cpu_ns > 0).then(|| count as f64 * 1e9 / self.cpu_ns as f64)
    }
}

/// A side that merges the pages of an [`Arena`].
pub(super) trait Side {
    /// Prepares memory before it is written.
    ///
    /// # Errors
    /// The reason why it cannot be merged.
    fn prepare(&self, ram: &GuestRam) -> Result<(), LabError>;

    /// Starts or continues merging.
    ///
    /// # Errors
    /// The cause; [`LabError::Merging`] also at the time limit.
    fn merge(&mut self, arena: &Arena, until: Until) -> Result<Work, LabError>;

    /// The condition under which it has read each page of an arena once.
    fn first_pass(&self, arena: &Arena) -> Until;

    /// Bytes of its metadata of any kind.
    ///
    /// # Errors
    /// When the size is unknown.
    fn metadata_bytes(&mut self, arena: &Arena) -> Result<u64, LabError>;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_by_processor_time() {
        let work = Work { cpu_ns: 500_000_000, wall_ns: 9, pages: 7 };
        assert_eq!(work.per_cpu_s(100), Some(200.0));
        assert_eq!(Work::default().per_cpu_s(1), None);
    }
}
