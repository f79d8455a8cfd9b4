//! The owner's side: a process merges its own memory, as a monitor does with its guest's.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ebb_guest_ram::{GuestRam, MergeSession, StableMemory, StableSegments};
use ebb_page_merge::broker::{BrokerStore, DomainName, MemberConfig};
use ebb_page_merge::{Merger, Nodes, Run, Secret, Settings, StablePages, StableStore};

use super::member::Progress;
use super::memory::Arena;
use crate::LabError;
use crate::harness::merging::DOMAIN;

/// Number of pages between two checks of the time.
const STEP_PAGES: u64 = 2048;
/// Time limit for the passes of one order.
const LIMIT: Duration = Duration::from_secs(300);
/// A fixed secret will do: all pages are the lab's own, and none is made to collide.
const SECRET: Secret = Secret([0x5a; 32]);

type OwnMerger = Merger<MergeSession, Box<dyn StableStore>>;

/// The owner of the memory, which merges it on the calling thread.
pub(super) struct Owner {
    broker: Option<PathBuf>,
    segments: Arc<StableSegments>,
    merger: Option<OwnMerger>,
}

fn failed(error: impl std::fmt::Display) -> LabError {
    LabError::Merging(error.to_string())
}

impl Owner {
    /// An owner that has not merged anything yet, and shares pages with others through a broker if
    /// there is one.
    pub(super) fn new(broker: Option<PathBuf>) -> Self {
        Self { broker, segments: StableSegments::new(), merger: None }
    }

    /// Prepares memory before it is written.
    pub(super) fn prepare(&self, ram: &GuestRam) -> Result<(), LabError> {
        ram.enable_merging(self.segments.clone()).map_err(failed)
    }

    fn merger(&mut self, arena: &Arena) -> Result<&mut OwnMerger, LabError> {
        let merger = match self.merger.take() {
            Some(merger) => merger,
            None => self.start(arena)?,
        };
        Ok(self.merger.insert(merger))
    }

    fn start(&self, arena: &Arena) -> Result<OwnMerger, LabError> {
        let (store, secret): (Box<dyn StableStore>, Secret) = match &self.broker {
            None => (Box::new(StablePages::new(StableMemory::own(self.segments.clone()))), SECRET),
            Some(path) => {
                let domain = DOMAIN.parse::<DomainName>().map_err(failed)?;
                let config = MemberConfig::new(path.clone(), domain, Nodes::Across);
                let store = BrokerStore::connect(&config, self.segments.clone()).map_err(failed)?;
                let secret = store.secret();
                (Box::new(store), secret)
            }
        };
        let settings = Settings { run: Run::Merge, ..Settings::default() };
        let memory = MergeSession::new(arena.ram.clone()).map_err(failed)?;
        Merger::new(memory, store, secret, settings).map_err(failed)
    }

    /// Scans all memory this number of times.
    pub(super) fn pass(&mut self, arena: &Arena, passes: u64) -> Result<Progress, LabError> {
        let merger = self.merger(arena)?;
        let (begin, mut done) = (Instant::now(), 0);
        while done < passes {
            done += u64::from(merger.scan(STEP_PAGES).finished_pass);
            if begin.elapsed() > LIMIT {
                return Err(failed(format!("the owner did not finish within {LIMIT:?}")));
            }
        }
        let statistics = merger.statistics();
        match merger.last_error() {
            Some(error) => Err(failed(error)),
            None => Ok(Progress {
                merged: statistics.merged_pages,
                read: statistics.hashed_pages,
                metadata_bytes: statistics.metadata_bytes,
            }),
        }
    }
}
