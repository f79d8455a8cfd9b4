//! virtio-balloon, "Traditional Memory Balloon Device" (virtio 1.3 section 5.5; Linux
//! include/uapi/linux/virtio_balloon.h), and Ebb's [`extension`] of it.

mod config;
pub mod extension;
mod features;
mod hinting;
mod le;
mod queues;
mod statistics;

pub use config::Config;
pub use features::{Feature, Features};
pub use hinting::{COMMAND_ID_BYTES, HintCommand};
pub use le::{Le16, Le32, Le64};
pub use queues::{
    MAX_QUEUES, Numbering, QueueIndexes, QueueKind, QueueMap, QueueMapError, QueueSet,
    STANDARD_QUEUES,
};
pub use statistics::{StatisticsEntry, StatisticsTag};

/// Device type number of the traditional memory balloon (virtio 1.3 section 5).
pub const DEVICE_ID: u32 = 5;

/// Minimum size of the reporting queue in entries: with fewer, Linux's probe fails with ENOSPC
/// (`PAGE_REPORTING_CAPACITY`, include/linux/page_reporting.h).
pub const REPORTING_QUEUE_MIN_ENTRIES: u16 = 32;

/// Maximum number of page frame numbers that Linux puts into one buffer of the inflate or deflate
/// queue (`VIRTIO_BALLOON_ARRAY_PFNS_MAX`, drivers/virtio/virtio_balloon.c).
pub const LINUX_PFNS_PER_BUFFER: usize = 256;

/// Size of a page frame number in bytes on the inflate and deflate queues.
pub const PFN_BYTES: usize = 4;
