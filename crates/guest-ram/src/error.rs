//! Errors of guest memory.

use std::io;

use crate::{Backing, GuestRange, ImageError};

/// An error of this crate.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RamError {
    /// The list of regions was empty.
    #[error("guest memory needs at least one region and none was given")]
    NoRegions,

    /// A region's start or size is not a multiple of the backing's page size, or the size is 0.
    #[error(
        "guest memory region at {start:#x} of {size_bytes} bytes: start and size must be multiples \
         of {unit_bytes} bytes with this backing, and the size at least that; choose another size"
    )]
    UnalignedRegion {
        /// Requested guest-physical address.
        start: u64,
        /// Requested size in bytes.
        size_bytes: u64,
        /// Unit of both, in bytes.
        unit_bytes: u64,
    },

    /// Regions overlap, are not in ascending order, or exceed the address space.
    #[error(
        "guest memory region at {start:#x} of {size_bytes} bytes overlaps its predecessor or wraps \
         around"
    )]
    OverlappingRegion {
        /// Guest-physical address of the offending region.
        start: u64,
        /// Its size in bytes.
        size_bytes: u64,
    },

    /// The pool of huge pages is too small.
    #[error(
        "guest memory needs {wanted_pages} huge pages of 2 MiB and {free_pages} are free; as root, \
         write at least {missing_pages} more into /proc/sys/vm/nr_hugepages, or use another backing"
    )]
    TooFewHugePages {
        /// Huge pages that the region needs.
        wanted_pages: u64,
        /// Huge pages that the host has free and unreserved.
        free_pages: u64,
        /// Number of missing huge pages.
        missing_pages: u64,
    },

    /// The memory could not be mapped or its file not be created.
    #[error(
        "cannot {action} {size_bytes} bytes of guest memory: {source}; is there enough memory and \
         address space?"
    )]
    Map {
        /// The failed step.
        action: &'static str,
        /// Size of the region in bytes.
        size_bytes: u64,
        /// The system error.
        source: io::Error,
    },

    /// A policy for the mapping was refused.
    #[error("cannot set {advice} on guest memory: {source}")]
    Advise {
        /// The `madvise` advice.
        advice: &'static str,
        /// The system error.
        source: io::Error,
    },

    /// The memory could not be bound to a host node.
    #[error(
        "cannot bind guest memory to host node {node}: {source}; `ls /sys/devices/system/node` \
         lists the nodes of this host"
    )]
    BindNode {
        /// The requested host node.
        node: u32,
        /// The system error.
        source: io::Error,
    },

    /// The memory could not be allocated in advance.
    #[error(
        "cannot allocate {size_bytes} bytes of guest memory in advance: {source}; the host has too \
         little free memory (of this kind or on this node), or a kernel older than 5.14"
    )]
    Populate {
        /// Bytes to be allocated in the failed step.
        size_bytes: u64,
        /// The system error.
        source: io::Error,
    },

    /// More memory than the host has was to be allocated in advance.
    #[error(
        "cannot allocate {size_bytes} bytes of guest memory in advance: the host has only \
         {host_bytes} bytes; request less, or let the guest's use allocate it"
    )]
    LargerThanHost {
        /// Size of all regions in bytes.
        size_bytes: u64,
        /// RAM of the host in bytes.
        host_bytes: u64,
    },

    /// A range is not, or not entirely, guest memory.
    #[error("{range} is not within guest memory")]
    OutsideRam {
        /// The requested range.
        range: GuestRange,
    },

    /// The host refused to discard pages. Ranges before this one have been discarded.
    #[error("cannot discard {range} with {call}: {source}")]
    Discard {
        /// The requested range.
        range: GuestRange,
        /// The system call.
        call: &'static str,
        /// The system error.
        source: io::Error,
    },

    /// The amount of resident memory could not be determined.
    #[error("cannot determine how much guest memory is resident: {source}")]
    Resident {
        /// The system error.
        source: io::Error,
    },

    /// Memory received from another process is invalid.
    #[error("cannot take over guest memory of another process: {problem}")]
    Adopt {
        /// The actual and the required property.
        problem: String,
    },

    /// The descriptor of a memory file could not be duplicated.
    #[error("cannot duplicate the descriptor of guest memory's file: {source}")]
    Share {
        /// The system error.
        source: io::Error,
    },

    /// The kernel cannot make all threads of the process execute a memory barrier.
    #[error(
        "cannot start to log writes to guest memory: {source}; this requires the system call \
         membarrier with private expedited barriers (Linux 4.14, CONFIG_MEMBARRIER)"
    )]
    Barrier {
        /// The system error.
        source: io::Error,
    },

    /// There is no room for the memory to be saved.
    #[error(
        "no room to save guest memory: {source}, after {written_bytes} bytes of at most \
         {needed_bytes}; free at least the difference, or save to another disk"
    )]
    DiskFull {
        /// Bytes written until then.
        written_bytes: u64,
        /// Maximum number of bytes of the whole memory; pages that are not written yet may turn out
        /// to be zero.
        needed_bytes: u64,
        /// The system error.
        source: io::Error,
    },

    /// Memory could not be written to a file.
    #[error("cannot write guest memory to its file at offset {offset_bytes}: {source}")]
    WriteImage {
        /// Offset in the file, in bytes.
        offset_bytes: u64,
        /// The system error.
        source: io::Error,
    },

    /// Saved memory could not be read.
    #[error("cannot read saved guest memory from its file at offset {offset_bytes}: {source}")]
    ReadImage {
        /// Offset in the file, in bytes.
        offset_bytes: u64,
        /// The system error.
        source: io::Error,
    },

    /// The content of pages could not be read.
    #[error("cannot read guest memory at {range}: {source}")]
    ReadPages {
        /// The requested range.
        range: GuestRange,
        /// The system error.
        source: io::Error,
    },

    /// The content of pages could not be replaced.
    #[error("cannot write guest memory at {range}: {source}")]
    WritePages {
        /// The requested range.
        range: GuestRange,
        /// The system error.
        source: io::Error,
    },

    /// The target is the file that the memory was restored from and still uses.
    #[error(
        "guest memory cannot be saved to the file that it was restored from, which is in use; save \
         it to another file and rename that one"
    )]
    SaveOntoSource,

    /// The protection of memory against writes could not be changed.
    #[error("cannot change the protection of guest memory against writes: {source}")]
    Protect {
        /// The system error.
        source: io::Error,
    },

    /// The caller has cancelled the allocation in advance.
    #[error("guest memory is not allocated in advance: it was cancelled")]
    PopulateCancelled,

    /// The caller has cancelled a save.
    #[error("guest memory is not saved: it was cancelled")]
    SaveCancelled,

    /// Saved memory is invalid.
    #[error(transparent)]
    Image(#[from] ImageError),

    /// Pages of memory that belongs to a file cannot be merged.
    #[error(
        "{backing} cannot be merged: it belongs to a file that other processes may share, whose \
         view a merge would not change; use anonymous memory"
    )]
    NotMergeable {
        /// Backing of the memory.
        backing: Backing,
    },

    /// The kernel cannot merge pages.
    #[error(
        "this kernel cannot merge guest memory: it was built without KSM (CONFIG_KSM), there is no \
         /sys/kernel/mm/ksm"
    )]
    NoKernelMerging,

    /// vm-memory refused the regions.
    #[error("cannot set up guest memory: {0}")]
    Layout(String),
}
