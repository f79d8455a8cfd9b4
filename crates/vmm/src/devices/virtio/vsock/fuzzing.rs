//! Fuzz target: a guest that puts any chains on the queues, and a host whose clients and servers do
//! anything meanwhile.

use std::io::{self, Read as _, Write as _};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use ebb_guest_ram::GuestMemory;
use virtio_queue::{Queue, QueueT as _};
use vm_memory::{Bytes as _, GuestAddress};

use super::packet::{HEADER_BYTES, HOST_CID, Header, TYPE_STREAM};
use super::testing::Host;
use super::{EVENT, QUEUE_SIZES, RX, TX, VirtioDevice, Vsock};
use crate::fuzzing::{Input, prepared};

const CID: u32 = 3;
const MEMORY_BYTES: u64 = 1 << 20;
/// Rings of the queues, and buffers after them.
const RINGS: [u64; 3] = [0, 0x4000, 0x8000];
const AVAILABLE: u64 = 0x1000;
const USED: u64 = 0x2000;
const BUFFERS: u64 = 0x10000;
/// Bytes of a buffer's place; it may be longer.
const PLACE_BYTES: u64 = 0x800;

const NEXT: u16 = 1;
const WRITE: u16 = 2;
const INDIRECT: u16 = 4;

/// Most connections of the device under test.
const MOST: usize = 16;
/// Most calls until a device has nothing more to do.
const MOST_CALLS: usize = 1000;

/// As [`hostile_chains`], without its result.
pub fn fuzz_chains(data: &[u8]) {
    let _ = hostile_chains(data);
}

/// Any chains, and a host that does anything: nothing panics or works without an end, no used ring
/// has more than what was made available, and what is kept is bounded. Returns the number of
/// chains.
pub fn hostile_chains(data: &[u8]) -> u64 {
    let mut chains = 0;
    prepared(Scene::new().map(|mut scene| chains = scene.run(&mut Input::new(data))));
    chains
}

struct Scene {
    memory: GuestMemory,
    device: Vsock,
    host: Host,
    now: Instant,
    /// Chains made available on each queue.
    available: [u16; 3],
    next_descriptor: [u16; 3],
    clients: Vec<UnixStream>,
    /// Ports at the host of the guest's last packets.
    last_port: u32,
}

fn queues() -> Vec<Queue> {
    let all = QUEUE_SIZES.into_iter().zip(RINGS);
    all.filter_map(|(size, ring)| {
        let mut queue = Queue::new(size).ok()?;
        queue.set_size(size);
        queue.set_desc_table_address(Some(ring as u32), None);
        queue.set_avail_ring_address(Some((ring + AVAILABLE) as u32), None);
        queue.set_used_ring_address(Some((ring + USED) as u32), None);
        queue.set_ready(true);
        Some(queue)
    })
    .collect()
}

impl Scene {
    fn new() -> io::Result<Self> {
        let (host, listener, link) = Host::new()?;
        let ranges = [(GuestAddress(0), MEMORY_BYTES as usize)];
        let memory = GuestMemory::from_ranges(&ranges).map_err(io::Error::other)?;
        let mut device = Vsock::new(CID, memory.clone(), listener, link, MOST)?;
        device.activate(0, queues()).map_err(io::Error::other)?;
        Ok(Self {
            memory,
            device,
            host,
            now: Instant::now(),
            available: [0; 3],
            next_descriptor: [0; 3],
            clients: Vec::new(),
            last_port: 0,
        })
    }

    fn run(&mut self, input: &mut Input<'_>) -> u64 {
        let mut chains = 0;
        while !input.is_empty() {
            match input.byte() % 16 {
                // Most of the work: several chains, then a notification.
                0..=7 => {
                    for _ in 0..=input.below(16) {
                        chains += 1;
                        match input.byte() % 8 {
                            0..=4 => self.packet(input),
                            5 => self.buffer(input, RX),
                            6 => self.nonsense(input),
                            _ => self.buffer(input, EVENT),
                        }
                    }
                    self.process();
                }
                8 => {
                    for _ in 0..8 {
                        chains += 1;
                        self.buffer(input, RX);
                    }
                    self.process();
                }
                9 => self.client(input),
                10 | 11 => self.traffic(input),
                12 => match input.byte() % 3 {
                    0 => self.host.companion.answer(None),
                    1 => {
                        let _ = self.host.companion.request();
                        self.host.companion.answer(None);
                    }
                    _ => self.clients.extend(self.host.serve().map(|(_, stream)| stream)),
                },
                13 => self.process(),
                14 => self.pass(input),
                _ => self.restart(input),
            }
            self.check();
        }
        chains
    }

    fn write(&self, bytes: &[u8], address: u64) {
        // Outside of memory: nothing is written.
        let _ = self.memory.write_slice(bytes, GuestAddress(address));
    }

    /// Makes descriptors of one chain available.
    fn chain(&mut self, queue: usize, descriptors: &[(u64, u32, u16)]) {
        let (size, ring) = (QUEUE_SIZES[queue], RINGS[queue]);
        let head = self.next_descriptor[queue];
        for (index, (address, length, flags)) in descriptors.iter().enumerate() {
            let next = (head + index as u16 + 1) % size;
            let flags = if index + 1 < descriptors.len() { flags | NEXT } else { *flags };
            let mut bytes = [0; 16];
            bytes[..8].copy_from_slice(&address.to_le_bytes());
            bytes[8..12].copy_from_slice(&length.to_le_bytes());
            bytes[12..14].copy_from_slice(&flags.to_le_bytes());
            bytes[14..].copy_from_slice(&next.to_le_bytes());
            self.write(&bytes, ring + 16 * u64::from((head + index as u16) % size));
        }
        self.next_descriptor[queue] = (head + descriptors.len() as u16) % size;
        self.publish(queue, head);
    }

    fn publish(&mut self, queue: usize, head: u16) {
        let (size, ring) = (QUEUE_SIZES[queue], RINGS[queue] + AVAILABLE);
        let index = self.available[queue];
        self.write(&head.to_le_bytes(), ring + 4 + 2 * u64::from(index % size));
        self.available[queue] = index.wrapping_add(1);
        self.write(&self.available[queue].to_le_bytes(), ring + 2);
    }

    /// A packet that is valid in most of its fields.
    fn packet(&mut self, input: &mut Input<'_>) {
        let choice = input.byte();
        let port = if choice & 1 == 0 { self.last_port } else { u32::from(input.byte() % 8) };
        let mut header = Header {
            src_cid: u64::from(CID),
            dst_cid: HOST_CID,
            src_port: u32::from(choice >> 1 & 3),
            dst_port: port,
            len: 0,
            kind: TYPE_STREAM,
            op: u16::from(input.byte() % 9),
            flags: u32::from(choice >> 6),
            buf_alloc: 1 << (choice >> 3 & 7) << 10,
            fwd_cnt: 0,
        };
        self.last_port = port;
        let mut length = 0;
        if header.op == 5 || input.rarely() {
            length = u32::from(input.byte()) * 5;
            header.len = length;
        }
        if input.rarely() {
            match input.byte() % 8 {
                0 => header.src_cid = input.number(),
                1 => header.dst_cid = input.number(),
                2 => header.kind = input.number() as u16,
                3 => header.len = input.number() as u32,
                4 => header.buf_alloc = input.number() as u32,
                5 => header.fwd_cnt = input.number() as u32,
                6 => header.flags = input.number() as u32,
                _ => (header.src_port, header.dst_port) = (!0, !0),
            }
        }
        let place = BUFFERS + u64::from(self.available[TX] % 256) * PLACE_BYTES;
        self.write(&header.to_bytes(), place);
        let whole = HEADER_BYTES as u32 + length;
        if input.rarely() {
            // In pieces, also within the header.
            let first = u32::from(input.byte()) % whole;
            let second = u32::from(input.byte()) % (whole - first);
            let start = |offset: u32| place + u64::from(offset);
            let third = whole - first - second;
            let pieces =
                [(place, first, 0), (start(first), second, 0), (start(first + second), third, 0)];
            self.chain(TX, &pieces);
        } else {
            self.chain(TX, &[(place, whole, 0)]);
        }
    }

    /// A buffer for the device.
    fn buffer(&mut self, input: &mut Input<'_>, queue: usize) {
        let place = BUFFERS + u64::from(self.available[queue] % 256) * PLACE_BYTES;
        let length = if input.rarely() { u32::from(input.byte()) } else { 0x400 };
        self.chain(queue, &[(place, length, WRITE)]);
    }

    /// Descriptors of any content; also loops, and heads outside of the table.
    fn nonsense(&mut self, input: &mut Input<'_>) {
        let queue = input.one(&[RX, TX, EVENT]);
        if input.rarely() {
            let head = input.number() as u16;
            self.publish(queue, head);
            return;
        }
        let count = 1 + input.below(4);
        let descriptors: Vec<_> = (0..count)
            .map(|_| {
                let flags = u16::from(input.byte()) & (NEXT | WRITE | INDIRECT);
                let address = match input.byte() % 4 {
                    0 => input.number(),
                    1 => MEMORY_BYTES - u64::from(input.byte()),
                    _ => BUFFERS + u64::from(input.byte()) * 64,
                };
                (address, input.number() as u32, flags)
            })
            .collect();
        self.chain(queue, &descriptors);
    }

    /// The device works until it has nothing more to do.
    fn process(&mut self) {
        let mut pending = [true; 3];
        for _ in 0..MOST_CALLS {
            if self.device.on_host_events(rustix::event::PollFlags::IN).more {
                pending = [true; 3];
            }
            for (queue, pending) in pending.iter_mut().enumerate() {
                if *pending {
                    *pending = self.device.process_queue(queue).more;
                }
            }
            if pending == [false; 3] {
                return;
            }
        }
        panic!("the device never becomes idle");
    }

    /// A client of the host, with a line that is right or wrong.
    fn client(&mut self, input: &mut Input<'_>) {
        let line: &[u8] = match input.byte() % 4 {
            0 => b"CONNECT 1\n",
            1 => b"CONNECT 2\nand data",
            2 => b"CONN",
            _ => input.take(8),
        };
        self.clients.extend(self.host.client(line));
        if self.clients.len() > 2 * MOST {
            self.clients.remove(0);
        }
        self.process();
        // The guest sees the port in the request.
        self.last_port = 1 << 30;
    }

    /// A client or server of the host does something.
    fn traffic(&mut self, input: &mut Input<'_>) {
        if self.clients.is_empty() {
            return;
        }
        let index = input.below(self.clients.len());
        let stream = &mut self.clients[index];
        let block = [7; 3000];
        let _ = match input.byte() % 6 {
            0 | 1 => stream.write(&block[..input.below(256) * 11]),
            2 => stream.read(&mut vec![0; 0x10000]),
            3 => stream.shutdown(Shutdown::Write).map(|()| 0),
            4 => stream.shutdown(Shutdown::Read).map(|()| 0),
            _ => {
                self.clients.remove(index);
                Ok(0)
            }
        };
        self.process();
    }

    fn pass(&mut self, input: &mut Input<'_>) {
        self.now += Duration::from_millis(u64::from(input.byte()) * 100);
        if self.device.deadline().is_some_and(|deadline| deadline <= self.now) {
            let _ = self.device.on_timer(self.now);
            assert!(self.device.deadline().is_none_or(|deadline| deadline > self.now));
        }
    }

    /// The driver resets the device, or the machine is saved and restored.
    fn restart(&mut self, input: &mut Input<'_>) {
        if !input.rarely() {
            return;
        }
        let state = self.device.save();
        self.device.reset();
        assert!(self.device.connections() == 0 && self.device.deadline().is_none_or(|_| true));
        for ring in RINGS {
            self.write(&[0; 4], ring + AVAILABLE);
            self.write(&[0; 4], ring + USED);
        }
        (self.available, self.next_descriptor) = ([0; 3], [0; 3]);
        let restored = if input.rarely() {
            self.device.activate(0, queues())
        } else {
            self.device.restore(&state, Some((0, queues())))
        };
        assert!(restored.is_ok());
    }

    fn check(&self) {
        assert!(self.device.connections() <= MOST, "more connections than allowed");
        self.device.muxer.check();
        for (queue, ring) in RINGS.into_iter().enumerate() {
            let used: u16 = self.memory.read_obj(GuestAddress(ring + USED + 2)).unwrap_or(0);
            let ahead = self.available[queue].wrapping_sub(used);
            assert!(ahead < 1 << 15, "queue {queue}: more chains were used than made available");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// It would be ended with those of the time before the restore.
    #[test]
    fn a_new_connection_waits_until_the_guest_has_ended_the_old_ones() {
        for is_slow in [false, true] {
            let mut scene = Scene::new().unwrap();
            let used = |scene: &Scene, queue: usize| -> u16 {
                scene.memory.read_obj(GuestAddress(RINGS[queue] + USED + 2)).unwrap()
            };
            let state = scene.device.save();
            scene.device.restore(&state, Some((0, queues()))).unwrap();
            for queue in [RX, RX, EVENT, EVENT] {
                scene.buffer(&mut Input::new(&[1]), queue);
            }
            scene.process();
            assert_eq!((used(&scene, EVENT), used(&scene, RX)), (1, 0));
            let _client = scene.host.client(b"CONNECT 52\n").unwrap();
            scene.process();
            assert_eq!(used(&scene, RX), 0);
            if is_slow {
                let until = scene.device.deadline().unwrap();
                scene.device.on_timer(until);
            } else {
                scene.buffer(&mut Input::new(&[1]), EVENT);
                scene.process();
            }
            assert_eq!((used(&scene, EVENT), used(&scene, RX)), (1, 1));
        }
    }
}
