//! The state of a vCPU as far as a reset has to put it back.

use kvm_bindings::{
    Msrs, kvm_debugregs, kvm_fpu, kvm_lapic_state, kvm_mp_state, kvm_msr_entry, kvm_regs, kvm_sregs,
    kvm_vcpu_events, kvm_xcrs,
};
use kvm_ioctls::VcpuFd;

use super::CpuError;

/// MSRs that a guest changes and that a reset clears: system call entry points, time, paravirtual clock and wake-up
/// registrations. KVM would go on writing to the memory of the old guest if the last were left.
const MSRS: &[u32] = &[
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
    0x6e0,       // IA32_TSC_DEADLINE
    0x1a0,       // IA32_MISC_ENABLE
    0x2ff,       // MTRR default type
    0x4b56_4d00, // MSR_KVM_WALL_CLOCK_NEW
    0x4b56_4d01, // MSR_KVM_SYSTEM_TIME_NEW
    0x4b56_4d02, // MSR_KVM_ASYNC_PF_EN
    0x4b56_4d03, // MSR_KVM_STEAL_TIME
    0x4b56_4d04, // MSR_KVM_PV_EOI_EN
    0x4b56_4d05, // MSR_KVM_POLL_CONTROL
];

/// Everything KVM keeps of a vCPU that a reset puts back.
pub struct VcpuState {
    regs: kvm_regs,
    sregs: kvm_sregs,
    debug: kvm_debugregs,
    events: kvm_vcpu_events,
    xcrs: kvm_xcrs,
    fpu: kvm_fpu,
    lapic: kvm_lapic_state,
    mp: kvm_mp_state,
    msrs: Vec<kvm_msr_entry>,
}

impl VcpuState {
    /// Reads the state.
    pub fn capture(vcpu: &VcpuFd) -> Result<Self, CpuError> {
        let mut msrs = Vec::with_capacity(MSRS.len());
        for &index in MSRS {
            // One at a time: a register that this KVM does not have ends a list early, and is simply left out here.
            let mut entry = Msrs::from_entries(&[kvm_msr_entry { index, ..Default::default() }])
                .map_err(|_| CpuError::Layout("a list of one MSR"))?;
            if matches!(vcpu.get_msrs(&mut entry), Ok(1)) {
                msrs.extend_from_slice(entry.as_slice());
            }
        }
        Ok(Self {
            regs: vcpu.get_regs().map_err(CpuError::kvm("read the registers"))?,
            sregs: vcpu.get_sregs().map_err(CpuError::kvm("read the system registers"))?,
            debug: vcpu.get_debug_regs().map_err(CpuError::kvm("read the debug registers"))?,
            events: vcpu.get_vcpu_events().map_err(CpuError::kvm("read the pending events"))?,
            xcrs: vcpu.get_xcrs().map_err(CpuError::kvm("read the extended control registers"))?,
            fpu: vcpu.get_fpu().map_err(CpuError::kvm("read the floating point state"))?,
            lapic: vcpu.get_lapic().map_err(CpuError::kvm("read the local APIC"))?,
            mp: vcpu.get_mp_state().map_err(CpuError::kvm("read the run state"))?,
            msrs,
        })
    }

    /// Puts the state back. The local APIC goes after the system registers, which hold its base address.
    pub fn apply(&self, vcpu: &VcpuFd) -> Result<(), CpuError> {
        vcpu.set_mp_state(self.mp).map_err(CpuError::kvm("set the run state"))?;
        vcpu.set_regs(&self.regs).map_err(CpuError::kvm("set the registers"))?;
        vcpu.set_sregs(&self.sregs).map_err(CpuError::kvm("set the system registers"))?;
        vcpu.set_fpu(&self.fpu).map_err(CpuError::kvm("set the floating point state"))?;
        vcpu.set_xcrs(&self.xcrs).map_err(CpuError::kvm("set the extended control registers"))?;
        vcpu.set_debug_regs(&self.debug).map_err(CpuError::kvm("set the debug registers"))?;
        vcpu.set_lapic(&self.lapic).map_err(CpuError::kvm("set the local APIC"))?;
        let msrs = Msrs::from_entries(&self.msrs).map_err(|_| CpuError::Layout("the list of MSRs"))?;
        let written = vcpu.set_msrs(&msrs).map_err(CpuError::kvm("set the model specific registers"))?;
        if let Some(entry) = self.msrs.get(written) {
            return Err(CpuError::Msr { index: entry.index });
        }
        vcpu.set_vcpu_events(&self.events).map_err(CpuError::kvm("set the pending events"))?;
        Ok(())
    }
}
