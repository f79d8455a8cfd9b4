//! Memory with a known content, and its page frames according to the kernel.

use std::fs::File;
use std::sync::Arc;

use ebb_abi::{PageRange, Pfn};
use ebb_guest_ram::{Backing, GuestRam, HugePages, Populate, RegionSpec};
use rustix::time::{ClockId, clock_gettime};
use vm_memory::{Bytes, GuestAddress};

use super::content::{ContentId, Contents, PAGE_BYTES, page};
use crate::LabError;
use crate::harness::maps::{self, FRAME, PRESENT};

/// Number of pages to handle at a time.
const CHUNK_PAGES: usize = 256;
const PAGEMAP: &str = "/proc/self/pagemap";

/// Memory of this process, written once with known contents; its memories are contiguous.
#[derive(Debug)]
pub(super) struct Arena {
    /// Mapped like a guest's memory in a monitor.
    pub(super) ram: Arc<GuestRam>,
    contents: Contents,
}

fn failed(what: &'static str) -> impl Fn(&dyn std::fmt::Display) -> LabError {
    move |cause| LabError::Merging(format!("{what}: {cause}"))
}

fn pages(first: usize, count: usize) -> PageRange {
    PageRange::new(Pfn::containing((first * PAGE_BYTES) as u64), count as u64)
}

impl Arena {
    /// Maps memory for these contents, calls `prepare`, and writes all of it.
    ///
    /// Without huge pages: the comparison is about small pages, regardless of which side splits
    /// huge ones.
    pub(super) fn new(
        contents: Contents,
        prepare: impl Fn(&GuestRam) -> Result<(), LabError>,
    ) -> Result<Self, LabError> {
        let cannot = failed("cannot make memory");
        let region = RegionSpec {
            start: GuestAddress(0),
            size_bytes: contents.pages() * PAGE_BYTES as u64,
            host_node: None,
        };
        let ram = GuestRam::new(&[region], Backing::Anonymous, HugePages::Off, Populate::Lazy)
            .map_err(|error| cannot(&error))?;
        prepare(&ram)?;
        for (first, ids) in contents.chunks(CHUNK_PAGES) {
            let bytes: Vec<u8> = ids.iter().flat_map(|id| page(*id)).collect();
            ram.write_pages(pages(first, ids.len()), &bytes).map_err(|error| cannot(&error))?;
        }
        Ok(Self { ram: Arc::new(ram), contents })
    }

    /// The written contents.
    pub(super) fn contents(&self) -> &Contents {
        &self.contents
    }

    /// Counts the page frames of all memory, each once however often it is mapped, after a read of
    /// each page: this counts shared pages independently of the side that shared them. Needs root.
    pub(super) fn frames(&self) -> Result<u64, LabError> {
        let cannot = failed("cannot count page frames");
        let pagemap = File::open(PAGEMAP).map_err(|error| cannot(&error))?;
        let mut frames: Vec<u64> = Vec::new();
        for page in 0..self.contents.pages() {
            let address = GuestAddress(page * PAGE_BYTES as u64);
            let _: u64 = self.ram.memory().read_obj(address).map_err(|error| cannot(&error))?;
        }
        for region in self.ram.regions() {
            let first = region.host_address / maps::PAGE_BYTES;
            let count = region.size_bytes as usize / PAGE_BYTES;
            let entries = maps::entries(&pagemap, first, count).map_err(|error| cannot(&error))?;
            let present = entries.iter().filter(|entry| *entry & PRESENT != 0);
            frames.extend(present.map(|entry| entry & FRAME));
        }
        if frames.iter().all(|frame| *frame == 0) {
            return Err(cannot(&"the kernel shows them to root only"));
        }
        frames.sort_unstable();
        frames.dedup();
        Ok(frames.len() as u64)
    }

    /// Writes to each of these pages once; returns the processor time per page, ns.
    pub(super) fn write_to(&self, places: &[(usize, usize)]) -> Result<f64, LabError> {
        let cannot = failed("cannot write to memory");
        let begin = thread_cpu_ns();
        for (memory, page) in places {
            let place = self.contents.first_page(*memory) + page;
            // The content stays the same: only the fault is measured.
            let address = GuestAddress((place * PAGE_BYTES) as u64);
            let memory = self.ram.memory();
            let word: u64 = memory.read_obj(address).map_err(|error| cannot(&error))?;
            memory.write_obj(word, address).map_err(|error| cannot(&error))?;
        }
        Ok((thread_cpu_ns() - begin) as f64 / places.len().max(1) as f64)
    }

    /// Number of pages that do not have their written content.
    pub(super) fn wrong_pages(&self) -> Result<u64, LabError> {
        let cannot = failed("cannot read memory");
        let mut wrong = 0;
        for (first, ids) in self.contents.chunks(CHUNK_PAGES) {
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
pub(super) fn thread_cpu_ns() -> u64 {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}
