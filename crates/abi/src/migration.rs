//! Format of the data streams of a live migration: rounds of records.
//!
//! All numbers are little-endian. A record is a header of [`HEADER_BYTES`]. A [`Record::Data`] is
//! followed by the content of its pages, a [`Record::EndOfRound`] by an [`EndOfRound`].
//!
//! | offset | size | |
//! | --- | --- | --- |
//! | 0 | 4 | kind: 1 zero, 2 discard, 3 data, 4 end of round, 5 end of the last round |
//! | 4 | 4 | number of pages; 0 at the end of a round |
//! | 8 | 8 | number of the first page; at the end of a round, the round's number, from 0 |
//!
//! A page occurs at most once in a round, over all streams. Each stream ends each round, and no
//! record of the next round may be applied before all streams have ended the current one.

use crate::{PAGE_SHIFT, PageRange, Pfn};

/// Size of a record header in bytes.
pub const HEADER_BYTES: usize = 16;

/// Size of an [`EndOfRound`] in bytes.
pub const END_OF_ROUND_BYTES: usize = 16;

/// Maximum number of pages whose content one record carries: 2 MiB.
pub const MAX_DATA_PAGES: u32 = 512;

/// First page frame number beyond the 64-bit address space.
const PFN_LIMIT: u64 = 1 << (64 - PAGE_SHIFT);

/// Whether another round follows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RoundKind {
    /// Another round follows.
    More,
    /// The guest is paused and all memory has been sent.
    Last,
}

/// A record header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Record {
    /// These pages are all zero.
    Zero(PageRange),
    /// The source has no memory for these pages; they read as zeros.
    Discard(PageRange),
    /// The content of these pages, at most [`MAX_DATA_PAGES`], follows.
    Data(PageRange),
    /// The stream has no more records in this round. An [`EndOfRound`] follows.
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

/// Reason why a header is invalid.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RecordError {
    /// Unknown kind.
    Kind(u32),
    /// No pages, pages beyond the address space, or more pages than a record may carry.
    Pages {
        /// Number of the first page.
        start: u64,
        /// Number of pages.
        pages: u32,
    },
    /// An end of a round that has pages, or an invalid round number.
    Round(u64),
}

impl core::error::Error for RecordError {}

impl core::fmt::Display for RecordError {
    fn fmt(&self, formatter: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        match self {
            Self::Kind(kind) => {
                write!(formatter, "a record of unknown kind {kind}")
            }
            Self::Pages { start, pages } => {
                write!(formatter, "an invalid record of {pages} pages from page {start:#x} on")
            }
            Self::Round(round) => write!(formatter, "an invalid end of round {round}"),
        }
    }
}

impl Record {
    /// Encodes the header. A range must have between 1 and `u32::MAX` pages.
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

    /// Decodes a header. The caller must check that the pages belong to the guest.
    ///
    /// # Errors
    /// [`RecordError`] for a header that [`to_bytes`](Self::to_bytes) does not produce.
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

/// Trailer of a round, which follows a [`Record::EndOfRound`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EndOfRound {
    /// Number of records of this stream in this round, without its end.
    pub records: u64,
    /// XXH3 (64 bits, seed 0) over all preceding bytes of this stream in this round: records,
    /// content, and the header and the number of records of its end.
    pub checksum: u64,
}

impl EndOfRound {
    /// Encodes the trailer.
    pub fn to_bytes(self) -> [u8; END_OF_ROUND_BYTES] {
        let mut bytes = [0; END_OF_ROUND_BYTES];
        bytes[..8].copy_from_slice(&self.records.to_le_bytes());
        bytes[8..].copy_from_slice(&self.checksum.to_le_bytes());
        bytes
    }

    /// Decodes a trailer.
    pub fn from_bytes(bytes: &[u8; END_OF_ROUND_BYTES]) -> Self {
        Self { records: long(bytes, 0), checksum: long(bytes, 8) }
    }

    /// Number of the trailer's bytes that the checksum covers.
    pub const CHECKED_BYTES: usize = 8;
}

/// The 32-bit number at `offset`, which must lie within `bytes`.
fn word(bytes: &[u8], offset: usize) -> u32 {
    u32::from_le_bytes(core::array::from_fn(|index| bytes[offset + index]))
}

/// The 64-bit number at `offset`, which must lie within `bytes`.
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
    fn records_have_the_documented_layout() {
        let bytes = [3, 0, 0, 0, 0, 2, 0, 0, 0x21, 0x43, 0, 0, 0, 0, 0, 0];
        assert_eq!(Record::Data(range(0x4321, 512)).to_bytes(), bytes);
        let end = Record::EndOfRound { round: 7, kind: RoundKind::Last }.to_bytes();
        assert_eq!(end, [5, 0, 0, 0, 0, 0, 0, 0, 7, 0, 0, 0, 0, 0, 0, 0]);
    }

    #[test]
    fn invalid_records_are_refused() {
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
        /// Any bytes are refused or decode to a record that encodes to the same bytes.
        #[test]
        fn decoded_records_encode_to_the_same_bytes(
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
