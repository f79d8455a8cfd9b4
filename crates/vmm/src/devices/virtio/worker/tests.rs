use std::io::Write;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use ebb_guest_ram::GuestMemory;
use virtio_queue::{Queue, QueueState};
use vm_memory::GuestAddress;

use super::*;
use crate::config::{RateLimits, Switch};
use crate::devices::bus::ExclusiveDevice;
use crate::devices::interrupt::InterruptLine;
use crate::devices::throttle::{Admission, Throttle};
use crate::devices::virtio::Work;
use crate::devices::virtio::mmio::Wires;

/// Counts its calls. Has as many requests as `left`.
struct Idle {
    quiesced: Arc<AtomicUsize>,
    /// Taken by each.
    gate: Arc<Mutex<()>>,
    processed: Arc<AtomicUsize>,
    left: Arc<AtomicUsize>,
    throttle: Arc<Throttle>,
    /// Counts bytes that arrive here, while there is one.
    host: Option<Arc<OwnedFd>>,
    arrived: Arc<AtomicUsize>,
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
    fn throttle(&self) -> Option<&Arc<Throttle>> {
        Some(&self.throttle)
    }
    fn process_queue(&mut self, _index: usize) -> Work {
        self.processed.fetch_add(1, Ordering::SeqCst);
        let mut work = Work::default();
        while self.left.load(Ordering::SeqCst) > 0
            && self.throttle.admit(1, Instant::now()) == Admission::Now
        {
            self.left.fetch_sub(1, Ordering::SeqCst);
            work.interrupt = true;
        }
        work
    }
    fn host_events(&self) -> Option<HostEvents> {
        self.host.as_ref().map(|fd| HostEvents { fd: fd.clone(), wanted: PollFlags::IN })
    }
    fn on_host_events(&mut self, ready: PollFlags) -> Work {
        let Some(fd) = &self.host else { return Work::default() };
        if ready.contains(PollFlags::IN) && rustix::io::read(fd, &mut [0; 1]) == Ok(1) {
            self.arrived.fetch_add(1, Ordering::SeqCst);
        } else {
            self.host = None;
        }
        Work { config_changed: true, ..Work::default() }
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

struct Tested {
    worker: Worker,
    kick: Arc<EventFd>,
    quiesced: Arc<AtomicUsize>,
    processed: Arc<AtomicUsize>,
    left: Arc<AtomicUsize>,
    throttle: Arc<Throttle>,
    /// The device's peer on the host.
    host: Option<UnixStream>,
    arrived: Arc<AtomicUsize>,
    transport: Arc<Mutex<MmioTransport<Idle>>>,
}

/// A thread for a device with a driver, which passes `gate` whenever it is quiesced.
fn tested(limits: RateLimits, gate: Arc<Mutex<()>>) -> Tested {
    let [quiesced, processed, left, arrived] = [(); 4].map(|()| Arc::new(AtomicUsize::new(0)));
    let throttle = Arc::new(Throttle::new(limits, Instant::now()));
    let memory = GuestMemory::from_ranges(&[(GuestAddress(0), 1 << 20)]).unwrap();
    let (host, peer) = UnixStream::pair().unwrap();
    let device = Idle {
        quiesced: quiesced.clone(),
        gate,
        processed: processed.clone(),
        left: left.clone(),
        throttle: throttle.clone(),
        host: Some(Arc::new(peer.into())),
        arrived: arrived.clone(),
    };
    let wires = Wires::new(1, InterruptLine::counted().0).unwrap();
    let mut transport = MmioTransport::new(device, memory, wires);
    for (register, value) in [(0x24, 1_u32), (0x20, 1), (0x70, 0xb), (0x70, 0xf)] {
        transport.write(register, &value.to_le_bytes());
    }
    assert!(transport.is_active());
    let kick = transport.wires().kicks[0].clone();
    let exit = Arc::new(ExitSignal::new().unwrap());
    let filters = Filters::new(Switch::Off).unwrap();
    let transport = Arc::new(Mutex::new(transport));
    let worker = Worker::spawn("test", transport.clone(), &filters, exit).unwrap();
    let host = Some(host);
    Tested { worker, kick, quiesced, processed, left, throttle, host, arrived, transport }
}

fn worker() -> (Worker, Arc<AtomicUsize>) {
    worker_with(Arc::default())
}

fn worker_with(gate: Arc<Mutex<()>>) -> (Worker, Arc<AtomicUsize>) {
    let tested = tested(RateLimits::default(), gate);
    (tested.worker, tested.quiesced)
}

/// Waits until `count` has reached `goal`.
fn reaches(count: &AtomicUsize, goal: impl Fn(usize) -> bool) {
    while !goal(count.load(Ordering::SeqCst)) {
        std::thread::sleep(Duration::from_millis(1));
    }
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

#[test]
fn a_limited_device_continues_by_itself() {
    within_a_minute(|| {
        let limits = RateLimits { ops: Some(100), ops_burst: Some(1), ..RateLimits::default() };
        let tested = tested(limits, Arc::default());
        tested.left.store(5, Ordering::SeqCst);
        tested.kick.write(1).unwrap();
        // Only the first of them is due to the notification.
        reaches(&tested.left, |left| left == 0);
        assert!(tested.throttle.delayed() >= 1);
    });
}

#[test]
fn a_limited_device_is_paused_and_its_limits_can_change() {
    within_a_minute(|| {
        let limits = RateLimits { ops: Some(1), ops_burst: Some(1), ..RateLimits::default() };
        let tested = tested(limits, Arc::default());
        tested.left.store(100, Ordering::SeqCst);
        tested.kick.write(1).unwrap();
        reaches(&tested.left, |left| left < 100);
        tested.worker.pause();
        tested.throttle.set(RateLimits::default(), Instant::now());
        tested.worker.resume();
        reaches(&tested.left, |left| left == 0);
    });
}

#[test]
fn the_hosts_events_wake_a_device_that_runs() {
    within_a_minute(|| {
        let mut tested = tested(RateLimits::default(), Arc::default());
        let mut host = tested.host.take().unwrap();
        host.write_all(b"abc").unwrap();
        reaches(&tested.arrived, |arrived| arrived == 3);
        tested.worker.pause();
        host.write_all(b"d").unwrap();
        assert_eq!(tested.arrived.load(Ordering::SeqCst), 3);
        tested.worker.resume();
        reaches(&tested.arrived, |arrived| arrived == 4);
        // Each of them changed the configuration, and the end of the peer does as well.
        drop(host);
        let mut generation = [0; 4];
        while u32::from_le_bytes(generation) < 5 {
            lock(&tested.transport).read(0xfc, &mut generation);
        }
    });
}

/// Without a limit, a guest that only notifies keeps the device's thread busy.
#[test]
fn notifications_in_vain_do_not_keep_the_thread_busy() {
    within_a_minute(|| {
        let tested = tested(RateLimits::default(), Arc::default());
        reaches(&tested.processed, |calls| calls > 0);
        let begin = Instant::now();
        while begin.elapsed() < 4 * MOST_IN_VAIN * REST {
            tested.kick.write(1).unwrap();
            // Lets the thread run also where there is one processor.
            std::thread::yield_now();
        }
        let (calls, elapsed) = (tested.processed.load(Ordering::SeqCst), begin.elapsed());
        let rests = elapsed.as_millis() / REST.as_millis();
        assert!(calls as u128 <= u128::from(MOST_IN_VAIN) + rests + 8, "{calls} in {elapsed:?}");
        // A request is still found.
        tested.left.store(1, Ordering::SeqCst);
        tested.kick.write(1).unwrap();
        reaches(&tested.left, |left| left == 0);
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
