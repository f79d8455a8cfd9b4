//! The measuring: each side merges the same memories, one after another, in turns.

use std::thread;
use std::time::Duration;

use serde::Serialize;

use super::content::{Contents, Shape};
use super::memory::Arena;
use super::sibling::Sibling;
use super::side::{Side, Until, Work};
use crate::LabError;

/// How long a second thread is watched before merging begins.
const CALM: Duration = Duration::from_millis(250);
/// Pages that are written to after they were merged.
const WRITES: usize = 20_000;

/// How much memory there is of each shape, and how often it is measured.
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

/// Whether another thread of the process works meanwhile.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Company {
    /// None does.
    Alone,
    /// One does.
    Sibling,
}

/// What one side did to unique pages.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Scanning {
    /// Until each page was read once, or most of them.
    pub(super) first: Work,
    /// Passes when all is known.
    pub(super) steady: Work,
    /// Bytes of its own for each page of the memory.
    pub(super) metadata_bytes_per_page: f64,
}

/// What one side did to memory with duplicates.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Merging {
    /// Of what shape.
    pub(super) shape: Shape,
    /// In whose company.
    pub(super) company: Company,
    /// Until all was merged, or nothing more came.
    pub(super) work: Work,
    /// Pages that could go.
    pub(super) surplus_pages: u64,
    /// Page frames that have gone, by the kernel's account.
    pub(super) freed_pages: u64,
    /// The first write to a merged page, ns.
    pub(super) write_ns: Option<f64>,
    /// What the second thread did in a second before and meanwhile.
    pub(super) sibling_per_s: Option<(f64, f64)>,
}

/// Lets a side look at memory in which no two pages are alike.
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
    // However often pages were looked at before they were read.
    let first = Work { pages: first.pages.min(pages), ..first };
    side.merge(&arena, Until::Passes(settle_passes))?;
    let steady = side.merge(&arena, Until::Passes(steady_passes))?;
    let metadata_bytes = side.metadata_bytes(&arena)?;
    Ok(Scanning { first, steady, metadata_bytes_per_page: metadata_bytes as f64 / pages as f64 })
}

/// Lets a side merge memory with duplicates.
///
/// # Errors
/// As [`Side::merge`]; [`LabError::Merging`] if memory has another content afterwards.
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
        // Its memory is touched for the first time now.
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
