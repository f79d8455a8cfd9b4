//! Memory statistics (virtio 1.3 section 5.5.6.3; tags 10 to 15 are from Linux
//! include/uapi/linux/virtio_balloon.h).

/// Meaning of a statistics value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u16)]
pub enum StatisticsTag {
    /// Bytes swapped in since boot.
    SwapIn = 0,
    /// Bytes swapped out since boot.
    SwapOut = 1,
    /// Page faults that needed disk I/O, since boot.
    MajorFaults = 2,
    /// Page faults that needed no disk I/O, since boot.
    MinorFaults = 3,
    /// Bytes of unused memory.
    FreeMemory = 4,
    /// Bytes of memory that the guest manages.
    TotalMemory = 5,
    /// Estimate of the bytes available to new programs without swapping.
    AvailableMemory = 6,
    /// Bytes in caches that can be reclaimed quickly, without I/O.
    DiskCaches = 7,
    /// Successful hugetlb page allocations.
    HugetlbAllocations = 8,
    /// Failed hugetlb page allocations.
    HugetlbFailures = 9,
    /// Processes killed by the OOM killer.
    OomKills = 10,
    /// Allocations stalled by direct reclaim.
    AllocationStalls = 11,
    /// Bytes scanned in the background (kswapd).
    AsyncScans = 12,
    /// Bytes scanned by direct reclaim.
    DirectScans = 13,
    /// Bytes reclaimed in the background.
    AsyncReclaims = 14,
    /// Bytes reclaimed by direct reclaim.
    DirectReclaims = 15,
}

impl StatisticsTag {
    /// Number of known tags; they are numbered from 0.
    pub const COUNT: usize = 16;

    /// All known tags in the order of their numbers.
    pub const ALL: [Self; Self::COUNT] = [
        Self::SwapIn,
        Self::SwapOut,
        Self::MajorFaults,
        Self::MinorFaults,
        Self::FreeMemory,
        Self::TotalMemory,
        Self::AvailableMemory,
        Self::DiskCaches,
        Self::HugetlbAllocations,
        Self::HugetlbFailures,
        Self::OomKills,
        Self::AllocationStalls,
        Self::AsyncScans,
        Self::DirectScans,
        Self::AsyncReclaims,
        Self::DirectReclaims,
    ];

    /// The tag with this number, if it is known.
    pub fn from_number(number: u16) -> Option<Self> {
        Self::ALL.get(usize::from(number)).copied()
    }

    /// The tag's number.
    pub const fn number(self) -> u16 {
        self as u16
    }

    /// Name in messages and metrics; amounts of memory end in `_bytes`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::SwapIn => "swap_in_bytes",
            Self::SwapOut => "swap_out_bytes",
            Self::MajorFaults => "major_faults",
            Self::MinorFaults => "minor_faults",
            Self::FreeMemory => "free_memory_bytes",
            Self::TotalMemory => "total_memory_bytes",
            Self::AvailableMemory => "available_memory_bytes",
            Self::DiskCaches => "disk_caches_bytes",
            Self::HugetlbAllocations => "hugetlb_allocations",
            Self::HugetlbFailures => "hugetlb_failures",
            Self::OomKills => "oom_kills",
            Self::AllocationStalls => "allocation_stalls",
            Self::AsyncScans => "async_scan_bytes",
            Self::DirectScans => "direct_scan_bytes",
            Self::AsyncReclaims => "async_reclaim_bytes",
            Self::DirectReclaims => "direct_reclaim_bytes",
        }
    }
}

/// `struct virtio_balloon_stat`: one entry of a statistics buffer, packed and little-endian.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct StatisticsEntry {
    /// Number of the tag, known or not.
    pub tag: u16,
    /// The value in the tag's unit.
    pub value: u64,
}

impl StatisticsEntry {
    /// Size on the wire, in bytes.
    pub const SIZE_BYTES: usize = 10;

    /// Decodes an entry.
    pub const fn from_bytes(bytes: [u8; Self::SIZE_BYTES]) -> Self {
        let [t0, t1, v0, v1, v2, v3, v4, v5, v6, v7] = bytes;
        Self {
            tag: u16::from_le_bytes([t0, t1]),
            value: u64::from_le_bytes([v0, v1, v2, v3, v4, v5, v6, v7]),
        }
    }

    /// Encodes the entry.
    pub const fn to_bytes(self) -> [u8; Self::SIZE_BYTES] {
        let [t0, t1] = self.tag.to_le_bytes();
        let [v0, v1, v2, v3, v4, v5, v6, v7] = self.value.to_le_bytes();
        [t0, t1, v0, v1, v2, v3, v4, v5, v6, v7]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn tags_are_numbered_densely_and_named_uniquely() {
        for (number, tag) in StatisticsTag::ALL.into_iter().enumerate() {
            assert_eq!(usize::from(tag.number()), number);
            assert_eq!(StatisticsTag::from_number(number as u16), Some(tag));
        }
        assert_eq!(StatisticsTag::from_number(16), None);
        let names: BTreeSet<_> = StatisticsTag::ALL.map(StatisticsTag::name).into_iter().collect();
        assert_eq!(names.len(), StatisticsTag::COUNT);
    }

    #[test]
    fn entries_are_packed() {
        let entry = StatisticsEntry { tag: 0x0201, value: 0x0a09_0807_0605_0403 };
        assert_eq!(entry.to_bytes(), [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]);
        assert_eq!(StatisticsEntry::from_bytes(entry.to_bytes()), entry);
    }
}
