//! What clients, checkpoints and forked machines say, in [packets](crate::packet).

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::config::{
    DiskConfig, DiskFormat, MacAddress, MergeBackend, MergeConfig, NetConfig, RateLimits, Switch,
};

/// Files of /proc/PID that a monitor reads about itself. A forked machine's monitor cannot open its
/// own: the client does.
pub(crate) const OWN_FILES: [&str; 6] =
    ["statm", "pagemap", "numa_maps", "smaps", "ksm_merging_pages", "maps"];

/// What a client may ask a checkpoint for.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub(crate) enum Request {
    /// Describe yourself.
    Info,
    /// Make a machine. The descriptors are, in this order: a packet socket over which the machine's
    /// monitor reports its [`Stage`]s, its standard error, then those of the [`ForkRequest`].
    Fork(Box<ForkRequest>),
    /// Pass the copies of the disks.
    Disks,
    /// End. Machines that were made go on.
    End,
}

/// The answer of a checkpoint.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub(crate) enum Answer {
    /// To [`Request::Info`].
    Info(CheckpointInfo),
    /// To [`Request::Disks`]: for each disk the format of its image's copy, if there is one. The
    /// copies follow as descriptors.
    Disks { formats: Vec<Option<DiskFormat>> },
    /// The request is carried out.
    Done,
    /// It is not.
    Refused {
        /// Why not.
        error: String,
    },
}

/// A checkpoint in memory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CheckpointInfo {
    /// Its name.
    pub name: String,
    /// The checkpoint that the machine was forked from, if it was.
    pub parent: Option<String>,
    /// When it was made, in milliseconds since 1970.
    pub created_unix_ms: u64,
    /// Size of the guest's memory, in bytes.
    pub memory_bytes: u64,
    /// Number of the guest's disks: each machine needs as many.
    pub disks: usize,
    /// Addresses of its network devices: each machine needs as many devices.
    pub macs: Vec<MacAddress>,
    /// Whether it has a socket device.
    pub vsock: bool,
    /// Whether the guest has a driver for that.
    pub vsock_driver: bool,
    /// How equal pages of its memory are merged.
    pub merge: MergeBackend,
    /// Machines that were forked from it.
    pub forks: u64,
}

/// What a new machine does not have in common with its checkpoint. Its descriptors follow in the
/// order of the fields.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct ForkRequest {
    /// Path of its cgroup, for messages. One descriptor: `cgroup.procs`, open for writing.
    pub cgroup: Option<String>,
    /// Whether it has a companion. One descriptor: the connection.
    pub companion: bool,
    /// Its API. One descriptor: the listening socket.
    pub api: Option<SocketRequest>,
    /// Its socket device. Two descriptors: the listening socket, and the companion's connection for
    /// the device.
    pub vsock: Option<SocketRequest>,
    /// CID of its guest; `None` for that of the checkpoint.
    pub cid: Option<u32>,
    /// Its disks. For each the image, then the same opened once more for reading unless it is
    /// read-only, then the base of an overlay.
    pub disks: Vec<DiskRequest>,
    /// Its network devices, with one descriptor each.
    pub nets: Vec<NetRequest>,
    /// Whether it can protect its memory against writes, for snapshots while it runs and for
    /// merging. One descriptor: /dev/userfaultfd.
    pub userfaultfd: bool,
    /// Merging by its monitor. One descriptor, if there is a broker: a connection with it.
    pub merge: Option<MergeRequest>,
    /// Whether it stays paused.
    pub paused: bool,
    /// Whether it may be run although a disk was written after the checkpoint.
    pub accept_changed_disks: bool,
}

/// Merging by the monitor of a new machine.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct MergeRequest {
    pub config: MergeConfig,
    /// Number of the host's node with memory, if there is only one.
    pub only_node: Option<u32>,
}

/// A listening socket with a name.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct SocketRequest {
    /// Its absolute path.
    pub path: PathBuf,
    /// Number of its name at the companion.
    pub kept: u32,
}

/// A disk, with what its description lacks.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct DiskRequest {
    pub config: DiskConfig,
    pub direct: Switch,
    pub limits: RateLimits,
    /// Whether its image is a copy from the checkpoint.
    pub is_copy: bool,
}

impl DiskRequest {
    pub(crate) fn of(config: &DiskConfig, is_copy: bool) -> Self {
        Self { config: config.clone(), direct: config.direct, limits: config.limits, is_copy }
    }

    pub(crate) fn into_config(self) -> DiskConfig {
        DiskConfig { direct: self.direct, limits: self.limits, ..self.config }
    }
}

/// A network device, with what its description lacks.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct NetRequest {
    pub config: NetConfig,
    pub receive_limits: RateLimits,
    pub transmit_limits: RateLimits,
}

impl NetRequest {
    pub(crate) fn of(config: &NetConfig) -> Self {
        let (receive_limits, transmit_limits) = (config.receive_limits, config.transmit_limits);
        Self { config: config.clone(), receive_limits, transmit_limits }
    }

    pub(crate) fn into_config(self) -> NetConfig {
        let Self { config, receive_limits, transmit_limits } = self;
        NetConfig { receive_limits, transmit_limits, ..config }
    }
}

/// How far the monitor of a new machine has come.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub(crate) enum Stage {
    /// Its process exists, and needs these files of /proc/PID, which follow in [`Files`].
    Born {
        /// Their names: some of [`OWN_FILES`].
        files: Vec<String>,
    },
    /// The machine runs, or is paused if that was asked for.
    Ready,
    /// There is no machine.
    Failed {
        /// Why not.
        error: String,
    },
}

/// Lets the machine run: its companion has given up its rights.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Start {}

/// The files of [`Stage::Born`], as descriptors in the same order.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Files {}
