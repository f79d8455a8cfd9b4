//! The memory of a host: what is free, swap, and the time for which memory was waited for.

use ebb_host_policy::{Host, MIB, Pressure, Swap};

use crate::STEP_MS;

/// The memory of a host.
#[derive(Clone, Copy, Debug)]
pub struct HostShape {
    /// Its memory.
    pub total_bytes: u64,
    /// Memory of all other processes.
    pub base_bytes: u64,
    /// `None` without swap.
    pub swap_bytes: Option<u64>,
    /// Whether the kernel measures pressure.
    pub has_pressure: bool,
}

impl HostShape {
    /// A host with swap of the same size as its memory.
    pub fn of(total_bytes: u64) -> Self {
        let base_bytes = 300 * MIB;
        Self { total_bytes, base_bytes, swap_bytes: Some(total_bytes), has_pressure: true }
    }
}

/// A host while it runs.
#[derive(Clone, Debug)]
pub(crate) struct HostModel {
    shape: HostShape,
    free_bytes: u64,
    swap_used_bytes: u64,
    swap_out_bytes: u64,
    pub(crate) most_swap_bytes: u64,
    pressure: Pressure,
    /// What the swap's disk can still transfer in this step.
    swap_budget_bytes: u64,
    /// Whether an allocation has failed in this step.
    is_short: bool,
    /// For how long allocations have failed, in milliseconds.
    short_ms: u64,
}

/// Bandwidth of the disk of the swap, in bytes per millisecond: 250 MiB/s.
const SWAP_RATE: u64 = 250 * MIB / 1000;
/// Time of failed allocations after which a process is killed, in milliseconds.
const KILL_AFTER_MS: u64 = 1000;

impl HostModel {
    pub(crate) fn new(shape: HostShape) -> Self {
        Self {
            shape,
            free_bytes: shape.total_bytes - shape.base_bytes,
            swap_used_bytes: 0,
            swap_out_bytes: 0,
            most_swap_bytes: 0,
            pressure: Pressure { some_us: 0, full_us: 0 },
            swap_budget_bytes: 0,
            is_short: false,
            short_ms: 0,
        }
    }

    /// Memory that is reserved for the kernel.
    fn reserve(&self) -> u64 {
        self.shape.total_bytes / 200
    }

    /// Begins a step. Returns how much is to be swapped out of machines first.
    pub(crate) fn begin(&mut self) -> u64 {
        self.swap_budget_bytes = SWAP_RATE * STEP_MS;
        self.is_short = false;
        let room = self.shape.swap_bytes.unwrap_or(0) - self.swap_used_bytes;
        let low = self.reserve() * 3;
        low.saturating_sub(self.free_bytes).min(self.swap_budget_bytes).min(room)
    }

    /// Ends a step in which `waited` of `worked` machines waited for the host. Returns whether a
    /// process is killed.
    pub(crate) fn end(&mut self, waited: usize, worked: usize) -> bool {
        if waited > 0 {
            self.pressure.some_us += STEP_MS * 1000;
            if waited == worked {
                self.pressure.full_us += STEP_MS * 1000;
            }
        }
        let is_out = self.shape.swap_bytes.unwrap_or(0) == self.swap_used_bytes;
        self.short_ms = if self.is_short && is_out { self.short_ms + STEP_MS } else { 0 };
        let kills = self.short_ms >= KILL_AFTER_MS;
        if kills {
            self.short_ms = 0;
        }
        kills
    }

    /// Allocates memory; returns how much was allocated.
    pub(crate) fn take(&mut self, wanted_bytes: u64) -> u64 {
        let got = wanted_bytes.min(self.free_bytes.saturating_sub(self.reserve()));
        self.is_short |= got < wanted_bytes;
        self.free_bytes -= got;
        got
    }

    pub(crate) fn give(&mut self, bytes: u64) {
        self.free_bytes += bytes;
    }

    /// Moves memory to swap.
    pub(crate) fn swap_out(&mut self, bytes: u64) {
        self.free_bytes += bytes;
        self.swap_used_bytes += bytes;
        self.swap_out_bytes += bytes;
        self.swap_budget_bytes = self.swap_budget_bytes.saturating_sub(bytes);
        self.most_swap_bytes = self.most_swap_bytes.max(self.swap_used_bytes);
    }

    /// Moves memory back, as far as the disk can do it in this step; returns how much.
    pub(crate) fn swap_in(&mut self, wanted_bytes: u64) -> u64 {
        let got = self.take(wanted_bytes.min(self.swap_budget_bytes));
        self.swap_budget_bytes -= got;
        self.swap_used_bytes -= got;
        got
    }

    /// Drops swapped memory.
    pub(crate) fn drop_swapped(&mut self, bytes: u64) {
        self.swap_used_bytes -= bytes;
    }

    pub(crate) fn swap_out_bytes(&self) -> u64 {
        self.swap_out_bytes
    }

    /// Its part of a snapshot.
    pub(crate) fn seen(&self) -> Host {
        Host {
            total_bytes: self.shape.total_bytes,
            available_bytes: self.free_bytes.saturating_sub(self.reserve()),
            swap: self.shape.swap_bytes.map(|total_bytes| Swap {
                total_bytes,
                used_bytes: self.swap_used_bytes,
                out_bytes: self.swap_out_bytes,
            }),
            pressure: self.shape.has_pressure.then_some(self.pressure),
        }
    }
}
