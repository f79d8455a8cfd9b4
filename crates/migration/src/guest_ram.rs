//! The monitor's guest memory as a source.

use std::sync::Arc;

use ebb_abi::PageRange;
use ebb_guest_ram::{GuestRam, PageSet};

use crate::{BoxError, DirtySource};

/// A dirty source for what vCPUs write, together with the memory's log of what the monitor itself writes and
/// discards.
///
/// That log is marked when a write or discard is done, and taken as it is read: a write that is not yet in the log at a
/// look at it is found by the next one, and its page is read again.
#[derive(Debug)]
pub struct WithWriteLog<D> {
    vcpus: D,
    ram: Arc<GuestRam>,
}

impl<D: DirtySource> WithWriteLog<D> {
    /// Joins both.
    pub fn new(vcpus: D, ram: Arc<GuestRam>) -> Self {
        Self { vcpus, ram }
    }
}

impl<D: DirtySource> DirtySource for WithWriteLog<D> {
    fn arm(&mut self) -> Result<(), BoxError> {
        self.ram.start_write_log()?;
        self.vcpus.arm()
    }

    fn sync(&mut self, found: &mut PageSet) -> Result<(), BoxError> {
        self.vcpus.sync(found)?;
        self.ram.take_write_log(found);
        Ok(())
    }

    fn clear(&mut self, range: PageRange) -> Result<(), BoxError> {
        self.vcpus.clear(range)
    }

    fn clear_all(&mut self, pages: &PageSet) -> Result<(), BoxError> {
        self.vcpus.clear_all(pages)
    }

    fn disarm(&mut self) -> Result<(), BoxError> {
        self.ram.stop_write_log();
        self.vcpus.disarm()
    }
}
