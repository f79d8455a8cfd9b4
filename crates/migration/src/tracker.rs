//! The pages left to send, and the rule by which hints may change them.
//!
//! The guest hints page P as free, then uses and writes it; a sync of the dirty log finds the
//! write, and only then does the hint arrive here. If the hint removed P from the send set now, the
//! write would be lost. So the period in which hints are honoured, the window, lies between two
//! syncs of the dirty log, and each write after its start is found by the sync after its end:
//!
//! 1. All marks that the last sync found are cleared in the dirty source before the window opens.
//! 2. While it is open no mark is cleared: not even a neighbour's, since a source may clear 64 at a
//!    time.
//! 3. It is closed, with no hint in progress, before the next sync.
//!
//! The types enforce this. A [`HintWindow`] borrows the [`Tracker`], so that no sync and no
//! clearing is possible while it lives; a [`HintReceiver`] works under the lock that closes the
//! window. Without hints, a [`ClearingRound`] clears the marks of pages just before they are read,
//! which is later and so finds fewer pages written twice.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use ebb_abi::PageRange;
use ebb_guest_ram::PageBitmap;

use crate::chunk::{by_region, span};
use crate::send_set::SendSet;
use crate::{DirtySource, MigrationError};

/// Distributes the pages to send among several threads, each page to one of them.
pub trait PageFeed: Sync {
    /// Appends the next pages, within one block of `chunk_pages`; nothing if none are left in this
    /// round. The caller must read them only after this returns, and must send them, since they are
    /// removed here.
    ///
    /// # Errors
    /// [`MigrationError::Dirty`].
    fn take(&self, chunk_pages: u64, taken: &mut Vec<PageRange>) -> Result<(), MigrationError>;

    /// Number of pages left in this round.
    fn remaining_pages(&self) -> u64;

    /// Number of pages that hints removed in this round.
    fn skipped_pages(&self) -> u64 {
        0
    }

    /// Pages left in this round, for the model check.
    #[cfg(feature = "testing")]
    fn pages_to_send(&self) -> PageBitmap;
}

/// The send set with the lock under which workers and hints change it.
#[derive(Debug)]
struct Shared {
    set: Mutex<SendSet>,
    hints_ended: Condvar,
}

impl Shared {
    fn set(&self) -> MutexGuard<'_, SendSet> {
        self.set.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Knows the pages left to send and owns the dirty source while it is armed.
pub struct Tracker<'d> {
    dirty: &'d mut dyn DirtySource,
    regions: Vec<PageRange>,
    shared: Arc<Shared>,
    found: PageBitmap,
    marks: Marks,
}

/// Whether the dirty source may still hold marks that a sync has found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Marks {
    Taken,
    OfPagesToSend,
}

impl<'d> Tracker<'d> {
    /// Arms the dirty source. All pages of `regions` must be sent, and each page written from here
    /// on must be sent again.
    ///
    /// # Errors
    /// [`MigrationError::Dirty`]; the source is disarmed again.
    pub fn arm(
        dirty: &'d mut dyn DirtySource,
        regions: &[PageRange],
    ) -> Result<Self, MigrationError> {
        if let Err(source) = dirty.arm() {
            disarm(dirty);
            return Err(MigrationError::Dirty { action: "enable the dirty log", source });
        }
        let shared = Arc::new(Shared {
            set: Mutex::new(SendSet::full(regions)),
            hints_ended: Condvar::new(),
        });
        let found = PageBitmap::new(regions);
        Ok(Self { dirty, regions: regions.to_vec(), shared, found, marks: Marks::Taken })
    }

    /// Adds the pages written since the last sync to the pages to send. Returns their number.
    ///
    /// # Errors
    /// [`MigrationError::Dirty`].
    pub fn sync(&mut self) -> Result<u64, MigrationError> {
        self.found.clear();
        self.dirty
            .sync(&mut self.found)
            .map_err(|source| MigrationError::Dirty { action: "read the dirty log", source })?;
        self.marks = Marks::OfPagesToSend;
        self.shared.set().add(&self.found);
        Ok(self.found.count())
    }

    /// Number of pages left to send.
    pub fn remaining_pages(&self) -> u64 {
        self.shared.set().pages().count()
    }

    /// Pages left to send, for the model check.
    #[cfg(feature = "testing")]
    pub fn pages_to_send(&self) -> PageBitmap {
        self.shared.set().pages().clone()
    }

    /// Begins a round without hints.
    pub fn round(&mut self) -> ClearingRound<'_> {
        let Self { regions, shared, dirty, .. } = self;
        ClearingRound { regions, shared, dirty: Mutex::new(&mut **dirty) }
    }

    /// Begins a round with hints.
    ///
    /// # Errors
    /// [`MigrationError::Dirty`].
    pub fn hint_window(&mut self) -> Result<HintWindow<'_>, MigrationError> {
        if self.marks == Marks::OfPagesToSend {
            // A copy, so that a late hint does not wait for this with its device locked.
            let pages = self.shared.set().pages().clone();
            self.dirty.clear_all(&pages).map_err(clear_error)?;
            self.marks = Marks::Taken;
        }
        let window = self.shared.set().open();
        Ok(HintWindow { shared: &self.shared, window })
    }

    /// Begins the last round, in which nothing writes to memory.
    pub fn last_round(&mut self) -> LastRound<'_> {
        LastRound { shared: &self.shared }
    }
}

impl Drop for Tracker<'_> {
    /// Disarms the source.
    fn drop(&mut self) {
        disarm(self.dirty);
    }
}

fn disarm(dirty: &mut dyn DirtySource) {
    if let Err(error) = dirty.disarm() {
        tracing::warn!("the dirty log stays enabled and costs the guest time: {error}");
    }
}

fn clear_error(source: crate::BoxError) -> MigrationError {
    MigrationError::Dirty { action: "write-protect pages again", source }
}

/// Clears the marks of pages in one chunk, which are in ascending order, with one call per region.
fn clear(
    dirty: &mut dyn DirtySource,
    regions: &[PageRange],
    pages: &[PageRange],
) -> Result<(), crate::BoxError> {
    by_region(regions, pages).try_for_each(|here| match here {
        [only] => dirty.clear(*only),
        several => {
            let mut set = PageBitmap::new(&[span(several)]);
            for range in several {
                set.insert(*range);
            }
            dirty.clear_all(&set)
        }
    })
}

/// A round without hints: clears the marks of pages before they are read.
pub struct ClearingRound<'t> {
    regions: &'t [PageRange],
    shared: &'t Shared,
    dirty: Mutex<&'t mut dyn DirtySource>,
}

impl PageFeed for ClearingRound<'_> {
    fn take(&self, chunk_pages: u64, taken: &mut Vec<PageRange>) -> Result<(), MigrationError> {
        let first = taken.len();
        self.shared.set().take(chunk_pages, taken);
        if taken.len() == first {
            return Ok(());
        }
        let mut dirty = self.dirty.lock().unwrap_or_else(PoisonError::into_inner);
        clear(&mut **dirty, self.regions, &taken[first..]).map_err(clear_error)
    }

    fn remaining_pages(&self) -> u64 {
        self.shared.set().pages().count()
    }

    #[cfg(feature = "testing")]
    fn pages_to_send(&self) -> PageBitmap {
        self.shared.set().pages().clone()
    }
}

/// The first pages of a round, about `left` of them.
pub(crate) struct FirstPages<F> {
    pub(crate) feed: F,
    pub(crate) left: AtomicU64,
}

impl<F: PageFeed> PageFeed for FirstPages<F> {
    fn take(&self, chunk_pages: u64, taken: &mut Vec<PageRange>) -> Result<(), MigrationError> {
        let less = |left: u64| (left > 0).then(|| left.saturating_sub(chunk_pages));
        if self.left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less).is_err() {
            return Ok(());
        }
        self.feed.take(chunk_pages, taken)
    }

    fn remaining_pages(&self) -> u64 {
        self.feed.remaining_pages()
    }

    #[cfg(feature = "testing")]
    fn pages_to_send(&self) -> PageBitmap {
        self.feed.pages_to_send()
    }
}

/// The round in which the guest is paused: marks no longer matter.
pub struct LastRound<'t> {
    shared: &'t Shared,
}

impl PageFeed for LastRound<'_> {
    fn take(&self, chunk_pages: u64, taken: &mut Vec<PageRange>) -> Result<(), MigrationError> {
        self.shared.set().take(chunk_pages, taken);
        Ok(())
    }

    fn remaining_pages(&self) -> u64 {
        self.shared.set().pages().count()
    }

    #[cfg(feature = "testing")]
    fn pages_to_send(&self) -> PageBitmap {
        self.shared.set().pages().clone()
    }
}

/// A round in which hints are honoured, until it is dropped. Marks stay in the dirty source
/// meanwhile.
///
/// The tracker cannot be used while the window lives:
///
/// ```compile_fail,E0499
/// # use ebb_migration::{MigrationError, Tracker};
/// fn late_hints(tracker: &mut Tracker<'_>) -> Result<(), MigrationError> {
///     let window = tracker.hint_window()?;
///     tracker.sync()?;
///     window.close();
///     Ok(())
/// }
/// ```
pub struct HintWindow<'t> {
    shared: &'t Arc<Shared>,
    window: u64,
}

impl HintWindow<'_> {
    /// Returns a handle that passes on the guest's hints.
    pub fn receiver(&self) -> HintReceiver {
        HintReceiver { shared: Arc::clone(self.shared), window: self.window }
    }

    /// Waits until the guest has sent all hints, at most for `limit`. Returns whether it has.
    pub fn wait_for_end(&self, limit: Duration) -> bool {
        let deadline = Instant::now() + limit;
        let mut set = self.shared.set();
        while !set.hints_ended() {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            let result = self.shared.hints_ended.wait_timeout(set, left);
            set = result.unwrap_or_else(PoisonError::into_inner).0;
        }
        true
    }

    /// Closes the window. Returns the number of pages that hints removed.
    pub fn close(self) -> u64 {
        self.shared.set().close()
    }
}

impl PageFeed for HintWindow<'_> {
    fn take(&self, chunk_pages: u64, taken: &mut Vec<PageRange>) -> Result<(), MigrationError> {
        self.shared.set().take(chunk_pages, taken);
        Ok(())
    }

    fn remaining_pages(&self) -> u64 {
        self.shared.set().pages().count()
    }

    #[cfg(feature = "testing")]
    fn pages_to_send(&self) -> PageBitmap {
        self.shared.set().pages().clone()
    }

    fn skipped_pages(&self) -> u64 {
        self.shared.set().taken_out()
    }
}

impl Drop for HintWindow<'_> {
    fn drop(&mut self) {
        self.shared.set().close();
    }
}

/// Receives hints from any thread. Hints after the end of the window have no effect.
#[derive(Clone, Debug)]
pub struct HintReceiver {
    shared: Arc<Shared>,
    window: u64,
}

impl HintReceiver {
    /// Removes pages whose content did not matter at some time since the window was opened. Pages
    /// outside of guest memory are ignored.
    pub fn hint(&self, ranges: &[PageRange]) {
        self.shared.set().hint(self.window, ranges);
    }

    /// The guest has sent all of its hints.
    pub fn ended(&self) {
        self.shared.set().end_hints(self.window);
        self.shared.hints_ended.notify_all();
    }

    /// Like [`hint`](Self::hint), but without checking the window. That is wrong on purpose: the
    /// model check proves that it detects this.
    #[cfg(feature = "testing")]
    pub fn hint_whenever(&self, ranges: &[PageRange]) {
        self.shared.set().take_out(ranges);
    }
}
