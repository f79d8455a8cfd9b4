//! vCPUs: what they say of themselves ([`cpuid`]), how they start (`registers`), their threads ([`threads`]).

pub mod cpuid;
mod registers;
pub mod state;
pub mod threads;
pub mod tsc;

use kvm_bindings::{CpuId, KVM_MAX_CPUID_ENTRIES};
use kvm_ioctls::{Cap, Kvm, VcpuFd, VmFd};
use thiserror::Error;
use vm_memory::GuestMemoryMmap;

use crate::boot::Entry;
use cpuid::DeadlineTimer;
use state::{RESET_MSRS, VcpuState};

/// A vCPU could not be set up.
#[derive(Debug, Error)]
pub enum CpuError {
    /// KVM refused.
    #[error("KVM cannot {action}: {source}")]
    Kvm {
        /// What was asked.
        action: &'static str,
        /// Its answer.
        source: kvm_ioctls::Error,
    },
    /// KVM does not know a model specific register that every guest needs.
    #[error("KVM refuses the model specific register {index:#x}; this host's KVM is too old")]
    Msr {
        /// The register.
        index: u32,
    },
    /// Boot structures did not fit where they belong.
    #[error("cannot place {0}; this is a fault of the monitor")]
    Layout(&'static str),
}

impl CpuError {
    pub(crate) fn kvm(action: &'static str) -> impl FnOnce(kvm_ioctls::Error) -> Self {
        move |source| Self::Kvm { action, source }
    }
}

/// The processor that guests of this host get, as vCPU 0 sees it.
pub fn host_cpuid(kvm: &Kvm, count: u8) -> Result<CpuId, CpuError> {
    let supported =
        kvm.get_supported_cpuid(KVM_MAX_CPUID_ENTRIES).map_err(CpuError::kvm("list its CPUID leaves"))?;
    let deadline = if kvm.check_extension(Cap::TscDeadlineTimer) {
        DeadlineTimer::Available
    } else {
        DeadlineTimer::Missing
    };
    Ok(cpuid::for_vcpu(&cpuid::offered(&supported, deadline), 0, count))
}

/// The model specific registers that KVM can save.
pub fn saved_msrs(kvm: &Kvm) -> Result<Vec<u32>, CpuError> {
    let list = kvm.get_msr_index_list().map_err(CpuError::kvm("list its model specific registers"))?;
    Ok(list.as_slice().to_vec())
}

/// A vCPU with the state in which it came out of its factory: what a reset puts back.
pub struct Vcpu {
    /// Number, and APIC id.
    pub index: u8,
    /// KVM's handle.
    pub fd: VcpuFd,
    pristine: VcpuState,
}

impl Vcpu {
    /// Makes all vCPUs of a virtual machine, with the processor `cpuid` as vCPU 0 sees it.
    pub fn create_all(vm: &VmFd, cpuid: &CpuId, count: u8) -> Result<Vec<Self>, CpuError> {
        (0..count).map(|index| Self::create(vm, index, &cpuid::for_vcpu(cpuid, index, count))).collect()
    }

    fn create(vm: &VmFd, index: u8, cpuid: &CpuId) -> Result<Self, CpuError> {
        let fd = vm.create_vcpu(u64::from(index)).map_err(CpuError::kvm("create a vCPU"))?;
        fd.set_cpuid2(cpuid).map_err(CpuError::kvm("set the CPUID leaves"))?;
        registers::initialize(&fd)?;
        let pristine = VcpuState::capture(&fd, RESET_MSRS)?;
        Ok(Self { index, fd, pristine })
    }

    /// Back to the state after creation.
    pub fn reset(&self) -> Result<(), CpuError> {
        self.pristine.apply(&self.fd)?;
        self.pristine.apply_deadline(&self.fd)?;
        self.pristine.apply_clocks(&self.fd)
    }

    /// Makes this the vCPU that starts the kernel.
    pub fn enter(&self, memory: &GuestMemoryMmap, entry: Entry) -> Result<(), CpuError> {
        registers::enter(&self.fd, memory, entry)
    }
}
