//! The set of pages left to send.

use ebb_abi::{PageRange, Pfn};
use ebb_guest_ram::PageBitmap;

/// The send set: workers take pages from its front, hints remove pages anywhere.
///
/// It does not know which pages were written; the dirty source does.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct SendSet {
    pages: PageBitmap,
    /// No page before this one is left in this round.
    cursor: Pfn,
    /// Number of the window in which hints are honoured.
    window: Option<u64>,
    last_window: u64,
    hints: Hints,
}

/// State of the hints of a window.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Hints {
    taken_out: u64,
    ended: bool,
}

impl SendSet {
    /// All pages.
    pub(crate) fn full(regions: &[PageRange]) -> Self {
        Self {
            pages: PageBitmap::full(regions),
            cursor: Pfn(0),
            window: None,
            last_window: 0,
            hints: Hints::default(),
        }
    }

    /// The pages.
    pub(crate) fn pages(&self) -> &PageBitmap {
        &self.pages
    }

    /// Adds the pages written. No window may be open, which [`Tracker`](crate::Tracker) guarantees.
    pub(crate) fn add(&mut self, written: &PageBitmap) {
        debug_assert_eq!(self.window, None, "a sync inside a window");
        self.pages.union(written);
        self.cursor = Pfn(0);
    }

    /// Removes the next pages, within one block of `chunk_pages`, and appends them to `taken`.
    pub(crate) fn take(&mut self, chunk_pages: u64, taken: &mut Vec<PageRange>) {
        let chunk_pages = chunk_pages.max(1);
        let rest = PageRange::new(self.cursor, u64::MAX - self.cursor.0);
        let Some(first) = self.pages.next_range(rest) else { return };
        let end = (first.start.0 / chunk_pages + 1) * chunk_pages;
        let chunk = PageRange::new(first.start, end - first.start.0);
        taken.extend(self.pages.ranges_in(chunk));
        self.pages.remove(chunk);
        self.cursor = chunk.end();
    }

    /// Opens a window: hints with the returned number are honoured until [`close`](Self::close).
    pub(crate) fn open(&mut self) -> u64 {
        self.last_window += 1;
        self.window = Some(self.last_window);
        self.hints = Hints::default();
        self.last_window
    }

    /// Closes the window. Returns the number of pages that hints removed.
    pub(crate) fn close(&mut self) -> u64 {
        self.window = None;
        self.hints.taken_out
    }

    /// Removes pages that the guest hinted in answer to the request of this window.
    pub(crate) fn hint(&mut self, window: u64, ranges: &[PageRange]) {
        if self.window == Some(window) {
            self.take_out(ranges);
        }
    }

    /// Records that the guest has sent all hints for the request of this window.
    pub(crate) fn end_hints(&mut self, window: u64) {
        if self.window == Some(window) {
            self.hints.ended = true;
        }
    }

    pub(crate) fn hints_ended(&self) -> bool {
        self.hints.ended
    }

    pub(crate) fn taken_out(&self) -> u64 {
        self.hints.taken_out
    }

    /// Removes pages from the set, whatever the window.
    pub(crate) fn take_out(&mut self, ranges: &[PageRange]) {
        for range in ranges {
            self.hints.taken_out += self.pages.count_in(*range);
            self.pages.remove(*range);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn range(start: u64, pages: u64) -> PageRange {
        PageRange::new(Pfn(start), pages)
    }

    fn take(set: &mut SendSet, chunk_pages: u64) -> Vec<PageRange> {
        let mut taken = Vec::new();
        set.take(chunk_pages, &mut taken);
        taken
    }

    #[test]
    fn pages_are_taken_once_and_block_by_block() {
        let mut set = SendSet::full(&[range(3, 7), range(16, 2)]);
        assert_eq!(take(&mut set, 8), [range(3, 5)]);
        assert_eq!(take(&mut set, 8), [range(8, 2)]);
        assert_eq!(take(&mut set, 8), [range(16, 2)]);
        assert_eq!(take(&mut set, 8), []);
        assert!(set.pages().is_empty());
    }

    #[test]
    fn hints_count_for_their_own_window_only() {
        let mut set = SendSet::full(&[range(0, 16)]);
        let first = set.open();
        set.hint(first, &[range(4, 4), range(6, 4)]);
        assert_eq!(take(&mut set, 16), [range(0, 4), range(10, 6)]);
        assert_eq!(set.close(), 6);
        set.hint(first, &[range(0, 16)]);
        set.add(&PageBitmap::full(&[range(0, 16)]));
        let second = set.open();
        assert_ne!(first, second);
        set.hint(first, &[range(0, 16)]);
        set.end_hints(first);
        assert_eq!((set.pages().count(), set.hints_ended()), (16, false));
        set.end_hints(second);
        assert!(set.hints_ended());
        assert_eq!(set.close(), 0);
    }
}
