//! Making memory huge again that was split when it was written to after a fork(2).
//!
//! After a fork both processes have the same huge pages. A write to one splits it for the process
//! that writes, and copies 4 KiB (Linux mm/huge_memory.c, `do_huge_pmd_wp_page`).
//! `MADV_COLLAPSE` (Linux 6.1, mm/khugepaged.c, `madvise_collapse`) copies all of a block of 2 MiB
//! to a new huge page. No content changes, the other process keeps its pages, and memory may be in
//! use meanwhile: only threads that fault wait, for as long as one block takes.
//!
//! A block is collapsed if that is no loss: all of its pages are in memory, and at least half of
//! them belong to this process alone, so that memory grows by no more than what was copied already.
//! The kernel's own thread has the same limit for shared pages
//! (/sys/kernel/mm/transparent_hugepage/khugepaged/max_ptes_shared, 256), but looks at 4096 pages
//! every ten seconds, those of all processes together. A block of which pages were discarded stays
//! as it is: to collapse it would allocate them again.

use std::collections::VecDeque;
use std::fs;

use ebb_abi::{HUGE_PAGE_SIZE_BYTES, HUGE_PAGE_SIZE_PAGES, PAGE_SIZE_BYTES, Pfn};
use rustix::io::Errno;

use crate::pagemap::{PageState, Pagemap};
use crate::region::{HugePages, Region};
use crate::{Backing, GuestRam, GuestRange};

/// Pages of a block that must belong to this process alone.
const FEWEST_OWN_PAGES: usize = HUGE_PAGE_SIZE_PAGES as usize / 2;

/// Where the host says whether processes may have huge pages: for pages of 2 MiB (Linux 6.8), and
/// for those of all sizes.
const HOST_SETTINGS: [&str; 2] = [
    "/sys/kernel/mm/transparent_hugepage/hugepages-2048kB/enabled",
    "/sys/kernel/mm/transparent_hugepage/enabled",
];

/// Whether the host lets processes have huge pages. `MADV_COLLAPSE` makes them regardless.
pub(crate) fn allowed_by_host() -> bool {
    allowed_by(HOST_SETTINGS.iter().filter_map(|path| fs::read_to_string(path).ok()))
}

/// Whether the first of these settings that does not refer to the next one allows huge pages.
fn allowed_by(settings: impl Iterator<Item = String>) -> bool {
    let mut settings = settings.filter(|setting| !setting.contains("[inherit]"));
    settings.next().is_none_or(|setting| !setting.contains("[never]"))
}

/// What a [pass](Collapse::pass) has done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CollapsePass {
    /// Blocks that are huge now, with those that were huge before and had not been looked at.
    pub huge: usize,
    /// Blocks that the kernel has refused: their pages were in use, for example.
    pub refused: usize,
    /// Why it has ended.
    pub end: PassEnd,
}

/// Why a pass has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PassEnd {
    /// The round is over: all blocks were looked at once.
    Round,
    /// It was to end.
    Stopped,
    /// Blocks must stay as they are for now: discards are inhibited, or pages are merged.
    Held,
    /// The host, or the cgroup, has no memory for another huge page.
    NoMemory,
}

/// The blocks of guest memory that are not known to be huge.
#[derive(Debug)]
pub struct Collapse<'a> {
    ram: &'a GuestRam,
    pagemap: &'a Pagemap,
    /// The next one first.
    left: VecDeque<Block>,
    /// How many of them this round has not come to.
    ahead: usize,
}

/// Memory that one huge page can have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Block {
    address: usize,
    range: GuestRange,
}

/// What became of a block.
enum Verdict {
    Huge,
    NotYet,
    Refused,
    End(PassEnd),
}

impl GuestRam {
    /// Begins to make memory huge again, after a fork: all blocks of 2 MiB are to be looked at.
    ///
    /// # Errors
    /// Why that is not possible, or not wanted.
    pub fn collapse(&self) -> Result<Collapse<'_>, &'static str> {
        if self.backing() != Backing::Anonymous {
            return Err("its memory belongs to a file");
        }
        if self.huge_pages() == HugePages::Off {
            return Err("its pages are to be small");
        }
        if !self.huge_allowed {
            return Err("the host's setting is `never`");
        }
        if is_merging(self) {
            return Err("its pages are merged");
        }
        let pagemap = self.pagemap.as_ref().ok_or("/proc/self/pagemap cannot be read")?;
        let left: VecDeque<_> = self.regions().iter().flat_map(blocks_of).collect();
        let Some(first) = left.front() else { return Err("it has no block of 2 MiB") };
        // Without a length only the advice is checked (Linux mm/madvise.c, `do_madvise`).
        advise_collapse(first.address, 0).map_err(|_| "the kernel has no MADV_COLLAPSE")?;
        Ok(Collapse { ram: self, pagemap, left, ahead: 0 })
    }
}

#[cfg(feature = "merge")]
fn is_merging(ram: &GuestRam) -> bool {
    ram.merging.get().is_some()
}

#[cfg(not(feature = "merge"))]
fn is_merging(_without: &GuestRam) -> bool {
    false
}

impl Collapse<'_> {
    /// Number of blocks that are not known to be huge.
    pub fn left(&self) -> usize {
        self.left.len()
    }

    /// Goes on with the round, or begins another one: looks at each block that is left, and
    /// collapses those of which that is no loss. `is_over` is asked before each block; the next
    /// pass goes on there.
    ///
    /// Discards wait for at most one block. System calls: `pread64` and `madvise`.
    pub fn pass(&mut self, is_over: &dyn Fn() -> bool) -> CollapsePass {
        let mut pass = CollapsePass { huge: 0, refused: 0, end: PassEnd::Round };
        if self.ahead == 0 {
            self.ahead = self.left.len();
        }
        while self.ahead > 0 {
            if is_over() {
                pass.end = PassEnd::Stopped;
                break;
            }
            let Some(block) = self.left.pop_front() else { break };
            self.ahead -= 1;
            match self.look_at(block) {
                Verdict::Huge => pass.huge += 1,
                Verdict::NotYet => self.left.push_back(block),
                Verdict::Refused => {
                    pass.refused += 1;
                    self.left.push_back(block);
                }
                Verdict::End(end) => {
                    pass.end = end;
                    self.left.push_back(block);
                    break;
                }
            }
        }
        pass
    }

    fn look_at(&self, block: Block) -> Verdict {
        // Most blocks need no lock.
        if !self.is_worth(block) {
            return Verdict::NotYet;
        }
        // A page that is discarded between the look and the collapse would be allocated again.
        let inhibitors = self.ram.inhibitors().hold();
        // Of memory that a snapshot protects, or that arrives from elsewhere, nothing may change.
        if !inhibitors.is_empty() || is_merging(self.ram) {
            return Verdict::End(PassEnd::Held);
        }
        let extents = self.ram.lock_overlay();
        let is_mapped = |block: Block| {
            extents.as_ref().is_some_and(|extents| extents.mapped(block.range).next().is_some())
        };
        if is_mapped(block) || !self.is_worth(block) {
            return Verdict::NotYet;
        }
        match advise_collapse(block.address, HUGE_PAGE_SIZE_BYTES as usize) {
            Ok(()) => Verdict::Huge,
            // BUSY: the cgroup's limit.
            Err(Errno::NOMEM | Errno::BUSY) => Verdict::End(PassEnd::NoMemory),
            // AGAIN: pages are locked, or not in the kernel's lists yet. INVAL: none of them can
            // be written to without a fault, for example.
            Err(error) => {
                tracing::trace!("guest memory at {:#x}: {error}", block.address);
                Verdict::Refused
            }
        }
    }

    fn is_worth(&self, block: Block) -> bool {
        let states = self.pagemap.read(block.address, HUGE_PAGE_SIZE_PAGES as usize);
        states.is_ok_and(|states| is_worth(&states))
    }
}

/// Whether to collapse a block of these pages is no loss.
fn is_worth(states: &[PageState]) -> bool {
    states.iter().all(|state| state.is_private_in_memory() && !state.is_protected())
        && states.iter().filter(|state| state.is_exclusive()).count() >= FEWEST_OWN_PAGES
}

/// The whole blocks of a region. Its host and its guest-physical address are congruent.
fn blocks_of(region: &Region) -> impl Iterator<Item = Block> + use<> {
    let (start, end) = (region.start.0, region.start.0 + region.size_bytes);
    let host_address = region.host_address;
    let first = start.next_multiple_of(HUGE_PAGE_SIZE_BYTES);
    let whole = end.saturating_sub(first) / HUGE_PAGE_SIZE_BYTES;
    (0..whole).map(move |index| {
        let guest_address = first + index * HUGE_PAGE_SIZE_BYTES;
        Block {
            address: (host_address + (guest_address - start)) as usize,
            range: GuestRange::new(Pfn(guest_address / PAGE_SIZE_BYTES), HUGE_PAGE_SIZE_PAGES),
        }
    })
}

pub(crate) fn advise_collapse(address: usize, size_bytes: usize) -> Result<(), Errno> {
    // SAFETY: the range is guest memory, which is mapped as long as `GuestRam` lives; the advice
    // does not change its content.
    let result = unsafe { libc::madvise(address as *mut _, size_bytes, libc::MADV_COLLAPSE) };
    if result == 0 {
        return Ok(());
    }
    Err(Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::INVAL))
}

#[cfg(test)]
mod tests;
