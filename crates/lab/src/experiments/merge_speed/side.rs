//! Common interface of the sides that merge, and the side of the owners.

use std::fs;

use ebb_virtual_host::programs::find_monitor;

use super::content::Contents;
use super::ksmd::Ksmd;
use super::member::Means;
use super::members::Members;
use super::metrics;
use crate::LabError;
use crate::harness::merging::{Broker, broker_socket};

/// Passes after which no more merging is expected. Huge pages are read by their owner in the third
/// pass and the sixth, and in the twelfth for what another process has published meanwhile; KSM
/// sees a page in the first one, finds in the second that it has not changed, and merges in the
/// third what the second has missed.
pub(super) const PASSES: u64 = 16;

/// What can be merged.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Goal {
    /// Pages that have an equal one.
    pub(super) alike: u64,
    /// Pages that merging can free.
    pub(super) surplus: u64,
}

impl Goal {
    pub(super) fn of(contents: &Contents) -> Self {
        Self { alike: contents.alike(), surplus: contents.surplus() }
    }
}

/// A side that merges the memory of processes.
pub(super) trait Side {
    /// What the processes have to do for it.
    fn means(&self) -> Means;

    /// Process of the broker, if it has one.
    fn broker(&self) -> Option<u32> {
        None
    }

    /// Scans until each page was read once; returns how many were read.
    ///
    /// # Errors
    /// The cause; [`LabError::Merging`] also at the time limit.
    fn read_once(&mut self, members: &mut Members) -> Result<u64, LabError>;

    /// Scans all memory this number of times, whether or not its pages are read; returns the number
    /// of pages.
    ///
    /// # Errors
    /// As [`read_once`](Self::read_once).
    fn pass(&mut self, members: &mut Members, passes: u64) -> Result<u64, LabError>;

    /// Passes after which memory that does not change is scanned the same way again and again.
    fn passes_to_settle(&self) -> u64;

    /// Merges until the goal is reached, or for [`PASSES`] passes.
    ///
    /// # Errors
    /// As [`read_once`](Self::read_once).
    fn merge(&mut self, members: &mut Members, goal: Goal) -> Result<(), LabError>;

    /// Bytes of its metadata of any kind.
    ///
    /// # Errors
    /// When the size is unknown.
    fn metadata_bytes(&mut self, members: &mut Members) -> Result<u64, LabError>;
}

/// The side of this series for the memory of so many processes.
pub(super) fn side(name: &str, processes: usize) -> Result<Box<dyn Side>, LabError> {
    Ok(match name {
        metrics::OWNER => Box::new(Owners::start(processes, None)?),
        metrics::MANY_MAPPINGS => Box::new(Owners::start(processes, Some(MAPPINGS))?),
        metrics::KSMD => Box::new(Ksmd::join()?),
        other => return Err(LabError::Merging(format!("no side is called '{other}'"))),
    })
}

/// Many mappings for a process: the default of some distributions.
const MAPPINGS: u64 = 1_048_576;

/// The greatest number of mappings that a process may have.
#[derive(Debug)]
struct MaxMapCount {
    /// Its value before, which is restored when this is dropped.
    before: String,
}

impl MaxMapCount {
    const PATH: &str = "/proc/sys/vm/max_map_count";

    /// Changes it for processes that are started from now on.
    fn set(count: u64) -> Result<Self, LabError> {
        let before = fs::read_to_string(Self::PATH).map_err(LabError::of_file(Self::PATH))?;
        fs::write(Self::PATH, count.to_string()).map_err(LabError::of_file(Self::PATH))?;
        Ok(Self { before })
    }
}

impl Drop for MaxMapCount {
    fn drop(&mut self) {
        // It was possible to write to it before.
        let _ = fs::write(Self::PATH, &self.before);
    }
}

/// Processes that merge their own memory, several ones with a broker.
struct Owners {
    broker: Option<Broker>,
    #[expect(dead_code, reason = "restores the setting when dropped")]
    mappings: Option<MaxMapCount>,
}

impl Owners {
    fn start(processes: usize, mappings: Option<u64>) -> Result<Self, LabError> {
        let mappings = mappings.map(MaxMapCount::set).transpose()?;
        if processes < 2 {
            return Ok(Self { broker: None, mappings });
        }
        let ebb = find_monitor(None).ok_or_else(|| LabError::MissingFile {
            what: "the monitor, which has the merge broker",
            path: "ebb".into(),
            remedy: "build it (cargo build -p ebb) into the directory of ebb-lab",
        })?;
        Ok(Self { broker: Some(Broker::start(&ebb)?), mappings })
    }
}

impl Side for Owners {
    fn means(&self) -> Means {
        Means::Owner(self.broker.as_ref().map(|_| broker_socket()))
    }

    fn broker(&self) -> Option<u32> {
        self.broker.as_ref().map(Broker::pid)
    }

    fn read_once(&mut self, members: &mut Members) -> Result<u64, LabError> {
        let pages = members.pages();
        for _ in 0..PASSES {
            let read = members.pass(1)?.read;
            if read >= pages {
                return Ok(read);
            }
        }
        Err(LabError::Merging(format!("not all pages were read in {PASSES} passes")))
    }

    fn pass(&mut self, members: &mut Members, passes: u64) -> Result<u64, LabError> {
        members.pass(passes)?;
        Ok(members.pages() * passes)
    }

    fn passes_to_settle(&self) -> u64 {
        // The intervals at which huge pages are read grow from 3 to 64 passes.
        128
    }

    fn merge(&mut self, members: &mut Members, goal: Goal) -> Result<(), LabError> {
        for _ in 0..PASSES {
            if members.pass(1)?.merged >= goal.alike {
                break;
            }
        }
        Ok(())
    }

    fn metadata_bytes(&mut self, members: &mut Members) -> Result<u64, LabError> {
        Ok(members.pass(1)?.metadata_bytes)
    }
}
