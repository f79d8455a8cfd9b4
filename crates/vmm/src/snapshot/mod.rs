//! Snapshots: a virtual machine in a file.
//!
//! One file holds everything, so that it can be renamed, copied and removed as a unit:
//!
//! - header: the first page; magic, format version, offsets and sizes of the other parts, checksums
//!   ([`mod@file`])
//! - RAM: from 2 MiB on; guest memory by region, with holes for memory that the guest does not use
//! - state: after the RAM; configuration, vCPUs, clocks, devices as one JSON document ([`state`])
//!
//! A client creates the file without a name and hands it to the monitor ([`take`]). The header is
//! written last, and the client gives the file its name when all of it is on the disk: a file with a
//! name is complete. RAM is read lazily when the machine is restored, so its checksums are only
//! verified on request.

pub mod client;
pub mod config;
mod features;
pub mod file;
pub mod processor;
pub mod state;
#[cfg(test)]
pub(crate) mod tests;
pub mod working_set;

use std::path::PathBuf;

use ebb_guest_ram::RamError;
use thiserror::Error;

use crate::config::ConfigError;

pub use client::{TakeError, take};
pub use config::{DescribedPaths, MachineConfig, Overrides};
pub(crate) use file::MAGIC;
pub use file::{FORMAT_VERSION, SnapshotFile};
pub use state::MachineState;

/// A snapshot could not be written or used.
#[derive(Debug, Error)]
pub enum SnapshotError {
    /// The file cannot be opened or read.
    #[error(
        "cannot read the snapshot {}: {source}; check the path and its permissions",
        path.display()
    )]
    Read {
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: std::io::Error,
    },
    /// The file is not a snapshot.
    #[error(
        "{} is not a snapshot of a virtual machine; `ebb ctl SOCKET snapshot FILE` writes one",
        path.display()
    )]
    NotASnapshot {
        /// The file.
        path: PathBuf,
    },
    /// Written by an incompatible monitor.
    #[error(
        "the snapshot {} has format version {found}, this monitor reads version {FORMAT_VERSION}; \
         restore it with the version of ebb that wrote it, or take a new one",
        path.display()
    )]
    Version {
        /// The file.
        path: PathBuf,
        /// Its version.
        found: u32,
    },
    /// The file is truncated.
    #[error(
        "the snapshot {} was cut short: it has {found} of {expected} bytes; copy it again",
        path.display()
    )]
    Truncated {
        /// The file.
        path: PathBuf,
        /// Bytes it should have.
        expected: u64,
        /// Bytes it has.
        found: u64,
    },
    /// Not the file of a working set, or that of another snapshot.
    #[error(
        "the working set {}: {problem}; record it again with `ebb ctl SOCKET working-set FILE`, or \
         omit the option",
        path.display()
    )]
    WorkingSet {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        problem: String,
    },
    /// The content differs from what was written.
    #[error(
        "the snapshot {} is damaged: {problem}; copy it again or take a new one",
        path.display()
    )]
    Damaged {
        /// The file.
        path: PathBuf,
        /// The inconsistency.
        problem: String,
    },
    /// The merging options contradict those of the machine.
    #[error(transparent)]
    Merge(#[from] ConfigError),
    /// The guest runs on a processor of another vendor.
    #[error(
        "the virtual machine comes from a {saved} processor, this machine has a {host} one; \
         a running guest cannot change that: use a machine like the one it comes from"
    )]
    Vendor {
        /// Vendor in the snapshot.
        saved: String,
        /// Vendor of this machine.
        host: String,
    },
    /// The guest uses features that this processor lacks.
    #[error(
        "this machine's processor or its KVM lacks features that the guest was started with: \
         {missing}; use a machine that has them"
    )]
    Processor {
        /// The missing features, as CPUID leaf, register and bits.
        missing: String,
    },
    /// A device cannot restore its state.
    #[error("cannot restore the device {device}: {problem}")]
    Device {
        /// The device.
        device: String,
        /// The mismatch.
        problem: String,
    },
    /// Wrong number of `--disk` options.
    #[error(
        "the machine has {saved} disks, --disk was given {given} times; give one for each disk"
    )]
    Disks {
        /// Disks of the machine.
        saved: usize,
        /// Number of options given.
        given: usize,
    },
    /// Wrong number of `--net` options.
    #[error(
        "the machine has {saved} network devices, --net was given {given} times; give one for each \
         device"
    )]
    Nets {
        /// Network devices of the machine.
        saved: usize,
        /// Number of options given.
        given: usize,
    },
    /// A network device would change for the guest.
    #[error(
        "the network device {index} announces the MTU {saved} to the guest, which cannot change: \
         omit mtu"
    )]
    Mtu {
        /// The device.
        index: usize,
        /// Its MTU, or "none".
        saved: String,
    },
    /// The command line names the socket of a device that the machine does not have.
    #[error("--vsock: the machine has no socket device; omit the option")]
    NoVsock,
    /// The description names files of the host where it was made.
    #[error("the machine's files must be named for this host: {0}")]
    PathsNotNamed(String),
    /// A disk is not as it was.
    #[error(
        "the disk {} is not as it was when the snapshot was taken, and the guest would damage its \
         file systems: use an image from that moment (copy it with cp --preserve=timestamps), or \
         give --accept-changed-disks",
        path.display()
    )]
    DiskChanged {
        /// Its image.
        path: PathBuf,
    },
    /// Other users could change the guest's memory.
    #[error(
        "the snapshot {} {problem}, who could change the guest's memory while it runs: use a copy, \
         correct owner and permissions if no other process has it open (chown, chmod go-w), \
         or give --trust",
        path.display()
    )]
    Foreign {
        /// The file.
        path: PathBuf,
        /// The users who may write to it.
        problem: String,
    },
    /// Another file has the name.
    #[error(
        "{} exists and is not a snapshot, so it is not overwritten; \
         choose another name or remove it",
        path.display()
    )]
    Exists {
        /// The file.
        path: PathBuf,
    },
    /// A relative path, or one without a file name.
    #[error("the path {path:?} is not an absolute path of a file; give one")]
    Path {
        /// The path.
        path: PathBuf,
    },
    /// The file cannot be created.
    #[error(
        "cannot create the snapshot {}: {source}; check its directory and the permissions",
        path.display()
    )]
    Create {
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: std::io::Error,
    },
    /// The file cannot be given its name.
    #[error(
        "cannot give the snapshot its name {}: {source}; it was removed; check the directory, and \
         that /proc is mounted",
        path.display()
    )]
    Name {
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: std::io::Error,
    },
    /// The client's file is of the wrong kind.
    #[error(
        "the file for the snapshot {} {problem}; pass an empty regular file that is open for \
         writing",
        path.display()
    )]
    Target {
        /// Its name.
        path: PathBuf,
        /// What is wrong with it.
        problem: String,
    },
    /// The file cannot be written.
    #[error("cannot write the snapshot {}: {source}; the virtual machine continues", path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: std::io::Error,
    },
    /// Reading or writing guest memory failed.
    #[error(transparent)]
    Ram(#[from] RamError),
}

/// Parses `bytes` as the header and as the state of a snapshot, as far as possible without a
/// machine: entry point for fuzzing.
#[doc(hidden)]
pub fn fuzz_snapshot(bytes: &[u8]) {
    let path = std::path::Path::new("fuzz");
    if let Ok(header) = file::Header::parse(path, bytes, u64::MAX) {
        assert!(header.state_offset.checked_add(header.state_bytes).is_some());
    }
    working_set::fuzz(bytes);
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
