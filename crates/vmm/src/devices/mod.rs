//! Devices on the port and memory buses.

pub mod bus;
pub mod console;
pub mod platform;
pub mod serial;
pub mod virtio;
