//! Finding the pages that were written.

use ebb_abi::PageRange;
use ebb_guest_ram::PageBitmap;

use crate::BoxError;

/// Tells which pages were written: by vCPUs (KVM's dirty bitmap or ring), by the monitor and its
/// devices, or by a simulated guest.
///
/// Each page has a mark. A write sets it, at the latest when the writer can do something else;
/// marking may cost the guest a fault. What else the engine relies on is said at each call.
pub trait DirtySource: Send {
    /// Begins. When this returns, every later write sets the mark of its page, and no mark of an
    /// earlier write is needed: all pages are sent once.
    ///
    /// So pages must be write-protected by then, all of them. With KVM that means not to ask for
    /// `KVM_DIRTY_LOG_INITIALLY_SET`, with which a page is protected when it is cleared for the
    /// first time, and writes before that are not told.
    ///
    /// # Errors
    /// If the log cannot be had.
    fn arm(&mut self) -> Result<(), BoxError>;

    /// Adds all marked pages to `found`. Marks may stay until [`clear`](Self::clear) takes them, or
    /// go at once (a log that is taken as it is read, such as the ring); in the second case pages
    /// are ready to be marked again when this returns.
    ///
    /// A page whose write has finished before the call is found.
    ///
    /// # Errors
    /// If the log cannot be read.
    fn sync(&mut self, found: &mut PageBitmap) -> Result<(), BoxError>;

    /// Takes the marks of these pages, so that the next write sets them again. The range lies
    /// within one region.
    ///
    /// Marks of other pages stay: a source that can only clear more at a time (KVM's
    /// `KVM_CLEAR_DIRTY_LOG` names 64 pages, with a bit for each) leaves the bits of the others
    /// out.
    ///
    /// # Errors
    /// If the log cannot be changed.
    fn clear(&mut self, range: PageRange) -> Result<(), BoxError>;

    /// As [`clear`](Self::clear), for a whole set, which may be one of a small part of memory only.
    /// A source that can clear many pages with one call does that here.
    ///
    /// # Errors
    /// If the log cannot be changed.
    fn clear_all(&mut self, pages: &PageBitmap) -> Result<(), BoxError> {
        pages.ranges().try_for_each(|range| self.clear(range))
    }

    /// Ends. Called on every way out except that the process ends; does nothing if the source is
    /// not armed.
    ///
    /// # Errors
    /// If the log cannot be given up, which costs the guest time and nothing else.
    fn disarm(&mut self) -> Result<(), BoxError>;
}
