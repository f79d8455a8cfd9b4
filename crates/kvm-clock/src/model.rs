//! A simulation of a host's clocks and of the virtual machines on it.
//!
//! It shows how KVM's clock behaves when the host's clocks drift apart, in kernels that mix them
//! and in kernels that do not ([`KernelMode`]), and runs sequences of events that would take weeks
//! in real time. The integer arithmetic keeps its remainders, so that a result depends only on the
//! sequence of calls, and not on the size of the time steps.
//!
//! # Contents
//!
//! The host ([`HostClock`]) has a TSC of a nominal frequency with an error, a clock source (that
//! TSC, or another one with its own error), `CLOCK_MONOTONIC_RAW` from the clock source,
//! `CLOCK_MONOTONIC` slewed against it, `CLOCK_BOOTTIME` with the time suspended, and
//! `CLOCK_REALTIME` with steps. A virtual machine ([`Vm`]) has KVM's offset and master clock, a TSC
//! with ratio and offset, and a real page, written and read by the functions of this crate's
//! [`crate::protocol`] and [`crate::reader`].
//!
//! Each virtual machine has one vCPU. Whether KVM considers the TSCs of its vCPUs matched, which
//! the master clock requires, is a setting ([`VcpuTscs`]).
//!
//! # The bug of 2020
//!
//! Linux commit 53fafdbb8b21f based the master clock on `CLOCK_MONOTONIC_RAW`; the offset of a new
//! virtual machine, and the clock without the master clock, stayed with `CLOCK_BOOTTIME`, which NTP
//! slews. Let D(u) be the lead of the slewed clock at u, for a machine created at R:
//!
//! | | mixed | raw |
//! | --- | --- | --- |
//! | guest's time at age t | t - D(R) | t |
//! | jump when the master clock is turned off at u | +D(u) | 0 |
//! | jump when it is turned on at u | -D(u) | 0 |
//! | error of the wall clock at u | -D(u) | 0 |
//!
//! A new guest's time is thus negative while D(R) exceeds its age: with 1 ppm, after 11.6 days for
//! a guest that is one second old.
//!
//! ```
//! use ebb_kvm_clock::model::{KernelMode, Machine};
//! use ebb_kvm_clock::Kilohertz;
//!
//! const SECOND_NS: u64 = 1_000_000_000;
//! let mut machine = Machine::new(KernelMode::Mixed, Kilohertz::new(2_600_000).unwrap());
//! machine.set_slew_ppb(1_000); // 1 ppm
//! machine.advance(14 * 86_400 * SECOND_NS);
//! let vm = machine.create_vm();
//! machine.advance(SECOND_NS);
//! let time_ns = machine.guest_time(vm).unwrap().time_ns;
//! assert_eq!(time_ns as i64 / 1_000_000, -209); // -209.6 ms
//! assert!(time_ns > u64::MAX - SECOND_NS); // as seen by the guest
//! ```

use alloc::vec::Vec;

use crate::guest_tsc::{FractionBits, TscRatio};
use crate::policy::{ClockError, ClockPolicy};
use crate::reader::Reading;
use crate::units::Kilohertz;

mod host;
#[cfg(test)]
mod tests;
mod vm;

pub use host::{ClockSource, HostClock, TscInSuspend};
pub use vm::{KernelMode, ScaledFactor, VcpuTscs, Vm, VmClock};

/// A virtual machine of a [`Machine`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct VmId(usize);

/// A host and its virtual machines.
#[derive(Debug)]
pub struct Machine {
    mode: KernelMode,
    host: HostClock,
    vms: Vec<Vm>,
}

impl Machine {
    /// A host that has just booted, with a TSC of `tsc_khz` as clock source, no slew, and a
    /// kernel of `mode`.
    pub const fn new(mode: KernelMode, tsc_khz: Kilohertz) -> Self {
        Self { mode, host: HostClock::new(tsc_khz), vms: Vec::new() }
    }

    /// The host's clocks.
    pub const fn host(&self) -> &HostClock {
        &self.host
    }

    /// The virtual machine's state.
    pub fn vm(&self, id: VmId) -> &Vm {
        &self.vms[id.0]
    }

    /// Advances true time by `ns` nanoseconds.
    pub fn advance(&mut self, ns: u64) {
        self.host.advance(ns);
    }

    /// Makes `CLOCK_MONOTONIC` run faster than `CLOCK_MONOTONIC_RAW` by `ppb` parts in 10^9 (NTP;
    /// Linux allows 500,000 for adjustments of the frequency and as much again for steps of the
    /// phase).
    pub fn set_slew_ppb(&mut self, ppb: i64) {
        self.host.set_slew_ppb(ppb);
    }

    /// Makes the TSC run faster than its nominal frequency by `ppb` parts in 10^9.
    pub fn set_tsc_error_ppb(&mut self, ppb: i64) {
        self.host.set_tsc_error_ppb(ppb);
    }

    /// Steps the host's `CLOCK_REALTIME` forward or back.
    pub fn step_realtime(&mut self, ns: i64) {
        self.host.step_realtime(ns);
    }

    /// Switches the host to another clock source, which turns its virtual machines' master clocks
    /// on or off.
    pub fn set_clock_source(&mut self, source: ClockSource) {
        self.host.set_clock_source(source);
        self.update_all();
    }

    /// Suspends the host for `ns` nanoseconds. If the host's TSC is reset, KVM lets a guest's TSC
    /// continue from its last value (`kvm_arch_enable_virtualization_cpu`).
    pub fn suspend(&mut self, ns: u64, tsc: TscInSuspend) {
        let before = self.host.tsc();
        self.host.suspend(ns, tsc);
        let after = self.host.tsc();
        if after < before {
            for vm in &mut self.vms {
                vm.tsc_was_reset(before, after);
            }
        }
        self.update_all();
    }

    /// Creates a virtual machine with the host's TSC frequency and runs it.
    pub fn create_vm(&mut self) -> VmId {
        self.add(TscRatio::ONE, ScaledFactor::Exact)
    }

    /// Creates a virtual machine with its own TSC frequency, which the host scales; `None` if the
    /// ratio is beyond the hardware's range.
    pub fn create_scaled_vm(
        &mut self,
        tsc_khz: Kilohertz,
        fraction: FractionBits,
        factor: ScaledFactor,
    ) -> Option<VmId> {
        let ratio = TscRatio::new(tsc_khz, self.host.tsc_khz(), fraction)?;
        Some(self.add(ratio, factor))
    }

    fn add(&mut self, ratio: TscRatio, factor: ScaledFactor) -> VmId {
        self.vms.push(Vm::new(self.mode, &self.host, ratio, factor));
        VmId(self.vms.len() - 1)
    }

    /// The guest's present time; `None` while it is paused.
    pub fn guest_time(&mut self, id: VmId) -> Option<Reading> {
        self.vms[id.0].guest_time(&self.host)
    }

    /// `KVM_GET_CLOCK`.
    pub fn clock(&self, id: VmId) -> VmClock {
        self.vms[id.0].clock(&self.host)
    }

    /// `KVM_SET_CLOCK`. With a real time (`KVM_CLOCK_REALTIME`) the time since then is added; 0 if
    /// it is in the future.
    pub fn set_clock(&mut self, id: VmId, clock_ns: i64, realtime_ns: Option<u64>) {
        self.vms[id.0].set_clock(&self.host, clock_ns, realtime_ns);
    }

    /// Makes KVM take a new instant for the master clock and write the page, as it does when a vCPU
    /// is created or the host's timekeeping changes. This corrects the time that the page's factor
    /// has lost since the last write.
    pub fn renew_clock(&mut self, id: VmId) {
        self.vms[id.0].update(&self.host);
    }

    /// Makes the vCPUs' TSCs equal or different, which turns the master clock on or off.
    pub fn set_vcpu_tscs(&mut self, id: VmId, tscs: VcpuTscs) {
        self.vms[id.0].set_vcpu_tscs(&self.host, tscs);
    }

    /// Error of the guest's real time against the host's, if the guest requests the wall clock now
    /// (`MSR_KVM_WALL_CLOCK`) and adds its time to it.
    pub fn wall_error_ns(&self, id: VmId) -> i64 {
        self.vms[id.0].wall_error_ns(&self.host)
    }

    /// Pauses the guest and saves its clocks; KVM's clock continues to run.
    pub fn pause(&mut self, id: VmId) {
        self.vms[id.0].pause(&self.host);
    }

    /// Sets the clocks by `policy` and resumes the guest, with a notice that it was stopped. No
    /// effect if it is not paused.
    ///
    /// # Errors
    /// As [`crate::policy::SavedClock::plan`]; the guest stays paused.
    pub fn resume(&mut self, id: VmId, policy: ClockPolicy) -> Result<(), ClockError> {
        self.vms[id.0].resume(&self.host, policy)
    }

    fn update_all(&mut self) {
        for vm in &mut self.vms {
            vm.update(&self.host);
        }
    }
}
