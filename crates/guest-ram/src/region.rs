//! Components of guest memory: regions, their backing, and their allocation.

use std::fmt;

use ebb_abi::{HUGE_PAGE_SIZE_BYTES, PAGE_SIZE_BYTES, Pfn};
use serde::{Deserialize, Serialize};
use vm_memory::GuestAddress;

use crate::GuestRange;

/// A contiguous piece of guest memory to be mapped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RegionSpec {
    /// Guest-physical address of the first byte.
    pub start: GuestAddress,
    /// Size in bytes.
    pub size_bytes: u64,
    /// Host node that the memory must come from; any if `None`.
    pub host_node: Option<u32>,
}

/// Backing of guest memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Backing {
    /// Private anonymous memory.
    #[serde(rename = "anon")]
    Anonymous,
    /// A memory file that can be shared with other processes.
    Memfd,
    /// A memory file of 2 MiB pages from the host's pool. A huge page returns to the pool when all
    /// of it is discarded, and is unavailable to others until then.
    #[serde(rename = "hugetlb")]
    Hugetlb2M,
}

impl Backing {
    /// Unit of a region's start and size, in bytes.
    pub const fn unit_bytes(self) -> u64 {
        match self {
            Self::Anonymous | Self::Memfd => PAGE_SIZE_BYTES,
            Self::Hugetlb2M => HUGE_PAGE_SIZE_BYTES,
        }
    }
}

impl fmt::Display for Backing {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::Anonymous => "anonymous memory",
            Self::Memfd => "memfd",
            Self::Hugetlb2M => "hugetlb memory of 2 MiB pages",
        })
    }
}

/// Whether the host may use transparent huge pages; ignored for [`Backing::Hugetlb2M`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HugePages {
    /// Wherever possible (`MADV_HUGEPAGE`).
    On,
    /// Never (`MADV_NOHUGEPAGE`): slower to access, but no page is allocated because of its
    /// neighbours.
    Off,
}

/// When the host allocates memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Populate {
    /// At the first access.
    Lazy,
    /// All of it before the guest starts.
    Prealloc,
}

/// A mapped region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Region {
    /// Guest-physical address of the first byte.
    pub start: GuestAddress,
    /// Size in bytes.
    pub size_bytes: u64,
    /// Host address of the first byte, for KVM's memory slots. Valid as long as the
    /// [`GuestRam`](crate::GuestRam).
    pub host_address: u64,
    /// Host node that the memory is bound to.
    pub host_node: Option<u32>,
}

impl RegionSpec {
    /// The region's guest pages.
    pub(crate) const fn pages(&self) -> GuestRange {
        GuestRange::new(Pfn::containing(self.start.0), self.size_bytes / PAGE_SIZE_BYTES)
    }
}

impl Region {
    /// The specification of the region.
    #[cfg(feature = "merge")]
    pub(crate) const fn spec(&self) -> RegionSpec {
        RegionSpec { start: self.start, size_bytes: self.size_bytes, host_node: self.host_node }
    }

    /// The region's guest pages.
    pub const fn pages(&self) -> GuestRange {
        GuestRange::new(Pfn::containing(self.start.0), self.size_bytes / PAGE_SIZE_BYTES)
    }
}
