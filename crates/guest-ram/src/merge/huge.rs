//! Detection of cold huge pages.
//!
//! A huge page that is write-protected for tracking is split by the first write (Linux mm/memory.c,
//! `wp_huge_pmd`), and the guest is slower from then on. So it is not protected before a sample of
//! its content has stayed the same for some scans; until then it counts as written. If a write has
//! split one nevertheless, its place is not protected for a while, so that the host may rebuild the
//! huge page (khugepaged skips protected pages).

use std::collections::HashMap;
use std::hash::Hasher;
use std::ptr;

use ebb_abi::{HUGE_PAGE_SIZE_PAGES, PAGE_SIZE_BYTES};
use twox_hash::XxHash3_64;

/// Consecutive scans in which the sample must have been the same before a huge page is protected.
const LOOKS_UNCHANGED: u8 = 2;

/// Scans in which the place of a huge page is not protected after a write has split it.
const LOOKS_ALONE: u8 = 16;

/// Bytes sampled of each page.
const SAMPLE_BYTES: usize = 64;

/// State of the place of a huge page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// It is sampled.
    Sampled { sample: u64, unchanged: u8 },
    /// It is protected.
    Protected,
    /// It was split, and is not protected for this many scans.
    Alone(u8),
}

/// Action for an existing huge page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Advice {
    /// It counts as written to.
    LeaveUnprotected,
    /// It is cold: writes to it may be tracked.
    Protect,
}

/// States of huge pages by number; unknown ones have none.
#[derive(Debug, Default)]
pub(super) struct HugeBlocks(HashMap<u64, State>);

impl HugeBlocks {
    /// Whether a place must not be protected in this scan.
    pub(super) fn leave_alone(&mut self, block: u64) -> bool {
        match self.0.get_mut(&block) {
            Some(State::Alone(looks)) if *looks > 0 => {
                *looks -= 1;
                true
            }
            _ => false,
        }
    }

    /// Processes the sample of a huge page that is not protected.
    pub(super) fn sampled(&mut self, block: u64, sample: u64) -> Advice {
        let state = self.0.entry(block).or_insert(State::Sampled { sample: !sample, unchanged: 0 });
        let unchanged = match state {
            State::Sampled { sample: before, unchanged } if *before == sample => *unchanged + 1,
            _ => 0,
        };
        if unchanged >= LOOKS_UNCHANGED {
            *state = State::Protected;
            return Advice::Protect;
        }
        *state = State::Sampled { sample, unchanged };
        Advice::LeaveUnprotected
    }

    /// Records that the pages of a place are small. Returns true if it had a protected huge page,
    /// which a write has split.
    pub(super) fn found_small(&mut self, block: u64) -> bool {
        if self.0.is_empty() {
            return false;
        }
        let taken_apart = self.0.get(&block) == Some(&State::Protected);
        if taken_apart {
            self.0.insert(block, State::Alone(LOOKS_ALONE));
        } else {
            self.0.remove(&block);
        }
        taken_apart
    }

    /// Records that pages of a place were merged: it should not become a huge page again.
    pub(super) fn merged(&mut self, block: u64) {
        self.0.remove(&block);
    }
}

/// A sample of the content of a huge page: some bytes of each of its pages, which depend on the
/// seed.
///
/// # Safety
/// The huge page must be mapped guest memory.
pub(super) unsafe fn sample(address: usize, seed: u64) -> u64 {
    let mut hasher = XxHash3_64::with_seed(seed);
    let places = PAGE_SIZE_BYTES / SAMPLE_BYTES as u64;
    let mut bytes = [0_u8; SAMPLE_BYTES];
    for page in 0..HUGE_PAGE_SIZE_PAGES {
        // A different offset in each page: frequent writes often hit the same offset of many pages.
        let place = (seed ^ page.wrapping_mul(0x9e37_79b9)) % places;
        let offset = (page * PAGE_SIZE_BYTES) as usize + place as usize * SAMPLE_BYTES;
        // SAFETY: the bytes are within the huge page, which is mapped, as the caller guarantees.
        // The guest may write to it, so it is copied before it is used.
        unsafe {
            ptr::copy_nonoverlapping(
                (address + offset) as *const u8,
                bytes.as_mut_ptr(),
                SAMPLE_BYTES,
            );
        };
        hasher.write(&bytes);
    }
    hasher.finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_huge_page_is_protected_once_its_sample_stays_the_same() {
        let mut blocks = HugeBlocks::default();
        for sample in [1, 1, 2, 2] {
            assert_eq!(blocks.sampled(7, sample), Advice::LeaveUnprotected);
        }
        assert_eq!(blocks.sampled(7, 2), Advice::Protect);
        // It was replaced by another one, or is unprotected for another reason.
        assert_eq!(blocks.sampled(7, 2), Advice::LeaveUnprotected);
    }

    #[test]
    fn the_place_of_a_split_huge_page_is_not_protected_for_a_while() {
        let mut blocks = HugeBlocks::default();
        assert!(!blocks.found_small(7) && !blocks.leave_alone(7));
        for _ in 0..=LOOKS_UNCHANGED {
            blocks.sampled(7, 1);
        }
        assert!(blocks.found_small(7));
        for _ in 0..LOOKS_ALONE {
            assert!(blocks.leave_alone(7));
        }
        assert!(!blocks.leave_alone(7));
        assert!(!blocks.found_small(7) && !blocks.leave_alone(7), "then it is like any other");
    }
}
