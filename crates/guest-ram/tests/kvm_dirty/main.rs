//! KVM's logs of dirty pages with a guest that writes to given pages.

#![allow(clippy::unwrap_used, reason = "a test")]

mod bitmap;
mod copy;
mod guest;
mod ring;
