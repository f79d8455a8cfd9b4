//! The threads that run vCPUs: pausing, resuming, jobs on all of them.
//!
//! A signal interrupts a thread in KVM_RUN. Its handler sets `immediate_exit` in the vCPU's run
//! structure (Linux Documentation/virt/kvm/api.rst, section 5), so that a signal just before
//! KVM_RUN is not lost either.

use std::cell::Cell;
use std::io;
use std::os::unix::thread::JoinHandleExt;
use std::ptr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use kvm_ioctls::{VcpuExit, VcpuFd};
use vmm_sys_util::signal::{Killable, SIGRTMIN, register_signal_handler};

use super::{CpuError, Vcpu, internal_error};
use crate::devices::bus::Bus;
use crate::ending::{Ended, join_until};
use crate::exit::{ExitSignal, GuestExit};
use crate::seccomp::{Filters, ThreadKind};

/// Port and memory-mapped I/O of the guest.
#[derive(Default)]
pub struct Buses {
    /// Port I/O.
    pub ports: Bus,
    /// Memory-mapped I/O.
    pub memory: Bus,
}

/// Exits to the monitor by kind, all vCPUs together.
#[derive(Debug, Default)]
pub struct ExitCounters {
    /// Port reads.
    pub port_in: AtomicU64,
    /// Port writes.
    pub port_out: AtomicU64,
    /// Reads of memory-mapped registers that KVM does not serve itself: of virtio devices, those of
    /// the configuration space.
    pub mmio_read: AtomicU64,
    /// Writes of memory-mapped registers.
    pub mmio_write: AtomicU64,
    /// Interruptions by the monitor itself.
    pub kicked: AtomicU64,
}

/// The state that the threads should be in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Goal {
    Run,
    Pause,
    Stop,
}

type Job = Arc<dyn Fn(&mut Vcpu) -> Result<(), CpuError> + Send + Sync>;

struct Shared {
    state: Mutex<State>,
    changed: Condvar,
    exit: Arc<ExitSignal>,
    counters: Arc<ExitCounters>,
}

struct State {
    goal: Goal,
    /// Number of threads that are not running their vCPU.
    parked: usize,
    /// Job for each parked thread, with a generation so that each thread runs it once.
    job: Option<(u64, Job)>,
    job_generation: u64,
    job_done: usize,
    job_error: Option<CpuError>,
    /// Number of threads that have ended; they count as parked.
    ended: usize,
    /// How long each vCPU should rest, once per generation.
    rest: Duration,
    rest_generation: u64,
}

/// All vCPU threads of a virtual machine. Dropping it ends them.
pub struct VcpuThreads {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

impl VcpuThreads {
    /// Starts a thread for each vCPU, all parked until [`resume`](Self::resume).
    pub fn spawn(
        vcpus: Vec<Vcpu>,
        buses: &Arc<Buses>,
        exit: &Arc<ExitSignal>,
        counters: &Arc<ExitCounters>,
        filters: &Filters,
    ) -> io::Result<Self> {
        handle_kicks()?;
        let state = State {
            goal: Goal::Pause,
            parked: 0,
            job: None,
            job_generation: 0,
            job_done: 0,
            job_error: None,
            ended: 0,
            rest: Duration::ZERO,
            rest_generation: 0,
        };
        let shared = Arc::new(Shared {
            state: Mutex::new(state),
            changed: Condvar::new(),
            exit: exit.clone(),
            counters: counters.clone(),
        });
        let mut result = Self { shared, threads: Vec::with_capacity(vcpus.len()) };
        for mut vcpu in vcpus {
            let (shared, buses) = (result.shared.clone(), buses.clone());
            let filter = filters.for_thread(ThreadKind::Vcpu);
            let name = format!("vcpu{}", vcpu.index);
            result.threads.push(std::thread::Builder::new().name(name).spawn(move || {
                let _ended = OnEnd(&shared);
                let _kicks = KickTarget::install(&mut vcpu.fd);
                match filter.apply() {
                    Ok(()) => run(&shared, &buses, &mut vcpu),
                    Err(error) => {
                        shared.exit.raise(GuestExit::Monitor { message: error.to_string() });
                    }
                }
            })?);
        }
        result.wait_until_parked();
        Ok(result)
    }

    /// Number of vCPUs.
    pub fn count(&self) -> usize {
        self.threads.len()
    }

    /// Pauses all vCPUs. When it returns, none runs guest code, and none is in the middle of a
    /// device access.
    pub fn pause(&self) {
        self.set_goal(Goal::Pause);
        self.wait_until_parked();
    }

    /// Like [`pause`](Self::pause) without waiting: whether all vCPUs are paused.
    pub fn try_pause(&self) -> bool {
        self.set_goal(Goal::Pause);
        lock(&self.shared).parked >= self.threads.len()
    }

    /// Ends the threads, or leaves those behind that take too long.
    pub(crate) fn end(&mut self) -> Ended {
        self.set_goal(Goal::Stop);
        let deadline = self.shared.exit.end_deadline();
        let mut all = Ended::Yes;
        for thread in self.threads.drain(..) {
            if join_until(thread, deadline) == Ended::No {
                all = Ended::No;
            }
        }
        all
    }

    /// Lets all vCPUs run.
    pub fn resume(&self) {
        self.set_goal(Goal::Run);
    }

    /// Runs `job` on each vCPU's own thread. The vCPUs must be paused.
    pub fn on_each(
        &self,
        job: impl Fn(&mut Vcpu) -> Result<(), CpuError> + Send + Sync + 'static,
    ) -> Result<(), CpuError> {
        let mut state = lock(&self.shared);
        state.job_generation += 1;
        state.job = Some((state.job_generation, Arc::new(job)));
        state.job_done = 0;
        state.job_error = None;
        self.shared.changed.notify_all();
        while state.job_done + state.ended < self.threads.len() {
            state = self.shared.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.job = None;
        if state.ended > 0 {
            return Err(state.job_error.take().unwrap_or(CpuError::ThreadEnded));
        }
        state.job_error.take().map_or(Ok(()), Err)
    }

    /// Like [`on_each`](Self::on_each), for jobs with a result. Results are in the order of the
    /// vCPUs.
    pub fn collect<T: Send + 'static>(
        &self,
        job: impl Fn(&mut Vcpu) -> Result<T, CpuError> + Send + Sync + 'static,
    ) -> Result<Vec<T>, CpuError> {
        let results: Arc<Mutex<Vec<(u8, T)>>> = Arc::default();
        let sink = results.clone();
        self.on_each(move |vcpu| {
            let result = job(vcpu)?;
            sink.lock().unwrap_or_else(PoisonError::into_inner).push((vcpu.index, result));
            Ok(())
        })?;
        let mut results =
            std::mem::take(&mut *results.lock().unwrap_or_else(PoisonError::into_inner));
        results.sort_by_key(|(index, _)| *index);
        Ok(results.into_iter().map(|(_, result)| result).collect())
    }

    /// Makes each running vCPU rest for `time`, once; a resting vCPU can be paused. Returns at
    /// once.
    pub fn rest(&self, time: Duration) {
        let mut state = lock(&self.shared);
        state.rest_generation += 1;
        state.rest = time;
        drop(state);
        self.kick();
    }

    /// Processor time used by the threads.
    pub fn processor_time(&self) -> Duration {
        self.threads.iter().map(processor_time).sum()
    }

    fn set_goal(&self, goal: Goal) {
        lock(&self.shared).goal = goal;
        self.shared.changed.notify_all();
        if goal != Goal::Run {
            self.kick();
        }
    }

    /// Interrupts KVM_RUN in all threads.
    fn kick(&self) {
        for thread in &self.threads {
            // A thread that has ended cannot be signalled and need not be.
            let _ = thread.kill(SIGRTMIN());
        }
    }

    fn wait_until_parked(&self) {
        let mut state = lock(&self.shared);
        while state.parked < self.threads.len() {
            state = self.shared.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

/// Records the end of a thread, also by a panic, so that no thread waits for it.
struct OnEnd<'a>(&'a Shared);

impl Drop for OnEnd<'_> {
    fn drop(&mut self) {
        let mut state = lock(self.0);
        state.parked += 1;
        state.ended += 1;
        self.0.changed.notify_all();
    }
}

impl Drop for VcpuThreads {
    fn drop(&mut self) {
        let _ = self.end();
    }
}

fn lock(shared: &Shared) -> MutexGuard<'_, State> {
    shared.state.lock().unwrap_or_else(PoisonError::into_inner)
}

thread_local! {
    /// `immediate_exit` of the vCPU that this thread runs; null on other threads.
    static KICK_TARGET: Cell<*mut u8> = const { Cell::new(ptr::null_mut()) };
}

extern "C" fn on_kick(
    _signal: libc::c_int,
    _info: *mut libc::siginfo_t,
    _context: *mut libc::c_void,
) {
    let target = KICK_TARGET.get();
    if !target.is_null() {
        // SAFETY: the pointer is set by the thread that this handler runs on, to a byte of the run
        // structure, and cleared before the vCPU is dropped.
        unsafe { target.write_volatile(1) };
    }
}

/// Handles SIGRTMIN, which makes KVM_RUN return with EINTR in a thread with a [`KickTarget`], now or
/// at its next call.
pub(crate) fn handle_kicks() -> io::Result<()> {
    register_signal_handler(SIGRTMIN(), on_kick)
        .map_err(|error| io::Error::from_raw_os_error(error.errno()))
}

/// The vCPU that this thread runs, for kicks. Drop it before the vCPU.
pub(crate) struct KickTarget(());

impl KickTarget {
    pub(crate) fn install(vcpu: &mut VcpuFd) -> Self {
        KICK_TARGET.set(&raw mut vcpu.get_kvm_run().immediate_exit);
        Self(())
    }
}

impl Drop for KickTarget {
    fn drop(&mut self) {
        KICK_TARGET.set(ptr::null_mut());
    }
}

/// Whether the thread continues.
#[derive(PartialEq, Eq)]
enum Next {
    Run,
    End,
}

/// Waits while the goal is to pause, and runs the jobs that arrive meanwhile.
fn wait_for_goal(shared: &Shared, vcpu: &mut Vcpu, done: &mut u64) -> Next {
    let mut state = lock(shared);
    if state.goal == Goal::Run {
        return Next::Run;
    }
    state.parked += 1;
    shared.changed.notify_all();
    let was_paused = state.goal == Goal::Pause;
    while state.goal == Goal::Pause {
        if let Some((generation, job)) = state.job.clone()
            && generation != *done
        {
            *done = generation;
            drop(state);
            let result = job(vcpu);
            state = lock(shared);
            state.job_done += 1;
            if let Err(error) = result {
                state.job_error.get_or_insert(error);
            }
            shared.changed.notify_all();
            continue;
        }
        state = shared.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
    }
    if state.goal == Goal::Stop {
        return Next::End;
    }
    state.parked -= 1;
    drop(state);
    if was_paused {
        // Informs the guest's watchdogs that time has passed without them. Fails before a guest
        // clock is set up.
        let _ = vcpu.fd.kvmclock_ctrl();
    }
    Next::Run
}

/// Rests if that was requested since the last call, unless the vCPU is to be paused.
fn rest(shared: &Shared, rested: &mut u64) {
    let mut state = lock(shared);
    if state.rest_generation == *rested {
        return;
    }
    *rested = state.rest_generation;
    let end = Instant::now() + state.rest;
    while state.goal == Goal::Run {
        let left = end.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return;
        }
        state = shared.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
    }
}

/// Processor time of the whole process.
pub fn process_time() -> Duration {
    clock_time(libc::CLOCK_PROCESS_CPUTIME_ID)
}

/// Reads a clock. Not with rustix, whose first use looks for the vDSO with a system call that the
/// filters of these threads refuse.
fn clock_time(clock: libc::clockid_t) -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: a clock that does not exist is an error, and `time` is valid for the result.
    if unsafe { libc::clock_gettime(clock, &raw mut time) } != 0 {
        return Duration::ZERO;
    }
    Duration::new(time.tv_sec.unsigned_abs(), time.tv_nsec.unsigned_abs() as u32)
}

/// Processor time of a thread; zero if the system does not report it.
fn processor_time(thread: &JoinHandle<()>) -> Duration {
    let mut clock = 0;
    // SAFETY: the thread has not been joined, so its handle is valid, and `clock` is valid for the
    // result.
    if unsafe { libc::pthread_getcpuclockid(thread.as_pthread_t(), &raw mut clock) } != 0 {
        return Duration::ZERO;
    }
    clock_time(clock)
}

/// Parks this vCPU for good: it cannot continue until it is reset or ended.
fn park_after(shared: &Shared, exit: GuestExit) {
    let mut state = lock(shared);
    if state.goal == Goal::Run {
        state.goal = Goal::Pause;
    }
    drop(state);
    shared.exit.raise(exit);
}

fn run(shared: &Shared, buses: &Buses, vcpu: &mut Vcpu) {
    let (mut done, mut rested) = (0, 0);
    // KVM completes a device access only when the vCPU is entered again. Until then the registers
    // are those of an incomplete instruction and must not be saved.
    let mut unfinished = false;
    let index = vcpu.index;
    let run = &raw const *vcpu.fd.get_kvm_run();
    // A string instruction accesses a port several times in one exit, and `VcpuExit` does not have
    // the size of an access.
    // SAFETY: the pointer is to the vCPU's run structure, which stays mapped as long as `vcpu`
    // lives.
    let element_bytes = unsafe { &raw const (*run).__bindgen_anon_1.io.size };
    // SAFETY: as above; it is called after an exit for a port access, for which KVM has set this
    // field.
    let element_bytes = || unsafe { element_bytes.read_volatile() };
    let count = |counter: &AtomicU64| {
        counter.fetch_add(1, Ordering::Relaxed);
    };
    loop {
        if unfinished && lock(shared).goal != Goal::Run {
            // Returns before any guest instruction runs, with EINTR or with the instruction's next
            // access.
            vcpu.fd.set_kvm_immediate_exit(1);
        } else if wait_for_goal(shared, vcpu, &mut done) == Next::End {
            // `wait_for_goal` increased the count; the caller increases it for a thread that ends.
            lock(shared).parked -= 1;
            return;
        }
        let kvm_error =
            |message: String| GuestExit::Kvm { message: format!("vCPU {index}: {message}") };
        let exit = vcpu.fd.run();
        unfinished = matches!(
            exit,
            Ok(VcpuExit::IoIn(..)
                | VcpuExit::IoOut(..)
                | VcpuExit::MmioRead(..)
                | VcpuExit::MmioWrite(..))
        );
        match exit {
            Ok(VcpuExit::IoIn(port, data)) => {
                count(&shared.counters.port_in);
                buses.ports.read_each(u64::from(port), element_bytes(), data);
            }
            Ok(VcpuExit::IoOut(port, data)) => {
                count(&shared.counters.port_out);
                buses.ports.write_each(u64::from(port), element_bytes(), data);
            }
            Ok(VcpuExit::MmioRead(address, data)) => {
                count(&shared.counters.mmio_read);
                buses.memory.read(address, data);
            }
            Ok(VcpuExit::MmioWrite(address, data)) => {
                count(&shared.counters.mmio_write);
                buses.memory.write(address, data);
            }
            Ok(VcpuExit::Shutdown) => park_after(shared, GuestExit::TripleFault { vcpu: index }),
            Ok(VcpuExit::SystemEvent(kind, _)) => {
                let exit = match kind {
                    kvm_bindings::KVM_SYSTEM_EVENT_SHUTDOWN => GuestExit::PowerOff,
                    kvm_bindings::KVM_SYSTEM_EVENT_RESET => GuestExit::Reboot,
                    kvm_bindings::KVM_SYSTEM_EVENT_CRASH => GuestExit::Panic,
                    other => kvm_error(format!("unknown system event {other}")),
                };
                park_after(shared, exit);
            }
            Ok(VcpuExit::FailEntry(reason, cpu)) => {
                park_after(
                    shared,
                    kvm_error(format!(
                        "entry failed on host CPU {cpu}, hardware reason {reason:#x}"
                    )),
                );
            }
            Ok(VcpuExit::InternalError) => {
                let cause = internal_error::describe(vcpu.fd.get_kvm_run()).unwrap_or_default();
                park_after(shared, kvm_error(cause));
            }
            Ok(VcpuExit::Hlt | VcpuExit::Intr | VcpuExit::IrqWindowOpen) => {}
            Ok(other) => {
                let message = format!("unexpected exit {other:?}");
                park_after(shared, kvm_error(message));
            }
            Err(error) if matches!(error.errno(), libc::EINTR | libc::EAGAIN) => {
                count(&shared.counters.kicked);
                vcpu.fd.set_kvm_immediate_exit(0);
                rest(shared, &mut rested);
            }
            Err(error) => park_after(shared, kvm_error(error.to_string())),
        }
    }
}
