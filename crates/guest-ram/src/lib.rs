//! Memory of a virtual machine: its mapping, and the return of pages that the guest does not use to
//! the host.
//!
//! [`GuestRam`] owns the mappings, one per [`RegionSpec`]. The backing decides how a page is
//! discarded, see [`Backing`]; callers are independent of it: they pass guest page ranges to
//! [`GuestRam::discard`] (pages that may be in use again as soon as the call returns, as in page
//! reporting) or [`GuestRam::discard_ballooned`] (pages that stay out of use until
//! [`GuestRam::reclaim`], as in a balloon).
//!
//! [`GuestRam::save`] writes memory to a sparse file, or while it is in use
//! [`GuestRam::prepare_background_save`], and [`GuestRam::restore`] starts from one, reading pages
//! on demand. [`GuestRam::working_set`] lists the parts that were accessed, and [`read_ahead`] reads
//! them ahead of another machine. [`GuestRam::share`] and [`GuestRam::adopt`] pass memory to another
//! process.
//!
//! A live migration, which copies memory while it changes, finds populated pages with
//! [`GuestRam::populated_ranges`], pages written by the monitor with [`GuestRam::start_write_log`],
//! and pages written by the guest with `kvm_dirty` (feature `kvm`). A [`PageBitmap`] stores them.
//!
//! After a fork(2), [`GuestRam::collapse`] makes memory huge again that was split when it was written
//! to.
//!
//! Guest memory is never a Rust reference: the guest writes to it at any time. It is read and
//! written only through [`vm_memory`]'s volatile accesses.

mod access;
mod collapse;
mod discard;
mod error;
mod fork;
#[cfg(feature = "testing")]
#[doc(hidden)]
pub mod fuzzing;
mod holes;
mod huge_rest;
mod image;
mod inhibit;
mod ksm;
#[cfg(feature = "kvm")]
pub mod kvm_dirty;
mod mapping;
#[cfg(feature = "merge")]
pub mod merge;
mod monitor_writes;
mod overlay;
mod page_bitmap;
mod pagemap;
mod partial_huge;
mod populate;
mod populated;
mod ram;
mod range_set;
mod ranges;
mod region;
mod resident;
mod restore;
mod save;
mod share;
mod uffd;
mod write_log;
mod zeros;

pub use collapse::{Collapse, CollapsePass, PassEnd};
pub use discard::{DiscardMethod, DiscardOutcome};
pub use error::RamError;
pub use fork::Still;
pub use image::{
    CHUNK_BYTES, Extent, ImageError, ImageRegion, MAX_EXTENTS, RAM_IMAGE_VERSION, RamImage,
};
pub use inhibit::{InhibitGuard, InhibitReason};
pub use ksm::KernelMerging;
#[cfg(feature = "testing")]
#[doc(hidden)]
pub use merge::testing;
#[cfg(feature = "merge")]
pub use merge::{
    MergeError, MergeSession, MergeUnavailable, StableError, StableMemory, StableSegments,
    StableSlot,
};
#[cfg(feature = "merge")]
pub use overlay::{BrokenCowStats, single_pages_bytes};
pub use page_bitmap::PageBitmap;
pub use ram::GuestRam;
pub use range_set::RangeSet;
pub use ranges::{coalesce, huge_blocks_first};
pub use region::{Backing, HugePages, Populate, Region, RegionSpec};
pub use resident::{ProcessResidency, Residency};
pub use restore::{MAX_WORKING_SET_EXTENTS, WORKING_SET_BLOCK_BYTES, WorkingSetError, read_ahead};
pub use save::{BackgroundSave, BackgroundUnavailable, PreparedSave};
pub use share::{SHARED_LAYOUT_VERSION, SharedLayout, SharedRam};
pub use uffd::UffdUnavailable;
pub use write_log::{GuestMemory, WriteLog, WriteLogSlice};
pub use zeros::ZeroScan;

/// A contiguous range of guest pages, aligned to pages by construction.
pub type GuestRange = ebb_abi::PageRange;
