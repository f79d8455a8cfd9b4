//! The client's side: it opens what a forked machine gets, with its own rights.

use std::fs::File;
use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::Duration;

use ebb_local_io::{ListenError, SocketFile};
use rustix::fs::Mode;
use rustix::net::sockopt::{Timeout, set_socket_passcred, set_socket_timeout};
use rustix::net::{
    AddressFamily, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix,
    SocketFlags, SocketType,
};
use rustix::process::Pid;
use rustix::thread::{CapabilitySet, CapabilitySets};
use thiserror::Error;

use super::message::{
    Answer, CheckpointInfo, DiskRequest, Files, ForkRequest, NetRequest, OWN_FILES, Request,
    SocketRequest, Stage, Start,
};
use crate::api::vm::{CheckpointReport, CheckpointTarget};
use crate::api::{ApiError, ApiSocket, Client, ClientError};
use crate::config::{DiskConfig, NetConfig, Switch, VsockOption};
use crate::devices::virtio::block::{DiskError, DiskFiles, DiskLock};
use crate::devices::virtio::net::{NetError, open_all};
use crate::isolation::{CgroupConfig, Companion, CompanionError, IsolationError, KeptName};
use crate::packet;
use crate::vm::VSOCK_BACKLOG;

/// How long a checkpoint or a new machine may take for an answer.
const PATIENCE: Duration = Duration::from_secs(30);
/// Name of a checkpoint that only its connection reaches.
const UNNAMED: &str = "unnamed";
/// Clients of a checkpoint that wait to be accepted.
const BACKLOG: i32 = 64;

/// Why there is no checkpoint, or no machine from it.
#[derive(Debug, Error)]
pub enum CheckpointError {
    /// The monitor has not made it.
    #[error(transparent)]
    Monitor(#[from] ClientError),
    /// Its socket cannot be created.
    #[error(transparent)]
    Listen(#[from] ListenError),
    /// There is none of this name.
    #[error("there is no checkpoint at {path:?}: {source}; `ebb checkpoints` lists them")]
    Connect {
        /// Path of its socket.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// Its process does not answer.
    #[error("the checkpoint does not answer: {0}")]
    Gone(io::Error),
    /// It refused.
    #[error("{0}")]
    Refused(String),
    /// A disk cannot be used.
    #[error(transparent)]
    Disk(#[from] DiskError),
    /// A network interface cannot be used.
    #[error(transparent)]
    Net(#[from] NetError),
    /// The API's socket cannot be created.
    #[error(transparent)]
    Api(#[from] ApiError),
    /// There is no companion.
    #[error(transparent)]
    Companion(#[from] CompanionError),
    /// The cgroup cannot be used.
    #[error(transparent)]
    Isolation(#[from] IsolationError),
    /// The options are for another machine.
    #[error(
        "the machine has {expected} {what}, {option} was given {given} times; give one for each"
    )]
    Count {
        /// The devices.
        what: &'static str,
        /// How many the machine has.
        expected: usize,
        /// The option.
        option: &'static str,
        /// How often it was given.
        given: usize,
    },
    /// passt cannot be passed on.
    #[error("--net user cannot be used for forked machines yet; give tap= or fd=")]
    User,
    /// The host refused something.
    #[error("cannot {action}: {source}")]
    Host {
        /// The operation.
        action: &'static str,
        /// The system's error.
        source: io::Error,
    },
    /// The new machine could not be built or started.
    #[error("no machine was made: {0}")]
    Failed(String),
}

fn host<E: Into<io::Error>>(action: &'static str) -> impl FnOnce(E) -> CheckpointError {
    move |source| CheckpointError::Host { action, source: source.into() }
}

/// Makes a checkpoint of the machine behind `client`, whose process listens at `path` from then on.
///
/// # Errors
/// [`CheckpointError`]; there is no such socket then.
pub fn keep(client: &Client, path: &Path, name: &str) -> Result<CheckpointReport, CheckpointError> {
    let (file, listener) = SocketFile::listen(path, Mode::RUSR | Mode::WUSR, BACKLOG)?;
    let target = CheckpointTarget { name: name.to_owned() };
    let report = client.put_json_with("/vm/checkpoint", &target, &[listener.as_fd()])?;
    // The name stays, for other clients.
    drop(file.into_entry());
    Ok(report)
}

/// A connection with a checkpoint.
#[derive(Debug)]
pub struct Held {
    socket: OwnedFd,
}

impl Held {
    /// Connects with the checkpoint whose process listens at `path`.
    ///
    /// # Errors
    /// [`CheckpointError::Connect`]
    pub fn connect(path: &Path) -> Result<Self, CheckpointError> {
        let failed = |source: io::Error| CheckpointError::Connect { path: path.to_owned(), source };
        let connect = || -> io::Result<Self> {
            let flags = SocketFlags::CLOEXEC;
            let stream =
                rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
            rustix::net::connect(&stream, &SocketAddrUnix::new(path)?)?;
            let (ours, theirs) = packet::pair()?;
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
            let mut ancillary = SendAncillaryBuffer::new(&mut space);
            let rights = [theirs.as_fd()];
            ancillary.push(SendAncillaryMessage::ScmRights(&rights));
            let byte = [IoSlice::new(&[0])];
            rustix::net::sendmsg(&stream, &byte, &mut ancillary, SendFlags::NOSIGNAL)?;
            Self::over(ours)
        };
        connect().map_err(failed)
    }

    /// Makes a checkpoint of the machine behind `client` that ends with the connection.
    ///
    /// # Errors
    /// [`CheckpointError`]
    pub fn of_running(client: &Client) -> Result<(Self, CheckpointReport), CheckpointError> {
        let (ours, theirs) = packet::pair().map_err(host("create a socket pair"))?;
        let target = CheckpointTarget { name: UNNAMED.to_owned() };
        let report = client.put_json_with("/vm/checkpoint", &target, &[theirs.as_fd()])?;
        Ok((Self::over(ours).map_err(host("set up a socket"))?, report))
    }

    fn over(socket: OwnedFd) -> io::Result<Self> {
        set_socket_passcred(&socket, true)?;
        set_socket_timeout(&socket, Timeout::Recv, Some(PATIENCE))?;
        set_socket_timeout(&socket, Timeout::Send, Some(PATIENCE))?;
        Ok(Self { socket })
    }

    /// Describes it, with the number of its process.
    ///
    /// # Errors
    /// [`CheckpointError::Gone`]
    pub fn info(&self) -> Result<(CheckpointInfo, Option<Pid>), CheckpointError> {
        match self.call(&Request::Info, &[])? {
            (Answer::Info(info), sender) => Ok((info, sender)),
            _ => Err(CheckpointError::Gone(io::ErrorKind::InvalidData.into())),
        }
    }

    /// Ends its process; machines that were forked from it go on.
    ///
    /// # Errors
    /// [`CheckpointError::Gone`]
    pub fn end(&self) -> Result<(), CheckpointError> {
        self.call(&Request::End, &[]).map(drop)
    }

    fn call(
        &self,
        request: &Request,
        descriptors: &[BorrowedFd<'_>],
    ) -> Result<(Answer, Option<Pid>), CheckpointError> {
        packet::send(&self.socket, request, descriptors).map_err(CheckpointError::Gone)?;
        let packet = packet::receive_packet(&self.socket).map_err(CheckpointError::Gone)?;
        let packet =
            packet.ok_or_else(|| CheckpointError::Gone(io::ErrorKind::UnexpectedEof.into()))?;
        match packet.message {
            Answer::Refused { error } => Err(CheckpointError::Refused(error)),
            answer => Ok((answer, packet.sender)),
        }
    }
}

/// What a forked machine has for itself.
#[derive(Debug, Clone, Default)]
pub struct ForkOptions {
    /// Path of its API's socket.
    pub api: Option<PathBuf>,
    /// Its socket device, if the machine has one.
    pub vsock: Option<VsockOption>,
    /// Its disks, in order.
    pub disks: Vec<DiskConfig>,
    /// Its network devices, in order.
    pub nets: Vec<NetConfig>,
    /// Its cgroup.
    pub cgroup: Option<CgroupConfig>,
    /// Whether it stays paused.
    pub paused: bool,
    /// Whether it is run although a disk was written after the checkpoint.
    pub accept_changed_disks: bool,
}

/// A machine that was forked.
#[derive(Debug, Clone, Copy)]
pub struct Forked {
    /// Its monitor's process.
    pub pid: Pid,
}

/// What is opened for a machine. Dropped, its sockets and its new cgroup are removed.
struct Opened {
    request: ForkRequest,
    descriptors: Vec<OwnedFd>,
    names: Vec<KeptName>,
    /// Dropped last: it ends when no connection is left.
    companion: Option<Companion>,
}

impl ForkOptions {
    /// Whether a machine of this checkpoint has these devices.
    ///
    /// # Errors
    /// [`CheckpointError::Count`]
    pub fn check(&self, info: &CheckpointInfo) -> Result<(), CheckpointError> {
        let given = [
            ("disks", info.disks, "--disk path=FILE", self.disks.len()),
            ("network devices", info.nets, "--net tap=NAME", self.nets.len()),
            (
                "socket devices",
                usize::from(info.vsock),
                "--vsock path=PATH",
                usize::from(self.vsock.is_some()),
            ),
        ];
        for (what, expected, option, given) in given {
            if given != expected {
                return Err(CheckpointError::Count { what, expected, option, given });
            }
        }
        Ok(())
    }
}

impl Held {
    /// Makes a machine, whose monitor writes its log to `log`.
    ///
    /// # Errors
    /// [`CheckpointError`]; nothing of the machine is left then.
    pub fn fork(
        &self,
        options: &ForkOptions,
        log: BorrowedFd<'_>,
    ) -> Result<Forked, CheckpointError> {
        let mut opened = Opened::open(options, log)?;
        let (status, theirs) = packet::pair().map_err(host("create a socket pair"))?;
        set_socket_passcred(&status, true).map_err(host("set up a socket"))?;
        for direction in [Timeout::Recv, Timeout::Send] {
            set_socket_timeout(&status, direction, Some(PATIENCE))
                .map_err(host("set up a socket"))?;
        }
        let mut descriptors = vec![theirs.as_fd(), log];
        descriptors.extend(opened.descriptors.iter().map(AsFd::as_fd));
        let request = Request::Fork(Box::new(std::mem::take(&mut opened.request)));
        self.call(&request, &descriptors)?;
        drop(descriptors);
        drop(theirs);
        let pid = follow(&status, opened.companion.as_ref())?;
        // From here on its companion serves it alone.
        opened.names.into_iter().for_each(KeptName::leave);
        Ok(Forked { pid })
    }
}

/// Helps a new monitor until its machine runs.
fn follow(status: &OwnedFd, companion: Option<&Companion>) -> Result<Pid, CheckpointError> {
    let failed = |problem: &str| CheckpointError::Failed(problem.to_owned());
    let mut is_born = false;
    loop {
        let packet = packet::receive_packet::<Stage>(status).map_err(|error| {
            CheckpointError::Failed(format!("its monitor does not answer: {error}"))
        })?;
        let packet = packet.ok_or_else(|| failed("its monitor has ended"))?;
        let pid = packet.sender.ok_or_else(|| failed("its process is unknown"))?;
        match packet.message {
            Stage::Born { .. } if is_born => return Err(failed("its monitor is confused")),
            Stage::Born { files } => {
                is_born = true;
                let files = own_files(pid, &files)?;
                let files: Vec<_> = files.iter().map(AsFd::as_fd).collect();
                packet::send(status, &Files {}, &files).map_err(host("answer the monitor"))?;
                // It starts while the machine is built.
                companion.map_or(Ok(()), |companion| companion.begin(Switch::On))?;
                packet::send(status, &Start {}, &[]).map_err(host("answer the monitor"))?;
            }
            Stage::Ready => return Ok(pid),
            Stage::Failed { error } => return Err(CheckpointError::Failed(error)),
        }
    }
}

/// Opens files of /proc/PID for the process.
fn own_files(pid: Pid, names: &[String]) -> Result<Vec<File>, CheckpointError> {
    // The monitor may be in the hands of its guest.
    if names.len() > OWN_FILES.len() || names.iter().any(|name| !OWN_FILES.contains(&&**name)) {
        return Err(CheckpointError::Failed("its monitor asks for other files".to_owned()));
    }
    let names = names.to_vec();
    let open = move || -> io::Result<Vec<File>> {
        // Not with CAP_SYS_ADMIN: for a file that was opened with it, the kernel shows physical
        // addresses (Linux fs/proc/task_mmu.c, `pagemap_read`).
        let sets = rustix::thread::capabilities(None)?;
        let effective = sets.effective - CapabilitySet::SYS_ADMIN;
        rustix::thread::set_capabilities(None, CapabilitySets { effective, ..sets })?;
        let folder = PathBuf::from(format!("/proc/{}", pid.as_raw_nonzero()));
        names.iter().map(|name| File::open(folder.join(name))).collect()
    };
    // On a thread of its own, which loses the capabilities.
    let opened = std::thread::spawn(open).join();
    opened
        .unwrap_or_else(|_| Err(io::Error::other("a thread has panicked")))
        .map_err(host("open files of the new monitor's process in /proc"))
}

impl Opened {
    fn open(options: &ForkOptions, log: BorrowedFd<'_>) -> Result<Self, CheckpointError> {
        let absolute =
            |path: &Path| std::path::absolute(path).map_err(host("find the working directory"));
        // In the order of the request's fields.
        let mut descriptors = Vec::new();
        let mut request = ForkRequest {
            paused: options.paused,
            accept_changed_disks: options.accept_changed_disks,
            ..ForkRequest::default()
        };
        let is_needed =
            options.api.is_some() || options.vsock.is_some() || options.cgroup.is_some();
        let log = log.try_clone_to_owned().map_err(host("duplicate a descriptor"))?;
        let companion = is_needed.then(|| Companion::start_with(log)).transpose()?;
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
        for disk in &options.disks {
            let mut disk = disk.clone();
            disk.path = absolute(&disk.path)?;
            disk.overlay = disk.overlay.as_deref().map(absolute).transpose()?;
            let DiskFiles { top, writeback, base } = DiskFiles::open(&disk, DiskLock::Now)?;
            let files = [Some(top), writeback, base];
            descriptors.extend(files.into_iter().flatten().map(OwnedFd::from));
            request.disks.push(DiskRequest::of(&disk));
        }
        for (net, open) in options.nets.iter().zip(open_all(&options.nets)?) {
            let descriptor = open.descriptor().ok_or(CheckpointError::User)?;
            let descriptor = descriptor.try_clone().map_err(host("duplicate a descriptor"))?;
            descriptors.push(descriptor);
            request.nets.push(NetRequest::of(net));
        }
        Ok(Self { request, descriptors, names, companion })
    }
}
