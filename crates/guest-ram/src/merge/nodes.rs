//! NUMA nodes of pages.
//!
//! The kernel reports the node of the page mapped at an address (move_pages(2)). A merged page that
//! has not been read since has nothing mapped in its place, but its stable page is on some node all
//! the same; so the kernel is queried at the address where the stable file is mapped for reading.

use std::io;
use std::ptr;
use std::sync::Arc;

use ebb_abi::Pfn;

use super::session::{MergeError, MergeSession, kernel};
use super::stable::Segment;
use crate::GuestRange;

/// Addresses at which pages are queried.
#[derive(Debug, Default)]
struct Places {
    /// One for each page; 0, where nothing is mapped, for pages that are not guest memory.
    addresses: Vec<usize>,
    /// Indexes of those that are stable pages.
    stable: Vec<usize>,
    /// The files from which these are mapped; they stay mapped meanwhile.
    segments: Vec<Arc<Segment>>,
}

impl MergeSession {
    /// Appends each page's NUMA node, for a merged page that of its stable page; `None` if it has
    /// none, or is not guest memory. If there is only one node, it is reported for all pages,
    /// whether or not they are present.
    ///
    /// # Errors
    /// [`MergeError::Kernel`] if the kernel refuses the query.
    pub fn nodes(&mut self, pages: &[Pfn], nodes: &mut Vec<Option<u32>>) -> Result<(), MergeError> {
        if let Some(node) = self.merging().only_node {
            let is_ours = |page: &Pfn| self.ram.host_address(GuestRange::new(*page, 1)).is_some();
            nodes.extend(pages.iter().map(|page| is_ours(page).then_some(node)));
            return Ok(());
        }
        self.ask_nodes(pages, nodes)
    }

    /// Whether the host has only one node with memory.
    pub fn is_on_one_node(&self) -> bool {
        self.merging().only_node.is_some()
    }

    /// As [`nodes`](Self::nodes), with any number of nodes.
    fn ask_nodes(&self, pages: &[Pfn], nodes: &mut Vec<Option<u32>>) -> Result<(), MergeError> {
        let failed = |source| {
            let start = pages.first().copied().unwrap_or_default();
            kernel("query the nodes of pages", GuestRange::new(start, pages.len() as u64), source)
        };
        let places = self.places(pages);
        let mut found = nodes_at(&places.addresses).map_err(failed)?;
        // Pages of a file can be removed from the page tables at any time; reading one maps it
        // again.
        let missing: Vec<usize> =
            places.stable.iter().copied().filter(|index| found[*index].is_none()).collect();
        if !missing.is_empty() {
            let addresses: Vec<usize> =
                missing.iter().map(|index| places.addresses[*index]).collect();
            for address in &addresses {
                // SAFETY: a page of a segment, which `places` keeps mapped, whose file cannot
                // become shorter. It may be written to concurrently: the value read is not used.
                unsafe { ptr::read_volatile(*address as *const u8) };
            }
            let again = nodes_at(&addresses).map_err(failed)?;
            missing.iter().zip(again).for_each(|(index, node)| found[*index] = node);
        }
        nodes.extend(found);
        Ok(())
    }

    /// Addresses for querying pages.
    fn places(&self, pages: &[Pfn]) -> Places {
        let mut places = Places::default();
        let overlaid = self.ram.lock_overlay();
        // Neighbours mostly belong to one segment.
        let mut last: Option<(u32, Option<Arc<Segment>>)> = None;
        for (index, page) in pages.iter().enumerate() {
            let own = self.ram.host_address(GuestRange::new(*page, 1)).unwrap_or(0);
            let slot = overlaid.as_ref().and_then(|overlaid| overlaid.share_of(*page));
            let stable = slot.and_then(|slot| {
                if last.as_ref().is_none_or(|(number, _)| *number != slot.segment) {
                    let segment = self.merging().segments.get(slot.segment);
                    places.segments.extend(segment.clone());
                    last = Some((slot.segment, segment));
                }
                last.as_ref()?.1.as_ref()?.address(slot.index, 1)
            });
            if stable.is_some() {
                places.stable.push(index);
            }
            places.addresses.push(stable.unwrap_or(own));
        }
        places
    }
}

/// The node of the page mapped at each address; `None` where none is.
fn nodes_at(addresses: &[usize]) -> io::Result<Vec<Option<u32>>> {
    let mut nodes = vec![-1_i32; addresses.len()];
    // SAFETY: without a list of nodes, move_pages moves nothing: it reads the given number of
    // addresses, and writes as many states; both arrays live until it returns.
    let result = unsafe {
        libc::syscall(
            libc::SYS_move_pages,
            0,
            addresses.len(),
            addresses.as_ptr(),
            ptr::null::<i32>(),
            nodes.as_mut_ptr(),
            0,
        )
    };
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(nodes.into_iter().map(|node| u32::try_from(node).ok()).collect())
}

#[cfg(test)]
mod tests {
    use ebb_abi::PAGE_SIZE_BYTES;
    use rustix::mm::{Advice, madvise};
    use vm_memory::{Bytes, GuestAddress};

    use super::*;
    use crate::merge::{MergeOutcome, MergeTarget, MergeUnavailable, StableMemory, StableSegments};
    use crate::{Backing, GuestRam, HugePages, Populate, RegionSpec};

    const PAGE: usize = PAGE_SIZE_BYTES as usize;

    /// Memory of 16 pages of which the first two are merged, and have not been read since; `None`
    /// if the kernel is too old.
    fn merged() -> Option<(MergeSession, StableMemory)> {
        let spec = RegionSpec {
            start: GuestAddress(0),
            size_bytes: 16 * PAGE_SIZE_BYTES,
            host_node: None,
        };
        let ram =
            GuestRam::new(&[spec], Backing::Anonymous, HugePages::Off, Populate::Lazy).unwrap();
        let ram = Arc::new(ram);
        let segments = StableSegments::new();
        match ram.enable_merging(Arc::clone(&segments)) {
            Err(error @ MergeUnavailable::OldKernel { .. }) => {
                eprintln!("not tested: {error}");
                return None;
            }
            result => result.unwrap(),
        }
        let mut session = MergeSession::new(Arc::clone(&ram)).unwrap();
        let mut stable = StableMemory::own(segments);
        let mut slots = Vec::new();
        stable.allocate(None, 2, &mut slots).unwrap();
        stable.write(slots[0], &[7; 2 * PAGE]).unwrap();
        ram.memory().write_slice(&[7; 3 * PAGE], GuestAddress(0)).unwrap();
        let pages: Vec<_> =
            (0..2).map(|page| (Pfn(page), MergeTarget::Slot(slots[page as usize]))).collect();
        let mut outcomes = Vec::new();
        session.replace(&pages, &mut outcomes).unwrap();
        assert_eq!(outcomes, [MergeOutcome::Done; 2]);
        Some((session, stable))
    }

    fn own_address(session: &MergeSession, page: u64) -> usize {
        session.ram.host_address(GuestRange::new(Pfn(page), 1)).unwrap()
    }

    #[test]
    fn a_merged_page_has_the_node_of_its_stable_page_whether_or_not_it_was_read() {
        let Some((session, _stable)) = merged() else { return };
        let here = nodes_at(&[own_address(&session, 2)]).unwrap()[0];
        assert!(here.is_some());
        assert_eq!(nodes_at(&[own_address(&session, 0)]).unwrap(), [None], "it has not been read");
        let mut nodes = Vec::new();
        session.ask_nodes(&[0, 1, 2, 9, 9999].map(Pfn), &mut nodes).unwrap();
        assert_eq!(nodes, [here, here, here, None, None]);
    }

    #[test]
    fn a_stable_page_that_is_not_in_the_page_tables_is_mapped() {
        let Some((session, _stable)) = merged() else { return };
        let places = session.places(&[Pfn(0), Pfn(1), Pfn(2)]);
        assert_eq!(places.stable, [0, 1]);
        assert_eq!(places.addresses[2], own_address(&session, 2));
        // SAFETY: two pages of a shared mapping of a file: they are removed from the page tables,
        // and nothing is lost.
        unsafe { madvise(places.addresses[0] as *mut _, 2 * PAGE, Advice::LinuxDontNeed) }.unwrap();
        assert_eq!(nodes_at(&places.addresses[..2]).unwrap(), [None; 2]);
        let mut nodes = Vec::new();
        session.ask_nodes(&[Pfn(0), Pfn(1)], &mut nodes).unwrap();
        assert!(nodes.iter().all(Option::is_some), "{nodes:?}");
    }

    #[test]
    fn a_page_without_a_share_is_queried_at_its_own_address() {
        let Some((mut session, _stable)) = merged() else { return };
        session.unmerge(GuestRange::new(Pfn(0), 1), &mut Vec::new()).unwrap();
        let places = session.places(&[Pfn(0), Pfn(1)]);
        assert_eq!(places.addresses[0], own_address(&session, 0));
        assert_eq!(places.stable, [1]);
    }
}
