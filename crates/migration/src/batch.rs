//! Records waiting to be written to a stream: batched to fit the processor's cache and written with
//! few system calls.

use std::hash::Hasher;
use std::io::{self, IoSlice, Write};
use std::ops::Range;

use ebb_abi::migration::{EndOfRound, HEADER_BYTES, Record, RoundKind};
use ebb_abi::{PAGE_SIZE_BYTES, PageRange};
use twox_hash::XxHash3_64;

use crate::SourceMemory;
use crate::progress::PageCounters;
use crate::zero::{PageContent, first_run};
use crate::{BoxError, ZeroPages};

/// Number of pages read at a time: they stay in the second level cache while they are scanned for
/// zeros, hashed, and copied by the kernel.
pub(crate) const PIECE_PAGES: u64 = 64;

const PAGE: usize = PAGE_SIZE_BYTES as usize;

/// Size of the content buffer in bytes.
const CONTENT_BYTES: usize = PIECE_PAGES as usize * PAGE;

/// Bytes of headers after which a batch is written even if it has hardly any content.
const HEADERS_BYTES: usize = 16 << 10;

/// A part of the output.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Part {
    Headers(Range<usize>),
    Content(Range<usize>),
}

/// Records that have not been written yet.
pub(crate) struct Batch {
    content: Vec<u8>,
    used: usize,
    headers: Vec<u8>,
    parts: Vec<Part>,
    /// Number of parts already in the checksum.
    hashed_parts: usize,
    /// A record without content that may still grow.
    open: Option<Record>,
    /// Records in this round.
    records: u64,
    hasher: XxHash3_64,
    pub(crate) pages: PageCounters,
}

impl Batch {
    pub(crate) fn new() -> Self {
        Self {
            content: vec![0; CONTENT_BYTES],
            used: 0,
            headers: Vec::new(),
            parts: Vec::new(),
            hashed_parts: 0,
            open: None,
            records: 0,
            hasher: XxHash3_64::with_seed(0),
            pages: PageCounters::default(),
        }
    }

    /// Number of pages that can be read before the next [`write`](Self::write).
    pub(crate) fn room_pages(&self) -> u64 {
        ((self.content.len() - self.used) / PAGE) as u64
    }

    /// Whether the batch must be written: the content buffer is full, or there are enough headers.
    pub(crate) fn is_full(&self) -> bool {
        self.room_pages() == 0 || self.headers.len() >= HEADERS_BYTES
    }

    /// Number of bytes that [`write`](Self::write) will write.
    pub(crate) fn size_bytes(&self) -> u64 {
        let content: usize = self
            .parts
            .iter()
            .map(|part| match part {
                Part::Headers(_) => 0,
                Part::Content(range) => range.len(),
            })
            .sum();
        (content + self.headers.len()) as u64
    }

    /// Adds pages that are not populated on the host.
    pub(crate) fn discard(&mut self, range: PageRange) {
        self.pages.discarded += range.pages;
        match &mut self.open {
            Some(Record::Discard(open)) if joins(*open, range) => open.pages += range.pages,
            _ => self.begin(Record::Discard(range)),
        }
    }

    /// Reads and adds pages. There must be [room](Self::room_pages) for them.
    pub(crate) fn read(
        &mut self,
        memory: &dyn SourceMemory,
        range: PageRange,
        zero_pages: ZeroPages,
    ) -> Result<(), BoxError> {
        let (start, length) = (self.used, range.pages as usize * PAGE);
        memory.read(range, &mut self.content[start..start + length])?;
        let mut done = 0;
        while done < length {
            let pages = &self.content[start + done..start + length];
            let (count, content) = match zero_pages {
                ZeroPages::Detect => first_run(pages),
                ZeroPages::Send => (pages.len() / PAGE, PageContent::Data),
            };
            let run =
                PageRange::new(ebb_abi::Pfn(range.start.0 + (done / PAGE) as u64), count as u64);
            match content {
                PageContent::Zero => self.zero(run),
                PageContent::Data => self.data(run, start + done),
            }
            done += count * PAGE;
        }
        Ok(())
    }

    fn zero(&mut self, range: PageRange) {
        self.pages.zero += range.pages;
        match &mut self.open {
            Some(Record::Zero(open)) if joins(*open, range) => open.pages += range.pages,
            _ => self.begin(Record::Zero(range)),
        }
    }

    fn data(&mut self, range: PageRange, at: usize) {
        self.pages.data += range.pages;
        self.close_record();
        self.header(Record::Data(range));
        self.used = at + range.pages as usize * PAGE;
        self.parts.push(Part::Content(at..self.used));
    }

    fn begin(&mut self, record: Record) {
        self.close_record();
        self.open = Some(record);
    }

    fn close_record(&mut self) {
        if let Some(record) = self.open.take() {
            self.header(record);
        }
    }

    fn header(&mut self, record: Record) {
        self.records += 1;
        self.append(&record.to_bytes());
    }

    fn append(&mut self, bytes: &[u8]) {
        let start = self.headers.len();
        self.headers.extend_from_slice(bytes);
        match self.parts.last_mut() {
            Some(Part::Headers(range)) => range.end = self.headers.len(),
            _ => self.parts.push(Part::Headers(start..self.headers.len())),
        }
    }

    /// Adds the end of the round.
    pub(crate) fn end_round(&mut self, round: u32, kind: RoundKind) {
        self.close_record();
        let records = std::mem::take(&mut self.records);
        self.append(&Record::EndOfRound { round, kind }.to_bytes());
        self.append(&EndOfRound { records, checksum: 0 }.to_bytes()[..EndOfRound::CHECKED_BYTES]);
        self.hash_parts();
        let hasher = std::mem::replace(&mut self.hasher, XxHash3_64::with_seed(0));
        let end = EndOfRound { records, checksum: hasher.finish() }.to_bytes();
        let start = self.headers.len();
        self.headers.extend_from_slice(&end[EndOfRound::CHECKED_BYTES..]);
        self.parts.push(Part::Headers(start..self.headers.len()));
        self.hashed_parts = self.parts.len();
    }

    fn hash_parts(&mut self) {
        for part in &self.parts[self.hashed_parts..] {
            let bytes = match part {
                Part::Headers(range) => &self.headers[range.clone()],
                Part::Content(range) => &self.content[range.clone()],
            };
            self.hasher.write(bytes);
        }
        self.hashed_parts = self.parts.len();
    }

    /// Writes the batch. A record that may still grow stays.
    pub(crate) fn write(&mut self, stream: &mut dyn Write) -> io::Result<()> {
        self.hash_parts();
        let mut slices: Vec<IoSlice<'_>> = self
            .parts
            .iter()
            .map(|part| match part {
                Part::Headers(range) => IoSlice::new(&self.headers[range.clone()]),
                Part::Content(range) => IoSlice::new(&self.content[range.clone()]),
            })
            .collect();
        write_all(stream, &mut slices)?;
        self.used = 0;
        self.headers.clear();
        self.parts.clear();
        self.hashed_parts = 0;
        Ok(())
    }
}

/// Whether `range` can be appended to a record for `open`.
fn joins(open: PageRange, range: PageRange) -> bool {
    open.end() == range.start && u32::try_from(open.pages + range.pages).is_ok()
}

fn write_all(stream: &mut dyn Write, mut slices: &mut [IoSlice<'_>]) -> io::Result<()> {
    while !slices.is_empty() {
        match stream.write_vectored(slices) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(count) => IoSlice::advance_slices(&mut slices, count),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

const _: () =
    assert!(PIECE_PAGES <= ebb_abi::migration::MAX_DATA_PAGES as u64 && HEADER_BYTES == 16);
