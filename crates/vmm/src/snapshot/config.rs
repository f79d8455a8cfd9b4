//! Configuration of the machine in a snapshot, and what may differ where it is restored.

use std::path::{Path, PathBuf};

use ebb_guest_ram::{Backing, HugePages, Populate};
use ebb_kvm_clock::ClockPolicy;
use serde::{Deserialize, Serialize};

use super::SnapshotError;
use crate::config::{
    BalloonDeviceConfig, BootFiles, DiskConfig, MemoryConfig, MergeConfig, MergeOverrides,
    NetBackend, NetConfig, NumaNodeConfig, RateLimits, RebootAction, SerialConfig, Switch,
    VmConfig, VsockConfig, VsockOption,
};
use crate::isolation::IsolationConfig;
use crate::size::ByteSize;
use crate::words::to_word;

/// The part of a [`VmConfig`] that belongs to the machine, in a stable readable form.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MachineConfig {
    /// Kernel image, for reboots. `None` if a reboot ends the machine and it has no kernel.
    #[serde(default)]
    pub kernel: Option<PathBuf>,
    /// Initial RAM file system, for reboots.
    #[serde(default)]
    pub initrd: Option<PathBuf>,
    /// Kernel command line, for reboots.
    pub cmdline: String,
    /// Number of vCPUs.
    pub cpus: u8,
    /// RAM in bytes.
    pub memory_bytes: u64,
    /// Backing of the RAM; restored RAM is a private mapping of the snapshot.
    pub backing: Backing,
    /// Whether the host may use transparent huge pages.
    pub huge_pages: bool,
    /// Same-page merging. Snapshots without this field are of machines without merging.
    #[serde(default, skip_serializing_if = "MergeConfig::is_off")]
    pub merge: MergeConfig,
    /// NUMA nodes.
    pub numa: Vec<NumaNodeConfig>,
    /// The balloon device.
    pub balloon: Option<BalloonDeviceConfig>,
    /// Disks in order.
    pub disks: Vec<DiskConfig>,
    /// Whether there is an entropy device.
    pub rng: bool,
    /// Network devices in order. Snapshots without this field are of machines without any.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub nets: Vec<NetConfig>,
    /// The socket device. Older snapshots have none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vsock: Option<VsockConfig>,
    /// Whether the guest boots again after a reboot.
    pub restarts: bool,
    /// Behaviour of the guest's clocks across pauses.
    pub clock: ClockPolicy,
}

/// Handling of the paths in a snapshot or in another monitor's description of a machine. Their
/// author is not the user who restores or receives the machine, and must not choose files that are
/// opened with that user's rights.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum DescribedPaths {
    /// No path is opened, and no trust domain or broker of merging is joined.
    #[default]
    Ignore,
    /// The paths are used as if they were given on the command line.
    Trust,
}

/// Settings made where a machine continues, from a snapshot or from another monitor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Overrides {
    /// Backend of the first serial line.
    pub serial: SerialConfig,
    /// Path of the API socket.
    pub api: Option<PathBuf>,
    /// Whether system calls are filtered.
    pub seccomp: Switch,
    /// The rights that the monitor gives up.
    pub isolation: IsolationConfig,
    /// Behaviour of the guest's clocks; `None` keeps the saved one.
    pub clock: Option<ClockPolicy>,
    /// Whether checkpoints of the machine may be kept in memory.
    pub forkable: Switch,
    /// Action on a reboot; `None` keeps the saved one.
    pub on_reboot: Option<RebootAction>,
    /// Kernel and initrd for reboots.
    pub boot: Option<BootFiles>,
    /// Images of the disks: none, or one for each.
    pub disks: Vec<DiskConfig>,
    /// Limits of the entropy device; those of disks are in `disks`.
    pub rng_limits: RateLimits,
    /// Backends of the network devices: none, or one for each, with a new address where one is
    /// given.
    pub nets: Vec<NetConfig>,
    /// The socket of the socket device, and its CID if that changes.
    pub vsock: Option<VsockOption>,
    /// Same-page merging.
    pub merge: MergeOverrides,
    /// Handling of paths that are not given here.
    pub described_paths: DescribedPaths,
}

impl Default for Overrides {
    fn default() -> Self {
        Self {
            serial: SerialConfig::Stdio,
            api: None,
            seccomp: Switch::On,
            isolation: IsolationConfig::default(),
            clock: None,
            forkable: Switch::Off,
            on_reboot: None,
            boot: None,
            disks: Vec::new(),
            rng_limits: RateLimits::default(),
            nets: Vec::new(),
            vsock: None,
            merge: MergeOverrides::default(),
            described_paths: DescribedPaths::default(),
        }
    }
}

impl MachineConfig {
    /// Describes a machine with this configuration for a snapshot.
    pub fn of(config: &VmConfig) -> Self {
        Self {
            kernel: config.boot.as_ref().map(|boot| boot.kernel.clone()),
            initrd: config.boot.as_ref().and_then(|boot| boot.initrd.clone()),
            cmdline: config.cmdline.clone(),
            cpus: config.cpus,
            memory_bytes: config.memory.size.bytes(),
            backing: config.memory.backing,
            huge_pages: config.memory.huge_pages == HugePages::On,
            merge: config.memory.merge.clone(),
            numa: config.numa.clone(),
            balloon: config.balloon.as_ref().map(|balloon| BalloonDeviceConfig {
                size: ByteSize::default(),
                statistics_interval: None,
                ..balloon.clone()
            }),
            disks: config.disks.clone(),
            rng: config.rng.is_some(),
            nets: config.nets.clone(),
            vsock: config.vsock.clone(),
            restarts: config.on_reboot == RebootAction::Reset,
            clock: config.clock,
        }
    }

    /// Configuration of the restored or received machine. Names of files, trust domains and sockets
    /// of this host come from `overrides`, unless those declare the description trusted.
    ///
    /// # Errors
    /// [`SnapshotError::Disks`], [`SnapshotError::Nets`], [`SnapshotError::Mtu`],
    /// [`SnapshotError::NoVsock`], [`SnapshotError::PathsNotNamed`], [`SnapshotError::Merge`].
    pub fn into_vm_config(mut self, overrides: Overrides) -> Result<VmConfig, SnapshotError> {
        let (saved, given) = (self.disks.len(), overrides.disks.len());
        if given != 0 && given != saved {
            return Err(SnapshotError::Disks { saved, given });
        }
        if overrides.vsock.is_some() && self.vsock.is_none() {
            return Err(SnapshotError::NoVsock);
        }
        let as_before = if self.restarts { RebootAction::Reset } else { RebootAction::Exit };
        let on_reboot = overrides.on_reboot.unwrap_or(as_before);
        let trusted = overrides.described_paths == DescribedPaths::Trust;
        let boot = overrides.boot.or_else(|| {
            let kernel = self.kernel.clone().filter(|_| trusted)?;
            Some(BootFiles { kernel, initrd: self.initrd.clone() })
        });
        let not_named = NotNamed {
            kernel: boot.is_none() && on_reboot == RebootAction::Reset,
            disks: given == 0 && saved != 0 && !trusted,
            nets: overrides.nets.is_empty() && !self.nets.is_empty() && !trusted,
            vsock: overrides.vsock.is_none() && self.vsock.is_some() && !trusted,
        };
        if not_named != NotNamed::default() {
            let missing = self.paths_not_named(&not_named);
            return Err(SnapshotError::PathsNotNamed(missing));
        }
        let nets = nets_of(self.nets, overrides.nets)?;
        if !trusted {
            let merge = std::mem::take(&mut self.merge);
            if !merge.is_off() && overrides.merge.backend.is_none() {
                tracing::warn!(
                    "pages of this machine were merged (merge={}) but are not merged here: \
                     --memory merge=… sets how they are merged",
                    to_word(merge.backend)
                );
            }
        }
        let mut disks = overrides.disks;
        if disks.is_empty() {
            disks = self.disks;
        } else {
            // The guest knows this disk as read-only.
            for (disk, described) in disks.iter_mut().zip(&self.disks) {
                if described.readonly.is_on() {
                    disk.readonly = Switch::On;
                }
            }
        }
        Ok(VmConfig {
            boot,
            cmdline: self.cmdline,
            cpus: self.cpus,
            memory: MemoryConfig {
                size: ByteSize::from_bytes(self.memory_bytes),
                backing: Backing::Anonymous,
                huge_pages: if self.huge_pages { HugePages::On } else { HugePages::Off },
                populate: Populate::Lazy,
                merge: overrides.merge.apply(self.merge)?,
            },
            numa: self.numa,
            balloon: self.balloon,
            disks,
            rng: self.rng.then_some(overrides.rng_limits),
            nets,
            vsock: self.vsock.map(|described| match overrides.vsock {
                Some(given) => given.with_default_cid(described.cid),
                None => described,
            }),
            serial: overrides.serial,
            api: overrides.api,
            seccomp: overrides.seccomp,
            isolation: overrides.isolation,
            on_reboot,
            clock: overrides.clock.unwrap_or(self.clock),
            forkable: overrides.forkable,
        })
    }

    /// The described files that the command line does not override, for an error message.
    fn paths_not_named(&self, not_named: &NotNamed) -> String {
        const MOST_DISKS: usize = 4;
        let mut files = Vec::new();
        let mut options = Vec::new();
        if not_named.kernel {
            let kernel = self.kernel.as_deref().map_or_else(|| "(unknown)".to_owned(), quoted);
            files.push(format!("the kernel {kernel} for reboots"));
            files.extend(self.initrd.iter().map(|initrd| format!("the initrd {}", quoted(initrd))));
            options.push("--kernel FILE [--initrd FILE], or --on-reboot exit".to_owned());
        }
        if not_named.disks {
            let shown = self.disks.iter().take(MOST_DISKS);
            files.extend(shown.map(|disk| format!("the disk {}", quoted(disk.top()))));
            let more = self.disks.len().saturating_sub(MOST_DISKS);
            files.extend((more > 0).then(|| format!("{more} more disks")));
            options.push(format!(
                "--disk path=FILE for each of its {} disks, in their order",
                self.disks.len()
            ));
        }
        if not_named.nets {
            files.push(format!("{} network interfaces", self.nets.len()));
            options.push(format!(
                "--net tap=NAME or --net user for each of its {} network devices, in their order",
                self.nets.len()
            ));
        }
        if let Some(vsock) = self.vsock.as_ref().filter(|_| not_named.vsock) {
            files.push(format!("the vsock socket {}", quoted(&vsock.path)));
            options.push("--vsock path=PATH".to_owned());
        }
        let (files, options) = (files.join(", "), options.join("; "));
        format!(
            "it uses {files}, and paths in a snapshot or from another monitor are not opened; \
             name the files of this host: {options}; or give --trust-paths to open those"
        )
    }
}

/// What the command line does not name.
#[derive(Debug, Default, PartialEq, Eq)]
struct NotNamed {
    kernel: bool,
    disks: bool,
    nets: bool,
    vsock: bool,
}

/// The network devices with the backends that are given here: the guest keeps their MTU, and their
/// addresses unless others are given.
fn nets_of(saved: Vec<NetConfig>, given: Vec<NetConfig>) -> Result<Vec<NetConfig>, SnapshotError> {
    if given.is_empty() {
        let is_descriptor = |net: &NetConfig| matches!(net.backend, NetBackend::Descriptor(_));
        if saved.iter().any(is_descriptor) {
            // The number means something else in this process.
            return Err(SnapshotError::Nets { saved: saved.len(), given: 0 });
        }
        return Ok(saved);
    }
    if given.len() != saved.len() {
        return Err(SnapshotError::Nets { saved: saved.len(), given: given.len() });
    }
    let mut nets = given;
    for (index, (net, saved)) in nets.iter_mut().zip(saved).enumerate() {
        if net.mtu.is_some() && net.mtu != saved.mtu {
            let saved = saved.mtu.map_or_else(|| "none".to_owned(), |mtu| mtu.to_string());
            return Err(SnapshotError::Mtu { index, saved });
        }
        net.mtu = saved.mtu;
        net.mac = net.mac.or(saved.mac);
    }
    Ok(nets)
}

/// A path of the description for a message: of limited length and without control characters.
fn quoted(path: &Path) -> String {
    const MOST_CHARACTERS: usize = 120;
    let text = path.to_string_lossy();
    let cut: String = text.chars().take(MOST_CHARACTERS).collect();
    if cut.len() < text.len() { format!("{cut:?}…") } else { format!("{cut:?}") }
}
