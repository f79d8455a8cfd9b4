use std::sync::MutexGuard;
use std::sync::atomic::AtomicU64;

use proptest::prelude::*;
use virtio_queue::QueueState;
use vm_memory::GuestAddress;

use super::*;
use crate::devices::bus::BusDevice;

/// A device that records the calls to it.
#[derive(Default)]
struct Probe {
    activated: Option<u64>,
    processed: Vec<usize>,
    resets: usize,
    config: Vec<(u64, Vec<u8>)>,
    refuse: bool,
    queues: Vec<Queue>,
}

const FEATURE: u64 = 1 << 5;

impl VirtioDevice for Probe {
    fn device_id(&self) -> u32 {
        5
    }
    fn features(&self) -> u64 {
        FEATURE
    }
    fn queue_sizes(&self) -> Vec<u16> {
        vec![16, 32]
    }
    fn read_config(&self, offset: u64, data: &mut [u8]) {
        data.fill((offset as u8).wrapping_add(1));
    }
    fn write_config(&mut self, offset: u64, data: &[u8]) {
        self.config.push((offset, data.to_vec()));
    }
    fn activate(&mut self, features: u64, queues: Vec<Queue>) -> Result<(), String> {
        assert_eq!(queues.len(), 2);
        if self.refuse {
            return Err("refused".to_owned());
        }
        self.activated = Some(features);
        self.queues = queues;
        Ok(())
    }
    fn process_queue(&mut self, index: usize) -> Work {
        self.processed.push(index);
        Work { interrupt: true, ..Work::default() }
    }
    fn reset(&mut self) {
        self.resets += 1;
        self.activated = None;
        self.queues.clear();
    }
    fn queue_states(&self) -> Vec<QueueState> {
        self.queues.iter().map(Queue::state).collect()
    }
}

fn window() -> MmioWindow<Probe> {
    counted_window().0
}

/// A window, and the number of its interrupts.
fn counted_window() -> (MmioWindow<Probe>, Arc<AtomicU64>) {
    let memory = GuestMemory::from_ranges(&[(GuestAddress(0), 1 << 20)]).unwrap();
    let (line, interrupts) = InterruptLine::counted();
    let wires = Wires::new(2, line).unwrap();
    (MmioWindow::new(MmioTransport::new(Probe::default(), memory, wires)), interrupts)
}

fn behind(window: &MmioWindow<Probe>) -> MutexGuard<'_, MmioTransport<Probe>> {
    window.transport().lock().unwrap()
}

fn read(window: &MmioWindow<Probe>, register: u32) -> u32 {
    let mut data = [0; 4];
    window.read(u64::from(register), &mut data);
    u32::from_le_bytes(data)
}

fn write(window: &MmioWindow<Probe>, register: u32, value: u32) {
    window.write(u64::from(register), &value.to_le_bytes());
}

/// Initializes the device as a driver does (virtio 1.3 section 3.1.1).
fn initialize(window: &MmioWindow<Probe>) {
    for status in [1, 3] {
        write(window, reg::VIRTIO_MMIO_STATUS, status);
    }
    for (page, features) in [(0, FEATURE as u32), (1, 1)] {
        write(window, reg::VIRTIO_MMIO_DRIVER_FEATURES_SEL, page);
        write(window, reg::VIRTIO_MMIO_DRIVER_FEATURES, features);
    }
    write(window, reg::VIRTIO_MMIO_STATUS, 11);
    for queue in 0..2 {
        write(window, reg::VIRTIO_MMIO_QUEUE_SEL, queue);
        write(window, reg::VIRTIO_MMIO_QUEUE_NUM, 16);
        write(window, reg::VIRTIO_MMIO_QUEUE_DESC_LOW, 0x1000 + queue * 0x4000);
        write(window, reg::VIRTIO_MMIO_QUEUE_AVAIL_LOW, 0x2000 + queue * 0x4000);
        write(window, reg::VIRTIO_MMIO_QUEUE_USED_LOW, 0x3000 + queue * 0x4000);
        write(window, reg::VIRTIO_MMIO_QUEUE_READY, 1);
    }
    write(window, reg::VIRTIO_MMIO_STATUS, 15);
}

#[test]
fn a_well_behaved_driver_gets_its_device() {
    let (window, interrupts) = counted_window();
    assert_eq!(read(&window, reg::VIRTIO_MMIO_MAGIC_VALUE), 0x7472_6976);
    assert_eq!(read(&window, reg::VIRTIO_MMIO_VERSION), 2);
    assert_eq!(read(&window, reg::VIRTIO_MMIO_DEVICE_ID), 5);
    write(&window, reg::VIRTIO_MMIO_DEVICE_FEATURES_SEL, 1);
    assert_eq!(read(&window, reg::VIRTIO_MMIO_DEVICE_FEATURES), 1);
    initialize(&window);
    assert!(behind(&window).is_active());
    // As before the device was started (section 4.2.2).
    for (queue, size) in [(0, 16), (1, 32)] {
        write(&window, reg::VIRTIO_MMIO_QUEUE_SEL, queue);
        assert_eq!(read(&window, reg::VIRTIO_MMIO_QUEUE_NUM_MAX), size);
        assert_eq!(read(&window, reg::VIRTIO_MMIO_QUEUE_READY), 1);
    }
    assert_eq!(behind(&window).device().activated, Some(FEATURE | 1 << 32));
    assert_eq!(behind(&window).wires().wake.read().unwrap(), 1);

    assert!(behind(&window).process_queue(1).interrupt);
    assert_eq!(read(&window, reg::VIRTIO_MMIO_INTERRUPT_STATUS), INTERRUPT_USED);
    assert_eq!(interrupts.load(Ordering::SeqCst), 1);
    write(&window, reg::VIRTIO_MMIO_INTERRUPT_ACK, INTERRUPT_USED);
    assert_eq!(read(&window, reg::VIRTIO_MMIO_INTERRUPT_STATUS), INTERRUPT_USED);

    let generation = read(&window, reg::VIRTIO_MMIO_CONFIG_GENERATION);
    behind(&window).config_changed();
    assert_ne!(read(&window, reg::VIRTIO_MMIO_CONFIG_GENERATION), generation);
    let both = INTERRUPT_USED | INTERRUPT_CONFIG;
    assert_eq!(read(&window, reg::VIRTIO_MMIO_INTERRUPT_STATUS), both);
    write(&window, reg::VIRTIO_MMIO_INTERRUPT_ACK, both);
    assert_eq!(read(&window, reg::VIRTIO_MMIO_INTERRUPT_STATUS), INTERRUPT_USED);

    let mut byte = [0];
    window.read(0x103, &mut byte);
    assert_eq!(byte, [4]);
    window.write(0x104, &[1, 2]);
    assert_eq!(behind(&window).device().config, [(4, vec![1, 2])]);
}

#[test]
fn a_reset_restores_everything() {
    let window = window();
    initialize(&window);
    write(&window, reg::VIRTIO_MMIO_STATUS, 0);
    assert!(!behind(&window).is_active());
    assert_eq!(behind(&window).device().resets, 1);
    assert_eq!(read(&window, reg::VIRTIO_MMIO_STATUS), 0);
    assert_eq!(behind(&window).process_queue(0), Work::default());
    initialize(&window);
    assert!(behind(&window).is_active());
}

#[test]
fn features_that_were_not_offered_are_refused() {
    let window = window();
    write(&window, reg::VIRTIO_MMIO_STATUS, 3);
    write(&window, reg::VIRTIO_MMIO_DRIVER_FEATURES_SEL, 1);
    write(&window, reg::VIRTIO_MMIO_DRIVER_FEATURES, 3);
    write(&window, reg::VIRTIO_MMIO_STATUS, 11);
    assert_eq!(read(&window, reg::VIRTIO_MMIO_STATUS), 3);
}

#[test]
fn drivers_before_version_1_are_refused() {
    let window = window();
    write(&window, reg::VIRTIO_MMIO_STATUS, 3);
    write(&window, reg::VIRTIO_MMIO_DRIVER_FEATURES, FEATURE as u32);
    write(&window, reg::VIRTIO_MMIO_STATUS, 11);
    assert_eq!(read(&window, reg::VIRTIO_MMIO_STATUS), 3);
}

#[test]
fn an_invalid_queue_asks_for_a_reset() {
    let window = window();
    write(&window, reg::VIRTIO_MMIO_STATUS, 3);
    write(&window, reg::VIRTIO_MMIO_DRIVER_FEATURES_SEL, 1);
    write(&window, reg::VIRTIO_MMIO_DRIVER_FEATURES, 1);
    write(&window, reg::VIRTIO_MMIO_STATUS, 11);
    write(&window, reg::VIRTIO_MMIO_QUEUE_DESC_HIGH, 0xffff_ffff);
    write(&window, reg::VIRTIO_MMIO_QUEUE_READY, 1);
    write(&window, reg::VIRTIO_MMIO_STATUS, 15);
    assert!(!behind(&window).is_active());
    assert_ne!(read(&window, reg::VIRTIO_MMIO_STATUS) & VIRTIO_CONFIG_S_NEEDS_RESET, 0);
    write(&window, reg::VIRTIO_MMIO_STATUS, 0);
    initialize(&window);
    assert!(behind(&window).is_active());
}

#[test]
fn a_device_that_refuses_asks_for_a_reset() {
    let window = window();
    behind(&window).device_mut().refuse = true;
    initialize(&window);
    assert!(!behind(&window).is_active());
    assert_ne!(read(&window, reg::VIRTIO_MMIO_STATUS) & VIRTIO_CONFIG_S_NEEDS_RESET, 0);
}

#[test]
fn queues_cannot_be_moved_while_the_device_runs() {
    let window = window();
    initialize(&window);
    write(&window, reg::VIRTIO_MMIO_QUEUE_READY, 0);
    write(&window, reg::VIRTIO_MMIO_QUEUE_DESC_LOW, 0x9000);
    assert!(behind(&window).is_active());
    assert!(behind(&window).process_queue(0).interrupt);
}

fn saved(window: &MmioWindow<Probe>) -> TransportState {
    ManagedDevice::save(&mut *behind(window))
}

#[test]
fn a_running_device_continues_from_its_saved_state() {
    let old = window();
    initialize(&old);
    behind(&old).device_mut().queues[1].set_next_avail(7);
    behind(&old).process_queue(1);
    let state = saved(&old);
    assert!(state.active);

    let (new, interrupts) = counted_window();
    ManagedDevice::restore(&mut *behind(&new), &state).unwrap();
    assert!(behind(&new).is_active());
    assert_eq!(behind(&new).device().activated, Some(FEATURE | 1 << 32));
    assert_eq!(behind(&new).device().queues[1].next_avail(), 7);
    assert_eq!(read(&new, reg::VIRTIO_MMIO_INTERRUPT_STATUS), INTERRUPT_USED);
    behind(&new).interrupt_again();
    assert_eq!(interrupts.load(Ordering::SeqCst), 1);
    assert_eq!(saved(&new), state);
}

#[test]
fn invalid_states_are_refused() {
    let old = window();
    initialize(&old);
    let good = saved(&old);
    let wrong: [fn(&mut TransportState); 7] = [
        |state| state.device_id = 2,
        |state| state.driver_features |= 1 << 40,
        |state| state.queues[0].max_size = 8,
        |state| state.queues[0].size = 3,
        |state| state.queues[1].used_ring = 1 << 30,
        |state| state.queues.push(state.queues[0]),
        |state| {
            state.device =
                super::super::state::DeviceState::Disk { sectors: 1, modified_unix_ns: None }
        },
    ];
    for (index, spoil) in wrong.into_iter().enumerate() {
        let mut state = good.clone();
        spoil(&mut state);
        let new = window();
        assert!(ManagedDevice::restore(&mut *behind(&new), &state).is_err(), "{index}");
        assert!(!behind(&new).is_active(), "{index}");
    }
}

proptest! {
    /// At any point of its set-up a driver finds the same registers after a restore.
    #[test]
    fn a_saved_state_is_the_whole_state(
        initialized: bool,
        writes in prop::collection::vec((0u64..0x40, any::<u32>()), 0..40)
    ) {
        let old = window();
        if initialized {
            initialize(&old);
        }
        for (register, value) in writes {
            // Small numbers are valid values of most registers.
            for value in [value, value % 16] {
                old.write(register * 4, &value.to_le_bytes());
            }
        }
        let text = serde_json::to_string(&saved(&old)).unwrap();
        let new = window();
        ManagedDevice::restore(&mut *behind(&new), &serde_json::from_str(&text).unwrap()).unwrap();
        prop_assert_eq!(saved(&new), saved(&old));
        for register in 0..0x40 {
            let offset = register * 4;
            prop_assert_eq!(read(&new, offset), read(&old, offset), "{:#x}", offset);
        }
    }

    /// No writes of a driver cause a panic, and after a reset the device works.
    #[test]
    fn no_sequence_of_writes_breaks_the_window(
        writes in prop::collection::vec((0u64..0x200, any::<u64>(), 0usize..9), 0..200)
    ) {
        let window = window();
        for (offset, value, length) in writes {
            let bytes = value.to_le_bytes();
            window.write(offset, &bytes[..length.min(8)]);
            let mut data = [0; 8];
            window.read(offset, &mut data[..length.min(8)]);
        }
        write(&window, reg::VIRTIO_MMIO_STATUS, 0);
        initialize(&window);
        prop_assert!(behind(&window).is_active());
    }
}
