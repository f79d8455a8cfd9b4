//! Inhibiting discards of guest memory.
//!
//! Some users of guest memory break when pages are discarded: a device that pinned them for DMA
//! would write to pages that the guest no longer sees; a postcopy destination would fetch a
//! discarded page again from its source; a background snapshot would save a page that no longer has
//! its content.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

/// Reason why nothing may be discarded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum InhibitReason {
    /// A device has pinned guest memory for DMA (VFIO), or is about to.
    PinnedMemory,
    /// Pages still arrive from a migration's source.
    IncomingPostcopy,
    /// A snapshot is being written while the guest runs.
    BackgroundSnapshot,
    /// Another process has the memory, or is about to get it.
    Migration,
    /// The operator requested it.
    Operator,
}

impl fmt::Display for InhibitReason {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::PinnedMemory => "memory is pinned for a device",
            Self::IncomingPostcopy => "an incoming postcopy migration is under way",
            Self::BackgroundSnapshot => "a background snapshot is being written",
            Self::Migration => "the memory is handed over to another process",
            Self::Operator => "the operator asked for it",
        })
    }
}

pub(crate) type Counts = BTreeMap<InhibitReason, usize>;

/// The reasons in force. Discards hold the lock for reading, so that none is in progress once a
/// reason has been added.
#[derive(Debug, Default)]
pub(crate) struct Inhibitors {
    counts: RwLock<Counts>,
}

impl Inhibitors {
    /// Adds a reason; waits for a discard in progress.
    pub(crate) fn add(self: &Arc<Self>, reason: InhibitReason) -> InhibitGuard {
        *self.counts.write().unwrap_or_else(PoisonError::into_inner).entry(reason).or_insert(0) +=
            1;
        InhibitGuard { inhibitors: Arc::clone(self), reason }
    }

    /// Permission to discard while the returned guard lives; `None` if there is a reason against
    /// it.
    pub(crate) fn permission(&self) -> Option<DiscardPermission<'_>> {
        let counts = self.counts.read().unwrap_or_else(PoisonError::into_inner);
        counts.is_empty().then_some(DiscardPermission { _counts: counts })
    }

    /// Waits until no discard is in progress, and lets none begin while the result lives.
    pub(crate) fn hold(&self) -> RwLockWriteGuard<'_, Counts> {
        self.counts.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// The reasons in force.
    pub(crate) fn reasons(&self) -> Vec<InhibitReason> {
        self.counts.read().unwrap_or_else(PoisonError::into_inner).keys().copied().collect()
    }
}

/// Proof that discards are not inhibited; they cannot be inhibited while it lives.
pub(crate) struct DiscardPermission<'a> {
    _counts: RwLockReadGuard<'a, Counts>,
}

/// Nothing is discarded while this lives. Guards with the same or different reasons add up.
#[derive(Debug)]
#[must_use = "discards are inhibited only as long as the guard lives"]
pub struct InhibitGuard {
    inhibitors: Arc<Inhibitors>,
    reason: InhibitReason,
}

impl InhibitGuard {
    /// The reason given.
    pub fn reason(&self) -> InhibitReason {
        self.reason
    }
}

impl Drop for InhibitGuard {
    fn drop(&mut self) {
        let mut counts = self.inhibitors.counts.write().unwrap_or_else(PoisonError::into_inner);
        if let Some(count) = counts.get_mut(&self.reason) {
            *count -= 1;
            if *count == 0 {
                counts.remove(&self.reason);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn guards_are_counted_by_reason() {
        let inhibitors = Arc::new(Inhibitors::default());
        assert!(inhibitors.permission().is_some());
        let first = inhibitors.add(InhibitReason::PinnedMemory);
        let second = inhibitors.add(InhibitReason::PinnedMemory);
        let third = inhibitors.add(InhibitReason::BackgroundSnapshot);
        assert_eq!(
            inhibitors.reasons(),
            [InhibitReason::PinnedMemory, InhibitReason::BackgroundSnapshot]
        );
        drop(first);
        drop(third);
        assert_eq!(inhibitors.reasons(), [InhibitReason::PinnedMemory]);
        assert!(inhibitors.permission().is_none());
        drop(second);
        assert!(inhibitors.permission().is_some());
    }
}
