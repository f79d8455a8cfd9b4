//! Each error of docs/extension.md that the device distinguishes, and nearly valid messages.
//!
//! If messages were not negotiated, their words are page frame numbers of the guest's first memory.
//! Therefore messages are sent on the balloon's queues only if they were negotiated.

use std::thread;
use std::time::{Duration, Instant};

use super::chaos::Dice;
use super::memory::{HUGE_BYTES, PAGE_BYTES};
use super::{ANSWER_LIMIT, Descriptor, Device, PAGE_BITMAP, PAGE_RANGES, Queue, SHORT_LIMIT};

const INFLATE: u16 = 1;
const DEFLATE: u16 = 2;
const FREE_PAGES: u16 = 3;
const NONE: u16 = 0;
const MORE: u16 = 1;
const DONE: u16 = 2;
const PFNS: u16 = 1;
const BITMAP: u16 = 2;
const RANGES: u16 = 3;
/// Number of page frames in the huge page.
const FRAMES: u64 = (HUGE_BYTES / PAGE_BYTES) as u64;
/// A frame above all RAM.
const NO_FRAME: u64 = 0x80_0000;
/// Maximum wait for a request for free pages, which the test sends continually.
const REQUEST_LIMIT: Duration = Duration::from_millis(500);

/// A message's header and payload, with any values.
#[derive(Clone, Debug)]
struct Message {
    command: u16,
    page_shift: u16,
    status: u16,
    encoding: u16,
    request_id: u64,
    start: u64,
    count: u64,
    payload: Vec<u8>,
}

impl Message {
    fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        for field in [self.command, self.page_shift, self.status, self.encoding] {
            bytes.extend(field.to_le_bytes());
        }
        for field in [self.request_id, self.start, self.count] {
            bytes.extend(field.to_le_bytes());
        }
        bytes.extend(&self.payload);
        bytes
    }

    fn ranges(command: u16, ranges: &[(u64, u64)]) -> Self {
        Self {
            command,
            page_shift: 12,
            status: NONE,
            encoding: RANGES,
            request_id: 0,
            start: 0,
            count: ranges.len() as u64,
            payload: ranges
                .iter()
                .flat_map(|(start, pages)| [start.to_le_bytes(), pages.to_le_bytes()].concat())
                .collect(),
        }
    }

    fn bitmap(command: u16, page_shift: u16, start: u64, bits: u64) -> Self {
        let payload = vec![0xff; bits.div_ceil(8) as usize];
        Self {
            page_shift,
            encoding: BITMAP,
            start,
            count: bits,
            payload,
            ..Self::ranges(command, &[])
        }
    }

    fn pfns(command: u16, pfns: &[u32]) -> Self {
        let payload = pfns.iter().flat_map(|pfn| pfn.to_le_bytes()).collect();
        Self { encoding: PFNS, count: pfns.len() as u64, payload, ..Self::ranges(command, &[]) }
    }

    fn answer(request_id: u64, status: u16, ranges: &[(u64, u64)]) -> Self {
        Self { status, request_id, ..Self::ranges(FREE_PAGES, ranges) }
    }
}

/// Sends a message and waits until the device returns it.
fn send(device: &mut Device, queue: Queue, message: &Message) {
    send_within(device, queue, message, ANSWER_LIMIT);
}

fn send_within(device: &mut Device, queue: Queue, message: &Message, limit: Duration) {
    let bytes = message.to_bytes();
    device.memory.prey_mut()[..bytes.len()].copy_from_slice(&bytes);
    let address = device.memory.prey();
    device.send_within(queue, &[Descriptor::readable(address, bytes.len() as u32)], limit);
}

fn frame(device: &Device) -> u64 {
    device.memory.prey_frame().into()
}

pub fn invalid_headers(device: &mut Device) {
    let good = Message::ranges(INFLATE, &[(frame(device), 1)]);
    let wrong = [
        Message { command: 0, ..good.clone() },
        Message { command: 4, ..good.clone() },
        Message { command: u16::MAX, ..good.clone() },
        Message { page_shift: 13, ..good.clone() },
        Message { status: DONE, ..good.clone() },
        Message { encoding: 0, ..good.clone() },
        Message { encoding: 4, ..good.clone() },
        Message { request_id: 1, ..good.clone() },
        Message { start: frame(device), ..good.clone() },
        Message { count: 0, payload: Vec::new(), ..good.clone() },
        Message { count: u64::MAX, ..good.clone() },
        Message { page_shift: 11, ..Message::bitmap(INFLATE, 12, frame(device), 8) },
        Message { page_shift: 31, ..Message::bitmap(INFLATE, 12, frame(device), 8) },
        Message { count: (8 << 20) + 1, ..Message::bitmap(INFLATE, 12, frame(device), 8) },
        Message::bitmap(INFLATE, 21, frame(device) + 1, 1),
        Message::bitmap(INFLATE, 30, 1 << 52, 1),
        Message { count: (64 << 10) + 1, ..Message::pfns(INFLATE, &[]) },
        // The command of another queue.
        Message { command: DEFLATE, ..good.clone() },
        Message::answer(1, DONE, &[]),
    ];
    for message in &wrong {
        send(device, Queue::Inflate, message);
    }
    send(device, Queue::Deflate, &good);
    send(device, Queue::Requests, &good);
    for message in
        [Message::answer(0, DONE, &[]), Message::answer(1, NONE, &[]), Message::answer(1, 4, &[])]
    {
        send(device, Queue::Requests, &message);
    }
    let address = device.memory.prey();
    for queue in [Queue::Inflate, Queue::Deflate, Queue::Requests] {
        for length in [1, 8, 31] {
            device.send(queue, &[Descriptor::readable(address, length)]);
        }
    }
}

pub fn payloads_of_wrong_length(device: &mut Device) {
    let frame = frame(device);
    let good = [
        Message::ranges(INFLATE, &[(frame, 1), (frame + 8, 8)]),
        Message::bitmap(INFLATE, 12, frame, 64),
        Message::pfns(INFLATE, &[frame as u32, frame as u32 + 1]),
    ];
    for message in good {
        let length = message.payload.len();
        for wrong in [0, 1, length - 1, length + 1, length + 4096] {
            let mut message = message.clone();
            message.payload.resize(wrong, 0xff);
            send(device, Queue::Inflate, &message);
            send(device, Queue::Deflate, &Message { command: DEFLATE, ..message });
        }
    }
    // A message beyond the maximum size, and one whose payload is not in memory.
    let header = Message::bitmap(INFLATE, 12, frame, 512).to_bytes();
    device.memory.prey_mut()[..header.len()].copy_from_slice(&header);
    let address = device.memory.prey();
    device.send(Queue::Inflate, &[Descriptor::readable(address, HUGE_BYTES as u32)]);
    let nowhere = Descriptor::readable(NO_FRAME * PAGE_BYTES as u64, 64);
    device.send(Queue::Inflate, &[Descriptor::readable(address, 32), nowhere]);
}

pub fn encodings_not_negotiated(device: &mut Device) {
    let frame = frame(device);
    for (agreed, other) in [
        (PAGE_RANGES, Message::bitmap(INFLATE, 12, frame, 8)),
        (PAGE_BITMAP, Message::ranges(INFLATE, &[(frame, 8)])),
    ] {
        device.start_with(device.offered() & !(PAGE_BITMAP | PAGE_RANGES) | agreed);
        send(device, Queue::Inflate, &other);
        send(device, Queue::Deflate, &Message { command: DEFLATE, ..other });
    }
}

pub fn invalid_ranges(device: &mut Device) {
    let frame = frame(device);
    for range in [
        (frame, 0),
        (frame, u64::MAX),
        (u64::MAX, 1),
        (u64::MAX, u64::MAX),
        (1 << 52, 1),
        (0, 1 << 53),
    ] {
        // The message is refused as a whole, including the valid range.
        send(device, Queue::Inflate, &Message::ranges(INFLATE, &[(frame, 1), range]));
        send(device, Queue::Deflate, &Message::ranges(DEFLATE, &[range]));
        send(device, Queue::Requests, &Message::answer(1, MORE, &[range]));
    }
}

pub fn frames_of_all_kinds_in_messages(device: &mut Device) {
    let frame = frame(device);
    // Twice, partly or not in memory, and as many as a message can contain.
    for (command, queue) in [(INFLATE, Queue::Inflate), (DEFLATE, Queue::Deflate)] {
        let far = NO_FRAME << 8;
        send(
            device,
            queue,
            &Message::ranges(command, &[(frame, 8), (frame + 4, 8), (far, 1 << 40)]),
        );
        send(device, queue, &Message::bitmap(command, 21, frame, 1));
        send(device, queue, &Message::bitmap(command, 30, NO_FRAME, 4096));
        send(device, queue, &Message::bitmap(command, 12, NO_FRAME, 8 << 20));
        let pfns: Vec<u32> =
            (0..64 << 10).map(|index| frame as u32 + index % FRAMES as u32).collect();
        send(device, queue, &Message::pfns(command, &pfns));
        let ranges: Vec<_> = (0..64 << 10).map(|index| (frame + index % FRAMES, 1)).collect();
        send(device, queue, &Message::ranges(command, &ranges));
    }
}

pub fn request_buffers_too_many_and_too_short(device: &mut Device) {
    let address = device.memory.written_by_device();
    for length in [1, 15] {
        device.send(Queue::Requests, &[Descriptor::writable(address, length)]);
    }
    device.send(Queue::Requests, &[Descriptor::writable(NO_FRAME * PAGE_BYTES as u64, 16)]);
    let end = device.memory.prey() + HUGE_BYTES as u64;
    device.send(
        Queue::Requests,
        &[Descriptor::writable(u64::MAX - 7, 16), Descriptor::writable(end, 0)],
    );
    let index = Queue::Requests as usize;
    let before = device.memory.used_index(index);
    for at in 0..8 {
        device.set_descriptor(index, at, Descriptor::writable(address + 16 * u64::from(at), 16));
        device.offer(index, at);
    }
    // All but the last one come back. A reset before that would take them away unseen: the device
    // may answer other queues first.
    let deadline = Instant::now() + REQUEST_LIMIT;
    while device.memory.used_index(index).wrapping_sub(before) < 7 && Instant::now() < deadline {
        thread::sleep(Duration::from_millis(1));
    }
    send(device, Queue::Deflate, &Message::ranges(DEFLATE, &[(frame(device), 1)]));
}

pub fn answers_to_nothing(device: &mut Device) {
    let free = [(frame(device), FRAMES)];
    for request_id in [1, 12_345, u64::MAX] {
        send(device, Queue::Requests, &Message::answer(request_id, MORE, &free));
        send(device, Queue::Requests, &Message::answer(request_id, DONE, &free));
    }
}

pub fn answers_without_end_or_truth(device: &mut Device) {
    let address = device.memory.written_by_device();
    let index = Queue::Requests as usize;
    device.set_descriptor(index, 64, Descriptor::writable(address, 16));
    device.offer(index, 64);
    let deadline = Instant::now() + REQUEST_LIMIT;
    while device.memory.used_index(index) == 0 && Instant::now() < deadline {
        thread::sleep(Duration::from_millis(1));
    }
    let request_id = device.memory.request_id();
    // All of memory, repeatedly, and frames outside of it.
    for _ in 0..50 {
        send(
            device,
            Queue::Requests,
            &Message::answer(request_id, MORE, &[(0, 1 << 40), (0, 1 << 18)]),
        );
    }
    for other in [request_id.wrapping_add(1), request_id.saturating_sub(1).max(1)] {
        send(device, Queue::Requests, &Message::answer(other, DONE, &[]));
    }
    for _ in 0..3 {
        send(device, Queue::Requests, &Message::answer(request_id.max(1), DONE, &[(0, 1 << 18)]));
    }
}

/// Sends a valid or nearly valid message. In any interpretation it contains only frames of the huge
/// page or outside of memory.
pub fn send_any(device: &mut Device, dice: &mut Dice) {
    let frame = frame(device);
    let queue = dice.pick(&[Queue::Inflate, Queue::Deflate, Queue::Requests]);
    let command = match queue {
        _ if dice.one_in(8) => dice.below(6) as u16,
        Queue::Inflate => INFLATE,
        Queue::Deflate => DEFLATE,
        _ => FREE_PAGES,
    };
    let part = |dice: &mut Dice| {
        let start = dice.below(FRAMES);
        (frame + start, 1 + dice.below(FRAMES - start))
    };
    let mut message = match dice.below(4) {
        0 => Message::pfns(command, &[(frame + dice.below(FRAMES)) as u32; 3]),
        1 => Message::bitmap(command, 12, frame + dice.below(8), 1 + dice.below(FRAMES - 8)),
        2 => Message::bitmap(command, 12 + dice.below(19) as u16, NO_FRAME, 1 + dice.below(1000)),
        _ => {
            let ranges: Vec<_> = (0..dice.below(20)).map(|_| part(dice)).collect();
            Message::ranges(command, &ranges)
        }
    };
    if queue == Queue::Requests {
        message.request_id = dice.below(100);
        message.status = dice.below(5) as u16;
    }
    // The following changes make a message invalid or leave it harmless.
    match dice.below(12) {
        0 => message.status = dice.any() as u16,
        1 => message.request_id = dice.any(),
        2 => message.count = message.count.wrapping_add(dice.below(3)).wrapping_sub(1),
        3 => message.count = dice.any(),
        4 => message.start = dice.any() | 1 << 60,
        5 => message.payload.truncate(message.payload.len() / 2),
        _ => {}
    }
    send_within(device, queue, &message, SHORT_LIMIT);
}
