//! Model of a buddy allocator and the three free-page trackers of the guest's balloon module,
//! checked by property tests.
//!
//! The module (`guest/linux/ebb_balloon`) takes free blocks out of Linux' page allocator, reports
//! them to the host, which discards them, and puts them back, while programs allocate and free.
//! What may never happen is that a page in use is discarded. Kernels are a bad place to look for an
//! interleaving in which it does; here, each step that a lock makes indivisible is a function, and
//! a test may call them in any order.
//!
//! - [`units`]: page frame numbers, orders, blocks.
//! - [`buddy`]: the allocator: free lists, split, merge, isolate, put back.
//! - [`tracker`]: what the three trackers have in common, and the [`Flaw`]s that they can be given.
//! - [`percpu`], [`bitmap`], [`reporting`]: the trackers.
//! - [`machine`]: a guest of one CPU and one zone, its programs and its host.
//! - [`recording`], [`replay`]: what the module did in a real guest, checked against the model.
//!
//! The last two tie the model to the module: the module records its own events and the allocator's,
//! and [`replay::replay`] lets the same free lists and the same bitmap go through them. Each event
//! has to be one that the model allows, and those that the model requires may not be missing. Tests
//! of real guests do this with all trackers, and leave out events one at a time to show that the
//! model notices.
//!
//! What the machine does not model: several zones (they share nothing), several CPUs (their arrays
//! and lists share nothing, either), migrate types, time. A timer that is armed may fire at any step.

pub mod bitmap;
pub mod buddy;
pub mod fuzzing;
pub mod machine;
pub mod percpu;
pub mod recording;
pub mod replay;
pub mod reporting;
pub mod tracker;
pub mod units;

pub use machine::{Machine, Setup, Step, Violation};
pub use tracker::{Answer, Flaw, Kind};
