//! The machine's socket device, and the name of its socket.

use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use rustix::fs::Mode;
use rustix::process::Resource;

use ebb_local_io::SocketFile;

use super::VmError;
use crate::api::metrics::VsockMetrics;
use crate::api::vm::VsockInfo;
use crate::config::VsockConfig;
use crate::devices::virtio::mmio::MmioTransport;
use crate::devices::virtio::vsock::{Vsock, most_connections};
use crate::isolation::{ConnectLink, Isolation, KeptName};

/// Length of the listener's queue.
pub(crate) const BACKLOG: i32 = 1024;

/// Sockets of a device that is about to be created.
pub(super) struct VsockSockets {
    pub config: VsockConfig,
    pub listener: std::os::fd::OwnedFd,
    pub link: ConnectLink,
    pub name: KeptName,
}

impl VsockSockets {
    /// Listens at the device's path, whose name the companion will remove.
    pub(super) fn open(config: &VsockConfig, isolation: &Isolation) -> Result<Self, VmError> {
        let (file, listener) = SocketFile::listen(&config.path, Mode::RUSR | Mode::WUSR, BACKLOG)?;
        let (name, link) = isolation.keep_vsock(file)?;
        Ok(Self { config: config.clone(), listener, link, name })
    }
}

/// The device of a machine, as its monitor sees it.
pub(super) struct VsockHandle {
    config: VsockConfig,
    device: Arc<Mutex<MmioTransport<Vsock>>>,
    most_connections: usize,
    _name: KeptName,
}

impl VsockHandle {
    /// Creates the device, which `add` connects.
    pub(super) fn build(
        sockets: VsockSockets,
        memory: ebb_guest_ram::GuestMemory,
        add: impl FnOnce(Vsock) -> Result<Arc<Mutex<MmioTransport<Vsock>>>, VmError>,
    ) -> Result<Self, VmError> {
        let VsockSockets { config, listener, link, name } = sockets;
        // The current limit is raised to that later.
        let open_files = rustix::process::getrlimit(Resource::Nofile).maximum;
        let most_connections = most_connections(open_files);
        let device = Vsock::new(config.cid, memory, listener, link, most_connections)
            .map_err(VmError::host("create the socket device"))?;
        Ok(Self { config, device: add(device)?, most_connections, _name: name })
    }

    /// Descriptors that it may have open.
    pub(super) fn open_files(&self) -> u64 {
        self.most_connections as u64
    }

    pub(super) fn info(&self) -> VsockInfo {
        let path: PathBuf = self.config.path.clone();
        let device = super::lock(&self.device);
        VsockInfo {
            cid: self.config.cid,
            path: path.display().to_string(),
            driver: device.device().has_driver(),
            connections: device.device().connections() as u64,
        }
    }

    pub(super) fn metrics(&self) -> VsockMetrics {
        let device = super::lock(&self.device);
        VsockMetrics {
            connections: device.device().connections() as u64,
            counters: device.device().counters(),
        }
    }
}
