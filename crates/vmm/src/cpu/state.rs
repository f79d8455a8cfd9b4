//! The state of a vCPU: what a reset puts back, and what a snapshot keeps.

use kvm_bindings::{
    Msrs, kvm_debugregs, kvm_lapic_state, kvm_mp_state, kvm_msr_entry, kvm_regs, kvm_sregs, kvm_vcpu_events,
    kvm_xcrs, kvm_xsave,
};
use kvm_ioctls::VcpuFd;
use serde::{Deserialize, Serialize};

use super::CpuError;

pub(super) const IA32_TSC: u32 = 0x10;
pub(super) const IA32_TSC_DEADLINE: u32 = 0x6e0;

/// MSRs that a guest changes and that a reset clears: system call entry points, time, paravirtual clock and wake-up
/// registrations. KVM would go on writing to the memory of the old guest if the last were left.
pub const RESET_MSRS: &[u32] = &[
    0x174,       // IA32_SYSENTER_CS
    0x175,       // IA32_SYSENTER_ESP
    0x176,       // IA32_SYSENTER_EIP
    0x277,       // IA32_PAT
    0xc000_0081, // STAR
    0xc000_0082, // LSTAR
    0xc000_0083, // CSTAR
    0xc000_0084, // SYSCALL_MASK
    0xc000_0102, // KERNEL_GS_BASE
    0xc000_0103, // TSC_AUX
    IA32_TSC_DEADLINE,
    0x1a0,       // IA32_MISC_ENABLE
    0x2ff,       // MTRR default type
    0x4b56_4d00, // MSR_KVM_WALL_CLOCK_NEW
    0x4b56_4d01, // MSR_KVM_SYSTEM_TIME_NEW
    0x4b56_4d02, // MSR_KVM_ASYNC_PF_EN
    0x4b56_4d03, // MSR_KVM_STEAL_TIME
    0x4b56_4d04, // MSR_KVM_PV_EOI_EN
    0x4b56_4d05, // MSR_KVM_POLL_CONTROL
];

/// Registrations of the paravirtual clock (Linux arch/x86/include/uapi/asm/kvm_para.h), old numbers and new: KVM takes
/// the clock's value when they are written, so they come after everything else about time.
const CLOCK_MSRS: [u32; 4] = [0x11, 0x12, 0x4b56_4d00, 0x4b56_4d01];

/// A model specific register with its content.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Msr {
    /// Number.
    pub index: u32,
    /// Content.
    pub value: u64,
}

/// When a model specific register is set, in the order of the steps. The time stamp counter itself is in none of them: it
/// goes on counting between reading and setting (see [`clock`](crate::clock)).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum MsrStep {
    /// With the other registers.
    General,
    /// A deadline on the time stamp counter: when that is right.
    Deadline,
    /// When the clock is right.
    Clock,
}

fn step(index: u32) -> MsrStep {
    match index {
        IA32_TSC_DEADLINE => MsrStep::Deadline,
        index if CLOCK_MSRS.contains(&index) => MsrStep::Clock,
        _ => MsrStep::General,
    }
}

/// Everything KVM keeps of a vCPU apart from its time stamp counter.
#[derive(Serialize, Deserialize)]
pub struct VcpuState {
    regs: kvm_regs,
    sregs: kvm_sregs,
    debug: kvm_debugregs,
    events: kvm_vcpu_events,
    xcrs: kvm_xcrs,
    xsave: kvm_xsave,
    lapic: kvm_lapic_state,
    mp: kvm_mp_state,
    msrs: Vec<Msr>,
}

impl VcpuState {
    /// Reads the state with those of the registers `msrs` that this vCPU has.
    ///
    /// The extended state is the 4 KiB of `KVM_GET_XSAVE`: KVM offers state beyond that to guests only if the process has
    /// asked for it (arch_prctl), which this monitor never does.
    pub fn capture(vcpu: &VcpuFd, msrs: &[u32]) -> Result<Self, CpuError> {
        // First, since it lets KVM finish what it has begun (INIT and start-up signals).
        let mp = vcpu.get_mp_state().map_err(CpuError::kvm("read the run state"))?;
        let wanted = msrs.iter().filter(|&&index| index != IA32_TSC);
        let msrs = wanted.filter_map(|&index| read_msr(vcpu, index).transpose()).collect::<Result<_, _>>()?;
        Ok(Self {
            regs: vcpu.get_regs().map_err(CpuError::kvm("read the registers"))?,
            sregs: vcpu.get_sregs().map_err(CpuError::kvm("read the system registers"))?,
            debug: vcpu.get_debug_regs().map_err(CpuError::kvm("read the debug registers"))?,
            xcrs: vcpu.get_xcrs().map_err(CpuError::kvm("read the extended control registers"))?,
            xsave: vcpu.get_xsave().map_err(CpuError::kvm("read the floating point and vector state"))?,
            lapic: vcpu.get_lapic().map_err(CpuError::kvm("read the local APIC"))?,
            // Last: reading other state may turn a pending exception into an injected one.
            events: vcpu.get_vcpu_events().map_err(CpuError::kvm("read the pending events"))?,
            mp,
            msrs,
        })
    }

    /// Puts everything back that does not depend on the time. The local APIC goes after the system registers, which hold
    /// its base address; events go last, since setting registers clears exceptions.
    pub fn apply(&self, vcpu: &VcpuFd) -> Result<(), CpuError> {
        vcpu.set_mp_state(self.mp).map_err(CpuError::kvm("set the run state"))?;
        vcpu.set_regs(&self.regs).map_err(CpuError::kvm("set the registers"))?;
        vcpu.set_sregs(&self.sregs).map_err(CpuError::kvm("set the system registers"))?;
        set_xsave(vcpu, &self.xsave)?;
        vcpu.set_xcrs(&self.xcrs).map_err(CpuError::kvm("set the extended control registers"))?;
        vcpu.set_debug_regs(&self.debug).map_err(CpuError::kvm("set the debug registers"))?;
        vcpu.set_lapic(&self.lapic).map_err(CpuError::kvm("set the local APIC"))?;
        self.set_msrs(vcpu, MsrStep::General)?;
        vcpu.set_vcpu_events(&self.events).map_err(CpuError::kvm("set the pending events"))
    }

    /// Arms the local APIC's timer again; the time stamp counter must be right.
    pub fn apply_deadline(&self, vcpu: &VcpuFd) -> Result<(), CpuError> {
        self.set_msrs(vcpu, MsrStep::Deadline)
    }

    /// Registers the guest's clocks again; the clock must be right.
    pub fn apply_clocks(&self, vcpu: &VcpuFd) -> Result<(), CpuError> {
        self.set_msrs(vcpu, MsrStep::Clock)
    }

    fn set_msrs(&self, vcpu: &VcpuFd, wanted: MsrStep) -> Result<(), CpuError> {
        let msrs: Vec<Msr> = self.msrs.iter().copied().filter(|msr| step(msr.index) == wanted).collect();
        let mut left = &msrs[..];
        while !left.is_empty() {
            // KVM takes 255 at a time (MAX_IO_MSRS in Linux arch/x86/kvm/x86.c).
            let chunk = &left[..left.len().min(255)];
            let written = write_msrs(vcpu, chunk)?;
            let Some(refused) = chunk.get(written) else {
                left = &left[chunk.len()..];
                continue;
            };
            // Some registers can be read but not written, or not with every processor: that is no loss if the content is
            // right already.
            if read_msr(vcpu, refused.index)? != Some(*refused) {
                return Err(CpuError::Msr { index: refused.index });
            }
            left = &left[written + 1..];
        }
        Ok(())
    }
}

fn set_xsave(vcpu: &VcpuFd, xsave: &kvm_xsave) -> Result<(), CpuError> {
    // SAFETY: KVM reads as many bytes as its XSAVE area has, which is the 4096 of the structure unless the process has
    // asked for more with arch_prctl. It never does.
    unsafe { vcpu.set_xsave(xsave) }.map_err(CpuError::kvm("set the floating point and vector state"))
}

/// One register; `None` if this vCPU does not have it.
pub(super) fn read_msr(vcpu: &VcpuFd, index: u32) -> Result<Option<Msr>, CpuError> {
    // One at a time: a register that is not there ends a list early.
    let mut entry = Msrs::from_entries(&[kvm_msr_entry { index, ..Default::default() }])
        .map_err(|_| CpuError::Layout("a list of one MSR"))?;
    let read = matches!(vcpu.get_msrs(&mut entry), Ok(1));
    Ok(entry.as_slice().first().filter(|_| read).map(|entry| Msr { index, value: entry.data }))
}

/// Writes registers in order; returns how many were taken.
pub(super) fn write_msrs(vcpu: &VcpuFd, msrs: &[Msr]) -> Result<usize, CpuError> {
    let entries: Vec<_> = msrs
        .iter()
        .map(|msr| kvm_msr_entry { index: msr.index, data: msr.value, ..Default::default() })
        .collect();
    let list = Msrs::from_entries(&entries).map_err(|_| CpuError::Layout("the list of MSRs"))?;
    vcpu.set_msrs(&list).map_err(CpuError::kvm("set the model specific registers"))
}
