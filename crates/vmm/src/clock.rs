//! The guest's clocks across pause, snapshot and restore: reads and writes the values that
//! `ebb-kvm-clock` computes with.
//!
//! A guest has two clocks: KVM's, from which its pvclock pages are made, and the time stamp
//! counters of its vCPUs. Both are read for one instant and set for one instant, so that they stay
//! consistent.

use std::time::{Instant, SystemTime, UNIX_EPOCH};

use ebb_kvm_clock::guest_tsc::FractionBits;
use ebb_kvm_clock::policy::{TscRate, TscScaling};
use ebb_kvm_clock::{ClockError, ClockPlan, ClockPolicy, HostReading, Kilohertz, SavedClock};
use kvm_bindings::{KVM_CLOCK_HOST_TSC, KVM_CLOCK_REALTIME, kvm_clock_data};
use kvm_ioctls::{Cap, Kvm, VcpuFd, VmFd};
use thiserror::Error;

use crate::api::vm::ClockInstant;
use crate::cpu::threads::VcpuThreads;
use crate::cpu::{CpuError, tsc};

/// The guest's clocks could not be read or set.
#[derive(Debug, Error)]
pub enum GuestClockError {
    /// The clock cannot be computed.
    #[error(transparent)]
    Policy(#[from] ClockError),
    /// Reading or setting a vCPU's counter failed.
    #[error(transparent)]
    Cpu(#[from] CpuError),
    /// KVM refused to read or set its clock.
    #[error("KVM cannot {action}: {source}")]
    Kvm {
        /// The operation.
        action: &'static str,
        /// KVM's error.
        source: kvm_ioctls::Error,
    },
    /// KVM does not report the frequency of the time stamp counter.
    #[error("KVM does not report the frequency of this host's time stamp counter")]
    NoFrequency,
    /// The snapshot is of a machine with another number of vCPUs.
    #[error(
        "the saved clock has {saved} time stamp counters for {vcpus} vCPUs; the snapshot is damaged"
    )]
    Vcpus {
        /// Counters in the saved clock.
        saved: usize,
        /// vCPUs of the machine.
        vcpus: usize,
    },
}

fn kvm(action: &'static str) -> impl FnOnce(kvm_ioctls::Error) -> GuestClockError {
    move |source| GuestClockError::Kvm { action, source }
}

/// Frequencies of a guest's and its host's time stamp counters.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TscFrequencies {
    /// The guest's.
    pub guest: Kilohertz,
    /// The host's.
    pub host: Kilohertz,
    scaling: TscScaling,
}

impl TscFrequencies {
    /// Sets the vCPU's frequency to `wanted` if that is not the host's. The vCPU must be new.
    ///
    /// # Errors
    /// [`ClockError`] if this host cannot run a guest at that frequency.
    pub fn set(
        kvm_fd: &Kvm,
        vcpu: &VcpuFd,
        vendor: &str,
        wanted: Option<Kilohertz>,
    ) -> Result<Self, GuestClockError> {
        let host =
            vcpu.get_tsc_khz().ok().and_then(Kilohertz::new).ok_or(GuestClockError::NoFrequency)?;
        let scaling = if kvm_fd.check_extension(Cap::TscControl) {
            TscScaling::Available(fraction_bits(vendor))
        } else {
            TscScaling::Unavailable
        };
        let frequencies = Self { guest: wanted.unwrap_or(host), host, scaling };
        if frequencies.rate()? != TscRate::Same {
            vcpu.set_tsc_khz(frequencies.guest.get()).map_err(kvm(
                "run the guest's time stamp counter at the frequency of its snapshot",
            ))?;
        }
        Ok(frequencies)
    }

    fn rate(&self) -> Result<TscRate, ClockError> {
        TscRate::between(self.guest, self.host, self.scaling)
    }
}

/// Fraction bits of the TSC scaling register on processors of `vendor`.
fn fraction_bits(vendor: &str) -> FractionBits {
    match vendor {
        // The latter two vendors implement VMX.
        "GenuineIntel" | "CentaurHauls" | "??Shanghai??" => FractionBits::Intel48,
        _ => FractionBits::Amd32,
    }
}

/// One instant: KVM's clock, real time, and the host's counter where it is known.
struct Reading {
    clock_ns: u64,
    realtime_ns: u64,
    host_tsc: Option<u64>,
}

impl Reading {
    fn of(
        vm: &VmFd,
        vcpus: &VcpuThreads,
        frequencies: TscFrequencies,
    ) -> Result<Self, GuestClockError> {
        let (start, before) = (Instant::now(), realtime_ns());
        let data = vm.get_clock().map_err(kvm("read the guest's clock"))?;
        if data.flags & KVM_CLOCK_REALTIME != 0 && data.flags & KVM_CLOCK_HOST_TSC != 0 {
            let (clock_ns, realtime_ns) = (data.clock, data.realtime);
            return Ok(Self { clock_ns, realtime_ns, host_tsc: Some(data.host_tsc) });
        }
        // Without the master clock KVM does not return the host's counter. A vCPU's counter minus
        // its offset is the host's, unless it is scaled; the readings are then some microseconds
        // apart.
        let mut host_tsc = None;
        if frequencies.rate()? == TscRate::Same {
            let counters =
                vcpus.collect(move |vcpu| match (vcpu.index, tsc::offset(&vcpu.fd)) {
                    (0, Some(offset)) => {
                        // Read the time first: the counter is then too late rather than too early,
                        // and no value that the guest has read lies after it.
                        let elapsed = start.elapsed();
                        Ok(Some((elapsed, tsc::read(&vcpu.fd)?.wrapping_sub(offset))))
                    }
                    _ => Ok(None),
                })?;
            if let Some((elapsed, counter)) = counters.into_iter().flatten().next() {
                // Back to the instant at which the clock was read.
                let elapsed_ns = u64::try_from(elapsed.as_nanos()).unwrap_or(0);
                let ticks = frequencies.host.ticks_in_ns(elapsed_ns).unwrap_or(0);
                host_tsc = Some(counter.wrapping_sub(ticks));
            }
        }
        Ok(Self { clock_ns: data.clock, realtime_ns: before, host_tsc })
    }
}

fn realtime_ns() -> u64 {
    let since_1970 = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since_1970.as_nanos()).unwrap_or(u64::MAX)
}

/// Current time of KVM's clock and the host's real time. The vCPUs must be paused.
pub fn now(
    vm: &VmFd,
    vcpus: &VcpuThreads,
    frequencies: TscFrequencies,
) -> Result<ClockInstant, GuestClockError> {
    let reading = Reading::of(vm, vcpus, frequencies)?;
    Ok(ClockInstant { clock_ns: reading.clock_ns, realtime_ns: reading.realtime_ns })
}

/// Reads the clocks of a guest whose vCPUs are paused.
pub fn save(
    vm: &VmFd,
    vcpus: &VcpuThreads,
    frequencies: TscFrequencies,
) -> Result<SavedClock, GuestClockError> {
    let reading = Reading::of(vm, vcpus, frequencies)?;
    let (clock_ns, realtime_ns, khz) =
        (reading.clock_ns, Some(reading.realtime_ns), frequencies.guest);
    let offsets: Option<Vec<u64>> =
        vcpus.collect(|vcpu| Ok(tsc::offset(&vcpu.fd)))?.into_iter().collect::<Option<_>>();
    if let (Some(host_tsc), Some(offsets)) = (reading.host_tsc, offsets) {
        let ratio = frequencies.rate()?.ratio();
        return Ok(SavedClock::from_offsets(clock_ns, realtime_ns, host_tsc, khz, ratio, &offsets));
    }
    let guest_tsc = vcpus.collect(|vcpu| tsc::read(&vcpu.fd))?;
    Ok(SavedClock {
        clock_ns,
        host_realtime_ns: realtime_ns,
        host_tsc: None,
        tsc_khz: khz,
        guest_tsc,
    })
}

/// Computes what to set for the guest to continue now.
pub fn plan(
    saved: &SavedClock,
    policy: ClockPolicy,
    vm: &VmFd,
    vcpus: &VcpuThreads,
    frequencies: TscFrequencies,
) -> Result<ClockPlan, GuestClockError> {
    let reading = Reading::of(vm, vcpus, frequencies)?;
    let now = HostReading {
        realtime_ns: Some(reading.realtime_ns),
        host_tsc: reading.host_tsc,
        tsc_khz: frequencies.host,
        scaling: frequencies.scaling,
    };
    let plan = saved.plan(policy, &now)?;
    if plan.vcpus.len() != vcpus.count() {
        return Err(GuestClockError::Vcpus { saved: plan.vcpus.len(), vcpus: vcpus.count() });
    }
    Ok(plan)
}

/// Makes KVM check whether its clock can follow the host's counter, as it does whenever the clock
/// is set. Before that, the clock of a new virtual machine cannot be read together with the
/// counter.
pub fn prime(vm: &VmFd) -> Result<(), GuestClockError> {
    vm.set_clock(&kvm_clock_data::default()).map_err(kvm("set the guest's clock"))
}

/// Sets the vCPUs' counters. Timers that depend on them must be armed again afterwards.
pub fn set_counters(vcpus: &VcpuThreads, plan: &ClockPlan) -> Result<(), GuestClockError> {
    let counters = plan.vcpus.clone();
    vcpus.on_each(move |vcpu| tsc::set(&vcpu.fd, counters[usize::from(vcpu.index)]))?;
    Ok(())
}

/// Like [`set_counters`], and arms the timers again.
pub fn set_counters_and_timers(
    vcpus: &VcpuThreads,
    plan: &ClockPlan,
) -> Result<(), GuestClockError> {
    let counters = plan.vcpus.clone();
    vcpus.on_each(move |vcpu| {
        let deadline = tsc::deadline(&vcpu.fd)?;
        tsc::set(&vcpu.fd, counters[usize::from(vcpu.index)])?;
        deadline.map_or(Ok(()), |deadline| tsc::set_deadline(&vcpu.fd, deadline))
    })?;
    Ok(())
}

/// Sets KVM's clock. The counters must be set first, since KVM relates the clock to them.
pub fn set(vm: &VmFd, plan: &ClockPlan) -> Result<(), GuestClockError> {
    let clock = kvm_clock_data { clock: plan.clock_ns, ..Default::default() };
    if let Some(realtime) = plan.realtime_ns {
        // KVM adds the time since the plan was made.
        let with_realtime = kvm_clock_data { realtime, flags: KVM_CLOCK_REALTIME, ..clock };
        if vm.set_clock(&with_realtime).is_ok() {
            return Ok(());
        }
    }
    // Linux before 5.16 has no flags here: the clock loses the microseconds since the plan.
    vm.set_clock(&clock).map_err(kvm("set the guest's clock"))
}
