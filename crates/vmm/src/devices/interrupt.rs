//! Interrupt lines of the machine.

#[cfg(test)]
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use kvm_ioctls::VmFd;

/// An edge-triggered line of the interrupt controllers in KVM, which one device has for itself.
///
/// KVM delivers within the call (`KVM_IRQ_LINE`; Linux Documentation/virt/kvm/api.rst, section
/// 4.25). An irqfd would be one call in place of two; but for a line of the IOAPIC, KVM delivers
/// that from a kernel thread, later (Linux `irqfd_wakeup`, `kvm_arch_set_irq_inatomic`).
pub struct InterruptLine(Mutex<Box<dyn FnMut() + Send>>);

impl InterruptLine {
    /// The line with this number.
    ///
    /// # Errors
    /// KVM refuses to set it.
    pub fn new(vm: &Arc<VmFd>, gsi: u32) -> Result<Self, kvm_ioctls::Error> {
        vm.set_irq_line(gsi, false)?;
        let vm = Arc::downgrade(vm);
        Ok(Self::from_pulse(move || {
            // Without the machine, there is nothing to interrupt.
            if let Some(vm) = vm.upgrade() {
                // It worked when the line was made, and depends on nothing that changes.
                let _ = vm.set_irq_line(gsi, true).and_then(|()| vm.set_irq_line(gsi, false));
            }
        }))
    }

    fn from_pulse(pulse: impl FnMut() + Send + 'static) -> Self {
        Self(Mutex::new(Box::new(pulse)))
    }

    /// A line that counts only.
    #[cfg(test)]
    pub fn counted() -> (Self, Arc<AtomicU64>) {
        let count = Arc::new(AtomicU64::new(0));
        let counted = count.clone();
        let pulse = move || {
            counted.fetch_add(1, Ordering::SeqCst);
        };
        (Self::from_pulse(pulse), count)
    }

    /// Interrupts the guest.
    pub fn pulse(&self) {
        // One at a time: to raise a line that another thread has not lowered yet is no edge.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)();
    }
}
