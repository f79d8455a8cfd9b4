//! Live migration of a virtual machine's memory: pre-copy that skips what the guest does not use.
//!
//! The crate depends neither on KVM nor on a particular monitor. It works on traits:
//! [`SourceMemory`] and [`TargetMemory`], [`DirtySource`], [`Guest`], [`FreePageSource`].
//! [`Precopy`] sends memory, [`Receiver`] receives it, [`Tracker`] enforces the rule that makes
//! free page hints safe. [`session`] is the connection between two monitors: addresses, trust and
//! protocol.
//!
//! ```text
//! arm -> window { request hints | send the pages not hinted } -> sync the log
//!     -> send, sync; send, sync; ... -> pause the guest -> sync -> send the rest
//! ```

mod batch;
mod cancel;
mod chunk;
mod clearing;
mod config;
mod convergence;
mod dirty;
mod error;
#[cfg(feature = "testing")]
#[doc(hidden)]
pub mod fuzzing;
mod guest;
mod guest_ram;
mod hint_deadline;
mod memory;
mod parser;
mod precopy;
mod progress;
mod rate;
mod receiver;
mod send_set;
mod sender;
pub mod session;
mod switchover;
#[cfg(feature = "testing")]
#[doc(hidden)]
pub mod testing;
mod tracker;
mod zero;

pub use cancel::Cancel;
pub use clearing::ClearingAllocator;
pub use config::{AtTimeLimit, AutoConverge, Config, HintRounds, Holes, TimeLimit, ZeroPages};
pub use dirty::DirtySource;
pub use error::{Failure, MigrationError, ReceiveError, StreamError};
pub use guest::{FreePageSource, Guest, RoundSync};
pub use guest_ram::WithWriteLog;
pub use memory::{BoxError, SourceMemory, TargetMemory};
pub use precopy::Precopy;
pub use progress::{PageCounters, Phase, Progress, Report, RoundReport};
pub use receiver::{ReceiveReport, Receiver};
pub use switchover::Switchover;
pub use tracker::{ClearingRound, HintReceiver, HintWindow, LastRound, PageFeed, Tracker};
pub use zero::is_zero_page;
