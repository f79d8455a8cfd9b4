//! A virtual machine's clock as KVM implements it.

use alloc::vec;
use core::sync::atomic::AtomicU64;

use super::host::{ClockSource, HostClock};
use crate::guest_tsc::{FractionBits, TscRatio};
use crate::policy::{ClockError, ClockPolicy, HostReading, SavedClock, TscScaling};
use crate::protocol::{AtomicTimePage, Stability, StopNotice, TimeUpdate, write_time};
use crate::reader::{Reader, Reading};
use crate::scale::TscScale;
use crate::units::Kilohertz;

/// The host's clocks that a kernel derives KVM's clock from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum KernelMode {
    /// Linux between commits 53fafdbb8b21f and 8171cd68806b (January 2020): the master clock from
    /// `CLOCK_MONOTONIC_RAW`, everything else from `CLOCK_BOOTTIME`.
    Mixed,
    /// Linux since then: everything from `CLOCK_MONOTONIC_RAW` and the time suspended.
    Raw,
}

impl KernelMode {
    /// Both modes.
    pub const ALL: [Self; 2] = [Self::Mixed, Self::Raw];

    /// The mode's name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Mixed => "mixed",
            Self::Raw => "raw",
        }
    }
}

/// Whether KVM considers the TSCs of a virtual machine's vCPUs matched.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum VcpuTscs {
    /// They match; the master clock can be used.
    Matched,
    /// They do not match.
    Unmatched,
}

/// Computation of the factor in the page of a scaled guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ScaledFactor {
    /// From the scaled frequency in whole kilohertz, as KVM does.
    WholeKilohertz,
    /// From the ratio.
    Exact,
}

/// Result of `KVM_GET_CLOCK`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VmClock {
    /// The clock.
    pub clock_ns: i64,
    /// The host's real time at the same instant.
    pub realtime_ns: u64,
    /// The host's TSC at the same instant, if the master clock is on.
    pub host_tsc: Option<u64>,
}

/// Base instant of a master clock.
#[derive(Clone, Copy, Debug)]
struct MasterClock {
    kernel_ns: u64,
    host_tsc: u64,
}

/// A virtual machine with one vCPU. See [`crate::model`].
#[derive(Debug)]
pub struct Vm {
    mode: KernelMode,
    /// `kvmclock_offset`.
    offset_ns: i64,
    master: Option<MasterClock>,
    tscs: VcpuTscs,
    ratio: TscRatio,
    tsc_khz: Kilohertz,
    /// The factor in the page.
    scale: TscScale,
    tsc_offset: u64,
    paused: Option<SavedClock>,
    page: AtomicTimePage,
    /// The latest time that the guest has read; part of the guest's state.
    pub(super) last_ns: AtomicU64,
}

impl Vm {
    pub(super) fn new(
        mode: KernelMode,
        host: &HostClock,
        ratio: TscRatio,
        factor: ScaledFactor,
    ) -> Self {
        let host_khz = host.tsc_khz();
        // Truncated as in KVM.
        let tsc_khz =
            Kilohertz::new(ratio.scale(u64::from(host_khz.get())) as u32).unwrap_or(host_khz);
        let mut vm = Self {
            mode,
            offset_ns: 0,
            master: None,
            tscs: VcpuTscs::Matched,
            ratio,
            tsc_khz,
            scale: match factor {
                ScaledFactor::WholeKilohertz => TscScale::for_frequency(tsc_khz.hertz()),
                ScaledFactor::Exact => TscScale::for_scaled(host_khz, ratio),
            },
            // The guest's TSC starts from 0.
            tsc_offset: ratio.offset_for(0, host.tsc()),
            paused: None,
            page: AtomicTimePage::default(),
            last_ns: AtomicU64::new(0),
        };
        // The clock starts from 0 (kvm_arch_init_vm) on the kernel's base clock.
        vm.offset_ns = -vm.plain_base_ns(host).cast_signed();
        vm.update(host);
        vm
    }

    /// Whether the master clock is on.
    pub const fn has_master_clock(&self) -> bool {
        self.master.is_some()
    }

    /// The base without a master clock.
    const fn plain_base_ns(&self, host: &HostClock) -> u64 {
        match self.mode {
            KernelMode::Mixed => host.boottime_ns(),
            KernelMode::Raw => host.raw_boottime_ns(),
        }
    }

    /// The guest's TSC.
    pub(super) const fn guest_tsc(&self, host_tsc: u64) -> u64 {
        self.ratio.guest_tsc(host_tsc, self.tsc_offset)
    }

    /// Decides on the master clock, takes a new instant for it and writes the page
    /// (`pvclock_update_vm_gtod_copy`, `kvm_guest_time_update`).
    pub(super) fn update(&mut self, host: &HostClock) {
        self.write_page(host, StopNotice::Keep);
    }

    fn write_page(&mut self, host: &HostClock, notice: StopNotice) {
        let possible = host.source() == ClockSource::Tsc && self.tscs == VcpuTscs::Matched;
        // Raw in both modes since commit 53fafdbb8b21f.
        self.master = possible
            .then(|| MasterClock { kernel_ns: host.raw_boottime_ns(), host_tsc: host.tsc() });
        let (base_ns, stability) = match self.master {
            Some(master) => (master.kernel_ns, Stability::Stable),
            None => (self.plain_base_ns(host), Stability::Unstable),
        };
        let update = TimeUpdate {
            tsc_timestamp: self.guest_tsc(host.tsc()),
            system_time_ns: base_ns.cast_signed() + self.offset_ns,
            scale: self.scale,
            stability,
        };
        write_time(&self.page, &update, notice);
    }

    pub(super) fn guest_time(&mut self, host: &HostClock) -> Option<Reading> {
        if self.paused.is_some() {
            return None;
        }
        if host.source() != ClockSource::Tsc {
            // Without the master clock each vCPU entry rewrites the page (kvm_arch_vcpu_load).
            self.update(host);
        }
        Some(Reader::new(&self.page, &self.last_ns).read(|| self.guest_tsc(host.tsc())))
    }

    pub(super) fn clock(&self, host: &HostClock) -> VmClock {
        let (base_ns, host_tsc) = match self.master {
            Some(master) => {
                let ticks = host.tsc().wrapping_sub(master.host_tsc);
                let scale = TscScale::for_frequency(host.tsc_khz().hertz());
                (master.kernel_ns + scale.ns(ticks), Some(host.tsc()))
            }
            None => (self.plain_base_ns(host), None),
        };
        VmClock {
            clock_ns: base_ns.cast_signed() + self.offset_ns,
            realtime_ns: host.realtime_ns(),
            host_tsc,
        }
    }

    pub(super) fn set_clock(&mut self, host: &HostClock, clock_ns: i64, realtime_ns: Option<u64>) {
        let elapsed_ns = realtime_ns.map_or(0, |then| host.realtime_ns().saturating_sub(then));
        let clock_ns = clock_ns.saturating_add_unsigned(elapsed_ns);
        self.offset_ns = match self.mode {
            // Relative to the clock's present value.
            KernelMode::Mixed => self.offset_ns + (clock_ns - self.clock(host).clock_ns),
            // Relative to the base at the master clock's new instant.
            KernelMode::Raw => clock_ns - self.plain_base_ns(host).cast_signed(),
        };
        self.update(host);
    }

    pub(super) fn set_vcpu_tscs(&mut self, host: &HostClock, tscs: VcpuTscs) {
        self.tscs = tscs;
        self.update(host);
    }

    /// Lets the guest's TSC continue from its last value, from the next write of the page on.
    pub(super) fn tsc_was_reset(&mut self, host_tsc_before: u64, host_tsc: u64) {
        self.tsc_offset = self.ratio.offset_for(self.guest_tsc(host_tsc_before), host_tsc);
    }

    pub(super) fn wall_error_ns(&self, host: &HostClock) -> i64 {
        let clock_ns = self.clock(host).clock_ns;
        let at_zero_ns = match self.mode {
            // kvm_write_wall_clock before the fix: getboottime64 and the offset.
            KernelMode::Mixed => host.realtime_at_boot_ns() - self.offset_ns,
            // Since the fix: the real time less the clock.
            KernelMode::Raw => host.realtime_ns().cast_signed() - clock_ns,
        };
        at_zero_ns + clock_ns - host.realtime_ns().cast_signed()
    }

    pub(super) fn pause(&mut self, host: &HostClock) {
        if self.paused.is_some() {
            return;
        }
        let clock = self.clock(host);
        self.paused = Some(SavedClock {
            clock_ns: clock.clock_ns.cast_unsigned(),
            host_realtime_ns: Some(clock.realtime_ns),
            host_tsc: clock.host_tsc,
            tsc_khz: self.tsc_khz,
            guest_tsc: vec![self.guest_tsc(host.tsc())],
        });
    }

    pub(super) fn resume(
        &mut self,
        host: &HostClock,
        policy: ClockPolicy,
    ) -> Result<(), ClockError> {
        let Some(saved) = &self.paused else { return Ok(()) };
        let now = HostReading {
            realtime_ns: Some(host.realtime_ns()),
            host_tsc: Some(host.tsc()),
            tsc_khz: host.tsc_khz(),
            scaling: TscScaling::Available(FractionBits::Intel48),
        };
        let plan = saved.plan(policy, &now)?;
        // The ratio stays the one that the guest was created with.
        for vcpu in &plan.vcpus {
            self.tsc_offset = self.ratio.offset_for(vcpu.guest_tsc, host.tsc());
        }
        self.paused = None;
        self.set_clock(host, plan.clock_ns.cast_signed(), plan.realtime_ns);
        self.write_page(host, StopNotice::Give);
        Ok(())
    }
}
