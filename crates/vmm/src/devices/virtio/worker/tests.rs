use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use ebb_guest_ram::GuestMemory;
use virtio_queue::{Queue, QueueState};
use vm_memory::GuestAddress;

use super::*;
use crate::config::Switch;
use crate::devices::virtio::Work;
use crate::devices::virtio::mmio::Wires;

/// Counts its quiesce calls.
struct Idle {
    quiesced: Arc<AtomicUsize>,
    /// Taken by each.
    gate: Arc<Mutex<()>>,
}

impl VirtioDevice for Idle {
    fn device_id(&self) -> u32 {
        4
    }
    fn features(&self) -> u64 {
        0
    }
    fn queue_sizes(&self) -> Vec<u16> {
        vec![16]
    }
    fn read_config(&self, _offset: u64, _data: &mut [u8]) {}
    fn write_config(&mut self, _offset: u64, _data: &[u8]) {}
    fn activate(&mut self, _features: u64, _queues: Vec<Queue>) -> Result<(), String> {
        Ok(())
    }
    fn process_queue(&mut self, _index: usize) -> Work {
        Work::default()
    }
    fn quiesce(&mut self) {
        self.quiesced.fetch_add(1, Ordering::SeqCst);
        drop(lock(&self.gate));
    }
    fn reset(&mut self) {}
    fn queue_states(&self) -> Vec<QueueState> {
        Vec::new()
    }
}

fn worker() -> (Worker, Arc<AtomicUsize>) {
    worker_with(Arc::default())
}

fn worker_with(gate: Arc<Mutex<()>>) -> (Worker, Arc<AtomicUsize>) {
    let quiesced = Arc::new(AtomicUsize::new(0));
    let memory = GuestMemory::from_ranges(&[(GuestAddress(0), 1 << 20)]).unwrap();
    let device = Idle { quiesced: quiesced.clone(), gate };
    let transport =
        Arc::new(Mutex::new(MmioTransport::new(device, memory, Wires::new(1).unwrap())));
    let exit = Arc::new(ExitSignal::new().unwrap());
    let filters = Filters::new(Switch::Off).unwrap();
    (Worker::spawn("test", transport, &filters, exit).unwrap(), quiesced)
}

/// Fails instead of hanging.
fn within_a_minute(action: impl FnOnce() + Send + 'static) {
    let (done, wait) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        action();
        let _ = done.send(());
    });
    assert_eq!(wait.recv_timeout(Duration::from_secs(60)), Ok(()));
}

#[test]
fn a_pause_right_after_a_resume_returns() {
    within_a_minute(|| {
        let (worker, quiesced) = worker();
        for _ in 0..20_000 {
            worker.pause();
            worker.resume();
        }
        assert!(quiesced.load(Ordering::SeqCst) > 0);
    });
}

#[test]
fn work_is_finished_before_a_pause_returns() {
    within_a_minute(|| {
        let (worker, quiesced) = worker();
        worker.pause();
        assert_eq!(quiesced.load(Ordering::SeqCst), 1);
        worker.pause();
        assert_eq!(quiesced.load(Ordering::SeqCst), 1);
    });
}

/// A thread in a slow call, or behind one: neither a reboot nor the end waits for it.
#[test]
fn a_stuck_device_is_left_behind_at_the_end() {
    within_a_minute(|| {
        let gate = Arc::new(Mutex::new(()));
        let held = lock(&gate);
        let (mut worker, quiesced) = worker_with(gate.clone());
        assert!(!worker.try_pause());
        while quiesced.load(Ordering::SeqCst) == 0 {
            std::thread::yield_now();
        }
        assert!(!worker.try_pause());
        assert_eq!(worker.end(), Ended::No);
        drop(worker);
        drop(held);
    });
}

#[test]
fn a_device_is_paused_without_waiting() {
    within_a_minute(|| {
        let (mut worker, quiesced) = worker();
        while !worker.try_pause() {
            std::thread::yield_now();
        }
        assert_eq!(quiesced.load(Ordering::SeqCst), 1);
        assert_eq!(worker.end(), Ended::Yes);
    });
}
