//! A change of a balloon's size, with the growth of the counters of guest and monitor.

use crate::LabError;
use crate::harness::counters::Counters;
use crate::harness::testbed::Testbed;
use crate::report::statistics::rounded;

/// Previous use of the guest's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Memory {
    /// Not used since the boot or the last round.
    Idle,
    /// Written to by a program that has ended.
    Used,
}

/// Direction of the change.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Direction {
    Inflate,
    Deflate,
}

impl Direction {
    /// The device's queue for it.
    fn queue(self) -> &'static str {
        match self {
            Self::Inflate => "inflate",
            Self::Deflate => "deflate",
        }
    }
}

/// One change of the balloon's size.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Round {
    pub(super) memory: Memory,
    pub(super) direction: Direction,
    /// Time until the guest reported the new size, in ms.
    pub(super) elapsed_ms: f64,
    /// Time until the guest's resident memory was stable, in ms.
    pub(super) settled_ms: f64,
    /// Decrease of the footprint of the guest's process, in MiB.
    pub(super) returned_mib: f64,
    /// The footprint afterwards, in MiB.
    pub(super) left_mib: f64,
    /// Growth of the driver's counters; `None` for Linux's own.
    pub(super) driver: Option<Counters>,
    /// Growth of the monitor's counters; `None` under QEMU.
    pub(super) monitor: Option<Counters>,
}

impl Round {
    /// Changes the balloon.
    ///
    /// # Errors
    /// The failure of the guest or its monitor.
    pub(super) fn measure(
        testbed: &mut Testbed<'_>,
        guest: u32,
        memory: Memory,
        direction: Direction,
        target_mib: u64,
    ) -> Result<Self, LabError> {
        let driver = testbed.driver_counters(guest)?;
        let monitor = testbed.monitor_counters(guest)?;
        let before_mib = testbed.footprint_mib(guest)?;
        let what = match (direction, memory) {
            (Direction::Inflate, Memory::Idle) => "inflates, idle",
            (Direction::Inflate, Memory::Used) => "inflates, memory used before",
            (Direction::Deflate, _) => "deflates",
        };
        let resized = testbed.balloon_to(guest, target_mib, what)?;
        let left_mib = testbed.footprint_mib(guest)?;
        let grown = |now: Option<Counters>, before: Option<Counters>| Some(now?.since(&before?));
        Ok(Self {
            memory,
            direction,
            elapsed_ms: rounded(resized.elapsed_s * 1e3),
            settled_ms: rounded(resized.settled_s * 1e3),
            returned_mib: rounded(before_mib - left_mib),
            left_mib: rounded(left_mib),
            driver: grown(testbed.driver_counters(guest)?, driver),
            monitor: grown(testbed.monitor_counters(guest)?, monitor),
        })
    }

    /// A counter of the guest's driver.
    pub(super) fn driver(&self, name: &str) -> Option<f64> {
        self.driver.as_ref()?.get(name)
    }

    /// A counter of the monitor.
    pub(super) fn monitor(&self, name: &str) -> Option<f64> {
        self.monitor.as_ref()?.get(name)
    }

    /// A counter that the monitor has for each queue.
    pub(super) fn queue(&self, name: &str) -> Option<f64> {
        self.monitor(&format!("{name}/{}", self.direction.queue()))
    }
}
