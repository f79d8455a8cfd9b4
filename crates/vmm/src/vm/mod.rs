//! A whole virtual machine: built from its [`VmConfig`], run until it ends.

mod build;
mod control;
mod event_loop;
mod metrics;
pub mod privileges;
pub mod terminal;
mod trim;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use ebb_guest_ram::{GuestRam, RamError};
use kvm_bindings::{
    KVM_IRQCHIP_IOAPIC, KVM_IRQCHIP_PIC_MASTER, KVM_IRQCHIP_PIC_SLAVE, kvm_irqchip, kvm_pit_state2,
};
use kvm_ioctls::VmFd;
use thiserror::Error;

use crate::acpi::{AcpiError, Platform};
use crate::api::ApiError;
use crate::api::control::VmState;
use crate::boot::{BootError, BootImage};
use crate::config::{ConfigError, VmConfig};
use crate::cpu::CpuError;
use crate::cpu::threads::{ExitCounters, VcpuThreads};
use crate::devices::bus::Overlap;
use crate::devices::platform::AcpiRegisters;
use crate::devices::serial::Serial;
use crate::devices::virtio::balloon::BalloonDevice;
use crate::devices::virtio::block::DiskError;
use crate::devices::virtio::mmio::MmioTransport;
use crate::devices::virtio::worker::Worker;
use crate::exit::{ExitSignal, GuestExit};
use crate::seccomp::SeccompError;

pub use event_loop::run;

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
type ResetHook = Box<dyn Fn() + Send + Sync>;

/// A built virtual machine: everything that the main thread and the API thread share.
///
/// Lock order: `trim_cursor` before `state` before `image` before a device's transport. No lock is held while a vCPU is waited for except
/// `state`, which no vCPU thread takes.
pub struct Vm {
    // Fields are dropped from top to bottom: threads end before what they use goes away, guest memory goes last.
    vcpus: VcpuThreads,
    workers: Vec<Worker>,
    kvm: VmFd,
    config: VmConfig,
    interrupt_controllers: InterruptControllers,
    platform: Platform,
    image: Mutex<BootImage>,
    balloon: Option<SharedTransport>,
    reset_hooks: Vec<ResetHook>,
    serial: Arc<Mutex<Serial>>,
    acpi: Arc<Mutex<AcpiRegisters>>,
    exit: Arc<ExitSignal>,
    counters: Arc<ExitCounters>,
    state: Mutex<VmState>,
    started: Instant,
    /// First page that the next trim looks at.
    trim_cursor: Mutex<u64>,
    ram: Arc<GuestRam>,
}

/// KVM's interrupt controllers and timer as they were before the first vCPU ran.
struct InterruptControllers {
    chips: Vec<kvm_irqchip>,
    timer: kvm_pit_state2,
}

impl InterruptControllers {
    fn capture(vm: &VmFd) -> Result<Self, VmError> {
        let chips = [KVM_IRQCHIP_PIC_MASTER, KVM_IRQCHIP_PIC_SLAVE, KVM_IRQCHIP_IOAPIC]
            .into_iter()
            .map(|chip_id| {
                let mut chip = kvm_irqchip { chip_id, ..Default::default() };
                vm.get_irqchip(&mut chip).map(|()| chip)
            })
            .collect::<Result<_, _>>()
            .map_err(VmError::kvm("read its interrupt controllers"))?;
        Ok(Self { chips, timer: vm.get_pit2().map_err(VmError::kvm("read its timer"))? })
    }

    fn apply(&self, vm: &VmFd) -> Result<(), VmError> {
        for chip in &self.chips {
            vm.set_irqchip(chip).map_err(VmError::kvm("set its interrupt controllers"))?;
        }
        vm.set_pit2(&self.timer).map_err(VmError::kvm("set its timer"))
    }
}

fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Vm {
    /// Lets the vCPUs run for the first time.
    pub fn start(&self) {
        let mut state = lock(&self.state);
        if *state == VmState::Starting {
            *state = VmState::Running;
            self.vcpus.resume();
        }
    }

    /// Stops vCPUs, then devices: a vCPU could give a device new work, a device cannot start a vCPU.
    fn stop_all(&self) {
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
    }

    /// Starts the guest anew after a reboot. Its memory is given back to the host first: the new kernel finds zeros, and
    /// the host does not keep what the old one had touched.
    fn reset(&self) -> Result<(), VmError> {
        let mut state = lock(&self.state);
        self.stop_all();
        for hook in &self.reset_hooks {
            hook();
        }
        self.vcpus.on_each(super::cpu::Vcpu::reset)?;
        self.interrupt_controllers.apply(&self.kvm)?;
        self.ram.reclaim_all();
        let all: Vec<_> = self.ram.regions().iter().map(ebb_guest_ram::Region::pages).collect();
        self.ram.discard(&all)?;
        self.load_and_enter()?;
        *state = VmState::Running;
        self.continue_all();
        Ok(())
    }

    /// Loads kernel, initrd and tables, and points vCPU 0 at the kernel.
    fn load_and_enter(&self) -> Result<(), VmError> {
        let memory = self.ram.memory().clone();
        let rsdp = crate::acpi::write_tables(&memory, &self.platform)?;
        let entry = lock(&self.image).load(&memory, self.ram.size_bytes(), rsdp)?;
        self.vcpus.on_each(move |vcpu| if vcpu.index == 0 { vcpu.enter(&memory, entry) } else { Ok(()) })?;
        Ok(())
    }

    /// Why the guest ended, if it has.
    pub fn take_exit(&self) -> Option<GuestExit> {
        self.exit.take()
    }
}
