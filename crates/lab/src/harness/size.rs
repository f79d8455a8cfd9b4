//! Sizes of hosts, guests and runs.

use serde::Serialize;

use crate::report::results::Scale;

/// The host that an experiment is designed for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct HostShape {
    /// RAM in MiB.
    #[serde(rename = "host_mib")]
    pub memory_mib: u64,
    /// Swap in MiB.
    pub swap_mib: u64,
    /// NUMA nodes, which share everything evenly.
    #[serde(skip)]
    pub nodes: u32,
}

/// Size of a guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct GuestSize {
    /// RAM in MiB.
    #[serde(rename = "guest_mib")]
    pub memory_mib: u64,
    /// Virtual CPUs.
    #[serde(rename = "guest_cpus")]
    pub cpus: u32,
}

/// Size of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RunSize {
    /// The experiment's size.
    pub scale: Scale,
    /// Number of guests in a series, or the most where the host decides; `None` leaves it to the
    /// experiment.
    pub guests: Option<u32>,
}

impl RunSize {
    /// Number of guests to start when the experiment itself would start `planned`.
    pub fn guests(&self, planned: u32) -> u32 {
        self.guests.unwrap_or(planned)
    }
}
