//! Checks the page's protocol over every interleaving of a reader's loads and a writer's stores on
//! x86.
//!
//! On x86, loads and stores are each performed in program order, so that a reader's view is
//! determined by the number of stores before each of its loads. There are few enough combinations
//! to try all of them, with whole pages and two successive writes. (Weaker orders:
//! `interleavings.rs`.)

#![allow(clippy::unwrap_used)]

use std::cell::{Cell, RefCell};
use std::sync::atomic::Ordering;

use ebb_kvm_clock::page::{TIME_PAGE_BYTES, TimeFlags, VcpuTimeInfo};
use ebb_kvm_clock::protocol::{
    SharedWords, Stability, StopNotice, TimeUpdate, try_read_time, write_time,
};
use ebb_kvm_clock::scale::TscScale;

const WORDS: usize = TIME_PAGE_BYTES / 4;
/// Loads of a reader: the version twice, and every other word.
const LOADS: usize = WORDS + 1;

type Page = [u32; WORDS];

/// The page after each store of a writer; the last one is the present page.
struct History(RefCell<Vec<Page>>);

impl SharedWords for History {
    fn load(&self, index: usize, _ordering: Ordering) -> u32 {
        self.0.borrow().last().unwrap()[index]
    }

    fn store(&self, index: usize, value: u32, _ordering: Ordering) {
        let mut pages = self.0.borrow_mut();
        let mut page = *pages.last().unwrap();
        page[index] = value;
        pages.push(page);
    }

    fn fetch_and(&self, index: usize, mask: u32, ordering: Ordering) -> u32 {
        let value = self.load(index, ordering);
        self.store(index, value & mask, ordering);
        value
    }

    fn fence(&self, _ordering: Ordering) {}
}

/// A reader's view whose n-th load follows `schedule[n]` stores.
struct Replay<'a> {
    pages: &'a [Page],
    schedule: &'a [usize; LOADS],
    loads: Cell<usize>,
}

impl SharedWords for Replay<'_> {
    fn load(&self, index: usize, _ordering: Ordering) -> u32 {
        let load = self.loads.replace(self.loads.get() + 1);
        self.pages[self.schedule[load]][index]
    }

    fn store(&self, _index: usize, _value: u32, _ordering: Ordering) {
        unreachable!("readers do not store");
    }

    fn fetch_and(&self, _index: usize, _mask: u32, _ordering: Ordering) -> u32 {
        unreachable!("readers do not store");
    }

    fn fence(&self, _ordering: Ordering) {}
}

fn info(round: u32) -> VcpuTimeInfo {
    VcpuTimeInfo {
        version: round * 2,
        padding0: 0,
        tsc_timestamp: u64::from(round) * 0x1_0000_0001,
        system_time_ns: u64::from(round) * 0x1_0000_0001,
        tsc_to_system_mul: round,
        tsc_shift: round as i8,
        flags: TimeFlags::TSC_STABLE,
        padding1: [0; 2],
    }
}

/// The pages of a writer that has written rounds 1 and 2.
fn written() -> Vec<Page> {
    let bytes = info(0).to_bytes();
    let first = std::array::from_fn(|word| {
        u32::from_le_bytes(std::array::from_fn(|byte| bytes[word * 4 + byte]))
    });
    let history = History(RefCell::new(vec![first]));
    for round in 1..=2 {
        let info = info(round);
        let update = TimeUpdate {
            tsc_timestamp: info.tsc_timestamp,
            system_time_ns: info.system_time_ns as i64,
            scale: TscScale { mul: info.tsc_to_system_mul, shift: info.tsc_shift },
            stability: Stability::Stable,
        };
        write_time(&history, &update, StopNotice::Keep);
    }
    history.0.into_inner()
}

/// Number of accepted reads over all interleavings, and the number of torn ones among them.
fn accepted_and_torn(pages: &[Page]) -> (usize, usize) {
    let last = pages.len() - 1;
    let (mut accepted, mut torn) = (0, 0);
    let mut schedule = [0; LOADS];
    loop {
        let replay = Replay { pages, schedule: &schedule, loads: Cell::new(0) };
        if let Some((read, _)) = try_read_time(&replay, || 0) {
            accepted += 1;
            torn += usize::from(read != info(read.version / 2));
        }
        // The next non-decreasing sequence.
        let Some(place) = schedule.iter().rposition(|&stores| stores < last) else {
            return (accepted, torn);
        };
        let next = schedule[place] + 1;
        schedule[place..].fill(next);
    }
}

#[test]
fn no_interleaving_gives_a_torn_page() {
    let pages = written();
    assert_eq!(pages.len(), 1 + 2 * LOADS);
    let (accepted, torn) = accepted_and_torn(&pages);
    assert_eq!(torn, 0);
    // At least the reads with all loads in the same round, for each of the three rounds.
    assert!(accepted >= 3);
}

#[test]
fn without_odd_versions_pages_are_torn() {
    let mut pages = written();
    for page in &mut pages {
        page[0] &= !1;
    }
    assert!(accepted_and_torn(&pages).1 > 0);
}

#[test]
fn with_a_late_odd_version_pages_are_torn() {
    let mut pages = written();
    // The version is stored after the first two other words, one of which is unused.
    for first in [1, 1 + LOADS] {
        let before = pages[first - 1][0];
        pages[first..first + 3].iter_mut().for_each(|page| page[0] = before);
    }
    assert!(accepted_and_torn(&pages).1 > 0);
}

#[test]
fn with_an_early_even_version_pages_are_torn() {
    let mut pages = written();
    for last in [LOADS, 2 * LOADS] {
        let after = pages[last];
        // The version is stored before the last word, which contains the flags.
        pages[last - 1][0] = after[0];
        pages[last - 1][WORDS - 1] = pages[last - 2][WORDS - 1];
    }
    assert!(accepted_and_torn(&pages).1 > 0);
}
