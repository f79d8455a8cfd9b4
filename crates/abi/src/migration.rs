//! What is on a data stream of a live migration: rounds of records.
//!
//! All numbers are little-endian. A record is a header of [`HEADER_BYTES`]; the content of its
//! pages follows a [`Record::Data`], and an [`EndOfRound`] a [`Record::EndOfRound`]:
//!
//! | offset | size | |
//! | --- | --- | --- |
//! | 0 | 4 | kind: 1 zero, 2 discard, 3 data, 4 end of round, 5 end of the last round |
//! | 4 | 4 | number of pages; 0 at the end of a round |
//! | 8 | 8 | number of the first page; at the end of a round, the round's number from 0 on |
//!
//! A page is named at most once in a round, all streams together. Each stream ends each round, and
//! nothing of the next round may be applied before all streams have ended this one.

use crate::{PAGE_SHIFT, PageRange, Pfn};

/// Size of a record's header in bytes.
pub const HEADER_BYTES: usize = 16;

/// Size of an [`EndOfRound`] in bytes.
pub const END_OF_ROUND_BYTES: usize = 16;

/// Pages whose content one record carries at most: 2 MiB of them.
pub const MAX_DATA_PAGES: u32 = 512;

/// Page numbers end here: the address space of 64 bits.
const PFN_LIMIT: u64 = 1 << (64 - PAGE_SHIFT);

/// Whether the guest runs on after a round.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RoundKind {
    /// Another round follows.
    More,
    /// The guest stands still and this was all.
    Last,
}

/// A record's header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Record {
    /// These pages are all zero.
    Zero(PageRange),
    /// The source has no memory for these pages; they read as zeros.
    Discard(PageRange),
    /// The content of these pages, at most [`MAX_DATA_PAGES`], follows.
    Data(PageRange),
    /// The stream has no more in this round. An [`EndOfRound`] follows.
    EndOfRound {
        /// Number of the round, from 0.
        round: u32,
        /// Whether it was the last.
        kind: RoundKind,
    },
}

const ZERO: u32 = 1;
const DISCARD: u32 = 2;
const DATA: u32 = 3;
const END_OF_ROUND: u32 = 4;
const END_OF_LAST_ROUND: u32 = 5;

/// Why a header was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RecordError {
    /// No record has this kind.
    Kind(u32),
    /// No pages, more than there can be, or more than a record may carry.
    Pages {
        /// Number of the first page.
        start: u64,
        /// How many.
        pages: u32,
    },
    /// A round's end that names pages, or a round's number that cannot be.
    Round(u64),
}

impl core::error::Error for RecordError {}

impl core::fmt::Display for RecordError {
    fn fmt(&self, formatter: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        match self {
            Self::Kind(kind) => {
                write!(formatter, "a record of kind {kind}, which there is none of")
            }
            Self::Pages { start, pages } => {
                write!(
                    formatter,
                    "a record of {pages} pages from page {start:#x} on, which cannot be"
                )
            }
            Self::Round(round) => write!(formatter, "an end of round {round} that cannot be"),
        }
    }
}

impl Record {
    /// As bytes. A range must have at least one page and at most `u32::MAX`.
    pub fn to_bytes(self) -> [u8; HEADER_BYTES] {
        let (kind, pages, start) = match self {
            Self::Zero(range) => (ZERO, range.pages as u32, range.start.0),
            Self::Discard(range) => (DISCARD, range.pages as u32, range.start.0),
            Self::Data(range) => (DATA, range.pages as u32, range.start.0),
            Self::EndOfRound { round, kind: RoundKind::More } => (END_OF_ROUND, 0, round.into()),
            Self::EndOfRound { round, kind: RoundKind::Last } => {
                (END_OF_LAST_ROUND, 0, round.into())
            }
        };
        let mut bytes = [0; HEADER_BYTES];
        bytes[..4].copy_from_slice(&kind.to_le_bytes());
        bytes[4..8].copy_from_slice(&pages.to_le_bytes());
        bytes[8..].copy_from_slice(&start.to_le_bytes());
        bytes
    }

    /// From bytes. Whether the pages are the guest's is for the caller to check.
    ///
    /// # Errors
    /// [`RecordError`] for a header that [`to_bytes`](Self::to_bytes) does not make.
    pub fn from_bytes(bytes: &[u8; HEADER_BYTES]) -> Result<Self, RecordError> {
        let (kind, pages, start) = (word(bytes, 0), word(bytes, 4), long(bytes, 8));
        let range = |limit: u32| {
            let end = start.checked_add(pages.into()).filter(|end| *end <= PFN_LIMIT);
            match end {
                Some(_) if (1..=limit).contains(&pages) => {
                    Ok(PageRange::new(Pfn(start), pages.into()))
                }
                _ => Err(RecordError::Pages { start, pages }),
            }
        };
        let end = |kind| {
            let round = u32::try_from(start)
                .ok()
                .filter(|_| pages == 0)
                .ok_or(RecordError::Round(start))?;
            Ok(Self::EndOfRound { round, kind })
        };
        match kind {
            ZERO => range(u32::MAX).map(Self::Zero),
            DISCARD => range(u32::MAX).map(Self::Discard),
            DATA => range(MAX_DATA_PAGES).map(Self::Data),
            END_OF_ROUND => end(RoundKind::More),
            END_OF_LAST_ROUND => end(RoundKind::Last),
            kind => Err(RecordError::Kind(kind)),
        }
    }
}

/// What follows the header of a round's end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EndOfRound {
    /// Records of this stream in this round before its end.
    pub records: u64,
    /// XXH3 (64 bits, seed 0) over all bytes of this stream in this round up to here: records,
    /// content, and the header and the number of records of its end.
    pub checksum: u64,
}

impl EndOfRound {
    /// As bytes.
    pub fn to_bytes(self) -> [u8; END_OF_ROUND_BYTES] {
        let mut bytes = [0; END_OF_ROUND_BYTES];
        bytes[..8].copy_from_slice(&self.records.to_le_bytes());
        bytes[8..].copy_from_slice(&self.checksum.to_le_bytes());
        bytes
    }

    /// From bytes.
    pub fn from_bytes(bytes: &[u8; END_OF_ROUND_BYTES]) -> Self {
        Self { records: long(bytes, 0), checksum: long(bytes, 8) }
    }

    /// How many of its bytes the checksum covers.
    pub const CHECKED_BYTES: usize = 8;
}

/// The number of 4 bytes at `offset`, which with them lies inside `bytes`.
fn word(bytes: &[u8], offset: usize) -> u32 {
    u32::from_le_bytes(core::array::from_fn(|index| bytes[offset + index]))
}

/// The number of 8 bytes at `offset`, which with them lies inside `bytes`.
fn long(bytes: &[u8], offset: usize) -> u64 {
    u64::from_le_bytes(core::array::from_fn(|index| bytes[offset + index]))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn range(start: u64, pages: u64) -> PageRange {
        PageRange::new(Pfn(start), pages)
    }

    #[test]
    fn a_record_is_these_bytes() {
        let bytes = [3, 0, 0, 0, 0, 2, 0, 0, 0x21, 0x43, 0, 0, 0, 0, 0, 0];
        assert_eq!(Record::Data(range(0x4321, 512)).to_bytes(), bytes);
        let end = Record::EndOfRound { round: 7, kind: RoundKind::Last }.to_bytes();
        assert_eq!(end, [5, 0, 0, 0, 0, 0, 0, 0, 7, 0, 0, 0, 0, 0, 0, 0]);
    }

    #[test]
    fn records_that_cannot_be_are_refused() {
        let refused = |record: Record| Record::from_bytes(&record.to_bytes()).unwrap_err();
        assert_eq!(refused(Record::Zero(range(5, 0))), RecordError::Pages { start: 5, pages: 0 });
        assert_eq!(
            refused(Record::Data(range(0, 513))),
            RecordError::Pages { start: 0, pages: 513 }
        );
        let last = PFN_LIMIT - 1;
        assert_eq!(
            refused(Record::Discard(range(last, 2))),
            RecordError::Pages { start: last, pages: 2 }
        );
        let all = Record::Zero(range(last, 1));
        assert_eq!(Record::from_bytes(&all.to_bytes()), Ok(all));
        assert_eq!(Record::from_bytes(&[6; 16]), Err(RecordError::Kind(0x0606_0606)));
        let mut end = Record::EndOfRound { round: 1, kind: RoundKind::More }.to_bytes();
        end[4] = 1;
        assert_eq!(Record::from_bytes(&end), Err(RecordError::Round(1)));
        end[4] = 0;
        end[15] = 1;
        assert_eq!(Record::from_bytes(&end), Err(RecordError::Round(1 << 56 | 1)));
    }

    proptest! {
        /// Any bytes are refused, or are the bytes of the record that they make.
        #[test]
        fn what_is_understood_is_what_was_said(
            kind in prop_oneof![0..7_u32, any::<u32>()],
            pages in prop_oneof![0..600_u32, any::<u32>()],
            start in prop_oneof![0..9_u64, any::<u64>(), PFN_LIMIT - 9..PFN_LIMIT + 9],
        ) {
            let mut bytes = [0; HEADER_BYTES];
            bytes[..4].copy_from_slice(&kind.to_le_bytes());
            bytes[4..8].copy_from_slice(&pages.to_le_bytes());
            bytes[8..].copy_from_slice(&start.to_le_bytes());
            if let Ok(record) = Record::from_bytes(&bytes) {
                prop_assert_eq!(record.to_bytes(), bytes);
            }
        }

        #[test]
        fn ends_of_rounds_survive(records: u64, checksum: u64) {
            let end = EndOfRound { records, checksum };
            prop_assert_eq!(EndOfRound::from_bytes(&end.to_bytes()), end);
        }
    }
}
