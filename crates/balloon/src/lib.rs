//! A complete virtio-balloon device (virtio 1.3 section 5.5), independent of KVM and of the
//! transport.
//!
//! [`Balloon`] takes virtqueues and guest memory. Page frame numbers and ranges from the driver are
//! checked, sorted, deduplicated and coalesced, and passed to
//! [`GuestRam`](ebb_guest_ram::GuestRam), which returns them to the host.
//!
//! # Driving the device
//!
//! The owner keeps the device behind one lock. It calls [`Balloon::activate`] when the driver sets
//! `DRIVER_OK`, then [`Balloon::process_queue`] once for every queue (Linux puts its first
//! statistics buffer up and kicks before `DRIVER_OK`), and from then on for each queue that the
//! driver kicks:
//!
//! ```text
//! loop {
//!     let progress = balloon.process_queue(index);
//!     if progress.interrupt { raise the queue's interrupt }
//!     if progress.due { release the lock; discarder.discard_due(); take the lock }
//!     if !progress.more { break }
//! }
//! if progress.pending { call discarder.flush() after some milliseconds without activity }
//! ```
//!
//! A call does a bounded amount of work. The driver's mistakes are counted by kind
//! ([`GuestError`]), logged at a limited rate, and never stop the device.
//!
//! # Why inflation is acknowledged first
//!
//! Linux sends at most 256 page frame numbers, 1 MiB, in a buffer and waits for the answer. Half of
//! a transparent huge page cannot be returned to the host immediately: the host has to split it.
//! When `MUST_TELL_HOST` was negotiated, the device may take pages of the balloon at any time until
//! the driver asks for them back (section 5.5.6.2). So it answers first, gathers arriving pages
//! into whole huge pages, and discards several of those at a time while the guest already collects
//! more pages. Pages that do not form a whole huge page wait in a bounded set for
//! [`Discarder::flush`].
//!
//! # The extension
//!
//! With features 50 to 53 (docs/extension.md), which are offered only if
//! [`BalloonConfig::features`] has them, buffers are messages that name pages by numbers, a bitmap
//! or ranges, and the owner can request the guest's free pages with
//! [`Balloon::request_free_pages`]. The answer goes to a [`HintSink`] like hints, under the same
//! rule; [`FreePageCollector`] is one. [`Balloon::request_report`] has the driver report them
//! instead, and ends when the host has their memory. A message can name all of memory: it is
//! processed in portions, so that a call stays short and pages that become due are discarded between
//! two calls.
//!
//! # Pages that the guest need not clear
//!
//! With features 6 and 7, which are proposed for the specification (docs/zeroed-pages.md) and
//! offered only if [`BalloonConfig::features`] has them, reports and inflated pages are answered
//! with what reads as zeros now.

mod budget;
mod chain;
mod config;
mod counters;
mod device;
mod error;
mod free_pages;
mod hinting;
mod host_request;
mod indirect;
mod inflate;
mod initialized;
mod log_limit;
mod message;
mod pages;
mod pending;
mod queue;
mod reporting;
mod state;
mod statistics;
mod verify;

#[cfg(any(test, feature = "testing"))]
#[doc(hidden)]
pub mod fuzzing;
#[cfg(any(test, feature = "testing"))]
#[doc(hidden)]
pub mod testing;

pub use config::BalloonConfig;
pub use counters::{
    Counters, DiscardCounters, EncodingCounters, ErrorCounts, GuestError, QueueCounters,
    RequestCounters,
};
pub use device::{Balloon, Info};
pub use error::BalloonError;
pub use free_pages::{Answer, FreePageCollector, FreePageMap, FreePageSummary, LARGEST_BLOCK};
pub use hinting::{AnswerMessage, HintEnd, HintPhase, HintSink};
pub use host_request::{RequestBuffer, RequestPhase};
pub use indirect::names_indirect_table;
pub use log_limit::LogLimit;
pub use pending::Discarder;
pub use queue::Progress;
pub use state::{BalloonState, STATE_VERSION};
pub use statistics::{Statistics, StatisticsBuffer, StatisticsPoll, StatisticsValues};
pub use verify::{ReportCheck, overwritten_word};
