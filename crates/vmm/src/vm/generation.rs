//! The VM generation id: a number that differs between machines that come from one snapshot, so that
//! their guests make their random numbers differ (Microsoft, "Virtual Machine Generation ID").

use std::sync::atomic::{AtomicBool, Ordering};

use ebb_guest_ram::GuestMemory;
use rustix::rand::{GetRandomFlags, getrandom};
use vm_memory::{Bytes, GuestAddress};

use super::VmError;
use crate::layout;

/// The id of this machine, and whether its guest knows it.
#[derive(Debug)]
pub(super) struct Generation {
    id: [u8; 16],
    /// The guest has tables that name its address.
    known: AtomicBool,
}

impl Generation {
    /// A new id.
    pub(super) fn new() -> std::io::Result<Self> {
        let mut id = [0; 16];
        getrandom(&mut id, GetRandomFlags::empty())?;
        Ok(Self { id, known: AtomicBool::new(false) })
    }

    /// Writes it to guest memory.
    pub(super) fn write(&self, memory: &GuestMemory) -> Result<(), VmError> {
        let written = memory.write_slice(&self.id, GuestAddress(layout::GENERATION_ID));
        written.map_err(|error| {
            VmError::host("write the generation id")(std::io::Error::other(error))
        })?;
        self.known.store(true, Ordering::Release);
        Ok(())
    }

    /// A machine has arrived whose guest knows its id, or does not.
    pub(super) fn arrive(&self, known: bool) {
        self.known.store(known, Ordering::Release);
    }

    /// Whether the guest knows it.
    pub(super) fn is_known(&self) -> bool {
        self.known.load(Ordering::Acquire)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_machine_has_its_own_and_its_guest_reads_it() {
        let memory = GuestMemory::from_ranges(&[(GuestAddress(0), 1 << 20)]).unwrap();
        let mut seen = std::collections::BTreeSet::new();
        for _ in 0..3 {
            let generation = Generation::new().unwrap();
            assert!(!generation.is_known());
            generation.write(&memory).unwrap();
            assert!(generation.is_known());
            let id: [u8; 16] = memory.read_obj(GuestAddress(layout::GENERATION_ID)).unwrap();
            assert!(seen.insert(id), "{id:?} was there before");
        }
        // A guest from an older snapshot has no address for it.
        let generation = Generation::new().unwrap();
        generation.arrive(false);
        assert!(!generation.is_known());
    }
}
