//! Pages written by the guest, as reported by KVM.
//!
//! KVM logs writes of vCPUs, and its own on their behalf (the pages of its clock, for example), in
//! one of two ways, chosen when the machine is created:
//!
//! - [`DirtyBitmap`], the default: a bit for each page of a memory slot, read as a whole. Bits are
//!   cleared page by page, so that a page is cleared right before it is read.
//! - [`DirtyRing`]: each vCPU has a ring of the pages it wrote to. The cost of reading depends on
//!   the number of writes and not on the size of memory; a vCPU whose ring is full stops until the
//!   ring has been emptied.
//!
//! Logging splits the host's huge mappings of guest memory into small ones and makes the first
//! write to each page slow, so it is on only while needed. The monitor's own writes are not
//! included: see [`GuestRam::start_write_log`](crate::GuestRam::start_write_log).

use std::os::fd::AsRawFd;

use kvm_bindings::{KVM_MEM_LOG_DIRTY_PAGES, kvm_userspace_memory_region};
use kvm_ioctls::VmFd;

use crate::{GuestRam, GuestRange};

mod bitmap;
mod ring;

pub use bitmap::DirtyBitmap;
pub use ring::DirtyRing;

/// Reason why KVM does not report the pages written to.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DirtyLogError {
    /// KVM lacks a capability.
    #[error(
        "this KVM has no {capability}, which logging of writes to guest memory requires ({since}); \
         use a newer kernel"
    )]
    Missing {
        /// The capability's name.
        capability: &'static str,
        /// The version of Linux with the capability, and other conditions.
        since: &'static str,
    },

    /// A call was refused.
    #[error("KVM refused to {action}: {source}")]
    Refused {
        /// The failed action.
        action: &'static str,
        /// KVM's error.
        source: kvm_ioctls::Error,
    },

    /// The size of a ring is invalid.
    #[error(
        "a dirty ring cannot have {entries} entries; use a power of two from {min_entries} to \
         {max_entries}"
    )]
    RingSize {
        /// Requested number of entries.
        entries: u32,
        /// Minimum number of entries.
        min_entries: u32,
        /// Maximum number of entries with this KVM.
        max_entries: u32,
    },

    /// A vCPU's ring could not be mapped.
    #[error("cannot map the dirty ring of a vCPU: {source}")]
    MapRing {
        /// The system error.
        source: std::io::Error,
    },

    /// A range is not, or not entirely, guest memory.
    #[error("{range} is not within guest memory")]
    OutsideRam {
        /// The requested range.
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

/// Switches logging for all slots. After an error, the slots before the refused one are switched.
///
/// # Safety
/// Each region of `ram` must be a memory slot of `vm`, numbered by the region's index, and stay
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
        // SAFETY: the slot exists with the same memory, as the caller guarantees; only its flags
        // change.
        unsafe { vm.set_user_memory_region(slot) }
            .map_err(refused("switch logging of a memory slot"))?;
    }
    Ok(())
}

/// Makes a KVM ioctl of a machine that kvm-ioctls lacks.
///
/// # Safety
/// `argument` must be the value that the kernel expects with `request`, and memory that it points
/// to must be valid for that.
unsafe fn vm_ioctl(
    vm: &VmFd,
    request: libc::c_ulong,
    argument: usize,
) -> Result<i32, kvm_ioctls::Error> {
    // SAFETY: the descriptor is open as long as `vm` is borrowed; the caller guarantees the
    // argument.
    let result = unsafe { libc::ioctl(vm.as_raw_fd(), request as _, argument) };
    if result < 0 { Err(kvm_ioctls::Error::last()) } else { Ok(result) }
}
