//! The state of a vCPU, for resets and snapshots.

use kvm_bindings::{
    Msrs, kvm_debugregs, kvm_lapic_state, kvm_mp_state, kvm_msr_entry, kvm_regs, kvm_sregs,
    kvm_vcpu_events, kvm_xcrs, kvm_xsave,
};
use kvm_ioctls::{Kvm, VcpuFd};
use serde::{Deserialize, Serialize};

use super::CpuError;

pub(super) const IA32_TSC: u32 = 0x10;
pub(super) const IA32_TSC_DEADLINE: u32 = 0x6e0;

/// Registers that are not saved. The time stamp counter runs on between reading and setting (see
/// [`clock`](crate::clock)). A write to one of the other two, old number and new, is a command: KVM
/// writes the wall clock to the address in it (Linux Documentation/virt/kvm/x86/msr.rst).
const LEFT_OUT: [u32; 3] = [IA32_TSC, 0x11, 0x4b56_4d00];

/// Address of the guest's pvclock page, old number and new. KVM updates the page when the register
/// is written, so it is set after everything else about time.
const CLOCK_MSRS: [u32; 2] = [0x12, 0x4b56_4d01];

/// Memory type range registers: KVM has them but does not list them.
fn memory_type_ranges() -> impl Iterator<Item = u32> {
    (0x200..=0x20f).chain([0x250, 0x258, 0x259]).chain(0x268..=0x26f).chain([0x2ff])
}

/// The model specific registers that a vCPU has and that can be read.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct MsrList(Vec<u32>);

impl MsrList {
    /// Tries each register that KVM lists on a vCPU.
    pub fn probe(kvm: &Kvm, vcpu: &VcpuFd) -> Result<Self, CpuError> {
        let listed =
            kvm.get_msr_index_list().map_err(CpuError::kvm("list its model specific registers"))?;
        let mut indices: Vec<u32> = listed.as_slice().to_vec();
        indices.extend(memory_type_ranges().filter(|index| !listed.as_slice().contains(index)));
        indices.retain(|index| !LEFT_OUT.contains(index));
        let mut readable = Vec::with_capacity(indices.len());
        for index in indices {
            if read_msr(vcpu, index)?.is_some() {
                readable.push(index);
            }
        }
        Ok(Self(readable))
    }

    /// Their numbers.
    pub fn numbers(&self) -> &[u32] {
        &self.0
    }

    fn read(&self, vcpu: &VcpuFd) -> Result<Vec<Msr>, CpuError> {
        let mut msrs = Vec::with_capacity(self.0.len());
        for chunk in self.0.chunks(MAX_IO_MSRS) {
            let entries: Vec<_> =
                chunk.iter().map(|&index| kvm_msr_entry { index, ..Default::default() }).collect();
            let mut list =
                Msrs::from_entries(&entries).map_err(|_| CpuError::Layout("the list of MSRs"))?;
            let read = vcpu
                .get_msrs(&mut list)
                .map_err(CpuError::kvm("read the model specific registers"))?;
            if let Some(&index) = chunk.get(read) {
                return Err(CpuError::NoMsr { index });
            }
            let read = list.as_slice().iter();
            msrs.extend(read.map(|entry| Msr { index: entry.index, value: entry.data }));
        }
        Ok(msrs)
    }
}

/// Most registers that KVM accepts in one call (Linux arch/x86/kvm/x86.c).
const MAX_IO_MSRS: usize = 255;

/// A model specific register with its content.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Msr {
    /// Number.
    pub index: u32,
    /// Content.
    pub value: u64,
}

/// The step of a restore in which a model specific register is set, in order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum MsrStep {
    /// With the other registers.
    General,
    /// The deadline on the time stamp counter: once the counter is set.
    Deadline,
    /// The clock registers: once the clock is set.
    Clock,
}

fn step(index: u32) -> MsrStep {
    match index {
        IA32_TSC_DEADLINE => MsrStep::Deadline,
        index if CLOCK_MSRS.contains(&index) => MsrStep::Clock,
        _ => MsrStep::General,
    }
}

/// The state that KVM keeps for a vCPU, apart from its time stamp counter.
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
    /// Reads the state.
    ///
    /// The extended state is the 4 KiB of `KVM_GET_XSAVE`: KVM offers state beyond that to guests
    /// only if the process has asked for it (arch_prctl), which this monitor never does.
    pub fn capture(vcpu: &VcpuFd, msrs: &MsrList) -> Result<Self, CpuError> {
        // First, since it makes KVM process pending INIT and start-up signals.
        let mp = vcpu.get_mp_state().map_err(CpuError::kvm("read the run state"))?;
        // Before the registers: reading the events moves a pending page fault's address into CR2
        // and a debug exception's cause into DR6 (`kvm_deliver_exception_payload`).
        let events = vcpu.get_vcpu_events().map_err(CpuError::kvm("read the pending events"))?;
        // Before the local APIC: a timer that fires in between is then in both rather than in
        // neither.
        let msrs = msrs.read(vcpu)?;
        Ok(Self {
            regs: vcpu.get_regs().map_err(CpuError::kvm("read the registers"))?,
            sregs: vcpu.get_sregs().map_err(CpuError::kvm("read the system registers"))?,
            debug: vcpu.get_debug_regs().map_err(CpuError::kvm("read the debug registers"))?,
            xcrs: vcpu.get_xcrs().map_err(CpuError::kvm("read the extended control registers"))?,
            xsave: vcpu
                .get_xsave()
                .map_err(CpuError::kvm("read the floating point and vector state"))?,
            lapic: vcpu.get_lapic().map_err(CpuError::kvm("read the local APIC"))?,
            events,
            mp,
            msrs,
        })
    }

    /// Restores everything that does not depend on the time. The local APIC is set after the system
    /// registers, which hold its base address; events are set last, since setting registers clears
    /// exceptions.
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

    /// Arms the local APIC's timer again; the time stamp counter must be set.
    pub fn apply_deadline(&self, vcpu: &VcpuFd) -> Result<(), CpuError> {
        self.set_msrs(vcpu, MsrStep::Deadline)
    }

    /// Registers the guest's clock page with KVM again; the clock must be set.
    pub fn apply_clock(&self, vcpu: &VcpuFd) -> Result<(), CpuError> {
        self.set_msrs(vcpu, MsrStep::Clock)
    }

    fn set_msrs(&self, vcpu: &VcpuFd, wanted: MsrStep) -> Result<(), CpuError> {
        let msrs: Vec<Msr> =
            self.msrs.iter().copied().filter(|msr| step(msr.index) == wanted).collect();
        let mut left = &msrs[..];
        while !left.is_empty() {
            let chunk = &left[..left.len().min(MAX_IO_MSRS)];
            let written = write_msrs(vcpu, chunk)?;
            let Some(refused) = chunk.get(written) else {
                left = &left[chunk.len()..];
                continue;
            };
            // Some registers can be read but not written, or not with every processor. That is
            // harmless if the content is already right.
            if read_msr(vcpu, refused.index)? != Some(*refused) {
                return Err(CpuError::MsrValue { index: refused.index, value: refused.value });
            }
            left = &left[written + 1..];
        }
        Ok(())
    }
}

fn set_xsave(vcpu: &VcpuFd, xsave: &kvm_xsave) -> Result<(), CpuError> {
    // SAFETY: KVM reads as many bytes as its XSAVE area has, which is the 4096 of the structure
    // unless the process has requested more with arch_prctl. It never does.
    unsafe { vcpu.set_xsave(xsave) }
        .map_err(CpuError::kvm("set the floating point and vector state"))
}

/// One register; `None` if this vCPU does not have it.
pub(super) fn read_msr(vcpu: &VcpuFd, index: u32) -> Result<Option<Msr>, CpuError> {
    // One at a time: a missing register ends a list early.
    let mut entry = Msrs::from_entries(&[kvm_msr_entry { index, ..Default::default() }])
        .map_err(|_| CpuError::Layout("a list of one MSR"))?;
    let read = matches!(vcpu.get_msrs(&mut entry), Ok(1));
    Ok(entry.as_slice().first().filter(|_| read).map(|entry| Msr { index, value: entry.data }))
}

/// Writes registers in order; returns the number that KVM accepted.
pub(super) fn write_msrs(vcpu: &VcpuFd, msrs: &[Msr]) -> Result<usize, CpuError> {
    let entries: Vec<_> = msrs
        .iter()
        .map(|msr| kvm_msr_entry { index: msr.index, data: msr.value, ..Default::default() })
        .collect();
    let list = Msrs::from_entries(&entries).map_err(|_| CpuError::Layout("the list of MSRs"))?;
    vcpu.set_msrs(&list).map_err(CpuError::kvm("set the model specific registers"))
}
