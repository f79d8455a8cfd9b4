//! Who merges: what both sides have in common.

use ebb_guest_ram::GuestRam;

use super::memory::Arena;
use crate::LabError;

/// How far merging goes on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Until {
    /// So many pages have been looked at.
    Covered(u64),
    /// So many more passes over all memory have come to their end.
    Passes(u64),
    /// So many pages are gone since another is like them, or six passes were in vain.
    Freed(u64),
}

/// Passes after which nothing more is to be expected: the first one sees pages for the first time,
/// the next one finds that they have not changed, the third one merges what the second one did not.
pub(super) const PASSES_IN_VAIN: u64 = 6;

/// What was done, and what it took.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Work {
    /// Processor time of the thread that merges, ns.
    pub(super) cpu_ns: u64,
    /// Time by the clock, ns.
    pub(super) wall_ns: u64,
    /// Pages that were looked at, those included that were known to be not worth it.
    pub(super) pages: u64,
}

impl Work {
    /// So many in a second of processor time.
    pub(super) fn per_cpu_s(&self, count: u64) -> Option<f64> {
        (self.cpu_ns > 0).then(|| count as f64 * 1e9 / self.cpu_ns as f64)
    }
}

/// Somebody who merges the pages of an [`Arena`].
pub(super) trait Side {
    /// Readies memory before it is written.
    ///
    /// # Errors
    /// Why it cannot be merged.
    fn prepare(&self, ram: &GuestRam) -> Result<(), LabError>;

    /// Begins or goes on with merging.
    ///
    /// # Errors
    /// What went wrong; [`LabError::Merging`] also if it takes far too long.
    fn merge(&mut self, arena: &Arena, until: Until) -> Result<Work, LabError>;

    /// Until it has read each page of an arena once.
    fn first_pass(&self, arena: &Arena) -> Until;

    /// Bytes that it keeps for its own use, of whatever kind.
    ///
    /// # Errors
    /// When that cannot be told.
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
