//! The registers that a driver reads, in a page of their own.

use std::sync::atomic::{AtomicU32, Ordering};

use virtio_bindings::virtio_mmio as reg;

use crate::layout::{VIRTIO_MMIO_OFFSET, VIRTIO_MMIO_PAGE_BYTES};

/// Bytes of registers below the device's configuration space.
pub const REGISTER_BYTES: u32 = reg::VIRTIO_MMIO_CONFIG;

const WORD_BYTES: u64 = size_of::<AtomicU32>() as u64;
const WORDS: usize = (VIRTIO_MMIO_PAGE_BYTES / WORD_BYTES) as usize;
const FIRST: usize = (VIRTIO_MMIO_OFFSET / WORD_BYTES) as usize;

/// The first page of a register window. KVM maps it read-only into the guest, so that reading a
/// register is no exit. The window begins near its end, and the configuration space lies in the next
/// page, which is not mapped: its fields are read under the transport's lock, in which the new
/// ConfigGeneration is set, too, so that a driver notices what has changed between two reads.
#[repr(C, align(4096))]
pub struct RegisterPage([AtomicU32; WORDS]);

const _: () = assert!(size_of::<RegisterPage>() as u64 == VIRTIO_MMIO_PAGE_BYTES);
const _: () = assert!(VIRTIO_MMIO_OFFSET + REGISTER_BYTES as u64 == VIRTIO_MMIO_PAGE_BYTES);

impl Default for RegisterPage {
    fn default() -> Self {
        Self([const { AtomicU32::new(0) }; WORDS])
    }
}

impl RegisterPage {
    /// Causes of interrupts that the driver has not acknowledged.
    pub fn interrupt_status(&self) -> &AtomicU32 {
        &self.0[FIRST + (reg::VIRTIO_MMIO_INTERRUPT_STATUS / 4) as usize]
    }

    /// Sets all other registers to what `read` returns for their offsets.
    pub fn set(&self, mut read: impl FnMut(u32) -> u32) {
        for (offset, word) in (0..).step_by(4).zip(&self.0[FIRST..]) {
            if offset != reg::VIRTIO_MMIO_INTERRUPT_STATUS {
                word.store(read(offset), Ordering::Release);
            }
        }
    }

    /// What the guest reads at `offset` into the window; `None` outside of the registers.
    pub fn get(&self, offset: u64) -> Option<u32> {
        let index = usize::try_from(offset / WORD_BYTES).ok()?;
        let word = self.0[FIRST..].get(index).filter(|_| offset.is_multiple_of(WORD_BYTES))?;
        Some(word.load(Ordering::Acquire))
    }
}
