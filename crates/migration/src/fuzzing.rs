//! Fuzz targets of the engine: each takes arbitrary bytes, acts as a hostile source, and panics if
//! the destination misbehaves. They also run as ordinary tests.

use std::collections::HashMap;
use std::hash::Hasher;
use std::io::{self, Read};

use ebb_abi::migration::{EndOfRound, HEADER_BYTES, MAX_DATA_PAGES, Record, RoundKind};
use ebb_abi::{PAGE_SIZE_BYTES, PageRange, Pfn};
use twox_hash::XxHash3_64;

use crate::testing::TestTarget;
use crate::{Cancel, Receiver};

/// A fuzz target by name.
pub type Target = (&'static str, fn(&[u8]));

/// All targets.
pub const TARGETS: [Target; 3] = [
    ("migration_records", records),
    ("migration_garbage", garbage),
    ("migration_receiver", receiver),
];

/// The destination's memory: two adjacent regions and a separate one.
const REGIONS: [PageRange; 3] =
    [PageRange::new(Pfn(16), 16), PageRange::new(Pfn(32), 8), PageRange::new(Pfn(0x10_0000), 8)];

/// Most steps in a run, so that long inputs do not take long.
const MAX_STEPS: usize = 64;

/// Headers and ends of rounds: encoding a decoded record gives the same bytes.
pub fn records(data: &[u8]) {
    for bytes in data.as_chunks::<HEADER_BYTES>().0 {
        if let Ok(record) = Record::from_bytes(bytes) {
            assert_eq!(record.to_bytes(), *bytes);
            if let Record::Data(range) = record {
                assert!((1..=u64::from(MAX_DATA_PAGES)).contains(&range.pages));
            }
            if let Record::Zero(range) | Record::Discard(range) | Record::Data(range) = record {
                assert!(!range.is_empty() && range.end().0 <= 1 << 52);
            }
        }
        assert_eq!(EndOfRound::from_bytes(bytes).to_bytes(), *bytes);
    }
}

/// A stream of arbitrary bytes that arrive in pieces.
pub fn garbage(data: &[u8]) {
    let (&piece, data) = data.split_first().unwrap_or((&1, &[]));
    let target = TestTarget::new(&REGIONS);
    let receiver = Receiver {
        memory: &target,
        streams: vec![Box::new(Pieces {
            bytes: data.to_vec(),
            piece: usize::from(piece) + 1,
            at: 0,
        })],
        round_done: &mut |_| Ok(()),
        cancel: Cancel::new(),
    };
    let result = receiver.run();
    assert!(result.is_err() || target.held_pages() * PAGE_SIZE_BYTES <= data.len() as u64);
}

/// Nearly valid streams: a valid one gives the expected memory, an invalid one is refused.
pub fn receiver(data: &[u8]) {
    let mut input = Input(data);
    let mut source = Source::new(1 + usize::from(input.byte() % 3));
    let rounds = 1 + input.byte() % 3;
    for round in 0..rounds {
        for _ in 0..MAX_STEPS {
            if input.0.is_empty() || input.byte().is_multiple_of(8) {
                break;
            }
            source.step(&mut input);
        }
        let kind = if round + 1 == rounds { RoundKind::Last } else { RoundKind::More };
        source.end_round(round.into(), kind, &mut input);
    }
    source.damage(&mut input);
    source.check(usize::from(input.byte()) * 64 + 1);
}

/// A source with a model of the memory that it has sent.
struct Source {
    streams: Vec<Stream>,
    /// Pages with the byte that fills them.
    model: HashMap<u64, u8>,
    /// Pages of this round: a source sends each once.
    named: Vec<u64>,
    right: bool,
}

struct Stream {
    bytes: Vec<u8>,
    round_start: usize,
    records: u64,
}

impl Source {
    fn new(streams: usize) -> Self {
        let stream = || Stream { bytes: Vec::new(), round_start: 0, records: 0 };
        let streams = (0..streams).map(|_| stream()).collect();
        Self { streams, model: HashMap::new(), named: Vec::new(), right: true }
    }

    /// Sends one record, usually a valid one.
    fn step(&mut self, input: &mut Input<'_>) {
        let which = usize::from(input.byte()) % self.streams.len();
        let range = input.range();
        let inside: u64 = REGIONS.iter().map(|region| region.intersection(range).pages).sum();
        let pages = range.start.0..range.end().0;
        if self.right
            && inside == range.pages
            && pages.clone().any(|page| self.named.contains(&page))
        {
            return;
        }
        self.right &= inside == range.pages;
        if self.right {
            self.named.extend(pages.clone());
        }
        let stream = &mut self.streams[which];
        stream.records += 1;
        let kind = input.byte();
        let record = match kind % 4 {
            0 => Record::Zero(range),
            1 => Record::Discard(range),
            _ => Record::Data(range),
        };
        stream.bytes.extend(record.to_bytes());
        if let Record::Data(_) = record {
            let fill = input.byte();
            // No content follows a record that will be refused.
            let sent = if self.right { range.pages } else { 0 };
            stream.bytes.resize(stream.bytes.len() + (sent * PAGE_SIZE_BYTES) as usize, fill);
            if self.right {
                self.model.extend(pages.map(|page| (page, fill)));
            }
        } else if self.right {
            pages.for_each(|page| {
                self.model.remove(&page);
            });
        }
    }

    fn end_round(&mut self, round: u32, kind: RoundKind, input: &mut Input<'_>) {
        self.named.clear();
        // A single stream cannot disagree with another one about the last round.
        let can_disagree = self.streams.len() > 1 || kind == RoundKind::Last;
        for (index, stream) in self.streams.iter_mut().enumerate() {
            let wrong = input.byte();
            let wrong_round = u32::from(wrong == 255);
            let wrong_records = u64::from(wrong == 254);
            let wrong_kind = wrong == 253 && index == 0 && can_disagree;
            self.right &= wrong < 254 && !wrong_kind;
            let kind = match (kind, wrong_kind) {
                (RoundKind::More, true) => RoundKind::Last,
                (RoundKind::Last, true) => RoundKind::More,
                (kind, false) => kind,
            };
            stream.bytes.extend(Record::EndOfRound { round: round ^ wrong_round, kind }.to_bytes());
            let records = std::mem::take(&mut stream.records) ^ wrong_records;
            stream.bytes.extend(records.to_le_bytes());
            let mut hasher = XxHash3_64::with_seed(0);
            hasher.write(&stream.bytes[stream.round_start..]);
            stream.bytes.extend(hasher.finish().to_le_bytes());
            stream.round_start = stream.bytes.len();
        }
    }

    /// Changes or truncates a stream, sometimes.
    fn damage(&mut self, input: &mut Input<'_>) {
        let kind = input.byte();
        let which = usize::from(input.byte()) % self.streams.len();
        let bytes = &mut self.streams[which].bytes;
        let place = input.number() as usize % bytes.len();
        match kind {
            200..220 => bytes[place] ^= 1 << (kind % 8),
            220..240 => bytes.truncate(place),
            _ => return,
        }
        self.right = false;
    }

    /// Runs a receiver on the streams and checks the result.
    fn check(self, piece: usize) {
        let target = TestTarget::new(&REGIONS);
        let pieces = |stream: Stream| -> Box<dyn Read + Send> {
            Box::new(Pieces { bytes: stream.bytes, piece, at: 0 })
        };
        let receiver = Receiver {
            memory: &target,
            streams: self.streams.into_iter().map(pieces).collect(),
            round_done: &mut |_| Ok(()),
            cancel: Cancel::new(),
        };
        let result = receiver.run();
        assert_eq!(result.is_ok(), self.right, "{result:?}");
        if !self.right {
            return;
        }
        assert_eq!(target.held_pages(), self.model.len() as u64);
        let mut content = vec![0; PAGE_SIZE_BYTES as usize];
        for (page, fill) in self.model {
            target.read(Pfn(page), &mut content);
            assert!(content.iter().all(|byte| *byte == fill), "page {page:#x}");
        }
    }
}

/// Bytes that arrive in pieces.
struct Pieces {
    bytes: Vec<u8>,
    piece: usize,
    at: usize,
}

impl Read for Pieces {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let rest = &self.bytes[self.at..];
        let count = rest.len().min(self.piece).min(buffer.len());
        buffer[..count].copy_from_slice(&rest[..count]);
        self.at += count;
        Ok(count)
    }
}

/// Numbers taken from the input; zeros once it is exhausted.
struct Input<'a>(&'a [u8]);

impl Input<'_> {
    fn byte(&mut self) -> u8 {
        let Some((first, rest)) = self.0.split_first() else { return 0 };
        self.0 = rest;
        *first
    }

    fn number(&mut self) -> u64 {
        u64::from_le_bytes(std::array::from_fn(|_| self.byte()))
    }

    /// A range of pages, usually in memory.
    fn range(&mut self) -> PageRange {
        let kind = self.byte();
        let pages = 1 + u64::from(self.byte() % 4);
        let start = match kind {
            // Across the border of a region, or beyond it.
            0..8 => 14 + u64::from(self.byte() % 40),
            8 => self.number() >> 12,
            9..100 => 0x10_0000 + u64::from(self.byte() % 5),
            _ => 16 + u64::from(self.byte() % 21),
        };
        PageRange::new(Pfn(start.min((1 << 52) - pages)), pages)
    }
}
