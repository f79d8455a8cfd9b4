//! A vCPU's time stamp counter.

use std::os::fd::AsRawFd;

use ebb_kvm_clock::policy::VcpuTsc;
use kvm_bindings::{KVM_VCPU_TSC_CTRL, KVM_VCPU_TSC_OFFSET, kvm_device_attr};
use kvm_ioctls::VcpuFd;

use super::CpuError;
use super::state::{IA32_TSC, IA32_TSC_DEADLINE, Msr, read_msr, write_msrs};

/// `_IOW(KVMIO, 0xe1, struct kvm_device_attr)` (Linux include/uapi/linux/kvm.h). kvm-ioctls has
/// this and the next request for vCPUs on other architectures only.
pub const KVM_SET_DEVICE_ATTR: u64 = request(0xe1);
/// `_IOW(KVMIO, 0xe2, struct kvm_device_attr)`.
pub const KVM_GET_DEVICE_ATTR: u64 = request(0xe2);

const fn request(number: u64) -> u64 {
    1 << 30 | (size_of::<kvm_device_attr>() as u64) << 16 | 0xae << 8 | number
}

/// The TSC offset attribute (Linux Documentation/virt/kvm/devices/vcpu.rst, section 4); `value`
/// holds the offset.
fn attribute(value: *mut u64) -> kvm_device_attr {
    kvm_device_attr {
        group: KVM_VCPU_TSC_CTRL,
        attr: u64::from(KVM_VCPU_TSC_OFFSET),
        addr: value as u64,
        flags: 0,
    }
}

/// The offset added to the (scaled) host counter, modulo 2^64. `None` before Linux 5.16.
pub fn offset(vcpu: &VcpuFd) -> Option<u64> {
    let mut value = 0u64;
    let attribute = attribute(&raw mut value);
    // SAFETY: KVM reads the attribute and writes 8 bytes to `value`; both live until after the
    // call.
    let result =
        unsafe { libc::ioctl(vcpu.as_raw_fd(), KVM_GET_DEVICE_ATTR, &raw const attribute) };
    (result == 0).then_some(value)
}

/// The counter's value in the guest now.
pub fn read(vcpu: &VcpuFd) -> Result<u64, CpuError> {
    read_msr(vcpu, IA32_TSC)?.map(|msr| msr.value).ok_or(CpuError::NoMsr { index: IA32_TSC })
}

/// Sets the counter: by its offset if this kernel supports that, which is exact, else by its value.
pub fn set(vcpu: &VcpuFd, tsc: VcpuTsc) -> Result<(), CpuError> {
    if let Some(mut offset) = tsc.offset {
        let attribute = attribute(&raw mut offset);
        // SAFETY: KVM reads the attribute and the 8 bytes of `offset`; both live until after the
        // call.
        let result =
            unsafe { libc::ioctl(vcpu.as_raw_fd(), KVM_SET_DEVICE_ATTR, &raw const attribute) };
        if result == 0 {
            return Ok(());
        }
    }
    write(vcpu, Msr { index: IA32_TSC, value: tsc.guest_tsc })
}

/// The counter's value at which the local APIC's timer fires; `None` if it is not armed with a
/// deadline.
pub fn deadline(vcpu: &VcpuFd) -> Result<Option<u64>, CpuError> {
    Ok(read_msr(vcpu, IA32_TSC_DEADLINE)?.map(|msr| msr.value).filter(|&deadline| deadline != 0))
}

/// Arms the timer. KVM converts the deadline to host time when it is written, so it must be written
/// again after the counter changes.
pub fn set_deadline(vcpu: &VcpuFd, deadline: u64) -> Result<(), CpuError> {
    write(vcpu, Msr { index: IA32_TSC_DEADLINE, value: deadline })
}

fn write(vcpu: &VcpuFd, msr: Msr) -> Result<(), CpuError> {
    match write_msrs(vcpu, &[msr])? {
        0 => Err(CpuError::MsrValue { index: msr.index, value: msr.value }),
        _ => Ok(()),
    }
}
