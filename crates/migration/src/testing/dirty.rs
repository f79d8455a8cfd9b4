//! A dirty log for vCPUs that never write.

use ebb_abi::PageRange;
use ebb_guest_ram::PageBitmap;

use crate::{BoxError, DirtySource};

/// Reports no pages: the guest is idle, or writes through the monitor's memory, which has its own
/// log.
#[derive(Debug)]
pub struct NoWrites;

impl DirtySource for NoWrites {
    fn arm(&mut self) -> Result<(), BoxError> {
        Ok(())
    }

    fn sync(&mut self, _found: &mut PageBitmap) -> Result<(), BoxError> {
        Ok(())
    }

    fn clear(&mut self, _range: PageRange) -> Result<(), BoxError> {
        Ok(())
    }

    fn disarm(&mut self) -> Result<(), BoxError> {
        Ok(())
    }
}
