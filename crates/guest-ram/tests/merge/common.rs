//! Memory to be merged.

use std::sync::Arc;

use ebb_abi::{PAGE_SIZE_BYTES, Pfn};
use ebb_guest_ram::merge::{MergeOutcome, MergeTarget, PageLook};
use ebb_guest_ram::{
    Backing, GuestRam, GuestRange, HugePages, MergeSession, MergeUnavailable, Populate, RegionSpec,
    StableMemory, StableSegments, StableSlot,
};
use vm_memory::{Bytes, GuestAddress};

pub const PAGE: usize = PAGE_SIZE_BYTES as usize;

/// Prints why a test is skipped; returns true if the kernel is the reason.
pub fn is_old_kernel(error: &MergeUnavailable) -> bool {
    let old = matches!(error, MergeUnavailable::OldKernel { .. });
    if old {
        eprintln!("not tested: {error}");
    }
    old
}

/// Memory with a session and stable pages.
pub struct Setup {
    pub ram: Arc<GuestRam>,
    pub session: MergeSession,
    pub stable: StableMemory,
}

/// Anonymous memory with this number of pages.
pub fn ram(pages: u64, huge_pages: HugePages) -> GuestRam {
    let spec =
        RegionSpec { start: GuestAddress(0), size_bytes: pages * PAGE_SIZE_BYTES, host_node: None };
    GuestRam::new(&[spec], Backing::Anonymous, huge_pages, Populate::Lazy).unwrap()
}

/// `None` if the kernel is too old.
pub fn setup(pages: u64, huge_pages: HugePages) -> Option<Setup> {
    let ram = Arc::new(ram(pages, huge_pages));
    let segments = StableSegments::new();
    match ram.enable_merging(Arc::clone(&segments)) {
        Err(error) if is_old_kernel(&error) => return None,
        result => result.unwrap(),
    }
    let session = MergeSession::new(Arc::clone(&ram)).unwrap();
    Some(Setup { ram, session, stable: StableMemory::own(segments) })
}

impl Setup {
    /// Writes a page full of `byte`.
    pub fn fill(&self, page: u64, byte: u8) {
        self.ram.memory().write_slice(&[byte; PAGE], GuestAddress(page * PAGE_SIZE_BYTES)).unwrap();
    }

    /// Whether a page is full of `byte`.
    pub fn is_full_of(&self, page: u64, byte: u8) -> bool {
        let mut content = [0; PAGE];
        self.ram.memory().read_slice(&mut content, GuestAddress(page * PAGE_SIZE_BYTES)).unwrap();
        content == [byte; PAGE]
    }

    /// Stable pages in neighbouring slots, full of these bytes.
    pub fn publish(&mut self, bytes: &[u8]) -> Vec<StableSlot> {
        let mut slots = Vec::new();
        self.stable.allocate(None, bytes.len() as u32, &mut slots).unwrap();
        let contents: Vec<u8> = bytes.iter().flat_map(|byte| [*byte; PAGE]).collect();
        self.stable.write(slots[0], &contents).unwrap();
        slots
    }

    pub fn look(&mut self, start: u64, pages: u64) -> Vec<PageLook> {
        let mut looks = Vec::new();
        self.session.look(GuestRange::new(Pfn(start), pages), &mut looks).unwrap();
        looks
    }

    /// Replaces pages by slots.
    pub fn replace(&mut self, pages: &[(u64, StableSlot)]) -> Vec<MergeOutcome> {
        let pages: Vec<_> =
            pages.iter().map(|(page, slot)| (Pfn(*page), MergeTarget::Slot(*slot))).collect();
        self.replace_by(&pages)
    }

    pub fn replace_by(&mut self, pages: &[(Pfn, MergeTarget)]) -> Vec<MergeOutcome> {
        let mut outcomes = Vec::new();
        self.session.replace(pages, &mut outcomes).unwrap();
        assert_eq!(outcomes.len(), pages.len());
        outcomes
    }

    /// Host address of a page.
    pub fn address(&self, page: u64) -> usize {
        self.ram.regions()[0].host_address as usize + page as usize * PAGE
    }
}

/// Number of mappings of guest memory.
pub fn mappings_of(setup: &Setup) -> usize {
    let (start, end) = (setup.address(0), setup.address(0) + setup.ram.size_bytes() as usize);
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let bounds = maps.lines().filter_map(|line| {
        let (from, rest) = line.split_once('-')?;
        let from = usize::from_str_radix(from, 16).ok()?;
        let to = usize::from_str_radix(rest.split_once(' ')?.0, 16).ok()?;
        Some((from, to))
    });
    bounds.filter(|(from, to)| *from < end && start < *to).count()
}

/// Scans the first 512 pages until they are in fewer than `most` mappings; returns false if that
/// never happens. `pages`, each of which begins with this byte, are written to in between: another
/// test may have created a child process, which shares them until then, and shared pages are not
/// moved.
pub fn are_coalesced(setup: &mut Setup, pages: &[(u64, u8)], most: usize) -> bool {
    (0..2000).any(|_| {
        for (page, byte) in pages {
            setup.ram.memory().write_obj(*byte, GuestAddress(page * PAGE_SIZE_BYTES)).unwrap();
        }
        setup.look(0, 512);
        mappings_of(setup) < most
    })
}
