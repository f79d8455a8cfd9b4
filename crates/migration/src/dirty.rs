//! Dirty logging: the set of pages that were written.

use ebb_abi::PageRange;
use ebb_guest_ram::PageBitmap;

use crate::BoxError;

/// Reports the pages that were written by vCPUs (KVM's dirty bitmap or ring), by the monitor and
/// its devices, or by a simulated guest.
///
/// Each page has a mark. A write sets it before the writer can do anything else; marking may cost
/// the guest a fault. Further guarantees that the engine relies on are stated at each method.
pub trait DirtySource: Send {
    /// Starts logging. After this returns, every write sets the mark of its page. Marks of earlier
    /// writes are not needed, since all pages are sent once.
    ///
    /// So all pages must be write-protected by then. With KVM that rules out
    /// `KVM_DIRTY_LOG_INITIALLY_SET`, which write-protects a page only when it is cleared for the
    /// first time and does not log earlier writes.
    ///
    /// # Errors
    /// If logging cannot be enabled.
    fn arm(&mut self) -> Result<(), BoxError>;

    /// Adds all marked pages to `found`. Marks may stay until [`clear`](Self::clear), or be cleared
    /// by this call (a log that is consumed as it is read, such as the ring); in the second case
    /// pages can be marked again when this returns.
    ///
    /// A page whose write finished before the call is found.
    ///
    /// # Errors
    /// If the log cannot be read.
    fn sync(&mut self, found: &mut PageBitmap) -> Result<(), BoxError>;

    /// Clears the marks of these pages, so that the next write sets them again. The range lies
    /// within one region.
    ///
    /// Marks of other pages must stay: a source with a coarser granularity (`KVM_CLEAR_DIRTY_LOG`
    /// covers 64 pages, with a bit for each) leaves the bits of the others out.
    ///
    /// # Errors
    /// If the log cannot be changed.
    fn clear(&mut self, range: PageRange) -> Result<(), BoxError>;

    /// Like [`clear`](Self::clear), for a set, which may cover only a small part of memory. A
    /// source that can clear many pages with one call does so here.
    ///
    /// # Errors
    /// If the log cannot be changed.
    fn clear_all(&mut self, pages: &PageBitmap) -> Result<(), BoxError> {
        pages.ranges().try_for_each(|range| self.clear(range))
    }

    /// Stops logging. Called on every exit path except the end of the process; does nothing if the
    /// source is not armed.
    ///
    /// # Errors
    /// If logging cannot be disabled, which only costs the guest time.
    fn disarm(&mut self) -> Result<(), BoxError>;
}
