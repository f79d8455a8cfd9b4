//! Wire formats shared by host and guest, and the units of guest memory.
//!
//! All of it is plain data without allocation, I/O or unsafe code, so that guest drivers, devices
//! and tools that read dumps can use it.
//!
//! - [`units`]: page frame numbers, orders, page ranges.
//! - [`balloon`]: virtio-balloon as in virtio 1.3 section 5.5.
//! - [`migration`]: the data streams of a live migration.

#![no_std]
#![forbid(unsafe_code)]

#[cfg(test)]
extern crate std;

pub mod balloon;
pub mod migration;
pub mod units;

pub use units::{
    HUGE_PAGE_SIZE_BYTES, HUGE_PAGE_SIZE_PAGES, Order, PAGE_SHIFT, PAGE_SIZE_BYTES, PageRange, Pfn,
};
