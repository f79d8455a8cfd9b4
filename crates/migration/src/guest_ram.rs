//! [`GuestRam`] as the memory of a source and of a destination.

use std::sync::Arc;

use ebb_abi::{PAGE_SIZE_BYTES, PageRange};
use ebb_guest_ram::{GuestRam, PageBitmap};

use crate::{BoxError, DirtySource, SourceMemory, TargetMemory};

/// A dirty source for writes of vCPUs, combined with the memory's log of the monitor's own writes
/// and discards.
///
/// That log is marked after a write or discard is done, and is consumed as it is read: a write that
/// is not yet in the log during one sync is found by the next one, and its page is read again.
#[derive(Debug)]
pub struct WithWriteLog<D> {
    vcpus: D,
    ram: Arc<GuestRam>,
}

impl<D: DirtySource> WithWriteLog<D> {
    /// Combines the source for vCPUs with the log of `ram`.
    pub fn new(vcpus: D, ram: Arc<GuestRam>) -> Self {
        Self { vcpus, ram }
    }
}

impl<D: DirtySource> DirtySource for WithWriteLog<D> {
    fn arm(&mut self) -> Result<(), BoxError> {
        self.ram.start_write_log()?;
        self.vcpus.arm()
    }

    fn sync(&mut self, found: &mut PageBitmap) -> Result<(), BoxError> {
        self.vcpus.sync(found)?;
        self.ram.take_write_log(found);
        Ok(())
    }

    fn clear(&mut self, range: PageRange) -> Result<(), BoxError> {
        self.vcpus.clear(range)
    }

    fn clear_all(&mut self, pages: &PageBitmap) -> Result<(), BoxError> {
        self.vcpus.clear_all(pages)
    }

    fn disarm(&mut self) -> Result<(), BoxError> {
        self.ram.stop_write_log();
        self.vcpus.disarm()
    }
}

impl SourceMemory for GuestRam {
    fn regions(&self) -> Vec<PageRange> {
        self.page_ranges()
    }

    fn held(&self, range: PageRange, held: &mut Vec<PageRange>) -> Result<(), BoxError> {
        Ok(self.populated_ranges(range, held)?)
    }

    fn read(&self, range: PageRange, bytes: &mut [u8]) -> Result<(), BoxError> {
        Ok(self.read_pages(range, bytes)?)
    }
}

impl TargetMemory for GuestRam {
    fn regions(&self) -> Vec<PageRange> {
        self.page_ranges()
    }

    fn write(&self, range: PageRange, bytes: &[u8]) -> Result<(), BoxError> {
        Ok(self.write_pages(range, bytes)?)
    }

    /// Discards the pages: zeros need no memory.
    fn zero(&self, range: PageRange) -> Result<(), BoxError> {
        TargetMemory::discard(self, range)
    }

    fn discard(&self, range: PageRange) -> Result<(), BoxError> {
        let outcome = GuestRam::discard(self, &[range])?;
        if outcome.bytes < range.size_bytes() {
            // Part of a huge page that can only be discarded as a whole, or discarding is not
            // permitted now.
            let zeros = vec![0; PAGE_SIZE_BYTES as usize];
            for page in range.start.0..range.end().0 {
                self.write_pages(PageRange::new(ebb_abi::Pfn(page), 1), &zeros)?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::NoWrites;
    use ebb_abi::Pfn;
    use ebb_guest_ram::{Backing, HugePages, InhibitReason, Populate, RegionSpec};
    use vm_memory::GuestAddress;

    fn ram(backing: Backing) -> GuestRam {
        let spec = RegionSpec { start: GuestAddress(0), size_bytes: 4 << 20, host_node: None };
        GuestRam::new(&[spec], backing, HugePages::Off, Populate::Lazy).unwrap()
    }

    #[test]
    fn pages_are_populated_when_written_and_not_after_a_discard() {
        for backing in [Backing::Anonymous, Backing::Memfd] {
            let ram = ram(backing);
            let (range, content) = (PageRange::new(Pfn(5), 3), vec![7; 3 * 4096]);
            ram.write(range, &content).unwrap();
            let mut back = vec![0; content.len()];
            ram.read(range, &mut back).unwrap();
            assert_eq!(back, content);
            TargetMemory::discard(&ram, PageRange::new(Pfn(6), 1)).unwrap();
            let mut held = Vec::new();
            ram.held(PageRange::new(Pfn(0), 1024), &mut held).unwrap();
            assert_eq!(held, [PageRange::new(Pfn(5), 1), PageRange::new(Pfn(7), 1)], "{backing}");
        }
    }

    #[test]
    fn pages_that_cannot_be_discarded_are_cleared() {
        let ram = ram(Backing::Anonymous);
        let range = PageRange::new(Pfn(9), 2);
        ram.write(range, &[1; 2 * 4096]).unwrap();
        let _guard = ram.inhibit_discard(InhibitReason::PinnedMemory);
        ram.zero(range).unwrap();
        let mut back = vec![1; 2 * 4096];
        ram.read(range, &mut back).unwrap();
        assert_eq!(back, vec![0; 2 * 4096]);
    }

    #[test]
    fn changes_by_the_monitor_are_found_once() {
        let ram = Arc::new(ram(Backing::Anonymous));
        let mut dirty = WithWriteLog::new(NoWrites, Arc::clone(&ram));
        ram.write(PageRange::new(Pfn(1), 1), &[1; 4096]).unwrap();
        dirty.arm().unwrap();
        ram.write(PageRange::new(Pfn(2), 1), &[1; 4096]).unwrap();
        GuestRam::discard(&ram, &[PageRange::new(Pfn(1), 1)]).unwrap();
        let sync = |dirty: &mut WithWriteLog<NoWrites>| {
            let mut found = PageBitmap::new(&ram.page_ranges());
            dirty.sync(&mut found).unwrap();
            found.ranges().collect::<Vec<_>>()
        };
        assert_eq!(sync(&mut dirty), [PageRange::new(Pfn(1), 2)]);
        assert_eq!(sync(&mut dirty), []);
        dirty.disarm().unwrap();
        ram.write(PageRange::new(Pfn(3), 1), &[1; 4096]).unwrap();
        assert_eq!(sync(&mut dirty), []);
    }
}
