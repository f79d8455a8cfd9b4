//! A simulated host: memory of virtual machines that share stable pages, with everything that may come in between.

mod memory;
mod slots;
mod store;
mod world;

pub use memory::SimMemory;
pub use slots::SimSlots;
pub use store::UnreliableStore;
pub use world::{Guest, World};

use std::{cell::Cell, time::Duration};

use crate::Clock;

/// A clock that goes when it is told to.
#[derive(Debug, Default)]
pub struct SimClock {
    now: Cell<Duration>,
    cpu: Cell<Duration>,
    /// What each question for the processor time costs.
    pub cpu_per_question: Duration,
}

impl SimClock {
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
        self.cpu.set(self.cpu.get() + self.cpu_per_question);
        self.now.set(self.now.get() + self.cpu_per_question);
        self.cpu.get()
    }
}
