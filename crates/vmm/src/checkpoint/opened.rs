//! What is opened for a forked machine.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use ebb_guest_ram::merge::only_node;
use ebb_local_io::SocketFile;
use ebb_page_merge::broker;
use rustix::fs::Mode;

use super::client::{ARRIVAL, ForkOptions};
use super::error::{CheckpointError, host};
use super::message::{DiskRequest, ForkRequest, MergeRequest, NetRequest, SocketRequest};
use crate::api::ApiSocket;
use crate::config::MergeBackend;
use crate::devices::virtio::block::{DiskFiles, DiskLock};
use crate::devices::virtio::net::open_all;
use crate::file::copy_data;
use crate::isolation::{Companion, CompanionError, KeptName};
use crate::vm::VSOCK_BACKLOG;

/// The device that makes userfaultfds for those who have it open (Linux 6.1,
/// Documentation/admin-guide/mm/userfaultfd.rst).
const USERFAULTFD: &str = "/dev/userfaultfd";

/// A disk's image that was made for a machine. Removed when it is dropped, unless it is kept.
pub(super) struct NewImage(PathBuf);

impl NewImage {
    /// Makes it with the content of `copy`.
    pub(super) fn create(path: &Path, copy: &File) -> io::Result<Self> {
        let mut options = File::options();
        let options = options.read(true).write(true).create_new(true).mode(0o600);
        let file = options.open(path)?;
        let new = Self(path.to_owned());
        let _done = copy_data(copy, &file, &|| false)?;
        Ok(new)
    }

    pub(super) fn keep(self) {
        std::mem::forget(self);
    }
}

impl Drop for NewImage {
    fn drop(&mut self) {
        // Its user may have removed it already.
        let _ = std::fs::remove_file(&self.0);
    }
}

/// What is opened for a machine. Dropped, its sockets and its new cgroup are removed.
pub(super) struct Opened {
    pub(super) request: ForkRequest,
    pub(super) descriptors: Vec<OwnedFd>,
    pub(super) names: Vec<KeptName>,
    pub(super) images: Vec<NewImage>,
    /// Dropped last: it ends when no connection is left.
    pub(super) companion: Option<Companion>,
}

impl Opened {
    pub(super) fn open(
        options: &ForkOptions,
        companion: Option<Companion>,
        images: Vec<Option<NewImage>>,
    ) -> Result<Self, CheckpointError> {
        let absolute =
            |path: &Path| std::path::absolute(path).map_err(host("find the working directory"));
        // In the order of the request's fields.
        let mut descriptors = Vec::new();
        let mut request = ForkRequest {
            paused: options.paused,
            accept_changed_disks: options.accept_changed_disks,
            ..ForkRequest::default()
        };
        let mut names = Vec::new();
        let of_companion = companion.as_ref().ok_or(CompanionError::None);
        if let Some(cgroup) = &options.cgroup {
            let companion = of_companion.as_ref().map_err(|_| CompanionError::None)?;
            descriptors.push(cgroup.open_for(companion)?);
            request.cgroup = Some(cgroup.path.display().to_string());
        }
        if let Some(companion) = &companion {
            let ended = || CompanionError::Gone(io::ErrorKind::BrokenPipe.into());
            descriptors.push(companion.link().ok_or_else(ended)?);
            request.companion = true;
        }
        if let Some(path) = &options.api {
            let companion = of_companion.as_ref().map_err(|_| CompanionError::None)?;
            let (listener, file) = ApiSocket::bind(path)?.into_parts();
            let name = companion.keep(file)?;
            request.api = Some(SocketRequest { path: absolute(path)?, kept: name.index() });
            names.push(name);
            descriptors.push(listener);
        }
        if let Some(vsock) = &options.vsock {
            let companion = of_companion.as_ref().map_err(|_| CompanionError::None)?;
            let mode = Mode::RUSR | Mode::WUSR;
            let (file, listener) = SocketFile::listen(&vsock.path, mode, VSOCK_BACKLOG)?;
            let (name, link) = companion.keep_vsock(file)?;
            let path = absolute(&vsock.path)?;
            request.vsock = Some(SocketRequest { path, kept: name.index() });
            request.cid = vsock.cid;
            names.push(name);
            descriptors.push(listener);
            descriptors.push(link.into_fd());
        }
        for (disk, image) in options.disks.iter().zip(&images) {
            let mut disk = disk.clone();
            disk.path = absolute(&disk.path)?;
            disk.overlay = disk.overlay.as_deref().map(absolute).transpose()?;
            let DiskFiles { top, writeback, base } = DiskFiles::open(&disk, DiskLock::Now)?;
            let files = [Some(top), writeback, base];
            descriptors.extend(files.into_iter().flatten().map(OwnedFd::from));
            request.disks.push(DiskRequest::of(&disk, image.is_some()));
        }
        for (net, open) in options.nets.iter().zip(open_all(&options.nets)?) {
            let descriptor = open.descriptor().ok_or(CheckpointError::User)?;
            let descriptor = descriptor.try_clone().map_err(host("duplicate a descriptor"))?;
            descriptors.push(descriptor);
            request.nets.push(NetRequest::of(net));
        }
        let merge = options.merge.as_ref();
        let merge = merge.filter(|merge| merge.backend == MergeBackend::Owner);
        match File::options().read(true).write(true).open(USERFAULTFD) {
            Ok(device) => {
                descriptors.push(device.into());
                request.userfaultfd = true;
            }
            Err(error) if merge.is_some() => return Err(CheckpointError::Userfaultfd(error)),
            // Then the machine stands still for snapshots.
            Err(_) => {}
        }
        if let Some(merge) = merge {
            let mut config = merge.clone();
            config.broker = config.broker.as_deref().map(absolute).transpose()?;
            if let Some((path, domain)) = config.member() {
                descriptors.push(broker::connect(path, domain.clone(), ARRIVAL)?);
                if let Some(companion) = &companion {
                    descriptors.push(companion.keep_broker(path, domain)?.into_fd());
                }
            }
            request.merge = Some(MergeRequest { config, only_node: only_node() });
        }
        let images = images.into_iter().flatten().collect();
        Ok(Self { request, descriptors, names, images, companion })
    }
}
