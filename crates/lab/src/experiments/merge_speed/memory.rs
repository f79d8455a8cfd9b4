//! Memory with a known content.

use std::sync::Arc;

use ebb_abi::{PageRange, Pfn};
use ebb_guest_ram::{Backing, GuestRam, HugePages, Populate, RegionSpec};
use rustix::time::{ClockId, clock_gettime};
use vm_memory::{Bytes, GuestAddress};

use super::content::{ContentId, PAGE_BYTES, page};
use crate::LabError;

/// Number of pages to handle at a time.
const CHUNK_PAGES: usize = 256;

/// Memory of this process, written once with known contents.
#[derive(Debug)]
pub(super) struct Arena {
    /// Mapped like a guest's memory in a monitor.
    pub(super) ram: Arc<GuestRam>,
    contents: Vec<ContentId>,
}

fn failed(what: &'static str) -> impl Fn(&dyn std::fmt::Display) -> LabError {
    move |cause| LabError::Merging(format!("{what}: {cause}"))
}

fn pages(first: usize, count: usize) -> PageRange {
    PageRange::new(Pfn::containing((first * PAGE_BYTES) as u64), count as u64)
}

fn address(page: usize) -> GuestAddress {
    GuestAddress((page * PAGE_BYTES) as u64)
}

/// Maps memory of this process like a guest's.
pub(super) fn map(pages: usize, huge_pages: HugePages) -> Result<GuestRam, LabError> {
    let region = RegionSpec {
        start: GuestAddress(0),
        size_bytes: (pages * PAGE_BYTES) as u64,
        host_node: None,
    };
    GuestRam::new(&[region], Backing::Anonymous, huge_pages, Populate::Lazy)
        .map_err(|error| failed("cannot map memory")(&error))
}

impl Arena {
    /// Maps memory for these contents, calls `prepare`, and writes all of it.
    pub(super) fn new(
        contents: Vec<ContentId>,
        huge_pages: HugePages,
        prepare: impl Fn(&GuestRam) -> Result<(), LabError>,
    ) -> Result<Self, LabError> {
        let cannot = failed("cannot write to memory");
        let ram = map(contents.len(), huge_pages)?;
        prepare(&ram)?;
        for (ids, first) in contents.chunks(CHUNK_PAGES).zip((0..).step_by(CHUNK_PAGES)) {
            let bytes: Vec<u8> = ids.iter().flat_map(|id| page(*id)).collect();
            ram.write_pages(pages(first, ids.len()), &bytes).map_err(|error| cannot(&error))?;
        }
        Ok(Self { ram: Arc::new(ram), contents })
    }

    /// Reads a word of each page.
    pub(super) fn read(&self) -> Result<(), LabError> {
        for page in 0..self.contents.len() {
            let _: u64 = self
                .ram
                .memory()
                .read_obj(address(page))
                .map_err(|error| failed("cannot read memory")(&error))?;
        }
        Ok(())
    }

    /// Writes to each of these pages once; returns the processor time of each, in ns.
    pub(super) fn write_to(&self, places: &[usize]) -> Result<f64, LabError> {
        let cannot = failed("cannot write to memory");
        let begin = thread_cpu_ns();
        for place in places {
            // The content stays the same: only the fault is measured.
            let memory = self.ram.memory();
            let word: u64 = memory.read_obj(address(*place)).map_err(|error| cannot(&error))?;
            memory.write_obj(word, address(*place)).map_err(|error| cannot(&error))?;
        }
        Ok((thread_cpu_ns() - begin) as f64 / places.len().max(1) as f64)
    }

    /// Number of pages that do not have their written content.
    pub(super) fn wrong_pages(&self) -> Result<u64, LabError> {
        let cannot = failed("cannot read memory");
        let mut wrong = 0;
        for (ids, first) in self.contents.chunks(CHUNK_PAGES).zip((0..).step_by(CHUNK_PAGES)) {
            let mut bytes = vec![0; ids.len() * PAGE_BYTES];
            self.ram
                .read_pages(pages(first, ids.len()), &mut bytes)
                .map_err(|error| cannot(&error))?;
            let is_wrong = |(found, id): (&[u8], &ContentId)| found != page(*id);
            wrong += bytes.chunks(PAGE_BYTES).zip(ids).map(is_wrong).filter(|wrong| *wrong).count()
                as u64;
        }
        Ok(wrong)
    }
}

/// Processor time of the calling thread.
fn thread_cpu_ns() -> u64 {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}
