//! A guest's clocks after a pause or a restore.
//!
//! Before a stopped virtual machine runs again, two clocks have to be set: KVM's clock
//! (`KVM_SET_CLOCK`), from which KVM fills the pvclock pages, and the TSC of each vCPU. Both
//! represent the same time and must advance by the same amount, in terms of the new host, whose TSC
//! has another value and perhaps another frequency. This module contains the arithmetic, without
//! I/O; the monitor takes the readings and applies the result.
//!
//! # Procedure
//!
//! To save, after all vCPUs have stopped:
//! 1. `KVM_GET_CLOCK`: clock, `CLOCK_REALTIME` and host TSC of one instant. The latter two are
//!    valid only with the flags `KVM_CLOCK_REALTIME` and `KVM_CLOCK_HOST_TSC` (Linux 5.16, host
//!    clock source TSC). If the real time is missing, read `CLOCK_REALTIME` directly before or
//!    after: the error is the time between both calls.
//! 2. For each vCPU: its offset (`KVM_VCPU_TSC_OFFSET` of group `KVM_VCPU_TSC_CTRL`), and
//!    [`SavedClock::from_offsets`]; or, where the kernel has no host TSC or no offsets,
//!    `MSR_IA32_TSC`, right after step 1.
//!
//! To resume or to restore, before any vCPU runs:
//! 1. A present [`HostReading`], taken in the same way: from `KVM_GET_CLOCK` of the VM about to
//!    run.
//! 2. [`SavedClock::plan`].
//! 3. In this order: `KVM_SET_TSC_KHZ` on each vCPU if [`ClockPlan::tsc_rate`] requires it, each
//!    vCPU's TSC (its offset where the plan has one, else `MSR_IA32_TSC`), the TSC deadline MSR,
//!    `KVM_SET_CLOCK`, `KVMCLOCK_CTRL` on each vCPU, run.
//!
//! `KVM_SET_CLOCK` gets [`ClockPlan::clock_ns`], and [`ClockPlan::realtime_ns`] with
//! `KVM_CLOCK_REALTIME` where the kernel supports it, **with both policies**: the kernel then adds
//! the time between the reading and the call, so that clock and TSC offsets refer to the same
//! instant. This is the procedure of Linux, Documentation/virt/kvm/devices/vcpu.rst section 4.1,
//! without the elapsed time for [`ClockPolicy::Continue`].
//!
//! The kernel samples the base instant of its clock slightly before the real time
//! (`kvm_vm_ioctl_set_clock`). The clock is therefore ahead of the plan by up to the duration of
//! the call, about a microsecond, and never behind.
//!
//! Setting a vCPU's TSC by `MSR_IA32_TSC` has a pitfall: KVM interprets a value within a second of
//! the expected one as an attempt to synchronize vCPUs, and keeps the running counter
//! (`kvm_synchronize_tsc`). After a pause of less than a second the counter thus stays ahead of the
//! clock. The offset has no such pitfall.
//!
//! # Example
//!
//! ```
//! use ebb_kvm_clock::Kilohertz;
//! use ebb_kvm_clock::policy::{ClockPolicy, HostReading, SavedClock, TscScaling};
//!
//! let khz = Kilohertz::new(2_600_000).unwrap();
//! let saved = SavedClock {
//!     clock_ns: 5_000_000_000,
//!     host_realtime_ns: Some(1_000_000_000_000),
//!     host_tsc: Some(70_000_000_000),
//!     tsc_khz: khz,
//!     guest_tsc: vec![13_000_000_000],
//! };
//! // Ten seconds later, on a machine that has just been started.
//! let now = HostReading {
//!     realtime_ns: Some(1_010_000_000_000),
//!     host_tsc: Some(2_600_000_000),
//!     tsc_khz: khz,
//!     scaling: TscScaling::Unavailable,
//! };
//! let plan = saved.plan(ClockPolicy::CatchUp, &now).unwrap();
//! assert_eq!(plan.clock_ns, 15_000_000_000);
//! assert_eq!(plan.vcpus[0].guest_tsc, 39_000_000_000);
//! assert_eq!(plan.vcpus[0].offset, Some(36_400_000_000));
//! ```

use alloc::vec::Vec;
use core::fmt;
use core::str::FromStr;

use crate::guest_tsc::{FractionBits, TscRatio};
use crate::units::Kilohertz;

#[cfg(test)]
mod tests;

/// Maximum difference between the TSC frequencies of guest and host with which KVM runs the guest
/// unscaled, in parts per million (default of the parameter `tsc_tolerance_ppm` of Linux's module
/// `kvm`).
pub const TSC_TOLERANCE_PPM: u64 = 250;

/// Behaviour of a guest's clocks while the guest is paused.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[cfg_attr(
    feature = "serde",
    derive(serde::Serialize, serde::Deserialize),
    serde(rename_all = "kebab-case")
)]
pub enum ClockPolicy {
    /// They stop: the guest does not notice the pause. Afterwards its wall clock is late by the
    /// duration of the pause, until it is set.
    #[default]
    Continue,
    /// They keep running: the guest sees real time pass. All its expired timers fire at once.
    CatchUp,
}

impl ClockPolicy {
    /// All policies.
    pub const ALL: [Self; 2] = [Self::Continue, Self::CatchUp];

    /// The policy's name: `continue` or `catch-up`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Continue => "continue",
            Self::CatchUp => "catch-up",
        }
    }
}

impl fmt::Display for ClockPolicy {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.pad(self.name())
    }
}

/// Error for an unknown name of a clock policy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "no such clock policy: use `continue` (the guest does not notice the pause) or `catch-up` \
     (it sees real time pass)"
)]
pub struct UnknownPolicy;

impl FromStr for ClockPolicy {
    type Err = UnknownPolicy;

    fn from_str(name: &str) -> Result<Self, UnknownPolicy> {
        Self::ALL.into_iter().find(|policy| policy.name() == name).ok_or(UnknownPolicy)
    }
}

/// Reason why no clock can be computed for a guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ClockError {
    /// The elapsed time is unknown.
    #[error(
        "clock policy `catch-up` needs the real time of both the save and the restore, and the \
         {missing} has none: read CLOCK_REALTIME there, or use the policy `continue`"
    )]
    NoRealtime {
        /// The reading without real time.
        missing: Missing,
    },
    /// The guest's TSC has another frequency than the host's, and the host cannot scale.
    #[error(
        "the guest's TSC runs at {guest} and this host's at {host}, which differ by more than \
         {TSC_TOLERANCE_PPM} ppm, and this host has no TSC scaling (KVM_CAP_TSC_CONTROL): restore \
         on a host with TSC scaling or with the same frequency"
    )]
    NoScaling {
        /// The guest's frequency.
        guest: Kilohertz,
        /// The host's frequency.
        host: Kilohertz,
    },
    /// The ratio is beyond the hardware's register.
    #[error(
        "this host cannot scale its TSC of {host} to the guest's {guest}: the ratio is out of the \
         hardware's range"
    )]
    RatioOutOfRange {
        /// The guest's frequency.
        guest: Kilohertz,
        /// The host's frequency.
        host: Kilohertz,
    },
    /// The clock would be beyond 2^64 ns, 584 years.
    #[error(
        "a clock of {clock_ns} ns cannot be advanced by {elapsed_ns} ns: the result is beyond 64 \
         bits; the real time of the save or of this host is wrong"
    )]
    OutOfRange {
        /// The saved clock.
        clock_ns: u64,
        /// The elapsed time.
        elapsed_ns: u64,
    },
}

/// The reading that lacks real time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Missing {
    /// The saved clock.
    SavedClock,
    /// The present host's reading.
    PresentHost,
}

impl fmt::Display for Missing {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::SavedClock => "saved clock",
            Self::PresentHost => "present host's reading",
        })
    }
}

/// The clocks of a saved virtual machine. All fields refer to the same instant.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct SavedClock {
    /// KVM's clock, from `KVM_GET_CLOCK`.
    pub clock_ns: u64,
    /// The host's `CLOCK_REALTIME`, from `KVM_GET_CLOCK` if available, else read next to that call.
    pub host_realtime_ns: Option<u64>,
    /// The host's TSC, from `KVM_GET_CLOCK` if available. For diagnosis; not needed to restore.
    pub host_tsc: Option<u64>,
    /// Frequency of the guest's TSC, from `KVM_GET_TSC_KHZ` on a vCPU.
    pub tsc_khz: Kilohertz,
    /// TSC of each vCPU, by vCPU number.
    pub guest_tsc: Vec<u64>,
}

impl SavedClock {
    /// The saved clock from a host TSC and the vCPUs' offsets (`KVM_VCPU_TSC_OFFSET`). This is
    /// exact, since no time passes between two readings. `ratio` is the guest's TSC ratio on the
    /// source host: [`TscRatio::ONE`] unless that scales (see [`TscRate::between`]).
    pub fn from_offsets(
        clock_ns: u64,
        host_realtime_ns: Option<u64>,
        host_tsc: u64,
        tsc_khz: Kilohertz,
        ratio: TscRatio,
        offsets: &[u64],
    ) -> Self {
        Self {
            clock_ns,
            host_realtime_ns,
            host_tsc: Some(host_tsc),
            tsc_khz,
            guest_tsc: offsets.iter().map(|&offset| ratio.guest_tsc(host_tsc, offset)).collect(),
        }
    }

    /// Computes the settings with which this guest resumes at the instant of `now`.
    ///
    /// Exact: KVM's clock advances by the whole nanoseconds between both real times, 0 if the real
    /// time went backwards, and every vCPU's TSC by the whole ticks in that time, so that the
    /// differences between vCPUs are preserved.
    pub fn plan(&self, policy: ClockPolicy, now: &HostReading) -> Result<ClockPlan, ClockError> {
        let tsc_rate = TscRate::between(self.tsc_khz, now.tsc_khz, now.scaling)?;
        let elapsed_ns = match policy {
            ClockPolicy::Continue => 0,
            ClockPolicy::CatchUp => self.elapsed_ns(now)?,
        };
        let beyond = ClockError::OutOfRange { clock_ns: self.clock_ns, elapsed_ns };
        let clock_ns = self.clock_ns.checked_add(elapsed_ns).ok_or(beyond)?;
        let elapsed_ticks = self.tsc_khz.ticks_in_ns(elapsed_ns).ok_or(beyond)?;
        let ratio = tsc_rate.ratio();
        let vcpus = self
            .guest_tsc
            .iter()
            .map(|&saved| {
                // Wraps like the counter.
                let guest_tsc = saved.wrapping_add(elapsed_ticks);
                VcpuTsc {
                    guest_tsc,
                    offset: now.host_tsc.map(|host| ratio.offset_for(guest_tsc, host)),
                }
            })
            .collect();
        Ok(ClockPlan {
            clock_ns,
            realtime_ns: now.realtime_ns,
            elapsed_ns,
            elapsed_ticks,
            tsc_rate,
            vcpus,
        })
    }

    /// Real time from the save to `now`; 0 if it went backwards.
    fn elapsed_ns(&self, now: &HostReading) -> Result<u64, ClockError> {
        let saved =
            self.host_realtime_ns.ok_or(ClockError::NoRealtime { missing: Missing::SavedClock })?;
        let present =
            now.realtime_ns.ok_or(ClockError::NoRealtime { missing: Missing::PresentHost })?;
        Ok(present.saturating_sub(saved))
    }
}

/// Whether a host can run a guest's TSC at another frequency than its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TscScaling {
    /// It cannot (`KVM_CAP_TSC_CONTROL` is missing).
    Unavailable,
    /// It can, with these fraction bits, which depend on the processor's vendor.
    Available(FractionBits),
}

/// Clocks of a host when a guest resumes. All values refer to the same instant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostReading {
    /// `CLOCK_REALTIME`, from `KVM_GET_CLOCK` if available, else read next to that call.
    pub realtime_ns: Option<u64>,
    /// The TSC, from `KVM_GET_CLOCK`; `None` if not available.
    pub host_tsc: Option<u64>,
    /// Frequency of the host's TSC, from `KVM_GET_TSC_KHZ` on the VM or on a vCPU whose frequency
    /// has not been changed.
    pub tsc_khz: Kilohertz,
    /// Whether the host can scale its TSC.
    pub scaling: TscScaling,
}

/// Rate of a guest's TSC on a host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TscRate {
    /// The frequencies are equal. `KVM_SET_TSC_KHZ` is not needed.
    Same,
    /// The frequencies differ by at most [`TSC_TOLERANCE_PPM`], and the host does not scale: the
    /// guest's TSC runs at the host's frequency. `KVM_SET_TSC_KHZ` with the guest's frequency
    /// corrects the pvclock pages.
    Tolerated,
    /// The hardware scales. `KVM_SET_TSC_KHZ` with the guest's frequency is needed before the TSC
    /// is set.
    Scaled(TscRatio),
}

impl TscRate {
    /// The rate at which KVM runs a guest TSC of `guest` on a host TSC of `host` (Linux
    /// `kvm_set_tsc_khz`).
    ///
    /// Within its tolerance KVM does not scale, even if the host can.
    pub fn between(
        guest: Kilohertz,
        host: Kilohertz,
        scaling: TscScaling,
    ) -> Result<Self, ClockError> {
        if guest == host {
            return Ok(Self::Same);
        }
        // Rounded down as in Linux's `adjust_tsc_khz`.
        let bound = |ppm: u64| u64::from(host.get()) * ppm / 1_000_000;
        let tolerated = bound(1_000_000 - TSC_TOLERANCE_PPM)..=bound(1_000_000 + TSC_TOLERANCE_PPM);
        if tolerated.contains(&u64::from(guest.get())) {
            return Ok(Self::Tolerated);
        }
        match scaling {
            TscScaling::Unavailable => Err(ClockError::NoScaling { guest, host }),
            TscScaling::Available(fraction) => TscRatio::new(guest, host, fraction)
                .map(Self::Scaled)
                .ok_or(ClockError::RatioOutOfRange { guest, host }),
        }
    }

    /// The ratio by which the hardware multiplies.
    pub const fn ratio(self) -> TscRatio {
        match self {
            Self::Same | Self::Tolerated => TscRatio::ONE,
            Self::Scaled(ratio) => ratio,
        }
    }
}

/// The clock settings that a monitor has to apply before a guest runs. All values refer to the
/// instant of the [`HostReading`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClockPlan {
    /// KVM's clock, for `KVM_SET_CLOCK`.
    pub clock_ns: u64,
    /// `CLOCK_REALTIME` of the instant, to be passed with [`Self::clock_ns`] and
    /// `KVM_CLOCK_REALTIME`, with both policies, so that the kernel adds the time until the call.
    /// `None` if the reading had none.
    pub realtime_ns: Option<u64>,
    /// The time by which the guest's clocks advance; 0 with [`ClockPolicy::Continue`].
    pub elapsed_ns: u64,
    /// The same in ticks of the guest's TSC, rounded down.
    pub elapsed_ticks: u64,
    /// Rate of the guest's TSC on this host.
    pub tsc_rate: TscRate,
    /// The TSC of each vCPU, by vCPU number.
    pub vcpus: Vec<VcpuTsc>,
}

/// A vCPU's TSC after a resume or a restore.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VcpuTsc {
    /// The TSC at the instant of the plan; for `MSR_IA32_TSC` if there is no offset.
    pub guest_tsc: u64,
    /// The offset for `KVM_VCPU_TSC_OFFSET`; `None` if the host's TSC is unknown.
    pub offset: Option<u64>,
}
