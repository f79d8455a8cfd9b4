//! The measurements: each side merges the same memories in turn.

use std::thread;
use std::time::Duration;

use serde::Serialize;

use super::content::{Contents, Shape};
use super::memory::Arena;
use super::sibling::Sibling;
use super::side::{Side, Until, Work};
use crate::LabError;

/// Time for which a second thread is measured before merging begins.
const CALM: Duration = Duration::from_millis(250);
/// Number of merged pages that are then written to.
const WRITES: usize = 20_000;

/// Amount of memory of each shape, and the number of measurements.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub(super) struct Amount {
    pub(super) unique_mib: u64,
    pub(super) scattered_mib: u64,
    pub(super) runs_mib: u64,
    pub(super) clones_mib: u64,
    pub(super) rounds: u64,
}

impl Amount {
    fn pages(self, shape: Shape) -> usize {
        let mib = match shape {
            Shape::Unique => self.unique_mib,
            Shape::Scattered => self.scattered_mib,
            Shape::Runs => self.runs_mib,
            Shape::Clones => self.clones_mib,
        };
        (mib * 256) as usize
    }
}

/// Whether another thread of the process runs during a measurement.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Company {
    /// No other thread.
    Alone,
    /// A busy thread.
    Sibling,
}

/// Result of one side for unique pages.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Scanning {
    /// The work until all or most pages were read once.
    pub(super) first: Work,
    /// The work of passes in the steady state.
    pub(super) steady: Work,
    /// Bytes of metadata for each page of the memory.
    pub(super) metadata_bytes_per_page: f64,
}

/// Result of one side for memory with duplicates.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Merging {
    /// Shape of the memory.
    pub(super) shape: Shape,
    /// Whether another thread ran.
    pub(super) company: Company,
    /// The work until all was merged, or no more pages were.
    pub(super) work: Work,
    /// Number of pages that merging could free.
    pub(super) surplus_pages: u64,
    /// Number of freed page frames, according to the kernel.
    pub(super) freed_pages: u64,
    /// Time of the first write to a merged page, ns.
    pub(super) write_ns: Option<f64>,
    /// Rounds per second of the second thread before and during merging.
    pub(super) sibling_per_s: Option<(f64, f64)>,
}

/// Lets a side scan memory without equal pages.
///
/// # Errors
/// As [`Side::merge`].
pub(super) fn scan(
    side: &mut dyn Side,
    amount: Amount,
    seed: u64,
    settle_passes: u64,
    steady_passes: u64,
) -> Result<Scanning, LabError> {
    let arena = build(side, Shape::Unique, amount, seed)?;
    let pages = arena.contents().pages();
    let until = side.first_pass(&arena);
    let first = side.merge(&arena, until)?;
    // Regardless of how often pages were visited before they were read.
    let first = Work { pages: first.pages.min(pages), ..first };
    side.merge(&arena, Until::Passes(settle_passes))?;
    let steady = side.merge(&arena, Until::Passes(steady_passes))?;
    let metadata_bytes = side.metadata_bytes(&arena)?;
    Ok(Scanning { first, steady, metadata_bytes_per_page: metadata_bytes as f64 / pages as f64 })
}

/// Lets a side merge memory with duplicates.
///
/// # Errors
/// As [`Side::merge`]; [`LabError::Merging`] if the content of memory has changed.
pub(super) fn merge(
    side: &mut dyn Side,
    shape: Shape,
    company: Company,
    amount: Amount,
    seed: u64,
) -> Result<Merging, LabError> {
    let arena = build(side, shape, amount, seed)?;
    let surplus_pages = arena.contents().surplus();
    let frames = arena.frames()?;
    let sibling = match company {
        Company::Alone => None,
        Company::Sibling => Some(Sibling::start()?),
    };
    let before = sibling.as_ref().and_then(|sibling| {
        // The thread's memory is touched for the first time now.
        thread::sleep(CALM / 4);
        let mark = sibling.mark();
        thread::sleep(CALM);
        sibling.rounds_per_s(mark)
    });
    let mark = sibling.as_ref().map(Sibling::mark);
    let work = side.merge(&arena, Until::Freed(surplus_pages))?;
    let meanwhile =
        sibling.as_ref().zip(mark).and_then(|(sibling, mark)| sibling.rounds_per_s(mark));
    drop(sibling);
    let freed_pages = frames.saturating_sub(arena.frames()?);
    right(&arena, "merged")?;
    let write_ns = match company {
        Company::Alone => {
            let alike = arena.contents().alike();
            let ns = arena.write_to(&alike[..alike.len().min(WRITES)])?;
            right(&arena, "written to again")?;
            Some(ns)
        }
        Company::Sibling => None,
    };
    Ok(Merging {
        shape,
        company,
        work,
        surplus_pages,
        freed_pages,
        write_ns,
        sibling_per_s: before.zip(meanwhile),
    })
}

fn build(side: &dyn Side, shape: Shape, amount: Amount, seed: u64) -> Result<Arena, LabError> {
    Arena::new(Contents::new(shape, amount.pages(shape), seed), |ram| side.prepare(ram))
}

fn right(arena: &Arena, when: &str) -> Result<(), LabError> {
    match arena.wrong_pages()? {
        0 => Ok(()),
        wrong => Err(LabError::Merging(format!(
            "{wrong} pages have another content after they were {when}"
        ))),
    }
}
