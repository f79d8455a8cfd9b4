//! Incremental parser of records: accepts bytes in pieces of any size.

use std::hash::Hasher;

use ebb_abi::migration::{END_OF_ROUND_BYTES, EndOfRound, HEADER_BYTES, Record, RoundKind};
use ebb_abi::{PAGE_SIZE_BYTES, PageRange, Pfn};
use twox_hash::XxHash3_64;

use crate::StreamError;
use crate::progress::PageCounters;

/// Receiver of parsed records.
pub(crate) trait RecordSink {
    type Error;

    /// Checks whether a record may name these pages.
    fn check(&self, range: PageRange) -> Result<(), StreamError>;

    /// Content of pages. May be called for parts of a record.
    fn data(&mut self, range: PageRange, content: &[u8]) -> Result<(), Self::Error>;

    fn zero(&mut self, range: PageRange) -> Result<(), Self::Error>;

    fn discard(&mut self, range: PageRange) -> Result<(), Self::Error>;

    fn malformed(&self, error: StreamError) -> Self::Error;
}

/// Parser of one stream. Records that it passes on are within the bounds of the format and were
/// [checked](RecordSink::check); the checksum is verified only at the end of a round.
pub(crate) struct Parser {
    round: u32,
    /// Pages whose content follows.
    expected: PageRange,
    /// Kind of the round whose end was announced.
    ending: Option<RoundKind>,
    records: u64,
    hasher: XxHash3_64,
    pages: PageCounters,
}

/// Result of one step.
enum Step {
    /// This many bytes were consumed.
    Used(usize),
    /// This many bytes were consumed and the round is over.
    End(usize, RoundKind),
    /// More bytes are needed.
    Starved,
}

impl Parser {
    pub(crate) fn new() -> Self {
        Self {
            round: 0,
            expected: PageRange::default(),
            ending: None,
            records: 0,
            hasher: XxHash3_64::with_seed(0),
            pages: PageCounters::default(),
        }
    }

    /// Number of pages so far, in all rounds.
    pub(crate) fn pages(&self) -> PageCounters {
        self.pages
    }

    pub(crate) fn begin_round(&mut self, round: u32) {
        self.round = round;
        self.records = 0;
        self.hasher = XxHash3_64::with_seed(0);
    }

    /// Consumes as much of `bytes` as possible: less than a page with its header may be left.
    /// Returns the number of bytes consumed, and the kind of the round if its end was among them;
    /// bytes after the end are left.
    pub(crate) fn parse<S: RecordSink>(
        &mut self,
        bytes: &[u8],
        sink: &mut S,
    ) -> Result<(usize, Option<RoundKind>), S::Error> {
        let mut used = 0;
        loop {
            match self.step(&bytes[used..], sink)? {
                Step::Used(count) => used += count,
                Step::End(count, kind) => return Ok((used + count, Some(kind))),
                Step::Starved => return Ok((used, None)),
            }
        }
    }

    fn step<S: RecordSink>(&mut self, bytes: &[u8], sink: &mut S) -> Result<Step, S::Error> {
        if let Some(kind) = self.ending {
            let Some(end) = bytes.first_chunk::<END_OF_ROUND_BYTES>() else {
                return Ok(Step::Starved);
            };
            self.check_end(end).map_err(|error| sink.malformed(error))?;
            self.ending = None;
            return Ok(Step::End(END_OF_ROUND_BYTES, kind));
        }
        if !self.expected.is_empty() {
            return self.content(bytes, sink);
        }
        let Some(header) = bytes.first_chunk::<HEADER_BYTES>() else { return Ok(Step::Starved) };
        self.hasher.write(header);
        let record = Record::from_bytes(header).map_err(|error| sink.malformed(error.into()))?;
        self.begin(record, sink)?;
        Ok(Step::Used(HEADER_BYTES))
    }

    fn begin<S: RecordSink>(&mut self, record: Record, sink: &mut S) -> Result<(), S::Error> {
        match record {
            Record::EndOfRound { round, kind } => {
                if round != self.round {
                    let error = StreamError::WrongRound { expected: self.round, found: round };
                    return Err(sink.malformed(error));
                }
                self.ending = Some(kind);
                return Ok(());
            }
            Record::Zero(range) | Record::Discard(range) | Record::Data(range) => {
                sink.check(range).map_err(|error| sink.malformed(error))?;
            }
        }
        self.records += 1;
        match record {
            Record::Zero(range) => {
                self.pages.zero += range.pages;
                sink.zero(range)
            }
            Record::Discard(range) => {
                self.pages.discarded += range.pages;
                sink.discard(range)
            }
            Record::Data(range) => {
                self.pages.data += range.pages;
                self.expected = range;
                Ok(())
            }
            Record::EndOfRound { .. } => Ok(()),
        }
    }

    /// Passes on the complete pages in `bytes`.
    fn content<S: RecordSink>(&mut self, bytes: &[u8], sink: &mut S) -> Result<Step, S::Error> {
        let pages = (bytes.len() as u64 / PAGE_SIZE_BYTES).min(self.expected.pages);
        if pages == 0 {
            return Ok(Step::Starved);
        }
        let content = &bytes[..(pages * PAGE_SIZE_BYTES) as usize];
        self.hasher.write(content);
        let range = PageRange::new(self.expected.start, pages);
        self.expected =
            PageRange::new(Pfn(self.expected.start.0 + pages), self.expected.pages - pages);
        sink.data(range, content)?;
        Ok(Step::Used(content.len()))
    }

    fn check_end(&mut self, bytes: &[u8; END_OF_ROUND_BYTES]) -> Result<(), StreamError> {
        self.hasher.write(&bytes[..EndOfRound::CHECKED_BYTES]);
        let (round, end) = (self.round, EndOfRound::from_bytes(bytes));
        if end.records != self.records {
            return Err(StreamError::RecordCount {
                round,
                found: self.records,
                claimed: end.records,
            });
        }
        let found = self.hasher.finish();
        if end.checksum != found {
            return Err(StreamError::Checksum { round, found, claimed: end.checksum });
        }
        Ok(())
    }
}
