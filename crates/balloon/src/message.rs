//! Messages of the inflate, deflate and host request queues during processing.
//!
//! A message is a bare array of page frame numbers, as in the standard, or a header and a payload
//! (docs/extension.md). It can name far more pages than one call should process, so it is processed
//! in portions, and kept between calls.

use ebb_abi::PageRange;
use ebb_abi::balloon::Features;
use ebb_abi::balloon::extension::{
    Bitmap, Encoding, HEADER_BYTES, Header, Layout, MAX_MESSAGE_BYTES, MAX_PFNS, Pfns, Purpose,
    Ranges,
};
use ebb_abi::balloon::{PFN_BYTES, QueueKind};
use ebb_guest_ram::GuestRam;

use crate::Balloon;
use crate::budget::Budget;
use crate::chain::{Chain, ChainReader, Directions};
use crate::counters::GuestError;
use crate::initialized::{InitBitmap, has_bitmaps};
use crate::pages::RunBuilder;

/// Maximum number of pages of a portion, 32 MiB: half the bound of waiting pages, so that a portion
/// and the pages that waited before it fit.
const PORTION_PAGES: u64 = 8 << 10;

/// Maximum number of ranges of a portion.
const PORTION_RANGES: usize = 1024;

/// Bits of a bitmap that are scanned at a time: they form at most half as many ranges, as many as
/// the largest array.
const BITS_AT_ONCE: u32 = 128 << 10;

/// Number of bytes that cost one unit of the budget.
const BYTES_PER_UNIT: usize = 16;

/// Whether a message is valid.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// Valid, with this purpose.
    Accepted(Purpose),
    /// Invalid: it is only returned.
    Refused,
}

/// A message that was read and has not been returned.
#[derive(Debug)]
pub(crate) struct Message {
    /// Head of its chain.
    pub(crate) head: u16,
    pub(crate) verdict: Verdict,
    /// Sorted, disjoint, inside guest memory.
    ranges: Vec<PageRange>,
    next_range: usize,
    bits: Bits,
    /// Its encoding, its length in bytes, and the time spent on reading it so far.
    pub(crate) encoding: Encoding,
    pub(crate) size_bytes: u64,
    pub(crate) translate_ns: u64,
    /// Bytes named but not passed on.
    pub(crate) poisoned_bytes: u64,
    /// Pages named that are not guest memory.
    pub(crate) outside_pages: u64,
    /// The bitmap that answers it, if there is one.
    pub(crate) bitmap: Option<InitBitmap>,
}

/// The rest of a bitmap.
#[derive(Debug)]
struct Bits {
    /// Header and payload.
    bytes: Vec<u8>,
    layout: Layout,
    next: u32,
}

impl Message {
    fn new(head: u16, verdict: Verdict) -> Self {
        let bits = Bits { bytes: Vec::new(), layout: Layout::Pfns { count: 0 }, next: 0 };
        Self {
            head,
            verdict,
            ranges: Vec::new(),
            next_range: 0,
            bits,
            encoding: Encoding::Pfns,
            size_bytes: 0,
            translate_ns: 0,
            poisoned_bytes: 0,
            outside_pages: 0,
            bitmap: None,
        }
    }

    /// Whether the message only needs to be returned.
    pub(crate) fn is_finished(&self) -> bool {
        self.next_range == self.ranges.len() && self.bits.is_used_up()
    }

    /// Fills `portion` with the next pages; empty at the end, or if the budget was exhausted by
    /// entries without pages.
    pub(crate) fn next_portion(
        &mut self,
        ram: &GuestRam,
        budget: &mut Budget,
        portion: &mut Vec<PageRange>,
    ) {
        portion.clear();
        let mut room = PORTION_PAGES;
        let mut has_read = false;
        while room > 0 && portion.len() < PORTION_RANGES && !self.is_finished() {
            let Some(range) = self.ranges.get_mut(self.next_range) else {
                if has_read && budget.is_exhausted() {
                    break;
                }
                self.read_bits(ram, budget);
                has_read = true;
                continue;
            };
            let taken = PageRange::new(range.start, range.pages.min(room));
            *range = PageRange::new(taken.end(), range.pages - taken.pages);
            self.next_range += usize::from(range.is_empty());
            room -= taken.pages;
            portion.push(taken);
        }
        budget.spend(portion.len() + (PORTION_PAGES - room) as usize);
    }

    /// Replaces the ranges, all of which are processed, by those of the next part of the bitmap.
    fn read_bits(&mut self, ram: &GuestRam, budget: &mut Budget) {
        self.ranges.clear();
        self.next_range = 0;
        let Bits { bytes, layout, next } = &mut self.bits;
        let end = next.saturating_add(BITS_AT_ONCE).min(layout.count());
        let payload = bytes.get(HEADER_BYTES..).unwrap_or_default();
        let runs = Bitmap::new(payload, layout.count())
            .into_iter()
            .flat_map(|bitmap| bitmap.runs(*next..end));
        budget.spend((end - *next) as usize / 64);
        for run in runs {
            budget.spend(1);
            let pages = layout.pages_of_bits(run.first, run.bits);
            let known = self.ranges.len();
            self.ranges.extend(ram.clip(pages));
            let inside: u64 = self.ranges[known..].iter().map(|range| range.pages).sum();
            self.outside_pages = self.outside_pages.saturating_add(pages.pages - inside);
        }
        *next = end;
    }

    /// Sets ranges that are sorted and disjoint.
    fn set_ranges(&mut self, ranges: &[PageRange], ram: &GuestRam) {
        self.ranges.extend(ranges.iter().flat_map(|range| ram.clip(*range)));
        let asked: u64 = ranges.iter().map(|range| range.pages).sum();
        let inside: u64 = self.ranges.iter().map(|range| range.pages).sum();
        self.outside_pages = asked - inside;
    }
}

impl Bits {
    fn is_used_up(&self) -> bool {
        !matches!(self.layout, Layout::Bitmap { bits, .. } if self.next < bits)
    }
}

/// Reason for which a message is refused.
struct Refusal(GuestError, String);

/// Whether a message with this header is allowed on this queue.
fn belongs(header: &Header, kind: QueueKind) -> bool {
    matches!(
        (kind, header.purpose()),
        (QueueKind::Inflate, Purpose::Inflate)
            | (QueueKind::Deflate, Purpose::Deflate)
            | (QueueKind::HostRequest, Purpose::FreePages { .. })
    )
}

/// Checks a message apart from its entries.
fn check(bytes: &[u8], kind: QueueKind, negotiated: Features) -> Result<Header, Refusal> {
    let Some(header) = bytes.first_chunk() else {
        return Err(Refusal(GuestError::BadMessage, format!("{} bytes of header", bytes.len())));
    };
    let header = Header::from_bytes(*header).map_err(|error| {
        Refusal(GuestError::BadMessage, format!("{} queue: {error}", kind.name()))
    })?;
    if !belongs(&header, kind) {
        return Err(Refusal(
            GuestError::BadMessage,
            format!("{:?} on {} queue", header.purpose(), kind.name()),
        ));
    }
    let encoding = header.layout().encoding();
    if !encoding.is_allowed(negotiated) {
        return Err(Refusal(GuestError::ForbiddenEncoding, encoding.name().to_owned()));
    }
    let (said, found) = (header.layout().payload_bytes(), bytes.len() - HEADER_BYTES);
    if said != found {
        return Err(Refusal(GuestError::MessageLength, format!("{found} bytes instead of {said}")));
    }
    Ok(header)
}

/// Returns the ranges of a payload, sorted and disjoint, and the number of pages named twice.
fn read_ranges(payload: &[u8]) -> Result<(Vec<PageRange>, u64), Refusal> {
    let ranges: Result<Vec<_>, _> = Ranges::new(payload).collect();
    let mut ranges = ranges.map_err(|error| Refusal(GuestError::BadRange, error.to_string()))?;
    let sum = |ranges: &[PageRange]| {
        ranges.iter().fold(0_u64, |sum, range| sum.saturating_add(range.pages))
    };
    let named = sum(&ranges);
    ebb_guest_ram::coalesce(&mut ranges);
    let duplicates = named - sum(&ranges);
    Ok((ranges, duplicates))
}

impl Balloon {
    /// Reads a message from a chain of this queue. Its errors are counted.
    pub(crate) fn read_message(
        &mut self,
        chain: Chain<'_>,
        kind: QueueKind,
        negotiated: Features,
        budget: &mut Budget,
    ) -> Message {
        let head = chain.head_index();
        let bare = match kind {
            QueueKind::Inflate if !negotiated.has_messages() => Some(Purpose::Inflate),
            QueueKind::Deflate if !negotiated.has_messages() => Some(Purpose::Deflate),
            _ => None,
        };
        let limit_bytes =
            if bare.is_some() { MAX_PFNS as usize * PFN_BYTES } else { MAX_MESSAGE_BYTES };
        let place = (kind == QueueKind::Inflate && has_bitmaps(negotiated)).then(|| chain.clone());
        let allowed = if place.is_some() { Directions::Both } else { Directions::One };
        let mistakes = self.faults.counts().total();
        let mut reader =
            ChainReader { memory: self.ram.memory(), budget, faults: &mut self.faults };
        reader.read_bytes(chain, limit_bytes, allowed, &mut self.scratch.bytes);
        let queue = self.counters.queue_mut(kind);
        queue.buffers += 1;
        queue.message_bytes += self.scratch.bytes.len() as u64;
        let size_bytes = self.scratch.bytes.len() as u64;
        let result = match bare {
            Some(purpose) => {
                let mut message = self.read_array(head, purpose, budget);
                message.bitmap = place.map(|chain| {
                    let numbers = self.scratch.bytes.len() / PFN_BYTES;
                    let mut bitmap = self.read_bitmap_place(chain, numbers, budget);
                    let sound = self.faults.counts().total() == mistakes;
                    let inside = message.outside_pages == 0 && !bitmap.is_in(&message.ranges);
                    bitmap.add(sound && inside);
                    bitmap
                });
                Ok(message)
            }
            None => self.read_payload(head, kind, negotiated, budget),
        };
        let refuse = |Refusal(error, detail)| {
            // A chain without bytes has already been counted.
            if !self.scratch.bytes.is_empty() {
                self.faults.count(error, detail);
            }
            Message::new(head, Verdict::Refused)
        };
        result.map_or_else(refuse, |message| Message { size_bytes, ..message })
    }

    /// Reads the array of page frame numbers in `scratch.bytes`.
    fn read_array(&mut self, head: u16, purpose: Purpose, budget: &mut Budget) -> Message {
        let rest = self.scratch.bytes.len() % PFN_BYTES;
        if rest > 0 {
            self.faults.count(GuestError::PartialEntry, format_args!("{rest} bytes too many"));
        }
        self.counters.encodings.arrays += 1;
        let mut message = Message::new(head, Verdict::Accepted(purpose));
        let mut runs = std::mem::take(&mut self.scratch.runs);
        let duplicates = self.read_pfns(0, &mut runs, &mut message, budget);
        self.scratch.runs = runs;
        self.count_duplicates(duplicates);
        message
    }

    /// Reads the message in `scratch.bytes`.
    fn read_payload(
        &mut self,
        head: u16,
        kind: QueueKind,
        negotiated: Features,
        budget: &mut Budget,
    ) -> Result<Message, Refusal> {
        let header = check(&self.scratch.bytes, kind, negotiated)?;
        let mut message = Message::new(head, Verdict::Accepted(header.purpose()));
        message.encoding = header.layout().encoding();
        let mut duplicates = 0;
        match header.layout() {
            Layout::Pfns { .. } => {
                let mut runs = std::mem::take(&mut self.scratch.runs);
                duplicates = self.read_pfns(HEADER_BYTES, &mut runs, &mut message, budget);
                self.scratch.runs = runs;
            }
            Layout::Ranges { count } => {
                budget.spend(count as usize);
                let (sorted, named_twice) = read_ranges(&self.scratch.bytes[HEADER_BYTES..])?;
                duplicates = named_twice;
                message.set_ranges(&sorted, &self.ram);
            }
            layout @ Layout::Bitmap { .. } => {
                budget.spend(self.scratch.bytes.len() / BYTES_PER_UNIT);
                message.bits =
                    Bits { bytes: std::mem::take(&mut self.scratch.bytes), layout, next: 0 };
            }
        }
        self.counters.encodings.count(message.encoding);
        if kind != QueueKind::HostRequest {
            // Free lists change while a driver walks them.
            self.count_duplicates(duplicates);
        }
        Ok(message)
    }

    /// Reads page frame numbers from this offset of `scratch.bytes` on; returns the number of
    /// duplicates.
    fn read_pfns(
        &self,
        offset: usize,
        runs: &mut RunBuilder,
        message: &mut Message,
        budget: &mut Budget,
    ) -> u64 {
        let bytes = &self.scratch.bytes[offset..];
        budget.spend(bytes.len() / PFN_BYTES);
        runs.clear();
        Pfns::new(bytes).for_each(|pfn| runs.push(pfn));
        let (ranges, duplicates) = runs.finish();
        message.set_ranges(ranges, &self.ram);
        duplicates
    }

    fn count_duplicates(&mut self, duplicates: u64) {
        if duplicates > 0 {
            self.faults.count(GuestError::DoublePage, format_args!("{duplicates} pages"));
        }
    }

    /// Ends a message: accounts for errors in its pages and reuses its memory.
    pub(crate) fn finish_message(&mut self, message: Message) {
        self.reject_outside(message.outside_pages);
        if self.scratch.bytes.capacity() == 0 {
            self.scratch.bytes = message.bits.bytes;
        }
    }
}
