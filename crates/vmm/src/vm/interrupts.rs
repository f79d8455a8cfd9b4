//! KVM's interrupt controllers and timer: reading and setting their state.

use kvm_bindings::{
    KVM_IRQCHIP_IOAPIC, KVM_IRQCHIP_PIC_MASTER, KVM_IRQCHIP_PIC_SLAVE, kvm_irqchip,
};
use kvm_ioctls::VmFd;

use super::VmError;
use crate::snapshot::state::InterruptControllers;

pub(super) fn capture(vm: &VmFd) -> Result<InterruptControllers, VmError> {
    let chips = [KVM_IRQCHIP_PIC_MASTER, KVM_IRQCHIP_PIC_SLAVE, KVM_IRQCHIP_IOAPIC]
        .into_iter()
        .map(|chip_id| {
            let mut chip = kvm_irqchip { chip_id, ..Default::default() };
            vm.get_irqchip(&mut chip).map(|()| chip)
        })
        .collect::<Result<_, _>>()
        .map_err(VmError::kvm("read its interrupt controllers"))?;
    Ok(InterruptControllers {
        chips,
        timer: vm.get_pit2().map_err(VmError::kvm("read its timer"))?,
    })
}

/// Interrupts that wait in the I/O APIC go to the local APICs at once, so those must have their
/// state already.
pub(super) fn apply(state: &InterruptControllers, vm: &VmFd) -> Result<(), VmError> {
    for chip in &state.chips {
        vm.set_irqchip(chip).map_err(VmError::kvm("set its interrupt controllers"))?;
    }
    vm.set_pit2(&state.timer).map_err(VmError::kvm("set its timer"))
}
