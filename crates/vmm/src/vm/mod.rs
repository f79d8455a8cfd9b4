//! A whole virtual machine: built from its [`VmConfig`] or from a snapshot, run until it ends.

mod balloon;
mod build;
mod console;
mod control;
mod disks;
mod event_loop;
mod fork;
mod free_pages;
#[cfg(any(test, feature = "testing"))]
mod fuzzing;
mod generation;
mod leases;
mod limits;
mod merge;
mod migration;
mod net;
mod origin;
mod park;
mod reboots;
mod save;
mod snapshot;
mod start_parts;
mod task;
pub mod terminal;
mod trim;
mod vsock;

use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, TryLockError};
use std::time::Instant;

use ebb_guest_ram::{GuestRam, InhibitGuard, RamError, StableMemory};
use ebb_kvm_clock::{ClockPolicy, SavedClock};
use ebb_local_io::ListenError;
use kvm_bindings::CpuId;
use kvm_ioctls::VmFd;
use thiserror::Error;

use crate::acpi::{AcpiError, Platform};
use crate::api::ApiError;
use crate::api::vm::{ClockInfo, ClockInstant, VmState};
use crate::boot::{BootError, BootImage};
use crate::clock::{self, GuestClockError, TscFrequencies};
use crate::config::{ConfigError, SerialConfig, VmConfig};
use crate::cpu::CpuError;
use crate::cpu::state::MsrList;
use crate::cpu::threads::{ExitCounters, VcpuThreads};
use crate::devices::bus::Overlap;
use crate::devices::platform::AcpiRegisters;
use crate::devices::serial::Serial;
use crate::devices::virtio::balloon::BalloonDevice;
use crate::devices::virtio::block::{DiskError, THREADS};
use crate::devices::virtio::mmio::{ManagedDevice, MmioTransport};
use crate::devices::virtio::net::NetError;
use crate::devices::virtio::worker::Worker;
use crate::ending::Ended;
use crate::exit::{ExitSignal, GuestExit, Taken};
use crate::isolation::{Companion, IsolationError, IsolationInfo, Needs};
use crate::seccomp::SeccompError;
use crate::snapshot::SnapshotError;
use crate::snapshot::state::InterruptControllers;

use control::ProcessMemory;
use disks::NamedDisk;
use fork::Forkable;
use generation::Generation;
use limits::Throttled;
use merge::Merging;
use migration::Migrations;
use migration::description::Incompatible;
use net::NetDevice;
use start_parts::StartParts;
use vsock::VsockHandle;

pub(crate) use vsock::BACKLOG as VSOCK_BACKLOG;

pub use event_loop::signals::Signals;
pub use event_loop::{ChangedDisks, Start, restore, run};
pub(crate) use event_loop::{Front, boot_behind, restore_behind};
#[cfg(any(test, feature = "testing"))]
pub use fork::fuzz_fork_requests;
#[cfg(any(test, feature = "testing"))]
pub use fuzzing::fuzz_descriptors;
pub use migration::destination::{ReceiveConfig, receive};

/// Why a virtual machine could not be started or run.
#[derive(Debug, Error)]
pub enum VmError {
    /// The request contradicts itself.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// No usable /dev/kvm.
    #[error("{problem}; {remedy}")]
    NoKvm {
        /// What is wrong with it.
        problem: String,
        /// What to do.
        remedy: String,
    },
    /// KVM refused an operation.
    #[error("KVM cannot {action}: {source}")]
    Kvm {
        /// The operation.
        action: &'static str,
        /// KVM's error.
        source: kvm_ioctls::Error,
    },
    /// KVM refused guest memory.
    #[error(
        "KVM refuses {size_bytes} bytes of guest memory at {start:#x}: {source}; give less --memory"
    )]
    MemorySlot {
        /// Guest-physical address.
        start: u64,
        /// Size in bytes.
        size_bytes: u64,
        /// KVM's error.
        source: kvm_ioctls::Error,
    },
    /// Guest memory could not be allocated or restored.
    #[error(transparent)]
    Ram(#[from] RamError),
    /// Kernel or initrd could not be loaded.
    #[error(transparent)]
    Boot(#[from] BootError),
    /// The files for a reboot of a restored machine could not be opened.
    #[error(
        "{0}; the guest boots from this file after a reboot: with --on-reboot exit it is not needed"
    )]
    RebootImage(BootError),
    /// A snapshot could not be written or used.
    #[error(transparent)]
    Snapshot(#[from] SnapshotError),
    /// The guest's clocks could not be read or set.
    #[error("cannot save or set the guest's clocks: {0}")]
    Clock(#[from] GuestClockError),
    /// The ACPI tables could not be written.
    #[error(transparent)]
    Acpi(#[from] AcpiError),
    /// A vCPU could not be created.
    #[error(transparent)]
    Cpu(#[from] CpuError),
    /// The balloon could not be created.
    #[error(transparent)]
    Balloon(#[from] ebb_balloon::BalloonError),
    /// A disk could not be used.
    #[error(transparent)]
    Disk(#[from] DiskError),
    /// A network device could not be used.
    #[error(transparent)]
    Net(#[from] NetError),
    /// More devices than interrupt lines.
    #[error(
        "{count} virtio devices, but there are interrupt lines for {limit}; give fewer --disk and --net"
    )]
    TooManyDevices {
        /// Devices configured.
        count: usize,
        /// Most devices possible.
        limit: usize,
    },
    /// The monitor's own layout is wrong.
    #[error("{0}; this is a bug in the monitor")]
    Layout(#[from] Overlap),
    /// The socket of the socket device could not be opened.
    #[error("--vsock: {0}")]
    Vsock(#[from] ListenError),
    /// The API socket could not be opened.
    #[error(transparent)]
    Api(#[from] ApiError),
    /// System call filters could not be installed.
    #[error(transparent)]
    Seccomp(#[from] SeccompError),
    /// The monitor could not be isolated.
    #[error(transparent)]
    Isolation(#[from] IsolationError),
    /// The console's file or terminal cannot be used.
    #[error("cannot use the console {console}: {source}; choose another --serial")]
    Console {
        /// The console.
        console: String,
        /// The system's error.
        source: std::io::Error,
    },
    /// No machine arrived from another monitor.
    #[error("no virtual machine was received: {0}")]
    NotReceived(String),
    /// The destination cannot provide the machine that the source described.
    #[error(transparent)]
    Incompatible(#[from] Incompatible),
    /// Another monitor holds what only one may have.
    #[error("cannot acquire a device: {0}")]
    Device(String),
    /// The host refused a resource.
    #[error("cannot {action}: {source}")]
    Host {
        /// The operation.
        action: &'static str,
        /// The system's error.
        source: std::io::Error,
    },
}

impl VmError {
    pub(crate) fn kvm(action: &'static str) -> impl FnOnce(kvm_ioctls::Error) -> Self {
        move |source| Self::Kvm { action, source }
    }

    pub(crate) fn host<E: Into<std::io::Error>>(action: &'static str) -> impl FnOnce(E) -> Self {
        move |source| Self::Host { action, source: source.into() }
    }
}

type SharedTransport = Arc<Mutex<MmioTransport<BalloonDevice>>>;

/// A built virtual machine: the state shared by the main thread and the API thread.
///
/// Lock order: `trim_cursor` before `state` before `frozen` before `image` before a device's
/// transport; `clock_info`, `parked` and
/// `leases` are taken last and held for an assignment only. While waiting for a vCPU,
/// no lock is held except `trim_cursor`, `state` and `frozen`, which no vCPU thread takes.
pub struct Vm {
    // Fields are dropped from top to bottom: threads end before what they use is dropped. Guest
    // memory is dropped late; only merging, which holds references to it, is dropped later.
    vcpus: VcpuThreads,
    workers: Vec<Worker>,
    kvm: Arc<VmFd>,
    config: VmConfig,
    interrupt_controllers: InterruptControllers,
    platform: Platform,
    /// `None` for a restored machine that ends when its guest reboots.
    image: Option<Mutex<BootImage>>,
    balloon: Option<SharedTransport>,
    vsock: Option<VsockHandle>,
    /// All virtio devices in slot order.
    devices: Vec<Arc<Mutex<dyn ManagedDevice>>>,
    /// Those of them that are disks.
    disks: Vec<NamedDisk>,
    /// Network devices in order.
    nets: Vec<NetDevice>,
    /// Devices whose requests can be limited.
    throttled: Vec<Throttled>,
    /// The processor as vCPU 0 sees it.
    cpuid: CpuId,
    /// The model specific registers of each vCPU.
    msrs: Arc<MsrList>,
    /// Names of this host's KVM capabilities.
    capabilities: Vec<String>,
    /// `None` if KVM does not report the frequency of the time stamp counter.
    tsc: Option<TscFrequencies>,
    /// The guest's clocks when it was paused or saved.
    frozen: Mutex<Option<SavedClock>>,
    /// The guest's clocks when the machine was last stopped and started, for the API.
    clock_info: Mutex<ClockInfo>,
    serial: Arc<Mutex<Serial>>,
    acpi: Arc<Mutex<AcpiRegisters>>,
    generation: Generation,
    exit: Arc<ExitSignal>,
    counters: Arc<ExitCounters>,
    state: Mutex<VmState>,
    migrations: Arc<Migrations>,
    /// Why a snapshot stops the guest while its memory is copied; `None` if it need not.
    copies_stopped: Option<String>,
    /// Inhibits discarding of memory that another monitor may use, after a migration with unknown
    /// outcome.
    handed_over: Mutex<Option<InhibitGuard>>,
    /// Whether devices have released what only one monitor may hold.
    released_exclusive: AtomicBool,
    started: Instant,
    start_parts: OnceLock<StartParts>,
    process_memory: ProcessMemory,
    /// What checkpoints need, where they are allowed.
    forkable: Option<Forkable>,
    /// The checksum in the snapshot that the machine was restored from.
    restored_from: Option<u64>,
    /// The isolation of the monitor, for the API.
    isolation: IsolationInfo,
    /// Opens files that API clients name; `None` without an API.
    companion: Option<Companion>,
    /// First page of the next trim.
    trim_cursor: Mutex<u64>,
    parked: Mutex<Option<park::Parked>>,
    leases: Mutex<leases::Leases>,
    ram: Arc<GuestRam>,
    /// After guest memory: while the kernel may merge it, machines of other trust domains must stay
    /// out.
    merging: Merging,
}

impl Drop for Vm {
    fn drop(&mut self) {
        self.workers.iter().for_each(Worker::request_end);
        let mut all = self.vcpus.end();
        for worker in &mut self.workers {
            if worker.end() == Ended::No {
                all = Ended::No;
            }
        }
        if all == Ended::No {
            // A thread that was left behind still accesses guest memory.
            std::mem::forget(self.ram.clone());
        }
    }
}

/// Whether a call has started a machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use]
pub enum Started {
    /// The machine was started.
    Yes,
    /// Another call was first, or has ended the machine: this call had no effect.
    No,
}

/// What became of a reboot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use]
enum Reset {
    /// The guest has rebooted, or no longer needs to.
    Done,
    /// The machine is still stopping, or being paused, saved or sent: it must be tried again.
    Later,
}

fn saved_instant(saved: &SavedClock) -> Option<ClockInstant> {
    saved.host_realtime_ns.map(|realtime_ns| ClockInstant { clock_ns: saved.clock_ns, realtime_ns })
}

fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Vm {
    /// Lets the vCPUs run for the first time, from the kernel's entry or from their saved state.
    /// After an error they have not run.
    pub fn start(&self) -> Result<Started, VmError> {
        let mut state = lock(&self.state);
        if !matches!(*state, VmState::Starting | VmState::Receiving) {
            return Ok(Started::No);
        }
        self.thaw_clocks()?;
        *state = VmState::Running;
        self.continue_all();
        Ok(Started::Yes)
    }

    /// Leaves the machine paused before its first instruction here.
    pub fn start_paused(&self) -> Started {
        let mut state = lock(&self.state);
        if !matches!(*state, VmState::Starting | VmState::Receiving) {
            return Started::No;
        }
        *state = VmState::Paused;
        Started::Yes
    }

    /// Stops everything and saves the guest's clocks. If they cannot be read, everything continues.
    fn freeze(&self) -> Result<(), VmError> {
        self.stop_all();
        // Without a known frequency, the clocks keep following the host's.
        let saved = self.tsc.map(|tsc| clock::save(&self.kvm, &self.vcpus, tsc)).transpose();
        match saved {
            Ok(saved) => {
                lock(&self.clock_info).stopped = saved.as_ref().and_then(saved_instant);
                *lock(&self.frozen) = saved;
                Ok(())
            }
            Err(error) => {
                self.continue_all();
                Err(error.into())
            }
        }
    }

    /// Continues everything, with the clocks set according to the policy. If they cannot be set,
    /// everything remains stopped.
    fn thaw(&self) -> Result<(), VmError> {
        self.thaw_clocks()?;
        self.continue_all();
        Ok(())
    }

    /// Sets the clocks back to the time when the machine was stopped. KVM's own run on meanwhile,
    /// so there is nothing to do for a guest that should catch up.
    fn thaw_clocks(&self) -> Result<(), VmError> {
        let mut frozen = lock(&self.frozen);
        if let (Some(saved), Some(tsc)) = (&*frozen, self.tsc) {
            let started = match self.config.clock {
                ClockPolicy::Continue => {
                    let plan =
                        clock::plan(saved, ClockPolicy::Continue, &self.kvm, &self.vcpus, tsc)?;
                    clock::set_counters_and_timers(&self.vcpus, &plan)?;
                    clock::set(&self.kvm, &plan)?;
                    plan.realtime_ns
                        .map(|realtime_ns| ClockInstant { clock_ns: plan.clock_ns, realtime_ns })
                }
                ClockPolicy::CatchUp => Some(clock::now(&self.kvm, &self.vcpus, tsc)?),
            };
            lock(&self.clock_info).started = started;
        }
        *frozen = None;
        Ok(())
    }

    /// Stops merging, then vCPUs, then devices: a vCPU could give a device new work, a device
    /// cannot start a vCPU. Merging comes first, so that neither waits for a page that is being
    /// merged.
    fn stop_all(&self) {
        self.merging.pause();
        self.vcpus.pause();
        for worker in &self.workers {
            worker.pause();
        }
    }

    /// Like [`stop_all`](Self::stop_all) without waiting for vCPUs and devices: whether all have
    /// stopped.
    fn try_stop_all(&self) -> bool {
        self.merging.pause();
        let vcpus_stopped = self.vcpus.try_pause();
        self.workers.iter().fold(vcpus_stopped, |stopped, worker| worker.try_pause() && stopped)
    }

    /// Continues devices first, so that the guest does not wait for them.
    fn continue_all(&self) {
        for worker in &self.workers {
            worker.resume();
        }
        self.vcpus.resume();
        self.merging.resume();
    }

    /// Reboots the guest. Its memory is discarded first: the new kernel finds zeros, and the host
    /// does not keep the memory that the old one touched.
    ///
    /// Waits neither for an operation that holds the machine, nor for a slow disk: it must be
    /// called again then.
    fn reset(&self) -> Result<Reset, VmError> {
        let state = match self.state.try_lock() {
            Ok(state) => state,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return Ok(Reset::Later),
        };
        match *state {
            VmState::Saving | VmState::Migrating => return Ok(Reset::Later),
            VmState::Stopping => return Ok(Reset::Done),
            // Its memory could not be discarded.
            _ if self.is_being_copied() => return Ok(Reset::Later),
            _ => {}
        }
        match self.exit.take_reboot(|| self.try_stop_all()) {
            Taken::Reboot => {}
            Taken::NotStopped => return Ok(Reset::Later),
            Taken::OtherIsPending => return Ok(Reset::Done),
        }
        tracing::info!("the guest rebooted");
        lock(&self.serial).reset();
        for device in &self.devices {
            lock(device).reset();
        }
        self.vcpus.on_each(|vcpu| vcpu.reset())?;
        snapshot::apply_interrupts(&self.interrupt_controllers, &self.kvm)?;
        self.ram.reclaim_all();
        let all: Vec<_> = self.ram.regions().iter().map(ebb_guest_ram::Region::pages).collect();
        self.ram.discard(&all)?;
        self.load_and_enter()?;
        if *state == VmState::Running {
            self.continue_all();
        }
        Ok(Reset::Done)
    }

    /// Loads kernel, initrd and tables, and points vCPU 0 at the kernel.
    fn load_and_enter(&self) -> Result<(), VmError> {
        let memory = self.ram.memory().clone();
        let Some(image) = &self.image else { return Ok(()) };
        let rsdp = crate::acpi::write_tables(&memory, &self.platform)?;
        self.generation.write(&memory)?;
        let entry = lock(image).load(&memory, self.ram.size_bytes(), rsdp)?;
        self.vcpus.on_each(
            move |vcpu| if vcpu.index == 0 { vcpu.enter(&memory, entry) } else { Ok(()) },
        )?;
        Ok(())
    }

    /// What the monitor's resource limits follow from.
    fn needs(&self) -> Needs {
        let images = self.disks.iter().map(|disk| lock(&disk.transport).device().most_file_bytes());
        let serial = match &self.config.serial {
            SerialConfig::File { max, .. } => max.bytes(),
            _ => 0,
        };
        let snapshot = crate::snapshot::file::most_bytes(self.ram.size_bytes());
        let merged = StableMemory::OWN_SEGMENT_BYTES;
        let (cpus, devices) = (u64::from(self.config.cpus), self.workers.len() as u64);
        let of_disks = (self.disks.len() * THREADS) as u64;
        Needs {
            file_bytes: images.chain([serial, snapshot, merged]).max().unwrap_or(0),
            // Besides those of vCPUs and devices: main, API, console, merging, migration and its
            // data streams, twice that to be generous.
            threads: self.forkable.is_none().then_some(cpus + devices + of_disks + 64),
            connections: self.vsock.as_ref().map_or(0, VsockHandle::open_files),
        }
    }

    /// Why the guest ended, if it has.
    pub fn pending_exit(&self) -> Option<GuestExit> {
        self.exit.pending()
    }
}
