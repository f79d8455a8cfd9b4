//! A hostile driver: any chains in any rings, any frames, in any order.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use ebb_guest_ram::GuestMemory;
use rustix::event::PollFlags;
use virtio_bindings::virtio_config::VIRTIO_F_VERSION_1;
use virtio_queue::{Queue, QueueT};
use vm_memory::{Bytes, GuestAddress};

use super::backend::OpenNet;
use super::parts::Port;
use super::{CONTROL, LinkState, Net, RECEIVE, TRANSMIT};
use crate::config::NetConfig;
use crate::devices::virtio::VirtioDevice;
use crate::devices::virtio::state::DeviceState;
use crate::fuzzing::Input;

const MEMORY_BYTES: usize = 1 << 20;
/// Size of each ring.
const SIZE: u16 = 64;
/// Where a queue's rings are, from its base on.
const BASES: [u64; 3] = [0x1000, 0x5000, 0x9000];
const AVAILABLE: u64 = 0x1000;
const USED: u64 = 0x2000;
const INDIRECT: u64 = 0xe000;
const DATA: u64 = 0x10000;

static CHAINS: AtomicU64 = AtomicU64::new(0);

/// Number of chains that [`fuzz_net`] has given to devices in this process.
pub fn fuzzed_chains() -> u64 {
    CHAINS.load(Ordering::Relaxed)
}

fn queue(base: u64) -> Queue {
    #[expect(clippy::unwrap_used, reason = "the size is a power of two")]
    let mut queue = Queue::new(256).unwrap();
    queue.set_size(SIZE);
    queue.set_desc_table_address(Some(base as u32), None);
    queue.set_avail_ring_address(Some((base + AVAILABLE) as u32), None);
    queue.set_used_ring_address(Some((base + USED) as u32), None);
    queue.set_ready(true);
    queue
}

/// A descriptor that is often almost valid.
fn descriptor(input: &mut Input<'_>) -> [u8; 16] {
    let address = match input.byte() % 8 {
        0 => u64::MAX - u64::from(input.byte()),
        1 => MEMORY_BYTES as u64 - u64::from(input.byte()),
        2 => INDIRECT,
        _ => DATA + u64::from(input.byte()) * 0x101,
    };
    let length: u32 = match input.byte() % 8 {
        0 => 0,
        1 => u32::MAX,
        2 => 65_550 + u32::from(input.byte()),
        3 => 16 * u32::from(input.byte()),
        _ => u32::from(input.byte()) * 8,
    };
    let (flags, next) = (u16::from(input.byte() % 8), u16::from(input.byte() % 80));
    let mut bytes = [0; 16];
    bytes[..8].copy_from_slice(&address.to_le_bytes());
    bytes[8..12].copy_from_slice(&length.to_le_bytes());
    bytes[12..14].copy_from_slice(&flags.to_le_bytes());
    bytes[14..].copy_from_slice(&next.to_le_bytes());
    bytes
}

/// Any driver, backend and events: the device neither panics nor works without end, uses no more
/// buffers than it was given, and what it saves can be restored.
///
/// # Panics
/// If it is not so.
pub fn fuzz_net(data: &[u8]) {
    let mut input = Input::new(data);
    let Ok(memory) = GuestMemory::from_ranges(&[(GuestAddress(0), MEMORY_BYTES)]) else { return };
    let text = match input.byte() % 3 {
        0 => "fd=9,tx_ops=1000000,rx_bandwidth=1G",
        _ => "fd=9,mtu=1400",
    };
    let Ok(config) = text.parse::<NetConfig>() else { return };
    let lengths = input.take(16).iter().map(|length| usize::from(*length) * 270 + 1).collect();
    let port = Port::Scripted(lengths);
    let is_tap = input.byte().is_multiple_of(2);
    let opened = if is_tap { OpenNet::tap(port) } else { OpenNet::stream(port) };
    let mac = crate::config::MacAddress::random();
    let mut device = Net::new("net0", &config, mac, opened, memory.clone());
    for base in BASES {
        for index in 0..SIZE {
            let address = GuestAddress(base + 16 * u64::from(index));
            let _ = memory.write_slice(&descriptor(&mut input), address);
        }
    }
    for index in 0..16 {
        let address = GuestAddress(INDIRECT + 16 * index);
        let _ = memory.write_slice(&descriptor(&mut input), address);
    }
    let features = device.features()
        & (u64::from(input.byte()) << 24 | u64::from(input.byte()) << 15)
        | 1 << VIRTIO_F_VERSION_1;
    let queues = BASES.map(queue);
    if device.activate(features, queues.into()).is_err() {
        return;
    }
    let mut available = [0_u16; 3];
    for _ in 0..64 {
        let which = usize::from(input.byte() % 3);
        match input.byte() % 16 {
            0 => {
                device.set_link(LinkState::Down);
            }
            1 => {
                device.set_link(LinkState::Up);
            }
            2 => {
                device.on_timer(Instant::now());
            }
            3 => {
                device.on_host_events(PollFlags::from_bits_retain(input.byte().into()));
            }
            4 => check_saved(&mut device, &config, &memory, features),
            _ => {
                let count = u16::from(input.byte() % 64);
                add_chains(&memory, &mut input, which, &mut available[which], count);
            }
        }
        for queue in [RECEIVE, TRANSMIT, CONTROL] {
            // Each call makes progress, or asks for no other.
            for _ in 0..4 {
                if !device.process_queue(queue).more {
                    break;
                }
            }
        }
        check_used(&memory, available);
        if input.is_empty() {
            break;
        }
    }
    device.reset();
}

/// Makes `count` chains available, whose heads are sometimes outside of the table.
fn add_chains(
    memory: &GuestMemory,
    input: &mut Input<'_>,
    which: usize,
    available: &mut u16,
    count: u16,
) {
    let ring = BASES[which] + AVAILABLE;
    for _ in 0..count {
        let place = GuestAddress(ring + 4 + 2 * u64::from(*available % SIZE));
        let _ = memory.write_obj(u16::from(input.byte() % 66), place);
        *available = available.wrapping_add(1);
    }
    let _ = memory.write_obj(*available, GuestAddress(ring + 2));
    CHAINS.fetch_add(count.into(), Ordering::Relaxed);
}

/// No more buffers are used than were available.
fn check_used(memory: &GuestMemory, available: [u16; 3]) {
    for (base, available) in BASES.into_iter().zip(available) {
        // Buffers that the device has written are anywhere but in the rings.
        let used: u16 = memory.read_obj(GuestAddress(base + USED + 2)).unwrap_or_default();
        assert!(used <= available, "{used} buffers were used, {available} were available");
    }
}

/// What the device saves is valid for a device like it.
fn check_saved(device: &mut Net, config: &NetConfig, memory: &GuestMemory, features: u64) {
    let state = device.save();
    assert!(matches!(state, DeviceState::Net { .. }));
    let states = device.queue_states();
    if states.is_empty() {
        return;
    }
    let queues: Result<Vec<Queue>, _> = states.into_iter().map(Queue::try_from).collect();
    let opened = OpenNet::tap(Port::Scripted(vec![100, 70_000]));
    let mut other = Net::new("net1", config, device.mac(), opened, memory.clone());
    #[expect(clippy::unwrap_used, reason = "this is checked")]
    other.restore(&state, Some((features, queues.unwrap()))).unwrap();
}
