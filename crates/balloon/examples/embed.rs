//! A minimal monitor that embeds the balloon: memory, the device, and the monitor's handling of a
//! queue kick.
//!
//! No guest runs here; [`Driver`] does the work of a guest's driver: it inflates the balloon and
//! reports free pages over rings in guest memory.

use std::error::Error;
use std::io::Write;
use std::sync::{Arc, Mutex, PoisonError};

use ebb_abi::balloon::{Feature, Features, QueueKind};
use ebb_abi::{HUGE_PAGE_SIZE_BYTES, PAGE_SIZE_BYTES};
use ebb_balloon::{Balloon, BalloonConfig, Discarder};
use ebb_guest_ram::{Backing, GuestRam, HugePages, Populate, RegionSpec};
use virtio_queue::{Queue, QueueT};
use vm_memory::{Bytes, GuestAddress};

type Result<T> = std::result::Result<T, Box<dyn Error>>;

const MIB: u64 = 1 << 20;
const RAM_BYTES: u64 = 64 * MIB;
/// Entries of a queue.
const ENTRIES: u16 = 64;
/// Distance of the queues' rings; the available and the used ring follow the descriptors.
const RINGS_BYTES: u64 = 0x3000;
/// Guest-physical address for page frame numbers, behind the rings.
const PFNS: u64 = MIB;
/// `VIRTQ_DESC_F_WRITE`: the device may write to the buffer.
const WRITABLE: u16 = 2;

/// The monitor's part of a machine. The device is behind one lock; discards are not.
struct Monitor {
    ram: Arc<GuestRam>,
    balloon: Mutex<Balloon>,
    discarder: Discarder,
}

impl Monitor {
    fn new() -> Result<Self> {
        let region = RegionSpec { start: GuestAddress(0), size_bytes: RAM_BYTES, host_node: None };
        let ram = GuestRam::new(&[region], Backing::Anonymous, HugePages::On, Populate::Lazy)?;
        let ram = Arc::new(ram);
        let balloon = Balloon::new(BalloonConfig::default(), Arc::clone(&ram))?;
        Ok(Self { ram, discarder: balloon.discarder(), balloon: Mutex::new(balloon) })
    }

    /// Handles a kick of a queue by the driver.
    fn kicked(&self, kind: QueueKind) {
        loop {
            let mut balloon = self.balloon.lock().unwrap_or_else(PoisonError::into_inner);
            let Some(index) = balloon.queue_index(kind) else { return };
            let progress = balloon.process_queue(index);
            drop(balloon);
            // `progress.interrupt`: a monitor with a guest raises the queue's interrupt here.
            if progress.due {
                self.discarder.discard_due();
            }
            if !progress.more {
                return;
            }
        }
    }
}

/// The driver's side: the queues by transport index, and the number of used entries of each.
struct Driver<'a> {
    monitor: &'a Monitor,
    entries: [u16; 3],
}

impl<'a> Driver<'a> {
    /// Sets up the queues of a driver that reports free pages, and activates the device.
    fn start(monitor: &'a Monitor) -> Result<Self> {
        let queues = (0..3).map(|index| {
            let rings = (index * RINGS_BYTES) as u32;
            let mut queue = Queue::new(ENTRIES)?;
            queue.set_desc_table_address(Some(rings), None);
            queue.set_avail_ring_address(Some(rings + 0x1000), None);
            queue.set_used_ring_address(Some(rings + 0x2000), None);
            queue.set_ready(true);
            Ok(queue)
        });
        let features = Features::NONE.with(Feature::MustTellHost).with(Feature::PageReporting);
        let mut balloon = monitor.balloon.lock().unwrap_or_else(PoisonError::into_inner);
        balloon.activate(features.0, queues.collect::<Result<_>>()?)?;
        Ok(Self { monitor, entries: [0; 3] })
    }

    /// Sends a buffer of one descriptor over the queue with this index, and kicks the queue.
    fn send(
        &mut self,
        queue: usize,
        kind: QueueKind,
        buffer: (u64, u64),
        flags: u16,
    ) -> Result<()> {
        let memory = self.monitor.ram.memory();
        let rings = queue as u64 * RINGS_BYTES;
        let entry = self.entries[queue] % ENTRIES;
        self.entries[queue] += 1;
        let descriptor = rings + 16 * u64::from(entry);
        memory.write_obj(buffer.0, GuestAddress(descriptor))?;
        memory.write_obj(buffer.1 | u64::from(flags) << 32, GuestAddress(descriptor + 8))?;
        memory.write_obj(entry, GuestAddress(rings + 0x1004 + 2 * u64::from(entry)))?;
        memory.write_obj(self.entries[queue], GuestAddress(rings + 0x1002))?;
        self.monitor.kicked(kind);
        Ok(())
    }

    /// Inflates by the pages from `start` on, 256 per buffer as Linux does.
    fn inflate(&mut self, start: u64, size_bytes: u64) -> Result<()> {
        for first in (start..start + size_bytes).step_by(MIB as usize) {
            let numbers: Vec<u8> = (first / PAGE_SIZE_BYTES..(first + MIB) / PAGE_SIZE_BYTES)
                .flat_map(|pfn| (pfn as u32).to_le_bytes())
                .collect();
            self.monitor.ram.memory().write_slice(&numbers, GuestAddress(PFNS))?;
            self.send(0, QueueKind::Inflate, (PFNS, 1024), 0)?;
        }
        Ok(())
    }

    /// Reports a free range.
    fn report(&mut self, start: u64, size_bytes: u64) -> Result<()> {
        self.send(2, QueueKind::Reporting, (start, size_bytes), WRITABLE)
    }
}

/// Runs the machine and prints how much memory was returned to the host.
pub fn run(out: &mut dyn Write) -> Result<()> {
    let monitor = Monitor::new()?;
    // The guest has used all of its memory.
    monitor.ram.memory().write_slice(&vec![0; RAM_BYTES as usize], GuestAddress(0))?;
    let mut driver = Driver::start(&monitor)?;
    let resident = |what: &str, out: &mut dyn Write| -> Result<()> {
        Ok(writeln!(out, "{what}: {} MiB resident", monitor.ram.resident_bytes()? / MIB)?)
    };
    resident("in use", out)?;
    driver.inflate(4 * MIB, 16 * MIB)?;
    // No more pages follow: discard also those that wait to form whole huge pages.
    monitor.discarder.flush();
    resident("16 MiB inflated", out)?;
    driver.report(32 * MIB, 4 * HUGE_PAGE_SIZE_BYTES)?;
    resident("8 MiB reported", out)?;
    let balloon = monitor.balloon.lock().unwrap_or_else(PoisonError::into_inner);
    let discard = balloon.counters().discard;
    let (bytes, syscalls) = (discard.bytes, discard.syscalls);
    Ok(writeln!(out, "{} MiB came back in {syscalls} system calls", bytes / MIB)?)
}

fn main() -> Result<()> {
    run(&mut std::io::stdout())
}
