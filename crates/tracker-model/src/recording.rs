//! Recordings that the module makes in a guest: `/sys/kernel/debug/ebb_balloon/recording`.
//!
//! The format is that of `guest/linux/ebb_balloon/README.md`: a line about the recording, then one
//! line an event. What is read is only well-formed; whether it can have happened is
//! [`crate::replay`]'s question.

use std::str::FromStr;

use thiserror::Error;

use crate::tracker::Kind;
use crate::units::{Block, Order, Pfn};

/// What a recording begins with, up to its numbers.
const MAGIC: &str = "ebb_balloon recording ";
/// The format that is read.
const FORMAT: u64 = 1;
/// Most events (`EBB_RECORDING_MAX` of the module).
pub const EVENTS_MAX: u64 = 1 << 20;
/// Largest array of a CPU (the parameter's limit).
const PERCPU_ENTRIES_MAX: u64 = 65536;
/// Page frames are below this: 4 TiB of memory.
pub(crate) const PFN_LIMIT: u64 = 1 << 30;
/// Zones are below this.
const ZONE_LIMIT: u64 = 64;
/// CPUs are below this.
const CPU_LIMIT: u64 = 8192;

/// A recording.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Recording {
    /// Entries of the array of a CPU.
    pub percpu_entries: u32,
    /// What happened, in the order in which it took effect.
    pub events: Vec<Event>,
}

/// Something that happened in a guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Event {
    /// What.
    pub what: What,
    /// On which CPU.
    pub cpu: u32,
    /// Time from the beginning of the recording. Clocks of CPUs may differ a little.
    pub time_us: u64,
}

/// What happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum What {
    /// To a block of pages of a zone.
    Pages(PageEvent, ZoneNumber, Block),
    /// To the array of the event's CPU.
    Array(ArrayEvent, u32),
    /// To a tracker.
    Tracker(Stage, Kind),
}

/// Number of a zone.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ZoneNumber(pub u8);

/// What happens to blocks of pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum PageEvent {
    /// When the recording began, it was free.
    Block,
    /// The same, and the host knew (the Reported flag).
    Known,
    /// It left the free lists, to be allocated or for a per-CPU list.
    Remove,
    /// It went from a per-CPU list to the free lists.
    Drain,
    /// It was isolated by something other than a tracker: compaction, the balloon.
    Take,
    /// It was put back by something other than a tracker.
    Give,
    /// A tracker has isolated it.
    Isolate,
    /// A tracker has put it back.
    Putback,
    /// A caller of the allocator gets it.
    Alloc,
    /// It is going to be free.
    Free,
    /// The host is going to be told of it.
    Report,
    /// The host has discarded it.
    Answer,
    /// The host may have discarded it, and is done.
    Failed,
    /// `bitmap`: its bit is going to be set.
    Mark,
    /// `bitmap`: its bit is going to be cleared.
    Clear,
    /// `percpu`: it was written into the array of the CPU.
    Capture,
    /// `percpu`: the array of the CPU was full.
    Lost,
    /// `percpu`: the last entry of the array stands for its block.
    Again,
}

/// What happens to the array of a CPU; each with a number of entries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ArrayEvent {
    /// It was looked through, and so many are left.
    Scan,
    /// It has no room before its thread's turn, with so many.
    Full,
    /// It is handed over before it is full, with so many.
    Flush,
    /// The thread has taken so many.
    Turn,
}

/// What happens to a tracker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// It is being started.
    Start,
    /// It runs.
    Started,
    /// It is being stopped.
    Stop,
    /// It does not run any more, or could not be started.
    Stopped,
}

/// Why text is no recording, or none that can be replayed.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum ReadError {
    /// Another file.
    #[error("line 1 is not `{MAGIC}{FORMAT} events N lost N percpu_entries N`")]
    Heading,
    /// A format that is not known.
    #[error("the recording has format {0}, and this reads format {FORMAT}")]
    Format(u64),
    /// There was no room for all events.
    #[error("the recording has lost {0} events: record with more room, or for a shorter time")]
    Lost(u64),
    /// More events than a module records.
    #[error("the recording is said to have {0} events, and may have {EVENTS_MAX}")]
    TooLong(u64),
    /// Part of the file is missing, or there is more of it.
    #[error("the recording is said to have {said} events, and has {found}")]
    Truncated {
        /// Events by the first line.
        said: u64,
        /// Lines of events, one too many at most.
        found: u64,
    },
    /// A line that is no event.
    #[error("line {line}: {problem}")]
    Line {
        /// Number of the line, from 1.
        line: usize,
        /// What is wrong with it.
        problem: LineProblem,
    },
}

/// What is wrong with an event's line.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum LineProblem {
    /// Not six words.
    #[error("an event has six words: its name, zone, order, page frame or number, CPU, time")]
    Words,
    /// A name that no event has.
    #[error("no event has this name")]
    Name,
    /// No number, or one beyond its limit.
    #[error("word {0} is no number, or too large a one")]
    Number(usize),
    /// A block that does not begin at a multiple of its size.
    #[error("the page frame is no multiple of the block's size")]
    Alignment,
}

const PAGE_EVENTS: [(&str, PageEvent); 18] = [
    ("block", PageEvent::Block),
    ("known", PageEvent::Known),
    ("remove", PageEvent::Remove),
    ("drain", PageEvent::Drain),
    ("take", PageEvent::Take),
    ("give", PageEvent::Give),
    ("isolate", PageEvent::Isolate),
    ("putback", PageEvent::Putback),
    ("alloc", PageEvent::Alloc),
    ("free", PageEvent::Free),
    ("report", PageEvent::Report),
    ("answer", PageEvent::Answer),
    ("failed", PageEvent::Failed),
    ("mark", PageEvent::Mark),
    ("clear", PageEvent::Clear),
    ("capture", PageEvent::Capture),
    ("lost", PageEvent::Lost),
    ("again", PageEvent::Again),
];
const ARRAY_EVENTS: [(&str, ArrayEvent); 4] = [
    ("scan", ArrayEvent::Scan),
    ("full", ArrayEvent::Full),
    ("flush", ArrayEvent::Flush),
    ("turn", ArrayEvent::Turn),
];
const STAGES: [(&str, Stage); 4] = [
    ("start", Stage::Start),
    ("started", Stage::Started),
    ("stop", Stage::Stop),
    ("stopped", Stage::Stopped),
];
/// Trackers by their place in the module's list, which begins with `none`.
const TRACKERS: [(u64, Kind); 3] = [(1, Kind::Percpu), (2, Kind::Bitmap), (3, Kind::Reporting)];

fn find<K: PartialEq, V: Copy>(table: &[(K, V)], key: &K) -> Option<V> {
    table.iter().find_map(|(of, value)| (of == key).then_some(*value))
}

/// Names of all events.
pub(crate) fn names() -> impl Iterator<Item = &'static str> {
    let pages = PAGE_EVENTS.iter().map(|(name, _)| *name);
    let arrays = ARRAY_EVENTS.iter().map(|(name, _)| *name);
    pages.chain(arrays).chain(STAGES.iter().map(|(name, _)| *name))
}

impl Recording {
    /// Reads what the module has written. Memory is bounded by the text and by [`EVENTS_MAX`].
    ///
    /// # Errors
    /// Anything but a whole recording that has lost nothing.
    pub fn read(text: &str) -> Result<Self, ReadError> {
        let mut lines = text.lines();
        let heading = lines.next().and_then(|line| line.strip_prefix(MAGIC));
        let words: Vec<&str> = heading.ok_or(ReadError::Heading)?.split(' ').take(8).collect();
        let number = |word: &str| word.parse::<u64>().map_err(|_| ReadError::Heading);
        if let Some(&format) = words.first()
            && number(format)? != FORMAT
        {
            return Err(ReadError::Format(number(format)?));
        }
        let &[_, "events", said, "lost", lost, "percpu_entries", entries] = words.as_slice() else {
            return Err(ReadError::Heading);
        };
        let (said, lost, entries) = (number(said)?, number(lost)?, number(entries)?);
        if lost > 0 {
            return Err(ReadError::Lost(lost));
        }
        if said > EVENTS_MAX {
            return Err(ReadError::TooLong(said));
        }
        if entries > PERCPU_ENTRIES_MAX {
            return Err(ReadError::Heading);
        }
        let mut events = Vec::new();
        for (index, line) in lines.enumerate() {
            if events.len() as u64 == said {
                return Err(ReadError::Truncated { said, found: said + 1 });
            }
            let event =
                line.parse().map_err(|problem| ReadError::Line { line: index + 2, problem })?;
            events.push(event);
        }
        let found = events.len() as u64;
        if found < said {
            return Err(ReadError::Truncated { said, found });
        }
        Ok(Self { percpu_entries: entries as u32, events })
    }
}

impl FromStr for Event {
    type Err = LineProblem;

    fn from_str(line: &str) -> Result<Self, LineProblem> {
        let words: Vec<&str> = line.split(' ').take(7).collect();
        let &[name, zone, order, place, cpu, time] = words.as_slice() else {
            return Err(LineProblem::Words);
        };
        let number = |nth: usize, word: &str, limit: u64| match word.parse::<u64>() {
            Ok(number) if number < limit => Ok(number),
            _ => Err(LineProblem::Number(nth)),
        };
        let zone = ZoneNumber(number(2, zone, ZONE_LIMIT)? as u8);
        let order = Order(number(3, order, u64::from(Order::LARGEST.0) + 1)? as u8);
        let place = number(4, place, PFN_LIMIT)?;
        let cpu = number(5, cpu, CPU_LIMIT)? as u32;
        let time_us = number(6, time, u64::MAX)?;
        let what = if let Some(event) = find(&PAGE_EVENTS, &name) {
            let block = Block { first: Pfn(place as u32), order };
            if block != Block::containing(block.first, order) {
                return Err(LineProblem::Alignment);
            }
            What::Pages(event, zone, block)
        } else if let Some(event) = find(&ARRAY_EVENTS, &name) {
            What::Array(event, place as u32)
        } else if let Some(stage) = find(&STAGES, &name) {
            What::Tracker(stage, find(&TRACKERS, &place).ok_or(LineProblem::Number(4))?)
        } else {
            return Err(LineProblem::Name);
        };
        Ok(Self { what, cpu, time_us })
    }
}
