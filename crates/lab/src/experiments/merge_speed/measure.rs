//! The measurements: each side merges the same memories in turn.

use std::time::Instant;

use serde::Serialize;

use super::content::{Contents, Shape};
use super::member::{Order, Which};
use super::members::Members;
use super::price::{Meter, Price};
use super::side::{Goal, Side};
use crate::LabError;

/// Passes of the steady state: the longest interval in which an owner reads all huge pages once.
const STEADY_PASSES: u64 = 64;

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
            Shape::Scattered | Shape::ScatteredSmall => self.scattered_mib,
            Shape::Runs => self.runs_mib,
            Shape::Clones => self.clones_mib,
        };
        (mib * 256) as usize
    }
}

/// Whether another thread runs in the process whose memory is merged.
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
    /// Pages for each second of processor time until each was read once.
    pub(super) first_per_cpu_s: Option<f64>,
    /// The same for passes of the steady state, in which not all are read.
    pub(super) steady_per_cpu_s: Option<f64>,
    /// Bytes of metadata for each page of the memory.
    pub(super) metadata_bytes_per_page: f64,
    /// Huge pages before and after.
    pub(super) huge_pages: (u64, u64),
}

/// Result of one side for memory with duplicates.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Merging {
    /// Shape of the memory.
    pub(super) shape: Shape,
    /// Whether another thread ran.
    pub(super) company: Company,
    /// The price until all was merged, or no more pages were.
    pub(super) work: Price,
    /// The price of reading each page then.
    pub(super) reading: Price,
    /// Elapsed time of the merging, ns.
    pub(super) wall_ns: u64,
    /// Number of pages that merging could free.
    pub(super) surplus_pages: u64,
    /// Number of freed page frames, according to the kernel.
    pub(super) freed_pages: u64,
    /// Huge pages before and after.
    pub(super) huge_pages: (u64, u64),
    /// Processor time of the first write to a page that has an equal one, ns.
    pub(super) equal_write_ns: Option<f64>,
    /// The same for the other pages.
    pub(super) unequal_write_ns: Option<f64>,
    /// Rounds per second of the second thread before and during merging.
    pub(super) sibling_per_s: Option<(f64, f64)>,
}

impl Merging {
    /// The whole price of the freed pages.
    pub(super) fn price(&self) -> Price {
        self.work + self.reading
    }
}

/// Lets a side scan memory without equal pages.
///
/// # Errors
/// As [`Side::merge`].
pub(super) fn scan(side: &mut dyn Side, amount: Amount, seed: u64) -> Result<Scanning, LabError> {
    let pages = amount.pages(Shape::Unique);
    let mut members = Members::start(Shape::Unique, pages, seed, &side.means())?;
    let huge_before = members.huge_pages()?;
    let meter = Meter::start(members.pids(), side.broker())?;
    let read = side.read_once(&mut members)?;
    let first_per_cpu_s = meter.price()?.per_cpu_s(read);
    side.pass(&mut members, side.passes_to_settle())?;
    let meter = Meter::start(members.pids(), side.broker())?;
    let scanned = side.pass(&mut members, STEADY_PASSES)?;
    let steady_per_cpu_s = meter.price()?.per_cpu_s(scanned);
    let metadata_bytes = side.metadata_bytes(&mut members)?;
    Ok(Scanning {
        first_per_cpu_s,
        steady_per_cpu_s,
        metadata_bytes_per_page: metadata_bytes as f64 / pages as f64,
        huge_pages: (huge_before, members.huge_pages()?),
    })
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
    let pages = amount.pages(shape);
    let goal = Goal::of(&Contents::new(shape, pages, seed));
    let mut members = Members::start(shape, pages, seed, &side.means())?;
    members.read()?;
    let (frames, huge_before) = (members.frames()?, members.huge_pages()?);
    let calm = match company {
        Company::Alone => None,
        Company::Sibling => members.first(Order::Company)?,
    };
    let (meter, begin) = (Meter::start(members.pids(), side.broker())?, Instant::now());
    side.merge(&mut members, goal)?;
    let (work, wall_ns) = (meter.price()?, begin.elapsed().as_nanos() as u64);
    let loaded = match company {
        Company::Alone => None,
        Company::Sibling => members.first(Order::Alone)?,
    };
    let meter = Meter::start(members.pids(), side.broker())?;
    members.read()?;
    let reading = meter.price()?;
    let freed_pages = frames.saturating_sub(members.frames()?);
    let huge_after = members.huge_pages()?;
    members.check("merged")?;
    let equal_write_ns = members.first(Order::Write(Which::Equal))?;
    let unequal_write_ns = members.first(Order::Write(Which::Unequal))?;
    members.check("written to again")?;
    Ok(Merging {
        shape,
        company,
        work,
        reading,
        wall_ns,
        surplus_pages: goal.surplus,
        freed_pages,
        huge_pages: (huge_before, huge_after),
        equal_write_ns,
        unequal_write_ns,
        sibling_per_s: calm.zip(loaded),
    })
}
