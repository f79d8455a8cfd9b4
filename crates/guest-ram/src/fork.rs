//! Guest memory in a process that is about to be forked (fork(2)), and in the new one.
//!
//! The new process has the same memory at the same addresses, copied when one side writes to it,
//! and the same [`GuestRam`]. Two things do not come with it: the locks that other threads held,
//! which [`GuestRam::hold_still`] takes first, and files that concern the old process: those of
//! /proc, which [`GuestRam::process_files`] lists, and [`GuestRam::protection_descriptor`].

use std::fs::File;
use std::os::fd::{AsRawFd as _, RawFd};
use std::sync::{MutexGuard, PoisonError, RwLockWriteGuard};

use crate::inhibit::Counts;
use crate::overlay::FileExtents;
use crate::uffd::Userfaultfd;
use crate::{Backing, GuestRam};

/// No other thread is in the middle of anything with the memory while this lives. In a forked
/// process it belongs to the only thread, which can drop it.
#[must_use = "others may go on as soon as it is dropped"]
pub struct Still<'a> {
    _protection: Option<MutexGuard<'a, Userfaultfd>>,
    _inhibitors: RwLockWriteGuard<'a, Counts>,
    _overlay: Option<MutexGuard<'a, FileExtents>>,
    _meter: Vec<MutexGuard<'a, File>>,
}

impl GuestRam {
    /// Why a forked process would share this memory instead of having a copy of its own, or could
    /// not use it; `None` if it can be forked.
    pub fn why_not_forkable(&self) -> Option<&'static str> {
        if self.backing() != Backing::Anonymous {
            return Some("its memory belongs to a file, which both would write to");
        }
        #[cfg(feature = "merge")]
        if self.merging.get().is_some() {
            return Some("its pages are merged, which a forked process cannot go on with yet");
        }
        None
    }

    /// Waits until no discard, merge, measurement or save in use is in progress, and lets none
    /// begin.
    pub fn hold_still(&self) -> Still<'_> {
        Still {
            // First: a save ends by letting discards work again.
            _protection: self.lock_protection(),
            _inhibitors: self.inhibitors().hold(),
            _overlay: self.lock_overlay(),
            _meter: self.meter().process_files().into_iter().map(|(_, file)| file).collect(),
        }
    }

    fn lock_protection(&self) -> Option<MutexGuard<'_, Userfaultfd>> {
        let protection = self.protection.get()?;
        Some(protection.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// The userfaultfd that protects the memory of the old process. A forked one puts any other
    /// file in its place, so that the number stays this memory's, until it has one of its own
    /// ([`enable_background_saves_by`](Self::enable_background_saves_by)), if ever.
    pub fn protection_descriptor(&self) -> Option<RawFd> {
        self.lock_protection().map(|userfaultfd| userfaultfd.number())
    }

    /// Open files of /proc/self, with their names there: a forked process replaces them by its own
    /// (dup3(2)).
    pub fn process_files(&self) -> Vec<(&'static str, RawFd)> {
        let pagemap = self.pagemap.as_ref().map(|pagemap| ("pagemap", pagemap.file().as_raw_fd()));
        let meter = self.meter().process_files();
        let meter = meter.iter().map(|(name, file)| (*name, file.as_raw_fd()));
        pagemap.into_iter().chain(meter).collect()
    }

    /// The file that the memory was restored from, which a forked process needs, too.
    pub fn restored_file(&self) -> Option<RawFd> {
        self.snapshot().map(|snapshot| snapshot.file.as_raw_fd())
    }
}
