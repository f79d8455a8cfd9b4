//! Schedule of the actions on a block beyond scanning its pages.
//!
//! Copies are reanonymized for the place of a huge page as a whole, so that pages that are written
//! to together are reanonymized together: when no more of them were written to for some scans, but
//! at most some more scans after the first one. VMAs are coalesced at random scans.

use std::collections::HashMap;

/// Consecutive scans that must not have found another page written to.
const QUIET_LOOKS: u8 = 2;

/// Scans after which the copies are reanonymized in any case.
const MOST_LOOKS: u8 = 8;

/// Scans until the next attempt, where a copy could not be reanonymized.
const LOOKS_BETWEEN_TRIES: u8 = 16;

/// Average number of scans of a block per search for VMAs to coalesce.
const LOOKS: u64 = 32;

/// Whether writers block while pages are reanonymized.
#[cfg(feature = "testing")]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Protection {
    /// As required.
    Yes,
    /// Not at all, as a control for tests: writes are lost.
    No,
}

/// Copies found by a scan in the place of a huge page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Found {
    /// Only known ones.
    Known,
    /// New ones, too.
    New,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Wait {
    quiet: u8,
    left: u8,
}

/// Age of copies, by number of the huge page's place; places without copies have no entry.
#[derive(Debug, Default)]
pub(super) struct Copies(HashMap<u64, Wait>);

impl Copies {
    /// Records the result of a scan; returns true if the copies are due to be reanonymized.
    pub(super) fn is_due(&mut self, block: u64, found: Found) -> bool {
        let wait = self.0.entry(block).or_insert(Wait { quiet: 0, left: MOST_LOOKS });
        wait.quiet = if found == Found::New { 0 } else { wait.quiet.saturating_add(1) };
        wait.left = wait.left.saturating_sub(1);
        // After a refusal nothing is due before the end of the interval.
        wait.left == 0 || (wait.quiet >= QUIET_LOOKS && wait.left < MOST_LOOKS)
    }

    /// Records that a place has no copies.
    pub(super) fn forget(&mut self, block: u64) {
        // Usually there are no copies at all.
        if !self.0.is_empty() {
            self.0.remove(&block);
        }
    }

    /// Postpones copies that could not be reanonymized.
    pub(super) fn try_later(&mut self, block: u64) {
        self.0.insert(block, Wait { quiet: 0, left: MOST_LOOKS + LOOKS_BETWEEN_TRIES });
    }
}

/// Picks one of many scans at random: blocks are scanned in the same order in each pass.
#[derive(Debug)]
pub(super) struct Sampler {
    random: u64,
    looks: u64,
}

impl Sampler {
    pub(super) fn new(seed: u64) -> Self {
        Self { random: seed | 1, looks: LOOKS }
    }

    /// Sets the average number of scans per pick.
    #[cfg(feature = "testing")]
    pub(super) fn set_looks(&mut self, looks: u64) {
        self.looks = looks.max(1);
    }

    pub(super) fn is_next(&mut self) -> bool {
        // xorshift64
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        self.random.is_multiple_of(self.looks)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn looks(copies: &mut Copies, found: &[Found]) -> Vec<bool> {
        found.iter().map(|found| copies.is_due(7, *found)).collect()
    }

    #[test]
    fn copies_are_due_when_no_more_of_them_appear() {
        let mut copies = Copies::default();
        assert_eq!(
            looks(&mut copies, &[Found::New, Found::Known, Found::New, Found::Known, Found::Known]),
            [false, false, false, false, true]
        );
    }

    #[test]
    fn a_place_that_is_written_to_repeatedly_is_due_nevertheless() {
        let mut copies = Copies::default();
        let due = looks(&mut copies, &[Found::New; MOST_LOOKS as usize]);
        assert_eq!(due.iter().position(|due| *due), Some(MOST_LOOKS as usize - 1));
    }

    #[test]
    fn refused_copies_are_retried_after_a_while() {
        let mut copies = Copies::default();
        copies.try_later(7);
        let due = looks(&mut copies, &[Found::Known; 64]);
        let first = due.iter().position(|due| *due).unwrap();
        assert_eq!(first, usize::from(LOOKS_BETWEEN_TRIES));
        // Copies that have disappeared in the meantime start anew.
        copies.forget(7);
        assert!(copies.0.is_empty());
        assert_eq!(looks(&mut copies, &[Found::New, Found::Known]), [false, false]);
    }

    #[test]
    fn one_of_many_scans_is_picked() {
        let mut sampler = Sampler::new(7);
        let count = (0..64 * LOOKS).filter(|_| sampler.is_next()).count();
        assert!((32..128).contains(&count), "{count}");
    }
}
