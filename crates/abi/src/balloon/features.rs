//! Feature bits (virtio 1.3 section 5.5.3, and Ebb's extension, docs/extension.md).
//!
//! The extension's bits are above 49: bits 0 to 23 and 50 to 127 belong to the device type (virtio
//! 1.3 section 2.2), and the specification assigns them from the bottom. Bits 3 and 4, which a
//! patch series of 2016 proposed for what the extension does, have since got other meanings.
//!
//! Bits 6 and 7 are proposed for the specification (docs/zeroed-pages.md): no released version of
//! it has them, nor has Linux 7.3.

use core::fmt;
use core::ops::{BitAnd, BitOr};

/// A feature of virtio-balloon or of virtio itself that this device knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(
    feature = "serde",
    derive(serde::Serialize, serde::Deserialize),
    serde(rename_all = "snake_case")
)]
#[repr(u8)]
pub enum Feature {
    /// The driver notifies the device, and waits, before it reuses a page of the balloon.
    MustTellHost = 0,
    /// The statistics queue exists.
    #[cfg_attr(feature = "serde", serde(rename = "statistics"))]
    StatisticsQueue = 1,
    /// The driver deflates the balloon by itself when the guest is out of memory.
    DeflateOnOom = 2,
    /// The free page hinting queue exists.
    FreePageHint = 3,
    /// The driver reports the pattern with which the guest fills freed pages.
    PagePoison = 4,
    /// The page reporting queue exists.
    PageReporting = 5,
    /// Proposed: the device answers a report with the bytes that it has initialized.
    #[cfg_attr(feature = "serde", serde(rename = "init_reported"))]
    DeviceInitReported = 6,
    /// Proposed: the device answers pages of the inflate queue with a bitmap of those that it has
    /// initialized.
    #[cfg_attr(feature = "serde", serde(rename = "init_on_inflate"))]
    DeviceInitOnInflate = 7,
    /// Compliance with virtio 1.0 or later (virtio 1.3 section 6). Documents about the balloon omit
    /// it, because every device has it.
    #[cfg_attr(feature = "serde", serde(skip))]
    Version1 = 32,
    /// Extension: messages may describe pages by a bitmap.
    PageBitmap = 50,
    /// Extension: messages may describe pages by ranges.
    PageRanges = 51,
    /// Extension: the host request queue exists.
    #[cfg_attr(feature = "serde", serde(rename = "host_requests"))]
    HostRequest = 52,
    /// Extension: the host may request that all free pages are reported at once.
    #[cfg_attr(feature = "serde", serde(rename = "report_requests"))]
    ReportRequest = 53,
}

impl Feature {
    /// All known features in bit order.
    pub const ALL: [Self; 13] = [
        Self::MustTellHost,
        Self::StatisticsQueue,
        Self::DeflateOnOom,
        Self::FreePageHint,
        Self::PagePoison,
        Self::PageReporting,
        Self::DeviceInitReported,
        Self::DeviceInitOnInflate,
        Self::Version1,
        Self::PageBitmap,
        Self::PageRanges,
        Self::HostRequest,
        Self::ReportRequest,
    ];

    /// The feature's mask in the 64-bit feature word.
    pub const fn mask(self) -> u64 {
        1 << self as u8
    }

    /// Name in the specification or the proposal (for the extension, in docs/extension.md) without
    /// its prefix.
    pub const fn name(self) -> &'static str {
        match self {
            Self::MustTellHost => "MUST_TELL_HOST",
            Self::StatisticsQueue => "STATS_VQ",
            Self::DeflateOnOom => "DEFLATE_ON_OOM",
            Self::FreePageHint => "FREE_PAGE_HINT",
            Self::PagePoison => "PAGE_POISON",
            Self::PageReporting => "PAGE_REPORTING",
            Self::DeviceInitReported => "DEVICE_INIT_REPORTED",
            Self::DeviceInitOnInflate => "DEVICE_INIT_ON_INFLATE",
            Self::Version1 => "VERSION_1",
            Self::PageBitmap => "PAGE_BITMAP",
            Self::PageRanges => "PAGE_RANGES",
            Self::HostRequest => "HOST_REQUEST_VQ",
            Self::ReportRequest => "REPORT_REQUEST",
        }
    }
}

/// A set of feature bits; unknown bits are kept.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[repr(transparent)]
pub struct Features(pub u64);

impl Features {
    /// The empty set.
    pub const NONE: Self = Self(0);

    /// Every feature of virtio-balloon in the specification, bits 0 to 5.
    pub const ALL_BALLOON: Self = Self(0x3f);

    /// Every feature of the extension, bits 50 to 53.
    pub const EXTENSION: Self = Self(0b1111 << 50);

    /// Every feature of the balloon, including the extension's, without the proposed ones.
    pub const ALL_WITH_EXTENSION: Self = Self(Self::ALL_BALLOON.0 | Self::EXTENSION.0);

    /// The features proposed for the specification, bits 6 and 7.
    pub const PROPOSED: Self = Self(0b11 << 6);

    /// Every feature of the balloon that this crate knows.
    pub const KNOWN: Self = Self(Self::ALL_WITH_EXTENSION.0 | Self::PROPOSED.0);

    /// Whether the set contains `feature`.
    pub const fn contains(self, feature: Feature) -> bool {
        self.0 & feature.mask() != 0
    }

    /// Whether buffers of the inflate and deflate queues begin with a message header: if at least
    /// one of the encodings was negotiated (docs/extension.md, "Messages").
    pub const fn has_messages(self) -> bool {
        self.contains(Feature::PageBitmap) || self.contains(Feature::PageRanges)
    }

    /// Whether a guest with these features may rely on the content of pages on its free lists: on
    /// its own pattern, or on zeros, its own or the device's.
    pub const fn relies_on_free_pages(self) -> bool {
        self.contains(Feature::PagePoison) || self.0 & Self::PROPOSED.0 != 0
    }

    /// The set with `feature` added.
    #[must_use]
    pub const fn with(self, feature: Feature) -> Self {
        Self(self.0 | feature.mask())
    }

    /// The set without `feature`.
    #[must_use]
    pub const fn without(self, feature: Feature) -> Self {
        Self(self.0 & !feature.mask())
    }
}

impl From<Feature> for Features {
    fn from(feature: Feature) -> Self {
        Self(feature.mask())
    }
}

impl BitOr for Features {
    type Output = Self;

    fn bitor(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}

impl BitAnd for Features {
    type Output = Self;

    fn bitand(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }
}

impl fmt::Display for Features {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{:#x}", self.0)?;
        for feature in Feature::ALL.into_iter().filter(|feature| self.contains(*feature)) {
            write!(formatter, " {}", feature.name())?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::string::ToString;

    #[test]
    fn bits_match_the_specification() {
        let bits = Feature::ALL.map(|feature| feature.mask().trailing_zeros());
        assert_eq!(bits, [0, 1, 2, 3, 4, 5, 6, 7, 32, 50, 51, 52, 53]);
        let balloon =
            Feature::ALL[..6].iter().fold(Features::NONE, |set, feature| set.with(*feature));
        assert_eq!(balloon, Features::ALL_BALLOON);
        let proposed =
            Feature::ALL[6..8].iter().fold(Features::NONE, |set, feature| set.with(*feature));
        assert_eq!(proposed, Features::PROPOSED);
        let extension =
            Feature::ALL[9..].iter().fold(Features::NONE, |set, feature| set.with(*feature));
        assert_eq!(extension, Features::EXTENSION);
        assert_eq!(balloon | proposed | extension, Features::KNOWN);
        assert_eq!(
            Features::ALL_WITH_EXTENSION.without(Feature::HostRequest) & Features::ALL_BALLOON,
            balloon
        );
    }

    #[test]
    fn unknown_bits_are_kept_and_known_ones_named() {
        let features = Features(1 << 60 | 1 << 5 | 1 << 51);
        assert_eq!(features.to_string(), "0x1008000000000020 PAGE_REPORTING PAGE_RANGES");
        assert_eq!(features.without(Feature::PageReporting).0, 1 << 60 | 1 << 51);
    }

    #[test]
    fn three_features_let_a_guest_rely_on_free_pages() {
        let relying = Feature::ALL.map(|feature| Features::from(feature).relies_on_free_pages());
        assert_eq!(relying.into_iter().filter(|relies| *relies).count(), 3);
        assert!(relying[4] && relying[6] && relying[7]);
    }

    #[test]
    fn encodings_enable_messages_and_the_request_queue_does_not() {
        assert!(!Features::ALL_BALLOON.with(Feature::HostRequest).has_messages());
        assert!(Features::from(Feature::PageBitmap).has_messages());
        assert!(Features::from(Feature::PageRanges).has_messages());
    }
}
