//! Page frame numbers and ranges.

use core::fmt;

use super::header::field;
use super::{PFN_LIMIT, RANGE_BYTES};
use crate::balloon::PFN_BYTES;
use crate::{PageRange, Pfn};

/// Iterator over the page frame numbers of a payload. Bytes after the last whole number are
/// ignored.
#[derive(Clone, Debug)]
pub struct Pfns<'a>(&'a [[u8; PFN_BYTES]]);

impl<'a> Pfns<'a> {
    /// The numbers in `bytes`.
    pub fn new(bytes: &'a [u8]) -> Self {
        Self(bytes.as_chunks().0)
    }
}

impl Iterator for Pfns<'_> {
    type Item = Pfn;

    fn next(&mut self) -> Option<Pfn> {
        let (first, rest) = self.0.split_first()?;
        self.0 = rest;
        Some(Pfn::from(u32::from_le_bytes(*first)))
    }
}

/// Reason why a range is invalid.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RangeError {
    /// It is empty.
    Empty {
        /// Its first page.
        start: Pfn,
    },
    /// It ends beyond the address space.
    TooLong {
        /// Its first page.
        start: Pfn,
        /// Its length in pages.
        pages: u64,
    },
}

impl fmt::Display for RangeError {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Empty { start } => write!(formatter, "empty range at {start}"),
            Self::TooLong { start, pages } => {
                write!(formatter, "range of {pages} pages at {start} ends beyond the address space")
            }
        }
    }
}

impl core::error::Error for RangeError {}

/// Iterator over the ranges of a payload. Bytes after the last whole entry are ignored.
#[derive(Clone, Debug)]
pub struct Ranges<'a>(&'a [[u8; RANGE_BYTES]]);

impl<'a> Ranges<'a> {
    /// The ranges in `bytes`.
    pub fn new(bytes: &'a [u8]) -> Self {
        Self(bytes.as_chunks().0)
    }
}

impl Iterator for Ranges<'_> {
    type Item = Result<PageRange, RangeError>;

    fn next(&mut self) -> Option<Self::Item> {
        let (first, rest) = self.0.split_first()?;
        self.0 = rest;
        let start = Pfn(u64::from_le_bytes(field(first, 0)));
        let pages = u64::from_le_bytes(field(first, 8));
        Some(match start.0.checked_add(pages) {
            _ if pages == 0 => Err(RangeError::Empty { start }),
            Some(end) if end <= PFN_LIMIT => Ok(PageRange::new(start, pages)),
            _ => Err(RangeError::TooLong { start, pages }),
        })
    }
}

/// Encodes a range: first page, then number of pages.
pub fn encode_range(range: PageRange) -> [u8; RANGE_BYTES] {
    let mut bytes = [0; RANGE_BYTES];
    bytes[..8].copy_from_slice(&range.start.0.to_le_bytes());
    bytes[8..].copy_from_slice(&range.pages.to_le_bytes());
    bytes
}
