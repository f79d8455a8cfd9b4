//! Whether a monitor of this user could merge the pages of its machines, found out by trying.

use ebb_guest_ram::{
    Backing, GuestRam, HugePages, MergeUnavailable, Populate, RegionSpec, StableSegments,
};
use vm_memory::GuestAddress;

/// As little memory as can be merged.
const PROBE_BYTES: u64 = 2 << 20;

/// Prepares a little memory for merging by the monitor (merge=owner), as for a machine.
///
/// # Errors
/// Why it cannot be, with what to do.
pub fn probe_merging() -> Result<(), MergeUnavailable> {
    let spec = RegionSpec { start: GuestAddress(0), size_bytes: PROBE_BYTES, host_node: None };
    let ram = GuestRam::new(&[spec], Backing::Anonymous, HugePages::Off, Populate::Lazy)?;
    ram.enable_merging(StableSegments::new())
}
