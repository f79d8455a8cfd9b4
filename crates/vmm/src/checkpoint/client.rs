//! The client's side: it opens what a forked machine gets, with its own rights.

use std::fs::File;
use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::Duration;

use ebb_local_io::SocketFile;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::{Mode, OFlags};
use rustix::net::sockopt::{Timeout, set_socket_passcred, set_socket_timeout};
use rustix::net::{
    AddressFamily, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, Shutdown, SocketAddrUnix,
    SocketFlags, SocketType,
};
use rustix::process::Pid;
use rustix::thread::{CapabilitySet, CapabilitySets};

use super::error::{CheckpointError, PATIENCE, host};
use super::message::{Answer, CheckpointInfo, Files, OWN_FILES, Request, Stage, Start};
use super::opened::{NewImage, Opened};
use crate::api::vm::{CheckpointReport, CheckpointTarget};
use crate::api::{Client, DisksInfo, MAX_DESCRIPTORS};
use crate::config::{
    DiskConfig, DiskFormat, MergeBackend, MergeConfig, NetConfig, Switch, VsockOption,
};
use crate::devices::virtio::block::DiskError;
use crate::isolation::{CgroupConfig, Companion, KeptName};
use crate::packet::{self, Packet};

/// How long a message may take that is known to come.
pub(super) const ARRIVAL: Duration = Duration::from_secs(1);
/// Name of a checkpoint that only its connection reaches.
const UNNAMED: &str = "unnamed";
/// Clients of a checkpoint that wait to be accepted.
const BACKLOG: i32 = 64;

/// Makes a checkpoint of the machine behind `client`, whose process listens at `path` from then on.
/// With `copies`, it has copies of the disks, as files without names in that directory.
///
/// # Errors
/// [`CheckpointError`]; there is no such socket then, and no process that listens on it.
pub fn keep(
    client: &Client,
    path: &Path,
    name: &str,
    copies: Option<&Path>,
) -> Result<CheckpointReport, CheckpointError> {
    let copies = places_of_copies(client, copies)?;
    let (file, listener) = SocketFile::listen(path, Mode::RUSR | Mode::WUSR, BACKLOG)?;
    let target = CheckpointTarget { name: name.to_owned() };
    let mut descriptors = vec![listener.as_fd()];
    descriptors.extend(copies.iter().map(AsFd::as_fd));
    let made = client.put_json_with("/vm/checkpoint", &target, &descriptors);
    let report = made.inspect_err(|_| {
        // The machine may have ended after its monitor had forked.
        let _ = rustix::net::shutdown(&listener, Shutdown::Both);
    })?;
    // The name stays, for other clients.
    drop(file.into_entry());
    Ok(report)
}

/// Files without names in `directory` for the images of the disks that the machine behind `client`
/// writes to. Where its disks are is not asked: a monitor may be in the hands of its guest, and
/// nothing is opened that only it names.
fn places_of_copies(
    client: &Client,
    directory: Option<&Path>,
) -> Result<Vec<File>, CheckpointError> {
    let Some(directory) = directory else { return Ok(Vec::new()) };
    let disks: DisksInfo = client.get("/disks")?;
    let written = disks.disks.iter().filter(|disk| !disk.readonly).take(MAX_DESCRIPTORS);
    let place = |_| {
        let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
        let open = rustix::fs::open(directory, flags, Mode::RUSR | Mode::WUSR);
        let failed = |source| CheckpointError::Copy { directory: directory.to_owned(), source };
        open.map(File::from).map_err(|errno| failed(errno.into()))
    };
    written.map(place).collect()
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

    /// As [`keep`], a checkpoint that ends with the connection.
    ///
    /// # Errors
    /// [`CheckpointError`]
    pub fn of_running(
        client: &Client,
        copies: Option<&Path>,
    ) -> Result<(Self, CheckpointReport), CheckpointError> {
        let copies = places_of_copies(client, copies)?;
        let (ours, theirs) = packet::pair().map_err(host("create a socket pair"))?;
        let target = CheckpointTarget { name: UNNAMED.to_owned() };
        let mut descriptors = vec![theirs.as_fd()];
        descriptors.extend(copies.iter().map(AsFd::as_fd));
        let report = client.put_json_with("/vm/checkpoint", &target, &descriptors)?;
        Ok((Self::over(ours).map_err(host("set up a socket"))?, report))
    }

    fn over(socket: OwnedFd) -> io::Result<Self> {
        set_socket_passcred(&socket, true)?;
        for direction in [Timeout::Recv, Timeout::Send] {
            let patience = Duration::from_secs(PATIENCE.tv_sec.unsigned_abs());
            set_socket_timeout(&socket, direction, Some(patience))?;
        }
        Ok(Self { socket })
    }

    /// Describes it, with the number of its process.
    ///
    /// # Errors
    /// [`CheckpointError::Gone`]
    pub fn info(&self) -> Result<(CheckpointInfo, Option<Pid>), CheckpointError> {
        let Packet { message, sender, .. } = self.call(&Request::Info, &[])?;
        match message {
            Answer::Info(info) => Ok((info, sender)),
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

    /// For each disk the format and the file of its image's copy, if there is one.
    fn disk_copies(&self) -> Result<Vec<Option<(DiskFormat, File)>>, CheckpointError> {
        let Packet { message, descriptors, .. } = self.call(&Request::Disks, &[])?;
        let wrong = || CheckpointError::Gone(io::ErrorKind::InvalidData.into());
        let Answer::Disks { formats } = message else { return Err(wrong()) };
        let mut files = descriptors.into_iter().map(File::from);
        let mut file_of = |format: DiskFormat| {
            // The process may be in the hands of a guest: nothing else is read from.
            let is_file = |file: &File| file.metadata().is_ok_and(|file| file.is_file());
            Ok((format, files.next().filter(is_file).ok_or_else(wrong)?))
        };
        formats.into_iter().map(|format| format.map(&mut file_of).transpose()).collect()
    }

    fn call(
        &self,
        request: &Request,
        descriptors: &[BorrowedFd<'_>],
    ) -> Result<Packet<Answer>, CheckpointError> {
        packet::send(&self.socket, request, descriptors).map_err(CheckpointError::Gone)?;
        let packet = packet::receive_packet(&self.socket).map_err(|error| match error.kind() {
            io::ErrorKind::WouldBlock => CheckpointError::Silent,
            _ => CheckpointError::Gone(error),
        })?;
        let packet =
            packet.ok_or_else(|| CheckpointError::Gone(io::ErrorKind::UnexpectedEof.into()))?;
        match packet.message {
            Answer::Refused { error } => Err(CheckpointError::Refused(error)),
            _ => Ok(packet),
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
    /// Its disks, in order. Those that are written to and do not exist are made of the checkpoint's
    /// copies.
    pub disks: Vec<DiskConfig>,
    /// Its network devices, in order.
    pub nets: Vec<NetConfig>,
    /// How equal pages of its memory are merged; `None` for as those of the checkpoint.
    pub merge: Option<MergeConfig>,
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

/// Whether the disk is written to, and its image does not exist.
fn is_missing(disk: &DiskConfig) -> bool {
    !disk.readonly.is_on() && !disk.top().exists()
}

impl ForkOptions {
    /// A directory for copies of the disks, if one is to be made of the checkpoint's: that of the
    /// new one, since files of one file system may share their blocks.
    pub fn place_of_copies(&self) -> Option<PathBuf> {
        let missing = self.disks.iter().find(|disk| is_missing(disk))?;
        let parent = missing.top().parent().filter(|parent| !parent.as_os_str().is_empty());
        Some(parent.unwrap_or(Path::new(".")).to_owned())
    }

    /// Whether something must be removed at the end of the machine, or connected to.
    fn needs_companion(&self) -> bool {
        self.api.is_some() || self.vsock.is_some() || self.cgroup.is_some()
    }

    /// Whether a machine of this checkpoint can have these devices, and its pages merged.
    ///
    /// # Errors
    /// [`CheckpointError::Count`], [`CheckpointError::MergedByKernel`],
    /// [`CheckpointError::NotMergedByKernel`]
    pub fn check(&self, info: &CheckpointInfo) -> Result<(), CheckpointError> {
        let by_kernel = MergeConfig { backend: MergeBackend::Kernel, ..MergeConfig::default() };
        match &self.merge {
            Some(merge) if info.merge == MergeBackend::Kernel && *merge != by_kernel => {
                return Err(CheckpointError::MergedByKernel);
            }
            Some(merge)
                if merge.backend == MergeBackend::Kernel && info.merge != MergeBackend::Kernel =>
            {
                return Err(CheckpointError::NotMergedByKernel);
            }
            _ => {}
        }
        let given = [
            ("disks", info.disks, "--disk path=FILE", self.disks.len()),
            ("network devices", info.macs.len(), "--net tap=NAME", self.nets.len()),
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

/// Machines that are being made, several at a time: each takes its time mostly to wait. Those that
/// were not [waited for](Self::wait) when this is dropped lose their sockets.
pub struct Forks<'a> {
    held: &'a Held,
    /// Splits off the companion of each machine.
    companion: Option<Companion>,
    /// Of the disks, once one was needed.
    copies: Option<Vec<Option<(DiskFormat, File)>>>,
    coming: Vec<Coming>,
}

/// A machine that does not run yet.
struct Coming {
    number: usize,
    opened: Opened,
    /// The connection with its monitor.
    status: OwnedFd,
    /// Whether its monitor has introduced itself.
    is_born: bool,
}

impl<'a> Forks<'a> {
    /// Machines of a checkpoint.
    pub fn of(held: &'a Held) -> Self {
        Self { held, companion: None, copies: None, coming: Vec::new() }
    }

    /// How many do not run yet.
    pub fn coming(&self) -> usize {
        self.coming.len()
    }

    /// Asks for a machine, whose monitor writes its log to `log`. `number` is returned with it.
    ///
    /// # Errors
    /// [`CheckpointError`]; nothing of the machine is left then.
    pub fn begin(
        &mut self,
        number: usize,
        options: &ForkOptions,
        log: BorrowedFd<'_>,
    ) -> Result<(), CheckpointError> {
        let companion = options.needs_companion().then(|| self.split_companion(log)).transpose()?;
        let images = self.make_disks(&options.disks)?;
        let mut opened = Opened::open(options, companion, images)?;
        let (status, theirs) = packet::pair().map_err(host("create a socket pair"))?;
        set_socket_passcred(&status, true).map_err(host("set up a socket"))?;
        for direction in [Timeout::Recv, Timeout::Send] {
            set_socket_timeout(&status, direction, Some(ARRIVAL))
                .map_err(host("set up a socket"))?;
        }
        let mut descriptors = vec![theirs.as_fd(), log];
        descriptors.extend(opened.descriptors.iter().map(AsFd::as_fd));
        let request = Request::Fork(Box::new(std::mem::take(&mut opened.request)));
        self.held.call(&request, &descriptors)?;
        opened.descriptors.clear();
        self.coming.push(Coming { number, opened, status, is_born: false });
        Ok(())
    }

    /// Makes the images that do not exist: for each disk one or none.
    fn make_disks(
        &mut self,
        disks: &[DiskConfig],
    ) -> Result<Vec<Option<NewImage>>, CheckpointError> {
        disks.iter().enumerate().map(|(index, disk)| self.make_disk(index, disk)).collect()
    }

    fn make_disk(
        &mut self,
        index: usize,
        disk: &DiskConfig,
    ) -> Result<Option<NewImage>, CheckpointError> {
        if !is_missing(disk) {
            return Ok(None);
        }
        let path = disk.top();
        let copies = match &mut self.copies {
            Some(copies) => copies,
            copies => copies.insert(self.held.disk_copies()?),
        };
        let Some(Some((format, copy))) = copies.get(index) else {
            return Err(CheckpointError::NoCopy { path: path.to_owned() });
        };
        let wanted = if disk.overlay.is_some() { DiskFormat::Qcow2 } else { disk.format };
        if *format != wanted {
            let (found, remedy) = match format {
                DiskFormat::Raw => ("raw", "path=FILE"),
                DiskFormat::Qcow2 => ("qcow2", "path=BASE,overlay=FILE or path=FILE,format=qcow2"),
            };
            return Err(CheckpointError::CopyFormat { path: path.to_owned(), found, remedy });
        }
        let image = NewImage::create(path, copy);
        let failed = |source| DiskError::Open { path: path.to_owned(), source };
        Ok(Some(image.map_err(failed)?))
    }

    fn split_companion(&mut self, log: BorrowedFd<'_>) -> Result<Companion, CheckpointError> {
        let first = match &self.companion {
            Some(first) => first,
            None => self.companion.insert(Companion::start()?),
        };
        Ok(first.split(log)?)
    }

    /// Waits until one of them runs, or has failed; nothing of it is left then. `None` if there are
    /// none.
    pub fn wait(&mut self) -> Option<(usize, Result<Forked, CheckpointError>)> {
        loop {
            let index = self.ready()?;
            let result = match self.coming[index].go_on() {
                Ok(None) => continue,
                Ok(Some(pid)) => Ok(Forked { pid }),
                Err(error) => Err(error),
            };
            let Coming { number, opened, .. } = self.coming.remove(index);
            if result.is_ok() {
                // From here on its companion serves it alone.
                opened.names.into_iter().for_each(KeptName::leave);
                opened.images.into_iter().for_each(NewImage::keep);
            }
            return Some((number, result));
        }
    }

    /// One whose monitor has said something, or else the one that has been silent for longest.
    fn ready(&self) -> Option<usize> {
        let mut fds: Vec<_> =
            self.coming.iter().map(|one| PollFd::new(&one.status, PollFlags::IN)).collect();
        if fds.is_empty() {
            return None;
        }
        // After an error, its message is waited for.
        let _ = poll(&mut fds, Some(&PATIENCE));
        Some(fds.iter().position(|fd| !fd.revents().is_empty()).unwrap_or(0))
    }
}

impl Coming {
    /// Takes its monitor's next message, and helps it. Returns its process when it runs.
    fn go_on(&mut self) -> Result<Option<Pid>, CheckpointError> {
        let failed = |problem: &str| CheckpointError::Failed(problem.to_owned());
        let packet = packet::receive_packet::<Stage>(&self.status).map_err(|error| {
            CheckpointError::Failed(format!("its monitor does not answer: {error}"))
        })?;
        let packet = packet.ok_or_else(|| failed("its monitor has ended"))?;
        let pid = packet.sender.ok_or_else(|| failed("its process is unknown"))?;
        match packet.message {
            Stage::Born { .. } if self.is_born => Err(failed("its monitor is confused")),
            Stage::Born { files } => {
                self.is_born = true;
                let files = own_files(pid, &files)?;
                let files: Vec<_> = files.iter().map(AsFd::as_fd).collect();
                let answer = host("answer the monitor");
                packet::send(&self.status, &Files {}, &files).map_err(answer)?;
                // It gives up its rights while the machine is built.
                if let Some(companion) = &self.opened.companion {
                    companion.begin(Switch::On)?;
                }
                packet::send(&self.status, &Start {}, &[]).map_err(host("answer the monitor"))?;
                Ok(None)
            }
            Stage::Ready => Ok(Some(pid)),
            Stage::Failed { error } => Err(CheckpointError::Failed(error)),
        }
    }
}

/// Opens files of /proc/PID for the process.
fn own_files(pid: Pid, names: &[String]) -> Result<Vec<File>, CheckpointError> {
    // The monitor may be in the hands of its guest.
    if names.len() > OWN_FILES.len() || names.iter().any(|name| !OWN_FILES.contains(&&**name)) {
        return Err(CheckpointError::Failed("its monitor asks for other files".to_owned()));
    }
    // Not with CAP_SYS_ADMIN: for a file that was opened with it, the kernel shows physical
    // addresses (Linux fs/proc/task_mmu.c, `pagemap_read`).
    let open = || -> io::Result<Vec<File>> {
        let sets = rustix::thread::capabilities(None)?;
        let effective = sets.effective - CapabilitySet::SYS_ADMIN;
        rustix::thread::set_capabilities(None, CapabilitySets { effective, ..sets })?;
        let folder = PathBuf::from(format!("/proc/{}", pid.as_raw_nonzero()));
        let files = names.iter().map(|name| File::open(folder.join(name))).collect();
        rustix::thread::set_capabilities(None, sets)?;
        files
    };
    open().map_err(host("open files of the new monitor's process in /proc"))
}
