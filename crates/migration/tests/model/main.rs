//! Hints, writes and syncs of the dirty log in every possible order, on a few pages.
//!
//! The engine's own [`Tracker`](ebb_migration::Tracker) with its windows and rounds is driven
//! through all interleavings of what a guest, its driver, the monitor's devices and the engine's
//! threads do, one small step at a time, with no bound on the number of steps: a state visited
//! before is not examined again. In no state may the guest be handed over with a used page that
//! differs at the destination, or with a driver that holds hinted pages which are never returned.
//!
//! The rule is then broken in every possible way, to prove that the search finds each violation.

#![allow(clippy::unwrap_used, reason = "a failing helper is a failing test")]

mod machine;
mod search;
mod world;

use search::{Found, search};
use world::{Mutant, Scope};

/// Hints and writes on two pages, sent by two threads.
const HINTS: Scope = Scope { pages: 2, workers: 2, monitor_changes: false };

/// Hints and writes on three pages.
const MORE_PAGES: Scope = Scope { pages: 3, workers: 1, monitor_changes: false };

/// Discards and writes of the monitor as well.
const MONITOR: Scope = Scope { pages: 2, workers: 1, monitor_changes: true };

fn holds(scope: Scope) -> usize {
    match search(scope, Mutant::None) {
        Found::Nothing { states } => {
            println!("{scope:?}: {states} states");
            states
        }
        Found::Violation { path, what } => panic!("{what}: {path:?}"),
    }
}

#[test]
fn hints_never_lose_a_page_with_two_threads() {
    assert!(holds(HINTS) > 10_000);
}

#[test]
fn hints_never_lose_one_of_three_pages() {
    assert!(holds(MORE_PAGES) > 10_000);
}

#[test]
fn discards_and_writes_of_the_monitor_are_never_lost() {
    assert!(holds(MONITOR) > 10_000);
}

/// Checks that a mutant is found, and prints the steps.
fn caught(mutant: Mutant, scope: Scope) {
    match search(scope, mutant) {
        Found::Nothing { states } => panic!("{mutant:?} was not found in {states} states"),
        Found::Violation { path, what } => println!("{mutant:?}: {what} after {path:?}"),
    }
}

/// The window is open across a sync of the log.
#[test]
fn a_late_hint_is_caught() {
    caught(Mutant::LateHint, HINTS);
}

/// A hint is honoured after the last sync of the log.
#[test]
fn a_hint_after_the_pause_is_caught() {
    caught(Mutant::HintAfterStop, HINTS);
}

#[test]
fn a_hint_that_clears_the_log_is_caught() {
    caught(Mutant::HintClearsLog, HINTS);
}

/// Writes are found only from the first sync on.
#[test]
fn a_window_before_tracking_is_armed_is_caught() {
    caught(Mutant::ArmedLate, HINTS);
}

#[test]
fn a_driver_that_is_not_notified_of_the_end_is_caught() {
    caught(Mutant::NoDone, HINTS);
}

/// The granule of a page that is sent is cleared while hints are honoured.
#[test]
fn clearing_inside_a_window_is_caught() {
    caught(Mutant::ClearInWindow, HINTS);
}

/// Clearing a page for its sending clears its neighbours, too.
#[test]
fn clearing_neighbours_is_caught() {
    caught(Mutant::ClearNeighbours, HINTS);
}

#[test]
fn clearing_after_reading_is_caught() {
    caught(Mutant::ClearAfterRead, HINTS);
}

#[test]
fn a_discard_that_is_logged_before_it_is_done_is_caught() {
    caught(Mutant::NoteFirst, MONITOR);
}
