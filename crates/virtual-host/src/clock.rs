//! A slower clock for QEMU; `plugin/clock.c` says what it is for.

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::AsRawFd;
use std::process::Command;

use crate::error::HostError;
use crate::initramfs::memory_file;

/// The compiled `plugin/clock.c`.
const LIBRARY: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/clock.so"));
/// Its environment variable.
const DIVISOR: &str = "EBB_CLOCK_DIVISOR";

/// The library and its divisor.
#[derive(Debug)]
pub struct SlowClock {
    /// The library, which the emulator inherits.
    pub library: File,
    divisor: u32,
}

impl SlowClock {
    /// `None` for the divisor 1, with which the clock is the usual one.
    pub fn new(divisor: u32) -> Result<Option<Self>, HostError> {
        if divisor <= 1 {
            return Ok(None);
        }
        let failed = |error: io::Error| HostError::io("cannot prepare the slow clock")(error);
        let mut library = memory_file("ebb-clock")?;
        library.write_all(LIBRARY).map_err(failed)?;
        Ok(Some(Self { library, divisor }))
    }

    /// Has `command` start with this clock.
    pub fn set(&self, command: &mut Command) {
        command.env("LD_PRELOAD", format!("/proc/self/fd/{}", self.library.as_raw_fd()));
        command.env(DIVISOR, self.divisor.to_string());
    }
}
