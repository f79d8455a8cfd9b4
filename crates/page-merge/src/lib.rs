//! Same-page merging: pages with the same content share one page of the host until one of them is written to.
//!
//! Only pages of one *trust domain* are merged, and, if wished, only pages of one *node*: there is a stable index (pages that are
//! shared already) and an unstable one (pages that did not change lately) for each pair of domain and node, as Linux's KSM has
//! trees for each node (mm/ksm.c; patch "ksm: allow trees per NUMA node", 2013).
//!
//! The core decides which pages are looked at, compared and merged. It touches memory through [`Memory`] and shared pages
//! through [`StableStore`] only.
#![forbid(unsafe_code)]

mod advisor;
mod blocks;
pub mod broker;
mod control;
mod domain;
mod hash;
mod join;
pub mod kernel;
mod local;
pub mod memory;
mod merger;
pub mod owner;
mod pace;
mod record;
mod replace;
mod scan;
mod settings;
mod slots;
mod statistics;
pub mod store;
mod table;
#[cfg(feature = "testing")]
#[allow(clippy::missing_panics_doc)]
pub mod testing;
mod worker;

pub use advisor::Advisor;
pub use control::{Control, Paused};
pub use hash::PageHasher;
pub use local::LocalStore;
pub use memory::{Content, Look, Memory, Node, PageHash, Replace, Replaced, Secret, Target};
pub use merger::{DomainId, MemberId, Merger, Step};
pub use pace::Effort;
pub use settings::{AdvisorMode, MAX_PAGE_SHARING, Nodes, Run, Settings, SettingsError};
pub use slots::Slots;
pub use statistics::Statistics;
pub use store::{Answer, Slot, StableStore, StoreCounts, StoreError};
pub use worker::{Clock, SystemClock, Worker};
