//! Memory of a destination that checks each access.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use ebb_abi::{PAGE_SIZE_BYTES, PageRange, Pfn};

use crate::{BoxError, TargetMemory};

const PAGE: usize = PAGE_SIZE_BYTES as usize;

/// Memory of a destination: absent pages are zero and use no memory.
#[derive(Debug)]
pub struct TestTarget {
    regions: Vec<PageRange>,
    pages: Mutex<HashMap<u64, Box<[u8]>>>,
}

impl TestTarget {
    /// Fresh memory.
    pub fn new(regions: &[PageRange]) -> Self {
        Self { regions: regions.to_vec(), pages: Mutex::default() }
    }

    /// Copies the content of a page.
    pub fn read(&self, page: Pfn, bytes: &mut [u8]) {
        match self.pages().get(&page.0) {
            Some(content) => bytes.copy_from_slice(content),
            None => bytes.fill(0),
        }
    }

    /// Number of populated pages.
    pub fn held_pages(&self) -> u64 {
        self.pages().len() as u64
    }

    fn pages(&self) -> MutexGuard<'_, HashMap<u64, Box<[u8]>>> {
        self.pages.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Checks that the range is within a region: a write elsewhere would hit the monitor's own
    /// memory.
    fn check(&self, range: PageRange) {
        let inside = self.regions.iter().any(|region| region.intersection(range) == range);
        assert!(inside && !range.is_empty(), "{range} is not in one region of {:?}", self.regions);
    }

    fn remove(&self, range: PageRange) {
        self.check(range);
        let mut pages = self.pages();
        for page in range.start.0..range.end().0 {
            assert!(pages.remove(&page).is_some(), "page {page:#x} was never written");
        }
    }
}

impl TargetMemory for TestTarget {
    fn regions(&self) -> Vec<PageRange> {
        self.regions.clone()
    }

    fn write(&self, range: PageRange, bytes: &[u8]) -> Result<(), BoxError> {
        self.check(range);
        assert_eq!(bytes.len() as u64, range.size_bytes());
        let mut pages = self.pages();
        for (offset, content) in bytes.chunks_exact(PAGE).enumerate() {
            pages.insert(range.start.0 + offset as u64, content.into());
        }
        Ok(())
    }

    fn zero(&self, range: PageRange) -> Result<(), BoxError> {
        self.remove(range);
        Ok(())
    }

    fn discard(&self, range: PageRange) -> Result<(), BoxError> {
        self.remove(range);
        Ok(())
    }
}
