//! A virtual machine in a file.
//!
//! One file holds everything, so that it can be renamed, copied and removed as one thing:
//!
//! | part | where | content |
//! | --- | --- | --- |
//! | header | first page | magic, format version, places and sizes of the other parts, checksums ([`mod@file`]) |
//! | RAM | from 2 MiB on | guest memory by region; what the guest does not use is a hole and costs nothing |
//! | state | behind the RAM | configuration, vCPUs, clocks, devices as one JSON document ([`state`]) |
//!
//! The header is written last, under a temporary name, and the file gets its name when all of it is
//! on the disk: whatever has the name is whole. RAM is read lazily when the machine is restored, so
//! its checksum is only looked at on request.

pub mod config;
mod features;
pub mod file;
pub mod processor;
pub mod state;
#[cfg(test)]
pub(crate) mod tests;

use std::path::PathBuf;

use ebb_guest_ram::RamError;
use thiserror::Error;

use crate::config::ConfigError;

pub use config::{DescribedPaths, MachineConfig, Overrides};
pub use file::{FORMAT_VERSION, SnapshotFile};
pub use state::MachineState;

/// A snapshot could not be written or used.
#[derive(Debug, Error)]
pub enum SnapshotError {
    /// The file cannot be opened or read.
    #[error("cannot read the snapshot {}: {source}; check the path and its permissions", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The system's answer.
        source: std::io::Error,
    },
    /// Something else than a snapshot.
    #[error("{} is not a snapshot of a virtual machine; `ebb ctl SOCKET snapshot FILE` writes one", path.display())]
    NotASnapshot {
        /// The file.
        path: PathBuf,
    },
    /// Written by an incompatible monitor.
    #[error(
        "the snapshot {} has format version {found}, this monitor reads version {FORMAT_VERSION}; restore it with the \
         version of ebb that wrote it, or take a new one",
        path.display()
    )]
    Version {
        /// The file.
        path: PathBuf,
        /// Its version.
        found: u32,
    },
    /// The end is missing.
    #[error("the snapshot {} was cut short: it has {found} of {expected} bytes; copy it again", path.display())]
    Truncated {
        /// The file.
        path: PathBuf,
        /// Bytes it should have.
        expected: u64,
        /// Bytes it has.
        found: u64,
    },
    /// The content is not what was written.
    #[error("the snapshot {} is damaged: {problem}; copy it again or take a new one", path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What does not fit.
        problem: String,
    },
    /// What was said of merging does not go with what the machine has.
    #[error(transparent)]
    Merge(#[from] ConfigError),
    /// The guest runs on another kind of processor.
    #[error(
        "the virtual machine comes from a {saved} processor, this machine has a {host} one; a running guest cannot change \
         that: use a machine like the one it comes from"
    )]
    Vendor {
        /// Vendor in the snapshot.
        saved: String,
        /// Vendor of this machine.
        host: String,
    },
    /// The guest uses what this processor does not have.
    #[error(
        "this machine's processor or its KVM lacks features that the guest was started with: {missing}; use a machine that \
         has them"
    )]
    Processor {
        /// Which, as CPUID leaf, register and bits.
        missing: String,
    },
    /// A device cannot take its state.
    #[error("cannot restore the device {device}: {problem}")]
    Device {
        /// Which.
        device: String,
        /// What does not fit.
        problem: String,
    },
    /// A wrong number of `--disk`.
    #[error(
        "the machine has {saved} disks, --disk was given {given} times; give one for each disk"
    )]
    Disks {
        /// Disks of the machine.
        saved: usize,
        /// Given.
        given: usize,
    },
    /// The description names files of the host on which it was made.
    #[error("this machine's files have to be named here: {0}")]
    PathsNotNamed(String),
    /// Others could change the guest's memory.
    #[error(
        "the snapshot {} {problem}, who could change the guest's memory while it runs: use a copy, correct owner and \
         permissions if nobody else has it open (chown, chmod go-w), or give --trust",
        path.display()
    )]
    Foreign {
        /// The file.
        path: PathBuf,
        /// Who may write to it.
        problem: String,
    },
    /// The name is taken by something precious.
    #[error("{} exists and is not a snapshot, so it is not overwritten; choose another name or remove it", path.display())]
    Exists {
        /// The file.
        path: PathBuf,
    },
    /// A relative path, or one without a file name.
    #[error("the path {:?} is not that of a file, from the root on; give an absolute path", path)]
    Path {
        /// The path.
        path: PathBuf,
    },
    /// The file cannot be made.
    #[error("cannot create the snapshot {}: {source}; check its directory and the permissions", path.display())]
    Create {
        /// The file.
        path: PathBuf,
        /// The system's answer.
        source: std::io::Error,
    },
    /// The file cannot be written.
    #[error("cannot write the snapshot {}: {source}; nothing is left of it and the virtual machine goes on", path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// The system's answer.
        source: std::io::Error,
    },
    /// Guest memory.
    #[error(transparent)]
    Ram(#[from] RamError),
}

/// Reads `bytes` as a snapshot's header and as its state, as far as that goes without a machine:
/// what a fuzzer drives.
#[doc(hidden)]
pub fn fuzz_snapshot(bytes: &[u8]) {
    let path = std::path::Path::new("fuzz");
    if let Ok(header) = file::Header::parse(path, bytes, u64::MAX) {
        assert!(header.state_offset.checked_add(header.state_bytes).is_some());
    }
    if let Ok(mut state) = serde_json::from_slice::<MachineState>(bytes)
        && let ram_bytes = state.machine.memory_bytes
        && state.validate(ram_bytes).is_ok()
    {
        let _ = state.take_ram(ram_bytes);
        let _ = state.processor.to_cpuid();
        let _ = state.processor.check(&state.processor);
        let trusting = Overrides { described_paths: DescribedPaths::Trust, ..Overrides::default() };
        for overrides in [Overrides::default(), trusting] {
            if let Ok(config) = state.machine.clone().into_vm_config(overrides) {
                let _ = config.validate();
            }
        }
    }
}
