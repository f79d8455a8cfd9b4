//! A whole virtual machine: built from its [`VmConfig`] or from a snapshot, run until it ends.

mod balloon;
mod build;
mod control;
mod event_loop;
mod free_pages;
mod merge;
mod migration;
mod snapshot;
pub mod terminal;
mod trim;

use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use ebb_guest_ram::{GuestRam, InhibitGuard, RamError};
use ebb_kvm_clock::{ClockPolicy, SavedClock};
use kvm_bindings::CpuId;
use kvm_ioctls::VmFd;
use thiserror::Error;

use crate::acpi::{AcpiError, Platform};
use crate::api::ApiError;
use crate::api::vm::{ClockInfo, ClockInstant, VmState};
use crate::boot::{BootError, BootImage};
use crate::clock::{self, GuestClockError, TscFrequencies};
use crate::config::{ConfigError, VmConfig};
use crate::cpu::CpuError;
use crate::cpu::state::MsrList;
use crate::cpu::threads::{ExitCounters, VcpuThreads};
use crate::devices::bus::Overlap;
use crate::devices::platform::AcpiRegisters;
use crate::devices::serial::Serial;
use crate::devices::virtio::balloon::BalloonDevice;
use crate::devices::virtio::block::DiskError;
use crate::devices::virtio::mmio::{ManagedDevice, MmioTransport};
use crate::devices::virtio::worker::Worker;
use crate::exit::{ExitSignal, GuestExit};
use crate::seccomp::SeccompError;
use crate::snapshot::SnapshotError;
use crate::snapshot::state::InterruptControllers;

use merge::Merging;
use migration::Migrations;
use migration::description::Incompatible;

pub use event_loop::signals::Signals;
pub use event_loop::{Start, restore, run};
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
    /// KVM refused something.
    #[error("KVM cannot {action}: {source}")]
    Kvm {
        /// What was asked.
        action: &'static str,
        /// Its answer.
        source: kvm_ioctls::Error,
    },
    /// KVM refused guest memory.
    #[error(
        "KVM does not take {size_bytes} bytes of guest memory at {start:#x}: {source}; give less --memory"
    )]
    MemorySlot {
        /// Guest-physical address.
        start: u64,
        /// Size in bytes.
        size_bytes: u64,
        /// Its answer.
        source: kvm_ioctls::Error,
    },
    /// Guest memory could not be had.
    #[error(transparent)]
    Ram(#[from] RamError),
    /// Kernel or initrd could not be loaded.
    #[error(transparent)]
    Boot(#[from] BootError),
    /// The files for a reboot of a restored machine.
    #[error(
        "{0}; the guest would start again from there after a reboot: with --on-reboot exit it is not needed"
    )]
    RebootImage(BootError),
    /// A snapshot.
    #[error(transparent)]
    Snapshot(#[from] SnapshotError),
    /// The guest's clocks.
    #[error("the guest's clocks cannot be kept: {0}")]
    Clock(#[from] GuestClockError),
    /// The ACPI tables could not be made.
    #[error(transparent)]
    Acpi(#[from] AcpiError),
    /// A vCPU could not be made.
    #[error(transparent)]
    Cpu(#[from] CpuError),
    /// The balloon could not be made.
    #[error(transparent)]
    Balloon(#[from] ebb_balloon::BalloonError),
    /// A disk could not be used.
    #[error(transparent)]
    Disk(#[from] DiskError),
    /// More devices than interrupt lines.
    #[error("{count} virtio devices, but there are interrupt lines for {limit}; give fewer --disk")]
    TooManyDevices {
        /// Devices asked for.
        count: usize,
        /// Devices possible.
        limit: usize,
    },
    /// The monitor's own layout is wrong.
    #[error("{0}; this is a fault of the monitor")]
    Layout(#[from] Overlap),
    /// The API socket could not be opened.
    #[error(transparent)]
    Api(#[from] ApiError),
    /// System call filters.
    #[error(transparent)]
    Seccomp(#[from] SeccompError),
    /// The console's file or terminal.
    #[error("cannot use the console {console}: {source}; choose another --serial")]
    Console {
        /// Which one.
        console: String,
        /// The system's answer.
        source: std::io::Error,
    },
    /// A machine that was to come from another monitor.
    #[error("no virtual machine was received: {0}")]
    NotReceived(String),
    /// A machine that cannot be here what it was there.
    #[error(transparent)]
    Incompatible(#[from] Incompatible),
    /// What only one monitor may have.
    #[error("cannot take a device over: {0}")]
    Device(String),
    /// A resource of the host.
    #[error("cannot {action}: {source}")]
    Host {
        /// What was tried.
        action: &'static str,
        /// The system's answer.
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

/// A built virtual machine: everything that the main thread and the API thread share.
///
/// Lock order: `trim_cursor` before `state` before `frozen` before `image` before a device's
/// transport; `clock_info` is taken last and held for an assignment only. No lock is held while a
/// vCPU is waited for except `trim_cursor`, `state` and `frozen`, which no vCPU thread takes.
pub struct Vm {
    // Fields are dropped from top to bottom: threads end before what they use goes away, guest
    // memory goes last but for merging, which has shares of it of its own.
    vcpus: VcpuThreads,
    workers: Vec<Worker>,
    kvm: VmFd,
    config: VmConfig,
    interrupt_controllers: InterruptControllers,
    platform: Platform,
    /// `None` for a restored machine that ends when its guest reboots.
    image: Option<Mutex<BootImage>>,
    balloon: Option<SharedTransport>,
    /// All virtio devices in the order of their places.
    devices: Vec<Arc<Mutex<dyn ManagedDevice>>>,
    /// The processor as vCPU 0 sees it.
    cpuid: CpuId,
    /// The model specific registers of each vCPU.
    msrs: Arc<MsrList>,
    /// What this host's KVM can do, by name.
    capabilities: Vec<String>,
    /// `None` if KVM does not know how fast the time stamp counter counts.
    tsc: Option<TscFrequencies>,
    /// The guest's clocks at the moment at which it was paused or saved.
    frozen: Mutex<Option<SavedClock>>,
    /// What the clocks said when the machine was last stopped and started, for the API.
    clock_info: Mutex<ClockInfo>,
    serial: Arc<Mutex<Serial>>,
    acpi: Arc<Mutex<AcpiRegisters>>,
    exit: Arc<ExitSignal>,
    counters: Arc<ExitCounters>,
    state: Mutex<VmState>,
    migrations: Arc<Migrations>,
    /// Memory that another monitor may have now, after a migration whose end is unknown.
    handed_over: Mutex<Option<InhibitGuard>>,
    /// Devices have let go of what only one monitor may have.
    released_exclusive: AtomicBool,
    started: Instant,
    /// First page that the next trim looks at.
    trim_cursor: Mutex<u64>,
    ram: Arc<GuestRam>,
    /// After guest memory: as long as the kernel may merge it, no machine of another trust domain
    /// may come.
    merging: Merging,
}

/// Whether a call has brought a machine to life.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use]
pub enum Started {
    /// It has.
    Yes,
    /// Somebody was first, or has ended the machine: the call has done nothing.
    No,
}

fn saved_instant(saved: &SavedClock) -> Option<ClockInstant> {
    saved.host_realtime_ns.map(|realtime_ns| ClockInstant { clock_ns: saved.clock_ns, realtime_ns })
}

fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Vm {
    /// Lets the vCPUs run for the first time, from the kernel's entry or from where they were
    /// saved. After an error they have not run.
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

    /// Leaves a machine as if it had been paused before its first instruction here.
    pub fn start_paused(&self) -> Started {
        let mut state = lock(&self.state);
        if !matches!(*state, VmState::Starting | VmState::Receiving) {
            return Started::No;
        }
        *state = VmState::Paused;
        Started::Yes
    }

    /// Stops everything, and notes what the guest's clocks say. If they cannot be read, everything
    /// runs on.
    fn freeze(&self) -> Result<(), VmError> {
        self.stop_all();
        // Without a known frequency, the clocks go on as they always did: with the host's.
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

    /// Lets everything run on, with the clocks as the policy wants them. If they cannot be set,
    /// everything stays stopped.
    fn thaw(&self) -> Result<(), VmError> {
        self.thaw_clocks()?;
        self.continue_all();
        Ok(())
    }

    /// Puts the clocks back to where they were when the machine was stopped. KVM's own go on all
    /// the time, so there is nothing to do for a guest that is to catch up.
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

    /// Stops vCPUs, then devices: a vCPU could give a device new work, a device cannot start a
    /// vCPU. Merging before both, so that neither waits for a page that is being merged.
    fn stop_all(&self) {
        self.merging.pause();
        self.vcpus.pause();
        for worker in &self.workers {
            worker.pause();
        }
    }

    /// Devices first, so that nothing the guest does waits for them.
    fn continue_all(&self) {
        for worker in &self.workers {
            worker.resume();
        }
        self.vcpus.resume();
        self.merging.resume();
    }

    /// Starts the guest anew after a reboot. Its memory is given back to the host first: the new
    /// kernel finds zeros, and the host does not keep what the old one had touched.
    fn reset(&self) -> Result<(), VmError> {
        let state = lock(&self.state);
        if *state == VmState::Stopping {
            return Ok(());
        }
        // Only now: whoever had the state before saw that a reboot is due.
        self.exit.take();
        self.stop_all();
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
        Ok(())
    }

    /// Loads kernel, initrd and tables, and points vCPU 0 at the kernel.
    fn load_and_enter(&self) -> Result<(), VmError> {
        let memory = self.ram.memory().clone();
        let Some(image) = &self.image else { return Ok(()) };
        let rsdp = crate::acpi::write_tables(&memory, &self.platform)?;
        let entry = lock(image).load(&memory, self.ram.size_bytes(), rsdp)?;
        self.vcpus.on_each(
            move |vcpu| if vcpu.index == 0 { vcpu.enter(&memory, entry) } else { Ok(()) },
        )?;
        Ok(())
    }

    /// Why the guest ended, if it has.
    pub fn pending_exit(&self) -> Option<GuestExit> {
        self.exit.pending()
    }
}
