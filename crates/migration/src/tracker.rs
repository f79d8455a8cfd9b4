//! What is still to be sent, and how hints may change it.
//!
//! The guest says "I do not use page P", then uses and writes it, the dirty log finds that, and
//! only then the hint arrives here: if it took P out of the send set now, the write would be lost.
//! So the time in which hints count, the window, lies between two looks at the dirty log, and each
//! write after its beginning is found by the look after its end:
//!
//! 1. All marks that the last look found are taken in the dirty source before the window opens.
//! 2. While it is open no mark is taken: not even a neighbour's, since a source may take 64 at a
//!    time.
//! 3. It is closed, with no hint half done, before the next look.
//!
//! That is what the types say. A [`HintWindow`] borrows the [`Tracker`], so there can be neither a
//! look nor a taken mark while it lives; a [`HintReceiver`] works under the lock that closes the
//! window. Without hints, a [`ClearingRound`] takes marks of pages just before they are read, which
//! is later and so finds fewer pages written twice.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use ebb_abi::PageRange;
use ebb_guest_ram::PageBitmap;

use crate::chunk::{by_region, span};
use crate::send_set::SendSet;
use crate::{DirtySource, MigrationError};

/// Hands pages to be sent to several threads, each page to one of them.
pub trait PageFeed: Sync {
    /// Appends the next pages, within one block of `chunk_pages`; nothing if none are left in this
    /// round. They must be read only after this returns, and must be sent, since they are forgotten
    /// here.
    ///
    /// # Errors
    /// [`MigrationError::Dirty`].
    fn take(&self, chunk_pages: u64, taken: &mut Vec<PageRange>) -> Result<(), MigrationError>;

    /// Pages that are left in this round.
    fn remaining_pages(&self) -> u64;

    /// Pages that hints have taken out in this round.
    fn skipped_pages(&self) -> u64 {
        0
    }

    /// The pages that are left in this round, for the model check.
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

/// Knows what is to be sent and owns the dirty source while it is armed.
pub struct Tracker<'d> {
    dirty: &'d mut dyn DirtySource,
    regions: Vec<PageRange>,
    shared: Arc<Shared>,
    found: PageBitmap,
    marks: Marks,
}

/// Whether the dirty source may still hold marks that a look at it has found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Marks {
    Taken,
    OfPagesToSend,
}

impl<'d> Tracker<'d> {
    /// Arms the dirty source. From here on all pages of `regions` are to be sent, and each page
    /// that is written is to be sent again.
    ///
    /// # Errors
    /// [`MigrationError::Dirty`]; the source has been disarmed then.
    pub fn arm(
        dirty: &'d mut dyn DirtySource,
        regions: &[PageRange],
    ) -> Result<Self, MigrationError> {
        if let Err(source) = dirty.arm() {
            disarm(dirty);
            return Err(MigrationError::Dirty {
                action: "switch the log of written pages on",
                source,
            });
        }
        let shared = Arc::new(Shared {
            set: Mutex::new(SendSet::full(regions)),
            hints_ended: Condvar::new(),
        });
        let found = PageBitmap::new(regions);
        Ok(Self { dirty, regions: regions.to_vec(), shared, found, marks: Marks::Taken })
    }

    /// Looks at what was written since the last time, and adds it to what is to be sent. Returns
    /// how many pages were written.
    ///
    /// # Errors
    /// [`MigrationError::Dirty`].
    pub fn sync(&mut self) -> Result<u64, MigrationError> {
        self.found.clear();
        self.dirty.sync(&mut self.found).map_err(|source| MigrationError::Dirty {
            action: "read the log of written pages",
            source,
        })?;
        self.marks = Marks::OfPagesToSend;
        self.shared.set().add(&self.found);
        Ok(self.found.count())
    }

    /// Pages to be sent.
    pub fn remaining_pages(&self) -> u64 {
        self.shared.set().pages().count()
    }

    /// The pages to be sent, for the model check.
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
            // A copy: a hint that comes too late must not wait for this with its device locked.
            let pages = self.shared.set().pages().clone();
            self.dirty.clear_all(&pages).map_err(clear_error)?;
            self.marks = Marks::Taken;
        }
        let window = self.shared.set().open();
        Ok(HintWindow { shared: &self.shared, window })
    }

    /// Begins the round in which nobody writes any more.
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
        tracing::warn!("the log of written pages stays on and costs the guest time: {error}");
    }
}

fn clear_error(source: crate::BoxError) -> MigrationError {
    MigrationError::Dirty { action: "write-protect pages again", source }
}

/// Takes the marks of pages in one chunk, which are in ascending order: with one call for each
/// region.
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

/// A round without hints: takes the marks of pages before they are read.
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

/// The first pages of a round, about as many as `left`.
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

/// A round in which the guest stands still: marks do not matter any more.
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

/// A round in which hints count, until it is dropped. Marks stay in the dirty source meanwhile.
///
/// The tracker cannot be used as long as the window lives:
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
    /// For whoever passes on what the guest says.
    pub fn receiver(&self) -> HintReceiver {
        HintReceiver { shared: Arc::clone(self.shared), window: self.window }
    }

    /// Waits until hints have ended, but no longer than this. Returns whether they have.
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

    /// Ends the window. Returns how many pages hints have taken out.
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

/// Where hints go, from any thread. What comes after the end of the window has no effect.
#[derive(Clone, Debug)]
pub struct HintReceiver {
    shared: Arc<Shared>,
    window: u64,
}

impl HintReceiver {
    /// The content of these pages did not matter at some time since the window was opened. Pages
    /// outside of guest memory are ignored.
    pub fn hint(&self, ranges: &[PageRange]) {
        self.shared.set().hint(self.window, ranges);
    }

    /// The guest has named all that it had to name.
    pub fn ended(&self) {
        self.shared.set().end_hints(self.window);
        self.shared.hints_ended.notify_all();
    }

    /// As [`hint`](Self::hint), but whether the window is open or not. That is wrong: the model
    /// check shows that it sees that.
    #[cfg(feature = "testing")]
    pub fn hint_whenever(&self, ranges: &[PageRange]) {
        self.shared.set().take_out(ranges);
    }
}
