//! Random accesses to the device, from a seed.

use super::memory::{HUGE_BYTES, PAGE_BYTES};
use super::window::{CONFIG, Register};
use super::{
    ACKNOWLEDGE, AVAILABLE_OFFSET, DRIVER, DRIVER_OK, Descriptor, Device, EXTENSION, FEATURES_OK,
    INDIRECT, NEXT, PAGE_BITMAP, PAGE_RANGES, QUEUE_SIZE, QUEUES, Queue, USED_OFFSET, WRITE,
    messages,
};

/// Maximum offset of a buffer in the huge page and maximum length, so that no buffer reaches the
/// page that the device writes to.
const SAFE_BYTES: u64 = (HUGE_BYTES - PAGE_BYTES) as u64 / 2;

/// xorshift64* (Vigna, "An experimental exploration of Marsaglia's xorshift generators, scrambled",
/// 2016).
pub struct Dice(u64);

impl Dice {
    /// Any number.
    pub fn any(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    /// A number below `limit`.
    pub fn below(&mut self, limit: u64) -> u64 {
        (self.any() >> 16) % limit
    }

    /// True with a probability of `1 / chances`.
    pub fn one_in(&mut self, chances: u64) -> bool {
        self.below(chances) == 0
    }

    /// A random element.
    pub fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.below(from.len() as u64) as usize]
    }
}

/// Runs `rounds` rounds, each with a new start; returns the number of chains made available.
pub fn run(device: &mut Device, seed: u64, rounds: u64) -> u64 {
    let mut dice = Dice(seed | 1);
    let mut chains = 0;
    for _ in 0..rounds {
        fill_prey(device, &mut dice);
        let features = start(device, &mut dice);
        for _ in 0..=dice.below(40) {
            match dice.below(10) {
                // Without these features its words would be page frame numbers.
                _ if features & (PAGE_BITMAP | PAGE_RANGES) != 0 && dice.one_in(2) => {
                    messages::send_any(device, &mut dice);
                    chains += 1;
                }
                0 => poke(device, &mut dice),
                1 => {
                    let index = dice.below(QUEUES as u64) as usize;
                    let next = dice.any() as u16;
                    device.publish(index, next);
                }
                _ => {
                    chain(device, &mut dice);
                    chains += 1;
                }
            }
        }
    }
    chains
}

/// Fills the huge page with its own page frame numbers and invalid ones. None is 0, so that two
/// words never form an address below 4 GiB.
fn fill_prey(device: &mut Device, dice: &mut Dice) {
    let first = device.memory.prey_frame();
    let words: Vec<u32> = (0..HUGE_BYTES / 4)
        .map(|_| match dice.below(8) {
            0 => u32::MAX - dice.below(1000) as u32,
            1 => 0xd_0000 + dice.below(0x1000) as u32,
            _ => first + dice.below(512) as u32,
        })
        .collect();
    device.memory.write_words(0, words);
}

/// Starts the device, correctly or not; returns the features that were set.
fn start(device: &mut Device, dice: &mut Dice) -> u64 {
    let offered = device.offered();
    let features = match dice.below(8) {
        0 => dice.any(),
        1 => offered & dice.any(),
        2 | 3 => offered & !EXTENSION & (dice.any() | 1 << 32),
        _ => offered & (dice.any() | 1 << 32),
    };
    device.negotiate(features);
    for index in 0..QUEUES {
        if !dice.one_in(6) {
            device.prepare(index);
            if dice.one_in(4) {
                let page = device.memory.ring_address(index);
                let size = dice.pick(&[0, 1, 2, 7, 64, 128, 129, 0xffff]);
                // A misaligned descriptor table is refused.
                let shift = dice.pick(&[0, 0, 0, 8]);
                device.place(
                    index,
                    size,
                    [page + shift, page + AVAILABLE_OFFSET as u64, page + USED_OFFSET as u64],
                );
                // The device writes to memory that it also reads.
                if dice.one_in(2) {
                    let used = device.memory.written_by_device();
                    device.place(index, size, [page, page + AVAILABLE_OFFSET as u64, used]);
                }
                device.window.set(Register::QueueReady, 1);
            }
        }
    }
    let ready = ACKNOWLEDGE | DRIVER | DRIVER_OK;
    device.window.set(Register::Status, if dice.one_in(10) { ready } else { ready | FEATURES_OK });
    features
}

/// A random address of a buffer or ring: in the driver's memory or invalid.
fn address(device: &Device, dice: &mut Dice) -> u64 {
    let own = device.memory.prey() + dice.below(SAFE_BYTES);
    match dice.below(10) {
        0 => 0x8_0000_0000 + dice.below(1 << 40),
        1 => u64::MAX - dice.below(1 << 20),
        2 => own,
        3 => own & !15,
        _ => own & !4095,
    }
}

fn descriptor(device: &Device, dice: &mut Dice, index: usize) -> Descriptor {
    let length = match dice.below(6) {
        0 => 0,
        1 => dice.below(64) as u32,
        2 => PAGE_BYTES as u32,
        3 => dice.below(SAFE_BYTES) as u32,
        _ => 4 * dice.below(1024) as u32,
    };
    let flags = match dice.below(8) {
        0 => dice.any() as u16,
        1 => INDIRECT | NEXT,
        2 => INDIRECT,
        3 => WRITE,
        4 => WRITE | NEXT,
        5 => NEXT,
        _ => 0,
    };
    let next =
        if dice.one_in(5) { dice.any() as u16 } else { dice.below(u64::from(QUEUE_SIZE)) as u16 };
    // A buffer for a request, which the device writes.
    let is_written = index == Queue::Requests as usize && flags & WRITE != 0;
    let address = if is_written {
        device.memory.written_by_device() + dice.below(1024)
    } else {
        address(device, dice)
    };
    Descriptor { address, length, flags, next }
}

fn chain(device: &mut Device, dice: &mut Dice) {
    let index = dice.below(QUEUES as u64) as usize;
    if dice.one_in(4) || index == Queue::Requests as usize {
        let descriptors: Vec<_> =
            (0..PAGE_BYTES / 16).map(|_| descriptor(device, dice, index).to_bytes()).collect();
        let (table, _) = device.memory.table_mut();
        table.copy_from_slice(descriptors.as_flattened());
    }
    for _ in 0..=dice.below(12) {
        let at = dice.below(u64::from(QUEUE_SIZE)) as u16;
        let mut one = descriptor(device, dice, index);
        if one.flags & INDIRECT != 0 && dice.one_in(2) {
            one.address = device.memory.table_mut().1;
            one.length = one.length.min(PAGE_BYTES as u32);
        }
        device.set_descriptor(index, at, one);
    }
    let head =
        if dice.one_in(10) { dice.any() as u16 } else { dice.below(u64::from(QUEUE_SIZE)) as u16 };
    device.offer(index, head);
}

/// Writes to a register at the wrong time, with any width. The addresses of rings stay within the
/// driver's memory; otherwise the device would use the kernel's memory as a ring. Tables and
/// available rings may overlap, but not used rings: the device's writes would become addresses.
fn poke(device: &mut Device, dice: &mut Dice) {
    const RINGS: std::ops::Range<usize> = 0x80..0xb0;
    let offset = dice.pick(&[
        0x0, 0x14, 0x20, 0x24, 0x30, 0x38, 0x44, 0x50, 0x64, 0x70, 0x80, 0x90, 0xa0, 0xfc, 0xb0,
    ]) + if dice.one_in(4) { CONFIG } else { 0 };
    let value = dice.any();
    if RINGS.contains(&offset) {
        let ring = device.memory.ring_address(dice.below(QUEUES as u64) as usize);
        let target = if offset == Register::UsedLow as usize {
            device.memory.written_by_device()
        } else {
            ring
        };
        device.window.write32(offset, target as u32);
        device.window.write32(offset + 4, if dice.one_in(2) { 0 } else { value as u32 });
        return;
    }
    match dice.below(4) {
        0 => device.window.write8(offset + dice.below(4) as usize, value as u8),
        1 => device.window.write16(offset + 2 * dice.below(2) as usize, value as u16),
        _ => device.window.write32(offset, value as u32),
    }
    device.window.read32(offset);
}
