//! Configuration of a virtual machine.
//!
//! The types here are plain values. [`VmConfig::validate`] checks them against each other before
//! anything is opened, mapped or started, so that an invalid request costs nothing. [`options`]
//! parses them from `key=value` text.

pub mod limits;
pub mod merge;
pub mod net;
pub mod options;
pub mod vsock;

use std::path::{Path, PathBuf};
use std::time::Duration;

use ebb_guest_ram::{HugePages, Populate};
use ebb_kvm_clock::ClockPolicy;
use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::isolation::IsolationConfig;
use crate::size::ByteSize;

pub use ebb_guest_ram::Backing;
pub use limits::RateLimits;
pub use merge::{MergeBackend, MergeConfig, MergeOverrides};
pub use net::{MacAddress, NetBackend, NetConfig};
pub use vsock::{VsockConfig, VsockOption};

/// The smallest guest RAM, in bytes.
pub const MIN_MEMORY_BYTES: u64 = 16 << 20;
/// Granularity of guest RAM and of NUMA nodes, in bytes: one huge page, so that no huge page
/// belongs to two nodes.
pub const MEMORY_ALIGNMENT_BYTES: u64 = 2 << 20;
/// Most vCPUs of a guest: local APIC ids are 8 bits wide in the MADT entries and 255 is the
/// broadcast id.
pub const MAX_VCPUS: u8 = 254;

/// A request that contradicts itself or that this monitor does not support.
#[derive(Debug, Error, PartialEq, Eq)]
#[error("{option}: {problem}; {remedy}")]
pub struct ConfigError {
    /// The option as written on the command line, for example `--memory`.
    pub option: String,
    /// What is wrong.
    pub problem: String,
    /// What to do about it.
    pub remedy: String,
}

impl ConfigError {
    pub(crate) fn new(option: &str, problem: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self { option: option.to_owned(), problem: problem.into(), remedy: remedy.into() }
    }
}

/// Configuration of a whole virtual machine.
#[derive(Debug, Clone)]
pub struct VmConfig {
    /// Files that the guest boots from; `None` for a continued guest whose reboot ends the monitor.
    pub boot: Option<BootFiles>,
    /// Kernel command line.
    pub cmdline: String,
    /// Number of vCPUs.
    pub cpus: u8,
    /// Guest RAM.
    pub memory: MemoryConfig,
    /// Guest NUMA nodes; empty for a guest without NUMA tables.
    pub numa: Vec<NumaNodeConfig>,
    /// The balloon device; `None` leaves it out.
    pub balloon: Option<BalloonDeviceConfig>,
    /// Block devices in the order in which the guest sees them.
    pub disks: Vec<DiskConfig>,
    /// The entropy device with its limits; `None` leaves it out.
    pub rng: Option<RateLimits>,
    /// Network devices in the order in which the guest sees them.
    pub nets: Vec<NetConfig>,
    /// The socket device; `None` leaves it out.
    pub vsock: Option<VsockConfig>,
    /// Backend of the guest's first serial line.
    pub serial: SerialConfig,
    /// Path of the API socket.
    pub api: Option<PathBuf>,
    /// Whether system calls are filtered.
    pub seccomp: Switch,
    /// The rights that the monitor gives up.
    pub isolation: IsolationConfig,
    /// Action on a reboot of the guest.
    pub on_reboot: RebootAction,
    /// Behaviour of the guest's clocks across pauses and snapshots.
    pub clock: ClockPolicy,
    /// Whether checkpoints of the machine may be kept in memory, for forks.
    pub forkable: Switch,
}

/// Files that a guest boots from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BootFiles {
    /// bzImage, or ELF vmlinux (entered through its PVH note where it has one).
    pub kernel: PathBuf,
    /// Initial RAM file system.
    pub initrd: Option<PathBuf>,
}

/// On or off.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Switch {
    /// The feature is in use.
    On,
    /// The feature is not in use.
    #[default]
    Off,
}

impl Switch {
    /// On for `true`.
    pub fn from_bool(on: bool) -> Self {
        if on { Self::On } else { Self::Off }
    }

    /// `true` for [`Switch::On`].
    pub fn is_on(self) -> bool {
        self == Self::On
    }
}

/// A [`Switch`] in descriptions of machines: `true` or `false`.
mod as_bool {
    use serde::{Deserialize, Deserializer, Serializer};

    use super::Switch;

    #[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes references")]
    pub(super) fn serialize<S: Serializer>(switch: &Switch, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_bool(switch.is_on())
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Switch, D::Error> {
        bool::deserialize(from).map(Switch::from_bool)
    }
}

/// Guest RAM.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MemoryConfig {
    /// Size in bytes.
    pub size: ByteSize,
    /// The host memory behind it.
    pub backing: Backing,
    /// Transparent huge pages; ignored for [`Backing::Hugetlb2M`].
    pub huge_pages: HugePages,
    /// Whether the host allocates all of it before the guest starts.
    pub populate: Populate,
    /// Same-page merging.
    pub merge: MergeConfig,
}

/// One NUMA node of the guest.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NumaNodeConfig {
    /// RAM of the node, in bytes.
    #[serde(rename = "size_bytes")]
    pub size: ByteSize,
    /// vCPUs of the node.
    pub cpus: Vec<u8>,
    /// Host node that the RAM is bound to; `None` leaves the placement to the host.
    pub host_node: Option<u32>,
    /// Distance to every node in order, this one included (10); `None` means 10 to itself and 20 to
    /// the others.
    pub distances: Option<Vec<u8>>,
}

/// The balloon device (virtio 1.3 section 5.5). Its sizes are part of its state and not of the
/// machine's description; a feature that a description omits was not present.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BalloonDeviceConfig {
    /// Initial target size of the balloon, in bytes.
    #[serde(skip)]
    pub size: ByteSize,
    /// Free page reporting.
    #[serde(with = "as_bool")]
    pub reporting: Switch,
    /// Free page hinting.
    #[serde(with = "as_bool")]
    pub hinting: Switch,
    /// Whether the guest may deflate the balloon when it runs out of memory.
    #[serde(with = "as_bool")]
    pub deflate_on_oom: Switch,
    /// Whether the guest may announce a page poison value.
    #[serde(with = "as_bool")]
    pub poison: Switch,
    /// The statistics queue.
    #[serde(with = "as_bool")]
    pub statistics: Switch,
    /// Messages of the extension (docs/extension.md) that name pages by bitmaps.
    #[serde(default, with = "as_bool")]
    pub page_bitmap: Switch,
    /// Messages of the extension that name pages by ranges.
    #[serde(default, with = "as_bool")]
    pub page_ranges: Switch,
    /// The extension's queue on which the host asks for free pages.
    #[serde(default, with = "as_bool")]
    pub host_requests: Switch,
    /// Answers that let the guest take reported pages for zero (docs/zeroed-pages.md).
    #[serde(default, with = "as_bool")]
    pub init_reported: Switch,
    /// Answers that let the guest take pages of the balloon for zero.
    #[serde(default, with = "as_bool")]
    pub init_on_inflate: Switch,
    /// Whether pages that the guest reports or inflates are overwritten before they are discarded:
    /// a slow check of guests.
    #[serde(default, with = "as_bool")]
    pub verify_reports: Switch,
    /// Interval of requests for statistics; `None`: only on demand.
    #[serde(skip)]
    pub statistics_interval: Option<Duration>,
}

impl Default for BalloonDeviceConfig {
    fn default() -> Self {
        Self {
            size: ByteSize::from_bytes(0),
            reporting: Switch::On,
            hinting: Switch::On,
            deflate_on_oom: Switch::On,
            poison: Switch::On,
            statistics: Switch::On,
            // A driver without the extension does not accept it and finds the standard device.
            page_bitmap: Switch::On,
            page_ranges: Switch::On,
            host_requests: Switch::On,
            // Proposed for the specification, and not yet part of it.
            init_reported: Switch::Off,
            init_on_inflate: Switch::Off,
            verify_reports: Switch::Off,
            statistics_interval: None,
        }
    }
}

/// Format of a disk's image. It is never guessed: a guest could write the beginning of another
/// format into its raw disk.
#[derive(
    Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema,
)]
#[serde(rename_all = "snake_case")]
pub enum DiskFormat {
    /// The disk's content.
    #[default]
    Raw,
    /// QEMU's format, with tables of the parts that exist.
    Qcow2,
}

/// A disk.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiskConfig {
    /// Image file or block device.
    pub path: PathBuf,
    /// Refuse the guest's writes.
    #[serde(with = "as_bool")]
    pub readonly: Switch,
    /// Format of the image.
    #[serde(default)]
    pub format: DiskFormat,
    /// An image in the format qcow2 that takes the guest's writes; the image at `path` is then only
    /// read, and can be the base of others.
    #[serde(default)]
    pub overlay: Option<PathBuf>,
    /// Bypass the host's page cache. Like the limits, a matter of the host of the moment.
    #[serde(skip)]
    pub direct: Switch,
    /// Limits of its requests, which the host of the moment sets: not part of the machine's
    /// description.
    #[serde(skip)]
    pub limits: RateLimits,
}

impl DiskConfig {
    /// The file that the guest's writes go to.
    pub fn top(&self) -> &Path {
        self.overlay.as_deref().unwrap_or(&self.path)
    }
}

/// Backend of the guest's first serial line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SerialConfig {
    /// Standard input and output as they are, for programs.
    Stdio,
    /// The terminal on standard input and output, in raw mode until the monitor ends.
    Tty,
    /// Output to files, no input.
    File {
        /// The file, beside which there is another one with `.1` appended.
        path: PathBuf,
        /// Size of each of the two, which take turns.
        max: ByteSize,
        /// Limits of the output. What comes faster for longer than the backlog lasts is dropped.
        limits: RateLimits,
    },
    /// No input, and output is discarded.
    Null,
}

/// Action on a reboot of the guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RebootAction {
    /// The guest boots again in the same process; its memory is discarded first.
    #[default]
    Reset,
    /// The monitor exits with the exit code for a reboot.
    Exit,
}

impl VmConfig {
    /// Makes the paths of a machine's files absolute, for those who read its description elsewhere.
    ///
    /// # Errors
    /// The working directory is unknown.
    pub fn make_paths_absolute(&mut self) -> std::io::Result<()> {
        let boot = self.boot.iter_mut();
        let boot = boot.flat_map(|boot| [&mut boot.kernel].into_iter().chain(&mut boot.initrd));
        let disks = self.disks.iter_mut();
        let disks = disks.flat_map(|disk| [&mut disk.path].into_iter().chain(&mut disk.overlay));
        let vsock = self.vsock.iter_mut().map(|vsock| &mut vsock.path);
        for path in boot.chain(disks).chain(vsock).chain(&mut self.memory.merge.broker) {
            *path = std::path::absolute(&*path)?;
        }
        Ok(())
    }

    /// Refuses memory that a forked process would not have a copy of, and services whose secrets it
    /// would inherit.
    fn check_forkable(&self) -> Result<(), ConfigError> {
        let (problem, remedy) = if self.memory.backing != Backing::Anonymous {
            ("memory in a file has no copy in a fork: both would write to it", "leave out backing=")
        } else if self.memory.merge.backend == MergeBackend::Owner {
            (
                "a machine whose monitor merges its pages cannot be forked",
                "leave out merge=owner, and let its forks merge: ebb fork … --memory merge=owner",
            )
        } else if self.nets.iter().any(|net| net.metadata.is_some()) {
            (
                "session tokens of its metadata service would be valid in each of its forks",
                "leave out the metadata",
            )
        } else {
            return Ok(());
        };
        Err(ConfigError::new("--forkable", problem, remedy))
    }

    /// Checks for contradictions. Files are not opened.
    pub fn validate(&self) -> Result<(), ConfigError> {
        let size = self.memory.size.bytes();
        if size < MIN_MEMORY_BYTES {
            return Err(ConfigError::new(
                "--memory",
                format!("size={} is too little for a Linux guest", self.memory.size),
                format!("give at least {}", ByteSize::from_bytes(MIN_MEMORY_BYTES)),
            ));
        }
        check_alignment("--memory", self.memory.size)?;
        self.memory.merge.validate()?;
        if self.forkable.is_on() {
            self.check_forkable()?;
        }
        self.vsock.iter().try_for_each(VsockConfig::validate)?;
        if self.cpus == 0 || self.cpus > MAX_VCPUS {
            return Err(ConfigError::new(
                "--cpus",
                format!("{} vCPUs are not possible", self.cpus),
                format!("give a number from 1 to {MAX_VCPUS}"),
            ));
        }
        if self.cmdline.contains('\0') {
            return Err(ConfigError::new("--cmdline", "it contains a NUL character", "remove it"));
        }
        net::validate(&self.nets)?;
        if let Some(balloon) = &self.balloon
            && balloon.size.bytes() > size
        {
            return Err(ConfigError::new(
                "--balloon",
                format!(
                    "size={} is larger than the guest's RAM of {}",
                    balloon.size, self.memory.size
                ),
                "give a smaller balloon or more --memory",
            ));
        }
        self.validate_numa()
    }

    fn validate_numa(&self) -> Result<(), ConfigError> {
        if self.numa.is_empty() {
            return Ok(());
        }
        let error =
            |problem: String, remedy: &str| Err(ConfigError::new("--numa", problem, remedy));
        let mut total = 0u64;
        let mut owner = vec![None; usize::from(self.cpus)];
        for (node, config) in self.numa.iter().enumerate() {
            check_alignment("--numa", config.size)?;
            if config.size.bytes() == 0 {
                return error(
                    format!("node {node} has no memory"),
                    "give each node a size above zero",
                );
            }
            total = total.saturating_add(config.size.bytes());
            for &cpu in &config.cpus {
                match owner.get_mut(usize::from(cpu)) {
                    None => {
                        return error(
                            format!(
                                "node {node} names vCPU {cpu}, but the guest has {} vCPUs",
                                self.cpus
                            ),
                            "number vCPUs from 0, or raise --cpus",
                        );
                    }
                    Some(Some(first)) => {
                        return error(
                            format!("vCPU {cpu} is in node {first} and in node {node}"),
                            "name each vCPU in one node only",
                        );
                    }
                    Some(slot) => *slot = Some(node),
                }
            }
            if let Some(distances) = &config.distances {
                if distances.len() != self.numa.len() {
                    return error(
                        format!(
                            "node {node} has {} distances for {} nodes",
                            distances.len(),
                            self.numa.len()
                        ),
                        "give one distance for each node, itself included",
                    );
                }
                for (other, &distance) in distances.iter().enumerate() {
                    if (other == node) != (distance == 10) || distance < 10 {
                        return error(
                            format!("distance {distance} from node {node} to node {other}"),
                            "use 10 for the node itself and 11 to 254 for others",
                        );
                    }
                }
            }
        }
        if let Some(cpu) = owner.iter().position(Option::is_none) {
            return error(format!("vCPU {cpu} is in no node"), "name each vCPU in one node");
        }
        if total != self.memory.size.bytes() {
            return error(
                format!(
                    "the nodes have {} together, the guest has {}",
                    ByteSize::from_bytes(total),
                    self.memory.size
                ),
                "make both equal",
            );
        }
        Ok(())
    }
}

fn check_alignment(option: &str, size: ByteSize) -> Result<(), ConfigError> {
    if size.bytes().is_multiple_of(MEMORY_ALIGNMENT_BYTES) {
        return Ok(());
    }
    Err(ConfigError::new(
        option,
        format!(
            "size={size} is not a multiple of {}",
            ByteSize::from_bytes(MEMORY_ALIGNMENT_BYTES)
        ),
        format!(
            "use {} for example",
            ByteSize::from_bytes(
                size.bytes().next_multiple_of(MEMORY_ALIGNMENT_BYTES).max(MIN_MEMORY_BYTES)
            )
        ),
    ))
}

#[cfg(test)]
mod tests;
