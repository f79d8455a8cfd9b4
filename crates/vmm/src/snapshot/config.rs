//! What the machine in a snapshot is made of, and what may be different where it is restored.

use std::path::PathBuf;

use ebb_guest_ram::{Backing, HugePages, Populate};
use ebb_kvm_clock::ClockPolicy;
use serde::{Deserialize, Serialize};

use super::SnapshotError;
use crate::api::control::RamBacking;
use crate::config::{
    BalloonDeviceConfig, DiskConfig, MemoryConfig, MergeConfig, MergeOverrides, NumaNodeConfig, RebootAction,
    SerialConfig, Switch, VmConfig,
};
use crate::size::ByteSize;

/// The part of a [`VmConfig`] that belongs to the machine, in a form that stays readable.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MachineConfig {
    /// Kernel image, for reboots.
    pub kernel: PathBuf,
    /// Initial RAM file system, for reboots.
    pub initrd: Option<PathBuf>,
    /// Kernel command line, for reboots.
    pub cmdline: String,
    /// Number of vCPUs.
    pub cpus: u8,
    /// RAM in bytes.
    pub memory_bytes: u64,
    /// What backed it; restored RAM is a private mapping of the snapshot.
    pub backing: RamBacking,
    /// Whether the host may use transparent huge pages.
    pub huge_pages: bool,
    /// Same-page merging. Snapshots without this field are of machines that did not have it.
    #[serde(default, skip_serializing_if = "MergeConfig::is_off")]
    pub merge: MergeConfig,
    /// NUMA nodes.
    pub numa: Vec<NumaNode>,
    /// The balloon device.
    pub balloon: Option<BalloonOptions>,
    /// Disks in order.
    pub disks: Vec<Disk>,
    /// Whether there is an entropy device.
    pub rng: bool,
    /// Whether the guest is started again after a reboot.
    pub restarts: bool,
    /// What the guest's clocks did over pauses.
    pub clock: ClockPolicy,
}

/// A NUMA node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NumaNode {
    /// RAM in bytes.
    pub size_bytes: u64,
    /// vCPUs.
    pub cpus: Vec<u8>,
    /// Host node that the RAM is bound to.
    pub host_node: Option<u32>,
    /// Distances to all nodes.
    pub distances: Option<Vec<u8>>,
}

/// What the balloon device offers. Its sizes are part of its state.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[expect(clippy::struct_excessive_bools, reason = "independent switches of a document")]
pub struct BalloonOptions {
    /// Free page reporting.
    pub reporting: bool,
    /// Free page hinting.
    pub hinting: bool,
    /// Whether the guest may take pages back when it runs out of memory.
    pub deflate_on_oom: bool,
    /// Whether the guest may announce a page poison value.
    pub poison: bool,
    /// The statistics queue.
    pub statistics: bool,
    /// Messages with bitmaps. Snapshots without this field are of machines that did not have them.
    #[serde(default)]
    pub page_bitmap: bool,
    /// Messages with ranges; as above.
    #[serde(default)]
    pub page_ranges: bool,
    /// The queue for requests of the host; as above.
    #[serde(default)]
    pub host_requests: bool,
    /// Whether pages are overwritten before they are discarded; as above.
    #[serde(default)]
    pub verify_reports: bool,
}

/// A disk.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Disk {
    /// Image file or block device.
    pub path: PathBuf,
    /// Whether the guest's writes are refused.
    pub readonly: bool,
}

/// What whoever restores a machine decides.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Overrides {
    /// Where the first serial line goes.
    pub serial: SerialConfig,
    /// Path of the API socket.
    pub api: Option<PathBuf>,
    /// Whether system calls are filtered.
    pub seccomp: Switch,
    /// What the guest's clocks do; as before if `None`.
    pub clock: Option<ClockPolicy>,
    /// What a reboot does; as before if `None`.
    pub on_reboot: Option<RebootAction>,
    /// Other paths of the disks: none, or one for each.
    pub disks: Vec<DiskConfig>,
    /// What is different in merging.
    pub merge: MergeOverrides,
}

impl Default for Overrides {
    fn default() -> Self {
        Self {
            serial: SerialConfig::Stdio,
            api: None,
            seccomp: Switch::On,
            clock: None,
            on_reboot: None,
            disks: Vec::new(),
            merge: MergeOverrides::default(),
        }
    }
}

fn switch(on: bool) -> Switch {
    if on { Switch::On } else { Switch::Off }
}

impl MachineConfig {
    /// What a snapshot of a machine of `config` says of it.
    pub fn of(config: &VmConfig) -> Self {
        Self {
            kernel: config.kernel.clone(),
            initrd: config.initrd.clone(),
            cmdline: config.cmdline.clone(),
            cpus: config.cpus,
            memory_bytes: config.memory.size.bytes(),
            backing: config.memory.backing.into(),
            huge_pages: config.memory.huge_pages == HugePages::On,
            merge: config.memory.merge.clone(),
            numa: config
                .numa
                .iter()
                .map(|node| NumaNode {
                    size_bytes: node.size.bytes(),
                    cpus: node.cpus.clone(),
                    host_node: node.host_node,
                    distances: node.distances.clone(),
                })
                .collect(),
            balloon: config.balloon.as_ref().map(|balloon| BalloonOptions {
                reporting: balloon.reporting.is_on(),
                hinting: balloon.hinting.is_on(),
                deflate_on_oom: balloon.deflate_on_oom.is_on(),
                poison: balloon.poison.is_on(),
                statistics: balloon.statistics.is_on(),
                page_bitmap: balloon.page_bitmap.is_on(),
                page_ranges: balloon.page_ranges.is_on(),
                host_requests: balloon.host_requests.is_on(),
                verify_reports: balloon.verify_reports.is_on(),
            }),
            disks: config
                .disks
                .iter()
                .map(|disk| Disk { path: disk.path.clone(), readonly: disk.readonly.is_on() })
                .collect(),
            rng: config.rng.is_on(),
            restarts: config.on_reboot == RebootAction::Reset,
            clock: config.clock,
        }
    }

    /// The machine where it is restored.
    ///
    /// # Errors
    /// [`SnapshotError::Disks`].
    pub fn into_vm_config(self, overrides: Overrides) -> Result<VmConfig, SnapshotError> {
        if !overrides.disks.is_empty() && overrides.disks.len() != self.disks.len() {
            return Err(SnapshotError::Disks { saved: self.disks.len(), given: overrides.disks.len() });
        }
        let disks = if overrides.disks.is_empty() {
            let disk = |disk: Disk| DiskConfig { path: disk.path, readonly: switch(disk.readonly) };
            self.disks.into_iter().map(disk).collect()
        } else {
            overrides.disks
        };
        let as_before = if self.restarts { RebootAction::Reset } else { RebootAction::Exit };
        Ok(VmConfig {
            kernel: self.kernel,
            initrd: self.initrd,
            cmdline: self.cmdline,
            cpus: self.cpus,
            memory: MemoryConfig {
                size: ByteSize::from_bytes(self.memory_bytes),
                backing: Backing::Anonymous,
                huge_pages: if self.huge_pages { HugePages::On } else { HugePages::Off },
                populate: Populate::Lazy,
                merge: overrides.merge.apply(self.merge)?,
            },
            numa: self
                .numa
                .into_iter()
                .map(|node| NumaNodeConfig {
                    size: ByteSize::from_bytes(node.size_bytes),
                    cpus: node.cpus,
                    host_node: node.host_node,
                    distances: node.distances,
                })
                .collect(),
            balloon: self.balloon.map(|balloon| BalloonDeviceConfig {
                reporting: switch(balloon.reporting),
                hinting: switch(balloon.hinting),
                deflate_on_oom: switch(balloon.deflate_on_oom),
                poison: switch(balloon.poison),
                statistics: switch(balloon.statistics),
                page_bitmap: switch(balloon.page_bitmap),
                page_ranges: switch(balloon.page_ranges),
                host_requests: switch(balloon.host_requests),
                verify_reports: switch(balloon.verify_reports),
                ..BalloonDeviceConfig::default()
            }),
            disks,
            rng: switch(self.rng),
            serial: overrides.serial,
            api: overrides.api,
            seccomp: overrides.seccomp,
            on_reboot: overrides.on_reboot.unwrap_or(as_before),
            clock: overrides.clock.unwrap_or(self.clock),
        })
    }
}
