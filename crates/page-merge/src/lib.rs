//! Same-page merging: pages with the same content share one page of the host until one of them is
//! written to.
//!
//! Only pages of one *trust domain* are merged, and, optionally, only pages of one *node*: there is
//! a stable index (pages that are already shared) and an unstable one (pages that did not change
//! lately) for each pair of domain and node, as Linux's KSM has trees for each node (mm/ksm.c;
//! patch "ksm: allow trees per NUMA node", 2013).
//!
//! The core decides which pages are scanned, compared and merged. It accesses memory only through
//! [`Memory`] and shared pages only through [`StableStore`].
//!
//! # Operation
//!
//! A *pass* scans all memory, in blocks of 512 pages. A scan costs some nanoseconds per page and
//! reads no content: it reports which pages were written to since the last one. A page that was
//! not, in [`Settings::clean_passes`] scans, is read and hashed once, and then not again until it
//! is written to. Its hash is looked up among the stable pages, and then in the unstable index. If
//! another page waits there, that page's content becomes a stable page, and both are replaced by
//! it; each replacement compares the contents while nothing can change them, so a hash never
//! decides anything. Eight bytes are stored per page, and five to seven more in the index while it
//! waits for a partner.
//!
//! # Use
//!
//! A [`Merger`] is driven step by step, by its owner or by a [`Worker`] on a thread of its own,
//! which keeps the pace of the [`Settings`] and is controlled through a [`Control`]:
//!
//! ```
//! use ebb_abi::{PageRange, Pfn};
//! use ebb_page_merge::{
//!     Merger, Run, Secret, Settings, StablePages, SystemClock, Worker, testing::World,
//! };
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! // A simulated machine of 4 MiB, with equal pages everywhere. A real one is an
//! // `ebb_guest_ram::MergeSession`.
//! let world = World::new();
//! let guest = world.guest(&[PageRange::new(Pfn(0), 1024)]);
//! (0..1024).for_each(|page| guest.write(page, 42));
//!
//! let settings = Settings {
//!     run: Run::Merge,
//!     min_pass_millisecs: 0,
//!     sleep_millisecs: 1,
//!     ..Settings::default()
//! };
//! // For one machine alone. In production, the secret comes from the kernel's random numbers.
//! let store = StablePages::new(world.slots(0));
//! let merger = Merger::new(guest.memory(), store, Secret([7; 32]), settings)?;
//!
//! let (mut worker, control) = Worker::new(merger);
//! let thread = std::thread::spawn(move || worker.run(&SystemClock));
//! while control.statistics().merged_pages < 1024 {
//!     std::thread::yield_now();
//! }
//! // 64 stable pages in a row, so that a mapping serves up to 64 neighbours.
//! assert_eq!(control.statistics().pages_sharing, 960);
//! control.change(|settings| settings.pages_per_second = Some(1000))?;
//! control.stop();
//! thread.join().map_err(|_| "the merging thread panicked")?;
//! assert_eq!(guest.read(7), Some(42));
//! # Ok(())
//! # }
//! ```
#![forbid(unsafe_code)]

mod blocks;
pub mod broker;
mod control;
mod domain;
mod hash;
mod join;
pub mod kernel;
pub mod memory;
mod merger;
mod moves;
mod pace;
mod record;
mod replace;
mod scan;
mod settings;
mod slots;
mod stable;
mod statistics;
pub mod store;
mod table;
#[cfg(feature = "testing")]
#[allow(clippy::missing_panics_doc)]
pub mod testing;
mod worker;

pub use control::{Control, Paused};
pub use hash::{Content, PageHash, PageHasher, Secret};
pub use memory::{Memory, Node};
pub use merger::{Merger, MergerError, Step};
pub use pace::Effort;
pub use settings::{MAX_PAGE_SHARING, Nodes, Run, Settings, SettingsError};
pub use slots::Slots;
pub use stable::StablePages;
pub use statistics::Statistics;
pub use store::{Answer, StableStore, StoreCounts, StoreError};
pub use worker::{Clock, Renew, SystemClock, Worker};
