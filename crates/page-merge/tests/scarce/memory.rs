//! No memory for stable pages: a memory file that must not grow, or cannot be created at all.

use std::sync::Arc;

use ebb_guest_ram::{
    Backing, GuestRam, HugePages, MergeSession, MergeUnavailable, Populate, RegionSpec,
    StableMemory, StableSegments,
};
use ebb_page_merge::{Merger, Run, Secret, Settings, StablePages, Statistics};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use vm_memory::{Bytes, GuestAddress};

const PAGES: u64 = 4096;
const PAGE: usize = 4096;

/// Sets the maximum size of files from now on.
fn limit(bytes: Option<u64>) {
    setrlimit(Resource::Fsize, Rlimit { current: bytes, ..getrlimit(Resource::Fsize) }).unwrap();
}

fn ram(segments: &Arc<StableSegments>) -> Result<Arc<GuestRam>, MergeUnavailable> {
    let spec =
        RegionSpec { start: GuestAddress(0), size_bytes: 2 * PAGES * PAGE as u64, host_node: None };
    let ram = GuestRam::new(&[spec], Backing::Anonymous, HugePages::Off, Populate::Lazy)?;
    ram.enable_merging(Arc::clone(segments))?;
    Ok(Arc::new(ram))
}

/// A page whose content encodes a number.
fn content(number: u64) -> [u8; PAGE] {
    let mut content = [0x5a; PAGE];
    content[8..16].copy_from_slice(&number.to_le_bytes());
    content
}

fn write(ram: &GuestRam, page: u64, number: u64) {
    ram.memory().write_slice(&content(number), GuestAddress(page * PAGE as u64)).unwrap();
}

fn read(ram: &GuestRam, page: u64) -> [u8; PAGE] {
    let mut found = [0; PAGE];
    ram.memory().read_slice(&mut found, GuestAddress(page * PAGE as u64)).unwrap();
    found
}

struct Host {
    ram: Arc<GuestRam>,
    merger: Merger<MergeSession, StablePages<StableMemory>>,
}

impl Host {
    fn passes(&mut self, passes: u32) -> Statistics {
        for _ in 0..passes {
            while !self.merger.scan(256).finished_pass {}
        }
        // No content is lost, whether merging succeeds or not.
        assert!((0..2 * PAGES).all(|page| read(&self.ram, page) == content(page % PAGES)));
        let statistics = self.merger.statistics();
        assert_eq!(statistics.memory_errors, 0);
        statistics
    }
}

/// Body of the test's process: memory of two halves with the same content, and files that must not
/// grow for a while.
pub fn merge() {
    let segments = StableSegments::new();
    let ram = match ram(&segments) {
        Err(error @ MergeUnavailable::OldKernel { .. }) => {
            println!("not tested: {error}");
            return;
        }
        ram => ram.unwrap(),
    };
    (0..2 * PAGES).for_each(|page| write(&ram, page, page % PAGES));
    let settings = Settings { run: Run::Merge, clean_passes: 1, ..Settings::default() };
    let memory = MergeSession::new(Arc::clone(&ram)).unwrap();
    let store = StablePages::new(StableMemory::own(segments));
    let merger = Merger::new(memory, store, Secret([5; 32]), settings).unwrap();
    let mut host = Host { ram, merger };

    // No file at all.
    limit(Some(0));
    let statistics = host.passes(4);
    assert_eq!((statistics.merged_pages, statistics.pages_shared), (0, 0));
    assert!((1..=4).contains(&statistics.store_errors), "once a pass: {statistics:?}");
    let error = host.merger.last_error().unwrap();
    assert!(error.contains("no room for another stable page"), "{error}");

    // An existing file, with memory for a part of it.
    let room = PAGES / 4;
    limit(None);
    assert_eq!(host.merger.store().slots().pages_in_use(), 0);
    let mut first = 0;
    while first < 40 && host.merger.statistics().pages_shared == 0 {
        host.merger.scan(256);
        first += u32::from(host.merger.statistics().pages_shared == 0);
    }
    assert!(host.merger.statistics().pages_shared < room, "{:?}", host.merger.statistics());
    limit(Some(room * PAGE as u64));
    let statistics = host.passes(40);
    assert!(statistics.pages_shared <= room, "{statistics:?}");
    assert_eq!(host.merger.store().slots().pages_in_use(), statistics.pages_shared);
    let resident = host.ram.resident_bytes().unwrap();
    assert!(resident >= (2 * PAGES - 2 * room) * PAGE as u64, "{resident}");

    // Memory is available again.
    limit(None);
    let statistics = host.passes(40);
    assert_eq!(
        (statistics.pages_shared, statistics.merged_pages),
        (PAGES, 2 * PAGES),
        "{statistics:?}"
    );
    println!("merged");
}

#[test]
fn pages_not_merged_for_lack_of_memory_are_merged_later() {
    // The signal that accompanies the error would end the process; the monitor blocks it.
    let said = crate::child::run("merges", std::path::Path::new("/"), "trap '' XFSZ");
    assert!(said.contains("merged") || said.contains("not tested"), "{said}");
}
