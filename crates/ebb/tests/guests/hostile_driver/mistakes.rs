//! Each error that the device distinguishes, once.

use super::memory::PAGE_BYTES;
use super::window::{CONFIG, Register};
use super::{
    ACKNOWLEDGE, DRIVER, DRIVER_OK, Descriptor, Device, EXTENSION, FEATURES_OK, INDIRECT, NEXT,
    QUEUE_SIZE, Queue, STANDARD_QUEUES, messages,
};

/// An address above all RAM of the guest, and below 2^44, the limit of page frame numbers.
const NO_MEMORY: u64 = 0x8_0000_0000;

/// Registers of a virtio device, which the guest reads like memory.
const REGISTERS: u64 = 0xd000_0f00;

/// A mistake on a correctly started device, with all features of the standard, or also those of the
/// extension.
type Mistake = fn(&mut Device);

const MISTAKES: [Mistake; 21] = [
    invalid_head,
    empty_chain,
    chain_that_loops,
    buffer_without_end,
    wrong_directions,
    buffer_outside_memory,
    part_of_an_entry,
    frames_outside_memory,
    frames_named_twice,
    misaligned_report,
    report_that_wraps_around,
    two_statistics_buffers,
    flood_of_statistics,
    hint_without_command,
    read_only_fields,
    accesses_across_the_end_of_the_registers,
    arbitrary_available_index,
    table_in_a_table,
    rings_outside_memory,
    rings_of_invalid_sizes,
    queue_moved_while_in_use,
];

const MISTAKES_IN_MESSAGES: [Mistake; 10] = [
    messages::invalid_headers,
    messages::payloads_of_wrong_length,
    messages::encodings_not_negotiated,
    messages::invalid_ranges,
    messages::frames_of_all_kinds_in_messages,
    messages::request_buffers_too_many_and_too_short,
    messages::answers_to_nothing,
    messages::answers_without_end_or_truth,
    empty_chain,
    arbitrary_available_index,
];

/// Makes all mistakes, each on a restarted device; returns their number.
pub fn make_all(device: &mut Device) -> u64 {
    let offered = device.offered();
    for mistake in MISTAKES {
        device.start_with(offered & !EXTENSION);
        mistake(device);
    }
    for mistake in MISTAKES_IN_MESSAGES {
        device.start_with(offered);
        mistake(device);
    }
    (MISTAKES.len() + MISTAKES_IN_MESSAGES.len()) as u64
}

fn invalid_head(device: &mut Device) {
    for head in [QUEUE_SIZE, u16::MAX] {
        device.offer(Queue::Inflate as usize, head);
    }
    let frame = device.memory.prey_frame();
    device.memory.write_words(0, [frame]);
    let address = device.memory.prey();
    device.send(Queue::Inflate, &[Descriptor::readable(address, 4)]);
}

fn empty_chain(device: &mut Device) {
    for queue in Queue::STANDARD {
        device.send(queue, &[Descriptor::default()]);
    }
}

fn chain_that_loops(device: &mut Device) {
    let address = device.memory.prey();
    device.memory.write_words(0, [device.memory.prey_frame()]);
    for queue in Queue::STANDARD {
        let index = queue as usize;
        for at in 0..QUEUE_SIZE {
            let next = (at + 1) % QUEUE_SIZE;
            device.set_descriptor(index, at, Descriptor { address, length: 4, flags: NEXT, next });
        }
        device.offer(index, 0);
    }
    // Wait by means of a valid chain after it.
    device.send(Queue::Deflate, &[Descriptor::readable(address, 4)]);
}

fn buffer_without_end(device: &mut Device) {
    let (first, address) = (device.memory.prey_frame(), device.memory.prey());
    // Only frames of the huge page, so that the device reads no others from any part of it.
    device.memory.write_words(0, (0..512 * 1024).map(|index| first + index % 512));
    for queue in [Queue::Inflate, Queue::Deflate, Queue::Statistics] {
        device.send(queue, &[Descriptor::readable(address, u32::MAX)]);
    }
}

fn wrong_directions(device: &mut Device) {
    let address = device.memory.prey();
    device.memory.write_words(0, [device.memory.prey_frame()]);
    for queue in [Queue::Inflate, Queue::Deflate, Queue::Statistics] {
        device.send(queue, &[Descriptor::writable(address, 64)]);
    }
    device.send(Queue::Reports, &[Descriptor::readable(address, PAGE_BYTES as u32)]);
    let mixed = [Descriptor::readable(address, 4), Descriptor::writable(address, 4)];
    device.send(Queue::Inflate, &mixed);
}

fn buffer_outside_memory(device: &mut Device) {
    for address in [NO_MEMORY, u64::MAX - 2, REGISTERS] {
        for queue in [Queue::Inflate, Queue::Deflate, Queue::Statistics, Queue::Hints] {
            device.send(queue, &[Descriptor::readable(address, 64)]);
        }
    }
}

fn part_of_an_entry(device: &mut Device) {
    let address = device.memory.prey();
    device.memory.write_words(0, [device.memory.prey_frame(), 0x1_0000]);
    for length in [1, 3, 5] {
        device.send(Queue::Inflate, &[Descriptor::readable(address, length)]);
        device.send(Queue::Deflate, &[Descriptor::readable(address, length)]);
        device.send(Queue::Statistics, &[Descriptor::readable(address, length)]);
    }
}

fn frames_outside_memory(device: &mut Device) {
    let address = device.memory.prey();
    for frame in [u32::MAX, (NO_MEMORY / PAGE_BYTES as u64) as u32, 0xd_0000] {
        device.memory.write_words(0, [frame, frame.wrapping_add(1), frame ^ 1]);
        device.send(Queue::Inflate, &[Descriptor::readable(address, 12)]);
        device.send(Queue::Deflate, &[Descriptor::readable(address, 12)]);
    }
}

fn frames_named_twice(device: &mut Device) {
    let (first, address) = (device.memory.prey_frame(), device.memory.prey());
    device.memory.write_words(0, [first + 9, first + 9, first + 8, first + 9]);
    device.send(Queue::Inflate, &[Descriptor::readable(address, 16)]);
    // Deflate a page that was never inflated.
    device.memory.write_words(0, [first + 100]);
    device.send(Queue::Deflate, &[Descriptor::readable(address, 4)]);
}

fn misaligned_report(device: &mut Device) {
    let address = device.memory.prey();
    let crooked = [
        Descriptor::writable(address + 17, 3 * PAGE_BYTES as u32),
        Descriptor::writable(address + 1, 100),
        Descriptor::writable(address, 2 * PAGE_BYTES as u32 - 1),
    ];
    device.send(Queue::Reports, &crooked);
}

fn report_that_wraps_around(device: &mut Device) {
    let impossible = [
        Descriptor::writable(u64::MAX - 4095, u32::MAX),
        Descriptor::writable(NO_MEMORY, u32::MAX),
        Descriptor::writable(u64::MAX, 1),
    ];
    device.send(Queue::Reports, &impossible);
}

fn two_statistics_buffers(device: &mut Device) {
    let address = device.memory.prey();
    device.memory.write_words(0, [0; 64]);
    for at in 0..4 {
        device.set_descriptor(Queue::Statistics as usize, at, Descriptor::readable(address, 20));
    }
    for at in 0..4 {
        device.offer(Queue::Statistics as usize, at);
    }
    device.send(Queue::Deflate, &[Descriptor::readable(address, 4)]);
}

fn flood_of_statistics(device: &mut Device) {
    let address = device.memory.prey();
    device.memory.prey_mut().fill(0xa5);
    for _ in 0..100 {
        device.send(Queue::Statistics, &[Descriptor::readable(address, 1 << 20)]);
        // Restart the device, so that it drops the buffer that it holds.
        device.start_with(device.offered() & !EXTENSION);
    }
    device.memory.prey_mut().fill(0);
}

fn hint_without_command(device: &mut Device) {
    let address = device.memory.prey();
    for id in [0, 1, 2, u32::MAX] {
        device.memory.write_words(0, [id]);
        device.send(Queue::Hints, &[Descriptor::readable(address, 4)]);
        device.send(Queue::Hints, &[Descriptor::writable(address, PAGE_BYTES as u32)]);
    }
}

fn read_only_fields(device: &mut Device) {
    // num_pages and free_page_hint_cmd_id are read-only for the driver (section 5.5.4).
    for offset in [0, 8] {
        device.window.write32(CONFIG + offset, u32::MAX);
        device.window.write16(CONFIG + offset + 2, 0x5555);
        device.window.write8(CONFIG + offset + 3, 0xff);
    }
    device.window.write32(CONFIG + 4, u32::MAX);
    device.window.write32(CONFIG + 12, 0xaaaa_aaaa);
    device.window.write32(0xffc, 1);
}

fn accesses_across_the_end_of_the_registers(device: &mut Device) {
    for before in 1..8 {
        device.window.access_across(CONFIG - before);
    }
}

fn arbitrary_available_index(device: &mut Device) {
    for index in 0..super::QUEUES {
        device.publish(index, 0x8000);
        device.publish(index, QUEUE_SIZE + 1);
    }
    device.window.set(Register::QueueNotify, u32::MAX);
    let address = device.memory.prey();
    device.send(Queue::Deflate, &[Descriptor::readable(address, 4)]);
}

fn table_in_a_table(device: &mut Device) {
    let (table, at) = device.memory.table_mut();
    let nested =
        Descriptor { address: at, length: PAGE_BYTES as u32, flags: INDIRECT | NEXT, next: 1 };
    for place in table.chunks_exact_mut(16) {
        place.copy_from_slice(&nested.to_bytes());
    }
    for queue in Queue::STANDARD {
        for length in [PAGE_BYTES as u32, 16, 15, 0] {
            device.send(queue, &[Descriptor { address: at, length, flags: INDIRECT, next: 0 }]);
        }
        device.send(
            queue,
            &[Descriptor { address: NO_MEMORY, length: 32, flags: INDIRECT, next: 0 }],
        );
    }
}

/// Starts the device with one queue of this size and location, which it must refuse or survive.
fn start_with(device: &mut Device, size: u32, rings: [u64; 3]) {
    let offered = device.offered();
    device.negotiate(offered & !EXTENSION);
    for index in 0..STANDARD_QUEUES {
        device.prepare(index);
    }
    device.window.set(Register::QueueSelect, 0);
    device.window.set(Register::QueueReady, 0);
    device.place(0, size, rings);
    device.window.set(Register::QueueReady, 1);
    device.window.set(Register::Status, ACKNOWLEDGE | DRIVER | FEATURES_OK | DRIVER_OK);
    device.publish(0, 1);
}

fn rings_outside_memory(device: &mut Device) {
    let page = device.memory.ring_address(0);
    let good = [page, page + super::AVAILABLE_OFFSET as u64, page + super::USED_OFFSET as u64];
    for bad in [NO_MEMORY, !15, REGISTERS, page + 1] {
        for ring in 0..3 {
            let mut rings = good;
            rings[ring] = bad;
            start_with(device, QUEUE_SIZE.into(), rings);
        }
    }
}

fn rings_of_invalid_sizes(device: &mut Device) {
    let page = device.memory.ring_address(0);
    let rings = [page, page + super::AVAILABLE_OFFSET as u64, page + super::USED_OFFSET as u64];
    for size in [0, 3, 127, 256, 0x8000, 0xffff, 0x1_0080, u32::MAX] {
        start_with(device, size, rings);
    }
}

fn queue_moved_while_in_use(device: &mut Device) {
    device.place(0, 8, [NO_MEMORY; 3]);
    device.window.set(Register::QueueReady, 0);
    device.window.set(Register::DriverFeatures, u32::MAX);
    device.memory.write_words(0, [device.memory.prey_frame()]);
    let address = device.memory.prey();
    device.send(Queue::Inflate, &[Descriptor::readable(address, 4)]);
}
