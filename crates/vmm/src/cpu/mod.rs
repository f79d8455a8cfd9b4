//! vCPUs: their CPUID ([`cpuid`]), their initial state (`registers`), their threads ([`threads`]).

pub mod cpuid;
mod internal_error;
mod registers;
pub mod state;
pub mod threads;
pub mod tsc;

use std::sync::Arc;

use ebb_guest_ram::GuestMemory;
use kvm_bindings::{CpuId, KVM_MAX_CPUID_ENTRIES};
use kvm_ioctls::{Cap, Kvm, VcpuFd, VmFd};
use thiserror::Error;

use crate::boot::Entry;
use cpuid::DeadlineTimer;
use state::{MsrList, VcpuState};

/// A vCPU could not be set up.
#[derive(Debug, Error)]
pub enum CpuError {
    /// KVM refused.
    #[error("KVM cannot {action}: {source}")]
    Kvm {
        /// The operation.
        action: &'static str,
        /// KVM's error.
        source: kvm_ioctls::Error,
    },
    /// KVM lacks a model specific register that every guest needs.
    #[error("KVM has no model specific register {index:#x}; this host's KVM is too old")]
    NoMsr {
        /// The register.
        index: u32,
    },
    /// KVM does not accept the saved content of a register.
    #[error(
        "KVM refuses the saved value {value:#x} of the model specific register {index:#x}; \
         this host's processor or KVM differs from the one of the guest"
    )]
    MsrValue {
        /// The register.
        index: u32,
        /// Its content.
        value: u64,
    },
    /// A vCPU's thread is gone.
    #[error("a vCPU thread has ended")]
    ThreadEnded,
    /// A boot structure did not fit into its place.
    #[error("cannot place {0}; this is a bug in the monitor")]
    Layout(&'static str),
}

impl CpuError {
    pub(crate) fn kvm(action: &'static str) -> impl FnOnce(kvm_ioctls::Error) -> Self {
        move |source| Self::Kvm { action, source }
    }
}

/// CPUID that guests on this host get, as vCPU 0 sees it.
pub fn host_cpuid(kvm: &Kvm, count: u8) -> Result<CpuId, CpuError> {
    let supported = kvm
        .get_supported_cpuid(KVM_MAX_CPUID_ENTRIES)
        .map_err(CpuError::kvm("list its CPUID leaves"))?;
    let deadline = if kvm.check_extension(Cap::TscDeadlineTimer) {
        DeadlineTimer::Available
    } else {
        DeadlineTimer::Missing
    };
    Ok(cpuid::for_vcpu(&cpuid::offered(&supported, deadline), 0, count))
}

/// A vCPU with the state it had when it was created, which a reset restores.
pub struct Vcpu {
    /// Index, and APIC id.
    pub index: u8,
    /// KVM's file descriptor.
    pub fd: VcpuFd,
    msrs: Arc<MsrList>,
    pristine: VcpuState,
}

impl Vcpu {
    /// Creates all vCPUs of a virtual machine with the CPUID `cpuid`, given as vCPU 0 sees it.
    /// `msrs` are the registers of one with the same CPUID on this host, if they are known:
    /// otherwise each is tried.
    pub fn create_all(
        kvm: &Kvm,
        vm: &VmFd,
        cpuid: &CpuId,
        count: u8,
        mut msrs: Option<Arc<MsrList>>,
    ) -> Result<Vec<Self>, CpuError> {
        (0..count)
            .map(|index| {
                let fd =
                    vm.create_vcpu(u64::from(index)).map_err(CpuError::kvm("create a vCPU"))?;
                fd.set_cpuid2(&cpuid::for_vcpu(cpuid, index, count))
                    .map_err(CpuError::kvm("set the CPUID leaves"))?;
                registers::initialize(&fd)?;
                // All vCPUs have the same registers.
                let msrs = match &msrs {
                    Some(list) => Arc::clone(list),
                    None => Arc::clone(msrs.insert(Arc::new(MsrList::probe(kvm, &fd)?))),
                };
                let pristine = VcpuState::capture(&fd, &msrs)?;
                Ok(Self { index, fd, msrs, pristine })
            })
            .collect()
    }

    /// The model specific registers of this vCPU; its state contains all of them.
    pub fn msrs(&self) -> Arc<MsrList> {
        self.msrs.clone()
    }

    /// The state for a snapshot.
    pub fn capture(&self) -> Result<VcpuState, CpuError> {
        VcpuState::capture(&self.fd, &self.msrs)
    }

    /// Restores the state after creation.
    pub fn reset(&self) -> Result<(), CpuError> {
        self.pristine.apply(&self.fd)?;
        self.pristine.apply_deadline(&self.fd)?;
        self.pristine.apply_clock(&self.fd)
    }

    /// Makes this vCPU the boot vCPU, which enters the kernel.
    pub fn enter(&self, memory: &GuestMemory, entry: Entry) -> Result<(), CpuError> {
        registers::enter(&self.fd, memory, entry)
    }
}
