//! The owner's side: this process merges its own memory, as a monitor does with its guest's.

use std::sync::Arc;
use std::time::{Duration, Instant};

use ebb_guest_ram::{GuestRam, MergeSession, StableMemory, StableSegments};
use ebb_page_merge::{Merger, Run, Secret, Settings, StablePages};

use super::memory::{Arena, thread_cpu_ns};
use super::side::{PASSES_IN_VAIN, Side, Until, Work};
use crate::LabError;

/// Number of pages between two checks of the progress.
const STEP_PAGES: u64 = 2048;
/// Time limit for any merging.
const LIMIT: Duration = Duration::from_secs(300);
/// No process creates pages here whose hashes collide on purpose.
const SECRET: Secret = Secret([0x5a; 32]);

type OwnMerger = Merger<MergeSession, StablePages<StableMemory>>;

/// The owner of the memory, which merges it on the calling thread.
pub(super) struct Owner {
    segments: Arc<StableSegments>,
    merger: Option<OwnMerger>,
}

fn failed(error: impl std::fmt::Display) -> LabError {
    LabError::Merging(error.to_string())
}

impl Owner {
    /// An owner that has not merged anything yet.
    pub(super) fn new() -> Self {
        Self { segments: StableSegments::new(), merger: None }
    }

    fn merger(&mut self, arena: &Arena) -> Result<&mut OwnMerger, LabError> {
        let merger = if let Some(merger) = self.merger.take() {
            merger
        } else {
            // Like KSM: a page that has not changed over one pass is a candidate.
            let settings = Settings { run: Run::Merge, clean_passes: 1, ..Settings::default() };
            let store = StablePages::new(StableMemory::own(self.segments.clone()));
            let memory = MergeSession::new(arena.ram.clone()).map_err(failed)?;
            Merger::new(memory, store, SECRET, settings).map_err(failed)?
        };
        Ok(self.merger.insert(merger))
    }
}

impl Side for Owner {
    fn prepare(&self, ram: &GuestRam) -> Result<(), LabError> {
        ram.enable_merging(self.segments.clone()).map_err(failed)
    }

    fn merge(&mut self, arena: &Arena, until: Until) -> Result<Work, LabError> {
        let merger = self.merger(arena)?;
        let (begin, before) = (Instant::now(), merger.statistics());
        let (mut work, mut passes) = (Work::default(), 0);
        loop {
            let cpu_ns = thread_cpu_ns();
            let step = merger.scan(STEP_PAGES);
            work.cpu_ns += thread_cpu_ns() - cpu_ns;
            work.pages += step.pages;
            passes += u64::from(step.finished_pass);
            let over = match until {
                Until::Covered(pages) => work.pages >= pages,
                Until::Passes(wanted) => passes >= wanted,
                Until::Freed(pages) => {
                    let sharing =
                        merger.statistics().pages_sharing.saturating_sub(before.pages_sharing);
                    sharing >= pages || passes >= PASSES_IN_VAIN
                }
            };
            if over {
                break;
            }
            if begin.elapsed() > LIMIT {
                return Err(LabError::Merging(format!(
                    "the owner did not finish within {LIMIT:?}"
                )));
            }
        }
        work.wall_ns = begin.elapsed().as_nanos() as u64;
        match merger.last_error() {
            Some(error) => Err(failed(error)),
            None => Ok(work),
        }
    }

    fn first_pass(&self, _arena: &Arena) -> Until {
        // The first pass only begins to track writes; pages that were not written to are read in
        // the second one.
        Until::Passes(2)
    }

    fn metadata_bytes(&mut self, arena: &Arena) -> Result<u64, LabError> {
        Ok(self.merger(arena)?.statistics().metadata_bytes)
    }
}
