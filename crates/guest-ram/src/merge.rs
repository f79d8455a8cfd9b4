//! Same-page merging of guest memory: pages with equal content are replaced by a shared stable
//! page.
//!
//! The process that owns the memory does the merging itself, with these means of Linux:
//!
//! - *Scan*: userfaultfd's asynchronous write protection tracks which pages are written to;
//!   `PAGEMAP_SCAN` reports them.
//! - *Freeze*: `UFFDIO_MOVE` moves pages to a staging area, where neither the guest nor a device
//!   can change them.
//! - *Compare* with the stable page, and *replace*: a private mapping of the stable page replaces
//!   the page, so that the kernel makes a copy when the guest writes to it. A page of zeros is not
//!   replaced by anything.
//!
//! [`GuestRam::enable_merging`](crate::GuestRam::enable_merging) prepares the memory, a
//! [`MergeSession`] merges it. The choice of pages is made elsewhere. The state of merged pages is
//! part of the memory's overlay (`overlay.rs`).

mod coalesce_vmas;
mod collapse;
mod enable;
mod freeze;
pub(crate) mod merging;
mod move_shares;
mod nodes;
mod reanonymize;
mod scan;
mod schedule;
pub(crate) mod scratch;
mod session;
mod stable;
#[cfg(feature = "testing")]
#[doc(hidden)]
pub mod stress;
#[cfg(feature = "testing")]
#[doc(hidden)]
pub mod testing;
mod unavailable;
mod unmerge;

pub use crate::resident::STABLE_FILE_NAME;
pub use freeze::{MergeOutcome, MergeTarget};
pub use merging::{MergeFiles, Merging, only_node};
pub use session::{MergeError, MergeSession, PageLook};
pub use stable::{Freed, StableBound, StableError, StableMemory, StableSegments, StableSlot};
pub use unavailable::MergeUnavailable;
