//! A guest of eight bytes with a clock page: the values that KVM writes there, and the guest's own
//! TSC.
//!
//! The guest reads its TSC and halts, over and over, in real mode, so that it runs on any KVM, even
//! on one that emulates every instruction. Each run makes KVM update the page.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};

use ebb_kvm_clock::Reader;
use ebb_kvm_clock::page::{
    MSR_SYSTEM_TIME, MSR_WALL_CLOCK, SYSTEM_TIME_ENABLE, TIME_PAGE_BYTES, VcpuTimeInfo,
    WALL_CLOCK_BYTES, WallClock,
};
use ebb_kvm_clock::protocol::{SharedWords, take_stop_notice, try_read_time};
use ebb_kvm_clock::reader::Reading;
use kvm_bindings::{Msrs, kvm_clock_data, kvm_msr_entry, kvm_regs, kvm_userspace_memory_region};
use kvm_ioctls::{Cap, Kvm, VcpuExit, VcpuFd, VmFd};
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryMmap, VolatileMemory};

use crate::LabError;

/// `wrmsr; hlt; again: rdtsc; hlt; jmp again`
const PROGRAM: [u8; 8] = [0x0f, 0x30, 0xf4, 0x0f, 0x31, 0xf4, 0xeb, 0xfb];
/// Size of the guest's memory in bytes.
const MEMORY_BYTES: usize = 64 << 10;
/// Address of the program, which begins with the write of a register.
const WRITE_REGISTER: u64 = 0x4000;
/// Address at which it reads its TSC.
const READ_TSC: u64 = WRITE_REGISTER + 3;
/// Address of the clock page.
const PAGE: u64 = 0x5000;
/// Address for the task state segment of KVM on Intel processors: below 4 GiB, outside of guest
/// memory.
const TSS_ADDRESS: usize = 0xfffb_d000;
/// Address of the wall clock.
const WALL_CLOCK: u64 = 0x6000;
/// The register of the clock page before there was a flag for stable clocks
/// (`MSR_KVM_SYSTEM_TIME`).
const MSR_OLD_SYSTEM_TIME: u32 = 0x12;
/// Bit 1 of RFLAGS is always set.
const RFLAGS_RESERVED: u64 = 1 << 1;
/// Number of attempts to read the page; KVM does not write it while the guest does not run.
const READ_ATTEMPTS: u32 = 3;

fn refused(action: &'static str) -> impl FnOnce(kvm_ioctls::Error) -> LabError {
    move |cause| LabError::Kvm { action, cause }
}

/// Flags of KVM's clock that this kernel supports (`KVM_CHECK_EXTENSION` of
/// `KVM_CAP_ADJUST_CLOCK`).
pub(super) fn clock_flags(kvm: &Kvm) -> u32 {
    kvm.check_extension_int(Cap::AdjustClock).unsigned_abs()
}

/// Whether KVM may use its master clock for a guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum MasterClock {
    /// KVM may use it.
    Allowed,
    /// KVM must not use it.
    Refused,
}

/// A machine with a vCPU and its clock page. Memory comes last, so that it is unmapped last.
pub(super) struct ClockGuest {
    vcpu: VcpuFd,
    vm: VmFd,
    memory: GuestMemoryMmap,
    latest_ns: AtomicU64,
}

impl ClockGuest {
    /// Creates a guest with a TSC of `tsc_khz` or of the host's frequency.
    ///
    /// # Errors
    /// [`LabError::Kvm`], also when KVM cannot give it that frequency, and [`LabError::TestGuest`]
    /// without memory.
    pub(super) fn new(kvm: &Kvm, tsc_khz: Option<u32>) -> Result<Self, LabError> {
        let no_memory =
            |error: &dyn std::fmt::Display| LabError::TestGuest(format!("has no memory: {error}"));
        let memory: GuestMemoryMmap =
            GuestMemoryMmap::from_ranges(&[(GuestAddress(0), MEMORY_BYTES)])
                .map_err(|error| no_memory(&error))?;
        memory
            .write_slice(&PROGRAM, GuestAddress(WRITE_REGISTER))
            .map_err(|error| no_memory(&error))?;
        let host_address =
            memory.get_host_address(GuestAddress(0)).map_err(|error| no_memory(&error))?;
        let vm = kvm.create_vm().map_err(refused("create a machine"))?;
        vm.set_tss_address(TSS_ADDRESS).map_err(refused("set the TSS address"))?;
        let region = kvm_userspace_memory_region {
            slot: 0,
            flags: 0,
            guest_phys_addr: 0,
            memory_size: MEMORY_BYTES as u64,
            userspace_addr: host_address as u64,
        };
        // SAFETY: the range is a mapping of `memory`, which is dropped after the machine, by the
        // order of the fields.
        unsafe { vm.set_user_memory_region(region) }
            .map_err(refused("give a machine its memory"))?;
        let vcpu = vm.create_vcpu(0).map_err(refused("create a vCPU"))?;
        if let Some(khz) = tsc_khz {
            vcpu.set_tsc_khz(khz).map_err(refused("give a vCPU another TSC frequency"))?;
        }
        start(&vcpu)?;
        // Registers the page with KVM, as a guest's kernel does.
        write_register(&vcpu, MSR_SYSTEM_TIME, PAGE | SYSTEM_TIME_ENABLE)?;
        Ok(Self { vcpu, vm, memory, latest_ns: AtomicU64::new(0) })
    }

    /// Makes KVM use its master clock for this guest or not: a first vCPU that enables its page by
    /// the old register gets none (Linux `kvm_write_system_time`). Only a write by the guest itself
    /// counts.
    pub(super) fn set_master_clock(&mut self, clock: MasterClock) -> Result<(), LabError> {
        let index = match clock {
            MasterClock::Allowed => MSR_SYSTEM_TIME,
            MasterClock::Refused => MSR_OLD_SYSTEM_TIME,
        };
        let registers = kvm_regs {
            rip: WRITE_REGISTER,
            rcx: u64::from(index),
            rax: PAGE | SYSTEM_TIME_ENABLE,
            rflags: RFLAGS_RESERVED,
            ..kvm_regs::default()
        };
        self.vcpu.set_regs(&registers).map_err(refused("set registers"))?;
        // The program continues after its halt.
        self.halt()?;
        self.run().map(drop)
    }

    /// The wall clock, as KVM writes it at the request of a guest's kernel.
    pub(super) fn wall_clock(&self) -> Result<WallClock, LabError> {
        write_register(&self.vcpu, MSR_WALL_CLOCK, WALL_CLOCK)?;
        let mut bytes = [0; WALL_CLOCK_BYTES];
        self.memory
            .read_slice(&mut bytes, GuestAddress(WALL_CLOCK))
            .map_err(|error| LabError::TestGuest(format!("has no wall clock: {error}")))?;
        Ok(WallClock::from_bytes(&bytes))
    }

    /// Lets the guest read its TSC and returns the value. The page is up to date afterwards.
    pub(super) fn run(&mut self) -> Result<u64, LabError> {
        self.halt()?;
        let registers = self.vcpu.get_regs().map_err(refused("read registers"))?;
        let low = |register: u64| register & u64::from(u32::MAX);
        Ok(low(registers.rdx) << 32 | low(registers.rax))
    }

    /// The time that a guest's kernel computes from its page and a TSC value.
    pub(super) fn reading(&self, tsc: u64) -> Result<Reading, LabError> {
        let reader = Reader::new(self.page()?, &self.latest_ns);
        (0..READ_ATTEMPTS).find_map(|_| reader.try_read(|| tsc)).ok_or_else(being_written)
    }

    /// The page itself.
    pub(super) fn info(&self) -> Result<VcpuTimeInfo, LabError> {
        let page = self.page()?;
        (0..READ_ATTEMPTS)
            .find_map(|_| try_read_time(&page, || 0))
            .map(|(info, _)| info)
            .ok_or_else(being_written)
    }

    /// Clears the notice that the guest was stopped, as its kernel does; returns whether it was
    /// set.
    pub(super) fn take_stop_notice(&self) -> Result<bool, LabError> {
        Ok(take_stop_notice(&self.page()?))
    }

    /// Notifies KVM that the guest was stopped (`KVM_KVMCLOCK_CTRL`).
    pub(super) fn give_stop_notice(&self) -> Result<(), LabError> {
        self.vcpu.kvmclock_ctrl().map_err(refused("give notice that a vCPU was stopped"))
    }

    /// `KVM_GET_CLOCK`.
    pub(super) fn clock(&self) -> Result<kvm_clock_data, LabError> {
        self.vm.get_clock().map_err(refused("read its clock"))
    }

    /// `KVM_SET_CLOCK`.
    pub(super) fn set_clock(&self, clock: &kvm_clock_data) -> Result<(), LabError> {
        self.vm.set_clock(clock).map_err(refused("set its clock"))
    }

    /// Frequency of the guest's TSC in kHz, as KVM has it.
    pub(super) fn tsc_khz(&self) -> Result<u32, LabError> {
        self.vcpu.get_tsc_khz().map_err(refused("report the frequency of a vCPU's TSC"))
    }

    /// Runs until the guest halts.
    fn halt(&mut self) -> Result<(), LabError> {
        match self.vcpu.run().map_err(refused("run a vCPU"))? {
            VcpuExit::Hlt => Ok(()),
            exit => Err(LabError::TestGuest(format!("stopped for an unexpected reason: {exit:?}"))),
        }
    }

    fn page(&self) -> Result<GuestPage<'_>, LabError> {
        let missing = |error: &dyn std::fmt::Display| {
            LabError::TestGuest(format!("has no clock page: {error}"))
        };
        let region = self
            .memory
            .find_region(GuestAddress(0))
            .ok_or_else(|| missing(&"its memory is gone"))?;
        let mut words = Vec::with_capacity(TIME_PAGE_BYTES / 4);
        for offset in (0..TIME_PAGE_BYTES).step_by(4) {
            let place = PAGE as usize + offset;
            words.push(region.get_atomic_ref(place).map_err(|error| missing(&error))?);
        }
        Ok(GuestPage(words))
    }
}

/// Sets a vCPU's registers so that it reads its TSC next.
fn start(vcpu: &VcpuFd) -> Result<(), LabError> {
    let mut segments = vcpu.get_sregs().map_err(refused("read segments"))?;
    segments.cs.base = 0;
    segments.cs.selector = 0;
    vcpu.set_sregs(&segments).map_err(refused("set segments"))?;
    let registers = kvm_regs { rip: READ_TSC, rflags: RFLAGS_RESERVED, ..kvm_regs::default() };
    vcpu.set_regs(&registers).map_err(refused("set registers"))
}

fn write_register(vcpu: &VcpuFd, index: u32, data: u64) -> Result<(), LabError> {
    let entry = kvm_msr_entry { index, data, ..kvm_msr_entry::default() };
    let list = Msrs::from_entries(&[entry])
        .map_err(|error| LabError::TestGuest(format!("has no room for a register: {error:?}")))?;
    match vcpu.set_msrs(&list).map_err(refused("set a model-specific register"))? {
        1 => Ok(()),
        _ => Err(LabError::TestGuest(format!("has no register {index:#x}: KVM does not know it"))),
    }
}

fn being_written() -> LabError {
    LabError::TestGuest("has a clock page that KVM has not finished writing".to_owned())
}

/// The page in the guest's memory.
struct GuestPage<'a>(Vec<&'a AtomicU32>);

impl SharedWords for GuestPage<'_> {
    fn load(&self, index: usize, ordering: Ordering) -> u32 {
        self.0[index].load(ordering)
    }

    fn store(&self, index: usize, value: u32, ordering: Ordering) {
        self.0[index].store(value, ordering);
    }

    fn fetch_and(&self, index: usize, mask: u32, ordering: Ordering) -> u32 {
        self.0[index].fetch_and(mask, ordering)
    }

    fn fence(&self, ordering: Ordering) {
        fence(ordering);
    }
}
