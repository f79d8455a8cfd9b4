//! The balloon behind its registers: drivers with and without the extension, and snapshots of both.

use ebb_abi::balloon::QueueKind;
use ebb_abi::balloon::extension::HostRequest;
use ebb_abi::{PageRange, Pfn};
use ebb_balloon::testing::{Buffer, Guest, Setup};
use ebb_balloon::{FreePageCollector, overwritten_word};
use ebb_guest_ram::InhibitReason;
use virtio_bindings::virtio_mmio as reg;
use virtio_queue::QueueT;
use vm_memory::{Bytes, GuestAddress};

use super::*;
use crate::devices::bus::ExclusiveDevice as _;
use crate::devices::interrupt::InterruptLine;
use crate::devices::virtio::mmio::{ManagedDevice, MmioTransport, Wires};

const ALL: Features = Features::ALL_WITH_EXTENSION.without(Feature::PagePoison);
/// Features that Linux 6.1's driver accepts.
const STOCK: Features = Features::ALL_BALLOON.without(Feature::PagePoison);
const VERSION_1: u64 = 1 << 32;

fn without_extension() -> BalloonDeviceConfig {
    let off = Switch::Off;
    BalloonDeviceConfig {
        page_bitmap: off,
        page_ranges: off,
        host_requests: off,
        ..Default::default()
    }
}

/// Guest memory with rings in it, and the device.
struct Machine {
    guest: Guest,
    transport: MmioTransport<BalloonDevice>,
}

fn transport(config: &BalloonDeviceConfig, ram: &Arc<GuestRam>) -> MmioTransport<BalloonDevice> {
    let device = BalloonDevice::new(config, ram.clone()).unwrap();
    let (line, _) = InterruptLine::counted();
    let wires = Wires::new(device.queue_sizes().len(), line).unwrap();
    MmioTransport::new(device, ram.memory().clone(), wires)
}

impl Machine {
    fn new(config: &BalloonDeviceConfig, negotiated: Features) -> Self {
        let offered = features(config);
        let guest = Guest::new(Setup { offered, negotiated, ..Setup::default() });
        let mut machine = Self { transport: transport(config, &guest.ram), guest };
        machine.start(negotiated);
        machine
    }

    fn write(&mut self, register: u32, value: u32) {
        self.transport.write(register.into(), &value.to_le_bytes());
    }

    fn read(&mut self, register: u32) -> u32 {
        let mut data = [0; 4];
        self.transport.read(register.into(), &mut data);
        u32::from_le_bytes(data)
    }

    /// Initializes the device as a driver does (virtio 1.3 section 3.1.1).
    fn start(&mut self, negotiated: Features) {
        self.write(reg::VIRTIO_MMIO_STATUS, 3);
        let accepted = negotiated.0 | VERSION_1;
        for (page, bits) in [(0, accepted as u32), (1, (accepted >> 32) as u32)] {
            self.write(reg::VIRTIO_MMIO_DRIVER_FEATURES_SEL, page);
            self.write(reg::VIRTIO_MMIO_DRIVER_FEATURES, bits);
        }
        self.write(reg::VIRTIO_MMIO_STATUS, 11);
        for (index, queue) in (0..).zip(self.guest.fresh_queues()) {
            if queue.ready() {
                self.write(reg::VIRTIO_MMIO_QUEUE_SEL, index);
                assert!(self.read(reg::VIRTIO_MMIO_QUEUE_NUM_MAX) >= 32, "queue {index}");
                self.write(reg::VIRTIO_MMIO_QUEUE_NUM, queue.size().into());
                self.write(reg::VIRTIO_MMIO_QUEUE_DESC_LOW, queue.desc_table() as u32);
                self.write(reg::VIRTIO_MMIO_QUEUE_AVAIL_LOW, queue.avail_ring() as u32);
                self.write(reg::VIRTIO_MMIO_QUEUE_USED_LOW, queue.used_ring() as u32);
                self.write(reg::VIRTIO_MMIO_QUEUE_READY, 1);
            }
        }
        self.write(reg::VIRTIO_MMIO_STATUS, 15);
        assert!(self.transport.is_active());
    }

    fn kick(&mut self, kind: QueueKind) {
        let index = self.guest.index(kind);
        while self.transport.process_queue(index).more {}
    }

    fn inflate(&mut self, pfn: u32) {
        let buffer = self.guest.pfns([pfn]);
        self.guest.offer(QueueKind::Inflate, &[buffer]);
        self.kick(QueueKind::Inflate);
        self.transport.device_mut().flush();
    }

    fn report(&mut self, pages: PageRange) {
        let length = pages.size_bytes() as u32;
        let block = Buffer { address: pages.start.address(), length, writable: true };
        self.guest.offer(QueueKind::Reporting, &[block]);
        self.kick(QueueKind::Reporting);
    }

    fn leave_request_buffer(&mut self) -> Buffer {
        let buffer = Buffer { writable: true, ..self.guest.buffer(&[0xee; 16]) };
        self.guest.offer(QueueKind::HostRequest, &[buffer]);
        self.kick(QueueKind::HostRequest);
        buffer
    }

    fn ask(&mut self) -> Result<(u64, bool), BalloonError> {
        let collector = FreePageCollector::new(&self.guest.ram);
        self.transport.device_mut().request_free_pages(Order::PAGE, Box::new(collector))
    }

    /// Continues in a new device with this configuration from the saved state.
    fn restore(&mut self, config: &BalloonDeviceConfig) {
        let text = serde_json::to_string(&self.transport.save()).unwrap();
        self.transport = transport(config, &self.guest.ram);
        ManagedDevice::restore(&mut self.transport, &serde_json::from_str(&text).unwrap()).unwrap();
    }

    fn discarded_bytes(&self) -> u64 {
        self.transport.device().balloon().counters().discard.bytes
    }
}

#[test]
fn a_driver_without_the_extension_finds_the_standard_device() {
    let config = BalloonDeviceConfig::default();
    let mut machine = Machine::new(&config, STOCK);
    assert_eq!(machine.transport.device().queue_sizes().len(), 6);
    for _ in 0..2 {
        machine.inflate(1024);
        machine.report(PageRange::new(Pfn(2048), 512));
        assert_eq!(machine.discarded_bytes(), 513 * 4096);
        let counters = machine.transport.device().balloon().counters();
        assert_eq!((counters.errors.total(), counters.discard.failures), (0, 0), "{counters:?}");
        assert_eq!(counters.encodings.arrays, 1);
        assert!(machine.ask().is_err());
        machine.restore(&config);
    }
}

#[test]
fn a_snapshot_from_before_the_extension_continues() {
    let old = without_extension();
    let mut machine = Machine::new(&old, STOCK);
    assert_eq!(machine.transport.device().queue_sizes().len(), 5);
    machine.restore(&old);
    machine.report(PageRange::new(Pfn(2048), 512));
    assert_eq!(machine.discarded_bytes(), 512 * 4096);
    // In a device that would offer more, the driver still finds the features it knew.
    machine.restore(&BalloonDeviceConfig::default());
    assert_eq!(machine.transport.device().features() & Features::EXTENSION.0, 0);
    machine.report(PageRange::new(Pfn(2048), 512));
    assert_eq!(machine.discarded_bytes(), 512 * 4096);
    // Before the driver initializes.
    machine.write(reg::VIRTIO_MMIO_STATUS, 0);
    machine.restore(&old);
    machine.start(STOCK);
}

#[test]
fn a_snapshot_of_a_driver_with_the_extension_continues() {
    let config = BalloonDeviceConfig::default();
    let mut machine = Machine::new(&config, ALL);
    machine.leave_request_buffer();
    assert_eq!(machine.ask(), Ok((1, true)));
    let buffer = machine.leave_request_buffer();
    machine.restore(&config);
    // The request is gone, the buffer is kept, and numbering continues.
    assert_eq!(machine.ask(), Ok((2, true)));
    let request = HostRequest::FreePages { request_id: 2, page_shift: 12 };
    assert_eq!(machine.guest.request_in(buffer), Some(request));
    assert!(!machine.transport.device_mut().cancel_request(1));
    machine.transport.device_mut().cancel_request(2);
    machine.leave_request_buffer();
    machine.report(PageRange::new(Pfn(2048), 512));
    assert_eq!(machine.discarded_bytes(), 512 * 4096);
}

/// Proposed features are offered on request only, and a driver that has them keeps them.
#[test]
fn a_snapshot_of_a_driver_with_the_proposed_features_continues() {
    let on = BalloonDeviceConfig {
        init_reported: Switch::On,
        init_on_inflate: Switch::On,
        ..Default::default()
    };
    assert_eq!(features(&on) & Features::PROPOSED, Features::PROPOSED);
    assert_eq!(features(&BalloonDeviceConfig::default()) & Features::PROPOSED, Features::NONE);
    let mute = BalloonDeviceConfig { reporting: Switch::Off, ..on.clone() };
    assert_eq!(features(&mute) & Features::PROPOSED, Feature::DeviceInitOnInflate.into());

    let mut machine = Machine::new(&on, STOCK | Features::PROPOSED);
    let half_mib = PageRange::new(Pfn(2048), 128);
    for _ in 0..2 {
        machine.report(half_mib);
        let place = Buffer { writable: true, ..machine.guest.buffer(&[0; 1]) };
        let array = machine.guest.pfns([1024, 1025, 1026]);
        machine.guest.offer(QueueKind::Inflate, &[array, place]);
        machine.kick(QueueKind::Inflate);
        let lengths = [QueueKind::Reporting, QueueKind::Inflate]
            .map(|kind| machine.guest.used_with_lengths(kind)[0].1);
        assert_eq!(lengths, [128 * 4096, 1]);
        let bits: u8 = machine.guest.ram.memory().read_obj(GuestAddress(place.address)).unwrap();
        assert_eq!(bits, 0b111);
        let counters = machine.transport.device().balloon().counters();
        assert_eq!(counters.initialized_bytes, 131 * 4096);
        machine.restore(&on);
    }
    let negotiated = machine.transport.device().balloon().negotiated();
    assert_eq!(negotiated & Features::PROPOSED, Features::PROPOSED);
}

#[test]
fn a_restored_machine_also_overwrites_pages() {
    let config = BalloonDeviceConfig { verify_reports: Switch::On, ..Default::default() };
    let mut machine = Machine::new(&config, STOCK);
    machine.restore(&config);
    let kept = machine.guest.ram.inhibit_discard(InhibitReason::Operator);
    machine.report(PageRange::new(Pfn(2048), 1));
    let word: u64 = machine.guest.ram.memory().read_obj(GuestAddress(2048 << 12)).unwrap();
    assert_eq!(word, overwritten_word(2048 << 12));
    drop(kept);
    machine.report(PageRange::new(Pfn(2048), 1));
    let word: u64 = machine.guest.ram.memory().read_obj(GuestAddress(2048 << 12)).unwrap();
    assert_eq!(
        (word, machine.transport.device().balloon().counters().discard.verified_pages),
        (0, 2)
    );
}

/// Runs of hints: one that ends with the driver's last hint, one that ends when it is stopped, and
/// one that a pause ends. Nothing is discarded.
#[test]
fn a_run_of_hints_ends_and_discards_nothing() {
    let config = without_extension();
    let mut machine = Machine::new(&config, STOCK);
    let commands = |machine: &Machine| machine.transport.device().balloon().hint_commands();
    assert_eq!(commands(&machine), (0, None));
    for (after, ends_itself) in [(AfterHints::Release, true), (AfterHints::Keep, false)] {
        machine.transport.device_mut().start_hint_run(after).unwrap();
        let (id, _) = commands(&machine);
        assert!(id >= 2);
        let number = machine.guest.buffer(&id.to_le_bytes());
        let block = Buffer { address: 0x40_0000, length: 0x20_0000, writable: true };
        let stop = machine.guest.buffer(&0_u32.to_le_bytes());
        for buffer in [number, block] {
            machine.guest.offer(QueueKind::FreePageHint, &[buffer]);
        }
        machine.kick(QueueKind::FreePageHint);
        assert_eq!(commands(&machine), (id, Some(id)));
        machine.guest.offer(QueueKind::FreePageHint, &[stop]);
        machine.kick(QueueKind::FreePageHint);
        assert_eq!(commands(&machine), (if ends_itself { 1 } else { id }, Some(0)));
    }
    assert!(machine.transport.device_mut().stop_hint_run());
    assert!(!machine.transport.device_mut().stop_hint_run());
    assert_eq!(commands(&machine), (1, Some(0)));
    // A run takes the place of the one before, and ends with a pause.
    for _ in 0..2 {
        machine.transport.device_mut().start_hint_run(AfterHints::Keep).unwrap();
    }
    machine.transport.quiesce();
    assert_eq!(commands(&machine).0, 1);
    assert_eq!(machine.transport.device().balloon().hint_phase(), HintPhase::Idle);
    assert_eq!(machine.discarded_bytes(), 0);
    let mut other = Machine::new(&config, STOCK.without(Feature::FreePageHint));
    other.transport.device_mut().start_hint_run(AfterHints::Keep).unwrap_err();
}
