//! Sources of a machine, which exist before it is [built](super::build): its origin, which decides
//! where kernel, memory and state come from ([`Origin`]), and what its devices use of the host
//! ([`Resources`]).

use std::fs::File;
use std::ops::Range;
use std::sync::Arc;

use ebb_guest_ram::{GuestRam, Populate, RegionSpec, SharedRam};
use ebb_kvm_clock::Kilohertz;
use vm_memory::GuestAddress;

use super::VmError;
use super::control::ProcessMemory;
use super::fork::Forkable;
use super::merge::Merging;
use super::vsock::VsockSockets;
use crate::boot::BootImage;
use crate::config::{ConfigError, RebootAction, VmConfig};
use crate::cpu::state::MsrList;
use crate::devices::virtio::block::{DiskFiles, DiskLock};
use crate::devices::virtio::net::OpenNet;
use crate::isolation::{ConnectLink, Isolation};
use crate::layout;
use crate::snapshot::file::RAM_OFFSET_BYTES;
use crate::snapshot::processor::Processor;
use crate::snapshot::working_set::ReadAhead;
use crate::snapshot::{MachineState, SnapshotFile};

/// Origin of a machine.
pub(super) enum Origin {
    /// Boots its kernel.
    Kernel,
    /// Continues from a snapshot.
    Snapshot(Box<SnapshotFile>),
    /// Another monitor will send its memory and state.
    Migration(Box<Arriving>),
    /// Continues in a process that was forked from its monitor's.
    Fork(Box<Inherited>),
}

/// What a forked process has of the machine already.
pub(super) struct Inherited {
    /// What it needs to be forked again.
    pub forkable: Option<Forkable>,
    /// Its memory.
    pub ram: Arc<GuestRam>,
    /// Its state.
    pub state: MachineState,
    /// Its kernel, for reboots.
    pub image: Option<BootImage>,
    /// See [`ProcessMemory`].
    pub process_memory: ProcessMemory,
    /// Merging of its pages.
    pub merging: Option<Merging>,
    /// The registers of its vCPUs.
    pub msrs: Arc<MsrList>,
    /// /dev/userfaultfd, if its client could open it.
    pub userfaultfd: Option<File>,
}

/// Facts about a machine sent by another monitor that must be known before it is built.
pub(super) struct Arriving {
    /// The processor that the guest was given.
    pub processor: Processor,
    /// Frequency of the guest's time stamp counters.
    pub tsc_khz: Kilohertz,
    /// Its memory, if that is shared with the source.
    pub shared: Option<SharedRam>,
}

impl Origin {
    /// When its disks are locked: those of another monitor are not free yet.
    pub(super) fn disk_lock(&self) -> DiskLock {
        if matches!(self, Self::Migration(_)) { DiskLock::Later } else { DiskLock::Now }
    }

    /// The snapshot that it continues from.
    pub(super) fn snapshot(&self) -> Option<&SnapshotFile> {
        match self {
            Self::Snapshot(snapshot) => Some(snapshot),
            _ => None,
        }
    }

    /// What is to be read ahead of its guest.
    pub(super) fn take_read_ahead(&mut self) -> Option<ReadAhead> {
        match self {
            Self::Snapshot(snapshot) => snapshot.read_ahead.take(),
            _ => None,
        }
    }

    fn is_kernel(&self) -> bool {
        matches!(self, Self::Kernel)
    }

    /// The processor that the guest was given, for a continued machine.
    pub(super) fn processor(&self) -> Option<&Processor> {
        match self {
            Self::Kernel => None,
            Self::Fork(inherited) => Some(&inherited.state.processor),
            Self::Snapshot(snapshot) => Some(&snapshot.state.processor),
            Self::Migration(arriving) => Some(&arriving.processor),
        }
    }

    /// The frequency of the guest's time stamp counters, for a continued machine.
    pub(super) fn tsc_khz(&self) -> Option<Kilohertz> {
        match self {
            Self::Kernel => None,
            Self::Fork(inherited) => Some(inherited.state.clock.tsc_khz),
            Self::Snapshot(snapshot) => Some(snapshot.state.clock.tsc_khz),
            Self::Migration(arriving) => Some(arriving.tsc_khz),
        }
    }
}

/// What the devices of a machine use of the host, opened before it is built.
pub(super) struct Resources {
    /// Files of the disks.
    pub disks: Vec<DiskFiles>,
    /// Backends of the network devices.
    pub nets: Vec<OpenNet>,
    /// Sockets of the socket device.
    pub vsock: Option<VsockSockets>,
    /// What connects with the merge broker again.
    pub broker: Option<ConnectLink>,
}

impl Resources {
    /// Opens them, apart from `nets`, which were opened in the host's network namespace. Disks are
    /// locked now or later.
    pub(super) fn open(
        config: &VmConfig,
        nets: Vec<OpenNet>,
        isolation: &Isolation,
        when: DiskLock,
    ) -> Result<Self, VmError> {
        let disks = config.disks.iter().map(|disk| DiskFiles::open(disk, when));
        let disks = disks.collect::<Result<_, _>>()?;
        let vsock = config.vsock.as_ref();
        let vsock = vsock.map(|vsock| VsockSockets::open(vsock, isolation)).transpose()?;
        let broker = config.memory.merge.member();
        let broker =
            broker.map(|(path, domain)| isolation.keep_broker(path, domain)).transpose()?;
        Ok(Self { disks, nets, vsock, broker: broker.flatten() })
    }
}

/// The files that the guest boots from. A continued machine needs them for a reboot only.
pub(super) fn open_image(
    config: &VmConfig,
    origin: &mut Origin,
) -> Result<Option<BootImage>, VmError> {
    if let Origin::Fork(inherited) = origin {
        return Ok(inherited.image.take());
    }
    let open = || {
        let boot = config.boot.as_ref().ok_or_else(|| {
            ConfigError::new(
                "--kernel",
                "the guest has no kernel to boot",
                "give a bzImage or an ELF vmlinux",
            )
        })?;
        Ok(BootImage::open(&boot.kernel, boot.initrd.as_deref(), &config.cmdline)?)
    };
    if origin.is_kernel() {
        return open().map(Some);
    }
    match config.on_reboot {
        RebootAction::Exit => Ok(None),
        RebootAction::Reset => open().map(Some).map_err(|error| match error {
            VmError::Boot(error) => VmError::RebootImage(error),
            error => error,
        }),
    }
}

/// Guest memory: new, a snapshot's, or what another process has left.
pub(super) fn guest_ram(config: &VmConfig, origin: &mut Origin) -> Result<Arc<GuestRam>, VmError> {
    if let Origin::Fork(inherited) = origin {
        return Ok(inherited.ram.clone());
    }
    let (regions, memory) = (regions(config), &config.memory);
    if let Origin::Migration(arriving) = origin
        && let Some(shared) = arriving.shared.take()
    {
        return Ok(Arc::new(GuestRam::adopt(&regions, memory.huge_pages, shared)?));
    }
    let Origin::Snapshot(snapshot) = origin else {
        // Memory that is wanted in advance is allocated when signals are answered.
        if memory.populate == Populate::Prealloc {
            GuestRam::check_populate(&regions, memory.backing)?;
        }
        let ram = GuestRam::new(&regions, memory.backing, memory.huge_pages, Populate::Lazy)?;
        return Ok(Arc::new(ram));
    };
    let file =
        snapshot.file.try_clone().map_err(VmError::host("duplicate the snapshot's descriptor"))?;
    let (offset_bytes, image) = (RAM_OFFSET_BYTES, &snapshot.ram);
    Ok(Arc::new(GuestRam::restore(&regions, memory.huge_pages, file, offset_bytes, image)?))
}

/// Regions of guest memory: pieces of nodes, or all of it on both sides of the hole.
fn regions(config: &VmConfig) -> Vec<RegionSpec> {
    let spec = |range: Range<u64>, host_node| RegionSpec {
        start: GuestAddress(range.start),
        size_bytes: range.end - range.start,
        host_node,
    };
    if config.numa.is_empty() {
        return layout::ram_ranges(config.memory.size.bytes())
            .into_iter()
            .map(|range| spec(range, None))
            .collect();
    }
    let sizes: Vec<u64> = config.numa.iter().map(|node| node.size.bytes()).collect();
    layout::node_ranges(&sizes)
        .into_iter()
        .map(|(node, range)| spec(range, config.numa[node].host_node))
        .collect()
}
