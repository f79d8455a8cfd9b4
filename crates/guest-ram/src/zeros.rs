//! Discards pages that the guest has accessed but that contain only zeros.
//!
//! A guest that accesses one byte of a huge page makes the host allocate 2 MiB; kernels clear large
//! areas that they never use (bounce buffers, hash tables). Such pages read the same after a
//! discard.

use ebb_abi::{HUGE_PAGE_SIZE_PAGES, PAGE_SIZE_BYTES, PageRange, Pfn};
use rustix::mm::{Advice, madvise};
use vm_memory::{Bytes, GuestAddress};

use crate::pagemap::{is_in_memory, mincore};
use crate::{DiscardOutcome, GuestRam, GuestRange, RamError};

/// Minimum number of zero pages in a block of 2 MiB for splitting it, if not all of it is zero: a
/// huge page that is mostly used serves the guest better whole.
const MIN_PAGES_TO_SPLIT: usize = 64;

const PAGE: usize = PAGE_SIZE_BYTES as usize;

/// Minimum length of a run of zero pages in the middle of a mapped file to justify two more
/// mappings, see [`overlay`](crate::overlay).
const MIN_PAGES_TO_CUT: u64 = 16;

/// Result of a search for zero pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ZeroScan {
    /// Populated bytes that were scanned.
    pub scanned_bytes: u64,
    /// Bytes of them that were zero and were discarded.
    pub returned_bytes: u64,
    /// Result of the discards.
    pub outcome: DiscardOutcome,
}

impl GuestRam {
    /// Discards the pages of `range` that the host holds and that are all zero. Pages that the host
    /// does not hold are not touched.
    ///
    /// The range must not be written to concurrently: vCPUs and devices must be stopped, or a write
    /// between scan and discard would be lost.
    ///
    /// # Errors
    /// [`RamError::Resident`] if the host does not report the populated pages,
    /// [`RamError::Discard`] if it refuses to discard pages.
    pub fn discard_zeros(&self, range: GuestRange) -> Result<ZeroScan, RamError> {
        let mut scan = ZeroScan::default();
        let mut zeros = Vec::new();
        let parts: Vec<_> = self.clip(range).collect();
        for part in parts {
            let mut start = part.start.0;
            while start < part.end().0 {
                let end = (start + 1).next_multiple_of(HUGE_PAGE_SIZE_PAGES).min(part.end().0);
                self.scan_block(PageRange::new(Pfn(start), end - start), &mut scan, &mut zeros)?;
                start = end;
            }
        }
        scan.outcome = self.discard(&zeros)?;
        scan.returned_bytes = scan.outcome.bytes;
        Ok(scan)
    }

    /// Scans the pages of one block of at most 2 MiB.
    fn scan_block(
        &self,
        block: GuestRange,
        scan: &mut ZeroScan,
        zeros: &mut Vec<GuestRange>,
    ) -> Result<(), RamError> {
        let Some(address) = self.host_address(block) else { return Ok(()) };
        let mut states = [0u8; HUGE_PAGE_SIZE_PAGES as usize];
        let states = &mut states[..block.pages as usize];
        mincore(address, states).map_err(|source| RamError::Resident { source })?;
        let file_mapped = self.file_mapped(block);
        if !file_mapped.is_empty() && !self.only_private(address, states) {
            return Ok(());
        }
        let resident_pages = states.iter().filter(|state| is_in_memory(**state)).count();
        if resident_pages == 0 {
            return Ok(());
        }
        scan.scanned_bytes += (resident_pages * PAGE) as u64;
        let found: Vec<u64> = (0..block.pages)
            .filter(|&page| {
                is_in_memory(states[page as usize]) && self.is_zero(Pfn(block.start.0 + page))
            })
            .collect();
        let whole = found.len() == resident_pages && resident_pages == block.pages as usize;
        if !whole {
            if found.len() < MIN_PAGES_TO_SPLIT {
                return Ok(());
            }
            if file_mapped.is_empty() {
                split_huge_page(address + found[0] as usize * PAGE);
            }
        }
        let mut runs: Vec<GuestRange> = Vec::new();
        for page in found {
            let page = PageRange::new(Pfn(block.start.0 + page), 1);
            match runs.last_mut() {
                Some(last) if last.end() == page.start => last.pages += 1,
                _ => runs.push(page),
            }
        }
        if !file_mapped.is_empty() {
            let touches_file = |run: &GuestRange| {
                file_mapped.iter().any(|(part, _)| !part.intersection(*run).is_empty())
            };
            runs.retain(|run| run.pages >= MIN_PAGES_TO_CUT || !touches_file(run));
        }
        zeros.append(&mut runs);
        Ok(())
    }

    /// Restricts `states`, mincore's result for a block with pages of the file that the memory was
    /// restored from, or with stable pages, to pages that belong to this memory alone. For pages
    /// that the guest has not written to, mincore reports whether they are in the page cache, and
    /// there is nothing to discard. Returns false if the kernel does not report the private pages.
    fn only_private(&self, address: usize, states: &mut [u8]) -> bool {
        let private =
            self.pagemap.as_ref().and_then(|pagemap| pagemap.read(address, states.len()).ok());
        let Some(private) = private else { return false };
        for (state, private) in states.iter_mut().zip(private) {
            *state = u8::from(private.is_private_in_memory());
        }
        true
    }

    fn is_zero(&self, pfn: Pfn) -> bool {
        // Most pages in use differ from zero in their first bytes.
        const HEAD: usize = 64;
        let address = GuestAddress(pfn.address());
        let mut head = [0u8; HEAD];
        let mut page = [0u8; PAGE];
        self.memory().read_slice(&mut head, address).is_ok()
            && head == [0; HEAD]
            && self.memory().read_slice(&mut page, address).is_ok()
            && page == [0; PAGE]
    }
}

/// Makes the host split a transparent huge page. Discarding some of its pages alone would only
/// unmap them: the memory would stay in use until the host is short of it. Advice for a part of a
/// huge page splits it (Linux mm/madvise.c, `madvise_cold_or_pageout_pte_range`).
fn split_huge_page(page_address: usize) {
    // SAFETY: the page lies inside a live mapping of the caller's; this advice changes no content.
    let result = unsafe { madvise(page_address as *mut std::ffi::c_void, PAGE, Advice::LinuxCold) };
    if let Err(error) = result {
        tracing::debug!("a huge page was not split: {error}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Backing, HugePages, Populate, RegionSpec};

    const BLOCK_BYTES: u64 = HUGE_PAGE_SIZE_PAGES * PAGE_SIZE_BYTES;

    fn ram(backing: Backing) -> GuestRam {
        let spec =
            RegionSpec { start: GuestAddress(0), size_bytes: 8 * BLOCK_BYTES, host_node: None };
        GuestRam::new(&[spec], backing, HugePages::On, Populate::Lazy).unwrap()
    }

    fn all(ram: &GuestRam) -> GuestRange {
        ram.regions()[0].pages()
    }

    #[test]
    fn zero_pages_are_discarded_and_others_stay() {
        for backing in [Backing::Anonymous, Backing::Memfd] {
            let ram = ram(backing);
            // Block 0: written and cleared again. Block 1: one byte in the last page. Block 2:
            // every page in use.
            ram.memory().write_slice(&vec![1; BLOCK_BYTES as usize], GuestAddress(0)).unwrap();
            ram.memory().write_slice(&vec![0; BLOCK_BYTES as usize], GuestAddress(0)).unwrap();
            ram.memory()
                .write_slice(&vec![0; BLOCK_BYTES as usize], GuestAddress(BLOCK_BYTES))
                .unwrap();
            ram.memory().write_obj(7u8, GuestAddress(2 * BLOCK_BYTES - 1)).unwrap();
            let used = vec![3; BLOCK_BYTES as usize];
            ram.memory().write_slice(&used, GuestAddress(2 * BLOCK_BYTES)).unwrap();

            let scan = ram.discard_zeros(all(&ram)).unwrap();
            assert_eq!(scan.scanned_bytes, 3 * BLOCK_BYTES, "{backing}");
            assert_eq!(scan.returned_bytes, 2 * BLOCK_BYTES - PAGE_SIZE_BYTES, "{backing}");
            assert_eq!(ram.resident_bytes().unwrap(), BLOCK_BYTES + PAGE_SIZE_BYTES, "{backing}");
            let mut bytes = vec![9; BLOCK_BYTES as usize];
            ram.memory().read_slice(&mut bytes, GuestAddress(2 * BLOCK_BYTES)).unwrap();
            assert_eq!(bytes, used);
            assert_eq!(ram.memory().read_obj::<u8>(GuestAddress(2 * BLOCK_BYTES - 1)).unwrap(), 7);
            assert_eq!(ram.memory().read_obj::<u8>(GuestAddress(12)).unwrap(), 0);
        }
    }

    #[test]
    fn memory_that_was_never_touched_stays_so() {
        let ram = ram(Backing::Anonymous);
        assert_eq!(ram.discard_zeros(all(&ram)).unwrap(), ZeroScan::default());
        assert_eq!(ram.resident_bytes().unwrap(), 0);
    }

    #[test]
    fn a_huge_page_with_few_zeros_stays_whole() {
        let ram = ram(Backing::Anonymous);
        ram.memory().write_slice(&vec![1; BLOCK_BYTES as usize], GuestAddress(0)).unwrap();
        let few = (MIN_PAGES_TO_SPLIT - 1) * PAGE;
        ram.memory().write_slice(&vec![0; few], GuestAddress(0)).unwrap();
        assert_eq!(ram.discard_zeros(all(&ram)).unwrap().returned_bytes, 0);
        ram.memory().write_slice(&vec![0; few + PAGE], GuestAddress(0)).unwrap();
        assert_eq!(ram.discard_zeros(all(&ram)).unwrap().returned_bytes, (few + PAGE) as u64);
    }
}
