//! Wire formats shared by host and guest, and the units of guest memory.
//!
//! Everything here is plain data: no allocation, no I/O, no unsafe code, so that a guest driver, a
//! device and a tool that reads a dump can all use it.
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
