//! Errors between the device and its owner.

use ebb_abi::balloon::{Features, QueueMapError};

/// An error of the device's owner or of the driver during negotiation. A driver's mistakes in
/// operation are counted instead, see [`GuestError`](crate::GuestError).
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum BalloonError {
    /// The balloon cannot be larger than guest memory.
    #[error(
        "balloon target of {target_bytes} bytes exceeds the guest's {ram_bytes} bytes of memory; \
         request at most that much"
    )]
    TargetTooLarge {
        /// Requested size in bytes.
        target_bytes: u64,
        /// Size of guest memory in bytes.
        ram_bytes: u64,
    },

    /// The device was activated twice.
    #[error("the balloon is already active; reset it before activating it again")]
    AlreadyActive,

    /// The driver accepted a feature that was not offered.
    #[error(
        "the driver accepted features {negotiated} of the offered {offered}; it must accept a \
         subset"
    )]
    FeaturesNotOffered {
        /// Accepted features.
        negotiated: Features,
        /// Offered features.
        offered: Features,
    },

    /// The rings of a queue are not in guest memory.
    #[error("balloon queue {index} is ready but its rings are not in guest memory")]
    InvalidQueue {
        /// Transport index of the queue.
        index: usize,
    },

    /// Queues that every balloon needs are missing.
    #[error("cannot activate the balloon: {0}")]
    Queues(#[from] QueueMapError),

    /// The driver did not negotiate a feature that a request needs.
    #[error("the guest's balloon driver has not negotiated {feature}, or no driver is loaded")]
    NotNegotiated {
        /// Name of the feature.
        feature: &'static str,
    },

    /// Hinting was started while it was active.
    #[error("free page hinting is already active; finish it first")]
    HintingActive,

    /// Free pages were requested while another request was active.
    #[error("a request for free pages is already active; wait for the answer or cancel it")]
    RequestActive,

    /// A saved state cannot be used.
    #[error("cannot restore the balloon: {0}")]
    State(&'static str),
}
