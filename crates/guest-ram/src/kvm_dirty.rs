//! Which pages the guest has written to, as KVM reports it.
//!
//! KVM logs writes of vCPUs, and its own on their behalf (the pages of its clock, for example), in
//! one of two ways. Which one is decided when the machine is made:
//!
//! - [`DirtyBitmap`], the ordinary one: a bit for each page of a memory slot, asked for as a whole.
//!   Bits are cleared page by page, so that a page is cleared right before it is read.
//! - [`DirtyRing`]: each vCPU has a ring of the pages it wrote to. Asking costs as much as was
//!   written, not as much as there is memory; a vCPU whose ring is full stops until it has
//!   been emptied.
//!
//! Logging splits the host's huge mappings of guest memory into small ones and makes the first
//! write to each page slow, so it is on only while it is needed. What the monitor writes
//! itself is not in it: see [`GuestRam::start_write_log`](crate::GuestRam::start_write_log).

use std::os::fd::AsRawFd;

use kvm_bindings::{KVM_MEM_LOG_DIRTY_PAGES, kvm_userspace_memory_region};
use kvm_ioctls::VmFd;

use crate::{GuestRam, GuestRange};

mod bitmap;
mod ring;

pub use bitmap::DirtyBitmap;
pub use ring::DirtyRing;

/// Why KVM does not report which pages were written to.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DirtyLogError {
    /// KVM cannot do what is needed.
    #[error(
        "this KVM has no {capability}, which it takes to log writes to guest memory ({since}); use a newer kernel"
    )]
    Missing {
        /// The capability's name.
        capability: &'static str,
        /// The version of Linux that has it, and other conditions.
        since: &'static str,
    },

    /// A call was refused.
    #[error("KVM refused to {action}: {source}")]
    Refused {
        /// What was to be done.
        action: &'static str,
        /// KVM's answer.
        source: kvm_ioctls::Error,
    },

    /// The size of a ring cannot be.
    #[error(
        "a dirty ring of {entries} entries cannot be: it takes a power of two from {min_entries} to {max_entries}"
    )]
    RingSize {
        /// Entries asked for.
        entries: u32,
        /// Fewest possible.
        min_entries: u32,
        /// Most possible with this KVM.
        max_entries: u32,
    },

    /// A vCPU's ring could not be mapped.
    #[error("cannot map the dirty ring of a vCPU: {source}")]
    MapRing {
        /// The system's answer.
        source: std::io::Error,
    },

    /// A range is not, or not entirely, guest memory.
    #[error("{range} is not within guest memory")]
    OutsideRam {
        /// The range asked for.
        range: GuestRange,
    },
}

fn refused(action: &'static str) -> impl Fn(kvm_ioctls::Error) -> DirtyLogError {
    move |source| DirtyLogError::Refused { action, source }
}

/// Whether writes to memory slots are logged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Logging {
    On,
    Off,
}

/// Switches logging for all slots. In case of an error, those in front of the one that was refused
/// are switched.
///
/// # Safety
/// Each region of `ram` must be a memory slot of `vm`, numbered by the region's place, and stay
/// mapped as long as the machine can access it.
unsafe fn set_logging(vm: &VmFd, ram: &GuestRam, logging: Logging) -> Result<(), DirtyLogError> {
    let flags = if logging == Logging::On { KVM_MEM_LOG_DIRTY_PAGES } else { 0 };
    for (slot, region) in ram.regions().iter().enumerate() {
        let slot = kvm_userspace_memory_region {
            slot: slot as u32,
            flags,
            guest_phys_addr: region.start.0,
            memory_size: region.size_bytes,
            userspace_addr: region.host_address,
        };
        // SAFETY: the slot exists with the same memory, as the caller vouches; only its flags
        // change.
        unsafe { vm.set_user_memory_region(slot) }
            .map_err(refused("switch logging of a memory slot"))?;
    }
    Ok(())
}

/// A KVM ioctl of a machine that kvm-ioctls does not have.
///
/// # Safety
/// `argument` must be what the kernel expects with `request`, and what it points to must be valid
/// for that.
unsafe fn vm_ioctl(
    vm: &VmFd,
    request: libc::c_ulong,
    argument: usize,
) -> Result<i32, kvm_ioctls::Error> {
    // SAFETY: the descriptor is open as long as `vm` is borrowed; for the argument the caller
    // vouches.
    let result = unsafe { libc::ioctl(vm.as_raw_fd(), request as _, argument) };
    if result < 0 { Err(kvm_ioctls::Error::last()) } else { Ok(result) }
}
