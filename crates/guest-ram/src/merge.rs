//! Same-page merging of guest memory: pages with the same content are replaced by a stable page
//! that they share.
//!
//! The process that owns the memory does it itself, with the means that Linux gives it:
//!
//! - *Look*: userfaultfd's asynchronous write protection keeps track of which pages are written to;
//!   `PAGEMAP_SCAN` asks.
//! - *Freeze*: `UFFDIO_MOVE` moves pages to a place of their own, where neither the guest nor a
//!   device can change them.
//! - *Compare* with the stable page, and *replace*: a private mapping of the stable page takes the
//!   page's place, so that the kernel makes a copy when the guest writes to it. A page of zeros is
//!   not replaced by anything.
//!
//! [`GuestRam::enable_merging`](crate::GuestRam::enable_merging) prepares, a [`MergeSession`]
//! works. Which pages are worth it is decided elsewhere. What is merged is kept in the memory's
//! overlay (`overlay.rs`).

mod coalesce_vmas;
mod enable;
mod freeze;
mod huge;
pub(crate) mod merging;
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
mod uffd;
mod unavailable;
mod unmerge;

pub use crate::resident::STABLE_FILE_NAME;
pub use freeze::{MergeOutcome, MergeTarget};
pub use merging::Merging;
pub use session::{MergeError, MergeSession, PageLook};
pub use stable::{Freed, StableError, StableMemory, StableSegments, StableSlot};
pub use unavailable::MergeUnavailable;
