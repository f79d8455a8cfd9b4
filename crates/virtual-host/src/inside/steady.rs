//! Keeps the emulated kernel from patching its own code when guests start and end.
//!
//! Linux turns rarely used branches on and off by rewriting instructions
//! (Documentation/staging/static-keys.rst). KVM has two such static keys: `preempt_notifier_key`,
//! on while any virtual machine exists, and `apic_sw_disabled`, on while any local APIC is disabled
//! by software, as each one is until its guest has booted. QEMU's multi-threaded emulator may keep
//! executing its translation of the breakpoint that Linux temporarily writes while it patches: the
//! processor then hits it for ever (seen with QEMU 7.2 in `__schedule`, where memory contained a
//! no-operation again; all other processors wait for that one). One virtual machine that never runs
//! keeps both keys on.

use std::fs::OpenOptions;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::path::Path;

/// KVM's device.
const DEVICE: &str = "/dev/kvm";
/// Requests without a structure (Linux Documentation/virt/kvm/api.rst): _IO(0xae, 0x01), _IO(0xae,
/// 0x60), _IO(0xae, 0x41).
const KVM_CREATE_VM: libc::c_ulong = 0xae01;
const KVM_CREATE_IRQCHIP: libc::c_ulong = 0xae60;
const KVM_CREATE_VCPU: libc::c_ulong = 0xae41;

/// A virtual machine that never runs; destroyed on drop.
#[derive(Debug)]
pub struct SteadyMachine {
    _machine: OwnedFd,
    _vcpu: OwnedFd,
}

impl SteadyMachine {
    /// Creates the virtual machine; `None` without KVM.
    pub fn create() -> io::Result<Option<Self>> {
        if !Path::new(DEVICE).exists() {
            return Ok(None);
        }
        let device = OpenOptions::new().read(true).write(true).open(DEVICE)?;
        let machine = descriptor(device.as_raw_fd(), KVM_CREATE_VM)?;
        request(machine.as_raw_fd(), KVM_CREATE_IRQCHIP)?;
        let vcpu = descriptor(machine.as_raw_fd(), KVM_CREATE_VCPU)?;
        Ok(Some(Self { _machine: machine, _vcpu: vcpu }))
    }
}

fn descriptor(on: RawFd, what: libc::c_ulong) -> io::Result<OwnedFd> {
    let number = request(on, what)?;
    // SAFETY: the request has returned a new descriptor, which has no other owner. KVM closes it on
    // exec.
    Ok(unsafe { OwnedFd::from_raw_fd(number) })
}

fn request(on: RawFd, what: libc::c_ulong) -> io::Result<RawFd> {
    // SAFETY: the requests of this module take a number, here 0 (machine type, vCPU number), and
    // access no memory of the process.
    match unsafe { libc::ioctl(on, what, 0) } {
        -1 => Err(io::Error::last_os_error()),
        number => Ok(number),
    }
}
