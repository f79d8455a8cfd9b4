//! Bodies of the fuzz targets: each takes arbitrary bytes, does with them what a hostile driver
//! could do, and panics if the device misbehaves. They also run as ordinary tests.
//!
//! A new target is a function here, a line in [`TARGETS`], and a file of three lines in
//! `fuzz/fuzz_targets`.

use std::sync::Arc;
use std::time::{Duration, Instant};

use ebb_abi::balloon::extension::{HEADER_BYTES, REQUEST_BYTES};
use ebb_abi::balloon::{Config, Feature, Features, Numbering, QueueKind};
use ebb_abi::{Order, PageRange};
use virtio_queue::Queue;

use crate::testing::{Buffer, Guest, Setup};
use crate::{Balloon, GuestError, HintEnd, HintSink, ReportCheck};

/// A fuzz target by name.
pub type Target = (&'static str, fn(&[u8]));

/// All targets.
pub const TARGETS: [Target; 9] = [
    ("balloon_inflate", inflate),
    ("balloon_deflate", deflate),
    ("balloon_statistics", statistics),
    ("balloon_hinting", hinting),
    ("balloon_reporting", reporting),
    ("balloon_config", config),
    ("balloon_inflate_message", inflate_message),
    ("balloon_deflate_message", deflate_message),
    ("balloon_host_request", host_request),
];

/// Memory of a fuzzed guest; small, since each run maps it anew.
const REGION_BYTES: u64 = 4 << 20;

/// Maximum number of steps per run, so that long inputs do not take long.
const MAX_STEPS: usize = 64;

/// The inflate queue.
pub fn inflate(data: &[u8]) {
    run(QueueKind::Inflate, data);
}

/// The deflate queue. No page may lose its content.
pub fn deflate(data: &[u8]) {
    run(QueueKind::Deflate, data);
}

/// The statistics queue. No page may lose its content.
pub fn statistics(data: &[u8]) {
    run(QueueKind::Statistics, data);
}

/// The free page hinting queue. No page may lose its content.
pub fn hinting(data: &[u8]) {
    run(QueueKind::FreePageHint, data);
}

/// The page reporting queue.
pub fn reporting(data: &[u8]) {
    run(QueueKind::Reporting, data);
}

/// The inflate queue with messages.
pub fn inflate_message(data: &[u8]) {
    run_extended(QueueKind::Inflate, data);
}

/// The deflate queue with messages. No page may lose its content.
pub fn deflate_message(data: &[u8]) {
    run_extended(QueueKind::Deflate, data);
}

/// The host request queue. No page may lose its content.
pub fn host_request(data: &[u8]) {
    run_extended(QueueKind::HostRequest, data);
}

/// The configuration space: the device's fields must not change.
pub fn config(data: &[u8]) {
    let mut input = Input(data);
    let mut guest = Guest::new(Setup { region_bytes: REGION_BYTES, ..Setup::default() });
    let target_bytes = input.number(2) * 4096 % (REGION_BYTES * 2);
    let changed = guest.balloon.set_target_bytes(target_bytes);
    assert_eq!(changed, Ok(target_bytes != 0));
    for _ in 0..MAX_STEPS {
        if input.is_empty() {
            break;
        }
        let offset = input.number(1).wrapping_sub(8) % 32;
        let length = input.number(1) as usize % 40;
        let bytes = input.bytes(length);
        guest.balloon.write_config(offset, bytes);
        let mut back = vec![0; length];
        guest.balloon.read_config(offset, &mut back);
        let mut config = [0; Config::SIZE_BYTES];
        guest.balloon.read_config(0, &mut config);
        let config = Config::from_bytes(config);
        assert_eq!(u64::from(config.num_pages.get()) * 4096, target_bytes);
        assert_eq!(config.free_page_hint_command_id.get(), 0);
        assert_eq!(guest.balloon.config_generation(), u32::from(target_bytes != 0));
    }
}

/// Runs a driver that operates one queue as `data` directs.
fn run(kind: QueueKind, data: &[u8]) {
    let mut input = Input(data);
    let chosen = Features(input.number(1));
    play(kind, Features::ALL_BALLOON | Features::PROPOSED, chosen, input);
}

/// As [`run`], with the extension.
fn run_extended(kind: QueueKind, data: &[u8]) {
    let mut input = Input(data);
    let encodings = [0b01, 0b10, 0b11][input.number(1) as usize % 3];
    let chosen = Features(input.number(1) | encodings << 50);
    play(kind, Features::KNOWN, chosen, input);
}

fn play(kind: QueueKind, offered: Features, chosen: Features, mut input: Input<'_>) {
    let negotiated = kind.feature().map_or(chosen, |feature| chosen.with(feature));
    let numbering = Numbering::ALL[input.number(1) as usize % Numbering::ALL.len()];
    let setup =
        Setup { offered, negotiated, numbering, region_bytes: REGION_BYTES, ..Setup::default() };
    let mut guest = Guest::new(setup);
    // Only a few pages: marking them takes most of a run's time.
    let canary = PageRange::new(guest.high_pages().start, 64);
    guest.mark(canary);

    for _ in 0..MAX_STEPS {
        if input.is_empty() {
            break;
        }
        step(&mut guest, kind, &mut input);
    }
    let _ = guest.kick(kind);
    guest.balloon.flush();

    let counters = guest.balloon.counters();
    let may_discard = matches!(kind, QueueKind::Inflate | QueueKind::Reporting);
    assert!(may_discard || counters.discard.bytes == 0);
    let lost = guest.unmarked(canary).len() as u64;
    // A driver can have a request or a bitmap written over any of its pages, in pieces.
    let requests = counters.requests.sent + counters.requests.cancelled;
    let has_bitmaps = negotiated.contains(Feature::DeviceInitOnInflate);
    let bitmap_bytes = counters.inflate.message_bytes * u64::from(has_bitmaps);
    let written = requests * 2 * REQUEST_BYTES as u64 + bitmap_bytes;
    assert!(lost <= counters.discard.bytes / 4096 + written);
    let proposed = negotiated.0 & Features::PROPOSED.0 != 0;
    assert!(counters.initialized_bytes == 0 || proposed && counters.discard.bytes > 0);
    assert_eq!(counters.discard.failures, 0);
    let relies_on_content = negotiated.relies_on_free_pages();
    assert!(
        counters.discard.verified_pages * 4096
            <= counters.discard.bytes * u64::from(!relies_on_content)
    );
    assert_eq!(guest.balloon.info().pending_bytes, 0);
    if !negotiated.contains(Feature::StatisticsQueue) {
        assert_eq!(counters.errors.get(GuestError::ExtraStatistics), 0);
    }
}

/// One action of a driver, or of the device's owner.
fn step(guest: &mut Guest, kind: QueueKind, input: &mut Input<'_>) {
    if guest.balloon.negotiated().0 & Features::EXTENSION.0 != 0 && input.number(1) % 4 < 3 {
        return extension_step(guest, kind, input);
    }
    match input.number(1) % 12 {
        // A valid chain with arbitrary content.
        0..4 => {
            let count = 1 + input.number(1) as usize % 4;
            let chain: Vec<Buffer> = (0..count)
                .map(|_| {
                    let shape = input.number(1);
                    let length = input.number(1) as usize;
                    let content = input.bytes(length);
                    Buffer { writable: shape & 1 != 0, ..guest.buffer(content) }
                })
                .collect();
            guest.offer(kind, &chain);
        }
        // A chain of arbitrary ranges in or near memory.
        4 | 5 => {
            let page = input.number(2) % 0x500;
            let address =
                page * 4096 + input.number(1) % 2 * input.number(2) + (page & 1) * (4 << 30);
            let length = (input.number(2) * 512) as u32;
            guest.offer(
                kind,
                &[Buffer { address, length, writable: !input.number(1).is_multiple_of(4) }],
            );
        }
        // Arbitrary descriptors and heads.
        6 => {
            let (index, flags, next) =
                (input.number(1) as u16, input.number(1) as u16, input.number(1) as u16);
            let (address, length) = (input.number(8), input.number(4) as u32);
            guest.store_descriptor(kind, index, address, length, flags, next);
            let head = input.number(1) as u16;
            guest.publish(kind, head);
        }
        7 => guest.set_available_index(kind, input.number(2) as u16),
        8 => owner_step(guest, input),
        9 => {
            let mut bytes = input.bytes(4).to_vec();
            bytes.resize(4, 0);
            guest.balloon.write_config([4, 12][input.number(1) as usize % 2], &bytes);
        }
        10 if input.number(1).is_multiple_of(8) => {
            guest.balloon.reset();
            guest.activate();
        }
        _ => {
            let _ = guest.kick(kind);
        }
    }
}

/// One action of a driver with the extension, or of its device's owner.
fn extension_step(guest: &mut Guest, kind: QueueKind, input: &mut Input<'_>) {
    match input.number(1) % 8 {
        // A message that is nearly valid.
        0..5 => {
            let bytes = near_message(kind, input);
            let (head, tail) = bytes.split_at(input.number(1) as usize % bytes.len());
            let chain = [guest.buffer(head), guest.buffer(tail)];
            guest.offer(kind, &chain);
        }
        5 => {
            let length = input.number(1) as u32 % 24;
            let buffer = guest.buffer(&vec![0xee; length as usize]);
            guest.offer(kind, &[Buffer { writable: true, ..buffer }]);
        }
        6 => {
            let sink = Box::new(CheckingSink { ended: false });
            let allowed = guest.balloon.negotiated().contains(Feature::HostRequest);
            let order = Order(input.number(1) as u8);
            let asked = if input.number(1).is_multiple_of(2) {
                guest.balloon.request_free_pages(order, sink)
            } else {
                guest.balloon.request_report(order, sink)
            };
            assert!(asked.is_err() || allowed);
        }
        _ if input.number(1).is_multiple_of(2) => {
            guest.balloon.cancel_request();
        }
        _ => {
            let state = guest.balloon.save();
            let queues = guest.balloon.queue_states().into_iter().map(Queue::try_from);
            if let Ok(queues) = queues.collect() {
                let _ = Balloon::restore(&state, Arc::clone(&guest.ram), queues);
            }
        }
    }
}

/// A message, each field of which is probably valid.
fn near_message(kind: QueueKind, input: &mut Input<'_>) -> Vec<u8> {
    let command = match kind {
        QueueKind::Inflate => 1,
        QueueKind::Deflate => 2,
        _ => 3,
    };
    let is_answer = u64::from(command == 3);
    let likely = |value: u64, input: &mut Input<'_>| {
        if input.number(1).is_multiple_of(16) { input.number(8) } else { value }
    };
    let command = likely(command, input);
    let status = likely(is_answer * (1 + input.number(1) % 3), input);
    let encoding = likely(1 + input.number(1) % 3, input);
    let is_bitmap = u64::from(encoding == 2);
    let order = is_bitmap * (input.number(1) % 20);
    let page_shift = likely(12 + order, input);
    let request_id = likely(is_answer * (input.number(1) % 4), input);
    let start = likely(
        is_bitmap * ((input.number(2) + ((input.number(1) % 2) << 20)) >> order << order),
        input,
    );
    let entries = input.number(1) as usize % 40;
    let length = match encoding {
        1 => entries * 4,
        2 => entries.div_ceil(8),
        _ => entries * 16,
    };
    let count = likely(entries as u64, input);
    let mut bytes: Vec<u8> = [command, page_shift, status, encoding]
        .into_iter()
        .flat_map(|field| (field as u16).to_le_bytes())
        .chain([request_id, start, count].into_iter().flat_map(u64::to_le_bytes))
        .collect();
    if encoding == 3 {
        // Ranges near memory, since arbitrary bytes are hardly ever valid.
        for _ in 0..entries {
            let first = likely(input.number(2) % 0x500 + ((input.number(1) % 2) << 20), input);
            let pages = likely(input.number(1), input);
            bytes.extend(first.to_le_bytes().into_iter().chain(pages.to_le_bytes()));
        }
    } else {
        bytes.extend(input.bytes(length));
        bytes.resize(HEADER_BYTES + length, 0);
    }
    bytes
}

/// One action of the device's owner.
fn owner_step(guest: &mut Guest, input: &mut Input<'_>) {
    let balloon = &mut guest.balloon;
    match input.number(1) % 7 {
        0 => balloon.flush(),
        5 => balloon.set_report_check(
            [ReportCheck::Overwrite, ReportCheck::None][input.number(1) as usize % 2],
        ),
        1 => {
            balloon.request_statistics();
        }
        2 => {
            let phase_allows = balloon.negotiated().contains(Feature::FreePageHint);
            let started = balloon.start_hinting(Box::new(CheckingSink { ended: false }));
            assert!(phase_allows || started.is_err());
        }
        3 => {
            balloon.stop_hinting();
        }
        4 => {
            balloon.finish_hinting();
        }
        _ => {
            balloon.set_statistics_interval(Some(Duration::from_millis(input.number(1))));
            balloon.poll_statistics(Instant::now());
        }
    }
}

/// Checks that hinted ranges are sorted, and that none follows the end.
struct CheckingSink {
    ended: bool,
}

impl HintSink for CheckingSink {
    fn hint(&mut self, ranges: &[PageRange]) {
        assert!(!self.ended && !ranges.is_empty());
        assert!(ranges.iter().all(|range| !range.is_empty()));
        assert!(ranges.windows(2).all(|pair| pair[0].end() <= pair[1].start));
    }

    fn ended(&mut self, _end: HintEnd) {
        assert!(!std::mem::replace(&mut self.ended, true));
    }
}

/// Bytes consumed from the front; zeros once they are used up.
struct Input<'a>(&'a [u8]);

impl<'a> Input<'a> {
    fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    fn bytes(&mut self, count: usize) -> &'a [u8] {
        let (front, rest) = self.0.split_at(count.min(self.0.len()));
        self.0 = rest;
        front
    }

    /// A little-endian number of up to 8 bytes.
    fn number(&mut self, size_bytes: usize) -> u64 {
        self.bytes(size_bytes).iter().rev().fold(0, |number, byte| number << 8 | u64::from(*byte))
    }
}
