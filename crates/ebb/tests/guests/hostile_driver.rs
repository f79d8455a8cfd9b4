//! A balloon driver that violates every rule. It runs as a program in a guest and drives the
//! device's registers and rings through `/dev/mem`, after the kernel's driver was unbound.
//!
//! It can harm only the monitor: the page frames that it sends are its own or not memory at all,
//! and its rings are in its own pages. Otherwise it would crash its own guest, which every driver
//! can do and which tests nothing.

pub mod attacker;
mod chaos;
mod memory;
mod messages;
mod mistakes;
mod window;

use std::process::ExitCode;
use std::sync::atomic::{Ordering, fence};
use std::thread;
use std::time::{Duration, Instant};

use memory::Memory;
use window::{BALLOON, Register, Window};

/// First argument that runs this program as the hostile driver.
pub const ARGUMENT: &str = "--hostile-driver";
/// Number of entries of each ring. All three rings of this size fit into a page.
const QUEUE_SIZE: u16 = 128;
/// Offsets of the rings in their page.
const AVAILABLE_OFFSET: usize = 2048;
const USED_OFFSET: usize = 2560;
/// virtio 1.3 section 5.5.2: inflate, deflate, statistics, free page hints, reports;
/// docs/extension.md: host requests.
const QUEUES: usize = 6;
/// Number of queues without the extension.
const STANDARD_QUEUES: usize = 5;
/// Feature bits of the extension.
const PAGE_BITMAP: u64 = 1 << 50;
const PAGE_RANGES: u64 = 1 << 51;
const HOST_REQUESTS: u64 = 1 << 52;
const EXTENSION: u64 = PAGE_BITMAP | PAGE_RANGES | HOST_REQUESTS;
/// Device status bits (virtio 1.3 section 2.1).
const ACKNOWLEDGE: u32 = 1;
const DRIVER: u32 = 2;
const DRIVER_OK: u32 = 4;
const FEATURES_OK: u32 = 8;
/// Descriptor flags (section 2.7.5).
const NEXT: u16 = 1;
const WRITE: u16 = 2;
const INDIRECT: u16 = 4;
/// Time limit for an answer. The device answers within microseconds, but never answers a chain that
/// it refuses.
const ANSWER_LIMIT: Duration = Duration::from_millis(100);
/// Time limit for an answer if many chains are refused.
const SHORT_LIMIT: Duration = Duration::from_millis(2);

/// A queue by its index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Queue {
    Inflate,
    Deflate,
    Statistics,
    Hints,
    Reports,
    Requests,
}

impl Queue {
    const STANDARD: [Self; STANDARD_QUEUES] =
        [Self::Inflate, Self::Deflate, Self::Statistics, Self::Hints, Self::Reports];
}

/// A descriptor (section 2.7.5).
#[derive(Clone, Copy, Debug, Default)]
struct Descriptor {
    address: u64,
    length: u32,
    flags: u16,
    next: u16,
}

impl Descriptor {
    fn readable(address: u64, length: u32) -> Self {
        Self { address, length, ..Self::default() }
    }

    fn writable(address: u64, length: u32) -> Self {
        Self { address, length, flags: WRITE, next: 0 }
    }

    fn to_bytes(self) -> [u8; 16] {
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&self.address.to_le_bytes());
        bytes[8..12].copy_from_slice(&self.length.to_le_bytes());
        bytes[12..14].copy_from_slice(&self.flags.to_le_bytes());
        bytes[14..].copy_from_slice(&self.next.to_le_bytes());
        bytes
    }
}

/// The device and the driver's memory.
struct Device {
    window: Window,
    memory: Memory,
    /// Next index of each available ring.
    next: [u16; QUEUES],
    /// Number of entries of each ring.
    size: u16,
}

impl Device {
    fn open() -> Result<Self, String> {
        let window = Window::open(BALLOON)?;
        let (memory, next) = (Memory::allocate(QUEUES)?, [0; QUEUES]);
        Ok(Self { window, memory, next, size: QUEUE_SIZE })
    }

    /// Resets the device and accepts these features; returns whether the device agrees.
    fn negotiate(&mut self, features: u64) -> bool {
        let window = &self.window;
        window.set(Register::Status, 0);
        window.set(Register::Status, ACKNOWLEDGE | DRIVER);
        for (page, bits) in [(0, features as u32), (1, (features >> 32) as u32)] {
            window.set(Register::DriverFeaturesSelect, page);
            window.set(Register::DriverFeatures, bits);
        }
        window.set(Register::Status, ACKNOWLEDGE | DRIVER | FEATURES_OK);
        window.get(Register::Status) & FEATURES_OK != 0
    }

    /// All features that the device offers.
    fn offered(&self) -> u64 {
        let page = |number| {
            self.window.set(Register::DeviceFeaturesSelect, number);
            u64::from(self.window.get(Register::DeviceFeatures))
        };
        page(0) | page(1) << 32
    }

    /// Makes a queue ready, with empty rings in its page.
    fn prepare(&mut self, index: usize) {
        self.memory.ring_mut(index).fill(0);
        self.next[index] = 0;
        let page = self.memory.ring_address(index);
        self.place(
            index,
            self.size.into(),
            [page, page + AVAILABLE_OFFSET as u64, page + USED_OFFSET as u64],
        );
        self.window.set(Register::QueueReady, 1);
    }

    /// Selects a queue and sets the addresses of its rings.
    fn place(&self, index: usize, size: u32, rings: [u64; 3]) {
        self.window.set(Register::QueueSelect, index as u32);
        self.window.set(Register::QueueSize, size);
        let low = [Register::DescriptorsLow, Register::AvailableLow, Register::UsedLow];
        for (register, address) in low.into_iter().zip(rings) {
            self.window.set(register, address as u32);
            self.window.write32(register as usize + 4, (address >> 32) as u32);
        }
    }

    /// Starts the device correctly with these features and their queues, which must be the first
    /// ones.
    fn start_with(&mut self, features: u64) {
        self.negotiate(features);
        let queues = if features & HOST_REQUESTS == 0 { STANDARD_QUEUES } else { QUEUES };
        for index in 0..queues {
            self.prepare(index);
        }
        self.window.set(Register::Status, ACKNOWLEDGE | DRIVER | FEATURES_OK | DRIVER_OK);
    }

    fn set_descriptor(&mut self, index: usize, at: u16, descriptor: Descriptor) {
        let start = usize::from(at % QUEUE_SIZE) * 16;
        self.memory.ring_mut(index)[start..start + 16].copy_from_slice(&descriptor.to_bytes());
    }

    /// Makes the chain that begins at `head` available and notifies the device.
    fn offer(&mut self, index: usize, head: u16) {
        let slot = AVAILABLE_OFFSET + 4 + usize::from(self.next[index] % self.size) * 2;
        self.memory.ring_mut(index)[slot..slot + 2].copy_from_slice(&head.to_le_bytes());
        let next = self.next[index].wrapping_add(1);
        self.publish(index, next);
    }

    /// Sets the available index and notifies the device.
    fn publish(&mut self, index: usize, next: u16) {
        self.next[index] = next;
        // The device must see entries before their index, and the index before the notification.
        fence(Ordering::SeqCst);
        self.memory.ring_mut(index)[AVAILABLE_OFFSET + 2..AVAILABLE_OFFSET + 4]
            .copy_from_slice(&next.to_le_bytes());
        fence(Ordering::SeqCst);
        self.window.set(Register::QueueNotify, index as u32);
    }

    /// Chains the descriptors from slot 0 on, makes them available, and waits for the answer or the
    /// time limit.
    fn send(&mut self, queue: Queue, descriptors: &[Descriptor]) {
        self.send_within(queue, descriptors, ANSWER_LIMIT);
    }

    /// As [`Device::send`], with another time limit.
    fn send_within(&mut self, queue: Queue, descriptors: &[Descriptor], limit: Duration) {
        let index = queue as usize;
        for (at, descriptor) in descriptors.iter().enumerate() {
            let mut descriptor = *descriptor;
            if at + 1 < descriptors.len() {
                descriptor.flags |= NEXT;
                descriptor.next = at as u16 + 1;
            }
            self.set_descriptor(index, at as u16, descriptor);
        }
        let before = self.memory.used_index(index);
        self.offer(index, 0);
        let deadline = Instant::now() + limit;
        while self.memory.used_index(index) == before && Instant::now() < deadline {
            thread::sleep(Duration::from_micros(200));
        }
    }
}

/// Makes every mistake once, then random accesses in `rounds` rounds. Prints their number.
pub fn main(seed: &str, rounds: &str) -> ExitCode {
    let done = || -> Result<(u64, u64), String> {
        let seed: u64 = seed.parse().map_err(|_| format!("no seed: {seed}"))?;
        let rounds: u64 = rounds.parse().map_err(|_| format!("no number of rounds: {rounds}"))?;
        let mut device = Device::open()?;
        let mistakes = mistakes::make_all(&mut device);
        let chains = chaos::run(&mut device, seed, rounds);
        // Reset the device for the next driver.
        device.window.set(Register::Status, 0);
        Ok((mistakes, chains))
    };
    match done() {
        Ok((mistakes, chains)) => {
            println!("{{\"mistakes\":{mistakes},\"chains\":{chains}}}");
            ExitCode::SUCCESS
        }
        Err(problem) => {
            eprintln!("{problem}");
            ExitCode::FAILURE
        }
    }
}
