//! Same-page merging: pages with the same content share one page of the host until one of them is written to.
//!
//! Only pages of one *trust domain* are merged, and, if wished, only pages of one *node*: there is a stable index (pages that are
//! shared already) and an unstable one (pages that did not change lately) for each pair of domain and node, as Linux's KSM has
//! trees for each node (mm/ksm.c; patch "ksm: allow trees per NUMA node", 2013).
//!
//! The core decides which pages are looked at, compared and merged. It touches memory through [`Memory`] and shared pages
//! through [`StableStore`] only.
#![forbid(unsafe_code)]

mod hash;
pub mod kernel;
pub mod memory;
mod slots;
pub mod store;

pub use hash::PageHasher;
pub use memory::{Content, Look, Memory, Node, PageHash, Replace, Replaced, Secret, Target};
pub use slots::Slots;
pub use store::{Answer, Slot, StableStore, StoreCounts, StoreError};
