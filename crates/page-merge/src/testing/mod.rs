//! A simulated host: memory of virtual machines that share stable pages, with concurrent events of
//! all kinds. And the machine's own KSM, for tests that change it.

mod machine_ksm;
mod memory;
mod slots;
mod store;
mod world;

pub use machine_ksm::MachineKsm;
pub use memory::SimMemory;
pub use slots::SimSlots;
pub use store::UnreliableStore;
pub use world::{Guest, World};

use std::{cell::Cell, time::Duration};

use crate::Clock;

/// A clock that advances on command.
#[derive(Debug, Default)]
pub struct SimClock {
    now: Cell<Duration>,
    cpu: Cell<Duration>,
    cpu_per_step: Duration,
    /// A step has begun with a query of the processor time.
    in_step: Cell<bool>,
}

impl SimClock {
    /// A clock that advances by this time between two queries of the processor time.
    pub fn new(cpu_per_step: Duration) -> Self {
        Self { cpu_per_step, ..Self::default() }
    }

    /// Processor time used so far.
    pub fn used(&self) -> Duration {
        self.cpu.get()
    }

    /// Lets time pass without work.
    pub fn sleep(&self, duration: Duration) {
        self.now.set(self.now.get() + duration);
    }
}

impl Clock for SimClock {
    fn now(&self) -> Duration {
        self.now.get()
    }

    fn cpu(&self) -> Duration {
        // The second query ends a step; the elapsed time is read before it.
        self.in_step.set(!self.in_step.get());
        let before = self.cpu.get();
        if self.in_step.get() {
            self.cpu.set(before + self.cpu_per_step);
            self.now.set(self.now.get() + self.cpu_per_step);
        }
        before
    }
}
