//! The destination: writes records to memory.

use std::collections::BTreeSet;
use std::io::{self, Read};
use std::sync::{Mutex, PoisonError};
use std::thread;

use ebb_abi::migration::RoundKind;
use ebb_abi::{PAGE_SIZE_BYTES, PageRange};
use ebb_guest_ram::PageBitmap;
use serde::{Deserialize, Serialize};

use crate::parser::{Parser, RecordSink};
use crate::progress::PageCounters;
use crate::{BoxError, Cancel, ReceiveError, StreamError, TargetMemory};

/// Bytes read from a stream at a time: they stay in the second level cache while they are hashed
/// and copied to guest memory.
const BUFFER_BYTES: usize = 512 << 10;

/// The destination of a migration.
pub struct Receiver<'a> {
    /// Memory for the guest, all zero.
    pub memory: &'a dyn TargetMemory,
    /// Data streams from the source, at least one.
    pub streams: Vec<Box<dyn Read + Send + 'a>>,
    /// Confirms to the source that a round is in memory.
    pub round_done: &'a mut dyn FnMut(u32) -> Result<(), BoxError>,
    /// Cancels the migration. Its callbacks must make reads from the streams return; the receiver
    /// also cancels when one stream fails, so that the others end as well.
    pub cancel: Cancel,
}

/// Report of a destination.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReceiveReport {
    /// Number of rounds, including the last one.
    pub rounds: u32,
    /// Bytes on the data streams.
    pub bytes_received: u64,
    /// Pages by outcome; the destination does not know about skipped ones.
    pub pages: PageCounters,
}

impl Receiver<'_> {
    /// Receives the guest's memory; returns when all of it is in place and confirmed to the source.
    ///
    /// Nothing outside of the memory's regions is written, whatever the source sends.
    ///
    /// # Errors
    /// [`ReceiveError`]; the memory's content must not be used.
    pub fn run(self) -> Result<ReceiveReport, ReceiveError> {
        if self.streams.is_empty() {
            return Err(ReceiveError::NoStreams);
        }
        let target = Target::new(self.memory);
        let mut streams: Vec<Stream<'_>> = self
            .streams
            .into_iter()
            .enumerate()
            .map(|(index, reader)| Stream::new(index, reader))
            .collect();
        let mut report = ReceiveReport::default();
        for round in 0..=u32::MAX {
            let kind = receive_round(&target, &mut streams, round, &self.cancel)?;
            (self.round_done)(round).map_err(|source| ReceiveError::Confirm { round, source })?;
            report.rounds += 1;
            if kind == RoundKind::Last {
                break;
            }
        }
        for stream in &streams {
            report.bytes_received += stream.received_bytes;
            report.pages += stream.parser.pages();
        }
        Ok(report)
    }
}

/// Receives one round on all streams.
fn receive_round(
    target: &Target<'_>,
    streams: &mut [Stream<'_>],
    round: u32,
    cancel: &Cancel,
) -> Result<RoundKind, ReceiveError> {
    let first_error = Mutex::new(None);
    let kinds: BTreeSet<bool> = thread::scope(|scope| {
        let threads: Vec<_> = streams
            .iter_mut()
            .map(|stream| {
                let first_error = &first_error;
                scope.spawn(move || match stream.receive_round(target, round) {
                    Ok(kind) => Some(kind == RoundKind::Last),
                    Err(error) => {
                        let called_off = cancel.is_cancelled();
                        let error = if called_off { ReceiveError::Cancelled } else { error };
                        first_error
                            .lock()
                            .unwrap_or_else(PoisonError::into_inner)
                            .get_or_insert(error);
                        cancel.cancel();
                        None
                    }
                })
            })
            .collect();
        // The scope propagates a panic of a thread.
        threads.into_iter().filter_map(|thread| thread.join().ok().flatten()).collect()
    });
    if let Some(error) = first_error.into_inner().unwrap_or_else(PoisonError::into_inner) {
        return Err(error);
    }
    match (kinds.contains(&true), kinds.contains(&false)) {
        (true, false) => Ok(RoundKind::Last),
        (false, _) => Ok(RoundKind::More),
        (true, true) => Err(ReceiveError::Disagreement { round }),
    }
}

/// A data stream with the bytes read and not parsed yet.
struct Stream<'a> {
    index: usize,
    reader: Box<dyn Read + Send + 'a>,
    parser: Parser,
    buffer: Vec<u8>,
    /// Part of the buffer that holds unparsed bytes.
    filled: std::ops::Range<usize>,
    received_bytes: u64,
}

impl<'a> Stream<'a> {
    fn new(index: usize, reader: Box<dyn Read + Send + 'a>) -> Self {
        let buffer = vec![0; BUFFER_BYTES];
        Self { index, reader, parser: Parser::new(), buffer, filled: 0..0, received_bytes: 0 }
    }

    fn receive_round(
        &mut self,
        target: &Target<'_>,
        round: u32,
    ) -> Result<RoundKind, ReceiveError> {
        self.parser.begin_round(round);
        let mut sink = StreamSink { target, stream: self.index };
        loop {
            let (used, end) = self.parser.parse(&self.buffer[self.filled.clone()], &mut sink)?;
            self.filled.start += used;
            if let Some(kind) = end {
                return Ok(kind);
            }
            self.fill(round)?;
        }
    }

    /// Reads more bytes behind the unparsed ones.
    fn fill(&mut self, round: u32) -> Result<(), ReceiveError> {
        // Less than a page and a header are left; they are moved to the front.
        self.buffer.copy_within(self.filled.clone(), 0);
        self.filled = 0..self.filled.len();
        loop {
            match self.reader.read(&mut self.buffer[self.filled.end..]) {
                Ok(0) => return Err(ReceiveError::CutShort { stream: self.index, round }),
                Ok(count) => {
                    self.filled.end += count;
                    self.received_bytes += count as u64;
                    return Ok(());
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(source) => return Err(ReceiveError::Stream { stream: self.index, source }),
            }
        }
    }
}

/// Guest memory with the set of pages written so far.
struct Target<'a> {
    memory: &'a dyn TargetMemory,
    regions: Vec<PageRange>,
    /// Pages that may contain something other than zeros.
    written: Mutex<PageBitmap>,
}

impl<'a> Target<'a> {
    fn new(memory: &'a dyn TargetMemory) -> Self {
        let regions = memory.regions();
        let written = Mutex::new(PageBitmap::new(&regions));
        Self { memory, regions, written }
    }

    /// Parts of a range within regions. The source's memory may be split into other regions.
    fn parts(&self, range: PageRange) -> impl Iterator<Item = PageRange> {
        self.regions
            .iter()
            .map(move |region| region.intersection(range))
            .filter(|part| !part.is_empty())
    }

    /// Removes the written pages of `range` from the set and returns them as ranges.
    fn forget(&self, range: PageRange) -> Vec<PageRange> {
        let mut written = self.written.lock().unwrap_or_else(PoisonError::into_inner);
        let ranges: Vec<_> = written.ranges_in(range).collect();
        if !ranges.is_empty() {
            written.remove(range);
        }
        ranges
    }
}

/// The target for the records of one stream.
struct StreamSink<'a> {
    target: &'a Target<'a>,
    stream: usize,
}

impl StreamSink<'_> {
    fn to_each_written(
        &self,
        action: &'static str,
        range: PageRange,
        change: impl Fn(PageRange) -> Result<(), BoxError>,
    ) -> Result<(), ReceiveError> {
        self.target.forget(range).into_iter().try_for_each(|range| {
            change(range).map_err(|source| ReceiveError::Memory { action, range, source })
        })
    }
}

impl RecordSink for StreamSink<'_> {
    type Error = ReceiveError;

    fn check(&self, range: PageRange) -> Result<(), StreamError> {
        let inside: u64 = self.target.parts(range).map(|part| part.pages).sum();
        if inside == range.pages { Ok(()) } else { Err(StreamError::OutsideRam { range }) }
    }

    fn data(&mut self, range: PageRange, content: &[u8]) -> Result<(), ReceiveError> {
        self.target.written.lock().unwrap_or_else(PoisonError::into_inner).insert(range);
        self.target.parts(range).try_for_each(|part| {
            let first = (part.start.0 - range.start.0) * PAGE_SIZE_BYTES;
            let content = &content[first as usize..(first + part.size_bytes()) as usize];
            let result = self.target.memory.write(part, content);
            result.map_err(|source| ReceiveError::Memory { action: "write", range: part, source })
        })
    }

    fn zero(&mut self, range: PageRange) -> Result<(), ReceiveError> {
        self.to_each_written("clear", range, |range| self.target.memory.zero(range))
    }

    fn discard(&mut self, range: PageRange) -> Result<(), ReceiveError> {
        self.to_each_written("discard", range, |range| self.target.memory.discard(range))
    }

    fn malformed(&self, source: StreamError) -> ReceiveError {
        ReceiveError::Malformed { stream: self.stream, source }
    }
}
